"""Dataclasses → flags, and flags → filled dataclasses. Every command reads its flags here."""

from __future__ import annotations

import difflib
import json
import re
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, ArgumentError, ArgumentParser, Namespace
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin, get_type_hints

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
"""Names of other programs → our flags, to name the right one in an error."""

LARGEST = 2**63 - 1
"""The largest whole number that PyTorch and NumPy take."""


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """Declare a field of a dataclass that is also a flag."""
    return field(default=default, metadata={"help": help, **metadata})


def require_at_least(settings: object, least: Mapping[str, float]) -> None:
    """Raise: UsageError naming the first of some settings that is set and less than its smallest value, or NaN."""
    for name, smallest in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= smallest:
            raise UsageError(f"--{name} is {value}. Give {smallest} or more.")


class FlagParser(HfArgumentParser):
    """HF's argument parser, with one-line errors that name the fix.

    Flags are the dataclasses' field names (`--learning_rate`, also `--learning-rate`). They cannot be abbreviated.

    Args:
        dataclass_types: whose fields are flags.
        common: sections of flags that `--help` prints, with a short help or None for their own; `--help_all` prints
            all. None: `--help` prints all.
        kwargs: of `argparse.ArgumentParser`.
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
            if action.const is False:  # `--no_bf16`: `--bf16 false` is documented instead
                action.help = SUPPRESS
            if action.type is string_to_bool and action.nargs is None:  # so that `--tf32` is `--tf32 true`
                action.nargs, action.const = "?", True
        hints = {name: hint for part in dataclass_types for name, hint in get_type_hints(part).items()}
        self._kinds = {
            name: {get_origin(one) or one for one in get_args(hint) or (hint,)} for name, hint in hints.items()
        }

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
        """Raise: UsageError, instead of printing the usage."""
        start = "the following arguments are required: "
        if message.startswith(start):
            names = message.removeprefix(start).split(", ")
            message = f"these are required: {', '.join(map(self._with_choices, names))}"
        message = _plain(message)
        raise UsageError(message if message[-1] in ".?" else f"{message}. {self.all_flags}")

    def _with_choices(self, name: str) -> str:
        """Return a required argument with the values that it takes, if they are few: `--to gpt2small|gpt2`."""
        choices = next((one.choices for one in self._actions if name in one.option_strings), None)
        return f"{name} {'|'.join(map(str, choices))}" if choices else name

    def _check_value(self, action: Action, value: Any) -> None:
        """Check a value of a flag with choices. Raises: ArgumentError with the choices, naming the nearest."""
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        near = difflib.get_close_matches(str(value), known, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ArgumentError(action, f"{str(value)!r} is not one of {', '.join(known)}.{hint}")

    def fill(self, words: Sequence[str]) -> tuple[Any, ...]:
        """Return the dataclass instances, then the namespace of other arguments, if there are any.

        Raises: UsageError for an unknown flag, naming the nearest one, and for an invalid value.
        """
        *filled, unknown = self.parse_args_into_dataclasses(
            list(words), return_remaining_strings=True, look_for_args_file=False
        )
        self._refuse(unknown)
        for name, value in (pair for part in filled for pair in vars(part).items()):
            _check_digits(f"--{name}", value)
        return tuple(filled)

    def given(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the values of the flags that are given, by name. Raises: UsageError as `fill`."""
        unset = object()
        namespace, unknown = self.parse_known_args(words, Namespace(**{one.dest: unset for one in self._actions}))
        self._refuse(unknown)
        found = {name: value for name, value in vars(namespace).items() if value is not unset}
        for name, value in found.items():
            _check_digits(f"--{name}", value)
        return found

    def checked(self, name: str, value: Any, where: str) -> Any:
        """Return a value of a recipe or of Python with the flag's type: `"20"` is 20 for an integer.

        Raises: UsageError that starts with `where`, for another type, or a choice that the flag does not have.
        """
        action = self._option_string_actions[f"--{name}"]
        if action.nargs == "+":
            items: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
            return [self._checked(action, item, f"{where}{name}", in_list=True) for item in items]
        return self._checked(action, value, f"{where}{name}")

    def _checked(self, action: Action, value: Any, where: str, *, in_list: bool = False) -> Any:
        kinds = set() if in_list else self._kinds[action.dest] - {str}
        if type(value) in kinds:
            _check_digits(where, value)
            return value
        if isinstance(value, bool) or not isinstance(value, str | int | float | PurePath):
            raise UsageError(f"{where} is {value!r}, not {_WORDS.get(action.type, 'text')}.")
        try:
            result = self._get_value(action, str(value))
            self._check_value(action, result)
        except ArgumentError as error:
            message = _plain(error.message)
            raise UsageError(f"{where}: {message if message[-1] in '.?' else f'{message}.'}") from None
        _check_digits(where, result)
        return result

    def _refuse(self, unknown: Sequence[str]) -> None:
        for word in unknown:
            if not word.startswith("--"):
                usage = f"Usage: {self.usage}" if self.usage else self.all_flags
                raise UsageError(f"{word} is not a flag. {usage}")
            self.require(word.lstrip("-").split("=")[0], dashes="--")

    def require(self, name: str, *, where: str = "", dashes: str = "") -> None:
        """Raise: UsageError if no flag has this name, starting with `where` and naming the nearest flag."""
        known = [flag.lstrip("-") for flag in self._option_string_actions if flag.startswith("--")]
        if name in known:
            return
        near = [ALIASES[name]] if ALIASES.get(name) in known else []
        near = near or difflib.get_close_matches(name, [flag for flag in known if "-" not in flag], 1)
        hint = f"Did you mean {dashes}{near[0]}?" if near else self.all_flags
        raise UsageError(f"{where}{dashes}{name} is not a flag. {hint}")


_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", string_to_bool: "true or false", Path: "a path"}


def _plain(message: str) -> str:
    """Rewrite a message of argparse."""
    message = re.sub(r"^argument (--\w+)(/--[\w-]+)*", r"\1", message)
    message = re.sub(r"Truthy value expected: got (\S+) but.*", r"'\1' is not true or false", message)
    for kind, word in {"float": "a number", "int": "a whole number"}.items():
        message = re.sub(rf"invalid {kind} value: (.+)", rf"\1 is not {word}", message)
    if found := re.search(r"'([-+.\de]+)' is not a whole number$", message, re.IGNORECASE):
        message += _whole_number(found[1])
    return message


def _whole_number(text: str) -> str:
    """Return advice for a whole number that is written as another one, such as 1e6; empty for other text."""
    try:
        value = float(text)
    except ValueError:
        return ""
    return f". Write {int(value)}." if value.is_integer() and abs(value) <= LARGEST else ""


def _check_digits(name: str, value: Any) -> None:
    if isinstance(value, int) and abs(value) > LARGEST:
        raise UsageError(f"{name} has {len(str(abs(value)))} digits. Whole numbers are at most 2^63 - 1.")


class _HelpAll(Action):
    """`--help_all`."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest=SUPPRESS, default=SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        assert isinstance(parser, FlagParser)
        print(parser.format_all(), end="")
        parser.exit()


class _Help(ArgumentDefaultsHelpFormatter):
    """Prints one spelling of each flag, the type of its value, and its default."""

    def _get_help_string(self, action: Action) -> str | None:
        has_none = action.default is None or action.default is False or action.default == Path()
        if has_none or not action.option_strings:
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


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as flags: {"bf16": True} → ["--bf16", "true"]."""
    words: list[str] = []
    for key, value in settings.items():
        if value is not None:
            values: list[Any] = value if isinstance(value, list) else [value]
            words += [f"--{key}", *map(_word, values)]
    return words


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, dict) else str(value)


def without_flags(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the words of a command line without some flags and their values."""
    kept: list[str] = []
    value_follows = False
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        is_dropped = word.startswith("--") and name.replace("-", "_") in names
        if not is_dropped and (word.startswith("--") or not value_follows):
            kept.append(word)
        value_follows = is_dropped and not value
    return kept
