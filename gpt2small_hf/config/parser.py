"""Dataclass < recipe < flag: words on the command line and in a YAML recipe → filled dataclasses.

Every command reads its settings through this file, so flags look and fail alike everywhere.
"""

from __future__ import annotations

import difflib
import json
import re
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gpt2small_hf.config.declared import imported_alone
from gpt2small_hf.errors import UsageError

if TYPE_CHECKING:
    from transformers import HfArgumentParser
    from transformers.hf_argparser import string_to_bool
else:  # importing transformers takes most of a second, and its parser needs nothing of it
    _alone = imported_alone("transformers.hf_argparser")
    HfArgumentParser, string_to_bool = _alone.HfArgumentParser, _alone.string_to_bool


ALIASES = {
    **dict.fromkeys(("lr", "max_lr", "peak_lr"), "learning_rate"),
    **dict.fromkeys(("bs", "batch_size", "train_batch_size", "micro_batch_size"), "per_device_train_batch_size"),
    **dict.fromkeys(("wd", "decay_rate"), "weight_decay"),
    **dict.fromkeys(("epochs", "n_epochs", "num_epochs"), "num_train_epochs"),
    **dict.fromkeys(("steps", "max_iters", "num_steps", "n_steps"), "max_steps"),
    **dict.fromkeys(("warmup", "warmup_iters", "warmup_ratio"), "warmup_steps"),
    **dict.fromkeys(("grad_accum", "accumulation_steps", "grad_acc"), "gradient_accumulation_steps"),
    **dict.fromkeys(("clip", "grad_clip", "gradient_clipping"), "max_grad_norm"),
    **dict.fromkeys(("block_size", "context_length", "sequence_length", "max_seq_len", "max_seq_length"), "seq_len"),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "layers", "depth"), "num_hidden_layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "heads"), "num_attention_heads"),
    **dict.fromkeys(("n_embd", "d_model", "dim", "width", "emb_dim"), "hidden_size"),
    **dict.fromkeys(("n_positions", "n_ctx"), "max_position_embeddings"),
    **dict.fromkeys(("optimizer",), "optim"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "schedule"), "lr_scheduler_type"),
    **dict.fromkeys(("dropout",), "resid_pdrop"),
    **dict.fromkeys(("out_dir", "output", "out"), "output_dir"),
    **dict.fromkeys(("compile",), "torch_compile"),
}
"""Names that other programs have for flags of ours."""

LARGEST = 2**63 - 1
"""The largest whole number that PyTorch and NumPy take."""


class FlagParser(HfArgumentParser):
    """HF's argument parser; a mistake is one line that says what to write instead.

    Flags are the dataclasses' field names (`--learning_rate`, also `--learning-rate`). Unlike argparse's default,
    `--learn` is not taken for `--learning_rate`.

    With `common`, sections of flags with a short help, or None for their own, `--help` prints these alone, and
    `--help_all` prints all.
    """

    def __init__(
        self, *dataclass_types: Any, common: Mapping[str, Mapping[str, str | None]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(dataclass_types, allow_abbrev=False, formatter_class=_Help, **kwargs)  # pyright: ignore[reportArgumentType]
        self.common = common or {}
        self.all_flags = f"All flags: {self.prog} --help"
        if common:
            self.all_flags += "_all"
            self.add_argument("--help_all", "--help-all", action=_HelpAll, help="Print every flag and exit.")
        for action in self._actions:
            if action.const is False:  # `--no_bf16` beside `--bf16 false`: understood, and not worth a paragraph
                action.help = SUPPRESS
            if action.type is string_to_bool and action.nargs is None:  # `--tf32` may stand alone as `--bf16` may
                action.nargs, action.const = "?", True

    def format_help(self) -> str:
        """Return the text of `--help`."""
        if not self.common:
            return self.format_all()
        page = _Help(self.prog, max_help_position=42)
        page.add_usage(self.usage, [], [])
        page.add_text(self.description)
        for title, helps in self.common.items():
            page.start_section(title)
            for name, short in helps.items():
                action = copy(self._option_string_actions[f"--{name}"])
                action.help = short or action.help
                page.add_argument(action)
            page.end_section()
        page.add_text(self.all_flags)
        return page.format_help()

    def format_all(self) -> str:
        """Return every flag with its whole help."""
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise: UsageError, in place of argparse's page of usage."""
        message = re.sub(r"^argument (--\w+)(/--[\w-]+)*", r"\1", message)
        for kind, word in {"float": "a number", "int": "a whole number"}.items():
            message = re.sub(rf"invalid {kind} value: (.+)", rf"\1 is not {word}", message)
        raise UsageError(f"{message}. {self.all_flags}")

    def fill(self, words: list[str]) -> tuple[Any, ...]:
        """Fill the dataclasses from flags.

        Returns: the dataclass instances, then the namespace of arguments that belong to none of them, if there are any.
        Raises:  UsageError for an unknown flag, naming the nearest one, and for a value the dataclass refuses.
        """
        try:
            *filled, unknown = self.parse_args_into_dataclasses(
                words, return_remaining_strings=True, look_for_args_file=False
            )
        except (ValueError, TypeError, ImportError) as error:  # raised by a dataclass's own __post_init__
            raise UsageError(" ".join(str(error).split())) from error
        for word in unknown:
            if not word.startswith("--"):
                raise UsageError(f"{word} stands where a flag was expected. {self.all_flags}")
            self.require(word.lstrip("-").split("=")[0], dashes="--")
        for name, value in (pair for part in filled for pair in vars(part).items()):
            if isinstance(value, int) and abs(value) > LARGEST:
                raise UsageError(f"--{name} has {len(str(abs(value)))} digits. Whole numbers are at most 2^63 - 1.")
        return tuple(filled)

    def require(self, name: str, *, where: str = "", dashes: str = "") -> None:
        """Accept the name of a flag, or say which one it may have meant.

        Raises: UsageError when `name` is no flag, after `where` it stands.
        """
        known = [flag.lstrip("-") for flag in self._option_string_actions if flag.startswith("--")]
        if name in known:
            return
        near = [ALIASES[name]] if ALIASES.get(name) in known else []
        near = near or difflib.get_close_matches(name, [flag for flag in known if "-" not in flag], 1)
        hint = f"Did you mean {dashes}{near[0]}?" if near else self.all_flags
        raise UsageError(f"{where}{dashes}{name} is not a flag. {hint}")


class _HelpAll(Action):
    """`--help_all`."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest=SUPPRESS, default=SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        assert isinstance(parser, FlagParser)
        print(parser.format_all(), end="")
        parser.exit()


class _Help(ArgumentDefaultsHelpFormatter):
    """One spelling a flag, the kind of its value, and the default where there is one."""

    def _get_help_string(self, action: Action) -> str | None:
        if action.default is None or action.default is False or not action.option_strings:
            return action.help
        return super()._get_help_string(action)

    def _format_action_invocation(self, action: Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        flag = next((flag for flag in action.option_strings if "-" not in flag.lstrip("-")), action.option_strings[0])
        return f"{flag} {self._kind(action)}"

    def _kind(self, action: Action) -> str:
        if action.nargs == "?":  # HF's parser reads a boolean so: alone it means true
            return "[true|false]"
        if action.choices and len(kinds := [str(choice) for choice in action.choices]) <= 8:
            return "|".join(kinds)
        word = {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(action.type, "TEXT")  # pyright: ignore[reportArgumentType, reportCallIssue]
        return f"{word} …" if action.nargs == "+" else word


def as_flags(recipe: dict[str, Any]) -> list[str]:
    """Write a recipe as flags: {"bf16": True} → ["--bf16", "true"]. The real flags follow it, so they win."""
    words = []
    for key, value in recipe.items():
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        words += [f"--{key}", *(_word(item) for item in values)]
    return words


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, dict) else str(value)


def without_flags(words: list[str], names: Collection[str]) -> list[str]:
    """The words of a command line without some flags and their values."""
    kept: list[str] = []
    value_follows = False
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        is_dropped = word.startswith("--") and name.replace("-", "_") in names
        if not is_dropped and (word.startswith("--") or not value_follows):
            kept.append(word)
        value_follows = is_dropped and not value
    return kept
