"""A stranger loads what was staged: what is right passes, and each thing that can be wrong is named in one line."""

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
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.conversion.convert import convert
from gpt2small_hf.conversion.readers import as_gpt2
from gpt2small_hf.data.tokenizer import train_tokenizer
from gpt2small_hf.publishing import verify
from gpt2small_hf.publishing.isolated_load import STEPS, NotSoError, Request, Visit
from gpt2small_hf.publishing.verify import (
    CheckError,
    Expected,
    bound,
    check,
    codes,
    compare,
    environment,
    keeps_every_byte,
    modules_of,
    packages,
    read_reference,
    tolerance,
    visit,
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

HAS_NOT_HEARD_OF_US = """
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


# ---- without a stranger -----------------------------------------------------------------------------------------


def test_codes_are_the_python_blocks_of_the_card_in_order():
    card = "\n".join(
        [
            *("---", "license: mit", "---", "```python``` inside a line", "```python", "one = '\u2028'", "```"),
            *("```bash", "python train.py", "```", "~~~python title=here", "two = '''", "```", "'''", "~~~"),
            *("- in a list:", "  ```py", "  if True:", "      three = 3", "  ```", ""),
            *("````markdown", "```python", "not code of the card", "```", "````"),
            *("```pythonic", "```", "```python", "last = True"),
        ]
    )
    assert codes(card) == ["one = '\u2028'\n", "two = '''\n```\n'''\n", "if True:\n    three = 3\n", "last = True"]
    assert codes("no code") == []


def test_code_for_a_folder_names_the_folder_and_for_the_hub_the_commit():
    code = 'load("you/tiny", revision=\'v1\')  # of you/tiny\nload(\'you/tiny-2\', tag="v1", revision = "v1")'
    folder = bound(code, "you/tiny", Path("/a 'b'/staged"), "v1", None)
    assert folder == code.replace('"you/tiny"', repr("/a 'b'/staged"))
    commit = "0123abcd"
    assert bound(code, "you/tiny", "you/tiny", "v1", commit) == (
        "load(\"you/tiny\", revision='0123abcd')  # of you/tiny\nload('you/tiny-2', tag=\"v1\", revision = '0123abcd')"
    )
    unpinned = bound('load("you/tiny", trust_remote_code=True)', "you/tiny", "you/tiny", None, commit)
    assert unpinned == "load(\"you/tiny\", revision='0123abcd', trust_remote_code=True)"


def test_a_stranger_has_torch_transformers_and_what_they_require():
    found = packages()
    assert {"torch", "transformers", "huggingface_hub", "numpy", "jinja2", "yaml", "regex"} <= set(found["modules"])
    assert {"huggingface-hub", "pyyaml", "jinja2"} <= set(found["distributions"])
    unknown = {"gpt2small_hf", "accelerate", "datasets", "tiktoken", "matplotlib", "pytest", "tests"}
    assert unknown.isdisjoint(found["modules"])
    assert all(Path(folder).is_dir() for folder in found["path"])


def test_requirements_are_followed_where_their_markers_hold_and_with_the_extras_they_ask_for(tmp_path, monkeypatch):
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


def test_only_the_same_code_in_float32_must_agree_to_the_bit():
    assert tolerance("float32", 80.0, native=False) == 0
    assert tolerance("float32", 0.5, native=True) == 1e-5
    assert tolerance("float32", 80.0, native=True) == pytest.approx(8e-4)
    assert tolerance("bfloat16", 4.0, native=False) == 8 * 2**-7 * 4


def test_a_tokenizer_must_give_back_every_text_only_if_it_can(tiny_tokenizer):
    assert keeps_every_byte(tiny_tokenizer)
    lossy = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    lossy.normalizer = normalizers.Lowercase()
    assert not keeps_every_byte(PreTrainedTokenizerFast(tokenizer_object=lossy))


@pytest.fixture
def one_that(tmp_path, monkeypatch, expected) -> Callable[..., Any]:
    """Visit with a stranger that does something else, in a place for temporary files that must be empty afterwards."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(verify, "STRANGER", tmp_path / "does.py")

    def visits(code: str, **more: Any) -> Any:
        (tmp_path / "does.py").write_text(f"import os, sys, time\nprint('AutoConfig', flush=True)\n{code}")
        try:
            return visit("folder", None, "the folder", expected, [], **more)
        finally:
            assert list(temporary.iterdir()) == []

    return visits


def test_a_stranger_that_hangs_is_ended_and_says_where_it_was(one_that):
    with pytest.raises(CheckError, match=r"the folder: loading it did not end within 0\.5 s; it was at: AutoConfig\.$"):
        one_that("time.sleep(60)", timeout=0.5)


def test_ctrl_c_ends_the_stranger_too(one_that):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, where tests run unattended
    interrupt = "os.kill(os.getppid(), signal.SIGINT)"
    try:
        with pytest.raises(KeyboardInterrupt):
            one_that(f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {interrupt}; time.sleep(60)")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_stranger_that_dies_is_told_from_one_that_finds_fault(one_that):
    with pytest.raises(CheckError, match=r"died at: AutoConfig \(signal 9; is there enough memory\?\)"):
        one_that("os.kill(os.getpid(), 9)")
    with pytest.raises(CheckError, match=r"died at: AutoConfig \(RuntimeError: no more\)") as caught:
        one_that("raise RuntimeError('no more')")
    assert "Traceback" in caught.value.details


# What a stranger tries of any model, in this process.


@pytest.fixture
def tries(tmp_path) -> Callable[[str, Any], None]:
    """One step of a visit, on a model."""
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
        codes=[],
        answer=str(tmp_path / "answer.json"),
        threads=1,
    )

    def step(name: str, model: Any) -> None:
        visit = Visit(request)
        visit.model, visit.config = model.eval(), model.config
        with torch.no_grad():
            STEPS[name](visit)

    return step


OF_ANY_MODEL = ("tied head", "logits", "left padding", "generate", "past the context")


def test_what_must_hold_of_any_model_holds_of_ours(tries, tiny_model):
    for name in OF_ANY_MODEL:
        tries(name, tiny_model)


def test_transformers_gpt2_would_not_pass_as_ours(tries, tiny_model):
    gpt2 = as_gpt2(tiny_model.config, tiny_model.state_dict())
    with pytest.raises(NotSoError, match="a left-padded row's logits differ by"):
        tries("left padding", gpt2)
    with pytest.raises(NotSoError, match="33 tokens, one more than the context, raise IndexError"):
        tries("past the context", gpt2)


def test_a_head_that_is_not_as_the_config_says_is_found(tries, tiny_model):
    tiny_model.config.tie_word_embeddings = True
    with pytest.raises(NotSoError, match="tie_word_embeddings=True, but embedding and head do not share their memory"):
        tries("tied head", tiny_model)


def test_a_broken_model_is_found(tries, tiny_model):
    with torch.no_grad():
        tiny_model.lm_head.weight[3, 3] = torch.nan
    with pytest.raises(NotSoError, match="not all finite"):
        tries("logits", tiny_model)


class WithoutMemory(GPT2SmallForCausalLM):
    """Gives every token that follows a cache the first position."""

    def forward(self, input_ids, past_key_values=None, position_ids=None, **more):  # pyright: ignore
        if past_key_values is not None and past_key_values.get_seq_length():
            position_ids = torch.zeros_like(input_ids)
        return super().forward(input_ids, past_key_values=past_key_values, position_ids=position_ids, **more)


def test_a_cache_that_changes_the_text_is_found(tries):
    torch.manual_seed(0)
    with pytest.raises(NotSoError, match="with the cache, logits of new token 2 differ by"):
        tries("generate", WithoutMemory(tiny_config()))


def test_only_a_value_error_tells_that_the_context_is_full(tries, tiny_model):
    tiny_model.config.max_position_embeddings = 31  # of 32 that it has
    tiny_model.model._check_context = lambda *_: None
    with pytest.raises(NotSoError, match="32 tokens, one more than the context, are taken without a word"):
        tries("past the context", tiny_model)


# ---- what a stranger finds --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(tiny_run) -> Expected:
    """What the tiny run's model does here."""
    return read_reference(tiny_run.model)


@pytest.fixture
def staged(tiny_run, tmp_path) -> Path:
    """A folder as it is pushed, to be changed."""
    return Path(shutil.copytree(tiny_run.model, tmp_path / "staged"))


@dataclass(frozen=True)
class Visited:
    answer: dict[str, Any]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def visited(tiny_run, expected) -> Visited:
    """What a stranger says of the tiny run's model."""
    quick_start = bound(codes(QUICK_START)[0], "you/tiny", tiny_run.model, "v1", None)
    return Visited(*visit(str(tiny_run.model), None, "it", expected, [HAS_NOT_HEARD_OF_US, quick_start]))


def refusal(visited: Visited, expected: Expected, **more: Any) -> str:
    """What is said of an answer that is not the one expected; all in one line."""
    with pytest.raises(CheckError) as caught:
        compare(visited.answer, visited.logits, expected, "it", **{"native": False, **more})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
def test_a_stranger_has_not_heard_of_this_package_and_gets_the_same_model_to_the_bit(visited, expected):
    names = ["gpt2small_hf", "accelerate", "datasets", "pytest"]
    assert visited.answer["printed"][0].split() == [name for name in names for _ in range(2)]
    assert visited.answer["printed"][1].startswith("Once the fox")
    assert visited.answer["text"].startswith(expected.texts[0])
    assert compare(visited.answer, visited.logits, expected, "it", native=False) == (0.0, 0.0)
    modules = ["configuration_gpt2small.GPT2SmallConfig"]
    modules += [f"modeling_gpt2small.{name}" for name in ("GPT2SmallForCausalLM", "GPT2SmallModel")]
    assert [name.split(".", 3)[3] for name in visited.answer["classes"]] == modules


def test_texts_longer_than_the_context_are_tokenized_without_a_warning(tiny_run, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert max(map(len, read_reference(tiny_run.model).tokens)) > 32
    assert caplog.messages == []


def test_the_first_text_leaves_room_to_be_continued(expected):
    assert len(expected.tokens[0]) <= 16  # of a context of 32


@pytest.mark.slow
def test_another_tokenizer_is_refused(visited, staged):
    train_tokenizer(["Other words make other tokens, upon my word. "] * 9, 300).save_pretrained(staged)
    said = refusal(visited, read_reference(staged))
    assert "its tokenizer is not the one the model was trained with: 'Once upon" in said


@pytest.mark.slow
def test_a_text_that_decodes_to_another_is_refused(visited, expected):
    decoded = [*expected.decoded[:-1], "something else"]
    assert "its tokenizer decodes what was 'something else' as 'naïve" in refusal(
        visited, replace(expected, decoded=decoded)
    )


@pytest.mark.slow
def test_another_chat_template_is_refused(visited, staged):
    (staged / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "its chat template is not the one" in refusal(visited, read_reference(staged))


@pytest.mark.slow
def test_weights_that_differ_in_one_place_are_refused_by_name(visited, staged):
    weights = load_file(staged / "model.safetensors")
    weights["model.embed_positions.weight"][-1, -1] += 1e-7  # logits need not show it
    save_file(weights, staged / "model.safetensors", metadata={"format": "pt"})
    said = refusal(visited, read_reference(staged))
    assert "its weights are not those of the model it was staged from: model.embed_positions.weight. Likeliest" in said


@pytest.mark.slow
def test_other_logits_of_the_same_weights_are_refused_however_near(visited, expected):
    near = Visited(visited.answer, visited.logits + 1e-6)
    assert "its logits differ by 9" in refusal(near, expected) or "its logits differ by 1" in refusal(near, expected)
    assert "the code beside them is of another version" in refusal(near, expected)
    broken = Visited(visited.answer, visited.logits * torch.nan)
    assert "its logits differ by nan" in refusal(broken, expected)
    assert "Its vocabulary is another" in refusal(Visited(visited.answer, visited.logits[:, :-1]), expected)


@pytest.mark.slow
def test_classes_from_elsewhere_are_refused(visited, expected):
    assert "and this form promises to need none" in refusal(visited, expected, native=True)
    classes = [*visited.answer["classes"][:2], "transformers.models.gpt2.modeling_gpt2.GPT2Model"]
    said = refusal(Visited({**visited.answer, "classes": classes}, visited.logits), expected)
    assert "it is loaded as transformers.models.gpt2.modeling_gpt2.GPT2Model, not by the code beside it" in said
    said = refusal(Visited({**visited.answer, "commit": "0123abcd"}, visited.logits), expected)
    assert "its code comes from another commit" in said


@pytest.mark.slow
def test_a_private_chat_model_in_bfloat16_is_loaded_at_its_commit_without_any_credential(
    chat_run, tmp_path, monkeypatch
):
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
    assert checked.commit == commit
    assert all(commit in name for name in checked.classes)
    assert 0 <= checked.logit_difference <= checked.tolerance < 1
    assert checked.tolerance > 0
    assert (checked.n_codes, checked.printed[1]) == (2, "1\n")
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


def need_code_for_the_tokenizer(staged: Path) -> None:
    path = staged / "tokenizer_config.json"
    settings = {"tokenizer_class": "Toy", "auto_map": {"AutoTokenizer": ["tokenization_toy.Toy", None]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    (staged / "tokenization_toy.py").write_text(
        "from transformers import PythonBackend\nclass Toy(PythonBackend): ...\n"
    )


NOT_HAD = "its code needs what a stranger does not have: gpt2small_hf (modeling_gpt2small.py). "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (import_at_the_top, f"AutoModelForCausalLM: {NOT_HAD}"),
        (import_while_it_runs, f"logits: {NOT_HAD}"),
        (lose_a_weight, "AutoModelForCausalLM: missing keys: model.layers.1.mlp.up_proj.weight. Likeliest: "),
        (need_code_for_the_tokenizer, "its tokenizer needs remote code. Convert it to a fast one"),
    ],
    ids=["top import", "late import", "lost weight", "tokenizer code"],
)
def test_a_folder_that_does_not_work_elsewhere_is_refused(spoil, said, tiny_run, staged):
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
