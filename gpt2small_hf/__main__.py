"""Run a command: `python -m gpt2small_hf COMMAND …`."""

import sys

from gpt2small_hf.cli import main as run  # the console script of an older editable install imports this name

if __name__ == "__main__":
    sys.exit(run())
