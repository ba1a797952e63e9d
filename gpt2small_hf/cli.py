"""The commands of `gpt2small` and of `python -m gpt2small_hf`; `python train.py` is the command `train`.

A command is one line of COMMANDS and a module whose `main` takes the words after the command's name, checks flags and
paths, and only then imports what takes seconds, such as torch.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from functools import partial

from gpt2small_hf.errors import UsageError, run_command
from gpt2small_hf.invocation import command

COMMANDS = {  # name → module, help
    "prepare": ("gpt2small_hf.commands.prepare", "tokenize text into a folder that several runs can read"),
    "preview": ("gpt2small_hf.commands.preview", "print training rows of chats or prepared text, loss mask included"),
    "plan": ("gpt2small_hf.commands.plan", "print what a run needs: tokens, FLOPs, hours, disk"),
    "train": ("gpt2small_hf.commands.train", "train a model from a recipe, or resume its run"),
    "evaluate": ("gpt2small_hf.commands.evaluate", "measure models on held-out text and benchmarks, and compare them"),
    "sweep": ("gpt2small_hf.commands.sweep", "train a folder of recipes with several seeds and compare the losses"),
    "answer": ("gpt2small_hf.commands.answer", "let models answer a file of questions, for a comparison"),
    "chat": ("gpt2small_hf.commands.chat", "talk to a run, a checkpoint or a model of the Hub in the terminal"),
    "convert": ("gpt2small_hf.commands.convert", "convert GPT-2 weights to this package's format, or from it"),
    "judge": ("gpt2small_hf.commands.judge", "let a language model score the answers of several models"),
    "push": ("gpt2small_hf.commands.push", "publish a run on the Hub, or show what would be published"),
    "report": ("gpt2small_hf.commands.report", "write a page with the results of each run, and compare runs"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the command's name and what follows it. None: those of this process.
    """
    return run_command(partial(run, sys.argv[1:] if argv is None else argv))


def run(words: list[str]) -> None:
    """Run one command. Raises: UsageError for an unknown one, naming the nearest, and whatever the command raises."""
    if not words or words[0] in ("-h", "--help"):
        print(help_text())
        return
    name, *rest = words
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}."
        raise UsageError(f"{name} is not a command. {hint}")
    importlib.import_module(COMMANDS[name][0]).main(rest)


def help_text() -> str:
    """List the commands."""
    lines = [f"  {name:<9}{what}" for name, (_, what) in COMMANDS.items()]
    usage = f"usage: {command()} COMMAND [--flag value …]"
    return "\n".join([usage, "", *lines, "", f"{command()} COMMAND --help lists the flags of a command."])
