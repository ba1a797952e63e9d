"""The table of commands, and lines that are printed as the user typed the command."""

import re
import sys

import pytest
from conftest import REPOSITORY

from gpt2small_hf import cli
from gpt2small_hf.config.resolve import COMMON_SETTINGS
from gpt2small_hf.config.trainer import TrainerSettings
from gpt2small_hf.invocation import command, command_line

PACKAGE = REPOSITORY / "gpt2small_hf"
STARTED = {  # how → sys.argv[0], the command `train` and the command `report`, as they are printed
    "console script": ("/opt/venv/bin/gpt2small", "gpt2small train", "gpt2small report"),
    "console script on Windows": ("gpt2small.exe", "gpt2small train", "gpt2small report"),
    "module": (PACKAGE / "__main__.py", "python -m gpt2small_hf train", "python -m gpt2small_hf report"),
    "train.py": (REPOSITORY / "train.py", "python train.py", "python -m gpt2small_hf report"),
    "upload/push.py": (REPOSITORY / "upload" / "push.py", "python train.py", "python -m gpt2small_hf report"),
    "a notebook": ("ipykernel_launcher.py", "gpt2small train", "gpt2small report"),
    "another train.py": ("/srv/other/train.py", "gpt2small train", "gpt2small report"),
}


@pytest.mark.parametrize("how", STARTED)
def test_next_command_is_typed_as_this_one_was(how, monkeypatch):
    program, train, report = STARTED[how]
    monkeypatch.setattr(sys, "argv", [str(program), "prepare"])
    monkeypatch.chdir(REPOSITORY)
    assert command("train", "my recipe.yaml", "--bf16") == f"{train} 'my recipe.yaml' --bf16"
    assert command("report", "runs/tiny") == f"{report} runs/tiny"
    assert cli.help_text().startswith(f"usage: {report.removesuffix(' report')} COMMAND ")


@pytest.mark.parametrize(("name", "start"), [("gpt2small", "gpt2small"), ("other", "python -m gpt2small_hf")])
def test_next_command_of_a_script_runs_in_any_folder(name, start, tmp_path, monkeypatch):
    (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(REPOSITORY / "train.py")])
    monkeypatch.chdir(tmp_path)
    for words in (("push", "runs/tiny", "USER/REPO"), ("report", "runs/tiny")):
        assert command(*words) == f"{start} {' '.join(words)}"


@pytest.mark.parametrize(
    ("program", "start"),
    [
        ("/opt/venv/bin/gpt2small", "gpt2small"),
        (PACKAGE / "__main__.py", "python -m gpt2small_hf"),
        (REPOSITORY / "train.py", "python train.py"),
        (REPOSITORY / "upload" / "push.py", "python upload/push.py"),
        ("/srv/notebooks/mine.py", "python mine.py"),
    ],
)
def test_recorded_command_line_has_no_folder_of_the_program(program, start, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(program), "--text", "a b.txt"])
    assert command_line() == f"{start} --text 'a b.txt'"


def test_unknown_command_names_the_nearest(capsys):
    assert cli.main(["sweeep"]) == 2
    assert capsys.readouterr().err == "error: sweeep is not a command. Did you mean sweep?\n"
    assert cli.main(["x"]) == 2
    assert ", ".join(cli.COMMANDS) in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_command_is_in_the_file_of_its_name_and_in_the_help(name, capsys):
    assert printed([name, "--help"], capsys).startswith(f"usage: gpt2small {name} ")
    assert (PACKAGE / "commands" / f"{name}.py").is_file()
    assert f"\n  {name} " in cli.help_text()


def printed(words, capsys):
    """What a command prints that ends with status 0."""
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["train", "plan"])
def test_help_lists_the_common_settings_and_help_all_every_flag(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    common = [setting for settings in COMMON_SETTINGS.values() for setting in settings]
    assert len(common) == 25
    short = printed([name, "--help"], capsys)
    own = ["device_name", "n_devices", "mfu"] if name == "plan" else []
    assert re.findall(r"^  --(\w+) ", short, re.MULTILINE) == [*own, *common]
    sections = [*(["plan"] if own else []), *COMMON_SETTINGS]
    assert re.findall(r"^(\w.*):$", short, re.MULTILINE) == sections
    assert re.search(rf"--learning_rate NUMBER +Peak .*\(default: {TrainerSettings.learning_rate}\)\n", short)
    assert short.endswith(f"All flags: gpt2small {name} --help_all\n")
    every = printed([name, "--help_all"], capsys)
    assert {*own, *common, "adam_beta2", "spike_factor", "skip_bad_rows", "attn_pdrop"} <= set(
        re.findall(r"^  --(\w+)", every, re.MULTILINE)
    )
    assert "hub_token" not in every
