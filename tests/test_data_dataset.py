"""Rows that `data/dataset.py` serves from a prepared folder."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from gpt2small_hf.data import shards
from gpt2small_hf.data.arguments import PrepareArguments
from gpt2small_hf.data.dataset import TokenDataset, collate, read_meta
from gpt2small_hf.data.tokens import prepare
from gpt2small_hf.runs import DataFolder, UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of several small shards."""
    place = tmp_path_factory.mktemp("prepared")
    (place / "text.txt").write_text("Every effort moves you forward, one word after another.\n" * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_TOKENS", 100)
        return prepare(PrepareArguments(text=[str(place / "text.txt")], vocab_size=300), place / "set")


def stream(folder: Path, split: str) -> list[int]:
    files = read_meta(folder)["splits"][split]["files"]
    return [token for name in files for token in np.fromfile(folder / name, "<u2").tolist()]


@pytest.mark.parametrize("seq_len", [1, 7, 64, 100, 333])
def test_rows_are_the_stream_cut_up_wherever_its_files_end(folder: Path, seq_len: int):
    rows = TokenDataset(folder, "train", seq_len)
    tokens = stream(folder, "train")
    assert len(read_meta(folder)["splits"]["train"]["files"]) > 3
    assert len(rows) == len(tokens) // seq_len
    served = [rows[row]["input_ids"] for row in range(len(rows))]
    assert all(ids.dtype == np.int64 and ids.shape == (seq_len,) for ids in served)
    assert np.concatenate(served).tolist() == tokens[: len(rows) * seq_len]
    assert rows[-1]["input_ids"].tolist() == served[-1].tolist()


def test_there_is_no_row_after_the_last(folder: Path):
    rows = TokenDataset(folder, "train", 50)
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_labels_are_the_inputs_unshifted(folder: Path):
    rows = TokenDataset(folder, "train", 16)
    batch = collate([rows[0], rows[1]])
    assert batch["input_ids"].shape == (2, 16)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()


def test_worker_processes_serve_the_same_rows(folder: Path):
    rows = TokenDataset(folder, "train", 64)
    loader = DataLoader(rows, batch_size=2, collate_fn=collate, num_workers=1, multiprocessing_context="spawn")
    assert torch.equal(
        torch.cat([batch["input_ids"] for batch in loader]),
        torch.from_numpy(np.stack([rows[row]["input_ids"] for row in range(len(rows))])),
    )


def test_a_pickled_dataset_holds_paths_and_not_tokens(folder: Path):
    rows = TokenDataset(folder, "train", 64)
    assert len(pickle.dumps(rows)) < 2000
    assert pickle.loads(pickle.dumps(rows))[1]["input_ids"].tolist() == rows[1]["input_ids"].tolist()


def test_rows_can_be_limited_to_the_first_ones(folder: Path):
    assert len(TokenDataset(folder, "train", 16, max_rows=3)) == 3
    assert len(TokenDataset(folder, "train", 64, max_rows=10_000)) == len(TokenDataset(folder, "train", 64))


def test_bytes_per_token_are_those_of_the_split(folder: Path):
    counts = read_meta(folder)["splits"]["train"]
    assert TokenDataset(folder, "train", 16).bytes_per_token == counts["bytes"] / counts["tokens"]


def test_a_text_shorter_than_one_row_is_refused_with_both_numbers(folder: Path):
    n_tokens = len(stream(folder, "validation"))
    with pytest.raises(
        UsageError, match=rf"validation split .* has {n_tokens:,} tokens, less than one row of 4,096.*Lower"
    ):
        TokenDataset(folder, "validation", 4096)


def test_a_folder_that_is_no_whole_set_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(UsageError, match=r"does not exist\. Make one: python -m gpt2small_hf prepare"):
        read_meta(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"is not a prepared set \(it has no meta\.json\)"):
        read_meta(tmp_path)
    DataFolder(tmp_path / "half").unfinished().root.mkdir()
    with pytest.raises(UsageError, match=r"half is not finished: .* The same command finishes it"):
        TokenDataset(tmp_path / "half", "train", 8)
    with pytest.raises(UsageError, match=r"has no test split \(it has train, validation\)"):
        TokenDataset(folder, "test", 8)


def test_files_that_lost_tokens_are_noticed(folder: Path, tmp_path: Path):
    for path in folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    last = tmp_path / read_meta(folder)["splits"]["train"]["files"][-1]
    last.write_bytes(last.read_bytes()[:-2])
    with pytest.raises(UsageError, match=r"the train files of .* meta\.json says .* damaged or copied in part"):
        TokenDataset(tmp_path, "train", 8)
