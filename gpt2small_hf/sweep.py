"""Recipes → runs with several seeds, and what each change brings: `python -m gpt2small_hf sweep FOLDER`.

Each run is one of `train`, in a process of its own. Statistics, table and chart are `report/sweep.py`'s.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from gpt2small_hf.config.recipe import BASELINE, find_recipes, read_recipe
from gpt2small_hf.config.resolve import ALTERNATIVES, check_sizes, parse_arguments
from gpt2small_hf.data.corpus.metadata import read_meta
from gpt2small_hf.errors import RunInterruptedError, RunStoppedError, UsageError
from gpt2small_hf.formatting import duration
from gpt2small_hf.invocation import command
from gpt2small_hf.report.sweep import SweepFolder, stopped_because, write_report
from gpt2small_hf.runs.files import locked
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.reader import Run, read_resolved
from gpt2small_hf.training.inputs import build_run_inputs, find_data
from gpt2small_hf.training.resume import MAY_CHANGE_ALL, PARTS_OF_A_STEP, may_change

if TYPE_CHECKING:
    from gpt2small_hf.commands.sweep import SweepArguments

LINES_OF_TAIL = 15
SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True)
class Job:
    """A recipe with its two seeds."""

    recipe: Path
    init_seed: int
    seed: int
    """Of dropout and of the order of rows."""
    folder: RunFolder
    log: Path

    @property
    def words(self) -> list[str]:
        """What follows `train`."""
        seeds = ["--init_seed", str(self.init_seed), "--seed", str(self.seed), "--data_seed", str(self.seed)]
        return [str(self.recipe), *seeds, "--output_dir", str(self.folder.root)]


def sweep(recipes_dir: Path, args: SweepArguments) -> None:
    """Do the runs that are not done yet, and write the table.

    Raises: UsageError for what has to be mended before the first run; RunStoppedError if a run fails for another reason
        than that it does not learn; RunInterruptedError when a signal ended it.
    """
    recipes = find_recipes(recipes_dir)
    folder = SweepFolder(args.output_dir or Path("runs") / recipes_dir.resolve().name)
    if args.table_only:
        print(write_report(folder, recipes))
        return
    jobs = [job for job in plan(recipes, args, folder) if not args.only or job.recipe.stem in args.only]
    folder.root.mkdir(parents=True, exist_ok=True)
    with alone(folder, plan(recipes, args, folder)):
        fingerprints = prepare({job.recipe: job for job in [*plan(recipes, args, folder)[:1], *jobs]})
        changed = [job for job in jobs if has_changed(job, fingerprints[job.recipe])]
        if changed and not args.overwrite:
            names = ", ".join(job.folder.root.name for job in changed)
            raise UsageError(
                f"in {folder.root}, made with another recipe or text than now: {names}. Do these again with "
                "--overwrite, or choose another --output_dir."
            )
        waiting = [job for job in jobs if job in changed or not is_done(job)]
        n_recipes = len({job.recipe for job in jobs})
        print(f"{len(jobs):,} runs of {n_recipes:,} recipes, {len(waiting):,} of them to do", flush=True)
        try:
            run_all(waiting, n_jobs=args.n_jobs, overwrite=changed)
        finally:
            print(write_report(folder, recipes))
    print(f"next: {command('report', str(folder.root))}/*-i1-t1")


def plan(recipes: dict[str, Path], args: SweepArguments, folder: SweepFolder) -> list[Job]:
    """All runs, in the order they are done: the baseline's noise first, then each recipe once, and then once more."""
    seeds = range(1, args.seeds + 1)
    wanted = [(BASELINE, i, t) for i in seeds for t in seeds]
    wanted += [(name, i, i) for i in seeds[: args.seeds_per_intervention] for name in recipes if name != BASELINE]
    jobs = []
    for name, i, t in wanted:
        run = folder.run(name, i, t)
        jobs.append(Job(recipes[name], i, t, run, folder.log(run)))
    return jobs


# ---- before the first run ----------------------------------------------------------------------------------------


@contextmanager
def alone(folder: SweepFolder, jobs: list[Job]) -> Iterator[None]:
    """Keep every other sweep out of the folder.

    Raises: UsageError if another sweep, or a run that a killed one left behind, is at work in the folder.
    """
    refusal = f"another sweep, or a run that one began, is at work in {folder.root}. Wait for its end, or end it."
    with locked(folder.lock, refusal):
        for job in jobs:
            if job.folder.root.is_dir():
                with locked(job.folder.lock, refusal):  # the run itself holds it
                    pass
        yield


def prepare(jobs: dict[Path, Job]) -> dict[Path, str]:
    """Read all recipes and prepare their text, so that nothing is found wrong, and no two runs prepare, later on.

    Returns: the fingerprint of each recipe's text.
    Raises:  UsageError for a recipe that train.py would refuse, or that is measured on other rows than the first.
    """
    fingerprints, measured_on, made = {}, {}, {}
    for recipe, job in jobs.items():
        args = parse_arguments(job.words, recipe)
        if args.run.init_from is not None:
            inputs = build_run_inputs(args)
            seq_len, fingerprints[recipe] = inputs.rows.seq_len, inputs.data["fingerprint"]
            measures = inputs.heldout is not None
        else:
            source = repr((args.run.data_dir, args.data))
            seq_len = check_sizes(args)
            made[source] = made.get(source) or find_data(args)
            meta = read_meta(made[source])
            fingerprints[recipe], measures = meta["fingerprint"], "validation" in meta["splits"]
        if not measures:
            raise UsageError(f"{recipe} holds nothing out, so there is no loss to compare. Set a validation_fraction.")
        measured_on[recipe] = (fingerprints[recipe], seq_len, args.run.max_eval_samples)
    first = next(iter(jobs))
    for recipe, rows in measured_on.items():
        if rows != measured_on[first]:
            raise UsageError(
                f"{recipe} is measured on other held-out rows than {first}, so they cannot be compared. Give both the "
                "same text, tokenizer, seq_len and max_eval_samples."
            )
    return fingerprints


def has_changed(job: Job, fingerprint: str) -> bool:
    """Whether what is in the run's folder was made with another recipe, seed or text."""
    if not job.folder.resolved.exists():
        return False
    resolved = read_resolved(job.folder)
    then = (resolved.run.init_seed, resolved.trainer.seed, resolved.trainer.data_seed)
    # train.py compares the rows of a step, and the weights that it starts from, where these have only names.
    ignored = may_change(resolved) - PARTS_OF_A_STEP - {"init_from"}
    return (
        then != (job.init_seed, job.seed, job.seed)
        or resolved.data.fingerprint != fingerprint
        or what_counts(job.folder.recipe, ignored) != what_counts(job.recipe, ignored)
    )


def what_counts(recipe: Path, ignored: set[str]) -> dict[str, object]:
    """The settings of a recipe that decide what is learned or kept: all but those that a resumed run may change."""
    settings = read_recipe(recipe, ALTERNATIVES)
    return {
        name: value for name, value in settings.items() if name not in ignored and not name.startswith(MAY_CHANGE_ALL)
    }


def is_done(job: Job) -> bool:
    """Whether the run is finished, or stopped because it does not learn."""
    return job.folder.finished or stopped_because(job.log) is not None


# ---- the runs ----------------------------------------------------------------------------------------------------


def run_all(waiting: list[Job], *, n_jobs: int, overwrite: list[Job]) -> None:
    """Do all runs, `n_jobs` at a time, and say a line when one ends.

    Raises: as `sweep`, once no run is left at work.
    """
    waiting = list(waiting)
    n_wanted, seconds = len(waiting), []
    active: dict[subprocess.Popen[bytes], tuple[Job, float]] = {}
    failed: Job | None = None
    with signals() as caught:
        told = 0
        while active or (waiting and not caught and not failed):
            while waiting and len(active) < n_jobs and not caught and not failed:
                job = waiting.pop(0)
                active[begin(job, overwrite=job in overwrite)] = job, time.perf_counter()
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for process in [process for process in active if process.poll() is not None]:
                job, began = active.pop(process)
                if process.returncode == 0 or (process.returncode == 3 and stopped_because(job.log)):
                    seconds.append(time.perf_counter() - began)
                    left = n_wanted - len(seconds)
                    print(f"{words_for(job, seconds[-1])} · {words_for_rest(left, seconds, n_jobs)}", flush=True)
                elif not caught:
                    failed = failed or job
            wanted = max(len(caught), 1 if failed else 0)
            if told < wanted:  # the first lets a run save what it has, a second one ends it
                told = wanted
                for process in active:
                    process.terminate()
    if failed:
        tail = failed.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_OF_TAIL:]
        print("\n".join(tail), file=sys.stderr)
        raise RunStoppedError(
            f"{failed.folder.root.name} failed; all that it said is in {failed.log}. Mend it, and the same command "
            "goes on."
        )
    if caught:
        name = signal.Signals(caught[0]).name
        raise RunInterruptedError(f"{name}. The same command goes on with what is left.", caught[0])


@contextmanager
def signals() -> Iterator[list[int]]:
    """Collect the signals that ask to end, in place of ending."""
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        os.write(
            2, b"\nstopping, once the runs at work have saved what they have; a second signal ends them at once.\n"
        )

    # A hangup that is ignored (nohup) stays so.
    known = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # Windows has no SIGHUP
    numbers = [n for n in known if signal.getsignal(n) != signal.SIG_IGN]
    former = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def begin(job: Job, *, overwrite: bool) -> subprocess.Popen[bytes]:
    """Start a run, all it says going to its log."""
    words = [*job.words, *(["--overwrite"] if overwrite else [])]
    with job.log.open("a", encoding="utf-8") as log:
        log.write(f"$ {command('train', *words)}\n")
        log.flush()
        return subprocess.Popen(
            [sys.executable, "-m", "gpt2small_hf", "train", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # what is said last stands last
            start_new_session=True,  # Ctrl-C is for us: to a run it would be the first signal, and ours the second
        )


def words_for(job: Job, seconds: float) -> str:
    """A finished run in a line."""
    if job.folder.finished:
        result = f"held-out {Run(job.folder).loss_nats:.4f}"
    else:
        result = f"stopped: {stopped_because(job.log)}"
    return f"{job.folder.root.name}  {result}  {duration(seconds)}"


def words_for_rest(left: int, seconds: list[float], n_jobs: int) -> str:
    """How many runs are left, and for how long if they go on as they did."""
    return f"{left:,} left, about {duration(sum(seconds) / len(seconds) * left / n_jobs)}" if left else "the last"
