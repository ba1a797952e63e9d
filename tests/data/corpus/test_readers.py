"""How `data/corpus/readers.py` and `data/corpus/sources.py` read each kind of source, and what they say of bad ones."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.data.corpus import readers as documents
from gpt2small_hf.data.corpus.readers import Meter, read_txt
from gpt2small_hf.data.corpus.sources import find_files, open_dataset, open_files, open_python_docs
from gpt2small_hf.errors import UsageError


def read(
    *patterns: Path | str, errors: Literal["strict", "replace"] = "strict", column: str = "text", tokenizer=None
) -> list:
    """Every document of the files: a string, or a list of ids."""
    args = PrepareArguments(text_column=column, errors=errors, num_workers=2)
    sources = open_files([str(pattern) for pattern in patterns], args, tokenizer)
    return [content(document) for source in sources for document in source.documents()]


def content(document: documents.Document) -> str | list[int]:
    blocks = list(document.blocks)
    return "".join(map(str, blocks)) if isinstance(blocks[0], str) else np.concatenate(blocks).tolist()


def fails(message: str):
    return pytest.raises(UsageError, match=message)


# ---- text -------------------------------------------------------------------------------------------------------


def test_text_file_is_one_document_with_its_newlines_untouched(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n\n")
    assert read(tmp_path / "a.txt") == ["one\r\ntwo\rthree\n\n"]


def test_byte_order_mark_is_dropped_and_only_at_the_start(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\ufefftwo".encode())
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"text": "one"}\n'.encode())
    assert read(tmp_path / "a.txt", tmp_path / "a.jsonl") == ["one\ufefftwo", "one"]


@given(text=st.text(), block=st.integers(1, 9))
def test_blocks_of_any_size_join_to_the_text(tmp_path_factory: pytest.TempPathFactory, text: str, block: int):
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(b"." + text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "BLOCK_BYTES", block)
        assert [content(document) for document in read_txt(Meter(), path=path, args=PrepareArguments())] == ["." + text]


def test_picture_is_not_text_in_another_encoding(tmp_path: Path):
    path = tmp_path / "chart.txt"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    with fails(r"chart\.txt is not a text file: byte 8 is zero"):
        read(path)
    path.write_bytes("text".encode("utf-16"))
    with fails(r"chart\.txt is not UTF-8"):
        read(path)


@pytest.mark.parametrize("size", [5, 1 << 20])
def test_undecodable_bytes_are_named_by_file_and_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int):
    monkeypatch.setattr(documents, "BLOCK_BYTES", size)
    path = tmp_path / "latin.txt"
    path.write_bytes("éé naïf".encode() + b" caf\xe9 ")
    with fails(r"latin\.txt is not UTF-8: byte 14 cannot be decoded.*--errors replace"):
        read(path)
    assert read(path, errors="replace") == ["éé naïf caf\ufffd "]
    path.write_bytes(b"cut off \xe2\x82")
    with fails(r"byte 8 cannot"):
        read(path)


def test_unknown_suffix_is_plain_text_and_a_folder_is_its_known_ones(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.md").write_text("markdown")
    (tmp_path / "deep" / "a.txt").write_text("deep text")
    (tmp_path / "c.jsonl").write_text('{"text": "row"}\n')
    assert read(tmp_path / "b.md") == ["markdown"]
    assert read(tmp_path) == ["row", "deep text"]
    assert read(tmp_path / "**" / "*.txt") == ["deep text"]


def test_missing_and_empty_files_are_named(tmp_path: Path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    with fails(r"nowhere\.txt does not exist"):
        find_files([str(tmp_path / "nowhere.txt")])
    with fails(r"\*\.txt matches no file"):
        find_files([str(tmp_path / "folder" / "*.txt")])
    with fails(r"no \.txt, \.jsonl or \.parquet file in the folder"):
        find_files([str(tmp_path / "folder")])
    with fails(r"empty\.txt is empty"):
        find_files([str(tmp_path / "empty.txt")])


# ---- rows -------------------------------------------------------------------------------------------------------


def test_each_line_of_jsonl_is_a_document_and_blank_lines_are_none(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "one\\ntwo"}\n\n{"n": 1, "text": "é"}')
    assert read(tmp_path / "a.jsonl") == ["one\ntwo", "é"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x", "n": 1}', r"line 2 has no field 'text': its keys are 'body', 'n'.*--text_column"),
        ('["x"]', r"line 2 has no field 'text': it is a list"),
        ("{not json}", r"line 2 is not JSON"),
        ('{"text": 5}', r"line 2: the text is of type int, not a string"),
        ('{"text": null}', r"line 2: the text is null"),
        (r'{"text": "\ud83d"}', r"line 2: character 0 is half of a surrogate pair.*--errors replace"),
    ],
)
def test_bad_line_of_jsonl_is_named_by_number(tmp_path: Path, line: str, message: str):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with fails(message):
        read(tmp_path / "a.jsonl")


def test_bytes_and_half_characters_in_rows_can_be_replaced(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "\\ud83d!"}\n')
    with fails(r"a\.jsonl is not UTF-8: byte 13 "):
        read(tmp_path / "a.jsonl")
    assert read(tmp_path / "a.jsonl", errors="replace") == ["caf\ufffd", "\ufffd!"]


def test_each_row_of_parquet_is_a_document(tmp_path: Path):
    path = tmp_path / "a.parquet"
    texts = [f"row {n}" for n in range(1000)]
    pq.write_table(pa.table({"body": texts, "n": list(range(1000))}), path)
    assert read(path, column="body") == texts
    with fails(r"a\.parquet has no column 'text'; its columns are 'body', 'n'\. Set --text_column"):
        read(path)
    with fails(r"a\.parquet, row 1: the text is of type int"):
        read(path, column="n")
    path.write_text("no parquet")
    with fails(r"a\.parquet is not a Parquet file"):
        read(path)


def test_dataset_rows_are_the_same_with_and_without_streaming(tmp_path: Path):
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path / "cache")
    texts = [f"row {n}" for n in range(1000)]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = PrepareArguments(dataset=str(tmp_path / "set"))
    for streaming in (False, True):
        source = open_dataset(replace(given, streaming=streaming))
        assert [content(document) for document in source.documents()] == texts
        assert [content(document) for document in source.documents()] == texts
    with fails(r"split 'absent'\) cannot be loaded.*--dataset_split"):
        open_dataset(replace(given, dataset_split="absent"))
    with fails(r"has no column 'body'; its columns are 'text'"):
        list(open_dataset(replace(given, text_column="body")).documents())


def test_unreachable_hub_error_names_the_alternatives():
    with fails(
        r"^the Hub could not be reached for --dataset nobody/nothing [^\n]*--text FILES[^\n]*no source flag"
    ) as raised:
        open_dataset(PrepareArguments(dataset="nobody/nothing", streaming=True))
    assert "\n" not in str(raised.value)


def test_python_documentation_is_a_document_a_topic():
    source = open_python_docs()
    topics = [content(document) for document in source.documents()]
    assert len(topics) > 70
    assert str(topics[0]).startswith('The "assert" statement')
    assert source.meter.done == source.meter.size == source.origin.bytes


# ---- ids made before --------------------------------------------------------------------------------------------


@given(
    ids=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    dtype=st.sampled_from([torch.uint16, torch.int32, torch.int64]),
    block=st.integers(1, 9),
)
def test_ids_are_cut_into_documents_at_the_end_of_text(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_tokenizer: PreTrainedTokenizerFast,
    ids: list[int],
    dtype: torch.dtype,
    block: int,
):
    path = tmp_path_factory.getbasetemp() / "ids.safetensors"
    save_file({"tokens": torch.tensor(ids).to(dtype)}, path)
    eos_id = tiny_tokenizer.eos_token_id
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "BLOCK_TOKENS", block)
        source = open_files([str(path)], PrepareArguments(), tiny_tokenizer)[0]
        found, sizes = [], []
        for document in source.documents():
            sizes.append(document.size)
            found.append([int(token) for part in document.blocks for token in part])
    assert sizes == [len(document) for document in found]
    joined = [token for document in found for token in [*document, eos_id]]
    assert joined == ids + [eos_id] * (ids[-1] != eos_id)


def test_file_of_ids_that_does_not_fit_is_refused(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast):
    path = tmp_path / "ids.safetensors"
    save_file({"tokens": torch.tensor([1, 999])}, path)
    with fails(r"contains token ids: name the tokenizer that made them with --tokenizer"):
        read(path)
    with fails(r"ids from 1 to 999, the tokenizer 300 entries"):
        read(path, tokenizer=tiny_tokenizer)
    save_file({"weights": torch.tensor([1.0])}, path)
    with fails(r"needs one flat integer tensor named 'tokens'; its tensors are 'weights'"):
        read(path, tokenizer=tiny_tokenizer)
    path.write_text("no safetensors at all")
    with fails(r"is not a safetensors file"):
        read(path, tokenizer=tiny_tokenizer)
