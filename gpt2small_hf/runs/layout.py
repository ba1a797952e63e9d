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
        """Every value in force, with commit, versions and device."""
        return self.root / "resolved.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a log line."""
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """One JSON object a saved step and prompt: what the model made of it then."""
        return self.root / "samples.jsonl"

    @property
    def first_rows(self) -> Path:
        """The first training rows, decoded, with what is learned from them marked."""
        return self.root / "first_rows.txt"

    @property
    def checkpoints(self) -> Path:
        """Folder of `checkpoint-<step>/`; each loads by itself."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """Final weights, config, code and tokenizer: what is published."""
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """Of a run with LoRA: what was trained, alone. `model/` has it merged."""
        return self.root / "adapter"

    @property
    def answers(self) -> Path:
        """Of a run on chats: one JSON object a held-out question, with the finished model's answer."""
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
        """A picture: `loss`, `grad_norm`, `learning_rate` or `throughput`."""
        return self.root / "charts" / f"{name}.png"

    @property
    def report(self) -> Path:
        """The run to look at: its results, pictures and samples."""
        return self.root / "report.md"

    @property
    def staged(self) -> Path:
        """What is published, byte for byte. `staged.html` beside it shows the card as the Hub will."""
        return self.root / "staged"

    @property
    def published(self) -> Path:
        """Where the run was published: repository, commit, tag, hashes, and what was verified."""
        return self.root / "published.json"

    @property
    def lock(self) -> Path:
        """Held by the process that trains here. It marks the folder as a run's before `resolved.json` exists."""
        return self.root / ".lock"

    @property
    def former(self) -> Path:
        """The run that this one overwrites, kept here until this one is finished: a mount point cannot be renamed."""
        return self.root / "former"

    @property
    def former_incomplete(self) -> Path:
        """`former` while files are moved into it."""
        return self.root / ".former"

    def is_own(self, path: Path) -> bool:
        """Whether this project writes a file or folder of that name into a run's folder; all others are the user's."""
        own = (self.recipe, self.resolved, self.metrics, self.samples, self.first_rows, self.checkpoints, self.model)
        own += (self.adapter, self.heldout.parent, self.chart("").parent, self.report, self.published)
        return path in own or path.name.startswith(self.staged.name) or is_leftover(path)

    @property
    def finished(self) -> bool:
        """True once the model and its results are on disk. The held-out result is written last; charts may follow."""
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
        """The tokenizer that made the ids, loadable by `AutoTokenizer`."""
        return self.root / "tokenizer"

    @property
    def progress(self) -> Path:
        """How far an unfinished preparation came. Only in the folder of `unfinished()`."""
        return self.root / "progress.json"

    def tokens(self, split: str, shard: int) -> Path:
        """Flat little-endian token ids, uint16 or uint32 as `meta.json` says."""
        return self.root / f"{split}-{shard:05d}.bin"

    def documents(self, split: str) -> Path:
        """Flat little-endian uint64: where each document starts in the split's stream, then the stream's length."""
        return self.root / f"{split}-documents.bin"

    def rows(self, split: str, packing: str, seq_len: int) -> Path:
        """Which documents make each row: kept once it was worked out, and made again whenever it is gone."""
        return self.root / f"{split}-{packing}-{seq_len}.npy"

    @property
    def lock(self) -> Path:
        """Held by the process that prepares the set: beside the folder, or inside where one cannot be renamed."""
        return lock_of(self.root)

    @property
    def exists(self) -> bool:
        """Whether a data set is prepared here, or was begun."""
        begun = not self.root.exists() and bool(self.root.name) and self.unfinished().root.exists()
        return self.meta.is_file() or begun

    def unfinished(self) -> DataFolder:
        """The folder in which the set is built before it takes its name: beside it, or inside as the lock."""
        is_fixed = self.root.is_dir() and not is_replaceable(self.root)
        return DataFolder(self.root / ".partial" if is_fixed else self.root.with_name(self.root.name + ".partial"))


def check_named(flag: str, name: str | None) -> None:
    """Raise: UsageError if a name is neither of something here nor could be an id on the Hub."""
    if name and not Path(name).expanduser().exists() and not HUB_ID.fullmatch(name):
        raise UsageError(f"{flag} {name} does not exist. Check the spelling; the working folder is {Path.cwd()}.")


def checkpoints_in(folder: Path) -> list[Path]:
    """All checkpoints of a folder, newest first."""
    found = (path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal())
    return sorted(found, key=number_of, reverse=True)


def number_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("checkpoint-"))
