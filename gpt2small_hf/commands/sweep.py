"""`sweep`: a folder of recipes → runs with several seeds and a table, by `sweep.py`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path

from gpt2small_hf.config.parser import FlagParser, require_at_least, setting
from gpt2small_hf.config.recipe import BASELINE, find_recipes
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.files import check_writable


@dataclass(frozen=True)
class SweepArguments:
    """The runs of a sweep, and their folder."""

    _argument_group_name = "sweep"

    seeds: int = setting(3, "Number of initial-weight seeds of the baseline, and of training seeds for each of them.")
    seeds_per_intervention: int | None = setting(
        None, "Number of seed pairs (1, 1), (2, 2), … of every other recipe; unset: 2, at most --seeds."
    )
    n_jobs: int = setting(1, "Number of runs at a time. On a CPU each uses the num_threads of its recipe.")
    output_dir: Path | None = setting(None, "Folder of the runs and of the table; unset: runs/<name of FOLDER>.")
    only: list[str] = field(
        default_factory=list, metadata={"help": "Recipes to run; the table has all that were run. Unset: all."}
    )
    overwrite: bool = setting(False, "Repeat runs whose recipe or text has changed.")
    table_only: bool = setting(False, "Write the table of the finished runs, without training.")

    def __post_init__(self) -> None:
        require_at_least(self, dict.fromkeys(("seeds", "seeds_per_intervention", "n_jobs"), 1))
        if self.n_pairs > self.seeds:
            raise UsageError(
                f"--seeds_per_intervention is {self.seeds_per_intervention}, but the baseline is run with {self.seeds} "
                f"(--seeds), and runs are compared with the baseline of the same seeds. Give at most {self.seeds}."
            )

    @property
    def n_pairs(self) -> int:
        """Seed pairs of each recipe but the baseline."""
        return min(2, self.seeds) if self.seeds_per_intervention is None else self.seeds_per_intervention


def main(words: list[str]) -> None:
    """Run `sweep`."""
    parser = FlagParser(
        SweepArguments,
        prog=command("sweep"),
        usage=f"{command('sweep')} FOLDER [--flag value …]",
        description="Run every recipe of a folder with several seeds, and list which changes of the held-out loss "
        f"exceed its noise. The folder has a {BASELINE}.yaml, with which the others are compared. The same command "
        "resumes an interrupted sweep.",
    )
    parser.add_argument("FOLDER", type=Path, help="Folder of recipes, such as examples/interventions-small.")
    args, where = parser.fill(words)
    from gpt2small_hf.config.resolve import read_config
    from gpt2small_hf.training.memory import check_memory
    from gpt2small_hf.training.paths import check_packages, check_paths

    recipes = find_recipes(where.FOLDER)
    for name in args.only:
        if name not in recipes:
            near = difflib.get_close_matches(name, recipes, 1)
            raise UsageError(
                f"{where.FOLDER} has no recipe {name}.yaml." + (f" Did you mean {near[0]}?" if near else "")
            )
    for name, path in recipes.items():
        if not args.table_only and (not args.only or name in (BASELINE, *args.only)):
            settings = read_config([str(path)])
            check_paths(settings)
            check_packages(settings)
            check_memory(settings)
    check_writable("--output_dir", args.output_dir or Path("runs") / where.FOLDER.resolve().name)
    from gpt2small_hf.sweep import sweep

    sweep(where.FOLDER, args)
