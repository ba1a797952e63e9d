"""The linear layers that call oneDNN: PyTorch's results, gradients and errors, and a switch that turns them off."""

from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch
from torch import nn

from gpt2small_hf.model import cpu_linear
from gpt2small_hf.model.cpu_linear import ONEDNN, Linear

needs_onednn = pytest.mark.skipif(not ONEDNN, reason="PyTorch's own choice is kept on this processor")


@needs_onednn
def test_linear_layers_compute_through_onednn_what_pytorch_computes(monkeypatch):
    torch.manual_seed(0)
    layer, plain = Linear(24, 40), nn.Linear(24, 40)
    plain.load_state_dict(layer.state_dict())
    taken = []
    to_mkldnn = torch.Tensor.to_mkldnn
    monkeypatch.setattr(torch.Tensor, "to_mkldnn", lambda x: (taken.append(x.dtype), to_mkldnn(x))[1])
    x = torch.randn(2, 5, 24, requires_grad=True)
    results = [module(x) for module in (layer, plain)]
    gradients = [
        torch.autograd.grad(y.square().mean(), (x, *m.parameters()))
        for m, y in zip((layer, plain), results, strict=True)
    ]
    for ours, theirs in zip((results[0], *gradients[0]), (results[1], *gradients[1]), strict=True):
        assert ours.layout == torch.strided
        torch.testing.assert_close(ours, theirs)
    assert taken == [torch.float32] * 3  # forward, and both gradients
    # What oneDNN would be slow at, or could not do, stays with PyTorch:
    layer(torch.randn(0, 24))
    layer(torch.randn(24))
    layer.weight.data = layer.weight.data.t().contiguous().t()
    layer(x)
    layer.to(torch.bfloat16)(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        Linear(24, 40)(x)
    torch.func.functional_call(Linear(24, 40), plain.state_dict(), (x,))
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    Linear(24, 40)(x)
    assert len(taken) == 3


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
def test_linear_layers_differentiate_in_every_way_that_pytorchs_do():
    torch.manual_seed(0)
    layer, plain = Linear(6, 4), nn.Linear(6, 4)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 6)

    def each_way(module):
        def total(x):
            return module(x).square().sum()

        y, leaf = module(x), x.clone().requires_grad_()
        yield torch.func.grad(total)(x)
        yield torch.func.vjp(module, x)[1](torch.ones(3, 4))[0]
        yield torch.func.jacrev(module)(x)
        yield torch.vmap(module)(x[:, None])
        yield torch.autograd.functional.jacobian(module, x, vectorize=True)
        yield torch.autograd.grad(module(leaf), leaf, torch.eye(12).view(12, 3, 4), is_grads_batched=True)[0]
        first = torch.autograd.grad(total(leaf), leaf, create_graph=True)[0]
        yield torch.autograd.grad(first.sum(), leaf)[0]
        with torch.autocast("cpu", torch.bfloat16):  # the forward was in float32
            under_autocast = torch.autograd.grad(y.sum(), module.weight)[0]
        yield under_autocast  # outside: it would stay on in whatever runs between two steps of this generator

    for way, (ours, theirs) in enumerate(zip(each_way(layer), each_way(plain), strict=True)):
        torch.testing.assert_close(ours, theirs, msg=lambda text, way=way: f"way {way}: {text}")


@needs_onednn
@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True)])
def test_environment_variable_turns_onednn_off(value, expected, monkeypatch):
    monkeypatch.setenv("GPT2SMALL_ONEDNN", value)
    spec = spec_from_file_location("cpu_linear_again", cpu_linear.__file__)
    again = module_from_spec(spec)
    spec.loader.exec_module(again)
    calls = []
    monkeypatch.setattr(again, "onednn", lambda *tensors: (calls.append(1), nn.functional.linear(*tensors))[1])
    with torch.no_grad():
        again.Linear(6, 4)(torch.randn(2, 6))
    assert bool(calls) is expected
