"""A kind of text file and a format of chats, each added to a copy of the one module that docs/architecture.md names."""

import json

import numpy as np
from changed_copy import load_changed
from conftest import REPOSITORY

from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.data.chat import conversations
from gpt2small_hf.data.corpus import prepare
from gpt2small_hf.data.tokenizer import load_tokenizer

SOURCES, FORMATS = "gpt2small_hf/data/corpus/sources.py", "gpt2small_hf/data/chat/formats.py"
CSV = {
    '    ".safetensors": read_tokens,\n': '    ".safetensors": read_tokens,\n    ".csv": read_csv,\n',
    "\nFILE_READERS:": """
def read_csv(meter, *, path, args, tokenizer):
    import csv

    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield Document(len(row[args.text_column].encode()), iter([row[args.text_column]]))


FILE_READERS:""",
}
QUESTIONS = {
    "\nCHAT_FORMATS = {\n": """
def _from_question(row, where):
    columns = (("user", "question"), ("assistant", "answer"))
    return [{"role": role, "content": read_text(row[column], where, column)} for role, column in columns]


CHAT_FORMATS = {
    "questions": ChatFormat("question, answer", lambda row: {"question", "answer"} <= row.keys(), _from_question),
""",
}


def test_kind_of_text_file_is_added_in_one_file(tmp_path, monkeypatch):
    copy = load_changed(SOURCES, CSV, tmp_path, monkeypatch)
    monkeypatch.setattr(prepare, "open_sources", copy.open_sources)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.csv").write_text('n,body\n1,"one, two"\n2,three\n')
    args = PrepareArguments(text=[str(tmp_path / "texts")], text_column="body", vocab_size=257, validation_fraction=0)
    folder = prepare.prepare(args, tmp_path / "set")
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    ids = np.fromfile(folder / "train-00000.bin", "<u2").tolist()
    assert tokenizer.decode(ids) == "one, two<|endoftext|>three<|endoftext|>"


def test_chat_format_is_added_in_one_file(tmp_path, monkeypatch):
    copy = load_changed(FORMATS, QUESTIONS, tmp_path, monkeypatch)
    for name in ("CHAT_FORMATS", "detect_format"):
        monkeypatch.setattr(conversations, name, getattr(copy, name))
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"question": "Why?", "answer": "Because."}))
    read = conversations.read_conversations([str(file)], None, validation_fraction=0)["train"]
    roles = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    assert [chat.messages for chat in read.chats] == [roles]
    assert read.sources[0]["shape"] == "questions (question, answer)"


def test_architecture_guide_names_the_files_of_additions():
    guide = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    (line,) = [line for line in guide.split("\n- ") if line.startswith("**A kind of text file**")]
    for name in (SOURCES, FORMATS):
        assert f"`{name.removeprefix('gpt2small_hf/')}`" in line
