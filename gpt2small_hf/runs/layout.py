"""Where each file of a run folder and of a prepared data set is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import is_leftover, is_replaceable, lock_of

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class RunFolder:
    """The files of one training run."""

    root: Path

    @property
    def recipe(self) -> Path:
        """The recipe as it was given."""
        return self.root / "recipe.yaml"

    @property
    def resolved(self) -> Path:
        """All settings, with commit, versions and device."""
        return self.root / "resolved.json"

    @property
    def metrics(self) -> Path:
        """One JSON object for each log entry."""
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """One JSON object for each checkpoint and prompt: the model's completions."""
        return self.root / "samples.jsonl"

    @property
    def first_rows(self) -> Path:
        """The first training rows, decoded, with supervised tokens marked."""
        return self.root / "first_rows.txt"

    @property
    def checkpoints(self) -> Path:
        """Folder of `checkpoint-<step>/`; each is a model folder."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """Final weights, config, code and tokenizer: what is published."""
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """The LoRA adapter, which is merged into `model/` (LoRA runs only)."""
        return self.root / "adapter"

    @property
    def answers(self) -> Path:
        """One JSON object for each held-out question, with the finished model's answer (chat runs only)."""
        return self.root / "evaluation" / "answers.jsonl"

    @property
    def heldout(self) -> Path:
        """Held-out loss before and after training, with its baselines."""
        return self.root / "evaluation" / "heldout.json"

    @property
    def completions(self) -> Path:
        """Fixed prompts continued by the finished model."""
        return self.root / "evaluation" / "completions.json"

    def chart(self, name: str) -> Path:
        """A chart: `loss`, `grad_norm`, `learning_rate` or `throughput`."""
        return self.root / "charts" / f"{name}.png"

    @property
    def report(self) -> Path:
        """Page with results, charts and samples."""
        return self.root / "report.md"

    @property
    def staged(self) -> Path:
        """The files to publish. `staged.html` next to it shows the model card as on the Hub."""
        return self.root / "staged"

    @property
    def published(self) -> Path:
        """Where the run was published: repository, commit, tag, hashes, and what was verified."""
        return self.root / "published.json"

    @property
    def lock(self) -> Path:
        """Lock of the training process. It marks a run folder before `resolved.json` exists."""
        return self.root / ".lock"

    @property
    def former(self) -> Path:
        """The run that this one overwrites, kept until this one is finished: a mount point cannot be renamed."""
        return self.root / "former"

    @property
    def former_incomplete(self) -> Path:
        """`former` while files are moved into it."""
        return self.root / ".former"

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
class DataFolder:
    """The files of one prepared data set."""

    root: Path

    @property
    def meta(self) -> Path:
        """Counts, source and tokenizer. Written last: a folder without it is not a data set."""
        return self.root / "meta.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of the ids, for `AutoTokenizer.from_pretrained`."""
        return self.root / "tokenizer"

    @property
    def progress(self) -> Path:
        """Progress of an unfinished preparation, in the folder `unfinished()`."""
        return self.root / "progress.json"

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


def check_named(flag: str, name: str | None) -> None:
    """Check that a name is a local path or has the form of a Hub id. Raises: UsageError otherwise."""
    if name and not Path(name).expanduser().exists() and not HUB_ID.fullmatch(name):
        raise UsageError(f"{flag} {name} does not exist. Check the spelling; the working folder is {Path.cwd()}.")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return all checkpoints in a folder, newest first."""
    found = (path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal())
    return sorted(found, key=number_of, reverse=True)


def number_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("checkpoint-"))
