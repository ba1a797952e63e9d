"""`plan`: a recipe for another machine, understood here, before anything runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CORPUS, REPOSITORY, chat_words, run_script, run_train, tiny_words

from gpt2small_hf.commands.plan import main
from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.config.parser import without_flags
from gpt2small_hf.data.corpus.prepare import prepare
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import read_json, read_jsonl
from gpt2small_hf.runs.layout import RunFolder

FULL_SIZE = str(REPOSITORY / "examples" / "gpt2-small.yaml")


def test_a_recipe_for_eight_gpus_is_planned_without_one(capsys):
    words = ["--tokens_per_parameter", "20", "--per_device_train_batch_size", "12"]
    main([FULL_SIZE, *words, "--device_name", "A100", "--n_devices=8", "--mfu", "0.5"])
    shown = capsys.readouterr().out
    assert "163,009,536 parameters" in shown
    assert "3,260,252,160: 20.0 a parameter, 26.4 without embeddings" in shown
    assert "33,165 of 98,304 tokens (96 rows of 1,024)" in shown
    # 2.786e18 FLOPs / (8 x 312e12 x 0.5) = 2,232 s
    assert "0.6 h on 8 x A100 at 50% of 312 TFLOP/s in bfloat16" in shown
    # two checkpoints kept and one being written, of 12 bytes a parameter, and the model
    assert "6.1 GiB at most: 2 checkpoints of 1.8 GiB kept" in shown
    assert "1.40e-03  1.60e-03" in shown
    assert "98,304   284,322" in shown
    assert "C = 2.03e+18 FLOPs, without embeddings and head" in shown
    assert "D = 3,260,252,160 tokens, N = 163,009,536 parameters (all), tau = 1.084·(D/N)^-0.527 = 0.224" in shown
    assert "Power Lines: 134.7 rows, of 2,048 tokens in its paper; of 1,024: 137,910 tokens" in shown
    assert f"next: gpt2small train {FULL_SIZE} {' '.join(words)}\n" in shown


@pytest.mark.parametrize(
    ("words", "device", "said"),
    [
        # 2.786e18 FLOPs at 40 %: of 312, 156 and 19.5 TFLOP/s on eight devices
        (["--bf16", "false", "--fp16"], "a100", "0.8 h on 8 x A100 at 40% of 312 TFLOP/s in float16"),
        (["--bf16", "false", "--tf32"], "A100", "1.6 h on 8 x A100 at 40% of 156 TFLOP/s in tf32"),
        (["--bf16", "false"], "A100", "12.4 h on 8 x A100 at 40% of 19.5 TFLOP/s in float32"),
        ([], "T4", "unknown: the T4 does not compute in bfloat16. Use --fp16"),
    ],
)
def test_the_time_with_a_given_share_is_that_of_the_recipes_precision(words, device, said, capsys):
    main([FULL_SIZE, "--tokens", "3260252160", *words, "--device_name", device, "--n_devices", "8", "--mfu", "0.4"])
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("recipe", "device", "said"),
    [
        # The series: 3 h 24 min, and 8.1 h in float32; 45 h and 71.9 h at its rates on one RTX 3090.
        (
            "baseline",
            "8 A100",
            "3.4 h on 8 x A100 at 9% of 312 TFLOP/s in float16, as the reference",
        ),
        ("float32", "8 A100", "8.1 h on 8 x A100 at 61% of 19.5 TFLOP/s in float32, as the reference"),
        ("local-baseline", "1 RTX3090", "45.5 h on 1 x RTX 3090 at 24% of 71 TFLOP/s in float16, as the reference"),
        (
            "baseline",
            "8 H100",
            "0.4 to 1.1 h on 8 x H100 at 24% to 9% of 989 TFLOP/s in float16, as",
        ),
        ("baseline", "8 A100 0.5", "at 50% of 312 TFLOP/s in float16 (measured by the reference series: 9%, 3.4 h)"),
    ],
)
def test_the_time_without_a_given_share_is_what_was_measured(recipe, device, said, capsys):
    n_devices, name, *mfu = device.split()
    words = [str(REPOSITORY / "examples" / "interventions" / f"{recipe}.yaml"), "--n_devices", n_devices]
    main([*words, "--device_name", name, *(["--mfu", *mfu] if mfu else [])])
    assert said in capsys.readouterr().out


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A prepared folder of some rows of 32 tokens, from documents of 20 to 130."""
    place = tmp_path_factory.mktemp("prepared")
    corpus = place / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": line * (1 + i % 4)}) + "\n" for i, line in enumerate(CORPUS)))
    settings = PrepareArguments(text=[str(corpus)], vocab_size=300, validation_fraction=0.2)
    return prepare(settings, place / "data")


OF_TEXT = [
    *("--max_position_embeddings", "32", "--hidden_size", "16", "--num_hidden_layers", "2"),
    *("--num_attention_heads", "2"),
]
SHORT = ["--per_device_train_batch_size", "4", "--eval_strategy", "no", "--save_strategy", "no", "--logging_steps", "1"]


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The words of each of the plan's facts."""
    main(words)
    facts = capsys.readouterr().out.partition("\n\n")[0]
    return {line.split()[0]: line.split()[1:] for line in facts.splitlines()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--num_train_epochs 2",
        "--num_train_epochs 1.3 --gradient_accumulation_steps 3",
        "--num_train_epochs 2 --packing bos_bestfit",
        "--num_train_epochs 2 --gradient_accumulation_steps 2 --dataloader_drop_last",
        "--max_steps 40 --gradient_accumulation_steps 3",
        "--tokens 3000 --gradient_accumulation_steps 3",
    ],
)
def test_a_text_run_takes_the_planned_steps_and_tokens(words, prepared, tmp_path, capsys):
    (recipe := tmp_path / "empty.yaml").write_text("# all defaults\n")
    words = [str(recipe), "--data_dir", str(prepared), *OF_TEXT, *SHORT, *words.split()]
    said = planned(words, capsys)
    run = run_train([*words, "--output_dir", str(tmp_path / "run"), "--use_cpu"])
    last = [row for row in read_jsonl(run.metrics) if "num_input_tokens_seen" in row][-1]
    assert said["steps"][0].replace(",", "") == str(last["step"])
    assert said["tokens"][0].rstrip(":").replace(",", "") == str(last["num_input_tokens_seen"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--num_train_epochs 3",
        "--num_train_epochs 3 --packing padding",
        "--num_train_epochs 2.5 --packing padding --gradient_accumulation_steps 3",
    ],
)
def test_a_chat_run_takes_the_planned_steps(words, chat_place, tmp_path, capsys):
    words = [*chat_words(chat_place, tmp_path / "run"), *SHORT, *words.split()]
    capsys.readouterr()
    said = planned(words, capsys)
    assert said["steps"][0] == str(read_jsonl(run_train(words).metrics)[-1]["step"])


def test_several_devices_are_planned_with_the_batch_that_they_train_with(chat_place, tmp_path, capsys):
    """The choice gives an epoch ten steps or more, on any number of devices."""
    words = chat_words(chat_place, tmp_path / "run", "--num_train_epochs", "1")
    words = without_flags(words, {"packing", "per_device_train_batch_size"})
    capsys.readouterr()
    for more in ([], ["--n_devices", "2"]):
        assert int(planned([*words, *more], capsys)["steps"][0]) >= 10


@pytest.mark.slow
def test_text_for_a_trained_model_takes_the_planned_steps(tiny_run, prepared, tmp_path, capsys):
    (recipe := tmp_path / "empty.yaml").write_text("# all defaults\n")
    corpus = ["--text", str(tiny_run.root.parents[1] / "corpus.jsonl"), "--init_from", str(tiny_run.root)]
    words = [str(recipe), *corpus, *SHORT, "--tokens", "1000"]
    steps = planned(words, capsys)["steps"][0]
    run = run_train([*words, "--output_dir", str(tmp_path / "run"), "--use_cpu"])
    assert steps == str(read_jsonl(run.metrics)[-1]["step"]) == "8"


@pytest.mark.slow
def test_two_processes_take_the_planned_steps(prepared, tmp_path, capsys):
    (recipe := tmp_path / "empty.yaml").write_text("# all defaults\n")
    words = [str(recipe), "--data_dir", str(prepared), *OF_TEXT, *SHORT, "--num_train_epochs", "2"]
    words += ["--gradient_accumulation_steps", "2"]
    said = planned([*words, "--n_devices", "2"], capsys)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, str(REPOSITORY / "train.py"), *words, "--output_dir", str(tmp_path / "run"), "--use_cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = [row for row in read_jsonl(RunFolder(tmp_path / "run").metrics) if "num_input_tokens_seen" in row][-1]
    assert said["steps"][0] == str(last["step"])
    assert said["tokens"][0].rstrip(":").replace(",", "") == str(last["num_input_tokens_seen"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "saved", "kept"),
    [
        ("--max_steps 25 --save_steps 10", 3, 2),
        ("--max_steps 25 --save_steps 10 --save_total_limit 9", 3, 3),
        ("--max_steps 20 --save_steps 10", 2, 2),
        ("--max_steps 20 --save_steps 0.3", 4, 2),
        ("--max_steps 60 --save_strategy epoch", 2, 2),
        ("--num_train_epochs 3 --save_strategy epoch --save_total_limit 1", 3, 1),
        ("--max_steps 9 --save_steps 10", 1, 1),
    ],
)
def test_the_planned_disk_counts_every_checkpoint_that_training_writes(words, saved, kept, prepared, tmp_path, capsys):
    (recipe := tmp_path / "empty.yaml").write_text("# all defaults\n")
    words = [str(recipe), "--data_dir", str(prepared), *OF_TEXT, *SHORT[:4], *words.split()]
    said = planned(words, capsys)
    disk, weights = said["disk"], 4 * int(said["model"][0].replace(",", ""))
    run = run_train([*words, "--output_dir", str(tmp_path / "run"), "--use_cpu", "--sample_all_checkpoints"])
    n_saved = len({row["step"] for row in read_jsonl(run.samples)} - {0})
    folders = list(run.checkpoints.glob("checkpoint-*"))
    assert (n_saved, len(folders)) == (saved, kept)
    assert disk[disk.index("checkpoints") - 1] == str(kept)
    at_once = min(saved, kept + 1)
    assert float(disk[0]) == pytest.approx((3 * at_once + 1) * weights / 2**20, abs=0.06)


def test_prepared_text_is_counted_in_rows_and_passes(prepared, tmp_path, capsys):
    (recipe := tmp_path / "empty.yaml").write_text("# all defaults\n")
    words = [str(recipe), "--data_dir", str(prepared), *OF_TEXT, "--per_device_train_batch_size", "4"]
    text = " ".join(planned([*words, "--num_train_epochs", "2"], capsys)["text"])
    n_rows = len(TextDataset(prepared, "train", 32))
    assert text == f"{n_rows * 32:,} tokens in {n_rows} rows, 2.0 passes"
    with pytest.raises(UsageError, match="the length of this run is unknown"):
        main([str(recipe)])


@pytest.mark.slow
def test_a_budget_of_tokens_becomes_whole_steps_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = tiny_words(tmp_path, tmp_path / "run")
    at = words.index("--max_steps")
    run = run_train([*words[:at], *words[at + 2 :], "--tokens", "500"])
    resolved = read_json(run.resolved)
    assert resolved["trainer"]["max_steps"] == 4  # of 4 rows of 32 tokens
    assert resolved["run"]["tokens"] == 500


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--branch_from", "nowhere"], "--branch_from nowhere is not a complete checkpoint"),
        (["--device_name", "Abacus"], "--device_name Abacus is unknown. Known: GB200, B200"),
        (["--device_name", "H1000"], "--device_name H1000 is unknown. Did you mean H100?"),
        (["--mfu", "40"], "--mfu is 40. Give a share above 0, up to 1."),
        (["--n_devices", "0"], "--n_devices is 0."),
        (["--tokens", "9", "--max_steps", "9"], "--max_steps cannot be combined with --tokens"),
        (["--tokens_per_parameter", "-1"], "--tokens_per_parameter is -1."),
        (["--tokens", "0"], "--tokens is 0."),
        (["--divices", "2"], "Did you mean --n_devices?"),
    ],
)
def test_a_mistake_is_one_line(words, message):
    with pytest.raises(UsageError) as caught:
        main(words)
    assert message in str(caught.value)


@pytest.mark.slow
def test_the_command_ends_with_the_next_and_mistakes_with_status_two():
    command = ["-m", "gpt2small_hf", "plan"]
    done = run_script([*command, "--tokens", "3_000_000"], REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("next: python -m gpt2small_hf train --tokens 3_000_000\n")
    done = run_script([*command, "--mfu", "2"], REPOSITORY)
    assert (done.returncode, done.stdout) == (2, "")


def test_of_a_branch_only_what_lies_past_its_checkpoint_is_planned(tiny_run, capsys):
    folder = tiny_run.root.parent.parent / read_json(tiny_run.resolved)["data"]["folder"]
    words = ["--data_dir", str(folder), "--max_steps", "50", "--branch_from"]
    main([*words, str(tiny_run.checkpoints / "checkpoint-20")])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps")]
    assert line.split()[1] == "30"
