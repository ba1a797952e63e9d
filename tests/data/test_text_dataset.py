"""Rows that `data/text_dataset.py` serves from a prepared folder."""

import json
import pickle
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import processes, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.config.data import PACKINGS, PrepareArguments
from gpt2small_hf.data import text_dataset as dataset
from gpt2small_hf.data.corpus import shards
from gpt2small_hf.data.corpus.metadata import read_meta
from gpt2small_hf.data.corpus.prepare import prepare
from gpt2small_hf.data.packing import pack_cropped
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.layout import DataFolder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of several small shards."""
    place = tmp_path_factory.mktemp("prepared")
    (place / "text.txt").write_text("Every effort moves you forward, one word after another.\n" * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_TOKENS", 100)
        return prepare(PrepareArguments(text=[str(place / "text.txt")], vocab_size=300), place / "set")


@pytest.fixture(scope="module")
def articles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty different documents, of a few to a few hundred tokens, in several small shards."""
    place = tmp_path_factory.mktemp("articles")
    texts = [f"{n} " + f"and {n} again, " * (n * n % 41) for n in range(80)]
    (place / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_TOKENS", 1000)
        return prepare(PrepareArguments(text=[str(place / "text.jsonl")], vocab_size=300), place / "set")


def stream(folder: Path, split: str) -> list[int]:
    files = read_meta(folder).splits[split].files
    return [token for name in files for token in np.fromfile(folder / name, "<u2").tolist()]


def eos_of(folder: Path) -> int:
    return read_meta(folder).tokenizer.eos_token_id


def documents_of(folder: Path) -> list[list[int]]:
    """The train documents, each after an end-of-text token and without its own."""
    starts = np.fromfile(DataFolder(folder).documents("train"), "<u8").tolist()
    tokens = stream(folder, "train")
    return [[eos_of(folder), *tokens[start : end - 1]] for start, end in pairwise(starts)]


def served(rows: TextDataset) -> list[list[int]]:
    return [rows[row]["input_ids"].tolist() for row in range(len(rows))]


@pytest.mark.parametrize("seq_len", [1, 7, 64, 100, 333])
def test_rows_are_the_stream_cut_up_wherever_its_files_end(folder: Path, seq_len: int):
    rows = TextDataset(folder, "train", seq_len)
    tokens = stream(folder, "train")
    assert len(read_meta(folder).splits["train"].files) > 3
    assert len(rows) == len(tokens) // seq_len
    served = [rows[row]["input_ids"] for row in range(len(rows))]
    assert all(ids.dtype == np.int64 and ids.shape == (seq_len,) for ids in served)
    assert np.concatenate(served).tolist() == tokens[: len(rows) * seq_len]
    assert rows[-1]["input_ids"].tolist() == served[-1].tolist()


def test_there_is_no_row_after_the_last(folder: Path):
    rows = TextDataset(folder, "train", 50)
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_labels_are_the_inputs_unshifted(folder: Path):
    rows = TextDataset(folder, "train", 16)
    batch = rows.collate([rows[0], rows[1]])
    assert batch["input_ids"].shape == (2, 16)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()


@pytest.mark.slow
def test_worker_processes_serve_the_same_rows(folder: Path):
    rows = TextDataset(folder, "train", 64)
    loader = DataLoader(rows, batch_size=2, collate_fn=rows.collate, num_workers=1, multiprocessing_context=processes)
    assert torch.equal(
        torch.cat([batch["input_ids"] for batch in loader]),
        torch.from_numpy(np.stack([rows[row]["input_ids"] for row in range(len(rows))])),
    )


def test_pickled_dataset_holds_paths_and_not_tokens(folder: Path):
    rows = TextDataset(folder, "train", 64)
    assert len(pickle.dumps(rows)) < 2000
    assert pickle.loads(pickle.dumps(rows))[1]["input_ids"].tolist() == rows[1]["input_ids"].tolist()


def test_rows_can_be_limited_to_the_first_ones(folder: Path):
    assert len(TextDataset(folder, "train", 16, max_rows=3)) == 3
    assert len(TextDataset(folder, "train", 64, max_rows=10_000)) == len(TextDataset(folder, "train", 64))


def test_text_shorter_than_one_row_is_refused_with_both_numbers(folder: Path):
    n_tokens = len(stream(folder, "validation"))
    with pytest.raises(
        UsageError, match=rf"validation split .* has {n_tokens:,} tokens, less than one row of 4,096.*Lower"
    ):
        TextDataset(folder, "validation", 4096)


def test_incomplete_prepared_folder_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(UsageError, match=r"does not exist\. Make one: gpt2small prepare"):
        read_meta(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"is not a prepared set \(it has no meta\.json\)"):
        read_meta(tmp_path)
    DataFolder(tmp_path / "half").unfinished().root.mkdir()
    with pytest.raises(UsageError, match=r"half is not finished: .* Run the same command again to finish it"):
        TextDataset(tmp_path / "half", "train", 8)
    with pytest.raises(UsageError, match=r"has no test split \(it has train, validation\)"):
        TextDataset(folder, "test", 8)


def test_truncated_token_files_are_refused(folder: Path, tmp_path: Path):
    for path in folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    last = tmp_path / read_meta(folder).splits["train"].files[-1]
    last.write_bytes(last.read_bytes()[:-2])
    with pytest.raises(UsageError, match=r"train files of .* have .* meta\.json records .* damaged or copied in part"):
        TextDataset(tmp_path, "train", 8)


# ---- packing ----------------------------------------------------------------------------------------------------


def test_unknown_packing_is_refused_with_those_there_are(folder: Path):
    with pytest.raises(
        UsageError,
        match=r"packing is 'bestfit', which is unknown\. Set --packing to one of stream, bos_bestfit, isolate",
    ):
        TextDataset(folder, "train", 8, packing="bestfit")


@pytest.mark.parametrize("packing", PACKINGS)
def test_whatever_the_packing_tokens_are_those_of_the_stream(articles: Path, packing: str):
    rows = TextDataset(articles, "train", 64, packing=packing)
    assert rows.tokens(0, rows.n_tokens).tolist() == stream(articles, "train")
    assert rows.tokens(990, 1010).tolist() == stream(articles, "train")[990:1010]


@pytest.mark.parametrize("packing", PACKINGS)
def test_cropped_share_is_that_of_tokens_in_no_row(articles: Path, packing: str):
    rows = TextDataset(articles, "train", 64, packing=packing)
    in_rows = sum(map(len, served(rows)))
    assert rows.cropped_share == 1 - in_rows / len(stream(articles, "train"))
    assert TextDataset(articles, "train", 64, packing=packing, max_rows=2).cropped_share == rows.cropped_share


@pytest.mark.slow
@given(seq_len=st.integers(1, 400))
def test_best_fit_rows_begin_with_a_document_and_hold_documents_from_their_beginnings(articles: Path, seq_len: int):
    rows = served(TextDataset(articles, "train", seq_len, packing="bos_bestfit"))
    documents, eos_id = documents_of(articles), eos_of(articles)
    whole = []
    for row in rows:
        assert len(row) == seq_len
        assert row[0] == eos_id
        begins = [place for place, token in enumerate(row) if token == eos_id]
        *before, last = [row[start:end] for start, end in pairwise([*begins, seq_len])]
        whole += before
        assert any(document[: len(last)] == last for document in documents)
    assert all(document in documents for document in whole)
    assert len(whole) == len({tuple(document) for document in whole})


@pytest.mark.parametrize("seq_len", [16, 64, 300])
def test_best_fit_rows_are_the_documents_that_were_chosen(articles: Path, seq_len: int):
    documents = documents_of(articles)
    index = pack_cropped(np.array([len(document) for document in documents]), seq_len)
    rows = TextDataset(articles, "train", seq_len, packing="bos_bestfit")
    assert len(rows) == index[0] - 1
    assert rows[0]["input_ids"].dtype == np.int64
    for row, tokens in enumerate(served(rows)):
        chosen = index[index[row] : index[row + 1]]
        assert tokens == [token for n in chosen for token in documents[n]][:seq_len]


def test_first_document_of_the_split_gets_an_end_of_text_before_it_too(articles: Path):
    first = documents_of(articles)[0]
    n_tokens = read_meta(articles).splits["train"].tokens
    row = TextDataset(articles, "train", n_tokens, packing="bos_bestfit")[0]["input_ids"].tolist()  # all of them
    assert sorted(row) == sorted(stream(articles, "train"))
    row.append(eos_of(articles))
    assert any(row[at : at + len(first) + 1] == [*first, eos_of(articles)] for at in range(len(row)))
    assert first[1:] == stream(articles, "train")[: len(first) - 1]


@pytest.mark.parametrize("packing", ["bos_bestfit", "isolate"])
def test_worker_processes_serve_the_same_packed_rows(articles: Path, packing: str):
    rows = TextDataset(articles, "train", 64, packing=packing)
    loader = DataLoader(rows, batch_size=2, collate_fn=rows.collate, num_workers=2, multiprocessing_context=processes)
    batches = list(loader)
    assert torch.cat([batch["input_ids"] for batch in batches]).tolist() == served(rows)
    assert all(("position_ids" in batch) == (packing == "isolate") for batch in batches)


# ---- documents that do not see each other -----------------------------------------------------------------------


def test_isolated_rows_are_those_of_the_stream_with_positions(articles: Path):
    plain, isolated = (TextDataset(articles, "train", 32, packing=packing) for packing in ("stream", "isolate"))
    assert served(isolated) == served(plain)
    batch = isolated.collate([isolated[0], isolated[5]])
    assert set(batch) == {"input_ids", "position_ids", "labels"}
    assert batch["position_ids"].shape == (2, 32)
    assert batch["position_ids"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"])  # none is masked
    assert (batch["position_ids"][batch["input_ids"] == eos_of(articles)] == 0).all()


@pytest.fixture
def model(articles: Path) -> GPT2SmallForCausalLM:
    """A seeded model of the vocabulary of `articles`."""
    torch.manual_seed(0)
    return GPT2SmallForCausalLM(tiny_config(vocab_size=read_meta(articles).tokenizer.vocab_size)).eval()


def a_row_of_several_documents(articles: Path) -> dict[str, torch.Tensor]:
    """One that begins inside a document and has at least two ends of text."""
    rows = TextDataset(articles, "train", 32, packing="isolate")
    several = (row for row in rows if (row["position_ids"][1:] == 0).sum() >= 2)
    batch = rows.collate([next(row for row in several if row["input_ids"][0] != eos_of(articles))])
    return {name: batch[name] for name in ("input_ids", "position_ids")}


def test_model_gives_an_isolated_row_the_logits_of_each_document_alone(articles: Path, model: GPT2SmallForCausalLM):
    row = a_row_of_several_documents(articles)
    begins = [0, *(row["position_ids"][0, 1:] == 0).nonzero().flatten().add(1).tolist(), 32]
    logits = model(**row).logits[0]
    for start, end in pairwise(begins):
        alone = model(input_ids=row["input_ids"][:, start:end]).logits[0]
        torch.testing.assert_close(logits[start:end], alone, atol=1e-5, rtol=0)
    together = model(input_ids=row["input_ids"]).logits[0]
    assert (together - logits)[begins[1] :].abs().max() > 1e-3


def test_change_in_one_document_leaves_the_logits_of_the_others(articles: Path, model: GPT2SmallForCausalLM):
    row = a_row_of_several_documents(articles)
    start, end = (row["position_ids"][0, 1:] == 0).nonzero().flatten().add(1)[:2].tolist()
    changed = row | {"input_ids": row["input_ids"].clone()}
    changed["input_ids"][0, start + 1] ^= 1
    difference = (model(**row).logits - model(**changed).logits)[0].abs().amax(-1)
    assert difference[start + 1 : end].min() > 0
    assert (difference[: start + 1] == 0).all()
    assert (difference[end:] == 0).all()


# ---- the kept index ---------------------------------------------------------------------------------------------


@pytest.fixture
def copied(articles: Path, tmp_path: Path) -> Path:
    """`articles` again, without any kept index."""
    return Path(shutil.copytree(articles, tmp_path / "set", ignore=shutil.ignore_patterns("*.npy")))


def test_index_is_kept_a_length_and_found_again(copied: Path):
    rows = TextDataset(copied, "train", 64, packing="bos_bestfit")
    file = DataFolder(copied).rows("train", "bos_bestfit", 64)
    assert [*copied.glob("*.npy")] == [file]
    made = file.stat()
    again = TextDataset(copied, "train", 64, packing="bos_bestfit")
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    assert served(again) == served(rows)
    TextDataset(copied, "train", 32, packing="bos_bestfit")
    assert len([*copied.glob("*.npy")]) == 2


def test_pickled_dataset_holds_the_path_of_its_index(copied: Path):
    rows = TextDataset(copied, "train", 64, packing="bos_bestfit", max_rows=3)
    travels = pickle.dumps(rows)
    assert np.load(DataFolder(copied).rows("train", "bos_bestfit", 64))[:-1].tobytes() not in travels
    assert DataFolder(copied).documents("train").read_bytes() not in travels
    assert len(travels) < 2000
    assert served(pickle.loads(travels)) == served(rows)


def text(file: Path) -> None:
    file.write_text("not an array")


def nothing(file: Path) -> None:
    file.write_bytes(b"")


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def another_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)


def another_array(file: Path) -> None:
    np.save(file, np.zeros((3, 3)))


def of_another_length(file: Path) -> None:
    TextDataset(file.parent, "train", 32, packing="bos_bestfit")
    DataFolder(file.parent).rows("train", "bos_bestfit", 32).replace(file)


def of_other_documents(file: Path) -> None:
    documents = DataFolder(file.parent).documents("train")
    kept = documents.read_bytes()
    starts = np.fromfile(documents, "<u8")
    starts[1] += 1
    starts.tofile(documents)
    file.unlink()
    TextDataset(file.parent, "train", 64, packing="bos_bestfit")
    documents.write_bytes(kept)


def of_another_version(file: Path) -> None:
    file.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "PACK_CROPPED_VERSION", dataset.PACK_CROPPED_VERSION + 1)
        TextDataset(file.parent, "train", 64, packing="bos_bestfit")


@pytest.mark.parametrize(
    "spoil",
    [text, nothing, half, another_bit, another_array, of_another_length, of_other_documents, of_another_version],
)
def test_damaged_or_stale_index_is_made_again(copied: Path, spoil):
    right = served(TextDataset(copied, "train", 64, packing="bos_bestfit"))
    file = DataFolder(copied).rows("train", "bos_bestfit", 64)
    good = file.read_bytes()
    spoil(file)
    assert file.read_bytes() != good
    assert served(TextDataset(copied, "train", 64, packing="bos_bestfit")) == right
    assert file.read_bytes() == good


def test_where_the_index_cannot_be_written_it_stays_in_memory(copied: Path):
    resource = pytest.importorskip("resource")
    right = served(TextDataset(copied, "train", 64, packing="bos_bestfit"))
    DataFolder(copied).rows("train", "bos_bestfit", 64).unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # a file may not grow, as on a full disk
    try:
        rows = TextDataset(copied, "train", 64, packing="bos_bestfit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*copied.glob("*.npy*")] == [*copied.glob(".*")] == []
    assert served(rows) == right
    assert served(pickle.loads(pickle.dumps(rows))) == right


@pytest.mark.parametrize("damage", [half, nothing, Path.unlink, another_bit])
def test_list_of_documents_that_does_not_fit_is_refused(copied: Path, damage):
    if damage is another_bit:  # the last document would begin far behind the end
        starts = np.fromfile(DataFolder(copied).documents("train"), "<u8")
        starts[-2] += 1 << 40
        starts.tofile(DataFolder(copied).documents("train"))
    else:
        damage(DataFolder(copied).documents("train"))
    with pytest.raises(
        UsageError, match=r"train-documents\.bin is not a valid list of the starts of .* documents\. .*damaged"
    ):
        TextDataset(copied, "train", 64, packing="bos_bestfit")
    assert len(TextDataset(copied, "train", 64)) > 0  # which does not need it


def test_from_files_prepares_text_once_and_opens_it(tmp_path: Path):
    (tmp_path / "text.txt").write_text("Every effort moves you forward, one word after another.\n" * 40)
    options = {"seq_len": 16, "validation_fraction": 0.2, "output_dir": tmp_path / "set"}
    rows = TextDataset.from_files(tmp_path / "text.txt", **options)
    assert rows[0]["input_ids"].shape == (16,)
    written = (tmp_path / "set" / "meta.json").stat().st_mtime_ns
    heldout = TextDataset.from_files([str(tmp_path / "text.txt")], split="validation", **options)
    assert (tmp_path / "set" / "meta.json").stat().st_mtime_ns == written
    tokenizer = AutoTokenizer.from_pretrained(heldout.tokenizer_dir)
    assert "Every effort" in tokenizer.decode(heldout.tokens(0, heldout.n_tokens))
