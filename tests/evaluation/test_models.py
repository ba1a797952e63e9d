"""Words that name models: runs, steps, folders, Hub ids; what is refused; loading."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.models import find_model, find_models, load_model, weights_sha256
from gpt2small_hf.runs.files import sha256
from gpt2small_hf.runs.layout import RunFolder


@pytest.fixture
def native(tmp_path, tiny_tokenizer):
    """A folder of transformers' GPT-2."""
    sizes = {"vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "native")
    tiny_tokenizer.save_pretrained(tmp_path / "native")
    return tmp_path / "native"


def test_words_name_a_run_its_steps_and_its_folders(tiny_run):
    root = tiny_run.root
    checkpoint = tiny_run.checkpoints / "checkpoint-10"
    (run,) = find_models([str(root)])
    assert (run.label, run.kind, run.folder, run.step, run.is_own) == ("short", "run", tiny_run.model, 20, True)
    assert find_models([str(tiny_run.model)]) == [run]
    (tenth,) = find_models([f"{root}:10"])
    assert (tenth.label, tenth.kind, tenth.folder, tenth.step) == ("short:10", "checkpoint", checkpoint, 10)
    assert find_models([str(checkpoint)]) == [tenth]
    assert find_models([f"{root}:all"]) == [tenth, run]  # checkpoint-20 has the weights of the final model
    assert find_models([f"{root}:20"])[0].kind == "checkpoint"
    assert {one.run.root for one in (run, tenth)} == {root}


def test_all_of_an_unfinished_run_are_its_checkpoints(tiny_run, tmp_path):
    run = RunFolder(tmp_path / "run")
    shutil.copytree(tiny_run.root, run.root)
    shutil.rmtree(run.model)
    assert [one.step for one in find_models([f"{run.root}:all"])] == [10, 20]
    with pytest.raises(UsageError, match=r"no model yet.*run:20"):
        find_models([str(run.root)])
    shutil.rmtree(run.checkpoints)
    with pytest.raises(UsageError, match="no checkpoint with weights"):
        find_models([f"{run.root}:all"])


def test_labels_are_unique_and_short(tiny_run, native, tmp_path):
    for place in ("a", "b"):
        shutil.copytree(tiny_run.root, tmp_path / place / "tiny")
    shutil.copytree(native, tmp_path / "other" / "model")
    words = [tmp_path / "a/tiny", f"{tmp_path / 'b/tiny'}:10", native]
    assert [one.label for one in find_models(list(map(str, words)))] == ["tiny", "tiny:10", "native"]
    words = [tmp_path / "a/tiny", tmp_path / "b/tiny", tmp_path / "other/model"]
    assert [one.label for one in find_models(list(map(str, words)))][:2] == ["a/tiny", "b/tiny"]
    assert find_model(str(words[2])).label == "other/model"


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("absent/folder/x", "does not exist in"),
        ("absent/folder:all", "does not exist in"),
        ("nobody/nothing", "HF_HUB_OFFLINE is set"),
        ("", "a folder without a model|does not exist"),
        ("{run}:15", "these steps: 10, 20"),
        ("{run}:newest", "these steps: 10, 20"),
        ("{run}/metrics.jsonl", "is a file"),
        ("{run}/checkpoints", "such as .*checkpoint-10"),
        ("{tmp}/empty", "is a folder without a model"),
        ("{tmp}/adapter", "is an adapter"),
        ("{tmp}/weightless", "but no weights"),
        ("{tmp}/damaged", "is not a model's config.json"),
    ],
)
def test_a_word_without_a_model_is_a_one_line_error(tiny_run, tmp_path, word, says):
    for name, file, text in [
        ("empty", "notes.txt", ""),
        ("adapter", "adapter_config.json", "{}"),
        ("weightless", "config.json", '{"model_type": "gpt2"}'),
        ("damaged", "config.json", "[]"),
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    with pytest.raises(UsageError, match=says) as error:
        find_models([word.format(run=tiny_run.root, tmp=tmp_path)])
    assert "\n" not in str(error.value)


def test_a_model_is_named_once_and_a_single_model_is_one(tiny_run):
    with pytest.raises(UsageError, match="named 2 times"):
        find_models([str(tiny_run.root), f"{tiny_run.root}:all"])
    with pytest.raises(UsageError, match="names 2 models"):
        find_model(f"{tiny_run.root}:all")


def test_models_of_the_package_and_of_transformers_are_loaded(tiny_run, native):
    model, tokenizer = load_model(find_model(str(tiny_run.root)), device="cpu")
    assert type(model).__module__ == "gpt2small_hf.model.modeling_gpt2small"
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer.pad_token_id is not None
    model, tokenizer = load_model(find_model(str(native)), dtype="bfloat16", device="cpu")
    assert (type(model), model.dtype) == (GPT2LMHeadModel, torch.bfloat16)
    (native / "tokenizer.json").unlink()
    (native / "tokenizer_config.json").unlink()
    with pytest.raises(UsageError, match="into the folder of the model"):
        load_model(find_model(str(native)))
    (native / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_model(find_model(str(native)))


def test_remote_code_runs_only_if_it_is_trusted(tiny_run, tmp_path):
    remote = tmp_path / "remote"
    shutil.copytree(tiny_run.model, remote)
    path = remote / "config.json"
    config = json.loads(path.read_text())
    assert find_model(str(remote)).needs_remote_code is False  # our own classes read it
    path.write_text(json.dumps({**config, "model_type": "unheard_of"}))
    code = remote / "configuration_gpt2small.py"
    code.write_text(code.read_text().replace('model_type = "gpt2small"', 'model_type = "unheard_of"'))
    source = find_model(str(remote))
    assert source.needs_remote_code
    for refuse in (lambda: find_models([str(remote)], trust_remote_code=False), lambda: load_model(source)):
        with pytest.raises(UsageError, match="--trust_remote_code"):
            refuse()
    model, _ = load_model(source, trust_remote_code=True, device="cpu")
    assert type(model).__module__.startswith("transformers_modules")


def test_the_hash_of_weights_is_that_of_their_file_or_of_all_parts(native):
    source = find_model(str(native))
    assert weights_sha256(source) == sha256(native / "model.safetensors")
    GPT2LMHeadModel.from_pretrained(native).save_pretrained(native, max_shard_size="5KB")
    (native / "model.safetensors").unlink(missing_ok=True)
    whole = weights_sha256(source)
    part = sorted(native.glob("model-*.safetensors"))[-1]
    part.write_bytes(part.read_bytes() + b" ")
    assert weights_sha256(source) not in (whole, sha256(part))


@pytest.mark.slow
def test_models_are_found_without_torch(tiny_run):
    code = f"""
import sys
from gpt2small_hf.evaluation.models import find_models
assert len(find_models([{str(tiny_run.root) + ":all"!r}], trust_remote_code=False)) == 2
assert "torch" not in sys.modules
"""
    argv = "import sys; sys.argv = ['gpt2small']; "  # the package imports torch in other programs
    subprocess.run([sys.executable, "-c", argv + code.replace("\nimport sys", "\n", 1)], check=True)
