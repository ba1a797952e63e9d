"""`preview`: chats or a prepared folder → the rows of a run, by `data/preview/command.py`."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from pathlib import Path

from gpt2small_hf.config.data import ChatFlags, PreviewArguments
from gpt2small_hf.config.parser import FlagParser
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.files import check_writable
from gpt2small_hf.runs.layout import DataFolder, RunFolder, check_named


def main(words: list[str]) -> None:
    """Run `preview`."""
    parser = FlagParser(
        PreviewArguments,
        ChatFlags,
        prog=command("preview"),
        usage=f"{command('preview')} DATA … [--flag value …]",
        description="Print training rows of chats or prepared text: the template, the supervised tokens, what was cut.",
    )
    parser.add_argument(
        "DATA",
        nargs="+",
        help="Chats, as `train --chat_data` takes them: files, folders, Hub ids, NAME[:100] for some rows. "
        "Or one folder that `prepare` wrote.",
    )
    parser.add_argument("--ids", action="store_true", help="Print token ids.")
    args, chat, others = parser.fill(_separate_switches(words))
    from gpt2small_hf.data.chat.files import find_places

    is_prepared = any(DataFolder(Path(name).expanduser()).exists for name in others.DATA)
    if not is_prepared:
        for name in others.DATA:
            run = RunFolder(Path(name).expanduser())
            if run.resolved.is_file():
                raise UsageError(f"{name} is a run folder, not data. Its first training rows are in {run.first_rows}.")
            find_places(name)
    check_named("--tokenizer", args.tokenizer, is_loaded=not is_prepared)
    if args.html is not None:
        check_writable("--html", args.html.parent)
    from gpt2small_hf.data.preview.command import preview

    preview(others.DATA, args, chat, ids=others.ids)


def _separate_switches(words: list[str]) -> list[str]:
    """Give switches a value: in `--skip_bad_rows chats.jsonl` the parser would read the file name as the value."""
    names = [f.name for f in fields(ChatFlags) if f.default is False]
    switches = {f"--{spelled}" for name in names for spelled in (name, name.replace("_", "-"))}
    truths = {*("yes", "true", "t", "y", "1"), *("no", "false", "f", "n", "0")}
    return [
        f"{word}=true" if word in switches and after.lower() not in truths else word
        for word, after in pairwise([*words, ""])
    ]
