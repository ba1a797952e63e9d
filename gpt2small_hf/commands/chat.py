"""`chat`: a model and flags → a conversation in the terminal, by `chat.py`."""

from __future__ import annotations

from gpt2small_hf.config.commands import ChatArguments
from gpt2small_hf.config.parser import FlagParser
from gpt2small_hf.invocation import command


def main(words: list[str]) -> None:
    """Run `chat`."""
    parser = FlagParser(
        ChatArguments,
        prog=command("chat"),
        usage=f"{command('chat')} MODEL [--flag value …]",
        description="Talk to a model in the terminal. A model without a chat template continues the text. "
        "Lines can also come from a pipe. /help lists what can be typed.",
    )
    parser.add_argument("MODEL", help="A run, RUN:STEP, a checkpoint, a model folder or a Hub id.")
    arguments, others = parser.fill(words)
    from gpt2small_hf.evaluation.models import find_model

    source = find_model(others.MODEL, trust_remote_code=arguments.trust_remote_code)
    from gpt2small_hf.chat import chat

    chat(source, arguments)
