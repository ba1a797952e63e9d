"""Heads for classification and question answering, in this package and as remote code."""

import pytest
import torch
from conftest import tiny_config
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

from gpt2small_hf import GPT2SmallForCausalLM

HEADS = [AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering]


@pytest.mark.parametrize("auto", HEADS, ids=lambda auto: auto.__name__)
def test_head_takes_over_the_weights_of_a_language_model(tmp_path, auto):
    language_model = GPT2SmallForCausalLM(tiny_config())
    language_model.save_pretrained(tmp_path)
    model, info = auto.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert all(name.startswith(("score", "qa_outputs")) for name in info["missing_keys"])
    for name, parameter in language_model.model.named_parameters():
        assert torch.equal(parameter, model.model.get_parameter(name)), name


def test_text_is_classified_by_its_last_real_token_wherever_the_padding_is():
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=3)).eval()
    row = torch.randint(0, 100, (1, 7))
    alone = model(row).logits
    padding = torch.full((1, 3), 100)
    for ids in (torch.cat([padding, row], 1), torch.cat([row, padding], 1)):
        torch.testing.assert_close(model(ids, attention_mask=(ids != 100).long()).logits, alone, atol=1e-5, rtol=0)


def test_every_head_has_a_loss_that_falls():
    torch.manual_seed(0)
    ids = torch.randint(0, 100, (4, 9))
    labels = {
        AutoModelForSequenceClassification: {"labels": torch.tensor([0, 1, 2, 0])},
        AutoModelForTokenClassification: {"labels": torch.randint(0, 3, (4, 9))},
        AutoModelForQuestionAnswering: {
            "start_positions": torch.tensor([1, 2, 3, 4]),
            "end_positions": torch.tensor([5, 6, 7, 8]),
        },
    }
    for auto in HEADS:
        model = auto.from_config(tiny_config(num_labels=3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(10):
            loss = model(ids, **labels[auto]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.1, auto


@pytest.mark.slow
def test_accumulating_batches_changes_no_heads_loss(tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(0, 100, (9,), generator=generator), "labels": torch.tensor(i % 3)} for i in range(8)
    ]
    losses = []
    for batch, steps in ((8, 1), (2, 4)):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=3))
        args = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            max_steps=1,
            logging_steps=1,
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, args, train_dataset=rows)
        trainer.train()
        losses.append(next(row["loss"] for row in trainer.state.log_history if "loss" in row))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_language_model_folder_loads_every_head_without_the_package(tmp_path, run_isolated):
    GPT2SmallForCausalLM(tiny_config()).save_pretrained(tmp_path)
    printed = run_isolated(f"""
import transformers
for head in {[auto.__name__ for auto in HEADS]!r}:
    model = getattr(transformers, head).from_pretrained({str(tmp_path)!r}, num_labels=3, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    model.save_pretrained({str(tmp_path)!r} + "/" + head)
    again = getattr(transformers, head).from_pretrained({str(tmp_path)!r} + "/" + head, trust_remote_code=True)
    print(type(again).__name__, again.config.num_labels)
""")
    assert printed.splitlines() == [
        "GPT2SmallForSequenceClassification 3",
        "GPT2SmallForTokenClassification 3",
        "GPT2SmallForQuestionAnswering 3",
    ]
