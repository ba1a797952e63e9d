"""A staged folder is loaded in an isolated process; each error is named in one line."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, tiny_config
from hub import TOKEN, HubServer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.conversion.convert import convert
from gpt2small_hf.conversion.readers import as_gpt2
from gpt2small_hf.data.tokenizer import train_tokenizer
from gpt2small_hf.publishing import verify
from gpt2small_hf.publishing.isolated_load import STEPS, InvalidModelError, IsolatedCheck, Request
from gpt2small_hf.publishing.verify import (
    CheckError,
    Expected,
    bind_names,
    check,
    code_blocks,
    compare,
    environment,
    modules_of,
    packages,
    read_reference,
    run_isolated,
    tolerance,
)

WHAT_MODEL_CODE_SEES = """

import os as _os
from pathlib import Path as _Path

from huggingface_hub import constants as _constants
from huggingface_hub import get_token as _get_token

_seen = [name for name, value in _os.environ.items() if "planted" in value]
_names = ("~/.cache/huggingface/token", "~/.netrc", _constants.HF_TOKEN_PATH)
_files = [_Path(name).expanduser() for name in _names]
_seen += [str(path) for path in _files if path.exists()] + [_get_token() or "no token"]
with _Path(_os.environ["TMPDIR"], "seen.txt").open("a") as _file:
    _file.write(f"{_seen}, offline {_os.environ['HF_HUB_OFFLINE']}\\n")
"""
CREDENTIALS = (
    *("HF_TOKEN", "HF_HUB_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    *("AWS_SESSION_TOKEN", "WANDB_API_KEY", "SECRET_X", "https_proxy"),
)

QUICK_START = """
# A model

```python
from transformers import pipeline

write = pipeline("text-generation", model="you/tiny", revision="v1", trust_remote_code=True)
print(write("Once the fox", max_new_tokens=8)[0]["generated_text"])
```
"""

IMPORTS_FAIL = """
import importlib.metadata
import importlib.util

for name in ("gpt2small_hf", "accelerate", "datasets", "pytest"):
    assert importlib.util.find_spec(name) is None, name
    try:
        __import__(name)
    except ModuleNotFoundError:
        print(name)
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        print(name)
"""


# ---- without the isolated process -------------------------------------------------------------------------------


def test_code_blocks_are_the_python_blocks_in_order():
    card = "\n".join(
        [
            *("---", "license: mit", "---", "```python``` inside a line", "```python", "one = '\u2028'", "```"),
            *("```bash", "python train.py", "```", "~~~python title=here", "two = '''", "```", "'''", "~~~"),
            *("- in a list:", "  ```py", "  if True:", "      three = 3", "  ```", ""),
            *("````markdown", "```python", "not code of the card", "```", "````"),
            *("```pythonic", "```", "```python", "last = True"),
        ]
    )
    assert code_blocks(card) == [
        "one = '\u2028'\n",
        "two = '''\n```\n'''\n",
        "if True:\n    three = 3\n",
        "last = True",
    ]
    assert code_blocks("no code") == []


def test_bind_names_inserts_the_folder_or_the_commit():
    code = 'load("you/tiny", revision=\'v1\')  # of you/tiny\nload(\'you/tiny-2\', tag="v1", revision = "v1")'
    folder = bind_names(code, "you/tiny", "/a 'b'/staged", "v1", None)
    assert folder == code.replace('"you/tiny"', repr("/a 'b'/staged"))
    commit = "0123abcd"
    assert bind_names(code, "you/tiny", "you/tiny", "v1", commit) == (
        "load(\"you/tiny\", revision='0123abcd')  # of you/tiny\nload('you/tiny-2', tag=\"v1\", revision = '0123abcd')"
    )
    unpinned = bind_names('load("you/tiny", trust_remote_code=True)', "you/tiny", "you/tiny", None, commit)
    assert unpinned == "load(\"you/tiny\", revision='0123abcd', trust_remote_code=True)"


@pytest.mark.slow
def test_isolated_process_has_torch_transformers_and_their_requirements():
    found = packages()
    assert {"torch", "transformers", "huggingface_hub", "numpy", "jinja2", "yaml", "regex"} <= set(found["modules"])
    assert {"huggingface-hub", "pyyaml", "jinja2"} <= set(found["distributions"])
    unknown = {"gpt2small_hf", "accelerate", "datasets", "tiktoken", "matplotlib", "pytest", "tests"}
    assert unknown.isdisjoint(found["modules"])
    assert all(Path(folder).is_dir() for folder in found["path"])


def test_requirements_are_followed_with_markers_and_extras(tmp_path, monkeypatch):
    for name, requires in {
        "first": ["Second.Part[fast]", 'absent; python_version < "3"', 'left-out; extra == "more"', "not-installed"],
        "second-part": ['quick; extra == "fast"', 'slow; extra == "other"', "first"],
        "quick": [],
        "left-out": [],
        "absent": [],
        "slow": [],
    }.items():
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        (folder / "RECORD").write_text(f"{name[0]}_package/__init__.py,,\n{name[0]}_alone.py,,\n../bin/{name},,\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = packages(("first",))
    assert found["distributions"] == ["first", "quick", "second-part"]
    assert found["modules"] == [f"{letter}_{kind}" for letter in "fqs" for kind in ("alone", "package")]
    assert found["path"] == [str(tmp_path)]
    assert modules_of(metadata.distribution("quick")) == {"q_package", "q_alone"}


def test_isolated_process_gets_only_listed_variables_and_an_empty_home(tmp_path):
    given = {
        **{"PATH": "/bin", "OMP_NUM_THREADS": "2", "PYTHONPATH": "/ours", "HOME": "/me", "HF_HOME": "/me/cache"},
        **{
            "HF_TOKEN": "hf_mine",
            "HF_ENDPOINT": "http://hub",
            "https_proxy": "http://me:word@proxy",
            "SECRET_X": "key",
        },
        **{"CUDA_VISIBLE_DEVICES": "0", "HF_HUB_OFFLINE": "0", "HF_TOKEN_PATH": "/me/token"},
    }
    home, hub = str(tmp_path / "home"), tmp_path / "cache"
    listed = {"PATH": "/bin", "OMP_NUM_THREADS": "2", "HOME": home, "USERPROFILE": home, "CUDA_VISIBLE_DEVICES": ""}
    listed |= {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}
    assert environment(tmp_path, given=given) == {**listed, "HF_HUB_CACHE": str(hub / "hub")}
    assert environment(tmp_path, Path("/down"), given) == {**listed, "HF_HUB_CACHE": str(Path("/down"))}


def test_tolerance_is_zero_for_the_same_code_in_float32():
    assert tolerance("float32", 80.0, native=False) == 0
    assert tolerance("float32", 0.5, native=True) == 1e-5
    assert tolerance("float32", 80.0, native=True) == pytest.approx(8e-4)
    assert tolerance("bfloat16", 4.0, native=False) == 8 * 2**-7 * 4


@pytest.fixture
def run_other(tmp_path, monkeypatch, expected) -> Callable[..., Any]:
    """Run other code in the isolated process, with a folder for temporary files that must be empty afterwards."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(verify, "SCRIPT", tmp_path / "other.py")

    def run(code: str, **more: Any) -> Any:
        (tmp_path / "other.py").write_text(f"import os, sys, time\nprint('AutoConfig', flush=True)\n{code}")
        try:
            return run_isolated("folder", None, expected, [], **more)
        finally:
            assert list(temporary.iterdir()) == []

    return run


@pytest.mark.slow
def test_isolated_process_that_hangs_is_ended_and_its_step_named(run_other):
    with pytest.raises(CheckError, match=r"^loading it took over 0\.5 s; the last step was AutoConfig\.$"):
        run_other("time.sleep(60)", timeout=0.5)


@pytest.mark.slow
def test_ctrl_c_ends_the_isolated_process_too(run_other):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, where tests run unattended
    interrupt = "os.kill(os.getppid(), signal.SIGINT)"
    try:
        with pytest.raises(KeyboardInterrupt):
            run_other(f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {interrupt}; time.sleep(60)")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_isolated_process_that_dies_is_reported_with_step_and_reason(run_other):
    with pytest.raises(CheckError, match=r"died at step AutoConfig \(signal 9; is there enough memory\?\)"):
        run_other("os.kill(os.getpid(), 9)")
    with pytest.raises(CheckError, match=r"died at step AutoConfig \(RuntimeError: no more\)") as caught:
        run_other("raise RuntimeError('no more')")
    assert "Traceback" in caught.value.details


# Steps of the isolated process, in this process.


@pytest.fixture
def run_step(tmp_path) -> Callable[[str, Any], None]:
    """Run one step of the isolated process in this one, on a model."""
    no_packages = {"path": [], "modules": [], "distributions": []}
    request = Request(
        **no_packages,
        where="",
        revision=None,
        remote_code=True,
        adapter=False,
        ids=[5, 77, 31, 8, 99, 2, 64, 17],
        texts=["a"],
        chat=None,
        code_blocks=[],
        result=str(tmp_path / "result.json"),
        threads=1,
    )

    def step(name: str, model: Any) -> None:
        check = IsolatedCheck(request)
        check.model, check.config = model.eval(), model.config
        with torch.no_grad():
            STEPS[name](check)

    return step


OF_ANY_MODEL = ("tied head", "logits", "left padding", "generate", "context length")


def test_every_step_passes_for_our_model(run_step, tiny_model):
    for name in OF_ANY_MODEL:
        run_step(name, tiny_model)


def test_transformers_gpt2_fails_two_steps(run_step, tiny_model):
    gpt2 = as_gpt2(tiny_model.config, tiny_model.state_dict())
    with pytest.raises(InvalidModelError, match="a left-padded row's logits differ by"):
        run_step("left padding", gpt2)
    with pytest.raises(InvalidModelError, match="33 tokens, one more than the context, raise IndexError"):
        run_step("context length", gpt2)


def test_untied_head_of_a_tied_config_is_found(run_step, tiny_model):
    tiny_model.config.tie_word_embeddings = True
    with pytest.raises(
        InvalidModelError, match="tie_word_embeddings=True in the config, but embedding and head do not share"
    ):
        run_step("tied head", tiny_model)


def test_a_broken_model_is_found(run_step, tiny_model):
    with torch.no_grad():
        tiny_model.lm_head.weight[3, 3] = torch.nan
    with pytest.raises(InvalidModelError, match="not all finite"):
        run_step("logits", tiny_model)


class WithoutMemory(GPT2SmallForCausalLM):
    """Gives every token that follows a cache the first position."""

    def forward(self, input_ids, past_key_values=None, position_ids=None, **more):  # pyright: ignore
        if past_key_values is not None and past_key_values.get_seq_length():
            position_ids = torch.zeros_like(input_ids)
        return super().forward(input_ids, past_key_values=past_key_values, position_ids=position_ids, **more)


def test_a_cache_that_changes_the_text_is_found(run_step):
    torch.manual_seed(0)
    with pytest.raises(InvalidModelError, match="with the cache, logits of new token 2 differ by"):
        run_step("generate", WithoutMemory(tiny_config()))


def test_tokens_beyond_the_context_must_raise_a_value_error(run_step, tiny_model):
    tiny_model.config.max_position_embeddings = 31  # of 32 that it has
    tiny_model.model._check_context = lambda *_: None
    with pytest.raises(InvalidModelError, match="32 tokens, one more than the context, raise no error"):
        run_step("context length", tiny_model)


# ---- results of the isolated process ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(tiny_run) -> Expected:
    """What the tiny run's model does here."""
    return read_reference(tiny_run.model)


@pytest.fixture
def staged(tiny_run, tmp_path) -> Path:
    """A folder as it is pushed, to be changed."""
    return Path(shutil.copytree(tiny_run.model, tmp_path / "staged"))


@dataclass(frozen=True)
class Isolated:
    result: dict[str, Any]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def isolated(tiny_run, expected) -> Isolated:
    """Return the result of the isolated process for the tiny run's model."""
    quick_start = bind_names(code_blocks(QUICK_START)[0], "you/tiny", str(tiny_run.model), "v1", None)
    return Isolated(*run_isolated(str(tiny_run.model), None, expected, [IMPORTS_FAIL, quick_start]))


def refusal(isolated: Isolated, expected: Expected, **more: Any) -> str:
    """Return the one-line error for a result that differs from the expected one."""
    with pytest.raises(CheckError) as caught:
        compare(isolated.result, isolated.logits, expected, **{"native": False, **more})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
def test_isolated_process_cannot_import_this_package_and_loads_the_same_model(isolated, expected):
    names = ["gpt2small_hf", "accelerate", "datasets", "pytest"]
    assert isolated.result["printed"][0].split() == [name for name in names for _ in range(2)]
    assert isolated.result["printed"][1].startswith("Once the fox")
    assert isolated.result["text"].startswith(expected.texts[0])
    assert compare(isolated.result, isolated.logits, expected, native=False) == (0.0, 0.0)
    modules = ["configuration_gpt2small.GPT2SmallConfig"]
    modules += [f"modeling_gpt2small.{name}" for name in ("GPT2SmallForCausalLM", "GPT2SmallModel")]
    assert [name.split(".", 3)[3] for name in isolated.result["classes"]] == modules


def test_texts_longer_than_the_context_are_tokenized_without_a_warning(tiny_run, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert max(map(len, read_reference(tiny_run.model).tokens)) > 32
    assert caplog.messages == []


def test_first_text_fills_half_of_the_context(expected):
    assert len(expected.tokens[0]) <= 16  # of a context of 32


@pytest.mark.slow
def test_another_tokenizer_is_refused(isolated, staged):
    train_tokenizer(["Other words make other tokens, upon my word. "] * 9, 300).save_pretrained(staged)
    said = refusal(isolated, read_reference(staged))
    assert "its tokenizer is not the one the model was trained with: 'Once upon" in said


@pytest.mark.slow
def test_a_text_that_decodes_to_another_is_refused(isolated, expected):
    decoded = [*expected.decoded[:-1], "something else"]
    assert "its tokenizer decodes 'something else' as 'naïve" in refusal(isolated, replace(expected, decoded=decoded))


@pytest.mark.slow
def test_another_chat_template_is_refused(isolated, staged):
    (staged / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "its chat template is not the one of the training" in refusal(isolated, read_reference(staged))


@pytest.mark.slow
def test_weights_that_differ_in_one_place_are_refused_by_name(isolated, staged):
    weights = load_file(staged / "model.safetensors")
    weights["model.embed_positions.weight"][-1, -1] += 1e-7  # logits need not show it
    save_file(weights, staged / "model.safetensors", metadata={"format": "pt"})
    said = refusal(isolated, read_reference(staged))
    assert "its weights are not those of the model it was staged from: model.embed_positions.weight. The model" in said


@pytest.mark.slow
def test_other_logits_of_the_same_weights_are_refused(isolated, expected):
    near = Isolated(isolated.result, isolated.logits + 1e-6)
    assert "its logits differ by 9" in refusal(near, expected) or "its logits differ by 1" in refusal(near, expected)
    assert "so its code may be of another version" in refusal(near, expected)
    broken = Isolated(isolated.result, isolated.logits * torch.nan)
    assert "its logits differ by nan" in refusal(broken, expected)
    assert "its logits have the shape" in refusal(Isolated(isolated.result, isolated.logits[:, :-1]), expected)


@pytest.mark.slow
def test_classes_from_elsewhere_are_refused(isolated, expected):
    assert "is remote code, which a native model must not need" in refusal(isolated, expected, native=True)
    classes = [*isolated.result["classes"][:2], "transformers.models.gpt2.modeling_gpt2.GPT2Model"]
    said = refusal(Isolated({**isolated.result, "classes": classes}, isolated.logits), expected)
    assert "it is loaded as transformers.models.gpt2.modeling_gpt2.GPT2Model, not by its own code" in said


@pytest.mark.slow
def test_private_bfloat16_chat_model_is_loaded_at_its_commit_without_credentials(chat_run, tmp_path, monkeypatch):
    staged = Path(shutil.copytree(chat_run.model, tmp_path / "staged"))
    AutoModelForCausalLM.from_pretrained(staged, dtype=torch.bfloat16).save_pretrained(staged)
    with (staged / "gpt.py").open("a") as file:
        file.write(WHAT_MODEL_CODE_SEES)
    card = QUICK_START + "```python\nprint(1)\n```\n"  # its tag is not there yet
    cache, home = tmp_path / "cache", tmp_path / "home"
    for path in (home / ".cache" / "huggingface" / "token", home / ".netrc"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("planted")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(home / ".cache" / "huggingface"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in CREDENTIALS:
        monkeypatch.setenv(name, f"planted-{name}")
    with HubServer() as hub:
        hub.create("you/tiny", private=True)
        commit = hub.commit("you/tiny", {file.name: file for file in staged.iterdir()}).oid
        hub.commit("you/tiny", {"model.safetensors": b"somebody else's"})
        download = f"""if True:
            from gpt2small_hf.publishing.hub import Hub
            from pathlib import Path
            Hub().download("you/tiny", {commit!r}, Path({str(cache)!r}))"""
        told = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        told |= {"PYTHONPATH": str(REPOSITORY), "https_proxy": ""}
        subprocess.run([sys.executable, "-c", download], check=True, env={**os.environ, **told})
        asked = len(hub.requests)
        checked = check(
            "you/tiny", reference=staged, card=card, repo_id="you/tiny", tag="v1", revision=commit, cache=cache
        )
        assert len(hub.requests) == asked  # what runs the model's code asks the Hub nothing
        assert not hub.unknown_routes
        assert not hub.leaks
    assert set((tmp_path / "seen.txt").read_text().splitlines()) == {"['no token'], offline 1"}  # nor did it run here
    assert all(commit in name for name in checked.classes)
    assert 0 <= checked.logit_difference <= checked.tolerance < 1
    assert checked.tolerance > 0
    assert (len(checked.printed), checked.printed[1]) == (2, "1\n")
    assert checked.versions["torch"] == torch.__version__
    assert checked.text
    assert checked.seconds > 1


@pytest.mark.slow
def test_a_native_gpt2_is_compared_with_ours_and_needs_no_remote_code(tiny_run, tmp_path, capsys):
    convert(str(tiny_run.model), tmp_path / "native", "gpt2")
    card = QUICK_START.replace(", trust_remote_code=True", "")
    checked = check(tmp_path / "native", reference=tiny_run.model, card=card, repo_id="you/tiny", tag="v1", native=True)
    assert checked.logit_difference <= checked.tolerance < 1e-3
    assert [name.split(".")[-1] for name in checked.classes] == ["GPT2Config", "GPT2LMHeadModel", "GPT2Model"]
    capsys.readouterr()


def insert(path: Path, before: str, lines: str) -> None:
    """Put lines into a file before the first place that begins with `before`."""
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, lines + before, 1))


def import_at_the_top(staged: Path) -> None:
    insert(staged / "modeling_gpt2small.py", "from functools", "import gpt2small_hf.errors\n")


def import_while_it_runs(staged: Path) -> None:
    # In a `try`, where transformers does not look for imports beforehand.
    lines = "        try:\n            from gpt2small_hf import errors\n        finally:\n            pass\n"
    insert(staged / "modeling_gpt2small.py", "        outputs = self.model(\n", lines)


def lose_a_weight(staged: Path) -> None:
    weights = load_file(staged / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, staged / "model.safetensors", metadata={"format": "pt"})


def import_from_the_folder(staged: Path) -> None:
    (staged / "more.py").write_text("")
    insert(staged / "gpt.py", "import torch", "from . import more\n")  # which transformers does not fetch


def break_the_syntax(staged: Path) -> None:
    insert(staged / "gpt.py", "import torch", "def f(:\n")


def need_code_for_the_tokenizer(staged: Path) -> None:
    path = staged / "tokenizer_config.json"
    settings = {"tokenizer_class": "Toy", "auto_map": {"AutoTokenizer": ["tokenization_toy.Toy", None]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    (staged / "tokenization_toy.py").write_text(
        "from transformers import PythonBackend\nclass Toy(PythonBackend): ...\n"
    )


NOT_THERE = "its code imports gpt2small_hf. "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (import_at_the_top, f"AutoModelForCausalLM: {NOT_THERE}"),
        (import_while_it_runs, f"logits: {NOT_THERE}"),
        (import_from_the_folder, "AutoModelForCausalLM: "),
        (break_the_syntax, "AutoModelForCausalLM: "),
        (lose_a_weight, "AutoModelForCausalLM: missing keys: model.layers.1.mlp.up_proj.weight."),
        (need_code_for_the_tokenizer, "its tokenizer needs remote code. Convert it to a fast one"),
    ],
    ids=["top import", "late import", "folder import", "syntax", "lost weight", "tokenizer code"],
)
def test_folder_that_needs_more_than_transformers_is_refused(spoil, said, tiny_run, staged):
    spoil(staged)
    with pytest.raises(CheckError) as caught:
        check(staged, reference=tiny_run.model, card="", repo_id="you/tiny", tag=None)
    assert str(caught.value).startswith(f"{staged}: {said}")
    assert "\n" not in str(caught.value)
    assert "Traceback" in caught.value.details


@pytest.mark.slow
def test_a_card_whose_code_fails_is_refused_with_block_and_line(tiny_run, staged):
    card = "```python\nprint('fine')\n```" + QUICK_START.replace('"Once the fox"', '"Once the fox " * 99')
    with pytest.raises(CheckError) as caught:
        check(staged, reference=tiny_run.model, card=card, repo_id="you/tiny", tag="v1")
    said = str(caught.value)
    assert said.startswith(
        f"{staged}: the card's code block 2 (`from transformers import pipeline`) fails at `print(write("
    )
    assert ": ValueError: The input reaches position" in said
    assert "\n" not in said
