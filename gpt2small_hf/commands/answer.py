"""`answer`: models and questions → a file of answers for each model, by `answer.py`."""

from __future__ import annotations

from gpt2small_hf.config.commands import AnswerArguments
from gpt2small_hf.config.parser import FlagParser
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.files import check_writable


def main(words: list[str]) -> None:
    """Run `answer`."""
    parser = FlagParser(
        AnswerArguments,
        prog=command("answer"),
        usage=f"{command('answer')} MODEL … --questions FILE [--flag value …]",
        description="Let models answer questions greedily, and write a file of answers for each model. The same "
        "command resumes after an interruption.",
    )
    parser.add_argument("MODEL", nargs="+", help="A run, RUN:STEP, RUN:all, a checkpoint, a model folder or a Hub id.")
    arguments, others = parser.fill(words)
    if arguments.questions is None:
        raise UsageError("--questions is missing. Name a .jsonl file of questions.")
    check_writable("--output", arguments.output)
    from gpt2small_hf.data.chat.questions import read_questions
    from gpt2small_hf.evaluation.models import find_models

    asked = read_questions(arguments.questions)
    models = find_models(others.MODEL, trust_remote_code=arguments.trust_remote_code)
    from gpt2small_hf.answer import answer

    answer(models, asked, arguments)
