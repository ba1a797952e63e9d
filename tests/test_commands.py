"""Commands report user errors before they import torch; importing the package registers its classes."""

import dataclasses
import re
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest
from conftest import REPOSITORY, run_script
from transformers import TrainingArguments, debug_utils, trainer_utils

from gpt2small_hf import GPT2SmallConfig
from gpt2small_hf.config.declared import declared
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.training.resume import lock_folder

ENUMS = ("transformers.trainer_utils", "transformers.debug_utils")
OURS = ["-m", "gpt2small_hf"]
TRAIN = str(REPOSITORY / "train.py")
TINY_STEPS = ["--max_steps", "3", "--eval_strategy", "no"]
LINES = {
    "train.py --help": None,
    "-m gpt2small_hf train --help": None,
    "-m gpt2small_hf train absent.yaml": "Cannot read the recipe absent.yaml",
    "train.py --help_all": None,
    "-m gpt2small_hf plan --help-all": None,
    "train.py --hiden_size 3": "Did you mean --hidden_size?",
    "train.py --max_steps many": "'many' is not a whole number",
    "train.py --bf16 maybe": "--bf16",
    "train.py --optim adamv": "--optim adamv is not known",
    "train.py --lr_scheduler_type cosinus": "Did you mean cosine",
    "train.py --eval_strategy always": "'always' is not one of no, steps, epoch",
    "train.py --lr 1e-3": "--lr is not a flag. Did you mean --learning_rate?",
    "train.py --batch_size 8": "Did you mean --per_device_train_batch_size?",
    "train.py short.yaml": "short.yaml: epochs is not a flag. Did you mean num_train_epochs?",
    "train.py absent.yaml": "Cannot read the recipe absent.yaml",
    "train.py wrong.yaml": "learning_rat is not a flag. Did you mean learning_rate?",
    "train.py --text absent.txt": "absent.txt does not exist",
    "train.py --text latin.txt": "latin.txt is not UTF-8: byte 3 cannot be decoded",
    "train.py --text latin.txt --errors replace --data_dir absent": "--data_dir cannot be combined with --text",
    "-m gpt2small_hf prepare --text latin.txt": "latin.txt is not UTF-8: byte 3",
    "train.py --data_dir absent": "absent does not exist",
    "train.py --tokenizer a/b/c": "--tokenizer a/b/c does not exist",
    "train.py --tokenizer no/tokenizer": "the Hub is not asked because HF_HUB_OFFLINE is set",
    "train.py --init_from no/model": "no/model does not exist in",
    "train.py --init_from ../absent": "--init_from ../absent does not exist",
    "train.py --resume absent": "absent is not",
    "train.py --output_dir wrong.yaml": "wrong.yaml is a file",
    "train.py --output_dir wrong.yaml/run": "--output_dir wrong.yaml/run cannot be written: Not a directory",
    "train.py --optim lomo": "--optim lomo needs a package that is not installed: pip install lomo-optim",
    "train.py --hidden_size 65": "--hidden_size 65 is not a multiple of --num_attention_heads 4",
    "train.py --hidden_size 200000": "this machine has",
    "train.py --init_from x --chat_data absent.jsonl": "absent.jsonl does not exist",
    "train.py --init_from x --chat_data chats.jsonl": "chats.jsonl, line 1",
    "train.py --init_from x --chat_data good.jsonl --template {%": "not valid Jinja",
    "-m gpt2small_hf preview recipes/run": "recipes/run is a run folder, not data",
    "-m gpt2small_hf prepare --help": None,
    "-m gpt2small_hf prepare --txt x": "Did you mean --text?",
    "-m gpt2small_hf prepare --text absent.txt": "absent.txt does not exist",
    "-m gpt2small_hf prepare --output_dir wrong.yaml/set": "--output_dir wrong.yaml/set cannot be written",
    "-m gpt2small_hf preview --help": None,
    "-m gpt2small_hf preview absent.jsonl": "absent.jsonl does not exist",
    "-m gpt2small_hf preview --n_row 3 x": "Did you mean --n_rows?",
    "-m gpt2small_hf plan --help": None,
    "-m gpt2small_hf plan wrong.yaml": "Did you mean learning_rate?",
    "-m gpt2small_hf plan --n_devices x": "'x' is not a whole number",
    "-m gpt2small_hf sweep --help": None,
    "-m gpt2small_hf sweep absent": "absent has no baseline.yaml",
    "-m gpt2small_hf sweep recipes --only baselin": "Did you mean baseline?",
    "-m gpt2small_hf sweep recipes": "Did you mean learning_rate?",
    "-m gpt2small_hf report --help": None,
    "-m gpt2small_hf report absent": "absent does not exist",
    "-m gpt2small_hf convert --help": None,
    "-m gpt2small_hf convert absent.pt new --to gpt2": "absent.pt does not exist",
    "-m gpt2small_hf convert absent.pt new --to gpt3": "'gpt3' is not one of gpt2small, gpt2",
    "-m gpt2small_hf convert recipes new --to gpt2": "recipes is not a model: expected config.json",
    "-m gpt2small_hf convert no/model new --to gpt2": "no/model does not exist in",
    "upload/push.py --help": None,
    "upload/push.py recipes --dry_run": "recipes is not a model; it contains 1 run",
    "upload/push.py texts --dry_run": "texts is not a model: expected a run",
    "upload/push.py absent": "absent does not exist",
    "upload/push.py recipes/run": "no repository is named. Add USER/REPO, or --dry_run",
    "upload/push.py recipes/run you/yours --baseline absent": "--baseline absent is not a run folder",
    "upload/push.py recipes/run you/yours --public --private": "--private cannot be combined with --public",
    "upload/push.py recipes/run you/yours": "HF_HUB_OFFLINE is set",
    "upload/push.py recipes/run --dry_run --output_dir wrong.yaml": "--output_dir wrong.yaml cannot be written",
    "upload/push.py absent you/yours --licence mit": "Did you mean --license?",
    "examples/use_from_hub.py --help": None,
    "examples/use_from_hub.py no/such/folder": "neither a model folder",
    "examples/finetune_from_hub.py --help": None,
    "examples/finetune_from_hub.py you/yours --epochs x": "invalid int value",
    "examples/finetune_from_hub.py you/yours --data absent.jsonl": "absent.jsonl",
    "examples/finetune_lora.py --help": None,
    "examples/finetune_with_trl.py --help": None,
}


def run(words: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in a folder; a script is one of the checkout."""
    script = [] if words[0] == "-m" else [str(REPOSITORY / words.pop(0))]
    return subprocess.run(
        [sys.executable, "-X", "importtime", *script, *words], cwd=place, capture_output=True, text=True
    )


@pytest.mark.parametrize("words", ["-m gpt2small_hf", "-m gpt2small_hf --help", "-m gpt2small_hf trian"])
def test_list_of_commands_imports_no_parser_and_no_array(words, tmp_path):
    done = run(words.split(), tmp_path)
    assert done.returncode == (2 if "trian" in words else 0)
    assert not {"argparse", "yaml", "numpy", "torch", "transformers"} & imported(done)


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    """Names of the modules that a process with -X importtime imported."""
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_help_and_user_errors_import_no_torch(line, tmp_path):
    (tmp_path / "wrong.yaml").write_text("learning_rat: 1e-3\n")
    (tmp_path / "short.yaml").write_text("epochs: 2\n")
    (tmp_path / "chats.jsonl").write_text('{"neither": 1}\n')
    (tmp_path / "good.jsonl").write_text('{"prompt": "One", "completion": "Two"}\n')
    (tmp_path / "texts").mkdir()
    (tmp_path / "latin.txt").write_bytes("café\n".encode("latin-1"))
    (tmp_path / "recipes" / "run").mkdir(parents=True)
    (tmp_path / "recipes" / "run" / "resolved.json").write_text("{}")
    (tmp_path / "recipes" / "baseline.yaml").write_text("learning_rat: 1e-3\n")
    files = sorted(tmp_path.rglob("*"))
    done = run(line.split(), tmp_path)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == (0 if LINES[line] is None else 2), last
    assert (LINES[line] or "") in last
    modules = imported(done)
    assert "os" in modules  # imports were listed
    assert not ({"torch"} if "--template" in line else {"torch", "transformers"}) & modules
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.slow
def test_report_imports_no_torch(tiny_run, tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    for path in (tiny_run.resolved, tiny_run.metrics):
        (root / path.name).write_bytes(path.read_bytes())
    done = run([*OURS, "report", str(root)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "transformers"} & imported(done)


# ---- classes read from source ----------------------------------------------------------------------------------


def plain(kind: object) -> str:
    """A type by name, the same for an enum that was imported and for one that was read."""
    return re.sub(r"transformers\.\w+\.|gpt2small_hf\.config\.declared\.", "", str(kind))


@pytest.mark.parametrize(
    ("module", "real"),
    [
        ("transformers.training_args", TrainingArguments),
        ("gpt2small_hf.model.configuration_gpt2small", GPT2SmallConfig),
    ],
    ids=["TrainingArguments", "GPT2SmallConfig"],
)
def test_declared_fields_are_those_of_the_real_class(module, real):
    read = declared(module, real.__name__, *ENUMS)
    assert read is not real  # it could be read
    own = [one for one in dataclasses.fields(real) if one.name in real.__annotations__]
    assert [one.name for one in dataclasses.fields(read)] == [one.name for one in own]
    for mine, theirs in zip(dataclasses.fields(read), own, strict=True):
        if mine.name != "optim":  # theirs depends on the version of torch, and a run has its own
            assert (mine.default, mine.default_factory) == (theirs.default, theirs.default_factory), mine.name
        assert {**mine.metadata, "choices": list(mine.metadata.get("choices", ()))} == {
            **theirs.metadata,
            "choices": list(theirs.metadata.get("choices", ())),
        }
        if mine.name != "parallelism_config":
            assert plain(read.__annotations__[mine.name]) == plain(real.__annotations__[mine.name])


@pytest.mark.parametrize("name", ["IntervalStrategy", "SaveStrategy", "HubStrategy", "SchedulerType", "FSDPOption"])
def test_declared_enums_are_those_of_the_real_module(name):
    read = declared("transformers.trainer_utils", name)
    assert issubclass(read, Enum)
    assert read is not getattr(trainer_utils, name)
    assert [one.value for one in read] == [one.value for one in getattr(trainer_utils, name)]


def test_class_that_cannot_be_read_from_source_is_imported(tmp_path, monkeypatch):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "__init__.py").touch()
    (tmp_path / "odd" / "sizes.py").write_text("Width = dict[str, int]\n\nclass Sizes:\n    w: Width | None = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert declared("odd.sizes", "Sizes") is sys.modules["odd.sizes"].Sizes


def test_debug_options_can_be_read():
    read = declared("transformers.debug_utils", "DebugOption")
    assert [one.value for one in read] == [one.value for one in debug_utils.DebugOption]


# ---- registration ----------------------------------------------------------------------------------------------------


REGISTERED = """
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__module__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import gpt2small_hf.runs.layout", "from transformers import AutoModelForCausalLM"])
def test_importing_the_package_registers_its_classes(first, tiny_run):
    command = [sys.executable, "-c", f"import sys\n{first}\nimport gpt2small_hf\n{REGISTERED}", tiny_run.model]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "gpt2small_hf.model.modeling_gpt2small"


@pytest.mark.slow
def test_user_script_named_like_a_command_registers_the_classes(tiny_run, tmp_path):
    (tmp_path / "train.py").write_text(f"import sys\nimport gpt2small_hf\n{REGISTERED}")
    command = [sys.executable, "train.py", tiny_run.model]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "gpt2small_hf.model.modeling_gpt2small"


@pytest.mark.slow
def test_user_module_run_with_m_registers_the_classes(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import gpt2small_hf\n")  # at this point sys.argv[0] is "-m"
    (tmp_path / "mine" / "look.py").write_text("import sys; print('gpt2small_hf.model' in sys.modules)")
    done = subprocess.run([sys.executable, "-m", "mine.look"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


# ---- what is printed -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--print_recipe", "--print_recipe true", "--print-recipe=true", "printing.yaml"])
def test_print_recipe_prints_and_does_not_train(words, tmp_path):
    (tmp_path / "printing.yaml").write_text("print_recipe: true\nmax_steps: 3\n")
    done = run_script([TRAIN, *words.split()], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "learning_rate: " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["printing.yaml"]


@pytest.mark.slow
def test_preflight_prints_the_command_that_trains(tmp_path):
    words = [*TINY_STEPS, "--preflight_only", "true", "--output_dir", "runs/preflight-a"]
    done = run_script(["-m", "gpt2small_hf", "train", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert line == f"next: python -m gpt2small_hf train {' '.join(TINY_STEPS)} --output_dir runs/preflight-a"


@pytest.mark.slow
def test_preflight_of_a_recipe_prints_a_flag_that_overrides_it(tmp_path):
    (tmp_path / "checked.yaml").write_text("preflight_only: true\nmax_steps: 3\nnum_hidden_layers: 1\n")
    done = run_script(["-m", "gpt2small_hf", "train", "checked.yaml", "--eval_strategy", "no"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "next: python -m gpt2small_hf train checked.yaml --eval_strategy no --preflight_only false"
    )


def test_run_folder_in_use_is_refused_before_torch_is_imported(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "tiny")
    folder.root.mkdir(parents=True)
    with lock_folder(folder):
        done = run(["train.py"], tmp_path)
        checked = run(["train.py", "--text", "absent.txt", "--preflight_only"], tmp_path)
    assert done.returncode == 2
    assert "another process trains in runs/tiny. Wait until it ends" in done.stderr.splitlines()[-1]
    assert not {"torch", "transformers"} & imported(done)
    assert "absent.txt does not exist" in checked.stderr.splitlines()[-1]
