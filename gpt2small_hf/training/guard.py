"""Gradients and losses of a step → good, or which kind of bad. The Trainer subclass asks, and skips a bad step.

One bad step ruins all weights: clipping does not protect (it makes NaN of an infinite gradient), and only fp16's scaler
skips steps, of two of the kinds.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

KINDS = ("loss", "non_finite", "overflow", "spike")
"""Of bad steps: a loss that is not finite; finite losses, but an element of a gradient that is not; finite elements,
but a norm that is not; a norm far above those before it."""
HISTORY, ENOUGH = 128, 32
"""Norms a spike is judged by: the last so many, and from so many on."""


@dataclass
class GradientGuard:
    """Judges steps one after the other, alike on all ranks."""

    spike_factor: float
    """A norm above so many medians of the norms before it is a spike."""
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    in_a_row: int = 0
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    broken: list[str] = field(default_factory=list)
    """The newest bad step's: parameters whose gradient has an element that is not finite, on any rank."""

    def judge(self, model: nn.Module, norm: Tensor, losses: list[Tensor]) -> str | None:
        """One step's verdict: None, or its kind of bad, the worst that any rank saw. All ranks ask, step by step.

        Args:
            model: holds the gradients; in shards, if it likes.
            norm: () before clipping, of the gradients of all ranks together.
            losses: the step's micro-batches'.
        """
        finite_losses = torch.stack(losses).isfinite().all()
        value, good_losses = torch.stack([norm.float(), finite_losses.to(norm.device).float()]).tolist()
        kind = None
        if not good_losses:
            kind = "loss"
        elif not math.isfinite(value):
            kind = "non_finite"
        elif len(self.norms) >= ENOUGH and value > self.spike_factor * statistics.median(self.norms):
            kind = "spike"
        kind = agreed(kind, norm.device)
        if kind is None:
            self.norms.append(value)
            self.in_a_row = 0
            return None
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        self.broken = not_finite(gradients)
        if kind == "non_finite" and gradients and not self.broken:  # DeepSpeed keeps its gradients to itself
            kind = "overflow"
        self.skipped[kind] += 1
        self.in_a_row += 1
        return kind


def agreed(kind: str | None, device: torch.device) -> str | None:
    """The worst kind on any rank, so that all skip the same steps."""
    if not dist.is_initialized():
        return kind
    code = torch.tensor(0 if kind is None else len(KINDS) - KINDS.index(kind), device=device)
    dist.all_reduce(code, dist.ReduceOp.MAX)
    return None if code == 0 else KINDS[len(KINDS) - int(code)]


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Names of those with an element that is not finite, in any rank's copy or shard. All ranks ask, for the same."""
    if not tensors:
        return []
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
    flags = torch.stack([~tensor.isfinite().all() for tensor in local]).int()
    if dist.is_initialized():
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [name for name, flag in zip(tensors, flags.tolist(), strict=True) if flag]
