"""Check that the files, folders and packages that a run's settings name exist, before torch is imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gpt2small_hf.config.resolve import RunConfig
from gpt2small_hf.config.trainer import OPTIMIZER_PACKAGES, REPORTERS
from gpt2small_hf.data.chat.conversations import check_first_row
from gpt2small_hf.data.chat.files import find_places
from gpt2small_hf.data.corpus.metadata import read_meta
from gpt2small_hf.data.corpus.sources import check_text
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.checkpoint_tasks import check_tasks
from gpt2small_hf.evaluation.models import find_file, find_model
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.layout import check_named


def check_paths(args: RunConfig, *, is_planned: bool = False) -> None:
    """Check the files and folders that a run reads, the chat template and the first row of each file of chats.

    A run that `is_planned` does not load its tokenizer, so that is not asked for on the Hub.

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
    check_text(args.data)
    if args.run.data_dir is not None:
        read_meta(args.run.data_dir)
    if not args.data.trains_tokenizer:
        check_named("--tokenizer", args.data.tokenizer, is_loaded=not is_planned)
    if args.run.has_eval_tasks:
        check_tasks(args.run.eval_task_data)
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
    try:
        source = find_model(name)
    except UsageError as error:
        raise UsageError(f"--init_from {error}") from None
    if not source.is_own:
        fix = command("convert", source.path_or_id, "CONVERTED", "--to", "gpt2small")
        raise UsageError(f"--init_from {name} is a model of type {source.model_type}, not gpt2small. Convert it: {fix}")
    weights = find_file(source.path_or_id, "model.safetensors")
    if weights is None:
        raise UsageError(f"--init_from {name} has no model.safetensors. Name a model with its weights in this file.")
    return source.path_or_id, weights
