"""A run's metrics in each tracker of the Trainer, offline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, tiny_words

WANTED = {"loss_max", "grad_norm_mean", "tokens_per_second", "data_wait", "learning_rate", "clipped"}


@pytest.mark.slow
def test_a_run_reports_every_figure(tmp_path):
    folders = {"tensorboard": "TENSORBOARD_LOGGING_DIR", "trackio": "TRACKIO_DIR", "wandb": "WANDB_DIR"}
    for reporter in folders:
        pytest.importorskip(reporter)
    words = [*tiny_words(tmp_path, tmp_path / "run"), "--run_name", "a-run"]
    Path(words[0]).write_text(f"report_to: {json.dumps(list(folders))}\n")
    places = {variable: str(tmp_path / name) for name, variable in folders.items()}
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "train.py"), *words],
        cwd=tmp_path,
        env={**os.environ, **places, "WANDB_MODE": "offline", "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {path.parent for path in (tmp_path / "tensorboard").rglob("events.out.tfevents.*")}
    found = {name.removeprefix("train/") for name in EventAccumulator(str(folder)).Reload().Tags()["scalars"]}
    assert found >= WANTED
    for reporter in ("trackio", "wandb"):  # both keep the names as text in files of their own
        kept = b"".join(path.read_bytes() for path in (tmp_path / reporter).rglob("*") if path.is_file())
        assert {name for name in WANTED if name.encode() in kept} == WANTED
