"""`sweep`: a folder of recipes → runs with several seeds and a table, by `sweep.py`."""

from __future__ import annotations

import difflib
from pathlib import Path

from gpt2small_hf.config.commands import SweepArguments
from gpt2small_hf.config.parser import FlagParser
from gpt2small_hf.config.recipe import BASELINE, find_recipes
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.files import check_writable


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
