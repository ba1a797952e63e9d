"""The share of a run's time that its steps take, and what the rest is.

    python tests/benchmarks/bench_overhead.py [recipe.yaml [--flag value …]]

Without a recipe, two runs: `examples/chat.yaml`, and the same recipe with 30 of its chats (`--chat_data`). Both start
from runs/tiny (`python train.py`) and are written to a temporary folder. Time starts with the first step; what comes
before is printed as start-up. A step is all that the Trainer does from fetching its rows to its optimizer's update;
evaluations, checkpoints, samples, charts, logs and everything after the last step are listed apart from them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from gpt2small_hf.config.resolve import read_config
from gpt2small_hf.formatting import console_table
from gpt2small_hf.training import callbacks, run
from gpt2small_hf.training.trainer import CausalLMTrainer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WHOLE = "everything else"
# Functions, and what their time is called. Time is counted once: a function's own, without those called in it.
MEASURED = [
    (run, "heldout_losses", "held-out loss at the end"),
    (run, "complete", "completions at the end"),
    (run, "answer_all", "answers at the end"),
    (run, "seen_in_training", "overlap at the end"),
    (run, "save_model", "saving the model"),
    (run, "draw_charts", "charts at the end"),
    (callbacks, "complete", "samples"),
    (callbacks, "draw_charts", "charts"),
    (CausalLMTrainer, "evaluate", "evaluations"),
    (CausalLMTrainer, "_save_checkpoint", "checkpoints"),
    (CausalLMTrainer, "log", "log"),
]


class Clock:
    """Adds up wall-clock seconds by name; an inner measurement is taken from the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.open: list[tuple[str, float]] = []
        self.startup = 0.0
        """Seconds before the first step, all names together."""

    def enter(self, name: str) -> None:
        """Start measuring `name`."""
        self.open.append((name, time.perf_counter()))

    def leave(self) -> None:
        """End the innermost measurement."""
        name, began = self.open.pop()
        took = time.perf_counter() - began
        self.seconds[name] += took
        self.counts[name] += 1
        if self.open:
            self.seconds[self.open[-1][0]] -= took

    def start_here(self) -> None:
        """Drop the measurements so far, but keep their total time."""
        now = time.perf_counter()
        self.startup = now - self.open[0][1]
        self.open = [(name, now) for name, _ in self.open]
        self.seconds.clear()
        self.counts.clear()

    def measure(self, owner: Any, function: str, name: str) -> Callable[[], None]:
        """Measure each call of a function. Returns: what ends that."""
        original = getattr(owner, function)

        @wraps(original)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self.enter(name)
            try:
                return original(*args, **kwargs)
            finally:
                self.leave()

        setattr(owner, function, measured)
        return lambda: setattr(owner, function, original)

    def measure_steps(self) -> Callable[[], None]:
        """Measure from a step's rows to what follows its update. Returns: what ends that."""
        fetch, after = CausalLMTrainer.get_batch_samples, CausalLMTrainer._maybe_log_save_evaluate

        def begin(trainer: CausalLMTrainer, *args: Any, **kwargs: Any) -> Any:
            if not self.counts["steps"]:
                self.start_here()
            self.enter("steps")
            return fetch(trainer, *args, **kwargs)

        def end(trainer: CausalLMTrainer, *args: Any, **kwargs: Any) -> None:
            if self.open[-1][0] == "steps":  # and not once more after an epoch
                self.leave()
            after(trainer, *args, **kwargs)

        def replace(first: Any, last: Any) -> None:
            setattr(CausalLMTrainer, fetch.__name__, first)
            setattr(CausalLMTrainer, after.__name__, last)

        replace(begin, end)
        return lambda: replace(fetch, after)


def shares(words: list[str]) -> str:
    """Train as `python train.py` with these words. Returns: a table of where the time went."""
    clock = Clock()
    ends = [clock.measure_steps(), *(clock.measure(*one) for one in MEASURED)]
    try:
        args = read_config(words, EXAMPLES / "tiny.yaml")
        clock.enter(WHOLE)
        run.train(args)
        clock.leave()
    finally:
        for end in ends:
            end()
    total = sum(clock.seconds.values())
    rows = [
        [name, str(clock.counts[name]), f"{seconds:.2f} s", f"{seconds / total:.1%}"]
        for name, seconds in sorted(clock.seconds.items(), key=lambda one: -one[1])
    ]
    table = console_table(["", "times", "time", "share"], rows)
    return (
        f"{table}\n{total:.1f} s after {clock.startup:.1f} s of start-up; steps {clock.seconds['steps'] / total:.1%}\n"
    )


def main() -> None:
    """Run what is asked for, or both default runs, and print where the time went."""
    words = sys.argv[1:]
    chats = (EXAMPLES / "data" / "chats.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as place:
        own = Path(place) / "own.jsonl"
        own.write_text("".join(chats[:: len(chats) // 30][:30]), encoding="utf-8")
        recipe = str(EXAMPLES / "chat.yaml")
        runs = [words] if words else [[recipe], [recipe, "--chat_data", str(own)]]
        tables = [shares([*some, "--output_dir", str(Path(place) / str(n))]) for n, some in enumerate(runs)]
    print(f"\n{torch.get_num_threads()} threads, PyTorch {torch.__version__}")
    for some, table in zip(runs, tables, strict=True):
        print(f"\n{' '.join(some)}\n{table}")


if __name__ == "__main__":
    main()
