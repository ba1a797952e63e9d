"""HF's Trainer with what a language model's training needs beside it: a guard, and a log that tells the truth."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from accelerate import DistributedType
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import Trainer

from gpt2small_hf.runs import RunStoppedError
from gpt2small_hf.training.guard import Guard, broken_tensors


class LanguageModelTrainer(Trainer):
    """HF's Trainer for a language model.

    It asks the model for its loss alone: the logits of a batch would take more memory than the rest. A bad step is
    skipped on all ranks, counted by its kind (`guard.KINDS`), and after `max_bad_steps` in a row training stops. Under
    fp16 it is the scaler that skips what is not finite; spikes are then counted and let pass.
    """

    def __init__(
        self, *args: Any, decay: str = "matrices", spike_factor: float = 50.0, max_bad_steps: int = 20, **kwargs: Any
    ) -> None:
        """Take what `Trainer` takes.

        Args:
            args: as `Trainer`'s.
            decay: what weight decay shrinks, `matrices` or `all`.
            spike_factor: a gradient norm above so many medians of those before it is a bad step.
            max_bad_steps: stop after so many bad steps in a row.
            kwargs: as `Trainer`'s.
        """
        self.decay = decay
        self.guard = Guard(spike_factor)
        self.max_bad_steps = max_bad_steps
        self.micro_losses: list[Tensor] = []
        self.step_losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        super().__init__(*args, **kwargs)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay shrinks."""
        if self.decay == "all":
            return [name for name, _ in model.named_parameters()]
        return super().get_decay_parameter_names(model)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loss of one batch; see `Trainer.compute_loss`."""
        return super().compute_loss(model, {**inputs, "skip_logits": True}, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one micro-batch; see `Trainer.training_step`."""
        loss = super().training_step(*args, **kwargs)
        self.micro_losses.append(loss)
        # The Trainer's running sum would stay NaN for ever after one; `log` puts the true mean in its place.
        return torch.where(loss.isfinite(), loss, torch.zeros_like(loss))

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Leave clipping to `_get_grad_norm`, which the Trainer calls next: it would make NaN of what is infinite."""
        return super()._clip_grad_norm(model) if self._norm_is_not_ours(model) else None

    def _norm_is_not_ours(self, model: nn.Module) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED or self._has_mixed_mesh_grads(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm before clipping; called once a step before the optimizer. Clips, or drops a bad step's gradients."""
        ours = not self._norm_is_not_ours(model)
        if ours:
            self.accelerator.unscale_gradients()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        else:
            norm = torch.as_tensor(super()._get_grad_norm(model, grad_norm), device=self.args.device)
        kind = self.guard.judge(model, norm, self.micro_losses)
        self.step_losses.append(torch.stack(self.micro_losses).sum())
        self.norms.append(norm)
        self.micro_losses = []
        if kind is not None:
            self._drop_step(model, kind, float(norm))
        elif ours and self.args.max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _drop_step(self, model: nn.Module, kind: str, norm: float) -> None:
        step = self.state.global_step + 1
        if sum(self.guard.skipped.values()) == 1 and self.is_world_process_zero():
            names = broken_tensors(model)
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            where = f" in {', '.join(names[:4])}{more}" if names else ""
            print(f"step {step}: {kind}, gradient norm {norm:g}{where}; the step is skipped.", file=sys.stderr)
        if getattr(self.accelerator, "scaler", None) is None:
            for parameter in model.parameters():
                parameter.grad = None  # every optimizer passes over a parameter without one: no decay, no moments
        if self.guard.in_a_row >= self.max_bad_steps:
            counts = ", ".join(f"{n} {kind}" for kind, n in self.guard.skipped.items() if n)
            raise RunStoppedError(
                f"{self.guard.in_a_row} bad steps in a row up to step {step} ({counts}). "
                "Lower the learning rate, clip gradients (--max_grad_norm 1) or warm up longer."
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the interval's losses and gradient norms as they were; see `Trainer.log`."""
        if "loss" in logs and self.step_losses:
            losses = torch.stack(self.step_losses)
            if dist.is_initialized():
                dist.all_reduce(losses)
                losses /= dist.get_world_size()
            good = losses[losses.isfinite()].tolist()
            norms = [norm for norm in torch.stack(self.norms).tolist() if math.isfinite(norm)]
            logs["loss"] = sum(good) / len(good) if good else math.nan
            if good:
                logs |= {"loss_min": min(good), "loss_max": max(good)}
            if norms:
                clip = self.args.max_grad_norm
                logs |= {"grad_norm_mean": sum(norms) / len(norms), "grad_norm_max": max(norms)}
                logs["clipped"] = sum(norm > clip > 0 for norm in norms) / len(norms)
            if any(self.guard.skipped.values()):
                logs |= {f"skipped_{kind}": n for kind, n in self.guard.skipped.items()}
            self.step_losses, self.norms = [], []
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Save, unless a weight is not finite. Raises: RunStoppedError in that case."""
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise RunStoppedError(f"{name} is not finite at step {self.state.global_step}, so nothing was saved.")
        super()._save_checkpoint(model, *args, **kwargs)
