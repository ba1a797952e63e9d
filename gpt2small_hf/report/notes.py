"""Sentences about results that the end of training, reports and the card have in common."""

from __future__ import annotations

from gpt2small_hf.evaluation.tasks import has_overlap
from gpt2small_hf.runs.results import HeldOut, NewText

CHATS_TO_JUDGE_BY = 10
"""With fewer held-out chats, the model with the lowest loss is mostly chosen by chance."""
FAR_WORSE = 2.0
"""Multiple of the loss before training. Overfitting raises it by less, divergence by more."""

NOTHING_HELD_OUT = "Nothing was held out: all of the data was trained on, so the loss on new data is not known."


def new_text(heldout: HeldOut) -> NewText | None:
    """Return the results on tokens outside overlaps with the training text; None if (almost) all tokens are."""
    return heldout.new_text if heldout.new_text and has_overlap(heldout.new_text) else None


def kept_line(step: int | None, last_step: int) -> str | None:
    """State that the weights are of an earlier step than the last; None if they are not, or if it is not known."""
    if step is None or step == last_step:
        return None
    return f"The weights are those of step {step:,}, the best checkpoint; training ended at step {last_step:,}."


def worse_line(heldout: HeldOut, train_loss: float | None) -> str | None:
    """Return `rise_line` of a finished run; None also if nothing is held out."""
    if heldout.before is None or heldout.after is None:
        return None
    return rise_line(heldout.before.loss_nats, heldout.after.loss_nats, heldout.rows.conversations, train_loss)


def rise_line(before: float, after: float, conversations: int | None, train_loss: float | None) -> str | None:
    """Return a sentence if a held-out loss is above that before training; None if it is not.

    With fewer than `CHATS_TO_JUDGE_BY` held-out chats, it must be above `FAR_WORSE` times that. The advice depends on
    the last training loss: if it is below the held-out loss before training, the model overfits, else it diverged.
    """
    few = conversations is not None and conversations < CHATS_TO_JUDGE_BY
    if after <= (FAR_WORSE * before if few else before):
        return None
    rise = f"The held-out loss rose from {before:.3f} before training to {after:.3f}"
    if train_loss is not None and train_loss < before:
        return (
            f"{rise} while the training loss fell to {train_loss:.3f}: the model overfits, and is worse than before. "
            f"Train for fewer epochs, keep the best checkpoint (--load_best_model_at_end), stop early "
            f"(--early_stopping_patience), or train on more {'text' if conversations is None else 'chats'}."
        )
    return (
        f"{rise}: the model is worse than before. "
        "Lower --learning_rate, warm up longer, clip gradients (--max_grad_norm 1) or train for fewer steps."
    )
