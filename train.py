"""Door: one recipe and some flags → one run. `python train.py --help` lists every flag."""

import sys
from pathlib import Path


def main() -> None:
    """Train as the command line says."""
    from gpt2small_hf.training.arguments import parse_arguments, show_recipe
    from gpt2small_hf.training.run import train

    default_recipe = Path(__file__).parent / "examples" / "tiny.yaml"
    words = [word for word in sys.argv[1:] if word not in ("--print_recipe", "--print-recipe")]
    if len(words) < len(sys.argv) - 1:
        print(show_recipe(words, default_recipe), end="")
    else:
        train(parse_arguments(words, default_recipe))


if __name__ == "__main__":
    try:
        from gpt2small_hf.runs import open_door
    except KeyboardInterrupt:  # importing takes seconds
        sys.exit(130)
    sys.exit(open_door(main))
