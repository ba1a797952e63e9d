"""The files that `data/corpus/shards.py` writes, also after a stop at any point."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2small_hf.data.corpus import shards
from gpt2small_hf.data.corpus.shards import SplitCounts, SplitWriter
from gpt2small_hf.runs.layout import DataFolder

DTYPE = np.dtype("<u2")
NOTHING = SplitCounts(tokens=0, documents=0, bytes=0)
parts = st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=8), min_size=1, max_size=4)


def contents(folder: DataFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.root.iterdir()}


@settings(deadline=None, max_examples=25)  # each write waits for the disk
@given(parts=parts, stop=st.integers(0, 4), capacity=st.integers(2, 9))
def test_stopped_writer_resumes_from_its_last_record(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[int]], stop: int, capacity: int
):
    once, twice = (DataFolder(tmp_path_factory.mktemp("set")) for _ in range(2))

    def append(writer: SplitWriter, some: list[list[int]]) -> None:
        for part in some:
            writer.append(np.array(part, np.uint32), np.array([0]), 2 * len(part))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_TOKENS", capacity)
        writer = SplitWriter(once, "train", DTYPE, NOTHING)
        append(writer, parts)
        finished = writer.finish()
        writer.close()

        writer = SplitWriter(twice, "train", DTYPE, NOTHING)
        append(writer, parts[:stop])
        recorded = writer.flush()
        append(writer, parts[stop:])  # done, but never recorded
        writer.close()
        writer = SplitWriter(twice, "train", DTYPE, recorded)
        append(writer, parts[stop:])
        assert writer.finish() == finished
        writer.close()

    names = finished.files
    assert contents(once) == contents(twice)
    assert set(contents(once)) == {*names, "train-documents.bin"}
    tokens = [token for part in parts for token in part]
    stream = b"".join((once.root / name).read_bytes() for name in names)
    assert np.frombuffer(stream, DTYPE).tolist() == tokens
    assert all((once.root / name).stat().st_size == capacity * 2 for name in names[:-1])
    offsets = np.frombuffer(once.documents("train").read_bytes(), "<u8").tolist()
    assert offsets == np.cumsum([0, *map(len, parts)]).tolist()


def test_counts_say_what_was_written(tmp_path: Path):
    writer = SplitWriter(DataFolder(tmp_path), "train", DTYPE, NOTHING)
    writer.append(np.array([5, 900, 7], np.uint32), np.array([0, 2]), 11)
    assert writer.flush() == SplitCounts(tokens=3, documents=2, bytes=11, max_id=900)
    writer.close()
