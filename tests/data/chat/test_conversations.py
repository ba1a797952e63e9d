"""How `data/chat/conversations.py` reads chats of every shape, holds some out, and what it says of bad ones."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SHARED_DATA, needs_shared_data
from hypothesis import given
from hypothesis import strategies as st

from gpt2small_hf.data.chat.conversations import Conversations, read_conversations, read_places
from gpt2small_hf.data.chat.files import find_places
from gpt2small_hf.data.chat.formats import Message
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import sha256

OTHER = {"messages": [{"role": "user", "content": "Held"}, {"role": "assistant", "content": "out"}]}


@pytest.fixture
def other(tmp_path: Path) -> str:
    """A file to measure on."""
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps(OTHER), encoding="utf-8")
    return str(path)


def save(path: Path, rows: list[Any]) -> Path:
    """Write rows as the suffix says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(*names: Path | str, validation: list[str] | None = None, fraction: float = 0.5, **options: bool):
    return read_conversations([str(name) for name in names], validation, validation_fraction=fraction, **options)


def messages(found: Conversations) -> list[list[Message]]:
    return [chat.messages for chat in found.chats]


def turns(*contents: str, system: str | None = None) -> list[Message]:
    """User and assistant in turn."""
    chat = [{"role": "system", "content": system}] if system is not None else []
    return chat + [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(contents)]


@contextmanager
def refused(message: str) -> Iterator[None]:
    """One clear line."""
    with pytest.raises(UsageError, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)


# ---- shapes -----------------------------------------------------------------------------------------------------


def llama2(*pairs: tuple[str, str]) -> str:
    return "".join(f"<s>[INST] {question} [/INST] {answer} </s>" for question, answer in pairs)


CHAT_FORMATS = {
    "messages": (
        "messages (role, content)",
        [
            {"id": 1, "messages": turns("q", "a", "\r\n\x00 ", "", system="be")},
            {"id": 2, "messages": turns("é\u2028🙂", "<|im_end|>", "unanswered")},
        ],
        [turns("q", "a", "\r\n\x00 ", "", system="be"), turns("é\u2028🙂", "<|im_end|>", "unanswered")],
    ),
    "ShareGPT": (
        "ShareGPT (conversations: from, value)",
        [
            {
                "conversations": [
                    {"from": "system", "value": "be"},
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            {"conversations": [{"from": "user", "value": "q"}, {"from": "chatgpt", "value": "a"}]},
            {"conversations": [{"from": "human", "value": "q"}, {"from": "assistant", "value": "a"}]},
        ],
        [turns("q", "a", system="be"), turns("q", "a"), turns("q", "a")],
    ),
    "ShareGPT with roles": (
        "ShareGPT (conversations: from, value)",
        [{"conversations": turns("q", "a", system="be")}],
        [turns("q", "a", system="be")],
    ),
    "Alpaca": (
        "Alpaca (instruction, input, output)",
        [
            {"instruction": "Add.", "input": "1, 2", "output": "3"},
            {"instruction": "Add.", "input": "", "output": "?"},
            {"instruction": "Add.", "input": None, "output": "?"},
        ],
        [
            [{"role": "user", "content": "Add.", "input": "1, 2"}, {"role": "assistant", "content": "3"}],
            turns("Add.", "?"),
            turns("Add.", "?"),
        ],
    ),
    "Alpaca without input": (
        "Alpaca (instruction, input, output)",
        [{"instruction": "Add.", "output": "?", "text": "<s>ignored"}],
        [turns("Add.", "?")],
    ),
    "prompt and completion": (
        "prompt and completion (prompt, completion)",
        [{"prompt": "q\n", "completion": " a"}],
        [turns("q\n", " a")],
    ),
    "prompt and completion as messages": (
        "prompt and completion (prompt, completion)",
        [{"prompt": turns("q", "a", "r", system="be"), "completion": [{"role": "assistant", "content": "b"}]}],
        [turns("q", "a", "r", "b", system="be")],
    ),
    "rendered Llama-2": (
        "rendered Llama-2 (text: <s>[INST] … [/INST] … </s>)",
        [
            {"text": llama2(("q", "a"))},
            {"text": llama2(("<<SYS>>\nbe\n<</SYS>>\n\nq\nr", "a\nb"), ("s", "t"), ("[ok]", "<b>")) + "\n"},
            {"text": "<s> [INST]q[/INST]a</s>\n<s> [INST]r[/INST]"},
            {"text": "<s>[INST] q [/INST] cut off"},
            {"text": "<s>[INST] q [/INST]</s>"},
            {"text": "<s>[INST] \nq\n [/INST] \na\n </s>"},
        ],
        [
            turns("q", "a"),
            turns("q\nr", "a\nb", "s", "t", "[ok]", "<b>", system="be"),
            turns("q", "a", "r"),
            turns("q", "cut off"),
            turns("q", ""),
            turns("\nq\n", "\na\n"),
        ],
    ),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("name", CHAT_FORMATS)
def test_every_shape_is_recognised_and_named(tmp_path: Path, other: str, name: str, suffix: str):
    shape, rows, chats = CHAT_FORMATS[name]
    path = save(tmp_path / f"rows{suffix}", rows)
    found = read(path, validation=[other])
    assert messages(found["train"]) == chats
    assert messages(found["validation"]) == [OTHER["messages"]]
    (source,) = found["train"].sources
    assert source == {
        "name": str(path),
        "shape": shape,
        "conversations": len(rows),
        "unreadable": 0,
        "sha256": sha256(path),
    }
    assert found["validation"].sources[0]["name"] == other


def test_where_a_conversation_stands_is_kept(tmp_path: Path, other: str):
    rows = [OTHER, OTHER]
    for suffix, where in ((".jsonl", "line 2"), (".json", "item 1"), (".parquet", "row 2")):
        path = save(tmp_path / f"rows{suffix}", rows)
        assert read(path, validation=[other])["train"].chats[1].where == f"{path}, {where}"
    (tmp_path / "rows.jsonl").write_text(f"\n{json.dumps(OTHER)}\n\n{json.dumps(OTHER)}")
    assert [chat.where[-6:] for chat in read(tmp_path / "rows.jsonl", validation=[other])["train"].chats] == [
        "line 2",
        "line 4",
    ]


def test_file_of_several_shapes_names_each(tmp_path: Path, other: str):
    path = save(tmp_path / "rows.jsonl", [OTHER, {"prompt": "q", "completion": "a"}, OTHER])
    (source,) = read(path, validation=[other])["train"].sources
    assert source["shape"] == "messages (role, content) and prompt and completion (prompt, completion)"


def test_byte_order_mark_and_the_newlines_of_windows_are_no_part_of_a_row(tmp_path: Path, other: str):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(OTHER).encode() + b"\r\n" + json.dumps(OTHER).encode() + b"\r\n")
    assert messages(read(path, validation=[other])["train"]) == [OTHER["messages"]] * 2
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps([OTHER]).encode())
    assert messages(read(path, validation=[other])["train"]) == [OTHER["messages"]]


@given(contents=st.lists(st.text(), min_size=2, max_size=6), system=st.none() | st.text())
def test_any_text_is_read_as_it_is(tmp_path_factory: pytest.TempPathFactory, contents: list[str], system: str | None):
    chat = turns(*contents, system=system)
    for suffix in (".jsonl", ".json", ".parquet"):
        path = save(tmp_path_factory.getbasetemp() / f"any{suffix}", [{"messages": chat}])
        assert messages(read(path, validation=[str(path)])["train"]) == [chat]


# ---- slices, folders, held out ----------------------------------------------------------------------------------


def numbered(n: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"messages": turns(str(number), "a")} for number in range(start, start + n)]


def numbers(found: Conversations) -> list[int]:
    return [int(chat.messages[0]["content"]) for chat in found.chats]


def test_slices_take_rows_as_pythons_do(tmp_path: Path):
    path = save(tmp_path / "rows.jsonl", numbered(11))
    found = read(f"{path}[:7]", f"{path}[-2:]", validation=[f"{path}[7:9]"])
    assert numbers(found["train"]) == [*range(7), 9, 10]
    assert numbers(found["validation"]) == [7, 8]
    assert [source["name"] for source in found["train"].sources] == [f"{path}[:7]", f"{path}[-2:]"]
    assert [source["conversations"] for source in found["train"].sources] == [7, 2]
    assert found["validation"].sources[0]["name"] == f"{path}[7:9]"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_folders_train_and_validation_files_are_used_as_such(tmp_path: Path, suffix: str):
    save(tmp_path / f"train-00000{suffix}", numbered(3))
    save(tmp_path / f"train-00001{suffix}", numbered(3, 10))
    save(tmp_path / f"Validation{suffix}", numbered(2, 20))
    save(tmp_path / f"test{suffix}", numbered(2, 30))
    (tmp_path / "README.md").write_text("not a file of chats")
    found = read(tmp_path)
    assert numbers(found["train"]) == [0, 1, 2, 10, 11, 12]
    assert numbers(found["validation"]) == [20, 21]
    assert numbers(read(f"{tmp_path}[:2]")["train"]) == [0, 1, 10, 11]
    # Named to measure on, it is what it says it is.
    other = save(tmp_path.parent / f"{tmp_path.name}{suffix}", numbered(1, 40))
    found = read(other, validation=[str(tmp_path)])
    assert (numbers(found["train"]), numbers(found["validation"])) == ([40], [20, 21])


def test_folder_without_such_names_is_all_its_files(tmp_path: Path):
    save(tmp_path / "b.jsonl", numbered(3, 10))
    save(tmp_path / "a.json", numbered(3))
    found = read(tmp_path, fraction=0.5)
    assert sorted(numbers(found["train"]) + numbers(found["validation"])) == [0, 1, 2, 10, 11, 12]
    assert len(found["train"].sources) == 2
    assert found["validation"].sources == []


@given(n=st.integers(2, 30), copies=st.integers(1, 3), fraction=st.floats(0.01, 0.99))
def test_copies_of_a_conversation_are_in_the_same_split(
    tmp_path_factory: pytest.TempPathFactory, n: int, copies: int, fraction: float
):
    path = save(tmp_path_factory.getbasetemp() / "twice.jsonl", numbered(n) * copies)
    found = read(path, fraction=fraction)
    train, validation = numbers(found["train"]), numbers(found["validation"])
    assert sorted(train + validation) == sorted([*range(n)] * copies)
    assert not set(train) & set(validation)
    assert len(set(validation)) == min(max(round(fraction * n), 1), n - 1)
    assert train == [number for number in [*range(n)] * copies if number in train]
    # The same are held out, however the file is ordered.
    save(path, numbered(n)[::-1])
    assert set(numbers(read(path, fraction=fraction)["validation"])) == set(validation)


def test_fraction_zero_holds_out_none_and_one_chat_is_refused(tmp_path: Path):
    path = save(tmp_path / "rows.jsonl", numbered(5))
    found = read(path, fraction=0)
    assert list(found) == ["train"]
    assert len(found["train"].chats) == 5
    save(path, numbered(1) * 3)
    with refused(r"no validation split can be made: all conversations are the same.* --validation_fraction 0"):
        read(path)


# ---- bad files --------------------------------------------------------------------------------------------------


def test_file_that_cannot_be_read_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    good = json.dumps(OTHER).encode()
    contents = {
        "half.jsonl": (good + b"\n" + good[:20], r"^half\.jsonl, line 2 is not JSON .*Correct or remove the line"),
        "cut.json": (b"[" + good + b",\n" + good[:20], r"^cut\.json, line 2 is not JSON .*Correct the file"),
        "lines.json": (
            good + b"\n" + good,
            r"lines\.json, line 2 is not JSON \(Extra data\).*one row a line is \.jsonl",
        ),
        "object.json": (good, r"object\.json holds a dict, not a list of rows"),
        "none.json": (b"[]", r"^none\.json has no rows\. Name other rows or another file"),
        "blank.jsonl": (b"\n \n", r"^blank\.jsonl has no rows"),
        "empty.jsonl": (b"", r"^empty\.jsonl is empty\. Leave it out"),
        "empty.parquet": (b"", r"^empty\.parquet is empty"),
        "latin.jsonl": ('{"messages": "é'.encode("latin-1"), r"^latin\.jsonl is not UTF-8: byte 14 cannot"),
        "wide.json": ("[]".encode("utf-16"), r"^wide\.json is not UTF-8: byte 0 cannot"),
        "text.parquet": (good, r"^text\.parquet is not a Parquet file .*Create it again"),
        "notes.txt": (b"some text", r"^notes\.txt is not \.jsonl, \.json or \.parquet.*--text"),
    }
    for name, (content, message) in contents.items():
        (tmp_path / name).write_bytes(content)
        with refused(message):
            read(name)


@pytest.mark.parametrize("broken", ["cut", "footer", "middle"])
def test_broken_parquet_file_is_named_in_one_line(tmp_path: Path, broken: str):
    path = save(tmp_path / "rows.parquet", numbered(50))
    data = path.read_bytes()
    if broken == "cut":
        data = data[: len(data) // 2]
    elif broken == "footer":
        data = data[:-100] + b"\xff" * 92 + data[-8:]
    else:
        data = data[:4] + b"\xff" * 200 + data[204:]
    path.write_bytes(data)
    with refused(r"rows\.parquet is not a Parquet file \(.*\)\. Create it again"):
        read(path)


def test_missing_files_raise_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("nowhere.jsonl", "no/where.json", "just words", "a/b/c", "nowhere.jsonl[:5]"):
        with refused(
            rf"^{re.escape(name.partition('[')[0])} does not exist.*the working folder is {re.escape(str(tmp_path))}"
        ):
            read(name)
    with refused(r"^no \.jsonl, \.json or \.parquet file in the folder folder"):
        read("folder")
    save(tmp_path / "folder" / "validation.jsonl", numbered(3))
    with refused(r"^folder: only files named validation were found, so there is nothing to train on"):
        read("folder")
    save(tmp_path / "rows.jsonl", numbered(3))
    with refused(r"^rows\.jsonl\[3:\] has no rows"):
        read("rows.jsonl[3:]")
    with refused(r"^gone\.jsonl does not exist"):
        read("rows.jsonl", validation=["gone.jsonl"])


def test_data_set_that_the_hub_does_not_give_is_one_line():
    with refused(r"^the Hub could not be reached for nobody/nothing .*--chat_data chats\.jsonl"):
        read("nobody/nothing")


# ---- bad rows ---------------------------------------------------------------------------------------------------


USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
KNOWN = r"Known are messages \(role, content\); ShareGPT .*; Alpaca .*; prompt and completion .*; rendered Llama-2 "
BAD_ROWS = {
    "wrong columns": (
        {"question": "q", "answer": "a"},
        rf"line 2 has the fields 'question', 'answer', which .* {KNOWN}",
    ),
    "no columns": ({}, r"line 2 has the fields none, which match no known format"),
    "plain text": ({"text": "Once upon a time"}, r"line 2 has the fields 'text', which match no known format"),
    "a list": (["q", "a"], r"line 2 is a list, not an object with named fields\. Known are"),
    "a string": ("q", r"line 2 is a str, not an object"),
    "no turns": ({"messages": []}, r"line 2 has no turns\. Remove the row, or add turns"),
    "null turns": ({"messages": None}, r"line 2 has no turns"),
    "turns that are a string": ({"conversations": "q"}, r"line 2: the turns are a string, not a list"),
    "a turn that is a string": ({"messages": ["q"]}, r"line 2, turn 1 needs 'role' and 'content'; it has str"),
    "a turn without content": (
        {"messages": [{"role": "user", "text": "q"}]},
        r"line 2, turn 1 needs 'role' and 'content'; it has 'role', 'text'",
    ),
    "two user turns": ({"messages": [USER, USER]}, r"line 2, turn 2: two consecutive user turns\. Join them"),
    "two answers": ({"messages": [USER, ASSISTANT, ASSISTANT]}, r"line 2, turn 3: two consecutive assistant turns"),
    "an answer first": (
        {"messages": [ASSISTANT, USER]},
        r"line 2, turn 1 is an assistant turn without a user turn before it",
    ),
    "an answer after the system": (
        {"messages": [{"role": "system", "content": "be"}, ASSISTANT]},
        r"line 2, turn 2 is an assistant turn without a user turn before it",
    ),
    "a late system turn": (
        {"messages": [USER, {"role": "system", "content": "be"}]},
        r"line 2, turn 2 is a system turn, which can only be the first",
    ),
    "two system turns": (
        {"messages": [{"role": "system", "content": "be"}] * 2 + [USER]},
        r"line 2, turn 2 is a system turn, which can only be the first",
    ),
    "a system turn alone": ({"messages": [{"role": "system", "content": "be"}]}, r"line 2 has only a system turn"),
    "an unknown role": (
        {"messages": [USER, {"role": "critic\n", "content": "c"}]},
        r"line 2, turn 2 has the role 'critic\\n'; allowed are system, user and assistant",
    ),
    "no role": ({"messages": [{"role": None, "content": "q"}]}, r"line 2, turn 1 has the role None"),
    "an unknown speaker": (
        {"conversations": [{"from": "alice", "value": "q"}]},
        r"line 2, turn 1 has the role 'alice'",
    ),
    "a tool": (
        {"messages": [USER, {"role": "tool", "content": "4"}]},
        r"line 2, turn 2 is a tool call or result \(role tool\), which is not supported\. Remove such rows",
    ),
    "a function of ShareGPT": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "{}"}]},
        r"line 2, turn 2 is a tool call or result \(role function_call\)",
    ),
    "a call of a tool": (
        {"messages": [USER, {**ASSISTANT, "tool_calls": [{"function": {"name": "add"}}]}]},
        r"line 2, turn 2 is a tool call or result \(role assistant\)",
    ),
    "null content": (
        {"messages": [USER, {"role": "assistant", "content": None}]},
        r"line 2, turn 2: 'content' is null, not a string\. Correct or remove the row",
    ),
    "parts of content": (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "q"}]}]},
        r"line 2, turn 1: 'content' is of type list, not a string",
    ),
    "a null output": ({"instruction": "q", "input": "", "output": None}, r"line 2: 'output' is null, not a string"),
    "a number for an input": ({"instruction": "q", "input": 5, "output": ""}, r"line 2: 'input' is of type int"),
    "a null prompt": ({"prompt": None, "completion": "a"}, r"line 2: 'prompt' is null, not a string"),
    "half a pair": (
        {"messages": [{"role": "user", "content": "ab\ud83d"}]},
        r"line 2, turn 1: character 2 of 'content' is half of a surrogate pair",
    ),
    "Llama-2 without a turn": (
        {"text": "<s>[INST] q [/INST] a </s> and more"},
        r"line 2: at character 27 of the text no turn begins\. Rendered Llama-2 text is",
    ),
    "Llama-2 without an end of the question": ({"text": "<s>[INST] q"}, r"line 2: at character 0 of the text no turn"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_named_in_one_line_or_left_out_and_counted(tmp_path: Path, other: str, name: str):
    row, message = BAD_ROWS[name]
    path = save(tmp_path / "rows.jsonl", [*numbered(1), row, *numbered(1, 2), row])
    with refused(rf"{re.escape(str(path))}, {message}"):
        read(path, validation=[other])
    found = read(path, validation=[other], skip_bad_rows=True)
    assert numbers(found["train"]) == [0, 2]
    assert found["train"].sources[0]["conversations"] == 2
    assert found["train"].sources[0]["unreadable"] == 2
    assert numbers(read(f"{path}[2:3]", validation=[other])["train"]) == [2]  # what is not wanted is not judged


def test_half_a_line_is_left_out_and_counted_too(tmp_path: Path, other: str):
    path = save(tmp_path / "rows.jsonl", numbered(3))
    whole = path.read_text()
    path.write_text(whole[:-10])
    with refused(r"rows\.jsonl, line 3 is not JSON"):
        read(path, validation=[other])
    found = read(path, validation=[other], skip_bad_rows=True)
    assert numbers(found["train"]) == [0, 1]
    assert found["train"].sources[0]["unreadable"] == 1
    assert numbers(read(f"{path}[:2]", validation=[other])["train"]) == [0, 1]


@pytest.mark.parametrize(
    ("row", "message"), [("9" * 5000, "an integer has too many digits"), ("[" * 10**5, "it is nested too deeply")]
)
def test_json_beyond_pythons_limits_is_named_and_left_out(tmp_path: Path, other: str, row: str, message: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(OTHER)}\n{row}\n")
    with refused(rf"rows\.jsonl, line 2 is not JSON \({message}\)"):
        read(path, validation=[other])
    assert read(path, validation=[other], skip_bad_rows=True)["train"].sources[0]["unreadable"] == 1
    path.with_suffix(".json").write_text(f"[{row}")
    with refused(rf"rows\.json is not JSON \({message}\)"):
        read(path.with_suffix(".json"), validation=[other])


def test_nothing_but_bad_rows_is_one_line_with_the_first(tmp_path: Path, other: str):
    path = save(tmp_path / "rows.jsonl", [{"messages": []}, {"question": "q"}])
    with refused(r"^none of the 2 rows of .*rows\.jsonl is a conversation; the first: .*line 1 has no turns"):
        read(path, validation=[other], skip_bad_rows=True)


# ---- real ones --------------------------------------------------------------------------------------------------


@needs_shared_data
def test_real_sets_load_whole():
    sft = SHARED_DATA / "sft"
    counts = {
        "fastchat-dummy-sharegpt/dummy_conversation.json": (500, "ShareGPT"),
        "instruction-data/instruction-data.json": (1100, "Alpaca"),
        "sgd-chat/llama2_format_sample_200.jsonl": (200, "rendered Llama-2"),
    }
    for name, (n, shape) in counts.items():
        found = read(sft / name, fraction=0.1)
        assert len(found["train"].chats) + len(found["validation"].chats) == n
        (source,) = found["train"].sources
        assert (source["conversations"], source["unreadable"]) == (n, 0)
        assert source["shape"].startswith(f"{shape} (")
    for name, n_train, n_validation in (("sgd-chat", 2000, 200), ("tm4-coffee", 2684, 298)):
        for split, n in (("train", n_train), ("validation", n_validation)):
            found = read(sft / name / "train.jsonl", validation=[str(sft / name / "validation.jsonl")])
            assert len(found[split].chats) == n
            assert all(chat.messages[-1]["role"] == "assistant" for chat in found[split].chats)
    found = read(sft / "tm4-coffee")  # a folder with files of both names
    assert (len(found["train"].chats), len(found["validation"].chats)) == (2684, 298)


@needs_shared_data
def test_rendered_llama2_rows_are_the_conversations_they_were_made_from(tmp_path: Path):
    """The sample is 200 rows of the set in the same folder."""
    folder = SHARED_DATA / "sft" / "sgd-chat"
    sample = folder / "llama2_format_sample_200.jsonl"
    found = read(sample, validation=[str(folder / "validation.jsonl")])["train"]
    whole = read(folder / "train.jsonl", validation=[str(folder / "validation.jsonl")])["train"]
    said = {json.dumps(chat.messages) for chat in whole.chats}
    assert all(json.dumps(chat.messages) in said for chat in found.chats)


@needs_shared_data
def test_reference_series_split_of_its_instructions():
    path = SHARED_DATA / "sft" / "instruction-data" / "instruction-data.json"
    rows = json.loads(path.read_text(encoding="utf-8"))
    found = read(f"{path}[:935]", validation=[f"{path}[1045:]"])
    for split, some in (("train", rows[:935]), ("validation", rows[1045:])):
        assert [chat.messages[0]["content"] for chat in found[split].chats] == [row["instruction"] for row in some]
        assert [chat.messages[0].get("input", "") for chat in found[split].chats] == [row["input"] for row in some]
        assert [chat.messages[1]["content"] for chat in found[split].chats] == [row["output"] for row in some]
    assert len(read(f"{path}[935:1045]", validation=[f"{path}[:1]"])["train"].chats) == 110


def test_system_column_is_the_system_turn_of_any_shape(tmp_path: Path):
    rows = [
        {"instruction": "a", "output": "b", "system": "Be brief."},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "Be brief."},
        {
            "conversations": [{"from": "system", "value": "Sing."}, {"from": "human", "value": "a"}],
            "system": "Be brief.",
        },
        {"instruction": "a", "output": "b", "system": ""},
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    first = [chat.messages[0] for chat in read_places(find_places(str(path)), False).chats]
    said = [message["content"] if message["role"] == "system" else None for message in first]
    assert said == ["Be brief.", "Be brief.", "Sing.", None]


def test_text_in_parts_is_one_text_and_a_picture_is_refused(tmp_path: Path):
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]
    path = tmp_path / "parts.json"
    path.write_text(json.dumps([{"messages": [{"role": "user", "content": parts}]}]), encoding="utf-8")
    (chat,) = read_places(find_places(str(path)), False).chats
    assert chat.messages == [{"role": "user", "content": "Who are you?"}]
    parts.append({"type": "image", "url": "cat.png"})
    path.write_text(json.dumps([{"messages": [{"role": "user", "content": parts}]}]), encoding="utf-8")
    with pytest.raises(UsageError, match="turn 1: 'content' is of type list, not a string"):
        read_places(find_places(str(path)), False)


def test_glob_stands_for_the_files_it_matches(tmp_path: Path):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 3, encoding="utf-8")
    assert len(read_places(find_places(f"{tmp_path}/*.jsonl"), False).chats) == 6
    assert len(read_places(find_places(f"{tmp_path}/*.jsonl[:2]"), False).chats) == 4
    with pytest.raises(UsageError, match="matches no file"):
        find_places(f"{tmp_path}/*.parquet")


def test_turn_with_weight_zero_is_refused(tmp_path: Path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    path = tmp_path / "weights.json"
    path.write_text(json.dumps([{"messages": turns}]), encoding="utf-8")
    with pytest.raises(UsageError, match="turn 2 has weight 0"):
        read_places(find_places(str(path)), False)
