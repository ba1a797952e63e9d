"""What a published folder must do under any transformers we promise. Run by `versions.py`; imports nothing of ours.

python -I tests/compat/version_checks.py FOLDER      prints JSON: versions, and each check's "ok" or its error
"""

import importlib.util
import json
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    pipeline,
)

CHAT = [
    {"role": "user", "content": "What did the fox see?"},
    {"role": "assistant", "content": "The fox saw the river."},
]
TEXTS = ["The fox", "What did the hare meet?"]


class Checks:
    """Each public method is a check; it raises if the folder fails it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def model(self, **options: object) -> PreTrainedModel:
        loaded = AutoModelForCausalLM.from_pretrained(self.folder, trust_remote_code=True, **options).eval()
        assert type(loaded).__module__.startswith("transformers_modules"), type(loaded)
        return loaded

    def rows(self, **options: object) -> dict[str, torch.Tensor]:
        tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        return dict(tokenizer(TEXTS, padding=True, return_tensors="pt", **options))

    def tokenizer(self) -> None:
        """Text comes back, and the template says which tokens are the assistant's."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        assert tokenizer.decode(tokenizer("The fox saw.").input_ids) == "The fox saw."
        chat = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
        said = [id for id, mine in zip(chat["input_ids"], chat["assistant_masks"], strict=True) if mine]
        assert tokenizer.decode(said) == "The fox saw the river.<|im_end|>", said

    def every_class(self) -> None:
        """All Auto classes named in the folder load its weights."""
        for auto in (
            AutoModel,
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
            AutoModelForTokenClassification,
            AutoModelForQuestionAnswering,
        ):
            model, info = auto.from_pretrained(self.folder, trust_remote_code=True, output_loading_info=True)
            assert not [name for name in info["missing_keys"] if ".layers." in name or "embed" in name], info
            assert torch.isfinite(model(**self.rows())[0]).all(), auto

    def forward(self) -> None:
        """The loss is that of the transformers that saved the folder, which is stored in the folder."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        ids = tokenizer.apply_chat_template(CHAT, return_dict=True, return_tensors="pt")["input_ids"]
        expected = json.loads(Path(self.folder, "expected_loss.json").read_text())
        loss = self.model()(ids, labels=ids).loss.item()
        assert abs(loss - expected) < 1e-5, f"{loss} instead of {expected}"

    def generation(self) -> None:
        """Greedy text is the same with no cache, a growing one and one of fixed size."""
        model, ids = self.model(), self.rows()["input_ids"][1:]
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        plain = model.generate(ids, use_cache=False, **options)
        assert plain.shape[1] == ids.shape[1] + 12
        assert torch.equal(model.generate(ids, use_cache=True, **options), plain)
        # The library compiles a model with a static cache; without a compiler on the machine that is another matter.
        model.generation_config.disable_compile = True
        assert torch.equal(model.generate(ids, cache_implementation="static", **options), plain)

    def pipelines(self) -> None:
        """Each task gets the class it is about, and writes what `generate` writes."""
        write = pipeline("text-generation", model=self.folder, trust_remote_code=True)
        assert type(write.model).__name__ == "GPT2SmallForCausalLM", type(write.model)
        text = write(TEXTS[0], max_new_tokens=8, do_sample=False)[0]["generated_text"]
        ids = write.tokenizer(TEXTS[0], return_tensors="pt")
        written = self.model().generate(**ids, max_new_tokens=8, do_sample=False)[0]
        assert text == write.tokenizer.decode(written, skip_special_tokens=True), text
        judge = pipeline("text-classification", model=self.folder, trust_remote_code=True)
        assert type(judge.model).__name__ == "GPT2SmallForSequenceClassification", type(judge.model)
        assert 0 < judge(TEXTS[0])[0]["score"] < 1

    def left_padding(self) -> None:
        """A padded row is scored as it is alone."""
        model = self.model()
        rows = self.rows(padding_side="left")
        alone = rows["input_ids"][0][rows["attention_mask"][0] == 1]
        assert len(alone) < rows["input_ids"].shape[1]
        difference = model(**rows).logits[0, -len(alone) :] - model(alone[None]).logits[0]
        assert difference.abs().max() < 1e-5, difference.abs().max()

    def packed_rows(self) -> None:
        """Documents in one row, told apart by their positions, do not see each other."""
        model, rows = self.model(), self.rows()
        parts = [ids[mask == 1] for ids, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)]
        positions = torch.cat([torch.arange(len(part)) for part in parts])
        packed = model(torch.cat(parts)[None], position_ids=positions[None]).logits[0]
        alone = torch.cat([model(part[None]).logits[0] for part in parts])
        assert (packed - alone).abs().max() < 1e-5, (packed - alone).abs().max()

    def attention_kinds(self) -> None:
        """Step-by-step attention equals the fused kernel."""
        eager, fused = self.model(attn_implementation="eager"), self.model(attn_implementation="sdpa")
        assert (eager.config._attn_implementation, fused.config._attn_implementation) == ("eager", "sdpa")
        difference = eager(**self.rows()).logits - fused(**self.rows()).logits
        assert difference.abs().max() < 1e-5, difference.abs().max()

    def save_and_reload(self) -> None:
        """A saved copy carries its code and scores the same."""
        model = self.model()
        with tempfile.TemporaryDirectory() as copy:
            model.save_pretrained(copy)
            again = AutoModelForCausalLM.from_pretrained(copy, trust_remote_code=True).eval()
            assert torch.equal(again(**self.rows()).logits, model(**self.rows()).logits)

    def optimizer_steps(self) -> None:
        """A few AdamW steps lower the loss, with and without recomputation in the backward pass."""
        for recompute in (False, True):
            model, rows = self.model().train(), self.rows()
            if recompute:
                model.gradient_checkpointing_enable()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses = []
            for _ in range(4):
                loss = model(**rows, labels=rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[-1] < losses[0], losses

    def trainer(self) -> None:
        """The Trainer takes two steps and its checkpoint loads."""
        ids = self.rows()["input_ids"]
        with tempfile.TemporaryDirectory() as place:
            trainer = Trainer(
                model=self.model(),
                args=TrainingArguments(
                    place, max_steps=2, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True
                ),
                train_dataset=[{"input_ids": row, "labels": row} for row in ids],
            )
            trainer.train()
            assert trainer.state.global_step == 2
            again = AutoModelForCausalLM.from_pretrained(f"{place}/checkpoint-2", trust_remote_code=True).eval()
            trained = trainer.model.eval()
            assert torch.equal(again(ids).logits, trained(ids).logits)


def outcome(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:  # whatever it is, it is this check's result and the next one still runs
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {first} ({Path(frame.filename).name}:{frame.lineno})"
    return "ok"


if __name__ == "__main__":
    assert importlib.util.find_spec("gpt2small_hf") is None, "the package would win over the folder's own code"
    transformers.utils.logging.disable_progress_bar()
    checks = Checks(sys.argv[1])
    names = [name for name in vars(Checks) if not name.startswith("_") and name not in ("model", "rows")]
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps({"versions": versions, "checks": {name: outcome(getattr(checks, name)) for name in names}}))
