"""HF's Trainer with what a language model's training needs beside it: a guard, and a log that tells the truth."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import DistributedType
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from gpt2small_hf.config.trainer import MUON
from gpt2small_hf.data.rows import PaddedLength, RowDataset
from gpt2small_hf.errors import RunStoppedError, UsageError
from gpt2small_hf.runs.files import read_json, write_json
from gpt2small_hf.training.checkpointing import ResumableTrainer
from gpt2small_hf.training.guard import GradientGuard
from gpt2small_hf.training.optimizers import muon_with_adamw
from gpt2small_hf.training.schedules import Schedule, rates

N_TOKENS = "n_tokens"


def _counted(collate: Callable[[list[Any]], dict[str, Any]], rows: list[Any]) -> dict[str, Any]:
    """A batch with the number of tokens of each row, which padding hides.

    A tensor with an element for each row: accelerate's `dispatch_batches` joins batches and cuts them up again.
    """
    return {**collate(rows), N_TOKENS: torch.tensor([len(row["input_ids"]) for row in rows])}


class CausalLMTrainer(ResumableTrainer):
    """HF's Trainer for a language model.

    It asks the model for its loss alone: the logits of a batch would take more memory than the rest. A bad step is
    skipped on all ranks, counted by its kind (`guard.KINDS`), and after `max_bad_steps` in a row training stops.
    """

    def __init__(
        self,
        *args: Any,
        decay: str = "matrices",
        spike_factor: float = 50.0,
        max_bad_steps: int = 20,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Take what `ResumableTrainer` takes.

        Args:
            args: as `ResumableTrainer`'s.
            decay: what weight decay shrinks, `matrices` or `all`.
            spike_factor: a gradient norm above so many medians of those before it is a bad step.
            max_bad_steps: stop after so many bad steps in a row.
            flops_per_token: FLOPs of training on one token, forward and backward.
            peak_flops: what one device can do in a second; with both, the log has `mfu`, the share of it that is made.
            kwargs: as `ResumableTrainer`'s.
        """
        self.decay = decay
        self.guard = GradientGuard(spike_factor)
        self.max_bad_steps = max_bad_steps
        self.micro_losses: list[Tensor] = []
        self.step_losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.measuring = False
        self.loss_sum, self.n_losses = 0.0, 0  # of all steps that were logged
        self.step_began = self.waited = self.trained = 0.0  # seconds, of the interval
        # Of the interval, on this rank: since the last resume, and all. Tensors on the device once there are some.
        self.tokens: Tensor | int = 0
        self.unlogged_tokens: Tensor | int = 0
        super().__init__(*args, **kwargs)
        self.eval_labels: int | None = None
        """Predicted tokens of the held-out rows, where these have different numbers of them."""
        rows, several = self.eval_dataset, self.args.world_size > 1
        if isinstance(rows, RowDataset) and (several or rows.is_chat):
            self.eval_labels = rows.n_supervised
        if isinstance(rows, RowDataset) and several:
            self.eval_dataset = PaddedLength(rows, self.args.world_size * self.args.eval_batch_size)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator; see `Trainer`. In shards, its bfloat16 would round the loss to three digits."""
        super().create_accelerator_and_postprocess()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            policy = plugin.mixed_precision_policy
            plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay shrinks."""
        if self.decay == "all":
            return [name for name, _ in model.named_parameters()]
        return super().get_decay_parameter_names(model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of --optim; see `Trainer.create_optimizer`. Raises: UsageError if it cannot train here."""
        if self.args.optim == MUON and self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            trained = self.model if model is None else model
            assert trained is not None
            sharded = any(isinstance(parameter, DTensor) for parameter in trained.parameters())
            if sharded or self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise UsageError(
                    "--optim muon works on whole matrices, and FSDP, DeepSpeed and tensor parallelism cut them up. "
                    "Leave those out, or take --optim adamw_torch_fused."
                )
            self.optimizer = muon_with_adamw(trained, set(self.get_decay_parameter_names(trained)), self.args)
        return super().create_optimizer(model)  # makes those of other names, and does what comes after

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The schedule of --lr_scheduler_type; see `Trainer.create_scheduler`. Raises: UsageError as `rates`."""
        if self.lr_scheduler is None:
            share = rates(self.args, num_training_steps)
            if share is not None:
                self.lr_scheduler = Schedule(self.optimizer if optimizer is None else optimizer, share)
                self._created_lr_scheduler = True  # the next call of `train` makes another
        return super().create_scheduler(num_training_steps, optimizer)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loss of one batch; see `Trainer.compute_loss`."""
        if self.measuring and self.eval_labels is not None:
            # The Trainer weighs a batch's loss by its rows: divided so, the weighted mean is that over all tokens.
            n_ranks = self.args.world_size if self.args.average_tokens_across_devices else 1
            labels = self.eval_labels * len(inputs["input_ids"]) / len(self.eval_dataset) * n_ranks  # pyright: ignore[reportArgumentType]
            kwargs["num_items_in_batch"] = torch.tensor(labels, device=self.args.device)
        return super().compute_loss(model, {**inputs, "skip_logits": True}, *args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Measure one batch; see `Trainer.prediction_step`."""
        self.measuring = True
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self.measuring = False

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The training batches; see `Trainer.get_train_dataloader`. Each has the number of its tokens, not padding."""
        collate = self.data_collator
        self.data_collator = partial(_counted, collate)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collate

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Micro-batches of one step; see `Trainer.get_batch_samples`. Starts the step's clock, and counts its tokens.

        They are counted without asking the other ranks or the device; `log` adds up what all ranks saw.
        """
        self.step_began = time.perf_counter()
        batches, n_items = super().get_batch_samples(self._timed(epoch_iterator), *args, **kwargs)
        n_tokens = sum(batch.pop(N_TOKENS).sum() for batch in batches)
        self.tokens += n_tokens
        self.unlogged_tokens += n_tokens
        return batches, n_items

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.waited += time.perf_counter() - began
            yield batch

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        pass  # see `get_batch_samples`

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.is_in_step:
            self.trained += time.perf_counter() - self.step_began
        super()._maybe_log_save_evaluate(*args, **kwargs)

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
        assert self.model is not None
        kind = self.guard.judge(self.model, norm, self.micro_losses)  # not what DDP made of it: for the tensors' names
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
            names = self.guard.broken
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            where = f" in {', '.join(names[:4])}{more}" if names else ""
            print(f"step {step}: {kind}, gradient norm {norm:g}{where}; the step is skipped.", file=sys.stderr)
        # Every optimizer passes over a parameter without gradient: no decay, no moments. Under fp16 the scaler has seen
        # by now whether all were finite, and lowers its scale if not.
        for parameter in model.parameters():
            parameter.grad = None
        if self.guard.in_a_row >= self.max_bad_steps:
            counts = ", ".join(f"{n} {kind}" for kind, n in self.guard.skipped.items() if n)
            raise RunStoppedError(
                f"{self.guard.in_a_row} bad steps in a row up to step {step} ({counts}). "
                "Lower the learning rate, clip gradients (--max_grad_norm 1) or warm up longer."
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the interval's losses and gradient norms as they were; see `Trainer.log`."""
        if "loss" in logs and self.step_losses:
            good, norms = self._interval()
            logs["loss"] = sum(good) / len(good) if good else math.nan
            if good:
                logs |= {"loss_min": min(good), "loss_max": max(good)}
            if norms:
                clip = self.args.max_grad_norm
                logs |= {"grad_norm_mean": sum(norms) / len(norms), "grad_norm_max": max(norms)}
                logs["clipped"] = sum(norm > clip > 0 for norm in norms) / len(norms)
            if any(self.guard.skipped.values()):
                logs |= {f"skipped_{kind}": n for kind, n in self.guard.skipped.items()}
            logs |= self._pace()
        if "train_loss" in logs:  # the Trainer's own is of the steps since the last resume
            if self.step_losses:
                self._interval()
            logs["train_loss"] = self.loss_sum / self.n_losses if self.n_losses else math.nan
            logs |= self._pace()  # of the steps since the last line, if there are any
        super().log(logs, start_time)

    def _interval(self) -> tuple[list[float], list[float]]:
        """The finite losses and gradient norms of the steps since the last call, of all ranks."""
        losses = torch.stack(self.step_losses)
        if dist.is_initialized():
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
        good = losses[losses.isfinite()].tolist()
        norms = [norm for norm in torch.stack(self.norms).tolist() if math.isfinite(norm)]
        self.loss_sum += sum(good)
        self.n_losses += len(good)
        self.step_losses, self.norms = [], []
        return good, norms

    def _pace(self) -> dict[str, float]:
        """All tokens so far, and how fast the interval went, without measuring and saving; begins the next one.

        Returns: `num_input_tokens_seen` alone if nothing was trained since the last call.
        """
        device = self.args.device
        tokens = torch.tensor([self.tokens, self.unlogged_tokens])
        if dist.is_initialized():
            tokens = tokens.to(device)
            dist.all_reduce(tokens)
        n_tokens, unlogged = tokens.tolist()
        self.state.num_input_tokens_seen += unlogged
        pace: dict[str, float] = {"num_input_tokens_seen": self.state.num_input_tokens_seen}
        if not self.trained:
            self.tokens = self.unlogged_tokens = 0
            return pace
        pace["tokens_per_second"] = per_second = n_tokens / self.trained
        if self.flops_per_token and self.peak_flops:
            pace["mfu"] = per_second * self.flops_per_token / (self.peak_flops * self.args.world_size)
        if device.type == "cuda":
            pace["memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
            torch.cuda.reset_peak_memory_stats(device)
        else:
            pace["memory_gib"] = psutil.Process().memory_info().rss / 2**30
        pace["data_wait"] = self.waited / self.trained
        self.waited = self.trained = 0.0
        self.tokens = self.unlogged_tokens = 0
        return pace

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save also what the guard has seen, and the interval that is not logged yet: a resumed run does as if one."""
        super()._save_optimizer_and_scheduler(output_dir)
        kept = {
            "world_size": self.args.world_size,
            "skipped": self.guard.skipped,
            "in_a_row": self.guard.in_a_row,
            "history": list(self.guard.norms),
            "losses": [float(loss) for loss in self.step_losses],
            "norms": [float(norm) for norm in self.norms],
            "tokens": int(self.unlogged_tokens),
            "loss_sum": self.loss_sum,
            "n_losses": self.n_losses,
        }
        write_json(Path(output_dir) / f"guard_{self.args.process_index}.json", kept)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = Path(checkpoint or "") / f"guard_{self.args.process_index}.json"
        if not path.exists():
            return
        kept = read_json(path)
        self.guard.skipped, self.guard.in_a_row = kept["skipped"], kept["in_a_row"]
        self.guard.norms.extend(kept["history"])
        self.loss_sum, self.n_losses = kept.get("loss_sum", 0.0), kept.get("n_losses", 0)
        if kept["world_size"] == self.args.world_size:  # else the ranks' parts of the interval do not fit together
            for mine, values in ((self.step_losses, kept["losses"]), (self.norms, kept["norms"])):
                mine += [torch.tensor(math.nan if v is None else v, device=self.args.device) for v in values]
            self.unlogged_tokens = kept.get("tokens", 0)
