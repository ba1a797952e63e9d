# pyright: strict
"""scores.json → table.md, the table in the terminal, and a section of a model card."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpt2small_hf.formatting import UNKNOWN, console_table, counted, escaped, markdown_table, number
from gpt2small_hf.judge.records import MODEL, EntryScores, Scores
from gpt2small_hf.judge.scores import LEVEL

MARK = "The controls of this judgement came out wrong: its scores do not measure the answers."

TableFormat = Callable[[Sequence[str], Sequence[Sequence[str]]], str]


def score_table(scores: Scores, as_table: TableFormat = console_table) -> str:
    """Return the models, by test loss if all have one, else by mean score, then the controls."""
    runs = scores.runs
    header = [
        "answers of",
        "test loss",
        "epochs",
        *(f"run {run}" for run in range(1, runs + 1)),
        "mean",
        "95 % interval",
    ]
    header += ["rank", "mean rank", f"less {scores.baseline}", "verdict", "excluded"]
    models, others = scores.of_kind(MODEL), [one for one in scores.entries if one.kind != MODEL]
    if all(one.test_loss is not None for one in models):
        models.sort(key=lambda one: one.test_loss or 0.0)
    else:
        models.sort(key=lambda one: -1.0 if one.mean is None else one.mean, reverse=True)
    rows = [_row(one, scores.baseline) for one in [*models, *others]]
    # A column without any value is left out.
    kept = [at for at in range(len(header)) if at == 0 or any(row[at] != UNKNOWN for row in rows)]
    return as_table([header[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _row(one: EntryScores, baseline: str) -> list[str]:
    epochs = UNKNOWN if one.epochs_kept is None else f"{one.epochs_kept:g} of {one.epochs_trained:g}"
    interval = f"{one.interval[0]:.1f} to {one.interval[1]:.1f}" if one.interval else UNKNOWN
    difference = UNKNOWN if one.difference is None else f"{one.difference:+.1f} ± {number(one.difference_error, '.1f')}"
    return [
        one.label if one.kind == MODEL else f"control: {one.label}",
        number(one.test_loss, ".6f"),
        epochs,
        *(number(mean, ".1f") for mean in one.run_means),
        number(one.mean, ".1f"),
        interval,
        number(one.rank, "d"),
        number(one.mean_rank, ".2f"),
        difference,
        "baseline" if one.label == baseline else one.verdict or UNKNOWN,
        f"{one.n_missing:,}",
    ]


def findings(scores: Scores) -> list[str]:
    """Return one sentence for the judgement's mark, warnings, each control and each effect."""
    found = [MARK] if scores.failed_controls else []
    found += scores.warnings
    for control in scores.controls:
        found.append(f"Control {control.name}: {'passed' if control.is_passed else 'FAILED'}. {control.finding}.")
    if not scores.controls:
        found.append("No controls were judged.")
    biased = [one for one in scores.places if one.p < LEVEL]
    if biased:
        points = ", ".join(f"place {one.place} {one.points:+.1f}" for one in biased)
        found.append(
            f"The judge has a position bias ({points} points). Means are free of it: each place was as frequent."
        )
    elif scores.places:
        largest = max(abs(one.points) for one in scores.places)
        found.append(f"No position bias was found; the largest effect of a place is {largest:.1f} points.")
    if scores.retest_correlation is not None:
        found.append(f"Correlation of the scores of two runs: {scores.retest_correlation:.2f}.")
    if scores.length is not None:
        is_found = scores.length.p < LEVEL
        found.append(
            f"Length: {scores.length.points:+.1f} ± {number(scores.length.standard_error, '.1f')} points per 100 "
            f"characters more than usual for the model and the question{'' if is_found else ' (undecided)'}."
        )
    if scores.n_refused:
        found.append(f"The endpoint refused {counted(scores.n_refused, 'call')}: their scores are excluded.")
    return found


def method(scores: Scores) -> str:
    """Return how the scores were made, in a paragraph."""
    versions = f" ({', '.join(scores.judge_versions)})" if scores.judge_versions else ""
    return (
        f"{scores.judge_model}{versions} scored all answers to a question together, from 0 to 100, in "
        f"{counted(scores.runs, 'run')} over {counted(len(scores.questions), 'question')}. The orders are "
        f"Latin squares of seed {scores.seed}. Intervals and errors are over questions, with the runs of a question "
        f"averaged. Verdicts are paired t tests against {scores.baseline} with Holm's adjustment (level {LEVEL:g}). "
        "Missing and invalid scores are excluded."
    )


def results_page(scores: Scores) -> str:
    """Return table.md."""
    return f"# Scores by {escaped(scores.judge_model)}\n\n{_results(scores)}\n\n{escaped(method(scores))}\n"


def card_section(scores: Scores) -> str:
    """Return a section of a model card: what was done, the table, and what limits it."""
    return f"### Answers scored by a language model\n\n{escaped(method(scores))}\n\n{_results(scores)}\n"


def _results(scores: Scores) -> str:
    lines = "\n".join(f"- {escaped(line)}" for line in findings(scores))
    return f"{score_table(scores, markdown_table)}\n\n{lines}"
