# Copyright 2026 the authors of gpt2small_hf. Licensed under the Apache License, Version 2.0.
"""Linear layers in float32 on x86 CPUs, computed by oneDNN.

With the environment variable GPT2SMALL_ONEDNN=0 at import these are `nn.Linear`: the same model up to rounding, slower.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ONEDNN = (
    os.environ.get("GPT2SMALL_ONEDNN") != "0"
    and torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability().startswith("AVX")
)


class Linear(nn.Linear):
    """`nn.Linear`, computed by oneDNN where PyTorch itself would leave float32 on an x86 CPU to MKL.

    On AMD's processors that is 1.2 to 3 times as fast, for one row as for thousands, forward and backward. What PyTorch
    offers to turn oneDNN off turns this off too: `torch.backends.mkldnn.flags(enabled=False)`. PyTorch's profiler does
    not count its FLOPs; `FlopCounterMode` does, because under such modes this is `nn.Linear`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) → (..., out_features)."""
        if (
            ONEDNN
            and input.device.type == "cpu"
            and input.dtype is torch.float32
            # Other kinds of weights (sharded, quantised, those of functional calls) have their own ways.
            and type(self.weight) is nn.Parameter
            and self.weight.dtype is torch.float32
            and self.weight.is_contiguous()
            and input.ndim > 1
            and input.numel() > 0
            and torch.backends.mkldnn.enabled
            and not torch.is_autocast_enabled("cpu")
            # Compilers and dispatch modes must see PyTorch's own operation.
            and not torch.compiler.is_compiling()
            and not watchers()
        ):
            if not torch.is_grad_enabled():  # `apply` inspects a signature: a fifth of a tiny model's time
                return onednn(input, self.weight, self.bias)
            return OneDNNLinear.apply(input, self.weight, self.bias)
        return super().forward(input)


class OneDNNLinear(torch.autograd.Function):
    """`F.linear` in oneDNN, which keeps for the backward pass what PyTorch's keeps, and no copies of it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) → (..., out)."""
        return onednn(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what both gradients need."""
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input, the weight and the bias, as far as they are wanted."""
        input, weight = ctx.saved_tensors
        (gradient,) = gradients
        by_row = gradient.reshape(-1, gradient.shape[-1])  # (rows, out)
        for_input, for_weight, for_bias = ctx.needs_input_grad
        # oneDNN is slow where it is given strides, so that what is transposed is copied.
        return (
            onednn(gradient, weight.t().contiguous()) if for_input else None,
            onednn(by_row.t().contiguous(), input.reshape(-1, input.shape[-1]).t().contiguous())
            if for_weight
            else None,
            by_row.sum(0) if for_bias else None,
        )


def onednn(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` in float32, computed by oneDNN where it can: it takes no batched, sparse or misshapen tensors."""
    try:
        return F.linear(input.to_mkldnn(), weight, bias).to_dense()
    except RuntimeError:  # fall back to PyTorch, which raises its own errors
        return F.linear(input, weight, bias)


# The number of active dispatch modes, for which PyTorch has no public function.
watchers: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
