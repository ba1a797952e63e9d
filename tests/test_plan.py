"""`plan`: a recipe for another machine, understood here, before anything runs."""

import subprocess
import sys

import pytest
from conftest import REPOSITORY, run_train, tiny_words

from gpt2small_hf.plan import main
from gpt2small_hf.runs import UsageError, read_json

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
    assert "1.40e-03  1.52e-03" in shown
    assert f"next: python train.py {FULL_SIZE} {' '.join(words)}\n" in shown


@pytest.mark.parametrize(
    ("words", "device", "said"),
    [
        # 2.786e18 FLOPs at 40 %: of 312, 156 and 19.5 TFLOP/s on eight devices
        (["--bf16", "false", "--fp16"], "a100", "0.8 h on 8 x A100 at 40% of 312 TFLOP/s in float16"),
        (["--bf16", "false", "--tf32"], "A100", "1.6 h on 8 x A100 at 40% of 156 TFLOP/s in tf32"),
        (["--bf16", "false"], "A100", "12.4 h on 8 x A100 at 40% of 19.5 TFLOP/s in float32"),
        ([], "T4", "unknown: the T4 does not compute in bfloat16. Take --fp16"),
    ],
)
def test_the_time_is_that_of_the_recipes_precision(words, device, said, capsys):
    main([FULL_SIZE, "--tokens", "3260252160", *words, "--device_name", device, "--n_devices", "8", "--mfu", "0.4"])
    assert said in capsys.readouterr().out


def test_prepared_text_says_how_long_an_epoch_is_and_how_often_it_is_passed(tiny_run, capsys):
    data_dir = read_json(tiny_run.resolved)["data"]["folder"]
    folder = tiny_run.root.parent.parent / data_dir
    words = ["--data_dir", str(folder), "--max_position_embeddings", "32", "--per_device_train_batch_size", "4"]
    (empty := tiny_run.root.parent / "empty.yaml").write_text("")
    main([str(empty), *words, "--num_train_epochs", "2"])
    assert "2.0 passes" in capsys.readouterr().out
    with pytest.raises(UsageError, match="Nothing tells how long this run is"):
        main([str(empty)])


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
        (["--branch_from", "nowhere"], "--branch_from nowhere is not a whole checkpoint"),
        (["--device_name", "Abacus"], "--device_name Abacus is not known. Known: GB200, B200"),
        (["--device_name", "H1000"], "--device_name H1000 is not known. Did you mean H100?"),
        (["--mfu", "40"], "--mfu is 40. Give a share above 0, up to 1."),
        (["--n_devices", "0"], "--n_devices is 0."),
        (["--tokens", "9", "--max_steps", "9"], "--max_steps and --tokens both say how long to train."),
        (["--tokens_per_parameter", "-1"], "--tokens_per_parameter is -1."),
        (["--tokens", "0"], "--tokens is 0."),
        (["--divices", "2"], "Did you mean --n_devices?"),
    ],
)
def test_a_mistake_is_one_line(words, message):
    with pytest.raises(UsageError) as caught:
        main(words)
    assert message in str(caught.value)


def test_the_command_ends_with_the_next_and_mistakes_with_status_two():
    command = [sys.executable, "-m", "gpt2small_hf", "plan"]
    done = subprocess.run([*command, "--tokens", "3_000_000"], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("next: python train.py --tokens 3_000_000\n")
    done = subprocess.run([*command, "--mfu", "2"], capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (2, "")


def test_of_a_branch_only_what_lies_past_its_checkpoint_is_planned(tiny_run, capsys):
    folder = tiny_run.root.parent.parent / read_json(tiny_run.resolved)["data"]["folder"]
    words = ["--data_dir", str(folder), "--max_steps", "50", "--branch_from"]
    main([*words, str(tiny_run.checkpoints / "checkpoint-20")])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps")]
    assert line.split()[1] == "30"
