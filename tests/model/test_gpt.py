"""The plain core: usable alone, the same numbers as the wrapper and as GPT-2."""

import subprocess
import sys

import pytest
import torch
from conftest import tiny_config
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gpt2small_hf import GPT, GPT2SmallForCausalLM
from gpt2small_hf.model import cpu_linear
from gpt2small_hf.model.gpt import explicit_attention, fused_attention, init_std

VARIANTS = [{}, {"tie_word_embeddings": True}, {"attention_bias": True}]


@pytest.mark.slow
def test_core_needs_nothing_but_pytorch():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import gpt; assert 'transformers' not in sys.modules"
    from gpt2small_hf.model import gpt

    folder = gpt.__file__.rpartition("/")[0]
    subprocess.run([sys.executable, "-c", code, folder], check=True)


def test_core_trains_in_ten_lines_of_pytorch():
    torch.manual_seed(0)
    model = GPT(tiny_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.arange(64).view(4, 16)  # each token is followed by the next number
    for _ in range(60):
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_core_and_wrapper_are_equal_to_the_bit_without_onednn(variant, monkeypatch):
    monkeypatch.setattr(cpu_linear, "ONEDNN", False)
    torch.manual_seed(0)
    core = GPT(tiny_config(**variant)).eval()
    torch.manual_seed(0)
    wrapper = GPT2SmallForCausalLM(tiny_config(**variant)).eval()
    ids = torch.randint(0, 101, (3, 32))
    assert list(core.state_dict()) == list(wrapper.state_dict())
    wrapper.load_state_dict(core.state_dict())
    assert torch.equal(core(ids), wrapper(ids).logits)


def test_changing_a_token_leaves_earlier_logits_unchanged(tiny_model):
    core = GPT(tiny_config()).eval()
    ids = torch.randint(0, 101, (1, 20))
    changed = ids.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 101
    before, after = core(ids), core(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_both_attention_functions_agree():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind(0)
    module = torch.nn.Module()
    fused, _ = fused_attention(module, q, k, v, None, scaling=0.3)
    explicit, weights = explicit_attention(module, q, k, v, None, scaling=0.3)
    torch.testing.assert_close(fused, explicit)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9))
    assert weights.triu(1).count_nonzero() == 0


def test_row_longer_than_the_context_is_refused_with_both_lengths():
    with pytest.raises(ValueError, match="33 positions, the model takes 32"):
        GPT(tiny_config())(torch.zeros(1, 33, dtype=torch.long))


@pytest.mark.parametrize("scheme", ["gpt2", "small_init", "torch_normal"])
def test_residual_projections_start_smaller_by_the_square_root_of_twice_the_depth(scheme):
    config = tiny_config(hidden_size=128, num_hidden_layers=8, init_scheme=scheme)
    torch.manual_seed(0)
    block = GPT(config).model.layers[3]
    std = init_std(config)
    assert block.self_attn.q_proj.weight.std().item() == pytest.approx(std, rel=0.05)
    assert block.mlp.up_proj.weight.std().item() == pytest.approx(std, rel=0.05)
    assert block.self_attn.o_proj.weight.std().item() == pytest.approx(std / 4, rel=0.05)
    assert block.mlp.down_proj.weight.std().item() == pytest.approx(std / 4, rel=0.05)
    assert block.self_attn.o_proj.bias.abs().sum() == 0


def test_torch_scheme_is_what_pytorch_draws():
    config = tiny_config(hidden_size=128, init_scheme="torch")
    torch.manual_seed(0)
    core = GPT(config)
    assert core.model.embed_tokens.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert core.model.layers[0].mlp.up_proj.weight.abs().max().item() <= 128**-0.5


@pytest.mark.slow
@pytest.mark.parametrize("variant", [{}, {"tie_word_embeddings": True}], ids=str)
def test_loss_at_init_is_within_two_percent_of_guessing(variant):
    config = tiny_config(
        vocab_size=50257, hidden_size=768, num_attention_heads=12, max_position_embeddings=1024, **variant
    )
    torch.manual_seed(0)
    model = GPT2SmallForCausalLM(config).eval()
    ids = torch.randint(0, 50257, (3, 700))  # below two thousand labels chance alone moves the mean by percents
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss == pytest.approx(torch.log(torch.tensor(50257.0)).item(), rel=0.02)


def test_flops_are_counted_and_a_wrong_shape_is_pytorchs_own_error():
    ids = torch.zeros(2, 8, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        GPT2SmallForCausalLM(tiny_config())(ids)
    matrices = 2 * (4 * 16 * 16 + 2 * 16 * 64) + 16 * 101
    assert counter.get_total_flops() >= 2 * ids.numel() * matrices
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        cpu_linear.Linear(6, 4)(torch.randn(2, 5))
