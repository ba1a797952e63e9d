"""Learning-rate schedules: settings and a number of steps → the learning rate of each step.

Supports every schedule of transformers, and DeepSeek's steps. No model is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments, get_scheduler

from gpt2small_hf.config.trainer import DEEPSEEK_STEPS
from gpt2small_hf.errors import UsageError

_FOLLOW_THE_LOSS = {"reduce_lr_on_plateau", "greedy"}
_TAKE_NOTHING = {"constant", "constant_with_warmup", DEEPSEEK_STEPS}  # transformers ignores their settings


def rates(args: TrainingArguments, total_steps: int) -> Callable[[int], float] | None:
    """Return the learning rate of each step as a share of its peak, from 0 to 1.

    Args:
        args: schedule, its settings, warm-up and peak. In addition to its settings in transformers,
            `warmup_stable_decay` accepts `decay_share`: the share of all steps spent on the decay, at most those
            that follow the warm-up.
        total_steps: optimizer steps of the run.

    Returns: a function of the number of completed steps: 0 gives the rate of the first step, `total_steps` the final
        rate. None for a schedule that depends on the held-out loss.
    Raises:  UsageError if a setting is invalid, or a rate is below 0 or above the peak.
    """
    name, settings = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type), args.lr_scheduler_kwargs
    warmup_steps = args.get_warmup_steps(total_steps)
    try:
        if isinstance(settings, str):
            raise ValueError("it is not a JSON object")
        if settings and name in _TAKE_NOTHING:
            raise ValueError("it takes none")
        if name == DEEPSEEK_STEPS:
            return lambda step: _deepseek_share(step, warmup_steps, total_steps)
        settings = dict(settings or {})
        if name == "warmup_stable_decay":
            settings["num_decay_steps"] = _decay_steps(settings, warmup_steps, total_steps)
        # transformers provides its schedules only as schedulers of an optimizer: this one has a single parameter.
        one = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
        # With num_stable_steps, it warns that it ignores the total. If the whole run is warm-up, polynomial would
        # divide by the number of remaining steps, which is zero.
        total = None if "num_stable_steps" in settings else max(total_steps, warmup_steps + 1)
        scheduler = get_scheduler(name, one, warmup_steps, total, settings)
        if name in _FOLLOW_THE_LOSS:
            return None
        assert isinstance(scheduler, LambdaLR)
        share = scheduler.lr_lambdas[0]
        shares = [share(step) for step in (*(total_steps * part // 100 for part in range(101)), warmup_steps)]
        if not all(0 <= value <= 1 for value in shares):
            raise ValueError(f"the rate ranges from {min(shares):.3g} to {max(shares):.3g} times its peak")
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(
            f"--lr_scheduler_kwargs {args.lr_scheduler_kwargs} does not suit --lr_scheduler_type {name} ({error})."
        ) from None
    return share


def _decay_steps(settings: dict[str, Any], warmup_steps: int, total_steps: int) -> int:
    """Return the number of decay steps of `warmup_stable_decay`; remove `decay_share` from `settings`.

    Raises: ValueError if a setting is invalid or missing.
    """
    share = settings.pop("decay_share", None)
    n = settings.get("num_decay_steps")
    if n is not None:
        if n != int(n) or n < 0:
            raise ValueError(f"num_decay_steps is {n}; give whole steps, or a share as decay_share")
        if "num_stable_steps" not in settings and warmup_steps + n > total_steps:
            raise ValueError(f"{warmup_steps:,} steps of warm-up and {n:,} of decay are more than {total_steps:,}")
        return int(n)
    if share is None:
        raise ValueError("give decay_share or num_decay_steps")
    if not 0 < share <= 1:
        raise ValueError(f"decay_share is {share}; give a number above 0, up to 1")
    return max(0, min(round(share * total_steps), total_steps - warmup_steps))


def _deepseek_share(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return the share of the peak: warm-up, 1 up to 80 % of all steps, 0.316 up to 90 %, then 0.1.

    Source: Bi et al. 2024, DeepSeek LLM, section 2.3.
    """
    if step < warmup_steps:
        return step / warmup_steps
    if 10 * step < 8 * total_steps:
        return 1.0
    return 0.316 if 10 * step < 9 * total_steps else 0.1


class Schedule(LambdaLR):
    """Set the learning rates that `rates` returns. A saved state restores the step only, not the peak or the shape.

    A run that resumes with the same settings has the same rates to the bit. One that resumes with another length or
    shape follows the new schedule from that step.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the step of `state_dict`. Load the optimizer's state first: it contains the old rate."""
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["_step_count"]
        self._last_lr = [
            peak * share(self.last_epoch) for peak, share in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, peak, rate in zip(self.optimizer.param_groups, self.base_lrs, self._last_lr, strict=True):
            group |= {"initial_lr": peak, "lr": rate}
