"""A run's metrics in each tracker of the Trainer, offline."""

import os
import subprocess
import sys

import pytest
from conftest import REPOSITORY, tiny_words

WANTED = {"loss_max", "grad_norm_mean", "tokens_per_second", "data_wait", "learning_rate", "clipped"}


@pytest.mark.slow
@pytest.mark.parametrize("reporter", ["tensorboard", "trackio", "wandb"])
def test_a_run_reports_every_figure(reporter, tmp_path):
    pytest.importorskip(reporter)
    words = [*tiny_words(tmp_path, tmp_path / "run"), "--report_to", reporter, "--run_name", "a-run"]
    places = {name: str(tmp_path / "logs") for name in ("TRACKIO_DIR", "TENSORBOARD_LOGGING_DIR", "WANDB_DIR")}
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "train.py"), *words],
        cwd=tmp_path,
        env={**os.environ, **places, "WANDB_MODE": "offline", "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    if reporter == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (folder,) = {path.parent for path in (tmp_path / "logs").rglob("events.out.tfevents.*")}
        found = {name.removeprefix("train/") for name in EventAccumulator(str(folder)).Reload().Tags()["scalars"]}
    else:  # both keep the names as text in files of their own
        kept = b"".join(path.read_bytes() for path in (tmp_path / "logs").rglob("*") if path.is_file())
        found = {name for name in WANTED if name.encode() in kept}
    assert found >= WANTED
