"""Progress of `prepare` on stderr: one live line on a terminal, a plain line every 30 seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gpt2small_hf.data.corpus.readers import Meter
from gpt2small_hf.data.corpus.shards import SplitCounts
from gpt2small_hf.formatting import duration

SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Shows documents, bytes, tokens a second and, where the sources' sizes are known, the time left."""

    def __init__(self, meters: list[Meter]) -> None:
        self.meters = meters
        self.size = sum(meter.size for meter in meters) if all(meter.size for meter in meters) else 0
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, transient=True, refresh_per_second=4)
        self.began = self.shown = time.monotonic()
        self.tokens_before = self.done_before = -1

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def show(self, counts: list[SplitCounts]) -> None:
        """Print progress; without a terminal at most every SECONDS_BETWEEN_LINES."""
        now = time.monotonic()
        tokens = sum(split.tokens for split in counts)
        if self.tokens_before < 0:  # a resumed run has some that this one did not make
            self.tokens_before, self.done_before, self.began = tokens, self.done(), now
        elif self.console.is_terminal:
            self.live.update(Text(self.line(counts, tokens, now)))
        elif now - self.shown >= SECONDS_BETWEEN_LINES:
            self.shown = now
            self.console.print(self.line(counts, tokens, now), highlight=False, soft_wrap=True)

    def line(self, counts: list[SplitCounts], tokens: int, now: float) -> str:
        seconds = max(now - self.began, 1e-9)
        words = [
            f"{sum(split.documents for split in counts):,} documents",
            f"{sum(split.bytes for split in counts) / 1e6:,.1f} MB",
            f"{tokens:,} tokens",
            f"{(tokens - self.tokens_before) / seconds / 1e6:.2f}M tok/s",
        ]
        done = self.done()
        if self.size and done > self.done_before:
            left = seconds * max(0, self.size - done) / (done - self.done_before)
            words += [f"{100 * min(1, done / self.size):.0f} %", f"{duration(left)} left"]
        return "  ".join(words)

    def done(self) -> int:
        return sum(meter.done for meter in self.meters)
