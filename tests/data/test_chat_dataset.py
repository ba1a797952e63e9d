"""`data/chat_dataset.py`: conversations kept, contents of each row, exact packing."""

import copy
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SHARED_DATA, needs_shared_data, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.config.data import CHAT_PACKINGS, LOSS_ON, OVERLONG
from gpt2small_hf.data.chat.conversations import Conversation, read_conversations
from gpt2small_hf.data.chat.encoding import encode
from gpt2small_hf.data.chat.formats import Message
from gpt2small_hf.data.chat.template_checks import set_template
from gpt2small_hf.data.chat.templates import TEMPLATES
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.row_dataset import PaddedLength
from gpt2small_hf.data.tokenizer import load_tokenizer
from gpt2small_hf.errors import UsageError


@pytest.fixture(scope="module", params=["chatml", "llama2", "alpaca"])
def tokenizer(request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """With tokens of its own for the template's markers. Not to be changed."""
    return with_template(tiny_tokenizer, request.param)


def with_template(tokenizer: PreTrainedTokenizerFast, name: str, add: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizer)
    set_template(tokenizer, name, add_special_tokens=add)
    return tokenizer


def conversation(*contents: str, system: str | None = None) -> list[Message]:
    """User and assistant in turn."""
    chat = [{"role": "system", "content": system}] if system is not None else []
    return chat + [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(contents)]


def placed(chats: list[list[Message]]) -> list[Conversation]:
    return [Conversation(chat, f"chat {number}") for number, chat in enumerate(chats)]


WORDS = st.lists(st.sampled_from(["Every", " effort", " fox", "\n", "</s>", " "]) | st.text(max_size=3), max_size=8)
CHATS = st.lists(
    st.builds(
        lambda contents, system: conversation(*contents, system=system),
        st.lists(WORDS.map("".join), min_size=1, max_size=9),
        st.none() | WORDS.map("".join),
    ),
    min_size=1,
    max_size=6,
)


def ids_and_labels(
    tokenizer: PreTrainedTokenizerFast, chat: list[Message], loss_on: str
) -> tuple[list[int], list[int]]:
    encoded = encode(tokenizer, [chat])[0]
    supervised = encoded.supervised(loss_on).tolist()
    ids = encoded.input_ids.tolist()
    return ids, [id if learned else -100 for id, learned in zip(ids, supervised, strict=True)]


# ---- rows -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60)
@given(
    chats=CHATS,
    seq_len=st.integers(4, 250),
    loss_on=st.sampled_from(LOSS_ON),
    packing=st.sampled_from(CHAT_PACKINGS),
    overlong=st.sampled_from(OVERLONG),
)
def test_each_kept_conversation_is_whole_in_one_row_that_is_not_too_long(
    tokenizer: PreTrainedTokenizerFast,
    chats: list[list[Message]],
    seq_len: int,
    loss_on: str,
    packing: str,
    overlong: str,
):
    options = {"seq_len": seq_len, "loss_on": loss_on, "packing": packing, "overlong": overlong}
    try:
        dataset = ChatDataset(placed(chats), tokenizer, **options)
    except UsageError:
        return  # nothing is left; the next tests say when that is so
    found = []
    for row in map(dataset.__getitem__, range(len(dataset))):
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        assert len(ids) == len(labels) <= seq_len
        starts = [0]
        if packing == "best_fit":
            starts = np.flatnonzero(row["position_ids"] == 0).tolist()
            lengths = np.diff([*starts, len(ids)])
            assert row["position_ids"].tolist() == [position for n in lengths for position in range(n)]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            found.append((tuple(ids[start:end]), tuple(labels[start:end])))
    expected = [ids_and_labels(tokenizer, chat.messages, loss_on) for chat in dataset.chats]
    assert Counter(found) == Counter((tuple(ids), tuple(labels)) for ids, labels in expected)
    assert dataset.counts.kept == len(found) == len(dataset.chats) == len(dataset.removed)
    assert dataset.n_tokens == sum(len(ids) for ids, _ in found)
    learned = [label for _, labels in found for label in labels if label != -100]
    assert dataset.n_supervised == len(learned)
    assert dataset.supervised_tokens().tolist() == learned
    assert dataset.largest_id == max(id for ids, _ in found for id in ids)


@pytest.mark.parametrize("packing", CHAT_PACKINGS)
def test_batch_is_padded_at_the_end_of_rows(tiny_tokenizer: PreTrainedTokenizerFast, packing: str):
    tokenizer = with_template(tiny_tokenizer, "chatml")
    chats = [conversation("Every", " effort" * n) for n in (1, 9, 4)]
    dataset = ChatDataset(placed(chats), tokenizer, seq_len=40, packing=packing)
    rows = [dataset[n] for n in range(len(dataset))]
    assert len(rows) > 1
    batch = dataset.collate(rows)
    longest = max(len(row["input_ids"]) for row in rows)
    assert set(batch) == {"input_ids", "labels"} | ({"position_ids"} if packing == "best_fit" else set())
    for number, row in enumerate(rows):
        n = len(row["input_ids"])
        for name, column in batch.items():
            assert column.shape == (len(rows), longest)
            assert column.dtype == torch.int64
            assert column[number, :n].tolist() == row[name].tolist()
        assert batch["input_ids"][number, n:].tolist() == [tokenizer.pad_token_id] * (longest - n)
        assert batch["labels"][number, n:].tolist() == [-100] * (longest - n)
        if packing == "best_fit":
            assert batch["position_ids"][number, n:].tolist() == list(range(longest - n))


def test_rows_of_a_limit_beyond_the_row_are_no_longer_than_the_row(tiny_tokenizer: PreTrainedTokenizerFast):
    tokenizer = with_template(tiny_tokenizer, "chatml")
    chats = placed([conversation("Every", " effort"), conversation("Every", "x" * 60)])
    for packing in CHAT_PACKINGS:
        dataset = ChatDataset(chats, tokenizer, seq_len=40, max_length=1000, packing=packing)
        assert dataset.counts.too_long == 1
        assert len(dataset[0]["input_ids"]) <= 40


# ---- packing changes nothing that is learned --------------------------------------------------------------------


CONTEXT = 128


def some_chats(tokenizer: PreTrainedTokenizerFast) -> list[Conversation]:
    """Twenty of different lengths; the second answer of some is no token long."""
    words = ["Every", " effort", " moves", " you", " forward", ".", " fox", " dog"]
    chats = []
    for n in range(20):
        contents = ["".join(words[(n + k) % 8] for k in range(1 + n * 7 % 5)) for _ in range(2)]
        chats.append(conversation(*contents, system="Be" if n % 3 == 0 else None))
        if n % 4 == 0:
            chats[-1] += conversation("fox", "" if n % 8 else words[n % 8])
    assert len({len(one.input_ids) for one in encode(tokenizer, chats)}) > 6
    return placed(chats)


def model_for(tokenizer: PreTrainedTokenizerFast) -> GPT2SmallForCausalLM:
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    torch.manual_seed(0)
    model = GPT2SmallForCausalLM(tiny_config(vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, **ids))
    for parameter in model.parameters():  # larger than at the beginning, so that what a token sees matters
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def mean_loss(model: GPT2SmallForCausalLM, dataset: ChatDataset, rows_a_batch: int) -> float:
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in DataLoader(dataset, batch_size=rows_a_batch, collate_fn=dataset.collate):
            n = int((batch["labels"] != -100).sum())
            total += float(model(**batch).loss) * n
            count += n
    assert count == dataset.n_supervised
    return total / count


@pytest.mark.parametrize("loss_on", LOSS_ON)
@pytest.mark.parametrize("name", ["chatml", "llama2"])
def test_packed_padded_and_lone_conversations_have_the_same_loss(
    tiny_tokenizer: PreTrainedTokenizerFast, name: str, loss_on: str
):
    tokenizer = with_template(tiny_tokenizer, name)
    chats, model = some_chats(tokenizer), model_for(with_template(tiny_tokenizer, name))
    packed, padded = (
        ChatDataset(chats, tokenizer, seq_len=CONTEXT, loss_on=loss_on, packing=packing) for packing in CHAT_PACKINGS
    )
    assert len(packed) < len(padded) / 2
    alone = []  # by hand, without rows or labels
    for chat in chats:
        encoded = encode(tokenizer, [chat.messages])[0]
        ids = torch.from_numpy(encoded.input_ids)
        with torch.no_grad():
            scores = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        alone.append(-scores.gather(1, ids[1:, None])[encoded.supervised(loss_on)[1:], 0])
    expected = float(torch.cat(alone).mean())
    for dataset in (packed, padded):
        for rows_a_batch in (1, 3, 100):
            assert mean_loss(model, dataset, rows_a_batch) == pytest.approx(expected, abs=1e-5)


def test_packed_and_padded_conversations_have_the_same_gradients(tiny_tokenizer: PreTrainedTokenizerFast):
    tokenizer = with_template(tiny_tokenizer, "chatml")
    chats, model = some_chats(tokenizer), model_for(tokenizer)
    gradients = []
    for packing in CHAT_PACKINGS:
        dataset = ChatDataset(chats, tokenizer, seq_len=CONTEXT, packing=packing)
        batch = dataset.collate([dataset[n] for n in range(len(dataset))])
        model.zero_grad()
        model(**batch, num_items_in_batch=dataset.n_supervised).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == dict(model.named_parameters()).keys()
    assert max(float(gradient.abs().max()) for gradient in gradients[0].values()) > 0.01
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


# ---- conversations that are too long ----------------------------------------------------------------------------


def tokens(tokenizer: PreTrainedTokenizerFast, chat: list[Message]) -> int:
    return len(encode(tokenizer, [chat])[0].input_ids)


@pytest.mark.slow
@settings(max_examples=80)
@given(chats=CHATS, limit=st.integers(4, 250), overlong=st.sampled_from(OVERLONG), loss_on=st.sampled_from(LOSS_ON))
def test_longer_conversation_keeps_the_longest_end_that_fits(
    tokenizer: PreTrainedTokenizerFast, chats: list[list[Message]], limit: int, overlong: str, loss_on: str
):
    """Tried out for each: the system's turn, and the rest from any question on."""
    kept, removed, n_long, n_nothing = [], [], 0, 0
    for chat in chats:
        system = [message for message in chat if message["role"] == "system"]
        rest = chat[len(system) :]
        questions = range(0, len(rest), 2) if overlong == "keep_end" else [0]
        fitting = [start for start in questions if tokens(tokenizer, system + rest[start:]) <= limit]
        if not fitting:
            n_long += 1
            continue
        end = system + rest[fitting[0] :]
        if loss_on != "all" and all(message["role"] != "assistant" for message in end):
            n_nothing += 1
            continue
        kept.append(end)
        removed.append(fitting[0])
    options = {"seq_len": 250, "max_length": limit, "overlong": overlong, "loss_on": loss_on}
    if not kept:
        with pytest.raises(UsageError, match=f"none of {len(chats)} conversations? can be used"):
            ChatDataset(placed(chats), tokenizer, **options)
        return
    dataset = ChatDataset(placed(chats), tokenizer, **options)
    assert [chat.messages for chat in dataset.chats] == kept
    assert dataset.removed == removed
    assert vars(dataset.counts) == {
        "conversations": len(chats),
        "shortened": sum(n > 0 for n in removed),
        "turns_removed": sum(removed),
        "too_long": n_long,
        "nothing_to_learn": n_nothing,
        "empty_answers": sum(any(m == {"role": "assistant", "content": ""} for m in chat) for chat in kept),
    }
    assert dataset.counts.kept == len(kept)


def test_counts_of_conversations_have_a_summary(tiny_tokenizer: PreTrainedTokenizerFast):
    tokenizer = with_template(tiny_tokenizer, "chatml")
    short, question = conversation("Every", " effort"), conversation("Every")
    long = conversation("Every", "x" * 50, "Every", " effort", "Every", " effort", system="Be")
    chats = placed([short, long, question, conversation("Every", "x" * 100), short])
    dataset = ChatDataset(chats, tokenizer, seq_len=64)
    assert str(dataset.counts) == (
        "5 conversations, 1 too long, kept without their first turns (2 in all), 1 too long and left out, "
        "1 without a token to learn, left out"
    )
    assert [chat.where for chat in dataset.chats] == ["chat 0", "chat 1", "chat 4"]
    assert dataset.chats[1].messages == long[:1] + long[3:]
    assert dataset.describe() == {
        "conversations": 5,
        "shortened": 1,
        "turns_removed": 2,
        "too_long": 1,
        "nothing_to_learn": 1,
        "empty_answers": 0,
        "rows": len(dataset),
        "tokens": sum(tokens(tokenizer, chat) for chat in (short, short, long[:1] + long[3:])),
        "supervised_tokens": 4 * len(tokenizer.encode(" effort<|im_end|>")),
        "supervised_share": dataset.n_supervised / dataset.n_tokens,
    }
    assert str(ChatDataset(placed([short]), tokenizer, seq_len=64).counts) == "1 conversation"
    dropped = ChatDataset(chats, tokenizer, seq_len=64, overlong="drop")
    assert (dropped.counts.too_long, dropped.counts.shortened, dropped.counts.kept) == (2, 0, 2)


def test_no_supervised_token_raises_a_one_line_error(tiny_tokenizer: PreTrainedTokenizerFast):
    tokenizer = with_template(tiny_tokenizer, "chatml")
    long, question = conversation("Every", "x" * 100), conversation("Every")

    def said(chats: list[list[Message]], **options: Any) -> str:
        with pytest.raises(UsageError) as caught:
            ChatDataset(placed(chats), tokenizer, seq_len=64, **options)
        return str(caught.value)

    assert said([long, long]) == (
        "none of 2 conversations can be used: 2 are longer than 64 tokens. Raise --max_length or --seq_len."
    )
    assert said([long], overlong="drop").endswith("Raise --max_length or --seq_len, or take --overlong keep_end.")
    assert said([question]) == (
        "none of 1 conversation can be used: in 1 no token is supervised: no assistant answers. "
        "Preview them: gpt2small preview."
    )
    assert "1 are longer than 64 tokens" in said([question, long])
    assert "in 1 no token is supervised" in said([question, long])


def test_bytes_per_token_are_those_of_supervised_tokens(tiny_tokenizer: PreTrainedTokenizerFast):
    tokenizer = with_template(tiny_tokenizer, "chatml")
    dataset = ChatDataset(placed([conversation("Every", "é fox")] * 2), tokenizer, seq_len=64)
    assert dataset.bytes_per_token == len("é fox".encode()) / len(tokenizer.encode("é fox<|im_end|>"))


def test_fingerprint_depends_on_ids_labels_and_rows(tiny_tokenizer: PreTrainedTokenizerFast):
    tokenizer = with_template(tiny_tokenizer, "chatml")
    chats = placed([conversation("Every", " effort", "Every", " fox"), conversation("Every", " dog")])

    def fingerprint(some: list[Conversation], **options: Any) -> str:
        return ChatDataset(some, tokenizer, seq_len=128, **options).fingerprint

    assert fingerprint(chats) == fingerprint(placed([chat.messages for chat in chats]))
    others = [fingerprint(chats[::-1]), fingerprint(chats, loss_on="last"), fingerprint(chats, packing="padding")]
    assert len({fingerprint(chats), fingerprint(chats[:1]), *others}) == 5


# ---- the reference series' instructions -------------------------------------------------------------------------


def instruction_text(row: dict[str, str]) -> str:
    """As the series formats a row."""
    text = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        f"\n\n### Instruction:\n{row['instruction']}"
    )
    if row["input"]:
        text += f"\n\n### Input\n{row['input']}"
    return text + f"\n\n### Response:\n{row['output']}"


def row_texts(dataset: ChatDataset, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Each row but its end token."""
    found = []
    for number in range(len(dataset)):
        *ids, end = dataset[number]["input_ids"].tolist()
        assert end == tokenizer.eos_token_id
        found.append(str(tokenizer.decode(ids)))
    return found


@pytest.mark.parametrize("add", [False, True])
def test_instructions_are_written_as_the_reference_series_has_them(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, add: bool
):
    rows = [
        {"instruction": "Name a fox.", "input": "", "output": "Reynard"},
        {"instruction": "Translate.\n", "input": "le renard\r\n", "output": " the fox "},
        {"instruction": "### Input\nis what?", "input": "### Response:\n<|endoftext|>", "output": "é 🙂"},
        {"instruction": "Say nothing.", "input": "", "output": ""},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    tokenizer = with_template(tiny_tokenizer, "alpaca", add)
    chats = read_conversations(
        [f"{tmp_path / 'rows.json'}[:3]"], [f"{tmp_path / 'rows.json'}[3:]"], validation_fraction=0
    )
    for split, some in (("train", rows[:3]), ("validation", rows[3:])):
        dataset = ChatDataset(chats[split].chats, tokenizer, seq_len=400, packing="padding")
        assert row_texts(dataset, tokenizer) == [instruction_text(row) for row in some]


@needs_shared_data
def test_reference_series_rows_are_byte_for_byte_its_own():
    path = SHARED_DATA / "sft" / "instruction-data" / "instruction-data.json"
    rows = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = with_template(load_tokenizer(str(SHARED_DATA / "tokenizer_gpt2")), "alpaca", add=False)
    for part in (slice(0, 935), slice(935, 1045), slice(1045, 1100)):
        name = f"{path}[{part.start or ''}:{part.stop if part.stop < 1100 else ''}]"
        chats = read_conversations([name], [f"{path}[:1]"], validation_fraction=0)["train"].chats
        dataset = ChatDataset(chats, tokenizer, seq_len=1024, packing="padding")
        assert row_texts(dataset, tokenizer) == [instruction_text(row) for row in rows[part]]
        learned = str(tokenizer.decode(dataset.supervised_tokens())).split("<|endoftext|>")
        assert learned == [*(row["output"] for row in rows[part]), ""]


def test_from_files_equals_the_constructor(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": conversation("Every", text)}) + "\n" for text in ("fox", "dog")))
    tokenizer = copy.deepcopy(tiny_tokenizer)
    rows = ChatDataset.from_files(path, tokenizer, seq_len=1024, template="alpaca", loss_on="all")
    assert tokenizer.chat_template == TEMPLATES["alpaca"]
    chats = placed([conversation("Every", text) for text in ("fox", "dog")])
    assert rows.fingerprint == ChatDataset(chats, tokenizer, seq_len=1024, loss_on="all").fingerprint
    assert [chat.where for chat in rows.chats] == [f"{path}, line 1", f"{path}, line 2"]


def test_padding_rows_extend_a_dataset_to_a_multiple(tiny_tokenizer: PreTrainedTokenizerFast):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    set_template(tokenizer, "chatml")
    chats = [
        Conversation([{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b"}], "")
        for n in range(5)
    ]
    for packing in CHAT_PACKINGS:
        rows = ChatDataset(chats, tokenizer, seq_len=64, packing=packing)
        filled = PaddedLength(rows, 4)
        assert len(filled) == math.ceil(len(rows) / 4) * 4
        batch = rows.collate([filled[number] for number in range(len(filled))])
        assert batch["labels"].ne(-100).sum() == rows.n_supervised
        assert batch.keys() == rows.collate([rows[0]]).keys()
        assert len(PaddedLength(rows, 1)) == len(rows)
