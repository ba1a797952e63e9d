"""Gradients and losses of a step → good, or which kind of bad. The Trainer subclass asks, and skips a bad step.

One bad step ruins all weights: clipping does not protect (it makes NaN of an infinite gradient), and only fp16's scaler
skips steps, of two of the kinds.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch import distributed as dist

KINDS = ("loss", "non_finite", "overflow", "spike")
"""Of bad steps: a loss that is not finite; finite losses, but an element of a gradient that is not; finite elements,
but a norm that is not; a norm far above those before it."""
HISTORY, ENOUGH = 128, 32
"""Norms a spike is judged by: the last so many, and from so many on."""


@dataclass
class Guard:
    """Judges steps one after the other, alike on all ranks."""

    spike_factor: float
    """A norm above so many medians of the norms before it is a spike."""
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    in_a_row: int = 0
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def judge(self, model: nn.Module, norm: Tensor, losses: list[Tensor]) -> str | None:
        """One step's verdict: None, or its kind of bad, the worst that any rank saw.

        Args:
            model: holds the gradients.
            norm: () before clipping.
            losses: the step's micro-batches'.
        """
        finite_losses = torch.stack(losses).isfinite().all()
        value, good_losses = torch.stack([norm.float(), finite_losses.to(norm.device).float()]).tolist()
        kind = None
        if not good_losses:
            kind = "loss"
        elif value != value or value == float("inf"):
            kind = "non_finite" if broken_tensors(model) else "overflow"
        elif len(self.norms) >= ENOUGH and value > self.spike_factor * statistics.median(self.norms):
            kind = "spike"
        kind = agreed(kind, norm.device)
        if kind is None:
            self.norms.append(value)
            self.in_a_row = 0
        else:
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


def broken_tensors(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient has an element that is not finite."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not parameter.grad.isfinite().all()
    ]
