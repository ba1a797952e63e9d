"""`plan`: a recipe → what its run takes, by `plan.py`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from gpt2small_hf.config.parser import without_flags
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.training import budget


@dataclass
class PlanArguments:
    """On what to plan."""

    _argument_group_name = "plan"

    device_name: str | None = field(
        default=None,
        metadata={"help": "A device to plan for, such as H100, A100 or RTX 4090. Unset: the one found here."},
    )
    n_devices: int | None = field(
        default=None, metadata={"help": "How many of them. Unset: as many as are found here."}
    )
    mfu: float | None = field(
        default=None,
        metadata={
            "help": "Share of the device's peak that the run is expected to make. Unset: what the reference series "
            "measured on this device and in this precision, or the range that it measured on others."
        },
    )

    def __post_init__(self) -> None:
        if self.device_name is not None and budget.find_device(self.device_name) is None:
            raise UsageError(
                f"--device_name {self.device_name} is not known. {budget.suggest_device(self.device_name)}"
            )
        if self.n_devices is not None and self.n_devices < 1:
            raise UsageError(f"--n_devices is {self.n_devices}. Give 1 or more, or leave it out.")
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise UsageError(f"--mfu is {self.mfu:g}. Give a share above 0, up to 1.")


def main(words: list[str]) -> None:
    """Run `plan`."""
    from gpt2small_hf.config.resolve import DEFAULT_RECIPE, complete, read_with
    from gpt2small_hf.training.paths import check_paths

    args, planned = read_with(
        words,
        DEFAULT_RECIPE,
        command_name="plan",
        purpose="Show what a run takes, before anything runs, and what rules of thumb say of it.",
        more=(PlanArguments,),
    )
    check_paths(args)
    from gpt2small_hf.plan import describe

    training = without_flags(words, {setting.name for setting in fields(PlanArguments)})
    # A plan for another machine does not ask whether this one can compute in bfloat16.
    complete(args, any_precision=True)
    print(f"{describe(args, planned)}\n\nnext: {command('train', *training)}")
