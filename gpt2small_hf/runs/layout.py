"""Where each file of a run folder, a sweep and a prepared data set is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import is_leftover, is_replaceable, lock_of
from gpt2small_hf.runs.hub import check_on_hub

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class File:
    """A path in a folder: an attribute of classes with a `root`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: Any, owner: type) -> Path:
        """Return the path."""
        return folder.root / self.name


@dataclass(frozen=True)
class RunFolder:
    """The files of one training run."""

    root: Path

    recipe = File("recipe.yaml")
    """The recipe as it was given."""
    resolved = File("resolved.json")
    """All settings, with commit, versions and device."""
    metrics = File("metrics.jsonl")
    """One JSON object for each log entry."""
    samples = File("samples.jsonl")
    """One JSON object for each checkpoint and prompt: the model's completions."""
    first_rows = File("first_rows.txt")
    """The first training rows, decoded, with supervised tokens marked."""
    checkpoints = File("checkpoints")
    """Folder of `checkpoint-<step>/`; each is a model folder."""
    model = File("model")
    """Final weights, config, code and tokenizer: what is published."""
    adapter = File("adapter")
    """The LoRA adapter, which is merged into `model/` (LoRA runs only)."""
    answers = File("evaluation/answers.jsonl")
    """One JSON object for each held-out question, with the finished model's answer (chat runs only)."""
    heldout = File("evaluation/heldout.json")
    """Held-out loss before and after training, with its baselines."""
    completions = File("evaluation/completions.json")
    """Fixed prompts continued by the finished model."""

    report = File("report.md")
    """Page with results, charts and samples."""
    staged = File("staged")
    """The files to publish. `staged.html` next to it shows the model card as on the Hub."""
    published = File("published.json")
    """Where the run was published: repository, commit, tag, hashes, and what was verified."""
    lock = File(".lock")
    """Lock of the training process. It marks a run folder before `resolved.json` exists."""
    former = File("former")
    """The run that this one overwrites, kept until this one is finished: a mount point cannot be renamed."""
    former_incomplete = File(".former")
    """`former` while files are moved into it."""

    def chart(self, name: str) -> Path:
        """A chart: `loss`, `grad_norm`, `learning_rate`, `throughput` or `benchmarks`."""
        return self.root / "charts" / f"{name}.png"

    def is_own(self, path: Path) -> bool:
        """Whether a file or folder in a run folder is written by this package; all others are the user's."""
        own = (self.recipe, self.resolved, self.metrics, self.samples, self.first_rows, self.checkpoints, self.model)
        own += (self.adapter, self.heldout.parent, self.chart("").parent, self.report, self.published)
        return path in own or path.name.startswith(self.staged.name) or is_leftover(path)

    @property
    def finished(self) -> bool:
        """Whether the model and its results are saved. `heldout.json` is written last, apart from charts."""
        return self.heldout.exists()


@dataclass(frozen=True)
class SweepFolder:
    """The files of a sweep: a run folder and a log for each recipe and pair of seeds, and the results."""

    root: Path

    lock = File(".lock")
    """Lock file of a running sweep."""
    table = File("sweep.md")
    """The results as Markdown."""
    results = File("sweep.json")
    """The results as JSON."""
    chart = File("sweep.png")
    """The results as a chart."""

    def run(self, recipe: str, init_seed: int, seed: int) -> RunFolder:
        """Return a run: `init_seed` is for the initial weights, `seed` for dropout and the order of rows."""
        return RunFolder(self.root / f"{recipe}-i{init_seed}-t{seed}")

    def log(self, run: RunFolder) -> Path:
        """Output of the run's processes."""
        return self.root / f"{run.root.name}.log"

    @staticmethod
    def parts_of(run: RunFolder) -> tuple[str, int, int] | None:
        """Return recipe, initial-weight seed and training seed of a run of a sweep; None for another folder's name."""
        match = re.fullmatch(r"(.+)-i(\d+)-t(\d+)", run.root.resolve().name)
        return (match[1], int(match[2]), int(match[3])) if match else None

    def runs(self, recipe: str) -> dict[tuple[int, int], RunFolder]:
        """Return the started runs of a recipe, by their two seeds."""
        found = {}
        for path in self.root.glob(f"{recipe}-i*-t*/"):
            if match := re.fullmatch(r"-i(\d+)-t(\d+)", path.name[len(recipe) :]):
                found[int(match[1]), int(match[2])] = RunFolder(path)
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class DataFolder:
    """The files of one prepared data set."""

    root: Path

    meta = File("meta.json")
    """Counts, source and tokenizer. Written last: a folder without it is not a data set."""
    tokenizer = File("tokenizer")
    """The tokenizer of the ids, for `AutoTokenizer.from_pretrained`."""
    progress = File("progress.json")
    """Progress of an unfinished preparation, in the folder `unfinished()`."""

    def tokens(self, split: str, shard: int) -> Path:
        """Flat little-endian token ids, uint16 or uint32 as `meta.json` says."""
        return self.root / f"{split}-{shard:05d}.bin"

    def documents(self, split: str) -> Path:
        """Flat little-endian uint64: where each document starts in the split's stream, then the stream's length."""
        return self.root / f"{split}-documents.bin"

    def rows(self, split: str, packing: str, seq_len: int) -> Path:
        """Cached assignment of documents to rows."""
        return self.root / f"{split}-{packing}-{seq_len}.npy"

    @property
    def lock(self) -> Path:
        """Lock of the process that prepares the set: next to the folder, or inside if it cannot be renamed."""
        return lock_of(self.root)

    @property
    def exists(self) -> bool:
        """Whether a data set or an unfinished preparation exists."""
        is_started = not self.root.exists() and bool(self.root.name) and self.unfinished().root.exists()
        return self.meta.is_file() or is_started

    def unfinished(self) -> DataFolder:
        """Return the folder of an unfinished preparation: next to this one, or inside if it cannot be renamed."""
        is_fixed = self.root.is_dir() and not is_replaceable(self.root)
        return DataFolder(self.root / ".partial" if is_fixed else self.root.with_name(self.root.name + ".partial"))


def check_named(flag: str, name: str | None, *, is_loaded: bool = True) -> None:
    """Check that a tokenizer is a local path, in the cache or on the Hub.

    Raises: UsageError otherwise. Unless the tokenizer `is_loaded`, an id is not asked for.
    """
    if not name or Path(name).expanduser().exists():
        return
    if HUB_ID.fullmatch(name):
        if is_loaded:
            check_on_hub(name, ("tokenizer.json", "tokenizer_config.json"), where=f"{flag} ")
    else:
        raise UsageError(f"{flag} {name} does not exist. Check the spelling; the working folder is {Path.cwd()}.")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return all checkpoints in a folder, newest first."""
    found = (path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal())
    return sorted(found, key=number_of, reverse=True)


def number_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("checkpoint-"))
