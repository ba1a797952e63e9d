"""Models and questions → a file of greedy answers for each model, which `judge` compares. Resumable."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from gpt2small_hf.config.commands import AnswerArguments
from gpt2small_hf.data.chat.encoding import encode
from gpt2small_hf.data.chat.questions import AskedQuestion
from gpt2small_hf.data.chat.templates import ALPACA
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.completions import stop_tokens, until_stop
from gpt2small_hf.evaluation.models import ModelSource, context_length, load_model, weights_sha256
from gpt2small_hf.formatting import console_table
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.answer_files import (
    AnswersFile,
    AnswersHeader,
    FineTuneEpochs,
    ModelAnswer,
    append_answers,
    questions_sha256,
    resume_answers,
)
from gpt2small_hf.runs.files import exclusive_writer, write_jsonl
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.provenance import made_by
from gpt2small_hf.runs.reader import Run


def answer(models: Sequence[ModelSource], asked: Sequence[AskedQuestion], arguments: AnswerArguments) -> list[Path]:
    """Write a file of answers for each model into `--output`; questions that a file has answers to are skipped.

    Returns: the files.
    Raises: UsageError for a file with the answers of another model, other questions or other settings, before a model
        is loaded, and as `load_model`.
    """
    logging.disable_progress_bar()
    paths = [arguments.output / f"{re.sub(r'[^A-Za-z0-9._-]', '-', source.label)}.jsonl" for source in models]
    if len(set(paths)) < len(paths):
        raise UsageError("two models would have the same file of answers. Answer with each in a command of its own.")
    done: list[list[ModelAnswer]] = []
    for source, path in zip(models, paths, strict=True):
        done.append(resume_answers(path, header_of(source, asked, arguments)))
    for source, path, answers in zip(models, paths, done, strict=True):
        with exclusive_writer(path):
            _answer_with(source, path, asked, {one.id for one in answers}, arguments)
    print(f"\n{console_table(*summary(paths))}\nwrote {', '.join(map(str, paths))}")
    print(f"next: {command('judge', *map(str, paths), '--judge_model', 'MODEL')}")
    return paths


def summary(paths: Sequence[Path]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of files of answers: how many ended by themselves and equal the reference."""
    rows: list[list[str]] = []
    for path in paths:
        found = AnswersFile.load(path)
        matches = [one.is_match for one in found.answers if one.is_match is not None]
        n_tokens = sum(one.n_tokens for one in found.answers) / len(found.answers)
        ended = sum(one.ended for one in found.answers) / len(found.answers)
        match = f"{sum(matches):,} of {len(matches):,}" if matches else "no references"
        rows.append([found.header.label, f"{len(found.answers):,}", f"{ended:.1%}", match, f"{n_tokens:.1f}"])
    return ["model", "answers", "ended by themselves", "exact match", "mean tokens"], rows


def header_of(source: ModelSource, asked: Sequence[AskedQuestion], arguments: AnswerArguments) -> AnswersHeader:
    """Return what identifies the answers of a model: the command resumes only a file with the same."""
    made, epochs = made_by(), None
    if source.run is not None:
        with suppress(UsageError):  # a damaged log: the answers need nothing of it
            epochs = _epochs(Run(source.run), source.step)
    return AnswersHeader(
        label=source.label,
        model=source.path_or_id,
        weights_sha256=weights_sha256(source),
        test_loss=_loss_of_base(source),
        epochs=epochs,
        questions_sha256=questions_sha256([one.question for one in asked]),
        n_questions=len(asked),
        generation={
            "do_sample": False,
            "max_new_tokens": arguments.max_new_tokens,
            "prompt_format": arguments.prompt_format or "auto",
            "dtype": "float32",
        },
        versions=made.versions,
        date=made.date,
    )


def prompts(tokenizer: PreTrainedTokenizerFast, asked: Sequence[AskedQuestion], form: str | None) -> list[list[int]]:
    """Return the token ids of each question's prompt.

    Args:
        tokenizer: with or without a chat template.
        asked: the questions.
        form: `template` (the tokenizer's), `alpaca`, `plain` (the question alone), or None: the template if there is
            one, else Alpaca's.

    Raises: UsageError for `template` without one.
    """
    if form == "template" and tokenizer.chat_template is None:
        raise UsageError("--prompt_format is template, but the model has no chat template. Choose alpaca or plain.")
    if form == "plain":
        texts = [one.question.question for one in asked]
        return tokenizer(texts, split_special_tokens=True, verbose=False)["input_ids"]  # pyright: ignore[reportReturnType]
    own = tokenizer.chat_template
    try:
        if form == "alpaca" or own is None:
            tokenizer.chat_template = ALPACA
        encoded = encode(tokenizer, [[one.message] for one in asked], add_generation_prompt=True)
    finally:
        tokenizer.chat_template = own
    return [one.input_ids.tolist() for one in encoded]


def batches(lengths: Sequence[int], *, context: int, max_new_tokens: int, size: int) -> Iterator[tuple[list[int], int]]:
    """Yield the numbers of the questions of each batch, sorted by length, and its largest number of new tokens.

    Every question may use the context to its end, whatever is in its batch, so answers do not depend on the batches.
    """
    limits = [min(max_new_tokens, context - length) for length in lengths]
    order = sorted((n for n, limit in enumerate(limits) if limit > 0), key=lambda n: lengths[n])
    for limit in sorted({limits[n] for n in order}, reverse=True):
        equal = [n for n in order if limits[n] == limit]
        for start in range(0, len(equal), size):
            yield equal[start : start + size], limit


def _answer_with(
    source: ModelSource, path: Path, asked: Sequence[AskedQuestion], done: set[str], arguments: AnswerArguments
) -> None:
    """Add the missing answers to a file that `resume_answers` prepared, then put all in the order of the questions."""
    missing = [one for one in asked if one.question.id not in done]
    if missing:
        model, tokenizer = load_model(source, trust_remote_code=arguments.trust_remote_code)
        ids, context = prompts(tokenizer, missing, arguments.prompt_format), context_length(model)
        too_long = [one for one, prompt in zip(missing, ids, strict=True) if len(prompt) >= context]
        if too_long:
            print(f"{source.label}: {len(too_long)} questions fill the context of {context:,}: their answers are empty")
        append_answers(path, [_record(one, "", ended=False, n_tokens=0) for one in too_long])
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(source.label, total=len(missing) - len(too_long))
            for numbers, limit in batches(
                [len(one) for one in ids],
                context=context,
                max_new_tokens=arguments.max_new_tokens,
                size=arguments.batch_size,
            ):
                found = generate(model, tokenizer, [ids[n] for n in numbers], limit)
                append_answers(path, [_record(missing[n], *one) for n, one in zip(numbers, found, strict=True)])
                progress.advance(task, len(numbers))
    written = AnswersFile.load(path)
    by_id = {one.id: one for one in written.answers}
    rows = [written.header, *(by_id[one.question.id] for one in asked)]
    if [one.id for one in written.answers] != [one.question.id for one in asked]:
        write_jsonl(path, [row.to_json() for row in rows])


def _record(asked: AskedQuestion, text: str, ended: bool, n_tokens: int) -> ModelAnswer:
    question = asked.question
    return ModelAnswer(
        id=question.id,
        question=question.question,
        reference=question.reference,
        answer=text,
        ended=ended,
        n_tokens=n_tokens,
    )


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Sequence[int]], limit: int
) -> list[tuple[str, bool, int]]:
    """Return the greedy answer to each prompt, whether it ended with a stop token, and its number of tokens."""
    inputs = tokenizer.pad({"input_ids": [list(one) for one in prompts]}, padding_side="left", return_tensors="pt")
    longest, stops = inputs["input_ids"].shape[1], stop_tokens(model)  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        written: Any = model.generate(  # pyright: ignore[reportCallIssue]
            **inputs.to(model.device), do_sample=False, max_new_tokens=limit, use_cache=True, remove_invalid_values=True
        )
    found = []
    for ids in written[:, longest:].tolist():
        kept = until_stop(ids, stops)
        ended = len(kept) < len(ids)
        found.append((str(tokenizer.decode(kept, skip_special_tokens=True)), ended, len(kept) + ended))
    return found


def _epochs(run: Run, step: int | None) -> FineTuneEpochs | None:
    """Return the epochs that a fine-tuning run was trained and that its weights have seen; None for other runs."""
    if run.resolved.base is None or not run.step:
        return None
    epoch_of = {row.step: row.epoch for row in run.metrics if row.epoch is not None}
    trained = max(epoch_of.values(), default=0.0)
    kept = epoch_of.get(run.step if step is None else step, trained * (run.step if step is None else step) / run.step)
    losses = {row.step: row.eval_loss for row in run.metrics if row.eval_loss is not None and row.step > 0}
    return FineTuneEpochs(trained=trained, kept=kept, validation_losses=[losses[one] for one in sorted(losses)])


def _loss_of_base(source: ModelSource) -> float | None:
    """Return the held-out loss of the run of the base model; None if that run is not on this machine."""
    with suppress(UsageError):
        base = Run(source.run).resolved.base if source.run else None
        if base is not None:
            folder = Path(base.init_from).expanduser()
            run = RunFolder(folder.parent if folder.name == "model" else folder)
            return Run(run).loss_nats
    return None
