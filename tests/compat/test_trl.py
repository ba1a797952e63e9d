"""TRL: supervised fine-tuning on chats, alone and packed, and preference training."""

import json
import subprocess

import pytest
from transformers import AutoTokenizer

from compat.published import CONTEXT, conversations

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

# TRL 1.16 sets a field that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")


def sft_trainer(folder, place, **options):
    """A trainer that takes all conversations in every step."""
    settings = trl.SFTConfig(
        output_dir=str(place),
        max_length=CONTEXT,
        per_device_train_batch_size=len(conversations()),
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        trust_remote_code=True,
        **options,
    )
    chats = datasets.Dataset.from_list([{"messages": chat} for chat in conversations()])
    return trl.SFTTrainer(model=str(folder), args=settings, train_dataset=chats)


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_only_assistant_tokens_are_supervised(published, tmp_path):
    trainer = sft_trainer(published, tmp_path, assistant_only_loss=True)
    (batch,) = trainer.get_train_dataloader()
    trained = batch["labels"][batch["labels"] != -100]
    tokenizer = AutoTokenizer.from_pretrained(published)
    answers = [chat[1]["content"] + "<|im_end|>" for chat in conversations()]
    assert len(trained) == sum(len(tokenizer(answer).input_ids) for answer in answers)
    assert len(trained) < batch["attention_mask"].sum() / 2
    assert sorted(tokenizer.decode(trained).split("<|im_end|>")) == sorted(
        a.split("<|im_end|>")[0] for a in [*answers, ""]
    )
    first, *_, last = losses(trainer)
    assert last < first


@pytest.mark.slow
@pytest.mark.parametrize("assistant_only", [False, True], ids=["all tokens", "assistant only"])
def test_packed_conversations_do_not_see_each_other(published, tmp_path, assistant_only):
    alone = sft_trainer(published, tmp_path, assistant_only_loss=assistant_only)
    packed = sft_trainer(published, tmp_path, assistant_only_loss=assistant_only, packing=True)
    assert len(packed.train_dataset) < len(alone.train_dataset) / 2
    (batch,) = packed.get_train_dataloader()
    assert batch["input_ids"].shape[0] == 1
    assert (batch["position_ids"] == 0).sum() == len(conversations())
    assert losses(packed) == pytest.approx(losses(alone), abs=1e-4)


@pytest.mark.slow
def test_preferences_are_learned_from_the_folder_alone(published, without_package, tmp_path):
    """The reference model is a second copy that TRL loads by itself, from the folder's own code."""
    code = """
import json
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
chats, folder, place = json.loads(sys.argv[1]), *sys.argv[2:]
worse = [{"role": "assistant", "content": "Nothing."}]
rows = [{"prompt": chat[:1], "chosen": chat[1:], "rejected": worse} for chat in chats]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules")
settings = trl.DPOConfig(
    output_dir=place, max_length=128, per_device_train_batch_size=len(rows), max_steps=6, learning_rate=1e-3,
    logging_steps=1, save_strategy="steps", save_steps=6, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
    trust_remote_code=True,
)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
trainer = trl.DPOTrainer(model=model, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
trainer.train()
print("LOSSES", json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
"""
    words = (json.dumps(conversations()), str(published), str(tmp_path))
    done = subprocess.run(**without_package(code, *words), capture_output=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.split("LOSSES ")[1])
    assert found[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: both models still agree
    assert found[-1] < 0.6
    assert len(list((tmp_path / "checkpoint-6").glob("*.py"))) == 4
