"""`plan`: a recipe → an estimate of what its run needs, by `plan.py`."""

from __future__ import annotations

from dataclasses import fields

from gpt2small_hf.config.commands import PlanArguments
from gpt2small_hf.config.parser import without_flags
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.training import budget


def main(words: list[str]) -> None:
    """Run `plan`."""
    from gpt2small_hf.config.resolve import read_with
    from gpt2small_hf.training.paths import check_paths

    config, target = read_with(
        words,
        command_name="plan",
        purpose="Estimate tokens, FLOPs, hours and disk space of a run, and compare its settings with rules of thumb.",
        more=(PlanArguments,),
    )
    if target.device_name is not None and budget.find_device(target.device_name) is None:
        raise UsageError(f"--device_name {target.device_name} is unknown. {budget.suggest_device(target.device_name)}")
    check_paths(config, is_planned=True)
    from gpt2small_hf.plan import estimate

    training = without_flags(words, {setting.name for setting in fields(PlanArguments)})
    print(f"{estimate(config, target)}\n\nnext: {command('train', *training)}")
