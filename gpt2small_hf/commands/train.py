"""`train`: a recipe and flags → one run, by `training/run.py`."""

from __future__ import annotations

from gpt2small_hf.config.resolve import read_config, show_recipe
from gpt2small_hf.training.memory import check_memory
from gpt2small_hf.training.paths import check_packages, check_paths
from gpt2small_hf.training.resume import check_folder, check_not_in_use


def main(words: list[str]) -> None:
    """Run `train`."""
    config = read_config(words)
    if config.run.print_recipe:
        print(show_recipe(config), end="")
        return
    check_folder(config.folder, config)
    if not config.run.preflight_only:  # which writes nothing
        check_not_in_use(config.folder)
    check_paths(config)
    check_packages(config)
    check_memory(config)
    from gpt2small_hf.training.run import train

    train(config)
