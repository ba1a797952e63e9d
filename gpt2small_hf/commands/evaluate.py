"""`evaluate`: models → losses on held-out text, benchmarks and comparisons, by `evaluation/command.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpt2small_hf.config.parser import FlagParser, require_at_least, setting
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.files import check_writable


@dataclass(frozen=True)
class EvaluateArguments:
    """What to measure, and how."""

    _argument_group_name = "evaluate"

    tasks: list[str] | None = setting(
        None,
        "Benchmarks: names of --task_data, of lm-evaluation-harness, or `small` (blimp, lambada_openai, arc_easy, "
        "hellaswag, piqa). Unset: all of --task_data, none without it.",
    )
    task_data: Path | None = setting(
        None,
        "Folder with the questions, instead of the network: each .jsonl file is a task, each folder of them a group. "
        "docs/evaluation.md lists the forms.",
    )
    text: list[str] | None = setting(None, "Text files to measure the loss on. Unset: the text held out of a run.")
    data_dir: Path | None = setting(None, "Prepared folder to measure the loss on, instead of --text.")
    split: Literal["train", "validation"] = setting("validation", "Split of --data_dir.")
    seq_len: int | None = setting(
        None, "Tokens in a row of text. Unset: as the run was trained, else the model's context, at most 1,024."
    )
    max_rows: int | None = setting(None, "Maximum number of rows of text. Unset: all.")
    prompts: list[str] | None = setting(
        None, "Texts that each model continues, greedily and sampled with a seed; with --chat_template, questions."
    )
    baseline: str | None = setting(None, "Model to compare the others with. Unset: the first of several.")
    limit: int | None = setting(None, "Maximum number of items of a task, to try a command out. Unset: all.")
    num_fewshot: int | None = setting(None, "Number of solved examples before each question. Unset: as the task says.")
    chat_template: bool = setting(False, "Ask the questions as a user's turn of the model's chat template.")
    batch_size: int = setting(32, "Rows of a forward pass. Results do not depend on it beyond rounding.")
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "Of the weights; it changes scores slightly.")
    device: str | None = setting(None, "Such as cpu or cuda:1. Unset: a GPU if there is one.")
    output_dir: Path = setting(Path("evaluation"), "Folder of the results.")
    trust_remote_code: bool = setting(False, "Run the Python code that is stored with a model, if it needs it.")
    overwrite: bool = setting(False, "Measure again what has results of other weights or settings.")

    def __post_init__(self) -> None:
        require_at_least(self, {"seq_len": 2, "max_rows": 1, "limit": 1, "num_fewshot": 0, "batch_size": 1})
        if self.text and self.data_dir is not None:
            raise UsageError("--text cannot be combined with --data_dir. Give one of them.")
        for flag, path in (("--task_data", self.task_data), ("--data_dir", self.data_dir)):
            if path is not None and not path.is_dir():
                raise UsageError(f"{flag} {path} does not exist. Name a folder.")


def main(words: list[str]) -> None:
    """Run `evaluate`."""
    parser = FlagParser(
        EvaluateArguments,
        prog=command("evaluate"),
        usage=f"{command('evaluate')} MODEL … [--flag value …]",
        description="Measure models: loss on held-out text, and benchmarks of lm-evaluation-harness. Several models "
        "are compared item by item. The same command continues an interrupted evaluation.",
    )
    parser.add_argument(
        "MODEL",
        nargs="+",
        help="A run, RUN:STEP, RUN:all (every checkpoint), a model folder, a checkpoint, or a Hub id.",
    )
    args, others = parser.fill(words)
    from gpt2small_hf.evaluation.models import find_models

    models = find_models(others.MODEL, trust_remote_code=args.trust_remote_code)
    labels = [model.label for model in models]
    baseline = _baseline(args.baseline, labels, others.MODEL)
    check_writable("--output_dir", args.output_dir)
    from gpt2small_hf.evaluation.benchmarks import PRESETS, check_installed, local_names, write_tasks

    local = {} if args.task_data is None else local_names(args.task_data)
    named = [name for one in args.tasks or () for name in PRESETS.get(one, [one])]
    tasks = named if args.tasks is not None else list(local)
    if tasks:
        check_installed()
    heldout = bool(args.text or args.data_dir) or (not (tasks or args.prompts) and any(model.run for model in models))
    if not (tasks or heldout or args.prompts):
        raise UsageError(
            f"{labels[0]} is not a run, so it has no held-out text. Give --text, --tasks, --task_data or --prompts."
        )
    write_tasks({name: files for name, files in local.items() if name in tasks}, args.output_dir / "tasks")
    from gpt2small_hf.evaluation.command import Evaluation, evaluate_models

    shared = {name: value for name, value in vars(args).items() if name in Evaluation.__dataclass_fields__}
    wanted = Evaluation(**{**shared, "tasks": tasks, "baseline": baseline}, models=models, heldout=heldout)
    evaluate_models(wanted)
    print(f"next: {command('chat', others.MODEL[0].removesuffix(':all'))}")


def _baseline(wanted: str | None, labels: list[str], words: list[str]) -> str | None:
    """Return the label of the baseline; None for a single model. Raises: UsageError if it is not among the models."""
    if wanted is None or wanted in labels:
        return wanted if wanted or len(labels) < 2 else labels[0]
    if wanted in words and len(labels) == len(words):
        return labels[words.index(wanted)]
    raise UsageError(f"--baseline {wanted} is not one of the models: {', '.join(labels)}. Name one of them.")
