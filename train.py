"""Door: one recipe and some flags → one run. `python train.py --help` lists every flag."""

import sys
from pathlib import Path


def main() -> None:
    """Train as the command line says. torch is imported, which takes seconds, once flags and paths are understood."""
    from gpt2small_hf.runs.layout import RunFolder
    from gpt2small_hf.training.arguments import complete, read_arguments, show_recipe
    from gpt2small_hf.training.memory import check_memory
    from gpt2small_hf.training.paths import check_packages, check_paths
    from gpt2small_hf.training.resume import check_folder

    words, default_recipe = sys.argv[1:], Path(__file__).parent / "examples" / "tiny.yaml"
    args = read_arguments(words, default_recipe)
    if args.run.print_recipe:
        print(show_recipe(words, default_recipe), end="")
        return
    check_folder(RunFolder(args.run.output_dir), args)
    check_paths(args)
    check_packages(args)
    check_memory(args)
    from gpt2small_hf.training.run import train

    train(complete(args))


if __name__ == "__main__":
    try:
        from gpt2small_hf.errors import open_door
    except KeyboardInterrupt:  # importing takes time
        sys.exit(130)
    sys.exit(open_door(main))
