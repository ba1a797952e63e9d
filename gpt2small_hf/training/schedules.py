"""Settings and a number of steps → the learning rate of each step.

The shapes are transformers', and one more. Nothing here asks for a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments, get_scheduler

from gpt2small_hf.config.trainer import DEEPSEEK_STEPS
from gpt2small_hf.errors import UsageError

_FOLLOW_THE_LOSS = {"reduce_lr_on_plateau", "greedy"}
_TAKE_NOTHING = {"constant", "constant_with_warmup", DEEPSEEK_STEPS}  # transformers would pass over what is said


def rates(args: TrainingArguments, total_steps: int) -> Callable[[int], float] | None:
    """The learning rate of each step as a share of its peak, from 0 to 1.

    Args:
        args: schedule, its settings, warm-up and peak. `warmup_stable_decay` takes, beside what it takes in
            transformers, `decay_share`: the share of all steps that the decay lasts, as far as warm-up leaves room.
        total_steps: optimizer steps of the run.

    Returns: a function of the steps done: 0 for the first step's rate, `total_steps` for where the rate ends. None for
        a schedule that follows the held-out loss.
    Raises:  UsageError if the schedule does not take its settings, or leaves the range from 0 to the peak.
    """
    name, settings = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type), args.lr_scheduler_kwargs
    warmup_steps = args.get_warmup_steps(total_steps)
    try:
        if isinstance(settings, str):
            raise ValueError("it is no JSON object")
        if settings and name in _TAKE_NOTHING:
            raise ValueError("it takes none")
        if name == DEEPSEEK_STEPS:
            return lambda step: _deepseek_share(step, warmup_steps, total_steps)
        settings = dict(settings or {})
        if name == "warmup_stable_decay":
            settings["num_decay_steps"] = _decay_steps(settings, warmup_steps, total_steps)
        # transformers has its shapes only as schedulers; an optimizer of one number carries the peak.
        one = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
        # With the stable steps given, it warns of a total that it then passes over. After a run that is warm-up to its
        # end, polynomial would divide by the steps that are left: none.
        total = None if "num_stable_steps" in settings else max(total_steps, warmup_steps + 1)
        scheduler = get_scheduler(name, one, warmup_steps, total, settings)
        if name in _FOLLOW_THE_LOSS:
            return None
        assert isinstance(scheduler, LambdaLR)
        share = scheduler.lr_lambdas[0]
        shares = [share(step) for step in (*(total_steps * part // 100 for part in range(101)), warmup_steps)]
        if not all(0 <= value <= 1 for value in shares):
            raise ValueError(f"the rate goes from {min(shares):.3g} to {max(shares):.3g} times its peak")
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(
            f"--lr_scheduler_kwargs {args.lr_scheduler_kwargs} does not suit --lr_scheduler_type {name} ({error})."
        ) from None
    return share


def _decay_steps(settings: dict[str, Any], warmup_steps: int, total_steps: int) -> int:
    """Steps of `warmup_stable_decay`'s decay. Takes `decay_share` out of `settings`. Raises: ValueError."""
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
    """Warm-up, the peak to 80 % of all steps, 31.6 % of it to 90 %, then 10 % (Bi et al. 2024, DeepSeek LLM, 2.3)."""
    if step < warmup_steps:
        return step / warmup_steps
    if 10 * step < 8 * total_steps:
        return 1.0
    return 0.316 if 10 * step < 9 * total_steps else 0.1


class Schedule(LambdaLR):
    """Sets the rates of `rates`. Of a saved state it takes the steps done; peak and shape stay its own.

    So a run that goes on as it was has the same rates to the bit, and one that goes on with another length, or another
    end, has the new schedule's from there on.
    """

    def __init__(self, optimizer: Optimizer, share: Callable[[int], float]) -> None:
        """Take the optimizer, whose groups' rates are the peak, and what `rates` returns."""
        super().__init__(optimizer, share)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was saved. Load the optimizer's state before: it has the rate as it was then."""
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["_step_count"]
        self._last_lr = [
            peak * share(self.last_epoch) for peak, share in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, peak, rate in zip(self.optimizer.param_groups, self.base_lrs, self._last_lr, strict=True):
            group |= {"initial_lr": peak, "lr": rate}
