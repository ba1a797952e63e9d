# pyright: strict
"""All evaluation tasks, in one list that the end of training, reports and the model card read.

To add one, write a module with a `Task` and add it to `TASKS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpt2small_hf.evaluation.task import EvaluationInputs, Rows, Task
from gpt2small_hf.formatting import number, perplexity
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.records import MadeBy
from gpt2small_hf.runs.results import (
    AnswerCounts,
    Answers,
    Completions,
    HeldOut,
    HeldOutLosses,
    HeldOutRows,
    Measures,
    NewText,
)
from gpt2small_hf.runs.typed_json import Part, save_lines

# ---- held-out loss -----------------------------------------------------------------------------------------------


def _run_heldout(model: Any, inputs: EvaluationInputs) -> HeldOutLosses:
    import numpy as np

    from gpt2small_hf.evaluation.heldout import measures, standard_error, unigram_losses

    heldout, losses = inputs.heldout, inputs.losses(model)
    assert heldout is not None
    chats = getattr(heldout, "counts", None) if heldout.is_chat else None
    scale = float(heldout.supervised_bytes(inputs.tokenizer).mean()) if inputs.tokenizer is not None else 0.0
    unigram = None
    if inputs.train is not None:
        unigram = measures(unigram_losses(inputs.train, heldout, vocab_size=model.config.vocab_size), scale)
    return HeldOutLosses(
        rows=HeldOutRows(
            rows=len(heldout),
            seq_len=heldout.seq_len,
            predicted_tokens=losses.size,
            conversations=chats and chats.kept,
            loss_on=getattr(heldout, "loss_on", None),
        ),
        before=None if inputs.loss_before is None else measures(np.array([inputs.loss_before]), scale),
        unigram=unigram,
        after=measures(losses, scale, standard_error_nats=standard_error(losses, heldout)),
    )


def _header(what: str = "held-out rows") -> list[str]:
    return [what, "loss (nats/token)", "perplexity", "bits/byte"]


def _row(label: str, found: Measures) -> list[str]:
    return [label, number(found.loss_nats, ".3f"), perplexity(found.perplexity), number(found.bits_per_byte, ".3f")]


def heldout_rows(found: HeldOutLosses) -> Rows:
    """Return the held-out losses as a table."""
    what = {"assistant": "held-out answers", "last": "held-out last answers"}.get(found.rows.loss_on or "")
    measured = {
        "before training": found.before,
        "unigram (no context)": found.unigram,
        "after training": found.after,
    }
    return [_header(what or "held-out rows"), *(_row(label, one) for label, one in measured.items() if one)]


HELD_OUT = Task("heldout", HeldOutLosses, lambda inputs: inputs.heldout is not None, _run_heldout, heldout_rows)


# ---- held-out text that overlaps the training text -----------------------------------------------------------------


def _run_overlap(model: Any, inputs: EvaluationInputs) -> NewText:
    from gpt2small_hf.data.text_dataset import TextDataset
    from gpt2small_hf.evaluation.heldout import MOST_TRAINING_TOKENS, OVERLAP_TOKENS, measures, seen_in_training

    train, heldout = inputs.train, inputs.heldout
    assert isinstance(train, TextDataset)
    assert isinstance(heldout, TextDataset)
    new = ~seen_in_training(train, heldout).flatten()
    part: dict[str, Any] = {}
    if new.any():
        n_bytes = heldout.supervised_bytes(inputs.tokenizer)[new].mean() if inputs.tokenizer is not None else 0.0
        part = vars(measures(inputs.losses(model)[new], float(n_bytes)))
    return NewText(
        share=float(new.mean()),
        **(part or {"loss_nats": float("nan")}),  # the mean over no token
        recorded_overlap_tokens=OVERLAP_TOKENS,
        searched_tokens=min(train.n_tokens, MOST_TRAINING_TOKENS),
    )


def _has_text(inputs: EvaluationInputs) -> bool:
    train, heldout = inputs.train, inputs.heldout
    return train is not None and heldout is not None and not train.is_chat and not heldout.is_chat


def has_overlap(found: NewText) -> bool:
    """Whether more than a hundredth of the held-out tokens are in an overlap with the training text."""
    return 0 < found.share < 0.99


def overlap_rows(found: NewText) -> Rows:
    """Return the loss on the tokens outside overlaps as a table; none if almost all tokens are."""
    if not has_overlap(found):
        return []
    return [_header(), _row(f"  on the {found.share:.0%} outside {found.overlap_tokens}-token overlaps", found)]


def overlap_note(found: NewText) -> str | None:
    """Define an overlap; None if the table has no such row."""
    if not has_overlap(found):
        return None
    searched = f"first {found.searched_tokens:,} tokens of the " if found.searched_tokens is not None else ""
    return (
        f"A token is in an overlap if it and the {found.overlap_tokens - 1} tokens before it occur in this order in "
        f"the {searched}training text."
    )


OVERLAP = Task("overlap", NewText, _has_text, _run_overlap, overlap_rows, overlap_note)


# ---- completions of prompts ----------------------------------------------------------------------------------------


def _run_completions(model: Any, inputs: EvaluationInputs) -> Completions:
    from gpt2small_hf.evaluation.completions import complete

    found = complete(model, inputs.tokenizer, list(inputs.prompts), chat=inputs.is_chat)
    return Completions(completions=found, is_chat=inputs.is_chat)


def completions_note(found: Completions) -> str:
    """Return the sampled continuations, or the greedy answers, one per paragraph."""
    if found.is_chat:
        return "\n\n".join(f"asked: {one.prompt}\nanswered: {one.greedy}" for one in found.completions)
    return "\n\n".join(f"sample: {one.prompt} ▸{one.sampled}" for one in found.completions)


COMPLETIONS = Task(
    "completions",
    Completions,
    lambda inputs: bool(inputs.prompts) and inputs.tokenizer is not None,
    _run_completions,
    note=completions_note,
    published=("evaluation/completions.json",),
)


# ---- answers to held-out questions -----------------------------------------------------------------------------------


def _run_answers(model: Any, inputs: EvaluationInputs) -> Answers:
    from gpt2small_hf.data.chat_dataset import ChatDataset
    from gpt2small_hf.evaluation.answers import MOST_NEW_TOKENS, answer_all, questions

    assert isinstance(inputs.heldout, ChatDataset)
    answers = answer_all(model, inputs.tokenizer, questions(inputs.heldout.chats, inputs.max_answers))
    ended = sum(one.ended for one in answers)
    return Answers(asked=len(answers), ended=ended, max_new_tokens=MOST_NEW_TOKENS, answers=answers)


def answers_note(found: AnswerCounts) -> str | None:
    """Return the share of sampled answers that end with a stop token, as a sentence; None if no question was asked."""
    if not found.asked:
        return None
    return (
        f"{found.ended:,} of {found.asked:,} sampled answers ({found.ended / found.asked:.1%}) ended by themselves "
        f"within {found.max_new_tokens} tokens"
    )


ANSWERS = Task(
    "answers",
    Answers,
    lambda inputs: inputs.heldout is not None and inputs.heldout.is_chat,
    _run_answers,
    note=answers_note,
)


# ---- all of them -----------------------------------------------------------------------------------------------------


TASKS: list[Task[Any]] = [HELD_OUT, OVERLAP, COMPLETIONS, ANSWERS]
"""In the order in which results are printed. A name is the key of its result in `evaluate`."""
FIELDS = {"heldout", "overlap", "completions", "answers"}
"""Tasks with fields or a file of their own; results of others are in `tasks` of `heldout.json`."""


def evaluate(
    model: Any,
    tasks: Sequence[str] | None = None,
    *,
    tokenizer: Any = None,
    heldout: Any = None,
    train: Any = None,
    prompts: Sequence[str] = (),
    loss_before: float | None = None,
    max_answers: int = 64,
    batch_size: int = 8,
) -> dict[str, Part]:
    """Measure a causal language model.

    Args:
        model: any transformers causal language model.
        tasks: names of tasks; all that apply to the other arguments if None.
        tokenizer: of the model; bits per byte, completions and answers need it.
        heldout: a `TextDataset` or `ChatDataset` that the model was not trained on.
        train: the dataset that it was trained on; the unigram baseline and the overlap need it.
        prompts: texts to continue, or questions if `heldout` or `train` has conversations.
        loss_before: held-out loss before training, in nats.
        max_answers: number of held-out questions to answer at most.
        batch_size: rows of a forward pass.

    Returns: the record of each task, by its name. `tables` and `notes` format them.
    Raises: ValueError for an unknown task, or one that the arguments do not suffice for.
    """
    is_chat = any(rows is not None and rows.is_chat for rows in (heldout, train))
    inputs = EvaluationInputs(tokenizer, heldout, train, prompts, is_chat, loss_before, max_answers, batch_size)
    known = {task.name: task for task in TASKS}
    for name in tasks or ():
        if name not in known:
            raise ValueError(f"{name} is not a task. Tasks: {', '.join(known)}.")
        if not known[name].applies_to(inputs):
            raise ValueError(f"{name} cannot be measured with the arguments given: see evaluate's documentation.")
    return run_tasks(model, inputs, tasks)


def run_tasks(model: Any, inputs: EvaluationInputs, names: Sequence[str] | None = None) -> dict[str, Part]:
    """Run the tasks of these names, or all that apply to `inputs`."""
    chosen = [task for task in TASKS if (task.applies_to(inputs) if names is None else task.name in names)]
    return {task.name: task.run(model, inputs) for task in chosen}


def tables(results: Mapping[str, Part]) -> list[Rows]:
    """Return the tables of some results; those with the same columns are one."""
    found: list[Rows] = []
    for task in TASKS:
        rows = task.rows(results[task.name]) if task.name in results else []
        if rows and found and found[-1][0][1:] == rows[0][1:]:
            found[-1] += rows[1:]
        elif rows:
            found.append(rows)
    return found


def notes(results: Mapping[str, Part]) -> list[str]:
    """Return the sentences below the tables of some results."""
    said = (task.note(results[task.name]) for task in TASKS if task.name in results)
    return [one for one in said if one]


def save_results(
    run: RunFolder, results: Mapping[str, Part], *, seq_len: int, step: int, last_step: int, made_by: MadeBy
) -> HeldOut:
    """Write the results of a finished run, last `heldout.json`, which marks it as finished."""
    losses, overlap, answers = results.get("heldout"), results.get("overlap"), results.get("answers")
    assert losses is None or isinstance(losses, HeldOutLosses)
    if isinstance(answers, Answers):
        save_lines(run.answers, answers.answers)
    completions = results.get("completions", Completions(completions=[]))
    assert isinstance(completions, Completions)
    replace(completions, made_by=made_by).save(run.completions)
    found = HeldOut(
        rows=losses.rows if losses else HeldOutRows(rows=0, seq_len=seq_len, predicted_tokens=0),
        before=losses and losses.before,
        unigram=losses and losses.unigram,
        after=losses and losses.after,
        new_text=overlap if isinstance(overlap, NewText) and overlap.share else None,
        answers=answers.counts if isinstance(answers, Answers) else None,
        tasks={name: record.to_json() for name, record in results.items() if name not in FIELDS},
        step=step,
        last_step=last_step,
        made_by=made_by,
    )
    found.save(run.heldout)
    return found


def results_of(heldout: HeldOut) -> dict[str, Part]:
    """Return the results that `heldout.json` has, by task."""
    after = heldout if heldout.after else None
    found: dict[str, Part | None] = {"heldout": after, "overlap": heldout.new_text, "answers": heldout.answers}
    return {name: record for name, record in found.items() if record is not None} | further_results(heldout)


def further_results(heldout: HeldOut) -> dict[str, Part]:
    """Return the results in `heldout.json` that have no field of their own, by task."""
    return {
        task.name: task.record.from_json(heldout.tasks[task.name], f"heldout.json: tasks.{task.name}")
        for task in TASKS
        if task.name in heldout.tasks
    }
