"""PEFT: a LoRA adapter on the published folder, trained, saved, reloaded, merged; and the example that does it."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from transformers import AutoModelForCausalLM, AutoTokenizer

from compat.published import conversations
from gpt2small_hf.peft_targets import LORA_TARGETS

peft = pytest.importorskip("peft")

# PEFT 0.21 reads a property that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

EXAMPLE = REPOSITORY / "examples" / "finetune_lora.py"


@pytest.fixture(scope="module")
def rows(published):
    tokenizer = AutoTokenizer.from_pretrained(published)
    texts = tokenizer.apply_chat_template(conversations(), tokenize=False)
    loud = [text.upper() for text in texts]  # new to the model
    return dict(tokenizer(loud, padding=True, truncation=True, max_length=64, return_tensors="pt"))


@pytest.fixture(scope="module")
def adapted(published, rows):
    """An adapter after ten steps, and its losses."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(published)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    losses = []
    for _ in range(10):
        loss = model(**rows, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.eval(), losses


@pytest.mark.slow
def test_adapter_on_every_linear_layer_learns_and_base_weights_stay(published, adapted):
    model, losses = adapted
    assert losses[-1] < 0.8 * losses[0]
    layers = {name.split(".lora_")[0].split(".model.")[-1] for name, p in model.named_parameters() if p.requires_grad}
    assert len(layers) == 2 * 6  # q, k, v, o, up and down of both layers, and not the head
    before = AutoModelForCausalLM.from_pretrained(published).state_dict()
    after = {name.replace(".base_layer", ""): weight for name, weight in model.base_model.model.state_dict().items()}
    assert [name for name, weight in before.items() if not torch.equal(weight, after[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", ["gpt2small_hf", "peft"])
def test_target_modules_have_defaults_in_any_import_order(first):
    code = f"""
import sys
import {first}
assert {first!r} == "peft" or "peft" not in sys.modules
import gpt2small_hf, peft
for settings in (peft.LoraConfig(), peft.IA3Config()):
    model = gpt2small_hf.GPT2SmallForCausalLM(gpt2small_hf.GPT2SmallConfig(
        vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=4))
    adapted = peft.get_peft_model(model, settings)
    print(sorted(adapted.peft_config["default"].target_modules))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [str(list(LORA_TARGETS)), "['down_proj', 'k_proj', 'v_proj']"]


@torch.no_grad()
def test_a_saved_adapter_comes_back_equal(published, adapted, rows, tmp_path):
    model, _ = adapted
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(published), tmp_path).eval()
    plain = AutoModelForCausalLM.from_pretrained(published).eval()
    assert torch.equal(again(**rows).logits, model(**rows).logits)
    assert (again(**rows).logits - plain(**rows).logits).abs().max() > 0.1


@torch.no_grad()
def test_a_merged_model_scores_the_same_and_keeps_its_code(published, adapted, rows, tmp_path):
    model, _ = adapted
    model.save_pretrained(tmp_path / "adapter")
    copy = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(published), tmp_path / "adapter")
    copy.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert (merged(**rows).logits - model(**rows).logits).abs().max() < 1e-5
    code = {path.name for path in published.glob("*.py")}
    assert {path.name for path in (tmp_path / "merged").glob("*.py")} == code
    assert len(code) == 4


@pytest.mark.slow
def test_lora_example_needs_no_package_of_ours_and_lowers_the_loss(published, without_package, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(turn["content"].upper() for chat in conversations() for turn in chat))
    start = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    words = (str(EXAMPLE), str(published), "--text", str(text), "--output_dir", str(tmp_path / "out"))
    done = subprocess.run(**without_package(start, *words, "--max_steps", "20"), capture_output=True)
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.findall(r"([\d.]+) (?:before|after)", done.stdout))
    assert after < before - 0.1

    # What it wrote loads in a fresh process, in three ways, to one and the same model.
    check = """
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM
adapter, whole, base = sys.argv[1:]
models = [
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True), adapter),
    AutoPeftModelForCausalLM.from_pretrained(adapter, trust_remote_code=True),
    AutoModelForCausalLM.from_pretrained(whole, trust_remote_code=True),
]
assert "transformers_modules" in type(models[2]).__module__
ids = torch.arange(40)[None]
one, two, three = [model.eval()(ids).logits for model in models]
print((one - two).abs().max().item(), (one - three).abs().max().item())
"""
    folders = (str(tmp_path / "out" / "adapter"), str(tmp_path / "out" / "merged"), str(published))
    done = subprocess.run(**without_package(check, *folders), capture_output=True)
    assert done.returncode == 0, done.stderr
    between_adapters, to_merged = map(float, done.stdout.split())
    assert between_adapters == 0
    assert to_merged < 1e-5


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["no/such/folder"], "no/such/folder is neither a model folder nor a Hub id"),
        (["MODEL", "--text", "absent.txt"], "absent.txt"),
        (["MODEL", "--text", "bad.jsonl"], 'bad.jsonl needs on every line an object with a string field "text"'),
        (["MODEL", "--text", "number.jsonl"], 'number.jsonl needs on every line an object with a string field "text"'),
        (["MODEL", "--text", "short.txt"], "The 1 documents are too little text"),
        (["MODEL", "--text", "latin.txt"], "latin.txt is not UTF-8"),
        (["MODEL", "--max_steps", "0"], "--max_steps is 0. Give 1 or more."),
        (["MODEL", "--seq_len", "4"], "--seq_len is 4. Give 8 or more."),
        (["MODEL", "--learning_rate", "-1"], "--learning_rate is -1. Give a number above 0."),
        (["MODEL", "--output_dir", "done"], "done already contains an adapter"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_lora_example_reports_user_errors_in_one_line(words, complaint, published, tmp_path, monkeypatch, capsys):
    Path(tmp_path, "bad.jsonl").write_text('{"words": "no field text"}\n')
    Path(tmp_path, "number.jsonl").write_text('{"text": 7}\n')
    Path(tmp_path, "short.txt").write_text("One line.\n")
    Path(tmp_path, "latin.txt").write_bytes("schön".encode("latin-1"))
    Path(tmp_path, "done", "adapter").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["finetune_lora.py", *(str(published) if w == "MODEL" else w for w in words)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    line = said.splitlines()[-1]  # above it may stand the library's bar for loading weights
    assert line.startswith("error: ")
    assert complaint in line
