"""Training the Transformers face: compiled, in half precision, accumulated, tied, without logits; and loading.

Compiled graphs and losses without logits are held against the plain ones, those against GPT-2 and sums by hand.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.conversion.readers import as_gpt2
from gpt2small_hf.model.gpt import ROWS_AT_A_TIME, init_std

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def grown_model(**changes: Any) -> GPT2SmallForCausalLM:
    """A seeded model in training mode with weights larger than at init, biases included: differences would show."""
    torch.manual_seed(0)
    model = GPT2SmallForCausalLM(tiny_config(**changes)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def padded_batch(padding: str | None = None, length: int = 12, device: str = "cpu") -> dict[str, Tensor]:
    """Three rows with holes in their labels; under padding, of three lengths."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 100, (3, length), generator=generator)
    labels = ids.masked_fill(torch.rand(3, length, generator=generator) < 0.3, -100)
    inputs = {"input_ids": ids, "labels": labels}
    if padding is not None:
        mask = torch.ones_like(ids)
        for row, missing in enumerate((0, 2, 5)):
            mask[row, length - missing :] = 0
        if padding == "left":
            mask = mask.flip(1)
        inputs |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def loss_and_gradients(model: nn.Module, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float, rtol: float = 0.0) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(
            tensor, expected[name], atol=atol, rtol=rtol, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture
def compiled() -> Iterator[Callable[[nn.Module, str], Callable[..., Any]]]:
    """`torch.compile` of the whole graph, with nothing kept of or for other tests."""
    torch._dynamo.reset()
    yield lambda model, backend: torch.compile(model, fullgraph=True, backend=backend)
    torch._dynamo.reset()


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often PyTorch's chunked loss has run: the usual one in its place would give the right numbers too."""
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        pytest.skip("this PyTorch has no chunked loss")
    calls = []
    original = F.linear_cross_entropy
    monkeypatch.setattr(F, "linear_cross_entropy", lambda *a, **k: (calls.append(k["options"]), original(*a, **k))[1])
    return lambda: len([options for options in calls if options is not None])


# ---- compiled ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "padding"),
    [(True, "right"), *(pytest.param(False, kind, marks=pytest.mark.slow) for kind in (None, "left"))],
)
def test_compiled_forward_equals_eager_at_every_length(compiled, tied, padding):
    model = grown_model(tie_word_embeddings=tied).eval()
    faster = compiled(model, "aot_eager")
    for length in (12, 9, 32):  # the second length makes the shapes dynamic
        inputs = padded_batch(padding, length)
        with torch.no_grad():
            eager, ours = model(**inputs), faster(**inputs)
        torch.testing.assert_close(ours.logits, eager.logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.loss, eager.loss, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # PyTorch's own, as inductor starts
@pytest.mark.parametrize(
    ("tied", "padding", "backend", "device"),
    [
        (False, None, "aot_eager", "cpu"),
        (True, "right", "aot_eager", "cpu"),
        pytest.param(True, "right", "inductor", "cpu", marks=pytest.mark.slow),
        pytest.param(False, None, "inductor", "cuda", marks=on_gpu),
        pytest.param(True, "right", "inductor", "cuda", marks=on_gpu),
    ],
)
def test_compiled_training_steps_equal_eager_ones(compiled, tied, padding, backend, device):
    n_layers = 1 if (backend, device) == ("inductor", "cpu") else 2  # a C++ compiler takes 20 seconds a layer
    model = grown_model(tie_word_embeddings=tied, num_hidden_layers=n_layers).to(device)
    twin = copy.deepcopy(model)
    inputs = padded_batch(padding, device=device)
    losses = []
    for module, forward in ((model, model), (twin, compiled(twin, backend))):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(3):
            loss = forward(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0][2] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert_all_close(dict(twin.named_parameters()), dict(model.named_parameters()), atol=1e-5)


@pytest.mark.slow
def test_checkpointed_layers_compile_into_one_graph(compiled):
    model = grown_model()
    inputs = padded_batch("left")
    loss, gradients = loss_and_gradients(model, **inputs)
    model.activation_checkpointing_enable({"use_reentrant": False})
    its_loss, its_gradients = loss_and_gradients(compiled(model, "aot_eager"), **inputs, use_cache=False)
    torch.testing.assert_close(its_loss, loss)
    plain_names = {name.removeprefix("_orig_mod."): grad for name, grad in its_gradients.items()}
    assert_all_close(plain_names, gradients, atol=1e-6)


# ---- half precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_moves_loss_and_gradients_little_and_leaves_both_in_float32(dtype, attention, device):
    model = grown_model(attn_implementation=attention).to(device)
    inputs = padded_batch("left", device=device)
    loss, gradients = loss_and_gradients(model, **inputs)
    with torch.autocast(device, dtype):
        out = model(**inputs)
        model.zero_grad()
        out.loss.backward()
    assert out.logits.dtype is dtype  # else nothing was cast
    assert out.loss.dtype is torch.float32
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-2)
    for name, parameter in model.named_parameters():
        assert parameter.dtype is parameter.grad.dtype is torch.float32, name
        assert F.cosine_similarity(parameter.grad.flatten(), gradients[name].flatten(), dim=0) > 0.999, name
        assert parameter.grad.norm().item() == pytest.approx(gradients[name].norm().item(), rel=2e-2), name


# ---- the loss ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [37, 37.0, torch.tensor(37), torch.tensor(37.0)], ids=repr)
def test_loss_and_its_gradient_are_sums_over_labels_divided_by_the_number_of_items(items):
    model = grown_model()
    inputs = padded_batch("right")
    loss, gradients = loss_and_gradients(model, **inputs, num_items_in_batch=items)
    model.zero_grad()
    logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    chosen = logits[:, :-1].double().log_softmax(-1).gather(-1, inputs["labels"][:, 1:, None].clamp(min=0))[..., 0]
    by_hand = -(chosen * (inputs["labels"][:, 1:] != -100)).sum() / 37
    by_hand.backward()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert_all_close(gradients, {name: p.grad for name, p in model.named_parameters()}, atol=1e-6)


def test_row_without_labels_changes_neither_loss_nor_gradient():
    model = grown_model()
    inputs = padded_batch("right")
    loss, gradients = loss_and_gradients(model, **{name: tensor[:2] for name, tensor in inputs.items()})
    inputs["labels"][2] = -100
    its_loss, its_gradients = loss_and_gradients(model, **inputs)
    torch.testing.assert_close(its_loss, loss)
    assert_all_close(its_gradients, gradients, atol=1e-6)


@pytest.mark.parametrize("items", [None, 0, 5])
def test_batch_without_labels_gives_what_gpt2_gives(items):
    model = grown_model()
    theirs = as_gpt2(model.config, model.state_dict())
    inputs = padded_batch()
    inputs["labels"].fill_(-100)
    loss, gradients = loss_and_gradients(model, **inputs, num_items_in_batch=items)
    its_loss, _ = loss_and_gradients(theirs, **inputs, num_items_in_batch=items)
    torch.testing.assert_close(loss, its_loss, equal_nan=True)
    assert loss.isnan().item() is (items != 5)
    if items == 5:
        assert all(gradient.count_nonzero() == 0 for gradient in gradients.values())


# ---- Trainer ----------------------------------------------------------------------------------------------------


class Gradients(TrainerCallback):
    """Keeps what the optimizer is handed at each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append({name: p.grad.clone() for name, p in kwargs["model"].named_parameters()})


def unequal_rows() -> list[dict[str, Tensor]]:
    """Twenty-four rows, no two neighbours with as many labels: a mean of means would not be the mean."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(24):
        ids = torch.randint(0, 100, (16,), generator=generator)
        mask = (torch.arange(16) < 16 - i % 5).long()
        labels = ids.masked_fill((mask == 0) | (torch.arange(16) < 5 * i % 11), -100)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def trained(
    model: nn.Module, place: Path, rows: list[dict[str, Tensor]], skip_logits: bool | None = None, **settings: Any
) -> tuple[list[dict[str, float]], list[dict[str, Tensor]]]:
    """Three steps over the rows in their order; the lines of the log and the gradients."""
    args = TrainingArguments(
        output_dir=str(place),
        max_steps=3,
        train_sampling_strategy="sequential",
        learning_rate=1e-3,
        adam_epsilon=1e-4,  # usual ones blow rounding up to whole steps where a gradient is almost 0
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        **settings,
    )
    gradients = Gradients()
    trainer = Trainer(
        model,
        args,
        train_dataset=rows,
        data_collator=lambda chosen: default_data_collator(chosen) | {"skip_logits": skip_logits},
        callbacks=[gradients],
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line], gradients.steps


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
@TIED
def test_eight_accumulated_rows_are_a_batch_of_eight_in_log_gradient_and_weights(tmp_path, tied, max_grad_norm):
    model = grown_model(tie_word_embeddings=tied)
    twin = copy.deepcopy(model)
    rows = unequal_rows()
    inputs = {name: torch.stack([row[name] for row in rows[:8]]) for name in rows[0]}
    first_loss = model(**inputs).loss.item()
    settings = {"max_grad_norm": max_grad_norm}
    log, gradients = trained(model, tmp_path, rows, per_device_train_batch_size=8, **settings)
    settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    its_log, its_gradients = trained(twin, tmp_path, rows, **settings)
    assert log[0]["loss"] == pytest.approx(first_loss, abs=1e-5)
    assert [line["loss"] for line in its_log] == pytest.approx([line["loss"] for line in log], abs=1e-5)
    if max_grad_norm:
        norms = [line["grad_norm"] for line in log]
        assert min(norms) > max_grad_norm  # else clipping was not on
        assert [line["grad_norm"] for line in its_log] == pytest.approx(norms, abs=1e-5)
    for its_step, step in zip(its_gradients, gradients, strict=True):
        assert_all_close(its_step, step, atol=1e-6)
    assert_all_close(twin.state_dict(), model.state_dict(), atol=1e-5)


@pytest.mark.slow
def test_trainer_follows_gpt2_step_by_step(tmp_path):
    # With biases everywhere both have the same parameters; without dropout, the same arithmetic.
    model = grown_model(attention_bias=True)
    theirs = as_gpt2(model.config, model.state_dict()).train()
    rows = unequal_rows()
    for row in rows:  # the Trainer counts the first label, which is no target, for classes named like GPT2LMHeadModel
        row["labels"][0] = -100
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "weight_decay": 0.1}
    ours, gpt2 = (trained(each, tmp_path, rows, **settings)[0] for each in (model, theirs))
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in ours] == pytest.approx([line[name] for line in gpt2], abs=1e-5)


@pytest.mark.slow
def test_trainer_learns_the_same_without_logits(tmp_path, chunked):
    model = grown_model()
    twin = copy.deepcopy(model)
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    log, gradients = trained(model, tmp_path, unequal_rows(), **settings)
    assert chunked() == 0
    its_log, its_gradients = trained(twin, tmp_path, unequal_rows(), skip_logits=True, **settings)
    assert chunked() == 3 * 4
    assert [line["loss"] for line in its_log] == pytest.approx([line["loss"] for line in log], abs=1e-5)
    for its_step, step in zip(its_gradients, gradients, strict=True):
        assert_all_close(its_step, step, atol=1e-6)


def test_fused_adamw_takes_the_steps_of_plain_adamw():
    model = grown_model(tie_word_embeddings=True)
    twin = copy.deepcopy(model)
    for module, fused in ((model, False), (twin, True)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)
        for _ in range(3):
            loss_and_gradients(module, **padded_batch("right"))
            optimizer.step()
    assert_all_close(dict(twin.named_parameters()), dict(model.named_parameters()), atol=1e-6)


# ---- dropout ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("which", ["embd_pdrop", "attn_pdrop", "resid_pdrop"])
def test_each_dropout_follows_the_seed_in_training_and_is_off_in_evaluation(which, attention):
    model = grown_model(**{which: 0.3}, attn_implementation=attention)
    plain = GPT2SmallForCausalLM(tiny_config(attn_implementation=attention)).eval()
    plain.load_state_dict(model.state_dict())
    inputs = padded_batch("right")
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(model(**inputs).logits)
    assert torch.equal(seen[0], seen[1])
    assert not torch.allclose(seen[0], seen[2])
    assert torch.equal(model.eval()(**inputs).logits, plain(**inputs).logits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_drop_the_same_again(reentrant):
    model = grown_model(embd_pdrop=0.3, attn_pdrop=0.3, resid_pdrop=0.3)
    inputs = padded_batch("right")
    torch.manual_seed(1)
    loss, gradients = loss_and_gradients(model, **inputs)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(1)
    its_loss, its_gradients = loss_and_gradients(model, **inputs, use_cache=False)
    torch.testing.assert_close(its_loss, loss)
    assert_all_close(its_gradients, gradients, atol=1e-6)


# ---- tied weights -----------------------------------------------------------------------------------------------


def test_gradient_of_a_tied_weight_is_the_sum_of_both_its_uses():
    tied, untied = grown_model(tie_word_embeddings=True), grown_model()
    untied.load_state_dict(tied.state_dict())
    inputs = padded_batch("left")
    loss, gradients = loss_and_gradients(tied, **inputs)
    its_loss, its_gradients = loss_and_gradients(untied, **inputs)
    torch.testing.assert_close(loss, its_loss)
    head = its_gradients.pop("lm_head.weight")
    assert head.norm() > 0
    assert its_gradients["model.embed_tokens.weight"].norm() > 0
    its_gradients["model.embed_tokens.weight"] += head
    assert_all_close(gradients, its_gradients, atol=1e-6)


@pytest.mark.slow
def test_tied_weights_stay_one_through_training_saving_and_loading(tmp_path):
    model = grown_model(tie_word_embeddings=True)
    before = model.lm_head.weight.detach().clone()
    trained(model, tmp_path, unequal_rows(), per_device_train_batch_size=8)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not torch.allclose(model.lm_head.weight, before)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again = GPT2SmallForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert_all_close(again.state_dict(), model.state_dict(), atol=0)
    trained(again, tmp_path, unequal_rows(), per_device_train_batch_size=8)
    assert again.lm_head.weight is again.model.embed_tokens.weight


# ---- what loading initialises -----------------------------------------------------------------------------------


def assert_freshly_initialised(name: str, tensor: Tensor, config: Any) -> None:
    tensor = tensor.float()
    if "norm" in name or name.endswith("bias"):
        assert tensor.unique().tolist() == [float("norm" in name and name.endswith("weight"))], name
        return
    std = init_std(config)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= (2 * config.num_hidden_layers) ** 0.5
    assert tensor.std().item() == pytest.approx(std, rel=0.1), name
    assert tensor.mean().abs().item() < std / 10, name


@pytest.mark.parametrize("way", [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}], ids=str)
@pytest.mark.parametrize(
    "missing",
    [
        *("model.norm.", "model.norm.bias", "model.embed_positions.", "model.embed_tokens.", "lm_head."),
        *("model.layers.1.", "model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_what_a_file_lacks_is_initialised_and_all_else_is_loaded_to_the_bit(tmp_path, missing, way):
    model = grown_model(hidden_size=64, attention_bias=True)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(missing)}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    again, info = GPT2SmallForCausalLM.from_pretrained(tmp_path, **way, output_loading_info=True)
    assert set(info["missing_keys"]) == weights.keys() - kept.keys()
    for name, tensor in again.state_dict().items():
        assert tensor.dtype is way.get("dtype", torch.float32)
        assert tensor.device.type == "cpu"
        if name in kept:
            assert torch.equal(tensor, kept[name].to(tensor.dtype)), name
        else:
            assert_freshly_initialised(name, tensor, model.config)


def test_tied_file_may_name_the_head_instead_of_the_embedding(tmp_path):
    model = grown_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    again = GPT2SmallForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@TIED
def test_every_way_of_loading_gives_the_same_bits(tmp_path, tied, dtype):
    model = grown_model(tie_word_embeddings=tied).to(dtype).eval()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    inputs = padded_batch("left")
    expected = model(**inputs)
    disk = {"model.embed_tokens": "cpu", "model.embed_positions": "cpu", "model.embed_dropout": "cpu"}
    disk |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    disk |= {"lm_head": "cpu" if tied else "disk"}
    ways = [{}, {"device_map": "cpu"}, {"device_map": "auto"}, {"device_map": disk, "offload_folder": tmp_path / "off"}]
    for way in ways:
        again = GPT2SmallForCausalLM.from_pretrained(tmp_path, dtype="auto", **way)
        out = again(**inputs)
        assert out.logits.dtype is dtype
        assert torch.equal(out.logits, expected.logits), way
        # On disk the head's weight is fetched for its own forward alone.
        torch.testing.assert_close(again(**inputs, skip_logits=True).loss, expected.loss, rtol=2e-3, atol=0)
        texts = [m.generate(inputs["input_ids"], max_new_tokens=5, do_sample=False) for m in (model, again)]
        assert torch.equal(*texts), way


@TIED
def test_model_made_without_memory_is_filled_or_initialised_later(tied):
    model = grown_model(tie_word_embeddings=tied, hidden_size=64).eval()
    with torch.device("meta"):
        empty, other = GPT2SmallForCausalLM(model.config), GPT2SmallForCausalLM(model.config)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    assert not list(empty.buffers())  # one that no file holds would be lost on the way
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.tie_weights()
    assert (empty.lm_head.weight is empty.model.embed_tokens.weight) is tied
    inputs = padded_batch("left")
    assert torch.equal(empty.eval()(**inputs).logits, model(**inputs).logits)
    other.to_empty(device="cpu")
    other.apply(other._init_weights)
    for name, tensor in other.state_dict().items():
        assert_freshly_initialised(name, tensor, model.config)


# ---- loss without logits ----------------------------------------------------------------------------------------


def many_rows(device: str = "cpu") -> dict[str, Tensor]:
    """More positions than the chunked loss takes at a time; holes in the labels, one of them wider than a chunk."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 100, (50, 32), generator=generator)
    labels = ids.masked_fill(torch.rand(50, 32, generator=generator) < 0.3, -100)
    labels[12:40] = -100
    assert labels[12:40].numel() > ROWS_AT_A_TIME
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def assert_skipping_changes_nothing(model: GPT2SmallForCausalLM, atol: float = 1e-6, **inputs: Any) -> None:
    loss, gradients = loss_and_gradients(model, **inputs)
    out = model(**inputs, skip_logits=True)
    assert out.logits is None
    assert out.loss.dtype is torch.float32
    torch.testing.assert_close(out.loss.detach(), loss, atol=atol, rtol=0, equal_nan=True)
    model.zero_grad()
    out.loss.backward()
    assert_all_close({name: p.grad for name, p in model.named_parameters()}, gradients, atol=atol)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("items", [None, 300, torch.tensor(300), torch.tensor(300.0)], ids=repr)
@TIED
def test_loss_without_logits_has_the_same_value_and_gradients(chunked, tied, items, device):
    model = grown_model(tie_word_embeddings=tied).to(device)
    assert_skipping_changes_nothing(model, **many_rows(device), num_items_in_batch=items)
    assert chunked() > 0


@pytest.mark.parametrize(("masked", "items"), [(slice(0, 1), None), *((slice(None), items) for items in (None, 0, 5))])
def test_loss_without_logits_treats_rows_without_labels_alike(masked, items):
    inputs = padded_batch("left")
    inputs["labels"][masked] = -100
    assert_skipping_changes_nothing(grown_model(), **inputs, num_items_in_batch=items)


def test_loss_without_logits_takes_labels_that_are_shifted_already(chunked):
    inputs = many_rows()
    model = grown_model()
    shifted = inputs["labels"].flip(0)
    assert_skipping_changes_nothing(model, **inputs, shift_labels=shifted)
    assert chunked() > 0
    usual = model(**inputs, skip_logits=True).loss
    assert (model(**inputs, shift_labels=shifted, skip_logits=True).loss - usual).abs() > 1e-3


@pytest.mark.parametrize("frozen", ["model", "lm_head"])
def test_loss_without_logits_trains_what_is_not_frozen(chunked, frozen):
    model = grown_model()
    model.get_submodule(frozen).requires_grad_(False)
    inputs = many_rows()
    gradients = []
    for skip in (False, True):
        model.zero_grad()
        model(**inputs, skip_logits=skip).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert chunked() > 0
    assert gradients[0]
    assert_all_close(gradients[1], gradients[0], atol=1e-6)


def test_losses_without_logits_may_be_scaled_and_summed(chunked):
    model = grown_model()
    a, b = many_rows(), padded_batch("left")
    gradients = []
    for skip in (False, True):  # as a gradient scaler does in float16
        model.zero_grad()
        (1024 * model(**a, skip_logits=skip).loss + 3 * model(**b, skip_logits=skip).loss).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert chunked() > 0
    assert_all_close(gradients[1], gradients[0], atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["bfloat16 parameters", "bfloat16 autocast", "float16 autocast"])
def test_loss_without_logits_is_near_the_usual_one_in_half_precision(chunked, how, device):
    dtype = torch.float16 if how == "float16 autocast" else torch.bfloat16
    model = grown_model().to(device)
    if how == "bfloat16 parameters":
        model.to(dtype)
    inputs = many_rows(device)
    losses, gradients = [], []
    for skip in (False, True):
        model.zero_grad()
        with torch.autocast(device, dtype, enabled=how.endswith("autocast")):
            losses.append(model(**inputs, skip_logits=skip).loss)
        losses[-1].backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert chunked() > 0
    assert losses[1].dtype is torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=0)
    for name, gradient in gradients[1].items():
        usual = gradients[0][name]
        assert gradient.dtype is usual.dtype is model.get_parameter(name).dtype, name
        assert F.cosine_similarity(gradient.float().flatten(), usual.float().flatten(), dim=0) > 0.999, name
        assert gradient.norm().item() == pytest.approx(usual.norm().item(), rel=1e-2), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_loss_without_logits_goes_with_gradient_checkpointing(chunked, reentrant):
    model = grown_model()
    inputs = many_rows()
    _, gradients = loss_and_gradients(model, **inputs)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    _, its_gradients = loss_and_gradients(model, **inputs, skip_logits=True, use_cache=False)
    assert chunked() > 0
    assert_all_close(its_gradients, gradients, atol=1e-6)


@pytest.mark.slow
def test_skipping_logits_still_compiles_into_one_graph(compiled):
    model = grown_model()
    inputs = padded_batch("left")
    loss, gradients = loss_and_gradients(model, **inputs)
    out = compiled(model, "aot_eager")(**inputs, skip_logits=True)
    assert out.logits is None
    model.zero_grad()
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), loss)
    assert_all_close({name: p.grad for name, p in model.named_parameters()}, gradients, atol=1e-6)


class LowRank(nn.Linear):
    """A Linear that adds a product of two thin matrices, as adapters do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.thin = nn.Parameter(torch.randn(2, base.in_features))
        self.wide = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.thin.t() @ self.wide.t()


def adapt(model: GPT2SmallForCausalLM) -> None:
    model.lm_head = LowRank(model.lm_head)


def wrap(model: GPT2SmallForCausalLM) -> None:
    model.lm_head = nn.Sequential(model.lm_head, nn.Linear(101, 101))


def hook(model: GPT2SmallForCausalLM) -> None:
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * 0.5)


def parametrise(model: GPT2SmallForCausalLM) -> None:
    nn.utils.parametrizations.weight_norm(model.lm_head)


@pytest.mark.parametrize("change", [adapt, wrap, hook, parametrise])
def test_chunked_loss_is_not_used_when_the_head_is_replaced(change):
    model = grown_model()
    inputs = many_rows()
    usual = model(**inputs).loss
    change(model)
    assert_skipping_changes_nothing(model, **inputs)
    if change is not parametrise:  # which changes what is trained, not what is computed
        assert (model(**inputs, skip_logits=True).loss - usual).abs() > 1e-3


def test_loss_function_of_ones_own_is_called_with_or_without_logits():
    model = grown_model()
    model.loss_function = lambda logits, labels, **kwargs: logits.square().mean()
    assert_skipping_changes_nothing(model, **many_rows())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("skip", [None, False])
def test_logits_come_unless_they_are_declined(skip, training):
    model = grown_model().train(training)
    out = model(**many_rows(), skip_logits=skip)
    assert out.logits.shape == (50, 32, 101)
    assert out.loss.isfinite()


def test_without_labels_there_are_logits_whatever_is_declined():
    model = grown_model().eval()
    ids = many_rows()["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids, skip_logits=True).logits, model(ids).logits)


def test_evaluation_without_logits_gives_the_same_loss(chunked):
    model = grown_model().eval()
    with torch.no_grad():
        out = model(**many_rows(), skip_logits=True)
        torch.testing.assert_close(out.loss, model(**many_rows()).loss, atol=1e-6, rtol=0)
    assert out.logits is None
    assert chunked() > 0


def test_loss_without_logits_never_holds_them(chunked):
    torch.manual_seed(0)
    model = GPT2SmallForCausalLM(tiny_config(vocab_size=1999))
    ids = torch.randint(0, 1999, (128, 32))
    largest, peak = {}, {}
    for skip in (False, True):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            model(ids, labels=ids, skip_logits=skip, use_cache=False).loss.backward()
        model.zero_grad()
        changes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        largest[skip], peak[skip] = max(changes), max(itertools.accumulate(changes))
    logits = ids.numel() * 1999 * 4
    assert largest[False] == logits  # the measure sees them where they are
    assert largest[True] <= ROWS_AT_A_TIME * 1999 * 4 < logits / 7
    assert peak[True] < logits < peak[False] / 2
