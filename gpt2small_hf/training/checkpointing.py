"""HF's Trainer with checkpoints that are complete or absent, and runs that resume as if uninterrupted."""

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
    """HF's Trainer whose runs end as if they had not been interrupted, however often they were."""

    def __init__(self, *args: Any, stop: StopOnSignal | None = None, **kwargs: Any) -> None:
        """Take what `Trainer` takes.

        Args:
            args: as `Trainer`'s.
            stop: listens to signals; also one of `callbacks`.
            kwargs: as `Trainer`'s.
        """
        self.stop = stop
        self.save_due = self.is_in_step = False
        self.checkpoint_in_the_making: Path | None = None
        super().__init__(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Micro-batches of one step; see `Trainer.get_batch_samples`."""
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
        logging.set_verbosity_error()  # it warns of a best checkpoint that is found below
        try:
            start_at = super()._init_training_state(
                max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
            )
        finally:
            logging.set_verbosity(verbosity)
        # How often is logged, measured and saved is this run's, not the checkpoint's.
        self.state.compute_steps(self.args, max_steps)
        if resume_from_checkpoint is not None:
            best = find_best(Path(resume_from_checkpoint), Path(self.args.output_dir or ""))
            self.state.best_model_checkpoint = None if best is None else str(best)
            if best is None and self.args.load_best_model_at_end:  # the best of what follows need not be better
                self.state.best_metric = self.state.best_global_step = None
            self.args.eval_on_start = False  # it was evaluated when it started
        return start_at

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # A run that was killed after its last step: the Trainer would train to the end of the epoch.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, model: nn.Module, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Log, evaluate and save what is due; see `Trainer`. The checkpoint of a step is the last thing done for it.

        So its state has everything that was logged of that step, and a run can be cut off after it without a loss.

        Raises: RunInterruptedError after a signal, once the step is saved.
        """
        after_step, self.is_in_step = self.is_in_step, False  # it is called after each step, and again after an epoch
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
            self.callback_handler.on_train_end(
                self.args, self.state, self.control
            )  # reporters write out what they have
            saved = Path(super()._get_output_dir(None)) / f"checkpoint-{self.state.global_step}"
            raise self.stop.interruption(saved, resumable=not self.args.save_only_model)

    def _get_output_dir(self, *args: Any, **kwargs: Any) -> str:
        return str(self.checkpoint_in_the_making or super()._get_output_dir(*args, **kwargs))

    def _save_checkpoint(self, model: nn.Module, *args: Any, scheduled: bool = True, **kwargs: Any) -> None:
        """Save a checkpoint whole or not at all: under another name first.

        One that only a signal asked for is not `scheduled`: it takes no other checkpoint's place, is never the best
        one, and is removed once the run has come further. So the run ends with the checkpoints of an uninterrupted one.

        Raises: RunStoppedError if a weight is not finite, and if the disk does not hold it.
        """
        assert self.model is not None
        if broken := not_finite({name: p.detach() for name, p in self.model.named_parameters()}):
            raise RunStoppedError(f"{broken[0]} is not finite at step {self.state.global_step}, so nothing was saved.")
        checkpoints = Path(super()._get_output_dir(None))
        name = f"checkpoint-{self.state.global_step}"
        best = self.state.best_model_checkpoint
        making = checkpoints / "in-the-making"
        self._alone(lambda: shutil.rmtree(making, ignore_errors=True))  # what a killed process left
        self.checkpoint_in_the_making = making
        try:
            super()._save_checkpoint(model, *args, **kwargs)
        except Exception as error:  # each library has its own for a full disk
            if not disk_is_full(error):
                raise
            shutil.rmtree(making, ignore_errors=True)
            raise RunStoppedError(
                f"the disk did not take the checkpoint of step {self.state.global_step} ({error})."
            ) from error
        finally:
            self.checkpoint_in_the_making = None
        is_best = scheduled and self.state.best_global_step == self.state.global_step
        self.state.best_model_checkpoint = str(checkpoints / name) if is_best else best
        self._alone(lambda: self._give_name(making / name, checkpoints / name, scheduled))

    def _give_name(self, made: Path, name: Path, scheduled: bool) -> None:
        if any(made.glob("*config.json")):  # sharded checkpoints of FSDP and DeepSpeed have none
            set_default_permissions(made)
        self.state.save_to_json(str(made / "trainer_state.json"))  # again: with the best checkpoint's lasting name
        if not self.args.save_only_model:  # else nothing can be resumed from it
            write_manifest(made, scheduled=scheduled)
        if name.exists():  # damaged, or it would not be saved again
            shutil.rmtree(name)
        sync(made)
        made.rename(name)
        sync(name.parent, contents=False)
        made.parent.rmdir()
        for path in checkpoints_in(name.parent):
            # Later ones are damaged, or --resume named an earlier one; they must not count as the newest.
            if number_of(path) > number_of(name) or (path != name and not is_scheduled(path)):
                shutil.rmtree(path)
        if scheduled:
            self._rotate()

    def tidy(self) -> None:
        """After training: remove the checkpoints that a run without interruptions would not have. All ranks call it."""
        checkpoints = Path(super()._get_output_dir(None))

        def work() -> None:
            for path in checkpoints_in(checkpoints):
                if not is_scheduled(path):
                    shutil.rmtree(path)
            self._rotate()  # a kill may have come before

        self._alone(work)

    def _rotate(self) -> None:
        rotate_checkpoints(
            output_dir=super()._get_output_dir(None),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=False,
        )

    def _alone(self, work: Any) -> None:
        """Let one rank do some work on the disk while the others wait."""
        if dist.is_initialized():
            dist.barrier()
        if self.args.should_save:
            work()
        if dist.is_initialized():
            dist.barrier()
