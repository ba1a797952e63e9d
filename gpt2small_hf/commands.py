"""Flags and paths of each command of `python -m gpt2small_hf`, checked before what takes seconds is imported.

What a command does is in a module of its own, which is imported once its flags are understood.
"""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path

from gpt2small_hf.data.arguments import ChatFlags, PrepareArguments, PreviewArguments
from gpt2small_hf.errors import UsageError
from gpt2small_hf.flags import BASELINE, FlagParser, find_recipes, without_flags
from gpt2small_hf.runs.files import check_writable
from gpt2small_hf.runs.layout import DataFolder, RunFolder, check_named, check_run
from gpt2small_hf.training import budget

TINY = Path(__file__).parents[1] / "examples" / "tiny.yaml"


# ---- data -------------------------------------------------------------------------------------------------------


def prepare(words: list[str]) -> None:
    """`python -m gpt2small_hf prepare`."""
    parser = FlagParser(
        PrepareArguments,
        prog="python -m gpt2small_hf prepare",
        usage="python -m gpt2small_hf prepare --text FILES … | --dataset ID [--flag value …]",
        description="Make a folder of token files from text. Without flags: from the Python documentation.",
    )
    parser.add_argument("--output_dir", "--output-dir", type=Path, help="The folder (default: data/<source>-<hash>).")
    parser.add_argument("--overwrite", action="store_true", help="Replace the folder if it holds another set.")
    args, where = parser.fill(words)
    from gpt2small_hf.data.sources import find_files

    if not args.trains_tokenizer:
        check_named("--tokenizer", args.tokenizer)
    find_files([*(args.text or []), *(args.validation_text or [])])
    place = where.output_dir or Path("data")
    if not place.is_dir():  # a set that is there may only be read
        check_writable("--output_dir", place)
    from gpt2small_hf.data.meta import read_meta
    from gpt2small_hf.data.tokens import prepare

    folder = prepare(args, where.output_dir, overwrite=where.overwrite)
    if "validation" in read_meta(folder)["splits"]:
        print(f"next: python train.py --data_dir {shlex.quote(str(folder))}")
    else:
        print(f"next: python train.py --data_dir {shlex.quote(str(folder))} --eval_strategy no (no text is held out)")


def preview(words: list[str]) -> None:
    """`python -m gpt2small_hf preview`."""
    parser = FlagParser(
        PreviewArguments,
        ChatFlags,
        prog="python -m gpt2small_hf preview",
        usage="python -m gpt2small_hf preview DATA … [--flag value …]",
        description="Show what a model would be trained on, row by row: the template in force, what of it is learned "
        "and what did not fit.",
    )
    parser.add_argument(
        "DATA",
        nargs="+",
        help="Chats, as --chat_data of train.py takes them: files, folders, Hub ids, NAME[:100] for some rows. "
        "Or one folder that `prepare` has written.",
    )
    parser.add_argument("--ids", action="store_true", help="Show the ids of the tokens.")
    args, chat, others = parser.fill(_apart(words))
    from gpt2small_hf.data.conversations import find_places

    if not any(DataFolder(Path(name).expanduser()).exists for name in others.DATA):
        for name in others.DATA:
            find_places(name)
    check_named("--tokenizer", args.tokenizer)
    if args.html is not None:
        check_writable("--html", args.html.parent)
    from gpt2small_hf.data.preview import preview

    preview(others.DATA, args, chat, ids=others.ids)


def _apart(words: list[str]) -> list[str]:
    """`--skip_bad_rows chats.jsonl` with an end to the flag: the parser would take the name for its value."""
    names = [f.name for f in fields(ChatFlags) if f.default is False]
    switches = {f"--{spelled}" for name in names for spelled in (name, name.replace("_", "-"))}
    truths = {*("yes", "true", "t", "y", "1"), *("no", "false", "f", "n", "0")}
    return [
        f"{word}=true" if word in switches and after.lower() not in truths else word
        for word, after in pairwise([*words, ""])
    ]


# ---- runs -------------------------------------------------------------------------------------------------------


@dataclass
class PlanArguments:
    """On what to plan."""

    _argument_group_name = "plan"

    device_name: str | None = field(
        default=None,
        metadata={"help": "A device to plan for, such as H100, A100 or RTX 4090. Unset: the one found here."},
    )
    n_devices: int | None = field(
        default=None, metadata={"help": "How many of them. Unset: as many as are found here."}
    )
    mfu: float | None = field(
        default=None,
        metadata={
            "help": "Share of the device's peak that the run is expected to make. Unset: what the reference series "
            "measured on this device and in this precision, or the range that it measured on others."
        },
    )

    def __post_init__(self) -> None:
        if self.device_name is not None and budget.find_device(self.device_name) is None:
            raise UsageError(
                f"--device_name {self.device_name} is not known. {budget.suggest_device(self.device_name)}"
            )
        if self.n_devices is not None and self.n_devices < 1:
            raise UsageError(f"--n_devices is {self.n_devices}. Give 1 or more, or leave it out.")
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise UsageError(f"--mfu is {self.mfu:g}. Give a share above 0, up to 1.")


def plan(words: list[str]) -> None:
    """`python -m gpt2small_hf plan`."""
    from gpt2small_hf.training.arguments import complete, read_with
    from gpt2small_hf.training.paths import check_paths

    args, planned = read_with(
        words,
        TINY if TINY.is_file() else None,  # a wheel has no examples
        prog="python -m gpt2small_hf plan",
        purpose="Show what a run takes, before anything runs, and what rules of thumb say of it.",
        more=(PlanArguments,),
    )
    check_paths(args)
    from gpt2small_hf.plan import describe

    training = without_flags(words, {setting.name for setting in fields(PlanArguments)})
    # A plan for another machine does not ask whether this one can compute in bfloat16.
    complete(args, any_precision=True)
    print(f"{describe(args, planned)}\n\nnext: python train.py {shlex.join(training)}".rstrip())


@dataclass
class SweepArguments:
    """Which runs, how many at a time, and where."""

    _argument_group_name = "sweep"

    seeds: int = field(
        default=3,
        metadata={
            "help": "The baseline is run with so many initial-weight seeds, and each with so many training seeds."
        },
    )
    seeds_per_intervention: int | None = field(
        default=None,
        metadata={"help": "Every other recipe is run with so many pairs of seeds (1, 1), (2, 2), …; unset: 2."},
    )
    n_jobs: int = field(default=1, metadata={"help": "Runs at a time. On a CPU each takes the recipe's num_threads."})
    output_dir: Path | None = field(
        default=None, metadata={"help": "Folder of the run folders and of the table; unset: runs/<name of FOLDER>."}
    )
    only: list[str] = field(
        default_factory=list, metadata={"help": "Run these recipes only; the table has all that were run."}
    )
    overwrite: bool = field(default=False, metadata={"help": "Do the runs again whose recipe or text was changed."})
    table_only: bool = field(default=False, metadata={"help": "Run nothing: make the table of what is there."})

    def __post_init__(self) -> None:
        for name in ("seeds", "seeds_per_intervention", "n_jobs"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"--{name} is {getattr(self, name)}. Give 1 or more.")
        if self.seeds_per_intervention is None:
            self.seeds_per_intervention = min(2, self.seeds)
        if self.seeds_per_intervention > self.seeds:
            raise UsageError(
                f"--seeds_per_intervention is {self.seeds_per_intervention}, but the baseline is run with {self.seeds} "
                "(--seeds), and runs are compared with the baseline's of the same seeds. Give at most as many."
            )


def sweep(words: list[str]) -> None:
    """`python -m gpt2small_hf sweep`."""
    parser = FlagParser(
        SweepArguments,
        prog="python -m gpt2small_hf sweep",
        usage="python -m gpt2small_hf sweep FOLDER [--flag value …]",
        description="Run every recipe of a folder with several seeds, and say which changes of the held-out loss are "
        f"larger than its noise. The folder has a {BASELINE}.yaml, which the others are compared with. When it was "
        "stopped, the same command goes on.",
    )
    parser.add_argument("FOLDER", type=Path, help="Folder of recipes, such as examples/interventions-small.")
    args, where = parser.fill(words)
    from gpt2small_hf.training.arguments import read_arguments
    from gpt2small_hf.training.memory import check_memory
    from gpt2small_hf.training.paths import check_packages, check_paths

    recipes = find_recipes(where.FOLDER)
    for name in args.only:
        if name not in recipes:
            near = difflib.get_close_matches(name, recipes, 1)
            raise UsageError(
                f"{where.FOLDER} has no recipe {name}.yaml." + (f" Did you mean {near[0]}?" if near else "")
            )
    for name, path in recipes.items():
        if not args.table_only and (not args.only or name in (BASELINE, *args.only)):
            settings = read_arguments([str(path)], path)
            check_paths(settings)
            check_packages(settings)
            check_memory(settings)
    check_writable("--output_dir", args.output_dir or Path("runs") / where.FOLDER.resolve().name)
    from gpt2small_hf.sweep import sweep

    sweep(where.FOLDER, args)


def report(words: list[str]) -> None:
    """`python -m gpt2small_hf report`."""
    parser = FlagParser(
        prog="python -m gpt2small_hf report",
        description="Write report.md into each run folder: what the run is, its results, charts and symptoms, and how "
        "its text became coherent. Several runs are also compared. A run need not be finished.",
    )
    parser.add_argument("RUN", nargs="+", type=Path, help="A run folder, as train.py wrote it.")
    (args,) = parser.fill(words)
    for root in args.RUN:
        check_run(RunFolder(root))
    from gpt2small_hf.report.page import write_reports
    from gpt2small_hf.runs.reader import Run

    write_reports([Run(RunFolder(root)) for root in args.RUN])


# ---- models -----------------------------------------------------------------------------------------------------


def convert(words: list[str]) -> None:
    """`python -m gpt2small_hf convert`."""
    parser = FlagParser(
        prog="python -m gpt2small_hf convert",
        description="Turn a GPT-2 of another code base into a folder of ours, or ours into one that any GPT-2 reader "
        "takes without remote code. Nothing in SRC is run.",
    )
    parser.add_argument(
        "SRC",
        help="A run, model or checkpoint folder of ours; a folder or Hub id of a transformers GPT-2; the reference "
        "series' model.json with *.safetensors, or its published form; nanoGPT's ckpt.pt.",
    )
    parser.add_argument("DST", type=Path, help="The folder to write.")
    parser.add_argument("--to", required=True, choices=["gpt2small", "gpt2"], help="The form to write.")
    parser.add_argument("--config", type=Path, help="The reference series' model.json, if it is not beside SRC.")
    parser.add_argument("--tokenizer", help="Folder or Hub id of a tokenizer, if none lies beside SRC.")
    parser.add_argument("--overwrite", action="store_true", help="Replace the model folder DST.")
    (args,) = parser.fill(words)
    from gpt2small_hf.convert import check_destination, convert, locate, next_command

    check_destination(args.DST, locate(args.SRC), overwrite=args.overwrite)
    check_writable("DST", args.DST)
    check_named("--tokenizer", args.tokenizer)
    if args.config is not None and not args.config.is_file():
        raise UsageError(f"--config {args.config} is not a file. Name the reference series' model.json.")
    convert(args.SRC, args.DST, args.to, settings=args.config, tokenizer=args.tokenizer, overwrite=args.overwrite)
    print(f"next: {next_command(args.DST, args.to)}")
