"""`judge`: files of answers → scores by a language model, by `judge/judgement.py`."""

from __future__ import annotations

from pathlib import Path

from gpt2small_hf.config.parser import FlagParser, without_flags
from gpt2small_hf.invocation import command
from gpt2small_hf.judge.arguments import KEY_VARIABLE, JudgeArguments
from gpt2small_hf.runs.files import check_writable


def main(words: list[str]) -> None:
    """Run `judge`."""
    parser = FlagParser(
        JudgeArguments,
        prog=command("judge"),
        usage=f"{command('judge')} ANSWERS ANSWERS … --judge_model NAME [--flag value …]",
        description="Let a language model score the answers of several models to the same questions, all answers to a "
        f"question in one prompt. The API key is read from {KEY_VARIABLE} only. The same command resumes an "
        "interrupted judgement; a larger --runs extends it.",
    )
    parser.add_argument("ANSWERS", nargs="+", type=Path, help="A file of answers that `answer` wrote.")
    settings, where = parser.fill(words)
    check_writable("--output", settings.output)
    if not settings.dry_run:
        settings.api_key()
    from gpt2small_hf.judge.judgement import judge

    if judge(where.ANSWERS, settings) is None:
        print(f"\nnext: {command('judge', *without_flags(words, {'dry_run'}))}")
    else:
        print(f"\n{settings.output / 'table.md'} and scores.json are written.")
        more = command("judge", *without_flags(words, {"runs"}), "--runs", str(settings.runs + 2))
        print(f"next: {more} (two more runs)")
