"""A mix-in for HF's Trainer that skips steps whose loss or gradients would damage the weights.

Clipping does not protect: it makes NaN of an infinite gradient. A loss scaler skips two of the kinds, and only in fp16.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import Trainer

from gpt2small_hf.errors import RunStoppedError
from gpt2small_hf.runs.files import write_json
from gpt2small_hf.runs.results import GuardState

KINDS = ("loss", "non_finite", "overflow", "spike")
"""Why a step is skipped: its loss is not finite; finite losses, but an element of a gradient is not; finite elements,
but their norm is not; the norm is far above those before it."""
HISTORY, MIN_HISTORY = 128, 32
"""Number of norms in the median that a spike is compared with, and the number needed to compare at all."""


@dataclass
class BadStepDetector:
    """Decides for each step whether it must be skipped, and why, with the same result on all ranks."""

    spike_factor: float
    """A norm above this multiple of the median over the last steps is a spike."""
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    in_a_row: int = 0
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    broken: list[str] = field(default_factory=list)
    """Of the last skipped step: parameters whose gradient has an element that is not finite, on any rank."""

    def classify(self, model: nn.Module, norm: Tensor, losses: list[Tensor]) -> str | None:
        """Return why a step must be skipped: the first of `KINDS` that any rank found; None to take the step.

        Every rank must call this for every step. `norm` is that of all ranks' gradients before clipping, shape (), and
        `losses` are those of the step's micro-batches.
        """
        finite_losses = torch.stack(losses).isfinite().all()
        value, is_loss_finite = torch.stack([norm.float(), finite_losses.to(norm.device).float()]).tolist()
        kind = None
        if not is_loss_finite:
            kind = "loss"
        elif not math.isfinite(value):
            kind = "non_finite"
        elif len(self.norms) >= MIN_HISTORY and value > self.spike_factor * statistics.median(self.norms):
            kind = "spike"
        kind = first_of_all_ranks(kind, norm.device)
        if kind is None:
            self.norms.append(value)
            self.in_a_row = 0
            return None
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        self.broken = not_finite(gradients)
        if kind == "non_finite" and gradients and not self.broken:  # DeepSpeed hides its gradients
            kind = "overflow"
        self.skipped[kind] += 1
        self.in_a_row += 1
        return kind


def first_of_all_ranks(kind: str | None, device: torch.device) -> str | None:
    """Return the first of `KINDS` that any rank found, so that all skip the same steps."""
    if not dist.is_initialized():
        return kind
    code = torch.tensor(0 if kind is None else len(KINDS) - KINDS.index(kind), device=device)
    dist.all_reduce(code, dist.ReduceOp.MAX)
    return None if code == 0 else KINDS[len(KINDS) - int(code)]


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Name tensors with an element that is not finite on any rank. Every rank must call this, with the same names."""
    if not tensors:
        return []
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
    flags = torch.stack([~tensor.isfinite().all() for tensor in local]).int()
    if dist.is_initialized():
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [name for name, flag in zip(tensors, flags.tolist(), strict=True) if flag]


class GradientGuard(Trainer):
    """Skips a step, on all ranks, whose loss or gradients are not finite or whose gradient norm is a spike.

    Put it before any other Trainer: `class MyTrainer(GradientGuard, Trainer)`. The weights and the optimizer's state
    keep their values in a skipped step. The log counts skipped steps as `skipped_loss`, `skipped_non_finite`,
    `skipped_overflow` and `skipped_spike`, and `loss` is the mean over the steps with a finite loss. The counts and
    the norms that a spike is compared with are saved in checkpoints.

    Raises: RunStoppedError from `train()` after `max_bad_steps` skipped steps in a row.
    """

    def __init__(self, *args: Any, spike_factor: float = 50.0, max_bad_steps: int = 20, **kwargs: Any) -> None:
        """Accept the arguments of the next Trainer in line, and two more.

        Args:
            args: the next Trainer's.
            spike_factor: skip a step whose gradient norm exceeds this multiple of the median over the last 128 steps.
            max_bad_steps: stop training after this number of skipped steps in a row.
            kwargs: the next Trainer's.
        """
        self.detector = BadStepDetector(spike_factor)
        self.max_bad_steps = max_bad_steps
        self.micro_losses: list[Tensor] = []
        self.step_losses: list[Tensor] = []  # of the steps since the last log, like the norms
        self.norms: list[Tensor] = []
        self.loss_sum, self.n_losses = 0.0, 0  # of all steps that were logged
        super().__init__(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward on one micro-batch; see `Trainer.training_step`."""
        loss = super().training_step(*args, **kwargs)
        self.micro_losses.append(loss)
        # One NaN would make the Trainer's running sum NaN for ever. `log` replaces the mean that it makes of this.
        return torch.where(loss.isfinite(), loss, torch.zeros_like(loss))

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        # Otherwise `_get_grad_norm` clips, which is called next: clipping here would make NaN of an infinite gradient.
        return None if self._can_compute_norm(model) else super()._clip_grad_norm(model)

    def _can_compute_norm(self, model: nn.Module) -> bool:
        is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        return not (is_deepspeed or self._has_mixed_mesh_grads(model))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm before clipping, then clip, or remove the gradients of a bad step. Called once a step."""
        can_clip = self._can_compute_norm(model)
        if can_clip:
            self.accelerator.unscale_gradients()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        else:
            norm = torch.as_tensor(super()._get_grad_norm(model, grad_norm), device=self.args.device)
        assert self.model is not None
        kind = self.detector.classify(self.model, norm, self.micro_losses)  # `model` may be DDP's, with other names
        self.step_losses.append(torch.stack(self.micro_losses).sum())
        self.norms.append(norm)
        self.micro_losses = []
        if kind is not None:
            self._skip_step(model, kind, float(norm))
        elif can_clip and self.args.max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _skip_step(self, model: nn.Module, kind: str, norm: float) -> None:
        step, detector = self.state.global_step + 1, self.detector
        if sum(detector.skipped.values()) == 1 and self.is_world_process_zero():
            more = f" and {len(detector.broken) - 4} more" if len(detector.broken) > 4 else ""
            where = f", not finite in {', '.join(detector.broken[:4])}{more}" if detector.broken else ""
            print(f"step {step:,}: skipped ({kind}); gradient norm {norm:g}{where}", file=sys.stderr)
        # Every optimizer ignores a parameter without a gradient: no decay, no moments. In fp16 the scaler has checked
        # the gradients by now, and will lower its scale if one was not finite.
        for parameter in model.parameters():
            parameter.grad = None
        if detector.in_a_row >= self.max_bad_steps:
            counts = ", ".join(f"{n} {kind}" for kind, n in detector.skipped.items() if n)
            raise RunStoppedError(
                f"{detector.in_a_row} steps in a row were skipped, the last at step {step:,} (skipped in all: {counts})"
                ". Lower --learning_rate, clip gradients (--max_grad_norm 1) or use a longer warm-up."
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with means over the steps whose losses and norms are finite, and counts of skipped steps."""
        if "loss" in logs and self.step_losses:
            losses, norms = self._end_interval()
            logs["loss"] = sum(losses) / len(losses) if losses else math.nan
            if losses:
                logs |= {"loss_min": min(losses), "loss_max": max(losses)}
            if norms:
                clip = self.args.max_grad_norm
                logs |= {"grad_norm_mean": sum(norms) / len(norms), "grad_norm_max": max(norms)}
                logs["clipped"] = sum(norm > clip > 0 for norm in norms) / len(norms)
            if any(self.detector.skipped.values()):
                logs |= {f"skipped_{kind}": n for kind, n in self.detector.skipped.items()}
        if "train_loss" in logs:  # the Trainer's own covers only the steps since the last resume
            if self.step_losses:
                self._end_interval()
            logs["train_loss"] = self.loss_sum / self.n_losses if self.n_losses else math.nan
        super().log(logs, start_time)

    def _end_interval(self) -> tuple[list[float], list[float]]:
        """Return the finite losses and gradient norms since the last call, the losses as means over the ranks."""
        losses = torch.stack(self.step_losses)
        if dist.is_initialized():
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
        finite = losses[losses.isfinite()].tolist()
        norms = [norm for norm in torch.stack(self.norms).tolist() if math.isfinite(norm)]
        self.loss_sum += sum(finite)
        self.n_losses += len(finite)
        self.step_losses, self.norms = [], []
        return finite, norms

    def state_to_save(self) -> GuardState:
        """Return what this rank adds to a checkpoint: counts, norms and what is not logged yet."""
        return GuardState(
            world_size=self.args.world_size,
            skipped=self.detector.skipped,
            in_a_row=self.detector.in_a_row,
            history=list(self.detector.norms),
            losses=[float(loss) for loss in self.step_losses],
            norms=[float(norm) for norm in self.norms],
            loss_sum=self.loss_sum,
            n_losses=self.n_losses,
        )

    def restore_state(self, saved: GuardState) -> None:
        """Continue from what `state_to_save` returned."""
        self.detector.skipped, self.detector.in_a_row = saved.skipped, saved.in_a_row
        self.detector.norms.extend(saved.history)
        self.loss_sum, self.n_losses = saved.loss_sum, saved.n_losses
        if saved.world_size == self.args.world_size:  # otherwise the ranks' parts of the interval do not add up
            for mine, values in ((self.step_losses, saved.losses), (self.norms, saved.norms)):
                mine += [torch.tensor(math.nan if v is None else v, device=self.args.device) for v in values]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        write_json(Path(output_dir) / f"guard_{self.args.process_index}.json", self.state_to_save().to_json())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = Path(checkpoint or "") / f"guard_{self.args.process_index}.json"
        if path.exists():
            self.restore_state(GuardState.load(path))
