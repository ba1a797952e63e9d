"""The lower bound of memory equals what a real run holds, and refuses only runs that cannot fit."""

import pytest
import torch
from conftest import REPOSITORY, tiny_config

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.config.resolve import read_config
from gpt2small_hf.errors import UsageError
from gpt2small_hf.training import budget
from gpt2small_hf.training.memory import check_memory, machine_bytes

TINY = REPOSITORY / "examples" / "tiny.yaml"


def read(*words):
    return read_config(list(words), TINY)


def held_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.ndim)  # steps are counted apart


def test_memory_of_weights_gradients_and_adamw_is_exact():
    model = GPT2SmallForCausalLM(tiny_config())
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    held = [tensor for p in model.parameters() for tensor in (p, p.grad, *optimizer.state[p].values())]
    n = budget.sizes(model.config).total
    assert budget.memory_bytes(n, model.config, read(), trains=True) == held_bytes(held)
    assert budget.memory_bytes(n, model.config, read(), trains=False) == held_bytes(model.parameters())


def test_run_is_refused_from_the_first_size_that_cannot_fit(monkeypatch):
    sizes = ("--hidden_size", "1024", "--max_position_embeddings", "64", "--use_cpu")
    monkeypatch.setattr("gpt2small_hf.training.memory.machine_bytes", lambda: 2**31)
    counts = [budget.sizes(tiny_config(hidden_size=1024, num_hidden_layers=n)).total for n in range(1, 13)]
    most = sum(16 * count <= 2**31 for count in counts)
    assert 0 < most < 12
    refusal = r"takes at least [\d,.]+ [GT]iB for .* parameters; this machine has"
    check_memory(read(*sizes), tiny_config(hidden_size=1024, num_hidden_layers=most))
    with pytest.raises(UsageError, match=refusal):
        check_memory(read(*sizes), tiny_config(hidden_size=1024, num_hidden_layers=most + 1))
    check_memory(read(*sizes, "--num_hidden_layers", str(most - 1)))  # without torch, by the lower bound
    with pytest.raises(UsageError, match=refusal):
        check_memory(read(*sizes, "--num_hidden_layers", str(most + 1)))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"hidden_size": 64, "intermediate_size": 16}])
def test_least_parameters_is_a_lower_bound(changes):
    config = tiny_config(vocab_size=1000, **changes)
    assert 0.5 * budget.sizes(config).total < config.least_parameters() < budget.sizes(config).total


def test_base_model_is_not_checked_by_the_sizes_of_a_new_one(monkeypatch):
    monkeypatch.setattr("gpt2small_hf.training.memory.machine_bytes", lambda: 2**30)
    words = ("--use_cpu", "--hidden_size", "768", "--num_hidden_layers", "12", "--num_attention_heads", "12")
    with pytest.raises(UsageError, match="this machine has"):
        check_memory(read(*words))
    check_memory(read("--use_cpu", "--init_from", "runs/tiny"))
    with pytest.raises(UsageError, match="this machine has"):  # once they are known
        check_memory(read("--use_cpu", "--init_from", "runs/tiny"), tiny_config(hidden_size=1024, vocab_size=50257))


@pytest.mark.parametrize(
    "allowed", [("--optim", "adafactor", "--use_cpu"), ("--optim", "adamw_torch"), ("--optim", "sgd", "--use_cpu")]
)
def test_run_that_may_fit_on_a_gpu_or_with_less_state_is_not_refused(allowed):
    """Without --use_cpu there may be a GPU, and the machine holds the weights alone."""
    layers = machine_bytes() // (16 * 12 * 1024**2) + 1
    sizes = ("--hidden_size", "1024", "--num_hidden_layers", str(layers))
    check_memory(read(*sizes, *allowed))
    with pytest.raises(UsageError, match="this machine has"):
        check_memory(read(*sizes, "--use_cpu"))


@pytest.mark.parametrize("shared", ["WORLD_SIZE", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_sharded_run_is_not_checked(shared, monkeypatch):
    huge = read("--hidden_size", "200000")
    with pytest.raises(UsageError):
        check_memory(huge)
    monkeypatch.setenv(shared, "8" if shared == "WORLD_SIZE" else "true")
    check_memory(huge)


def test_batch_that_cannot_fit_is_refused():
    args = read("--use_cpu")
    check_memory(args, batch_tokens=16 * 64)
    with pytest.raises(UsageError, match=r"batches of 1,000,000,000,000 tokens.*Lower --per_device_train_batch_size"):
        check_memory(args, batch_tokens=10**12)
