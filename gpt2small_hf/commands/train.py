"""`train`: a recipe and some flags → one run, by `training/run.py`."""

from __future__ import annotations

from gpt2small_hf.config.resolve import DEFAULT_RECIPE, complete, read_arguments, show_recipe
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.training.memory import check_memory
from gpt2small_hf.training.paths import check_packages, check_paths
from gpt2small_hf.training.resume import check_folder


def main(words: list[str]) -> None:
    """Run `train`."""
    args = read_arguments(words, DEFAULT_RECIPE)
    if args.run.print_recipe:
        print(show_recipe(words, DEFAULT_RECIPE), end="")
        return
    check_folder(RunFolder(args.run.output_dir), args)
    check_paths(args)
    check_packages(args)
    check_memory(args)
    from gpt2small_hf.training.run import train

    train(complete(args))
