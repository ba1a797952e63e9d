"""`plan`: a recipe → an estimate of what its run needs, by `plan.py`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from gpt2small_hf.config.parser import require_at_least, setting, without_flags
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.training import budget


@dataclass(frozen=True)
class PlanArguments:
    """The devices to plan for."""

    _argument_group_name = "plan"

    device_name: str | None = setting(
        None, "Device to plan for, such as H100, A100 or RTX 4090. Unset: the one of this machine."
    )
    n_devices: int | None = setting(None, "Number of devices. Unset: those of this machine.")
    mfu: float | None = setting(
        None,
        "Expected share of the device's peak FLOP/s (MFU). Unset: what the reference series measured on this device in "
        "this precision, or the range that it measured on others.",
    )

    def __post_init__(self) -> None:
        if self.device_name is not None and budget.find_device(self.device_name) is None:
            raise UsageError(f"--device_name {self.device_name} is unknown. {budget.suggest_device(self.device_name)}")
        require_at_least(self, {"n_devices": 1})
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise UsageError(f"--mfu is {self.mfu:g}. Give a share above 0, up to 1.")


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
    check_paths(config)
    from gpt2small_hf.plan import estimate

    training = without_flags(words, {setting.name for setting in fields(PlanArguments)})
    print(f"{estimate(config, target)}\n\nnext: {command('train', *training)}")
