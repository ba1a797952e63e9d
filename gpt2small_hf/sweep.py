"""A folder of recipes → runs with several seeds, each a process. `report/sweep.py` compares them."""

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

from gpt2small_hf.config.commands import SweepArguments
from gpt2small_hf.config.recipe import BASELINE, find_recipes, read_recipe
from gpt2small_hf.config.resolve import ALTERNATIVES, check_sizes, read_config
from gpt2small_hf.data.corpus.metadata import read_meta
from gpt2small_hf.errors import RunInterruptedError, RunStoppedError, UsageError
from gpt2small_hf.formatting import duration
from gpt2small_hf.invocation import command
from gpt2small_hf.report.sweep import stopped_because, write_report
from gpt2small_hf.runs.files import locked
from gpt2small_hf.runs.layout import RunFolder, SweepFolder
from gpt2small_hf.runs.reader import Run, read_resolved
from gpt2small_hf.training.inputs import build_run_inputs, find_data
from gpt2small_hf.training.resume import MAY_CHANGE_ALL, PARTS_OF_A_STEP, may_change

LINES_OF_TAIL = 15
SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True)
class Job:
    """A recipe with its two seeds."""

    recipe: Path
    init_seed: int
    seed: int
    """Seed of dropout and of the order of rows."""
    folder: RunFolder
    log: Path

    @property
    def words(self) -> list[str]:
        """Arguments of the command `train`."""
        seeds = ["--init_seed", str(self.init_seed), "--seed", str(self.seed), "--data_seed", str(self.seed)]
        return [str(self.recipe), *seeds, "--output_dir", str(self.folder.root)]


def sweep(recipes_dir: Path, args: SweepArguments) -> None:
    """Train the runs that are not finished, and write the table.

    Raises: UsageError before the first run; RunStoppedError if a run fails for another reason than its loss;
        RunInterruptedError when a signal ended it.
    """
    recipes = find_recipes(recipes_dir)
    folder = SweepFolder(args.output_dir or Path("runs") / recipes_dir.resolve().name)
    if args.table_only:
        print(write_report(folder, recipes))
        return
    all_jobs = list_jobs(recipes, args, folder)
    jobs = [job for job in all_jobs if not args.only or job.recipe.stem in args.only]
    folder.root.mkdir(parents=True, exist_ok=True)
    with locked_sweep(folder, all_jobs):
        fingerprints = check_recipes({job.recipe: job for job in [*all_jobs[:1], *jobs]})
        changed = [job for job in jobs if has_changed(job, fingerprints[job.recipe])]
        if changed and not args.overwrite:
            names = ", ".join(job.folder.root.name for job in changed)
            raise UsageError(
                f"in {folder.root}, these runs were made with another recipe or text: {names}. Repeat them with "
                "--overwrite, or choose another --output_dir."
            )
        waiting = [job for job in jobs if job in changed or not is_done(job)]
        n_recipes = len({job.recipe for job in jobs})
        print(f"{len(jobs):,} runs of {n_recipes:,} recipes, {len(waiting):,} of them not finished", flush=True)
        try:
            run_all(waiting, n_jobs=args.n_jobs, overwrite=changed)
        finally:
            print(write_report(folder, recipes))
    print(f"next: {command('report', str(folder.root))}/*-i1-t1")


def list_jobs(recipes: dict[str, Path], args: SweepArguments, folder: SweepFolder) -> list[Job]:
    """List all runs in their order: the baseline with all seeds, then each recipe with one seed pair after another."""
    seeds = range(1, args.seeds + 1)
    wanted = [(BASELINE, i, t) for i in seeds for t in seeds]
    wanted += [(name, i, i) for i in seeds[: args.n_pairs] for name in recipes if name != BASELINE]
    runs = [folder.run(*key) for key in wanted]
    return [Job(recipes[name], i, t, run, folder.log(run)) for (name, i, t), run in zip(wanted, runs, strict=True)]


# ---- before the first run ----------------------------------------------------------------------------------------


@contextmanager
def locked_sweep(folder: SweepFolder, jobs: list[Job]) -> Iterator[None]:
    """Lock the folder of a sweep.

    Raises: UsageError if another sweep, or a run that a killed sweep started, trains in the folder.
    """
    refusal = f"another sweep, or a run that it started, trains in {folder.root}. Wait until it ends, or end it."
    with locked(folder.lock, refusal):
        for job in jobs:
            if job.folder.root.is_dir():
                with locked(job.folder.lock, refusal):  # the run itself holds it
                    pass
        yield


def check_recipes(jobs: dict[Path, Job]) -> dict[Path, str]:
    """Read all recipes and prepare their text, so that errors are found now and no two runs prepare the same text.

    Returns: the fingerprint of each recipe's text.
    Raises:  UsageError for an invalid recipe, or one that is evaluated on other rows than the first.
    """
    fingerprints, measured_on, prepared = {}, {}, {}
    for recipe, job in jobs.items():
        config = read_config(job.words)
        if config.run.init_from is not None:
            inputs = build_run_inputs(config)
            seq_len, fingerprints[recipe] = inputs.rows.seq_len, inputs.data["fingerprint"]
            has_heldout = inputs.heldout is not None
        else:
            source = repr((config.run.data_dir, config.data))
            seq_len = check_sizes(config)
            prepared[source] = prepared.get(source) or find_data(config)
            meta = read_meta(prepared[source])
            fingerprints[recipe], has_heldout = meta.fingerprint, "validation" in meta.splits
        if not has_heldout:
            raise UsageError(f"{recipe} has no held-out rows, so there is no loss to compare. Set validation_fraction.")
        measured_on[recipe] = (fingerprints[recipe], seq_len, config.run.max_eval_samples)
    first = next(iter(jobs))
    for recipe, rows in measured_on.items():
        if rows != measured_on[first]:
            raise UsageError(
                f"{recipe} is evaluated on other held-out rows than {first}, so they cannot be compared. Give both the "
                "same text, tokenizer, seq_len and max_eval_samples."
            )
    return fingerprints


def has_changed(job: Job, fingerprint: str) -> bool:
    """Whether the run in the folder was made with another recipe, seed or text."""
    if not job.folder.resolved.exists():
        return False
    resolved = read_resolved(job.folder)
    then = (resolved.run.init_seed, resolved.trainer.seed, resolved.trainer.data_seed)
    # `train` compares the rows of a step and the hash of the base model.
    ignored = may_change(resolved) - PARTS_OF_A_STEP - {"init_from"}
    return (
        then != (job.init_seed, job.seed, job.seed)
        or resolved.data.fingerprint != fingerprint
        or settings_that_matter(job.folder.recipe, ignored) != settings_that_matter(job.recipe, ignored)
    )


def settings_that_matter(recipe: Path, ignored: set[str]) -> dict[str, object]:
    """Return the settings of a recipe without those that a resumed run may change."""
    found = read_recipe(recipe, ALTERNATIVES).items()
    return {name: value for name, value in found if name not in ignored and not name.startswith(MAY_CHANGE_ALL)}


def is_done(job: Job) -> bool:
    """Whether the run is finished, or stopped because of its loss."""
    return job.folder.finished or stopped_because(job.log) is not None


# ---- the runs ----------------------------------------------------------------------------------------------------


def run_all(waiting: list[Job], *, n_jobs: int, overwrite: list[Job]) -> None:
    """Train all runs, `n_jobs` at a time, and print a line when one ends.

    Raises: as `sweep`, after the last process has ended.
    """
    waiting = list(waiting)
    n_wanted, seconds = len(waiting), []
    active: dict[subprocess.Popen[bytes], tuple[Job, float]] = {}
    failed: Job | None = None
    with caught_signals() as caught:
        n_signals_sent = 0
        while active or (waiting and not caught and not failed):
            while waiting and len(active) < n_jobs and not caught and not failed:
                job = waiting.pop(0)
                active[start(job, overwrite=job in overwrite)] = job, time.perf_counter()
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for process in [process for process in active if process.poll() is not None]:
                job, started = active.pop(process)
                if process.returncode == 0 or (process.returncode == 3 and stopped_because(job.log)):
                    seconds.append(time.perf_counter() - started)
                    left = n_wanted - len(seconds)
                    print(f"{result_line(job, seconds[-1])} · {time_left(left, seconds, n_jobs)}", flush=True)
                elif not caught:
                    failed = failed or job
            wanted = max(len(caught), 1 if failed else 0)
            if n_signals_sent < wanted:  # at the first a run saves a checkpoint, at the second it ends
                n_signals_sent = wanted
                for process in active:
                    process.terminate()
    if failed:
        tail = failed.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_OF_TAIL:]
        print("\n".join(tail), file=sys.stderr)
        raise RunStoppedError(
            f"{failed.folder.root.name} failed; its output is in {failed.log}. Fix the cause, then run the same "
            "command to resume."
        )
    if caught:
        name = signal.Signals(caught[0]).name
        raise RunInterruptedError(f"{name}. Run the same command to resume.", caught[0])


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collect the signals that would end the process."""
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        os.write(2, b"\nstopping after the active runs have saved a checkpoint; a second signal ends them at once.\n")

    # A hangup that is ignored (nohup) stays ignored.
    known = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # Windows has no SIGHUP
    numbers = [n for n in known if signal.getsignal(n) != signal.SIG_IGN]
    former = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def start(job: Job, *, overwrite: bool) -> subprocess.Popen[bytes]:
    """Start a run, with its output in its log."""
    words = [*job.words, *(["--overwrite"] if overwrite else [])]
    with job.log.open("a", encoding="utf-8") as log:
        log.write(f"$ {command('train', *words)}\n")
        log.flush()
        return subprocess.Popen(
            [sys.executable, "-m", "gpt2small_hf", "train", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # so that the last output is the last line of the log
            start_new_session=True,  # Ctrl-C reaches only the sweep, which forwards it once
        )


def result_line(job: Job, seconds: float) -> str:
    """Return the result of a run in one line."""
    if job.folder.finished:
        result = f"held-out {Run(job.folder).loss_nats:.4f}"
    else:
        result = f"stopped: {stopped_because(job.log)}"
    return f"{job.folder.root.name}  {result}  {duration(seconds)}"


def time_left(left: int, seconds: list[float], n_jobs: int) -> str:
    """Return the number of runs left, and their time at the mean of the finished ones."""
    return f"{left:,} left, about {duration(sum(seconds) / len(seconds) * left / n_jobs)}" if left else "the last"
