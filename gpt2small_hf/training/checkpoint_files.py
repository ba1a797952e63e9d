"""Find and validate the checkpoints that training can resume from, without importing torch."""

from __future__ import annotations

import json
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath

from safetensors import SafetensorError, safe_open

from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.layout import RunFolder, checkpoints_in
from gpt2small_hf.runs.reader import progress_of
from gpt2small_hf.runs.results import CheckpointManifest

MANIFEST = "checkpoint.json"


def complete_checkpoints(run: RunFolder, *, keeps_best: bool = False) -> Iterator[Path]:
    """Yield the checkpoints that training can resume from, latest first; print those that are skipped.

    Args:
        run: the run folder.
        keeps_best: whether the run needs the best checkpoint at its end: then that must be complete too.
    """
    for path in checkpoints_in(run.checkpoints):
        if reason := why_not(path, run, keeps_best=keeps_best):
            print(f"skipping {path}: {reason}.", file=sys.stderr)
        else:
            yield path


def why_not(checkpoint: Path, run: RunFolder, *, keeps_best: bool) -> str | None:
    """Return why a run cannot resume from a checkpoint; None if it can."""
    if not is_complete(checkpoint):
        return "it is damaged, incomplete, or has no optimizer state (--save_only_model)"
    best = progress_of(checkpoint).best_model_checkpoint
    if keeps_best and best is not None:
        found = find_best(checkpoint, run.checkpoints)
        if found is None or not is_complete(found):
            return f"{Path(best).name}, the best one up to there, is {'missing' if found is None else 'damaged'}"
    return None


def find_best(checkpoint: Path, checkpoints: Path) -> Path | None:
    """Return the best checkpoint as recorded in a checkpoint; None if none was recorded or it is missing.

    The recorded path may be outdated, as the run may have been moved, or relative to another folder. So the
    checkpoint is found by its name.

    Args:
        checkpoint: the checkpoint to resume from.
        checkpoints: the run's own checkpoints folder, which is searched first.
    """
    stored = progress_of(checkpoint).best_model_checkpoint
    if stored is None:
        return None
    name = PureWindowsPath(stored).name  # parses Windows and POSIX paths
    places = [checkpoints / name, checkpoint.resolve().parent / name, Path(stored)]
    return next((path for path in places if path.is_dir()), None)


def is_complete(checkpoint: Path) -> bool:
    """Return whether all files of a checkpoint exist and match their recorded checksums."""
    if not (checkpoint / MANIFEST).exists():
        return _looks_complete(checkpoint)
    try:
        manifest = CheckpointManifest.load(checkpoint / MANIFEST)
        return all(crc32(checkpoint / name) == value for name, value in manifest.crc32.items())
    except (OSError, UsageError):
        return False


def _looks_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint without a manifest, as of earlier versions, has all files and can be read."""
    try:
        for path in checkpoint.glob("*.json"):
            json.loads(path.read_text(encoding="utf-8"))
        for path in checkpoint.glob("*.safetensors"):
            with safe_open(path, framework="pt"):  # validates the file's length against its header
                pass
        names = {path.name for path in checkpoint.iterdir()}
    except (OSError, SafetensorError, ValueError):
        return False
    files = [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth"), *checkpoint.glob("*.bin")]
    has_optimizer = any(name.startswith(("optimizer", "global_step")) for name in names)  # the latter is DeepSpeed's
    has_random_state = any(name.startswith("rng_state") for name in names)
    # FSDP and DeepSpeed may store the weights in subfolders.
    alone = {"model.safetensors", "adapter_model.safetensors"}
    has_weights = bool(alone & names) or any((checkpoint / name).is_dir() for name in names)
    has_state = names >= {"scheduler.pt", "trainer_state.json"}
    return has_weights and has_optimizer and has_random_state and has_state and all(map(zipfile.is_zipfile, files))


def write_manifest(checkpoint: Path, *, scheduled: bool) -> None:
    """Write a manifest with the checksum of each file of a complete checkpoint; `scheduled`: not only by a signal."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST)
    checksums = {path.relative_to(checkpoint).as_posix(): crc32(path) for path in files}
    CheckpointManifest(scheduled=scheduled, crc32=checksums).save(checkpoint / MANIFEST)


def crc32(path: Path) -> int:
    """Return the CRC-32 of a file, read in blocks."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def is_scheduled(checkpoint: Path) -> bool:
    """Return False for a checkpoint that only a signal requested."""
    try:
        return CheckpointManifest.load(checkpoint / MANIFEST).scheduled
    except (OSError, UsageError):  # damaged, or of an earlier version
        return True


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint."""
    return progress_of(checkpoint).global_step
