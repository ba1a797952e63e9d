"""HF's Trainer for causal language models: optimizers, schedules, a loss without logits, and speed in the log."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import unwrap_peft_model

from gpt2small_hf.data.row_dataset import PaddedLength, RowDataset
from gpt2small_hf.runs.results import GuardState
from gpt2small_hf.training.checkpointing import ResumableTrainer
from gpt2small_hf.training.gradient_guard import GradientGuard
from gpt2small_hf.training.optimizers import OPTIMIZERS
from gpt2small_hf.training.schedules import Schedule, rates

N_TOKENS = "n_tokens"


def _collate_and_count(collate: Callable[[list[Any]], dict[str, Any]], rows: list[Any]) -> dict[str, Any]:
    """Collate rows, and add the number of tokens of each, which padding hides.

    A tensor with an element for each row: accelerate's `dispatch_batches` joins batches and splits them again.
    """
    batch = collate(rows)
    if "input_ids" in rows[0]:
        n_tokens = torch.tensor([len(row["input_ids"]) for row in rows])
    else:  # the collator tokenizes
        n_tokens = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum(-1)
    return {**batch, N_TOKENS: n_tokens}


class CausalLMTrainer(GradientGuard, ResumableTrainer):
    """Trains any causal language model of transformers, on a `RowDataset` or on any dataset with a collator.

    Bad steps are skipped (`GradientGuard`); checkpoints are complete or absent, and a resumed run equals an
    uninterrupted one (`ResumableTrainer`). A model whose `forward` takes `skip_logits` computes its loss without the
    logits of the batch, which would need more memory than everything else.
    """

    def __init__(
        self,
        *args: Any,
        decay: str = "matrices",
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Accept the arguments of `Trainer` and `GradientGuard`, and three more.

        Args:
            args: as `Trainer`'s.
            decay: parameters that weight decay applies to: `matrices` or `all`.
            flops_per_token: FLOPs of training on one token, forward and backward.
            peak_flops: FLOPs a second of one device; with both, `mfu`, the share of them that is used, is logged.
            kwargs: as `Trainer`'s and `GradientGuard`'s.
        """
        self.decay = decay
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.is_evaluating = self.needs_logits = False
        # Seconds since the last log: the start of the step, waiting for batches, in steps.
        self.step_started = self.waited = self.trained = 0.0
        # Since the last log, on this rank: since the last resume, and all. Tensors on the device once there are some.
        self.tokens: Tensor | int = 0
        self.unlogged_tokens: Tensor | int = 0
        super().__init__(*args, **kwargs)
        assert self.model is not None
        model = unwrap_peft_model(self.accelerator.unwrap_model(self.model))  # whose own `forward` takes anything
        self.takes_skip_logits = "skip_logits" in inspect.signature(model.forward).parameters
        self.eval_labels: int | None = None
        """Number of supervised tokens of the evaluation rows, where rows or ranks have different numbers of them."""
        rows, has_ranks = self.eval_dataset, self.args.world_size > 1
        if isinstance(rows, RowDataset) and (has_ranks or rows.is_chat):
            self.eval_labels = rows.n_supervised
        if isinstance(rows, RowDataset) and has_ranks:
            self.eval_dataset = PaddedLength(rows, self.args.world_size * self.args.eval_batch_size)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; see `Trainer`. FSDP's bfloat16 would round the loss to three digits."""
        super().create_accelerator_and_postprocess()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            policy = plugin.mixed_precision_policy
            plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that weight decay applies to."""
        if self.decay == "all":
            return [name for name, _ in model.named_parameters()]
        return super().get_decay_parameter_names(model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of --optim; see `Trainer.create_optimizer`.

        Raises: UsageError if it cannot train this model.
        """
        create = OPTIMIZERS.get(self.args.optim)
        if create is not None and self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            trained = self.model if model is None else model
            assert trained is not None
            is_sharded = any(isinstance(parameter, DTensor) for parameter in trained.parameters())
            is_sharded = is_sharded or self.is_fsdp_enabled or self.is_deepspeed_enabled
            decayed = set(self.get_decay_parameter_names(trained))
            self.optimizer = create(trained, decayed, self.args, is_sharded)
        return super().create_optimizer(model)  # creates transformers' own, and registers either

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the schedule of --lr_scheduler_type; see `Trainer.create_scheduler`. Raises: UsageError as `rates`."""
        if self.lr_scheduler is None:
            share = rates(self.args, num_training_steps)
            if share is not None:
                self.lr_scheduler = Schedule(self.optimizer if optimizer is None else optimizer, share)
                self._created_lr_scheduler = True  # the next call of `train` creates another
        return super().create_scheduler(num_training_steps, optimizer)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of one batch; see `Trainer.compute_loss`."""
        if self.is_evaluating and self.eval_labels is not None:
            # The Trainer weights a batch's loss by its rows: divided so, the weighted mean is that over all tokens.
            n_ranks = self.args.world_size if self.args.average_tokens_across_devices else 1
            labels = self.eval_labels * len(inputs["input_ids"]) / len(self.eval_dataset) * n_ranks  # pyright: ignore[reportArgumentType]
            kwargs["num_items_in_batch"] = torch.tensor(labels, device=self.args.device)
        if self.takes_skip_logits and not (self.needs_logits or self.label_smoother or self.compute_loss_func):
            inputs = {**inputs, "skip_logits": True}
        return super().compute_loss(model, inputs, *args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Evaluate one batch; see `Trainer.prediction_step`."""
        self.is_evaluating, self.needs_logits = True, not prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
        finally:
            self.is_evaluating = self.needs_logits = False

    # ---- tokens and speed --------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the training batches, each with its number of tokens; see `Trainer.get_train_dataloader`."""
        collate = self.data_collator
        self.data_collator = partial(_collate_and_count, collate)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collate

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Return the micro-batches of one step, and count their tokens; see `Trainer.get_batch_samples`.

        Counting waits for neither the device nor other ranks; `log` adds up what all ranks saw.
        """
        self.step_started = time.perf_counter()
        batches, n_items = super().get_batch_samples(self._timed(epoch_iterator), *args, **kwargs)
        n_tokens = sum(batch.pop(N_TOKENS).sum() for batch in batches)
        self.tokens += n_tokens
        self.unlogged_tokens += n_tokens
        return batches, n_items

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            started = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.waited += time.perf_counter() - started
            yield batch

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        pass  # see `get_batch_samples`

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.is_in_step:
            self.trained += time.perf_counter() - self.step_started
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the number of tokens and the speed; see `Trainer.log`."""
        if ("loss" in logs and self.step_losses) or "train_loss" in logs:
            logs |= self._speed()
        super().log(logs, start_time)

    def _speed(self) -> dict[str, float]:
        """Return the number of tokens so far, and the speed since the last call, without evaluations and checkpoints.

        Returns: `num_input_tokens_seen` alone if nothing was trained since the last call.
        """
        device = self.args.device
        tokens = torch.tensor([self.tokens, self.unlogged_tokens])
        if dist.is_initialized():
            tokens = tokens.to(device)
            dist.all_reduce(tokens)
        n_tokens, unlogged = tokens.tolist()
        self.state.num_input_tokens_seen += unlogged
        self.tokens = self.unlogged_tokens = 0
        speed: dict[str, float] = {"num_input_tokens_seen": self.state.num_input_tokens_seen}
        if not self.trained:
            return speed
        speed["tokens_per_second"] = per_second = n_tokens / self.trained
        if self.flops_per_token and self.peak_flops:
            speed["mfu"] = per_second * self.flops_per_token / (self.peak_flops * self.args.world_size)
        if device.type == "cuda":
            speed["memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
            torch.cuda.reset_peak_memory_stats(device)
        else:
            speed["memory_gib"] = psutil.Process().memory_info().rss / 2**30
        speed["data_wait"] = self.waited / self.trained
        self.waited = self.trained = 0.0
        return speed

    def state_to_save(self) -> GuardState:
        """Add the tokens that are not logged yet; see `GradientGuard.state_to_save`."""
        return replace(super().state_to_save(), tokens=int(self.unlogged_tokens))

    def restore_state(self, saved: GuardState) -> None:
        """Continue from what `state_to_save` returned."""
        super().restore_state(saved)
        if saved.world_size == self.args.world_size:
            self.unlogged_tokens = saved.tokens
