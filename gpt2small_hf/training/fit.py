"""Training to the last step, and the errors that end it before."""

from __future__ import annotations

import gc
from pathlib import Path

from gpt2small_hf.errors import RunStoppedError, UsageError, disk_is_full, print_stderr
from gpt2small_hf.runs.layout import RunFolder, number_of
from gpt2small_hf.training.callbacks import StopOnSignal
from gpt2small_hf.training.checkpoint_files import complete_checkpoints
from gpt2small_hf.training.progress import ProgressLine
from gpt2small_hf.training.trainer import CausalLMTrainer


def fit(
    trainer: CausalLMTrainer, run: RunFolder, checkpoint: Path | None, stop: StopOnSignal, progress: ProgressLine
) -> None:
    """Train to the last step.

    Raises: RunStoppedError and RunInterruptedError, which name the checkpoint to resume from.
    """
    # Objects that exist by now stay: the garbage collector need not visit them again and again.
    gc.collect()
    gc.freeze()
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trainer.tidy()
    except ImportError as error:  # an optimizer that is not installed
        raise UsageError(" ".join(str(error).split())) from error
    except Exception as error:
        if isinstance(error, RunStoppedError):
            reason = str(error)
        elif disk_is_full(error):
            reason = f"the disk is full ({error})."
        elif str(error).startswith("DebugUnderflowOverflow"):
            reason = "--debug underflow_overflow found a value that is not finite; its report is above."
        else:
            raise
        raise RunStoppedError(f"{reason} {last_checkpoint(run)}") from None
    finally:
        gc.unfreeze()
        stop.close()
        progress.close()
    if stop.agreed(trainer.args.device):  # after the last step
        raise stop.interruption(next(complete_checkpoints(run), None))
    best, kept = trainer.state.best_global_step, trainer.state.best_model_checkpoint
    if trainer.args.load_best_model_at_end and best and (kept is None or number_of(Path(kept)) != best):
        instead = "the last model" if kept is None else Path(kept).name
        print_stderr(
            f"the lowest held-out loss was at step {best:,}, where no checkpoint was saved; {instead} is kept."
        )


def last_checkpoint(run: RunFolder) -> str:
    """Return a sentence that names the newest complete checkpoint of a run."""
    return f"Last good checkpoint: {next(complete_checkpoints(run), None) or 'none was saved'}."
