# pyright: strict
"""`judge`: files of answers → calls of a judge → scores and a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import counted
from gpt2small_hf.judge.arguments import JudgeArguments, JudgementFolder
from gpt2small_hf.judge.calls import (
    CHARACTERS_PER_TOKEN,
    TOKENS_PER_SCORE,
    Plan,
    PlannedCall,
    cost,
    make_calls,
    stored_calls,
)
from gpt2small_hf.judge.effects import detectable_difference, win_rate_half_width
from gpt2small_hf.judge.endpoint import Endpoint
from gpt2small_hf.judge.entries import add_controls, read_entries, warnings_of
from gpt2small_hf.judge.prompt import check_number
from gpt2small_hf.judge.records import MODEL, Scores
from gpt2small_hf.judge.scores import summarize
from gpt2small_hf.judge.tables import findings, results_page, score_table
from gpt2small_hf.runs.files import atomic_write, exclusive_writer


def judge(paths: Sequence[Path], settings: JudgeArguments) -> Scores | None:
    """Judge files of answers, and write the judgement.

    Returns: the scores; None for a dry run.
    Raises: UsageError for input that cannot be judged, before any call; EndpointError if the endpoint fails.
    """
    plan = build_plan(paths, settings)
    baseline = _baseline(plan)
    folder = JudgementFolder(settings.output)
    calls = plan.calls()
    pending = _pending(plan, calls, folder)
    print(describe(plan, calls, pending))
    for warning in warnings_of([one for one in plan.entries if one.kind == MODEL]):
        print(f"warning: {warning}", file=sys.stderr)
    if settings.dry_run:
        print(f"\nThe first prompt:\n\n{calls[0].prompt}")
        return None
    with exclusive_writer(folder.root):
        pending = _pending(plan, calls, folder)  # another process may have added some before it let go of the folder
        with closing(Endpoint(settings, settings.api_key() if pending else None)) as endpoint:
            if pending:
                endpoint.check()
            make_calls(plan, pending, endpoint, folder)
        made = [call for call in stored_calls(folder, plan.header()) if call.run < settings.runs]
        scores = summarize(plan, made, baseline)
        scores.save(folder.scores)
        with atomic_write(folder.table) as temporary:
            temporary.write_text(results_page(scores), encoding="utf-8")
    print(f"\n{score_table(scores)}\n")
    print("\n".join(findings(scores)))
    return scores


def build_plan(paths: Sequence[Path], settings: JudgeArguments) -> Plan:
    """Read the answers and add the controls. Raises: UsageError for answers that cannot be judged together."""
    questions, entries = read_entries(paths, settings.judge_model, settings.limit)
    if not settings.no_controls:
        entries = add_controls(questions, entries, settings.seed)
    check_number(len(entries))
    return Plan(settings, questions, entries)


def describe(plan: Plan, calls: Sequence[PlannedCall], pending: Sequence[PlannedCall]) -> str:
    """Return what the calls need, and which differences they can show."""
    settings, n = plan.settings, len(plan.questions)
    n_models = sum(one.kind == MODEL for one in plan.entries)
    tokens = plan.estimated_tokens(pending)
    price = cost(settings, *tokens)
    stored = f", of which {len(calls) - len(pending):,} are stored" if len(pending) < len(calls) else ""
    lines = [
        f"{counted(n_models, 'model')}, {counted(len(plan.entries) - n_models, 'control')}, {counted(n, 'question')}, "
        f"{counted(settings.runs, 'run')}: {counted(len(calls), 'call')} to {settings.judge_model} at "
        f"{settings.base_url}{stored}",
        f"about {tokens[0]:,} tokens in and {tokens[1]:,} out (estimated: {CHARACTERS_PER_TOKEN} characters per token, "
        f"{TOKENS_PER_SCORE} tokens per score)",
        f"a win rate has a 95 % interval of ± {win_rate_half_width(n):.1f} points; a difference of "
        f"{detectable_difference(n):.1f} points from 50 % is found with 80 % power",
    ]
    lines[1] += f": about {price:,.2f}" if price is not None else "; --price_in and --price_out give the cost"
    return "\n".join(lines)


def _pending(plan: Plan, calls: Sequence[PlannedCall], folder: JudgementFolder) -> list[PlannedCall]:
    stored = {(call.run, call.question) for call in stored_calls(folder, plan.header())}
    return [call for call in calls if (call.run, call.question) not in stored]


def _baseline(plan: Plan) -> str:
    labels = [one.label for one in plan.entries if one.kind == MODEL]
    if plan.settings.baseline is not None and plan.settings.baseline not in labels:
        raise UsageError(f"--baseline {plan.settings.baseline} is not a label. Labels: {', '.join(labels)}.")
    return plan.settings.baseline or labels[0]
