"""The model as a graph, by transformers' own exporters: torch.export, and ONNX run by onnxruntime."""

import pytest
import torch
from torch.export import Dim
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

from compat.published import CONTEXT, QUESTION

# PyTorch 2.13's ONNX exporter uses what its own pytree module has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")

SHAPES = {name: {0: Dim("batch"), 1: Dim("seq", max=CONTEXT)} for name in ("input_ids", "attention_mask")}


@pytest.fixture(scope="module")
def model(published):
    return AutoModelForCausalLM.from_pretrained(published).eval()


def batch(*lengths):
    """Rows of these many real tokens, padded on the left to the longest."""
    width = max(lengths)
    torch.manual_seed(sum(lengths))
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    return {"input_ids": torch.randint(1, 300, mask.shape) * mask, "attention_mask": mask}


BATCHES = [batch(8, 8), batch(11, 3, 7), batch(1), batch(100), batch(CONTEXT, 60)]


def exported_for(exporter, config, model):
    """The exported model; `model` itself is left as it was."""
    use_cache, model.config.use_cache = model.config.use_cache, False
    try:
        return exporter.export(model, batch(9, 6), config)
    finally:
        model.config.use_cache = use_cache


@torch.no_grad()
def difference(logits, model, inputs):
    """Largest difference at the real tokens."""
    real = inputs["attention_mask"].bool()
    return (torch.as_tensor(logits) - model(**inputs).logits)[real].abs().max().item()


@pytest.mark.slow
def test_one_torch_export_serves_every_shape_and_can_be_stored(model, tmp_path):
    exported = exported_for(DynamoExporter(), DynamoConfig(dynamic=True, dynamic_shapes=SHAPES), model)
    torch.export.save(exported.program, tmp_path / "model.pt2")
    run = torch.export.load(tmp_path / "model.pt2").module()
    for inputs in BATCHES:
        assert difference(run(**inputs).logits, model, inputs) < 1e-5
    with pytest.raises((AssertionError, RuntimeError), match="128"):
        run(**batch(CONTEXT + 1))


@pytest.fixture(scope="module")
def session(model, tmp_path_factory):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    folder = tmp_path_factory.mktemp("onnx")
    exported_for(OnnxExporter(), OnnxConfig(dynamic=True, dynamic_shapes=SHAPES), model).save_pretrained(folder)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    return runtime.InferenceSession(str(folder / "model.onnx"), options)


def run(session, inputs):
    (logits,) = session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})
    return logits


@pytest.mark.slow
def test_onnxruntime_gives_the_same_logits_at_every_shape(session, model):
    for inputs in BATCHES:
        assert difference(run(session, inputs), model, inputs) < 1e-5


@pytest.mark.slow
def test_a_greedy_loop_over_onnxruntime_writes_what_generate_writes(session, model, published):
    tokenizer = AutoTokenizer.from_pretrained(published, padding_side="left")
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in (QUESTION, "What?")
    ]
    inputs = dict(tokenizer(prompts, padding=True, return_tensors="pt"))
    written = model.generate(**inputs, max_new_tokens=16, do_sample=False, eos_token_id=None)
    for _ in range(16):
        chosen = torch.as_tensor(run(session, inputs))[:, -1].argmax(-1, keepdim=True)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], chosen], 1)
        inputs["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(chosen)], 1)
    assert torch.equal(inputs["input_ids"], written)
