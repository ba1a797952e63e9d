"""A conversation with a model in the terminal, on transformers' `generate` and `TextStreamer`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TextIO

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextStreamer
from transformers.utils import logging

from gpt2small_hf.config.commands import ChatArguments
from gpt2small_hf.data.chat.encoding import encode
from gpt2small_hf.data.chat.formats import Message
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.completions import stop_tokens
from gpt2small_hf.evaluation.models import ModelSource, context_length, load_model

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message and forget the conversation; without TEXT: remove it
/help          print this list
/quit          end; so does the end of the input (Ctrl-D, on Windows Ctrl-Z and Enter)
Ctrl-C stops an answer. Without a chat template an empty line continues the text."""
SHOWN = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters, with which a model could change the terminal."""


class Session:
    """A conversation, or a text and its continuation for models without a chat template."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        arguments: ChatArguments,
        note: Callable[[str], None],
    ) -> None:
        """Start an empty conversation.

        Args:
            model: in evaluation mode.
            tokenizer: its tokenizer, with or without a chat template.
            arguments: how answers are generated, and the system message.
            note: called with each remark that is not part of an answer.

        Raises: UsageError for a system message that the chat template does not accept.
        """
        self.model, self.tokenizer, self.arguments = model, tokenizer, arguments
        self.has_template = tokenizer.chat_template is not None
        self.context = context_length(model)
        self.reserved = min(arguments.max_new_tokens, self.context // 4)
        """Tokens of the context that are kept for an answer, at the cost of the oldest turns."""
        self.said: set[str] = set()
        self.note = note
        self.messages: list[Message] = []
        self.text: list[int] = []
        self.set_system(arguments.system)

    def set_system(self, text: str | None) -> None:
        """Set or remove the system message, and forget the conversation.

        Raises: UsageError, without a change, if the model has no chat template, or its template refuses the message.
        """
        found: list[Message] = [{"role": "system", "content": text}] if text else []
        if found and not self.has_template:
            raise UsageError("the model has no chat template, so it takes no system message. Put it into the text.")
        if found and self._length([*found, {"role": "user", "content": "?"}]) > self.context - self.reserved:
            raise UsageError(f"the system message is too long for the context of {self.context:,} tokens. Shorten it.")
        self.messages, self.text = found, []

    def reset(self) -> None:
        """Forget the conversation, except the system message."""
        self.messages, self.text = [one for one in self.messages if one["role"] == "system"], []

    def answer(self, line: str, streamer: AnswerStreamer) -> None:
        """Generate the answer to a line, or the continuation of it. Ctrl-C keeps what was generated up to there.

        Raises: UsageError for a message that does not fit, or that the chat template refuses; KeyboardInterrupt after
            the part of the answer was kept.
        """
        before = list(self.messages)
        try:
            ids = self._ask(line) if self.has_template else self._continue(line)
        except UsageError:
            self.messages = before
            raise
        limit = min(self.arguments.max_new_tokens, self.context - len(ids))
        try:
            self._generate(ids, limit, streamer)
        finally:
            if self.has_template:
                self.messages.append({"role": "assistant", "content": self._text(streamer.ids)})
            else:
                self.text = ids + streamer.ids
        if self.has_template and not streamer.ended and limit < self.arguments.max_new_tokens:
            self.once(f"The answer was cut off: the context of {self.context:,} tokens is full. /reset empties it.")
        elif self.has_template and not streamer.ended:
            self.once(f"The answer was cut off after {limit:,} tokens (--max_new_tokens).")

    def once(self, remark: str) -> None:
        """Print a remark the first time."""
        if remark not in self.said:
            self.said.add(remark)
            self.note(remark)

    def _ask(self, line: str) -> list[int]:
        """Add a user message, drop the oldest turns if the context is too short, and return the prompt's ids."""
        self.messages.append({"role": "user", "content": line})
        first = int(self.messages[0]["role"] == "system")
        while (length := self._length(self.messages)) > self.context - self.reserved and len(self.messages) > first + 1:
            del self.messages[first : first + 2]  # a question and its answer
            self.once(f"The oldest turns are left out: the context has {self.context:,} tokens.")
        if length >= self.context:
            raise UsageError(
                f"the message makes a prompt of {length:,} tokens, and the context of the model has {self.context:,}. "
                "Shorten it."
            )
        return self._encoded(self.messages)

    def _encoded(self, messages: list[Message]) -> list[int]:
        return encode(self.tokenizer, [messages], add_generation_prompt=True)[0].input_ids.tolist()

    def _length(self, messages: list[Message]) -> int:
        return len(self._encoded(messages))

    def _continue(self, line: str) -> list[int]:
        """Return the ids of a line, or of an empty one the text so far; the last ones, if the context is too short."""
        # A special token that a user types is text, as in training.
        ids: list[int] = (
            self.tokenizer(line, split_special_tokens=True, verbose=False)["input_ids"] if line else self.text
        )  # pyright: ignore[reportAssignmentType]
        if len(ids) > self.context - self.reserved:
            self.once(f"Only the end of the text is read: the context has {self.context:,} tokens.")
            ids = ids[-(self.context - self.reserved) :]
        if not ids:  # nothing to continue: a new text
            start = self.tokenizer.bos_token_id
            ids = [self.tokenizer.eos_token_id if start is None else start]  # pyright: ignore[reportAssignmentType]
        return ids

    def _generate(self, ids: list[int], limit: int, streamer: AnswerStreamer) -> None:
        asked = self.arguments
        sampling: dict[str, Any] = {"temperature": asked.temperature, "top_k": asked.top_k, "top_p": asked.top_p}
        prompt = torch.tensor([ids], device=self.model.device)
        self.model.generate(  # pyright: ignore[reportCallIssue]
            prompt,  # pyright: ignore[reportArgumentType]
            attention_mask=torch.ones_like(prompt),
            do_sample=not asked.greedy,
            max_new_tokens=limit,
            use_cache=True,
            remove_invalid_values=True,  # diverged weights may give NaN, which sampling refuses
            streamer=streamer,
            **({} if asked.greedy else sampling),
        )

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class AnswerStreamer(TextStreamer):
    """Prints an answer word by word, and keeps its tokens up to the stop token."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stops: set[int]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.stops = stops
        self.ids: list[int] = []
        self.ended = False
        self.is_stopped = False
        """Set to end the answer at the next token."""

    def put(self, value: Tensor) -> None:
        """Take the prompt, then each token. Raises: KeyboardInterrupt if the answer is stopped."""
        if self.is_stopped:
            raise KeyboardInterrupt
        if not self.next_tokens_are_prompt:
            (id,) = value.tolist()
            if id in self.stops:
                self.ended = True
                return
            self.ids.append(id)
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the next words, without control characters."""
        super().on_finalized_text(text.translate(SHOWN), stream_end)


def chat(source: ModelSource, arguments: ChatArguments) -> None:
    """Load a model and answer the lines of stdin until they end.

    Answers are printed on stdout, everything else on stderr. Raises: UsageError as `load_model` and `Session`.
    """
    is_terminal = sys.stdin.isatty()
    logging.set_verbosity_error()  # remarks of `generate`, which a user of this command cannot act on
    logging.disable_progress_bar()
    if is_terminal:
        note(f"loading {source.path_or_id}")
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    model, tokenizer = load_model(source, trust_remote_code=arguments.trust_remote_code)
    torch.manual_seed(time.time_ns() % 2**63 if arguments.seed is None else arguments.seed)
    session = Session(model, tokenizer, arguments, note)
    if is_terminal:
        note(describe(source, session))
    for line in lines(sys.stdin):
        try:
            if not obey(line, session):
                return
        except UsageError as error:
            note(f"error: {error}")
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            note("[stopped]")


def note(remark: str) -> None:
    """Print a remark on stderr."""
    print(remark, file=sys.stderr, flush=True)


def describe(source: ModelSource, session: Session) -> str:
    """Return what a user should know before the first line."""
    size = sum(weight.numel() for weight in session.model.parameters())
    kind = "answers messages" if session.has_template else "no chat template: it continues your text"
    return f"{source.label} · {size:,} parameters · context {session.context:,} tokens · {kind} · /help lists commands"


def lines(stdin: TextIO) -> Iterator[str]:
    """Yield each line that is typed or read from a pipe. Ctrl-C at the prompt discards the line."""
    if not stdin.isatty():
        yield from (line.rstrip("\r\n") for line in stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and history for `input`
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            note("\n/quit or Ctrl-D ends")


def obey(line: str, session: Session) -> bool:
    """Run a command, or answer a line. Returns: whether the conversation continues. Raises: as `Session.answer`."""
    word, _, rest = line.strip().partition(" ")
    if word == "/quit":
        return False
    if word == "/help":
        note(HELP)
    elif word == "/reset":
        session.reset()
        note("The conversation is empty.")
    elif word == "/system":
        session.set_system(rest.strip() or None)
        note("The conversation is empty." + (" The system message is set." if rest.strip() else ""))
    elif word.startswith("/") and word[1:].isalpha():
        raise UsageError(f"{word} is not a command. /help lists them.")
    elif line.strip() or not session.has_template:
        streamer = AnswerStreamer(session.tokenizer, stop_tokens(session.model))

        def stop(*_: object) -> None:  # an exception from the handler can be lost in the code that it interrupts
            streamer.is_stopped = True

        before = signal.signal(signal.SIGINT, stop)
        try:
            session.answer(line, streamer)
        except KeyboardInterrupt:
            streamer.end()
            raise
        finally:
            signal.signal(signal.SIGINT, before)
    return True
