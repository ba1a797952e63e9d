"""Train a model: `python train.py [recipe.yaml] [--flag value …]` is the command `train`."""

import sys

if __name__ == "__main__":
    try:
        from gpt2small_hf.cli import main
    except KeyboardInterrupt:  # importing takes time
        sys.exit(130)
    sys.exit(main(["train", *sys.argv[1:]]))
