# pyright: strict
"""All calls of a judgement: planned, made several at a time, each appended to calls.jsonl as it comes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime, timezone
from threading import Event, Lock

from rich.console import Console
from rich.progress import Progress

from gpt2small_hf.errors import UsageError
from gpt2small_hf.judge.arguments import JudgeArguments, JudgementFolder
from gpt2small_hf.judge.endpoint import Endpoint, RefusedError
from gpt2small_hf.judge.entries import Entry
from gpt2small_hf.judge.prompt import INSTRUCTIONS_SHA256, build_prompt, order_of_call, reply_schema
from gpt2small_hf.judge.records import Call, JudgementHeader
from gpt2small_hf.runs.answer_files import Question, questions_sha256
from gpt2small_hf.runs.files import append_jsonl, drop_torn_line, read_jsonl, write_jsonl
from gpt2small_hf.runs.typed_json import SCHEMA_VERSION

CHARACTERS_PER_TOKEN = 4
TOKENS_PER_SCORE = 40
"""Estimate: a letter, a comment of one sentence and a number."""


@dataclass(frozen=True)
class PlannedCall:
    """A call before it is made."""

    run: int
    question: int
    order: list[int]
    """Entries by place."""
    prompt: str


@dataclass(frozen=True)
class Plan:
    """Everything that decides the calls of a judgement."""

    settings: JudgeArguments
    questions: Sequence[Question]
    entries: Sequence[Entry]

    def header(self) -> JudgementHeader:
        """Return the first line of calls.jsonl."""
        return JudgementHeader(
            judge_model=self.settings.judge_model,
            temperature=self.settings.temperature,
            seed=self.settings.seed,
            n_questions=len(self.questions),
            questions_sha256=questions_sha256(self.questions),
            instructions_sha256=INSTRUCTIONS_SHA256,
            entries=[entry.record() for entry in self.entries],
        )

    def calls(self) -> list[PlannedCall]:
        """Return all calls. Those of more runs begin with those of fewer."""
        found: list[PlannedCall] = []
        for number in range(self.settings.runs * len(self.questions)):
            run, at = divmod(number, len(self.questions))
            order = order_of_call(len(self.entries), number, self.settings.seed)
            found.append(PlannedCall(run, at, order, self.prompt(at, order)))
        return found

    def prompt(self, question: int, order: Sequence[int]) -> str:
        """Return the prompt with the answers to a question in some order."""
        return build_prompt(self.questions[question], [self.entries[one].answers[question] for one in order])

    def estimated_tokens(self, calls: Sequence[PlannedCall]) -> tuple[int, int]:
        """Estimate the tokens of prompts and of replies."""
        prompts = sum(len(call.prompt) for call in calls) // CHARACTERS_PER_TOKEN
        return prompts, len(calls) * len(self.entries) * TOKENS_PER_SCORE


def cost(settings: JudgeArguments, prompt_tokens: int, completion_tokens: int) -> float | None:
    """Return the price of tokens, in the unit of the prices; None without them."""
    if settings.price_in is None or settings.price_out is None:
        return None
    return (prompt_tokens * settings.price_in + completion_tokens * settings.price_out) / 1e6


def stored_calls(folder: JudgementFolder, header: JudgementHeader) -> list[Call]:
    """Return the calls that are already stored, of the same judgement; none if the folder is new. Changes no file.

    Raises: UsageError if the folder has another judgement.
    """
    if not folder.calls.exists():
        if folder.root.is_dir() and any(folder.root.iterdir()):
            raise UsageError(
                f"--output {folder.root} has other files, and no {folder.calls.name}. Choose a new folder."
            )
        return []
    first, *lines = read_jsonl(folder.calls) or [None]
    existing = JudgementHeader.from_json(first, f"{folder.calls}, line 1:")
    for one in dataclasses.fields(JudgementHeader):
        old, new = getattr(existing, one.name), getattr(header, one.name)
        if one.compare and one.name != "schema_version" and old != new:
            if one.name == "entries":
                old, new = (", ".join(entry.label for entry in entries) for entries in (old, new))
                old, new = (old, new) if old != new else (old, "other answers of the same labels")
            raise UsageError(
                f"--output {folder.root} has a judgement with {one.name} {old}, not {new}. Choose another folder."
            )
    return [Call.from_json(line, f"{folder.calls}, line {number}:") for number, line in enumerate(lines, 2)]


def make_calls(plan: Plan, pending: Sequence[PlannedCall], endpoint: Endpoint, folder: JudgementFolder) -> None:
    """Make calls and append each to calls.jsonl once it is answered.

    The first is made alone: it finds out what the endpoint supports, and an invalid setting costs one call.

    Raises: EndpointError once a call has failed; those under way are stored before.
    """
    if folder.calls.exists():
        drop_torn_line(folder.calls)
    else:
        write_jsonl(folder.calls, [{**plan.header().to_json(), "schema_version": SCHEMA_VERSION}])
    if not pending:
        return
    lock, stopped = Lock(), Event()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("calls", total=len(pending))

        def make(call: PlannedCall, is_first: bool = False) -> None:
            if stopped.is_set():
                return
            try:
                record = _answered(plan, call, endpoint, is_first)
            except BaseException:
                stopped.set()
                raise
            with lock:
                append_jsonl(folder.calls, record.to_json())
            progress.advance(task)

        make(pending[0], is_first=True)
        pool = ThreadPoolExecutor(plan.settings.concurrency)
        try:
            futures = [pool.submit(make, call) for call in pending[1:]]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # also after Ctrl-C: calls under way are paid for, so they are stored
            stopped.set()
            pool.shutdown()
        for future in done:
            future.result()


def _answered(plan: Plan, call: PlannedCall, endpoint: Endpoint, is_first: bool) -> Call:
    """Make a call and return its record, also if the endpoint refuses it."""
    seed, date = plan.settings.seed + call.run, datetime.now(timezone.utc)
    reply = error = None
    try:
        reply = endpoint.ask(call.prompt, reply_schema(len(plan.entries)), seed, is_first=is_first)
    except RefusedError as refused:
        error = str(refused)
    return Call(
        run=call.run,
        question=call.question,
        id=plan.questions[call.question].id,
        order=[plan.entries[one].label for one in call.order],
        prompt=call.prompt,
        reply=reply and reply.text,
        error=error,
        finish_reason=reply and reply.finish_reason,
        model=reply and reply.model,
        system_fingerprint=reply and reply.system_fingerprint,
        endpoint=plan.settings.base_url,
        is_structured="response_format" in endpoint.optional,
        seed=seed if "seed" in endpoint.optional else None,
        attempts=reply.attempts if reply else 1,
        date=date.isoformat(timespec="milliseconds"),
        seconds=round(reply.seconds if reply else 0.0, 3),
        prompt_tokens=reply and reply.prompt_tokens,
        completion_tokens=reply and reply.completion_tokens,
    )
