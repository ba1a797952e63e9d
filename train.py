"""Door: one recipe and some flags → one run. `python train.py --help` lists every flag."""

import sys
from pathlib import Path


def main() -> None:
    """Train as the command line says."""
    from gpt2small_hf.training.arguments import parse_arguments
    from gpt2small_hf.training.run import train

    train(parse_arguments(sys.argv[1:], default_recipe=Path(__file__).parent / "examples" / "tiny.yaml"))


if __name__ == "__main__":
    try:
        from gpt2small_hf.runs import open_door
    except KeyboardInterrupt:  # importing takes seconds
        sys.exit(130)
    sys.exit(open_door(main))
