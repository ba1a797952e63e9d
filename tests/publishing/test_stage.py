"""Staging: exactly the files that users need are copied, and inconsistent or unsafe ones are refused."""

import re
import shutil
import stat
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.data.tokenizer import train_tokenizer
from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.arguments import parse_arguments
from gpt2small_hf.publishing.card import render
from gpt2small_hf.publishing.checks import CODE
from gpt2small_hf.publishing.license import License, write_license
from gpt2small_hf.publishing.privacy import chat_questions, scrub
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.push import publish
from gpt2small_hf.publishing.source import find_source
from gpt2small_hf.publishing.stage import is_loaded, is_pushed_file, list_files, stage, stage_native
from gpt2small_hf.runs.files import read_json, sha256, write_json
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.reader import Run
from publishing.staging import RESULTS, staged

CODE_FILES = {"configuration_gpt2small.py", "cpu_linear.py", "gpt.py", "modeling_gpt2small.py"}
MODEL = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
CHARTS = {f"charts/{name}.png" for name in ("loss", "grad_norm", "learning_rate", "throughput")}


@pytest.fixture
def bare(tiny_run, tmp_path, monkeypatch) -> Path:
    """The model folder of the run alone, of which nobody measured anything."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run.model, "mine")
    return Path("mine")


def refusal(name: Path) -> str:
    """Why it is not staged, in one line; and nothing is left of the attempt."""
    with pytest.raises(UsageError) as refused:
        staged(name)
    assert not list(Path("out").iterdir())
    assert refused.value.status == 2
    assert "\n" not in str(refused.value)
    return str(refused.value)


def change(path: Path, **more: Any) -> None:
    write_json(path, {**read_json(path), **more})


def poke(path: Path, value: float) -> str:
    """Put a value into the middle of one tensor. Returns: its name."""
    weights = load_file(path)
    name = sorted(weights)[len(weights) // 2]
    weights[name].view(-1)[weights[name].numel() // 2] = value
    save_file(weights, path, metadata={"format": "pt"})
    return name


# ---- what goes in -----------------------------------------------------------------------------------------------


def test_of_a_run_exactly_what_is_on_the_list_is_staged_whatever_lies_beside_it(short_run):
    for name in ("notes.txt", ".env", "stray.py", "README.md", "LICENSE", "tokenizer.model", "model.safetensors.old"):
        (short_run.model / name).write_text("private")
    for name in ("model/custom_generate/generate.py", "evaluation/answers.jsonl", "evaluation/private.json"):
        (short_run.root / name).parent.mkdir(exist_ok=True)
        (short_run.root / name).write_text("private")
    for name in ("charts/loss.svg", "charts/me.png", ".env", "notes.txt", "published.json"):
        (short_run.root / name).write_text("private")
    folder = staged(short_run.root)
    assert set(list_files(folder)) == MODEL | CODE_FILES | CHARTS | RESULTS
    for name in (MODEL | CODE_FILES) - {"config.json", "generation_config.json"}:
        assert (folder / name).read_bytes() == (short_run.model / name).read_bytes(), name
    for name in CHARTS:
        assert (folder / name).read_bytes() == (short_run.root / name).read_bytes(), name
    assert read_json(folder / "config.json") == read_json(short_run.model / "config.json")
    for name in ("heldout", "completions"):
        then, now = (read_json(where / "evaluation" / f"{name}.json") for where in (short_run.root, folder))
        assert then.pop("made_by").keys() == now.pop("made_by").keys()
        assert then == now


def test_of_a_checkpoint_the_model_is_staged_and_neither_its_optimizer_nor_the_runs_results(short_run):
    checkpoint = short_run.checkpoints / "checkpoint-10"
    (checkpoint / "notes.txt").write_text("private")
    held = {path.name for path in checkpoint.iterdir()}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "trainer_state.json"} <= held
    assert read_json(checkpoint / "config.json")["use_cache"] is False
    folder = staged(checkpoint)
    assert set(list_files(folder)) == MODEL | CODE_FILES | {"resolved.json"}
    assert read_json(folder / "config.json") == {**read_json(checkpoint / "config.json"), "use_cache": True}
    told = read_json(checkpoint / "generation_config.json")
    assert not {"max_length", "max_new_tokens"} & told.keys()
    assert read_json(folder / "generation_config.json") == {**told, "max_length": 32}
    resolved = read_json(short_run.resolved)
    assert Path(resolved["run"]["output_dir"]).is_absolute()
    assert read_json(folder / "resolved.json") == scrub(resolved) != resolved
    assert sha256(folder / "model.safetensors") == sha256(checkpoint / "model.safetensors")
    assert sha256(folder / "model.safetensors") != sha256(short_run.model / "model.safetensors")


def test_of_an_unfinished_run_no_results_are_staged(short_run):
    short_run.heldout.unlink()
    assert set(list_files(staged(short_run.root))) == MODEL | CODE_FILES | {"resolved.json"}


def test_of_a_bare_folder_the_model_alone_is_staged(bare):
    assert set(list_files(staged(bare))) == MODEL | CODE_FILES


def test_of_a_chat_run_the_template_is_staged_as_it_is(chat_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = staged(chat_run.root)
    assert set(list_files(folder)) == MODEL | CODE_FILES | CHARTS | RESULTS | {"chat_template.jinja"}
    template = (chat_run.model / "chat_template.jinja").read_text(encoding="utf-8")
    assert "'\n'" in template
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == template
    told = read_json(folder / "resolved.json")["data"]["template"]
    assert told == read_json(chat_run.resolved)["data"]["template"]


QUESTION = "What did the fox see?"


def named_in(folder: Path) -> set[str]:
    """The files of a folder that contain the question of `chat_run`."""
    return {name for name in list_files(folder) if QUESTION.encode() in (folder / name).read_bytes()}


@pytest.fixture
def unprompted(chat_run, tmp_path, monkeypatch) -> RunFolder:
    """A chat run whose prompt was not given, but is a held-out question of its chats."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(chat_run.root, "runs/chat")
    run = RunFolder(Path("runs/chat"))
    assert (read_json(run.resolved)["run"]["prompts"], read_json(run.resolved)["prompts_from"]) == ([QUESTION], "given")
    change(run.resolved, prompts_from="held-out chats")
    return run


@pytest.mark.parametrize("checkpoint", [False, True])
def test_prompts_from_own_chats_are_staged_only_if_asked_for(checkpoint, unprompted):
    source = find_source(
        unprompted.checkpoints / f"checkpoint-{Run(unprompted).step}" if checkpoint else unprompted.root
    )
    for more in ({}, {"questions": True}):
        folder = Path(f"out/{len(more)}")
        folder.parent.mkdir(exist_ok=True)
        stage(source, folder, **more)
        (folder / "README.md").write_text(render(source, folder, Publication("you/chat")), encoding="utf-8")
        results = set() if checkpoint else {"evaluation/completions.json"}
        assert named_in(folder) == ({"README.md", "resolved.json", *results} if more else set())
    change(unprompted.resolved, prompts_from="given")
    assert chat_questions(Run(unprompted)) == []


@pytest.mark.parametrize("published", [True, False])
def test_push_names_prompts_from_own_chats_before_it_stages(published, unprompted, capsys):
    unprompted.published.write_text("broken")  # which ends it after that
    with pytest.raises(UsageError, match=r"published\.json is broken"):
        publish(parse_arguments(["runs/chat", "--dry_run", *["--publish_chat_questions"] * published]))
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("included" if published else "left out")
    assert f'"{QUESTION}"' in line


@pytest.mark.parametrize(
    ("context", "told", "staged_as"),
    [
        (32, {}, {"max_length": 32}),
        (32, {"max_new_tokens": 7}, {"max_new_tokens": 7}),
        (32, {"max_length": 20}, {"max_length": 20}),
        (511, {}, {"max_length": 511}),
        (512, {}, {}),
        (1024, {"max_new_tokens": 7}, {"max_new_tokens": 7}),
    ],
)
def test_a_pipeline_is_kept_within_a_short_context_unless_the_model_says_otherwise(context, told, staged_as, bare):
    change(bare / "config.json", max_position_embeddings=context)
    before = read_json(bare / "generation_config.json")
    assert before.pop("max_length") == 32  # a finished run has seen to it; others have not
    write_json(bare / "generation_config.json", {**before, **told})
    assert read_json(staged(bare) / "generation_config.json") == {**before, **staged_as}


def test_a_model_without_generation_settings_gets_what_a_short_context_needs(bare):
    (bare / "generation_config.json").unlink()
    assert read_json(staged(bare) / "generation_config.json") == {"max_length": 32}


def test_what_is_staged_is_a_copy_that_others_may_read_and_the_runs_own_files_stay_as_they_are(bare):
    for path in bare.iterdir():
        path.chmod(0o600)
    before = {path: path.read_bytes() for path in bare.iterdir()}
    folder = staged(bare)
    for path in folder.iterdir():
        path.write_bytes(b"changed")
    assert {path: path.read_bytes() for path in bare.iterdir()} == before
    assert {stat.S_IMODE(path.stat().st_mode) for path in bare.iterdir()} == {0o600}


def test_code_is_that_beside_the_weights_or_this_checkouts_if_asked_for(bare):
    with (bare / "gpt.py").open("a") as file:
        file.write("# as it was then\n")
    assert (staged(bare, allow_modified_code=True) / "gpt.py").read_bytes() == (bare / "gpt.py").read_bytes()
    folder = staged(bare, new_code=True)
    for name in CODE_FILES:
        assert (folder / name).read_bytes() == (CODE / name).read_bytes()


def test_code_that_a_file_imports_comes_along_wherever_it_imports_it(bare):
    (bare / "far.py").write_text("import math\n")
    (bare / "near.py").write_text("def far():\n    from .far import math\n    return math\n")
    with (bare / "gpt.py").open("a") as file:
        file.write("from .near import far\n")
    assert set(list_files(staged(bare, allow_modified_code=True))) == MODEL | CODE_FILES | {"near.py", "far.py"}


@pytest.mark.slow
def test_modified_code_is_refused_unless_the_run_recorded_it_or_the_flag_allows_it(short_run):
    assert read_json(short_run.resolved)["made_by"]["model_code"]["gpt.py"] == sha256(CODE / "gpt.py")
    with (short_run.model / "gpt.py").open("a") as file:
        file.write("import os  # as somebody has changed it\n")
    assert refusal(short_run.root).startswith(
        f"{short_run.model / 'gpt.py'} differs from the package's {CODE / 'gpt.py'}, and from"
    )
    assert stated(staged(short_run.root, allow_modified_code=True), short_run) == ["`gpt.py` differs from"]
    for path in (
        short_run.resolved,
        short_run.heldout,
    ):  # a run resumed with another version records that one at its end
        told = read_json(path)
        recorded = {**told["made_by"], "model_code": {"gpt.py": sha256(short_run.model / "gpt.py")}}
        write_json(path, {**told, "made_by": recorded})
        assert stated(staged(short_run.root), short_run) == []
        write_json(path, told)


def stated(folder: Path, run: RunFolder) -> list[str]:
    """What the card states of modified code."""
    text = render(find_source(run.root), folder, Publication("you/short"))
    return re.findall(r"\*\*Modified code:\*\* (.*?) the files of gpt2small_hf", text)


def test_files_are_told_with_size_and_hash_and_sorted(bare):
    told = list_files(staged(bare))
    assert list(told) == sorted(told)
    size = (bare / "model.safetensors").stat().st_size
    assert told["model.safetensors"] == {"size": size, "sha256": sha256(bare / "model.safetensors")}


def test_everything_staged_is_known_as_ours_so_that_a_later_push_can_take_it_away(short_run):
    names = list_files(staged(short_run.root))
    assert all(is_pushed_file(name, set()) for name in names)
    assert {name for name in names if is_loaded(name)} == MODEL | CODE_FILES


@pytest.mark.parametrize(
    ("name", "loaded", "ours"),
    [
        ("model-00001-of-00002.safetensors", True, True),
        ("model.safetensors.index.json", True, True),
        ("chat_template.jinja", True, True),
        ("named_by_auto_map.py", True, True),
        ("LICENSE-CODE", False, True),
        ("pytorch_model.bin", False, True),
        ("pytorch_model-00001-of-00002.bin", False, True),
        ("README.md", False, False),
        ("LICENSE", False, False),
        (".gitattributes", False, False),
        ("theirs.py", True, False),
        ("theirs.safetensors", True, False),
        ("charts/theirs.png", False, False),
        ("evaluation/theirs.json", False, False),
        ("data/weights.safetensors", False, False),
        ("tools/gpt.py", False, False),
        ("onnx/model.bin", False, False),
    ],
)
def test_what_is_loaded_and_what_is_ours_is_told_by_its_name(name, loaded, ours):
    assert (is_loaded(name), is_pushed_file(name, {"named_by_auto_map"})) == (loaded, ours)


def test_license_text_of_the_weights_is_written_where_it_is_known(tmp_path):
    apache, own = (REPOSITORY / "LICENSE").read_text(encoding="utf-8"), tmp_path / "terms.txt"
    own.write_text("Terms of our own.\n", encoding="utf-8")
    both, of_code = {"LICENSE", "LICENSE-CODE"}, {"LICENSE-CODE"}
    for license, native, holders, expected in (
        (License("apache-2.0"), False, ["you"], {"LICENSE"}),
        (License("apache-2.0"), True, [], {"LICENSE"}),
        (License("mit"), False, ["Ada", "Max"], both),
        (License("mit"), True, ["Ada", "Max"], {"LICENSE"}),
        (License("mit"), False, [], of_code),
        (License("cc-by-4.0"), False, ["you"], of_code),
        (License("other", "ours-1.0", file=own), False, ["you"], both),
        (License("apache-2.0", file=own), False, ["you"], both),
        (None, False, ["you"], of_code),
        (None, True, ["you"], set()),
    ):
        folder = tmp_path / f"{license and license.id}-{native}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        write_license(folder, license, native=native, holders=holders, year="2026")
        texts = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
        assert texts.keys() == expected
        assert texts.get("LICENSE-CODE", apache) == apache
        if license is not None and license.file:
            assert texts["LICENSE"] == "Terms of our own.\n"
        elif "LICENSE" in texts:
            assert texts["LICENSE"] == apache or "Copyright (c) 2026 Ada, Max\n" in texts["LICENSE"]


def test_the_native_form_has_the_same_weights_and_results_and_no_code(short_run, capsys):
    ours = staged(short_run.root)
    stage_native(ours, Path("native"))
    names = set(list_files(Path("native")))
    assert names == MODEL | CHARTS | RESULTS
    # In transformers 4, which does not know TokenizersBackend, and in 5.
    assert read_json(Path("native/tokenizer_config.json"))["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert read_json(Path("native/config.json"))["model_type"] == "gpt2"
    assert "auto_map" not in read_json(Path("native/config.json"))
    assert read_json(Path("native/generation_config.json"))["max_length"] == 32
    for name in CHARTS | RESULTS | {"tokenizer.json"}:
        assert (Path("native") / name).read_bytes() == (ours / name).read_bytes()
    assert capsys.readouterr().out == ""


# ---- links ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "model",
        "charts",
        "evaluation",
        "model/model.safetensors",
        "model/config.json",
        "model/notes.txt",
        "charts/loss.png",
        "evaluation/completions.json",
        "resolved.json",
        "metrics.jsonl",
        "samples.jsonl",
        "published.json",
    ],
)
def test_a_link_out_of_the_run_is_refused_by_name(name, short_run):
    path = short_run.root / name
    elsewhere = Path("elsewhere").resolve()
    elsewhere.mkdir()
    if path.exists():
        path.rename(elsewhere / path.name)
    else:
        (elsewhere / path.name).write_text("private")
    path.symlink_to(elsewhere / path.name)
    said = refusal(short_run.root)
    assert said.startswith(f"{path} is a link out of runs/short. Replace it by the file.")


def test_checkpoints_that_lie_elsewhere_behind_a_link_are_refused(short_run):
    short_run.heldout.unlink()
    short_run.checkpoints.rename("elsewhere")
    short_run.checkpoints.symlink_to(Path("elsewhere").resolve())
    assert "checkpoints/checkpoint-20 is a link out of runs/short" in refusal(short_run.root)


def test_a_link_of_a_bare_folder_to_elsewhere_is_refused(bare):
    (bare / "gpt.py").rename("gpt.py")
    (bare / "gpt.py").symlink_to(Path("gpt.py").resolve())
    assert refusal(bare).startswith("mine/gpt.py is a link out of mine")


def test_links_within_the_run_are_followed(short_run):
    last = short_run.checkpoints / "checkpoint-20" / "model.safetensors"
    (short_run.model / "model.safetensors").unlink()
    (short_run.model / "model.safetensors").symlink_to(last.resolve())
    (short_run.root / "charts").rename(short_run.root / "drawn")
    (short_run.root / "charts").symlink_to("drawn")
    folder = staged(short_run.root)
    assert set(list_files(folder)) == MODEL | CODE_FILES | CHARTS | RESULTS
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert sha256(folder / "model.safetensors") == sha256(last)


# ---- weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "best.pt", "extra.pth", "cache.pkl", "WEIGHTS.PT", "a.joblib"])
def test_a_pickled_file_beside_the_weights_is_refused(name, short_run):
    for folder in (short_run.model, short_run.checkpoints / "checkpoint-10"):
        (folder / name).write_bytes(b"\x80\x04.")
    for which in (short_run.root, short_run.checkpoints / "checkpoint-10"):
        said = refusal(which)
        assert f"/{name} is a pickled file, which can run code or contain a token" in said


@pytest.mark.parametrize("name", ["optimizer.pt", "training_args.bin"])
def test_what_belongs_into_a_checkpoint_is_refused_in_the_model_folder(name, short_run):
    shutil.copyfile(short_run.checkpoints / "checkpoint-10" / name, short_run.model / name)
    assert f"runs/short/model/{name} is a pickled file" in refusal(short_run.root)


def test_missing_weights_are_refused(short_run):
    (short_run.model / "model.safetensors").unlink()
    said = refusal(short_run.root)
    assert said == "runs/short/model/model.safetensors does not exist. Save the model again, with save_pretrained."


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_weights_that_were_cut_short_are_refused(kept, short_run):
    path = short_run.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert refusal(short_run.root).startswith(f"{path} is not a complete safetensors file (")


def in_shards(folder: Path) -> list[Path]:
    """Save the weights of a folder again, in several files. Returns: these."""
    model = GPT2SmallForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    return shards


def test_weights_in_shards_are_staged_with_their_index_and_known_as_those_that_were_measured(short_run):
    shards = in_shards(short_run.model)
    expected = {path.name for path in shards} | {"model.safetensors.index.json"}
    folder = staged(short_run.root)
    assert set(list_files(folder)) == MODEL - {"model.safetensors"} | expected | CODE_FILES | CHARTS | RESULTS
    shutil.rmtree("out/staged")
    poke(shards[1], 0.5)
    assert "is not the file that the run evaluated" in refusal(short_run.root)


def test_of_weights_in_both_forms_the_one_that_transformers_loads_is_staged(bare):
    shutil.copyfile(bare / "model.safetensors", "weights")
    in_shards(bare)
    Path("weights").rename(bare / "model.safetensors")
    assert set(list_files(staged(bare))) == MODEL | CODE_FILES


def test_a_missing_or_damaged_shard_is_refused_by_its_name(bare):
    shards = in_shards(bare)
    whole_shard = shards[1].read_bytes()
    shards[1].write_bytes(whole_shard[:-1])
    assert refusal(bare).startswith(f"{shards[1]} is not a complete safetensors file (")
    shards[1].unlink()
    assert refusal(bare).startswith(f"{shards[1]} does not exist.")


@pytest.mark.parametrize("names", [[], {}, {"weight_map": {}}, {"weight_map": {"a": "notes.txt"}}])
def test_an_index_that_names_no_weights_is_refused(names, bare):
    in_shards(bare)
    (bare / "notes.txt").write_text("private")
    write_json(bare / "model.safetensors.index.json", names)
    assert "model.safetensors.index.json does not name safetensors files of its folder" in refusal(bare)


def test_an_index_that_names_weights_of_another_folder_is_refused(bare):
    in_shards(bare)
    save_file({"a": torch.zeros(2)}, "other.safetensors")
    write_json(bare / "model.safetensors.index.json", {"weight_map": {"a": "../other.safetensors"}})
    assert "model.safetensors.index.json does not name safetensors files of its folder" in refusal(bare)


def test_weights_that_were_changed_since_they_were_measured_are_refused(short_run):
    poke(short_run.model / "model.safetensors", 0.5)
    said = refusal(short_run.root)
    assert said.startswith("runs/short/model/model.safetensors is not the file that the run evaluated")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("of", ["bare folder", "checkpoint", "shards"])
def test_one_value_that_is_not_finite_is_refused_with_its_tensors_name(value, of, short_run):
    shutil.copytree(short_run.model, "mine")
    folder = short_run.checkpoints / "checkpoint-10" if of == "checkpoint" else Path("mine")
    path = in_shards(folder)[1] if of == "shards" else folder / "model.safetensors"
    name = poke(path, value)
    said = refusal(folder)
    assert said.startswith(f"{path.name}: {name} has values that are not finite")


@pytest.mark.parametrize("name", sorted(MODEL | CODE_FILES | CHARTS | RESULTS))
def test_a_file_without_a_byte_is_refused_by_its_name(name, short_run):
    path = short_run.root / name if "/" in name or name == "resolved.json" else short_run.model / name
    path.write_bytes(b"")
    said = refusal(short_run.root)
    assert path.name in said
    assert re.search("is empty|is not valid JSON|is not a complete safetensors file", said)


# ---- code -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("from .parts.gpt import x", "mine has no parts.gpt.py, which the model needs to load"),
        ("from ..gpt import x", "mine has no .gpt.py, which the model needs to load"),
        ("def f():\n    from .lost import x", "mine has no lost.py, which the model needs to load"),
    ],
)
def test_code_with_imports_that_transformers_does_not_follow_is_refused(lines, said, bare):
    with (bare / "gpt.py").open("a") as file:
        file.write(f"\n{lines}\n")
    assert refusal(bare).startswith(said)


@pytest.mark.parametrize("name", sorted(CODE_FILES))
def test_missing_code_is_refused_with_what_to_do(name, bare):
    (bare / name).unlink()
    said = refusal(bare)
    assert said.startswith(f"mine has no {name}, which the model needs to load.")
    assert "--code_only" in said


# ---- tokenizer --------------------------------------------------------------------------------------------------


def test_a_tokenizer_with_more_ids_than_the_model_has_entries_is_refused(bare):
    train_tokenizer([string.ascii_letters] * 20, 301).save_pretrained(bare)
    said = refusal(bare)
    assert said.startswith("the tokenizer in mine has ids up to 300, the model 300 entries. Restore")


def test_a_tokenizer_that_ends_texts_otherwise_is_refused_with_both_ends(bare):
    change(bare / "tokenizer_config.json", eos_token="a")
    end = AutoTokenizer.from_pretrained(bare).eos_token_id
    said = refusal(bare)
    assert said.startswith(f"the tokenizer in mine ends texts with id {end} (a), the model with 0. Restore")


def test_a_tokenizer_may_end_texts_in_any_of_the_models_ways(bare):
    change(bare / "tokenizer_config.json", eos_token="a")
    end = AutoTokenizer.from_pretrained(bare).eos_token_id
    change(bare / "generation_config.json", eos_token_id=[0, end])
    assert "tokenizer.json" in list_files(staged(bare))


def test_nobody_is_told_from_where_model_and_tokenizer_were_loaded_here(bare):
    before = {name: read_json(bare / name) for name in MODEL if name.endswith(".json") and name != "tokenizer.json"}
    for name, told in before.items():
        write_json(bare / name, {**told, "_name_or_path": "/home/ada/x", "name_or_path": "/home/ada/x"})
    words = bare / "tokenizer_config.json"
    write_json(words, {**read_json(words), "tokenizer_file": "/home/ada/x/tokenizer.json"})  # as transformers 4 does
    folder = staged(bare)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        assert "_name_or_path" not in read_json(folder / name)
    assert read_json(folder / "tokenizer_config.json") == before["tokenizer_config.json"]


@pytest.mark.parametrize("which", ["", "checkpoints/checkpoint-10"])
def test_a_tokenizer_of_the_same_size_and_other_content_is_refused_where_the_run_knows_its_own(which, short_run):
    folder = short_run.root / which if which else short_run.model
    other = train_tokenizer([string.ascii_letters] * 20, 300)
    assert len(other) == len(AutoTokenizer.from_pretrained(short_run.model))
    other.save_pretrained(folder)
    said = refusal(short_run.root / which)
    assert said.startswith(f"{folder}/tokenizer.json is not the file that the run evaluated")


def test_a_model_without_a_tokenizer_is_refused(short_run):
    shutil.copytree(short_run.model, "mine")
    for folder in (Path("mine"), short_run.model):
        (folder / "tokenizer.json").unlink()
        said = refusal(Path("mine") if folder == Path("mine") else short_run.root)
        assert said == f"{folder} has no tokenizer.json. Name the tokenizer it was trained with: --tokenizer"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {"type": "Strange"}}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_refused_by_the_folders_name(name, content, bare):
    (bare / name).write_text(content)
    said = refusal(bare)
    assert said.startswith("the tokenizer in mine cannot be loaded: ")
    assert "out/" not in said
