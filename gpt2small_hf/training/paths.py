"""What a run's settings name → whether it is there, found out before torch is imported, which takes seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gpt2small_hf.config.declared import declared
from gpt2small_hf.config.resolve import RunConfig
from gpt2small_hf.config.trainer import OPTIMIZER_PACKAGES, REPORTERS
from gpt2small_hf.data.chat.files import find_places
from gpt2small_hf.data.corpus.metadata import read_meta
from gpt2small_hf.data.corpus.sources import find_files
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.files import parse_json
from gpt2small_hf.runs.layout import HUB_ID, RunFolder, check_named


def check_paths(args: RunConfig) -> None:
    """See that the files and folders that a run reads are there.

    Raises: UsageError naming the first that is not.
    """
    for names in (args.chat.chat_data, args.chat.validation_data):
        for name in names or []:
            find_places(name)
    find_files([*(args.data.text or []), *(args.data.validation_text or [])])
    if args.run.data_dir is not None:
        read_meta(args.run.data_dir)
    if not args.data.trains_tokenizer:
        check_named("--tokenizer", args.data.tokenizer)
    if args.run.init_from is not None:
        locate_base(args.run.init_from)


def check_packages(args: RunConfig) -> None:
    """See that the packages that settings of a run ask for are installed.

    Raises: UsageError with the line that installs the first that is not.
    """
    trainer = args.trainer
    reporters = [trainer.report_to] if isinstance(trainer.report_to, str) else trainer.report_to or []
    wanted = [(f"--report_to {name}", REPORTERS[name]) for name in reporters if name in REPORTERS]
    wanted += [
        (f"--optim {trainer.optim}", needed)
        for start, needed in OPTIMIZER_PACKAGES.items()
        if str(trainer.optim).startswith(start)
    ]
    for flag, is_set, needed in (
        ("--lora_rank", args.run.lora_rank is not None, ("peft", "peft")),
        ("--deepspeed", trainer.deepspeed, ("deepspeed", "deepspeed")),
        ("--use_liger_kernel", trainer.use_liger_kernel, ("liger_kernel", "liger-kernel")),
    ):
        wanted += [(flag, needed)] if is_set else []
    for flag, (modules, package) in wanted:
        if not any(map(importlib.util.find_spec, modules.split())):
            raise UsageError(f"{flag} needs a package that is not installed: pip install {package}")


def locate_base(name: str) -> tuple[str, Path]:
    """Where the model is that --init_from names. Returns: its folder or Hub id, and its file of weights.

    Raises: UsageError if there is none, or it is not one of ours.
    """
    model_type = declared("gpt2small_hf.model.configuration_gpt2small", "GPT2SmallConfig").model_type
    folder = Path(name or "?").expanduser()
    if (RunFolder(folder).model / "config.json").is_file():
        folder = RunFolder(folder).model
    elif RunFolder(folder).resolved.is_file():
        raise UsageError(f"--init_from {name}: that run has no model yet. Finish it, or name one of its checkpoints.")
    name = str(folder) if folder.is_dir() else name
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UsageError(f"--init_from {name} is an adapter, not a whole model. Name the folder of the merged one.")
    try:
        if not folder.exists() and not HUB_ID.fullmatch(name):
            raise OSError("an id there is user/name")
        from transformers.utils.hub import cached_file

        described = cached_file(name, "config.json")
        weights = cached_file(name, "model.safetensors")
    except (OSError, ValueError) as error:
        if folder.exists():
            inside = sorted(path.name for path in folder.glob("*/config.json")) if folder.is_dir() else []
            why = "is a folder without a model (config.json, model.safetensors)" if folder.is_dir() else "is a file"
            named = f", such as {next(folder.glob('*/config.json')).parent}" if inside else ""
            raise UsageError(f"--init_from {name} {why}. Name a run, a model folder or a checkpoint{named}.") from None
        first = (str(error).splitlines() or ["?"])[0].rstrip(". ")
        raise UsageError(
            f"--init_from {name}: no such folder in {Path.cwd()} (a run has to be done first: `{command('train')}` "
            f"makes runs/tiny), and the Hub gave no model ({first})."
        ) from None
    assert described is not None
    assert weights is not None
    try:
        kind = parse_json(Path(described).read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError):
        raise UsageError(f"{described} is not a model's config.json. Make the folder again.") from None
    if kind != model_type:
        raise UsageError(
            f"--init_from {name} is a model of type {kind}, not {model_type}. Make it ours: "
            f"{command('convert', name, 'OURS', '--to', 'gpt2small')}"
        )
    return name, Path(weights)
