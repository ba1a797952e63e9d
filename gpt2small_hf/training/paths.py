"""Check that the files, folders and packages that a run's settings name exist, before torch is imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gpt2small_hf.config.declared import declared
from gpt2small_hf.config.resolve import RunConfig
from gpt2small_hf.config.trainer import OPTIMIZER_PACKAGES, REPORTERS
from gpt2small_hf.data.chat.conversations import check_first_row
from gpt2small_hf.data.chat.files import find_places
from gpt2small_hf.data.corpus.metadata import read_meta
from gpt2small_hf.data.corpus.sources import find_files
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.files import parse_json
from gpt2small_hf.runs.layout import HUB_ID, RunFolder, check_named


def check_paths(args: RunConfig) -> None:
    """Check the files and folders that a run reads, the chat template and the first row of each file of chats.

    Raises: UsageError for the first that is missing or invalid.
    """
    chat = args.chat
    places = [place for name in (*(chat.chat_data or []), *(chat.validation_data or [])) for place in find_places(name)]
    if not chat.skip_bad_rows:
        for place in places:
            check_first_row(place)
    if chat.template is not None:
        from gpt2small_hf.data.chat.templates import find_template  # which imports transformers, but not torch

        find_template(chat.template, None)  # pyright: ignore[reportArgumentType]  # needed without a template
    find_files([*(args.data.text or []), *(args.data.validation_text or [])])
    if args.run.data_dir is not None:
        read_meta(args.run.data_dir)
    if not args.data.trains_tokenizer:
        check_named("--tokenizer", args.data.tokenizer)
    if args.run.init_from is not None:
        locate_base(args.run.init_from)


def check_packages(args: RunConfig) -> None:
    """Check that the packages that settings of a run need are installed.

    Raises: UsageError with the line that installs the first that is not.
    """
    trainer, optim = args.trainer, str(args.trainer.optim)
    reporters = [trainer.report_to] if isinstance(trainer.report_to, str) else trainer.report_to or []
    wanted = [(f"--report_to {name}", REPORTERS[name]) for name in reporters if name in REPORTERS]
    wanted += [(f"--optim {optim}", it) for start, it in OPTIMIZER_PACKAGES.items() if optim.startswith(start)]
    wanted += [("--lora_rank", ("peft", "peft"))] if args.run.lora_rank is not None else []
    wanted += [("--deepspeed", ("deepspeed", "deepspeed"))] if trainer.deepspeed else []
    wanted += [("--use_liger_kernel", ("liger_kernel", "liger-kernel"))] if trainer.use_liger_kernel else []
    for flag, (modules, package) in wanted:
        if not any(map(importlib.util.find_spec, modules.split())):
            raise UsageError(f"{flag} needs a package that is not installed: pip install {package}")


def locate_base(name: str) -> tuple[str, Path]:
    """Find the model that --init_from names. Returns: its folder or Hub id, and its file of weights.

    Raises: UsageError if there is none, or it has another model type.
    """
    folder = Path(name or "?").expanduser()
    if (RunFolder(folder).model / "config.json").is_file():
        folder = RunFolder(folder).model
    elif RunFolder(folder).resolved.is_file():
        raise UsageError(f"--init_from {name}: that run has no model yet. Finish it, or name one of its checkpoints.")
    name = str(folder) if folder.is_dir() else name
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UsageError(f"--init_from {name} is an adapter. Name the folder of the merged model.")
    try:
        if not folder.exists() and not HUB_ID.fullmatch(name):
            raise OSError("an id there is user/name")
        from transformers.utils.hub import cached_file

        described, weights = (Path(cached_file(name, file) or "") for file in ("config.json", "model.safetensors"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--init_from {name} {_why_not_found(folder, error)}") from None
    try:
        found = parse_json(described.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError):
        raise UsageError(f"{described} is not a model's config.json. Make the folder again.") from None
    wanted = declared("gpt2small_hf.model.configuration_gpt2small", "GPT2SmallConfig").model_type
    if found != wanted:
        fix = command("convert", name, "CONVERTED", "--to", "gpt2small")
        raise UsageError(f"--init_from {name} is a model of type {found}, not {wanted}. Convert it: {fix}")
    return name, weights


def _why_not_found(folder: Path, error: Exception) -> str:
    if folder.is_dir():
        inside = min(folder.glob("*/config.json"), default=None)
        such_as = f", such as {inside.parent}" if inside else ""
        return (
            "is a folder without a model (config.json, model.safetensors). Name a run, a model folder or a "
            f"checkpoint{such_as}."
        )
    if folder.exists():
        return "is a file. Name a run, a model folder or a checkpoint."
    first = (str(error).splitlines() or ["?"])[0].rstrip(". ")
    return f"does not exist in {Path.cwd()}, and the Hub gave no model ({first}). `{command('train')}` makes runs/tiny."
