"""The rows of the tiny run."""

from pathlib import Path

import pytest

from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.runs.files import read_json


@pytest.fixture(scope="module")
def splits(tiny_run) -> tuple[TextDataset, TextDataset]:
    folder = Path(read_json(tiny_run.resolved)["data"]["folder"])
    place = tiny_run.root.parents[1] / folder
    return TextDataset(place, "train", 32), TextDataset(place, "validation", 32)
