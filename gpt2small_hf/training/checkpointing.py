"""HF's Trainer with atomic checkpoints, whose resumed runs equal uninterrupted ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import logging

from gpt2small_hf.errors import RunStoppedError, disk_is_full
from gpt2small_hf.runs.files import set_default_permissions, sync
from gpt2small_hf.runs.layout import checkpoints_in, number_of
from gpt2small_hf.training.callbacks import StopOnSignal
from gpt2small_hf.training.checkpoint_files import find_best, is_scheduled, write_manifest
from gpt2small_hf.training.gradient_guard import not_finite


class ResumableTrainer(Trainer):
    """HF's Trainer with atomic checkpoints and exact resuming: an interrupted run ends like an uninterrupted one."""

    def __init__(self, *args: Any, stop: StopOnSignal | None = None, **kwargs: Any) -> None:
        """Accept the arguments of `Trainer`, and `stop`, which handles signals and must be one of `callbacks` too."""
        self.stop = stop
        self.save_due = self.is_in_step = False
        self.checkpoint_in_the_making: Path | None = None
        super().__init__(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the micro-batches of one step; see `Trainer.get_batch_samples`."""
        self.is_in_step = True
        return super().get_batch_samples(*args, **kwargs)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # it warns of a missing best checkpoint, which is found below
        try:
            start_at = super()._init_training_state(
                max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
            )
        finally:
            logging.set_verbosity(verbosity)
        # Log, evaluate and save at the intervals of this run, not of the checkpoint.
        self.state.compute_steps(self.args, max_steps)
        if resume_from_checkpoint is not None:
            best = find_best(Path(resume_from_checkpoint), Path(self.args.output_dir or ""))
            self.state.best_model_checkpoint = None if best is None else str(best)
            if best is None and self.args.load_best_model_at_end:  # a later best checkpoint may have a higher loss
                self.state.best_metric = self.state.best_global_step = None
            self.args.eval_on_start = False  # it was evaluated when it started
        return start_at

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # Without this, a run killed after its last step would train to the end of the epoch.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, model: nn.Module, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Log, evaluate and save what is due, as `Trainer` does, but save the checkpoint last.

        So the checkpoint contains everything that was logged at its step.

        Raises: RunInterruptedError after a signal, once the step is saved.
        """
        after_step, self.is_in_step = self.is_in_step, False  # called after each step and after each epoch
        self.save_due |= self.control.should_save
        self.control.should_save = False
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        assert self.state.epoch is not None
        epoch_ends = self.state.epoch == int(self.state.epoch) or self.control.should_epoch_stop
        if after_step and (epoch_ends or self.control.should_training_stop):
            return  # more may be due after the epoch
        caught = 0 if self.stop is None else self.stop.agreed(self.args.device)
        scheduled, self.save_due = self.save_due, False
        if scheduled or caught:
            self._save_checkpoint(model, trial, scheduled=scheduled)
        if scheduled:
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        if self.stop is not None and caught:
            # So that reporters flush their data.
            self.callback_handler.on_train_end(self.args, self.state, self.control)
            saved = Path(super()._get_output_dir(None)) / f"checkpoint-{self.state.global_step}"
            raise self.stop.interruption(saved, resumable=not self.args.save_only_model)

    def _get_output_dir(self, *args: Any, **kwargs: Any) -> str:
        return str(self.checkpoint_in_the_making or super()._get_output_dir(*args, **kwargs))

    def _save_checkpoint(self, model: nn.Module, *args: Any, scheduled: bool = True, **kwargs: Any) -> None:
        """Save a checkpoint atomically: under a temporary name first.

        A checkpoint that only a signal requested is not `scheduled`: it replaces no other checkpoint, is never the best
        one, and is removed when the next one is saved. So the run ends with the checkpoints of an uninterrupted one.

        Raises: RunStoppedError if a weight is not finite or the disk is full.
        """
        assert self.model is not None
        if broken := not_finite({name: p.detach() for name, p in self.model.named_parameters()}):
            raise RunStoppedError(f"{broken[0]} is not finite at step {self.state.global_step}, so nothing was saved.")
        checkpoints = Path(super()._get_output_dir(None))
        name = f"checkpoint-{self.state.global_step}"
        best = self.state.best_model_checkpoint
        temporary = checkpoints / "in-the-making"
        self._alone(lambda: shutil.rmtree(temporary, ignore_errors=True))  # left by a killed process
        self.checkpoint_in_the_making = temporary
        try:
            super()._save_checkpoint(model, *args, **kwargs)
        except Exception as error:  # each library raises its own error for a full disk
            if not disk_is_full(error):
                raise
            shutil.rmtree(temporary, ignore_errors=True)
            raise RunStoppedError(
                f"the disk is too full for the checkpoint of step {self.state.global_step} ({error})."
            ) from error
        finally:
            self.checkpoint_in_the_making = None
        is_best = scheduled and self.state.best_global_step == self.state.global_step
        self.state.best_model_checkpoint = str(checkpoints / name) if is_best else best
        self._alone(lambda: self._give_name(temporary / name, checkpoints / name, scheduled))

    def _give_name(self, made: Path, name: Path, scheduled: bool) -> None:
        if any(made.glob("*config.json")):  # not in sharded checkpoints of FSDP and DeepSpeed
            set_default_permissions(made)
        self.state.save_to_json(str(made / "trainer_state.json"))  # again: with the final name of the best checkpoint
        if not self.args.save_only_model:  # without a manifest it cannot be resumed from
            write_manifest(made, scheduled=scheduled)
        if name.exists():  # damaged: complete checkpoints are not saved again
            shutil.rmtree(name)
        sync(made)
        made.rename(name)
        sync(name.parent, contents=False)
        made.parent.rmdir()
        for path in checkpoints_in(name.parent):
            # Later ones are damaged, or --resume named an earlier one: they must not count as the latest.
            if number_of(path) > number_of(name) or (path != name and not is_scheduled(path)):
                shutil.rmtree(path)
        if scheduled:
            self._rotate()

    def tidy(self) -> None:
        """Remove checkpoints that an uninterrupted run would not have. Call it on all ranks after training."""
        checkpoints = Path(super()._get_output_dir(None))

        def work() -> None:
            for path in checkpoints_in(checkpoints):
                if not is_scheduled(path):
                    shutil.rmtree(path)
            self._rotate()  # the run may have been killed before

        self._alone(work)

    def _rotate(self) -> None:
        rotate_checkpoints(
            output_dir=super()._get_output_dir(None),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=False,
        )

    def _alone(self, work: Any) -> None:
        """Run `work` on the saving rank while the others wait."""
        if dist.is_initialized():
            dist.barrier()
        if self.args.should_save:
            work()
        if dist.is_initialized():
            dist.barrier()
