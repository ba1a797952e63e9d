"""`old_prepared/set` was prepared from `old_prepared/text.jsonl` by version 0.1.0.dev0, with --vocab_size 270."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from gpt2small_hf.commands import prepare, preview
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.runs.files import read_json, sha256

OLD = Path(__file__).parent / "old_prepared"
FLAGS = ["--text", "text.jsonl", "--vocab_size", "270", "--validation_fraction", "0.2", "--output_dir", "set"]


@pytest.fixture
def old_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the set and its text, in the working folder."""
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return Path("set")


def test_old_prepared_set_is_opened_with_every_packing(old_set: Path):
    stream = np.fromfile(old_set / "train-00000.bin", "<u2")
    rows = TextDataset(old_set, "train", 64)
    assert np.array_equal(np.concatenate([row["input_ids"] for row in rows]), stream[: 64 * len(rows)])
    for packing in ("bos_bestfit", "isolate"):
        assert len(TextDataset(old_set, "train", 64, packing=packing)) >= 20
    assert len(TextDataset(old_set, "validation", 64)) == 5


def test_old_prepared_set_is_previewed(old_set: Path, capsys: pytest.CaptureFixture[str]):
    preview.main([str(old_set), "--seq_len", "64", "-n", "1"])
    out = capsys.readouterr().out
    assert "1,683 tokens in 20 documents" in out
    assert "Document 0. A stream of tokens is cut into rows of one length." in out.replace("⟦", "").replace("\n", "")


def test_old_prepared_set_is_that_of_the_same_text(old_set: Path, capsys: pytest.CaptureFixture[str]):
    prepare.main(FLAGS)
    assert "set is already prepared from the same inputs." in capsys.readouterr().out
    before = read_json(old_set / "meta.json")
    shutil.rmtree(old_set)
    prepare.main(FLAGS)
    after = read_json(old_set / "meta.json")
    for key in ("fingerprint", "inputs", "splits", "sources", "held_out", "dtype"):
        assert after[key] == before[key]
    files = [path.relative_to(OLD) for path in (OLD / "set").rglob("*") if path.is_file() and path.name != "meta.json"]
    assert {file: sha256(file) for file in files} == {file: sha256(OLD / file) for file in files}
    assert len(files) == 6
