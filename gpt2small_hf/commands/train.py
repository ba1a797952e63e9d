"""`train`: a recipe and some flags → one run, by `training/run.py`."""

from __future__ import annotations

from pathlib import Path

from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.training.arguments import complete, read_arguments, show_recipe
from gpt2small_hf.training.memory import check_memory
from gpt2small_hf.training.paths import check_packages, check_paths
from gpt2small_hf.training.resume import check_folder

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"


def main(words: list[str]) -> None:
    """Run `train`."""
    args = read_arguments(words, TINY)
    if args.run.print_recipe:
        print(show_recipe(words, TINY), end="")
        return
    check_folder(RunFolder(args.run.output_dir), args)
    check_paths(args)
    check_packages(args)
    check_memory(args)
    from gpt2small_hf.training.run import train

    train(complete(args))
