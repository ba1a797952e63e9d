"""Door: `python -m gpt2small_hf COMMAND …`."""

from __future__ import annotations

import difflib
import importlib
import sys

from gpt2small_hf.errors import UsageError, open_door

COMMANDS = {
    "prepare": "text → token files that train.py reads",
    "preview": "chats or a prepared folder → the rows a model would be trained on, with what is learned marked",
    "plan": "a recipe → what the run takes, and what rules of thumb say of it",
    "sweep": "a folder of recipes → runs with several seeds, and which changes are larger than their noise",
    "convert": "a GPT-2 of another code base → a folder of ours, or ours → one that needs no remote code",
    "report": "run folders → a page for each: results, charts, symptoms, how its text became coherent",
}

HELP = "\n".join(
    [
        "usage: python -m gpt2small_hf COMMAND [--flag value …]",
        "",
        *(f"  {name:<10}{what}" for name, what in COMMANDS.items()),
        "",
        "python -m gpt2small_hf COMMAND --help lists a command's flags. Training is `python train.py`.",
    ]
)


def main() -> None:
    """Run one command."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
    elif words[0] in COMMANDS:
        importlib.import_module(f"gpt2small_hf.commands.{words[0]}").main(words[1:])
    else:
        near = difflib.get_close_matches(words[0], COMMANDS, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}."
        raise UsageError(f"{words[0]} is not a command. {hint}")


def run() -> int:
    """Entry point of the console script `gpt2small`: run one command and return the exit status."""
    return open_door(main)


if __name__ == "__main__":
    sys.exit(run())
