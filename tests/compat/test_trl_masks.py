"""What TRL's SFTTrainer makes of conversations for `assistant_only_loss`: rows and labels as ours, token by token."""

import copy
import random
from pathlib import Path

import pytest
from conftest import SHARED_DATA, needs_shared_data, tiny_config
from transformers import PreTrainedTokenizerFast

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.data.chat.conversations import Conversation, read_conversations
from gpt2small_hf.data.chat.formats import Message
from gpt2small_hf.data.chat.template_checks import set_template
from gpt2small_hf.data.chat.templates import TEMPLATES
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.tokenizer import load_tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

# TRL 1.16 sets a field that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")

CASES = [(name, add) for name in TEMPLATES for add in (False, True)]
every_template = pytest.mark.parametrize(
    ("name", "add"), CASES, ids=[name + " with tokens" * add for name, add in CASES]
)
PIECES = [
    *("Every", " effort", " moves you", " forward", "fox", "\n", "\r\n", " ", "\t", "\x00", "é", "e\u0301", "🙂"),
    *("\ue000", "<b>", "[", "]", "### ", "#", "1,024", "'s", "<|im_", "{{ x }}", "\n\n", "中文"),
]


def some_chats() -> list[list[Message]]:
    """Sixty, made of odd pieces, but with no marker whole: those TRL lets through as tokens."""
    random_ = random.Random(0)

    def said() -> str:
        return "".join(random_.choices(PIECES, k=random_.randint(0, 8)))

    chats = []
    for n in range(60):
        chat = [{"role": "system", "content": said()}] if n % 3 == 0 else []
        for _ in range(random_.randint(1, 4)):
            chat += [{"role": "user", "content": said()}, {"role": "assistant", "content": said()}]
        chats.append(chat + [{"role": "user", "content": said()}] * (n % 5 == 0))
    return chats


def theirs(tokenizer: PreTrainedTokenizerFast, chats: list[list[Message]], place: Path):
    settings = trl.SFTConfig(
        output_dir=str(place),
        assistant_only_loss=True,
        max_length=None,
        shuffle_dataset=False,
        per_device_train_batch_size=8,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    rows = datasets.Dataset.from_list([{"messages": chat} for chat in chats])
    model = GPT2SmallForCausalLM(tiny_config(vocab_size=len(tokenizer)))
    return trl.SFTTrainer(model=model, args=settings, train_dataset=rows, processing_class=copy.deepcopy(tokenizer))


def compare(tokenizer: PreTrainedTokenizerFast, chats: list[list[Message]], place: Path) -> None:
    """See that every conversation has the same ids and labels here and there."""
    ours = ChatDataset([Conversation(chat, "") for chat in chats], tokenizer, seq_len=100_000, packing="padding")
    trainer = theirs(tokenizer, chats, place)
    assert len(trainer.train_dataset) == len(ours) == len(chats)
    for number, row in enumerate(trainer.train_dataset):
        assert ours[number]["input_ids"].tolist() == row["input_ids"]
        assert ours[number]["labels"].tolist() == row["labels"]
    numbers = range(8)
    batch = trainer.data_collator([trainer.train_dataset[number] for number in numbers])
    filled = ours.collate([ours[number] for number in numbers])
    assert filled["labels"].equal(batch["labels"])
    assert filled["input_ids"].equal(batch["input_ids"])


@every_template
def test_rows_and_batches_are_those_of_trl(
    tiny_tokenizer: PreTrainedTokenizerFast, name: str, add: bool, tmp_path: Path
):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    set_template(tokenizer, name, add_special_tokens=add)
    compare(tokenizer, some_chats(), tmp_path)


@needs_shared_data
@every_template
def test_rows_of_real_conversations_are_those_of_trl(name: str, add: bool, tmp_path: Path):
    tokenizer = load_tokenizer(str(SHARED_DATA / "tokenizer_gpt2"))
    set_template(tokenizer, name, add_special_tokens=add)
    sft = SHARED_DATA / "sft"
    found = read_conversations(
        [str(sft / "sgd-chat" / "validation.jsonl")],
        [f"{sft / 'tm4-coffee' / 'train.jsonl'}[:200]"],
        validation_fraction=0,
    )
    chats = [chat.messages for split in found.values() for chat in split.chats]
    assert len(chats) == 400
    compare(tokenizer, chats, tmp_path)


@every_template
def test_trl_reports_that_end_tokens_are_supervised(tiny_tokenizer: PreTrainedTokenizerFast, name: str, add: bool):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    set_template(tokenizer, name, add_special_tokens=add)
    assert trl.chat_template_utils.is_chat_template_stop_token_trained(tokenizer)
    assert trl.chat_template_utils.has_generation_markers(tokenizer.chat_template)
