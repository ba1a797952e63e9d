"""`python upload/push.py RUN USER/REPO`: the command `push`, from a checkout."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of this folder
    try:
        from gpt2small_hf.cli import main
    except KeyboardInterrupt:  # importing takes time
        sys.exit(130)
    sys.exit(main(["push", *sys.argv[1:]]))
