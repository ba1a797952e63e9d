"""What may be named on the command line: which model is found, which step it is of, and what is refused and why."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import run_train, tiny_words
from conversion import test_conversion
from conversion.test_conversion import write_reference
from transformers import AutoTokenizer

from gpt2small_hf.conversion.convert import convert
from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.arguments import check_source
from gpt2small_hf.publishing.source import checkpoints, find_source
from gpt2small_hf.runs.files import read_json, sha256, write_json
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.training.checkpoint_files import write_manifest


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- runs -------------------------------------------------------------------------------------------------------


def test_a_run_is_its_kept_model_at_its_last_step(short_run):
    before = files(short_run.root)
    source = find_source(short_run.root)
    assert (source.name, source.model, source.root, source.run_folder) == (
        "short",
        short_run.model,
        short_run.root,
        short_run,
    )
    assert (source.step, source.is_checkpoint, source.converted) == (20, False, None)
    assert source.label == "short step 20"
    assert source.run is not None
    assert source.run.resolved.to_json() == read_json(short_run.resolved)
    assert files(short_run.root) == before


@pytest.mark.parametrize("where", ["runs/short/model", "runs/short/model/", "./runs/../runs/short/model"])
def test_the_model_folder_of_a_run_is_the_run(short_run, where):
    source = find_source(Path(where))
    assert (source.name, source.step, source.is_checkpoint) == ("short", 20, False)
    assert source.run_folder.published.resolve() == short_run.published.resolve()


def test_the_model_folder_of_a_run_is_the_run_also_when_named_from_within_it(short_run, monkeypatch):
    monkeypatch.chdir(short_run.root)
    source = find_source(Path("model"))
    assert (source.name, source.step) == ("short", 20)
    assert source.model.is_dir()


def test_a_run_is_also_found_in_a_home_folder_and_through_a_link(short_run, monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    Path("latest").symlink_to(short_run.root)
    for name in ("~/runs/short", "latest"):
        source = find_source(Path(name))
        assert (source.name, source.step) == ("short", 20)


def test_a_checkpoint_is_found_with_its_run_and_step(short_run):
    source = find_source(short_run.checkpoints / "checkpoint-10")
    assert (source.name, source.step, source.is_checkpoint) == ("short", 10, True)
    assert source.model == short_run.checkpoints / "checkpoint-10"
    assert source.run_folder.root.resolve() == short_run.root.resolve()
    assert source.label == "short step 10"


def test_the_checkpoints_of_a_run_come_by_step_and_without_what_is_damaged(short_run, capsys):
    assert [source.step for source in checkpoints(short_run)] == [10, 20]
    (short_run.checkpoints / "checkpoint-10").rename(
        short_run.checkpoints / "checkpoint-30"
    )  # by step, and not by name
    assert [source.step for source in checkpoints(short_run)] == [10, 20]
    weights = short_run.checkpoints / "checkpoint-30" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert [source.step for source in checkpoints(short_run)] == [20]
    assert "skipping runs/short/checkpoints/checkpoint-30: it is damaged" in capsys.readouterr().err


def test_source_of_an_unfinished_run_is_its_latest_complete_checkpoint(short_run, capsys):
    short_run.heldout.unlink()
    source = find_source(short_run.root)
    assert (source.step, source.is_checkpoint) == (20, True)
    assert source.model == short_run.checkpoints / "checkpoint-20"
    assert (
        find_source(short_run.model).model == source.model
    )  # what is in model/ of a run that did not finish is nobody's word
    weights = short_run.checkpoints / "checkpoint-20" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    source = find_source(short_run.root)
    assert (source.step, source.is_checkpoint) == (10, True)
    assert "skipping runs/short/checkpoints/checkpoint-20: it is damaged" in capsys.readouterr().err


def test_an_unfinished_run_without_a_checkpoint_is_refused(short_run):
    short_run.heldout.unlink()
    shutil.rmtree(short_run.checkpoints)
    with pytest.raises(UsageError, match=r"runs/short is not finished and has no checkpoint\. Resume it"):
        find_source(short_run.root)


def test_adapters_are_refused_as_a_checkpoint_and_as_that_of_an_unfinished_run(short_run):
    for path in short_run.checkpoints.glob("*"):
        (path / "model.safetensors").rename(path / "adapter_model.safetensors")
        write_manifest(path, scheduled=True)
    said = r"checkpoint-20 has only adapters\. Publish the finished run, whose model has them merged\."
    with pytest.raises(UsageError, match=said):
        find_source(short_run.checkpoints / "checkpoint-20")
    assert find_source(short_run.root).step == 20  # the finished run's model has them merged
    short_run.heldout.unlink()
    with pytest.raises(UsageError, match=said):
        find_source(short_run.root)


def test_a_checkpoint_that_was_not_written_to_its_end_is_refused(short_run):
    (short_run.checkpoints / "checkpoint-10" / "trainer_state.json").unlink()
    with pytest.raises(UsageError, match=r"checkpoint-10 is not a complete checkpoint: it has no trainer_state\.json"):
        find_source(short_run.checkpoints / "checkpoint-10")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save_steps", "kept"),
    [
        (5, 5),  # the best of four
        (10, 20),  # the best was measured at step 5, where nothing was saved, so the run kept its last
    ],
)
def test_a_run_that_keeps_its_best_step_is_of_the_step_whose_weights_it_kept(save_steps, kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The more of the words is learned, the less likely are digits: 5.7, 5.9, 6.2, 6.3 at the four measurements.
    (tmp_path / "digits.txt").write_text("0123456789 " * 400, encoding="utf-8")
    often = ("--eval_steps", "5", "--save_steps", str(save_steps), "--load_best_model_at_end")
    words = [*tiny_words(tmp_path, tmp_path / "runs" / "best"), "--validation_text", str(tmp_path / "digits.txt")]
    run = run_train([*words, *often])
    losses = {row.step: row.eval_loss for row in Run(run).metrics if row.has("eval_loss") and row.step}
    assert min(losses, key=losses.__getitem__) == 5
    same = [p.parent.name for p in run.checkpoints.glob("*/*.safetensors") if sha256(p) == sha256(run.model / p.name)]
    assert same == [f"checkpoint-{kept}"]
    assert find_source(run.root).step == kept
    assert (read_json(run.heldout)["step"], read_json(run.heldout)["last_step"]) == (kept, 20)


@pytest.mark.parametrize("which", ["runs/short", "runs/short/model", "runs/short/checkpoints/checkpoint-10"])
def test_another_tokenizer_than_its_own_cannot_be_named_for_a_run(which, short_run):
    with pytest.raises(UsageError, match=r"runs/short is a run and has its own tokenizer\. Omit --tokenizer\."):
        find_source(Path(which), "words")


def test_a_finished_run_whose_model_was_taken_away_is_refused(short_run):
    shutil.rmtree(short_run.model)
    with pytest.raises(
        UsageError, match=r"runs/short/model does not exist\. Restore it, or publish a checkpoint of the run\."
    ):
        find_source(short_run.root)
    assert find_source(short_run.checkpoints / "checkpoint-20").step == 20


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("resolved.json", "{}", ": run is missing, expected object."),
        ("resolved.json", "[]", " is [], expected an object."),
        ("evaluation/heldout.json", '{"after": {}}', ": after.loss is missing, expected float."),
        ("metrics.jsonl", "", " is missing or empty. Restore it"),
        (
            "metrics.jsonl",
            '{"step": 0, "eval_loss": 5.7}\n',
            " has no training loss. Restore it, or train for at least 5 steps.",
        ),
    ],
)
def test_a_run_of_which_files_are_not_whole_is_refused_by_their_name(name, content, said, short_run):
    (short_run.root / name).write_text(content)
    with pytest.raises(UsageError) as refusal:
        find_source(short_run.root)
    assert str(refusal.value).startswith(f"runs/short/{name}{said}")


# ---- other folders ----------------------------------------------------------------------------------------------


def test_a_bare_folder_of_ours_is_published_without_a_run_and_left_as_it_is(short_run):
    shutil.copytree(short_run.model, "elsewhere/mine")
    before = files(Path("elsewhere"))
    source = find_source(Path("elsewhere/mine"))
    assert (source.name, source.label, source.model) == ("mine", "mine", Path("elsewhere/mine"))
    assert (source.run, source.step, source.converted, source.is_checkpoint) == (None, None, None, False)
    assert source.run_folder.staged == Path("runs/mine/staged")
    assert files(Path("elsewhere")) == before
    assert list(Path("runs").iterdir()) == [short_run.root]


def test_published_folder_with_resolved_json_is_a_model_not_a_run(short_run):
    shutil.copytree(short_run.model, "published")
    shutil.copyfile(short_run.resolved, "published/resolved.json")
    source = find_source(Path("published"))
    assert (source.name, source.run, source.model) == ("published", None, Path("published"))


def test_a_folder_called_as_a_run_is_refused_lest_their_files_mix(short_run):
    shutil.copytree(short_run.model, "elsewhere/short")
    with pytest.raises(UsageError, match=r"runs/short is a run of the same name\. Rename elsewhere/short"):
        find_source(Path("elsewhere/short"))


@pytest.fixture
def reference(tmp_path, tiny_tokenizer, monkeypatch) -> Path:
    """A model as the reference series leaves it, and its tokenizer in `words`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(test_conversion, "V", len(tiny_tokenizer))
    write_reference(Path("theirs"))
    write_json(Path("theirs/train.json"), {"dataset": "somebody/some-text", "min_train_tokens": 3_260_190_720})
    tiny_tokenizer.save_pretrained("words")
    return Path("theirs")


def test_a_model_of_the_reference_series_is_converted_and_what_lay_beside_it_kept(reference, tiny_tokenizer, capsys):
    before = files(reference)
    source = find_source(reference, "words")
    assert (source.name, source.label, source.run, source.step) == ("theirs", "theirs", None, None)
    assert source.model == Path("runs/theirs/converted")
    assert source.converted is not None
    assert source.converted["what"].startswith("reference series")
    assert source.converted["settings"] == read_json(reference / "train.json")
    assert read_json(source.model / "config.json")["model_type"] == "gpt2small"
    assert AutoTokenizer.from_pretrained(source.model).get_vocab() == tiny_tokenizer.get_vocab()
    assert files(reference) == before
    again = find_source(reference, "words")  # what was converted before is no hindrance
    assert again == source
    by_its_own_name = find_source(source.model)
    assert by_its_own_name.converted == source.converted
    assert "weights equal bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["push", "convert"])
def test_weights_from_the_cache_of_the_hub_are_known_by_the_repository_they_come_from(command, reference):
    cached = Path("hub/models--somebody--their-gpt/snapshots/0123abc")
    cached.parent.mkdir(parents=True)
    reference.rename(cached)
    if command == "convert":
        convert(str(cached), Path("mine"), "gpt2small", tokenizer="words")
    source = find_source(Path("mine")) if command == "convert" else find_source(cached, "words")
    assert source.converted is not None
    assert source.origin == "somebody/their-gpt"
    assert source.converted["what"].startswith("reference series")


def test_local_weights_keep_what_they_were_when_they_are_converted_and_converted_again(reference):
    convert(str(reference), Path("mine"), "gpt2small", tokenizer="words")
    convert("mine", Path("again"), "gpt2small")
    for name in ("mine", "again"):
        source = find_source(Path(name))
        settings = read_json(reference / "train.json")
        assert source.converted == {"what": "reference series", "settings": settings, "origin": None}
        assert source.origin is None


def test_a_model_of_ours_from_the_cache_of_the_hub_has_its_repository_as_origin(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cached = Path("hub/models--ada--tiny/snapshots/0123abc")
    shutil.copytree(tiny_run.model, cached)
    convert(str(cached), Path("mine"), "gpt2small")
    convert(str(tiny_run.model), Path("plain"), "gpt2small")
    found = [find_source(path) for path in (cached, Path("mine"), Path("plain"))]
    assert [(source.origin, source.converted) for source in found] == [
        ("ada/tiny", None),
        ("ada/tiny", None),
        (None, None),
    ]


def test_a_reference_model_without_settings_is_converted_with_none(reference):
    (reference / "train.json").unlink()
    source = find_source(reference, "words")
    assert source.converted is not None
    assert source.converted["settings"] == {}


def test_weights_without_a_tokenizer_are_refused_with_the_flag_that_names_one(reference):
    with pytest.raises(UsageError, match=r"theirs has no tokenizer\. .* --tokenizer FOLDER_OR_ID"):
        find_source(reference)
    assert not list(Path("runs").glob("*/*"))


@pytest.mark.slow
def test_weights_with_a_larger_tokenizer_are_refused(reference, monkeypatch):
    monkeypatch.setattr(test_conversion, "V", 299)
    write_reference(reference)
    with pytest.raises(UsageError, match=r"the tokenizer words has 300 entries, the model's vocabulary 299"):
        find_source(reference, "words")


@pytest.mark.parametrize(
    ("content", "said"),
    [("[1]", "is not a JSON object with settings. Correct or remove it."), ("{", "is not valid JSON")],
)
def test_settings_that_are_none_are_refused_before_anything_is_converted(content, said, reference):
    (reference / "train.json").write_text(content)
    with pytest.raises(UsageError) as refusal:
        find_source(reference, "words")
    assert f"theirs/train.json {said}" in str(refusal.value)
    assert not Path("runs").exists()


# ---- what is no model -------------------------------------------------------------------------------------------


def test_a_name_that_does_not_exist_is_refused_with_one_that_might(short_run):
    with pytest.raises(UsageError, match=r"^runs/shrot does not exist\. Name a run folder, such as runs/tiny, or one"):
        find_source(Path("runs/shrot"))


def test_a_file_is_refused_with_the_reason(short_run):
    with pytest.raises(UsageError, match=r"^runs/short/model/model\.safetensors is a file\. Name its folder"):
        find_source(short_run.model / "model.safetensors")


def test_a_folder_without_a_model_is_refused_with_what_was_looked_for(short_run):
    with pytest.raises(UsageError, match=r"^runs/short/charts is not a model: expected a run, or config\.json"):
        find_source(short_run.root / "charts")
    assert list(Path("runs").iterdir()) == [short_run.root]


def test_a_folder_around_runs_checkpoints_or_data_is_refused_with_their_names(short_run):
    for name in "bcdefg":
        (Path("runs") / name).mkdir()
        (Path("runs") / name / "resolved.json").touch()
    Path("data/text-1").mkdir(parents=True)
    Path("data/text-1/meta.json").touch()
    checkpoints = ", ".join(f"runs/short/checkpoints/checkpoint-{step}" for step in (10, 20))
    for name, said in (
        ("runs", "it contains 7 runs: runs/b, runs/c, runs/d, runs/e, runs/f …. Name one of them."),
        ("runs/short/checkpoints", f"it contains 2 checkpoints: {checkpoints}. Name one of them."),
        ("data", "it contains 1 data set: data/text-1. Name a run."),
        ("data/text-1", "data/text-1 is a prepared data set, not a model. Name the run that was trained on it."),
    ):
        with pytest.raises(UsageError) as refused:
            check_source(Path(name))
        assert said in str(refused.value)


def test_a_run_whose_settings_are_not_json_is_refused_by_the_files_name(short_run):
    short_run.resolved.write_text(json.dumps({"run": {}})[:-1])
    with pytest.raises(UsageError, match=r"runs/short/resolved\.json is not valid JSON"):
        find_source(short_run.root)
