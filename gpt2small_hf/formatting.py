"""Numbers as text, the same way in the terminal, in reports and on the card."""

from __future__ import annotations

UNKNOWN = "–"


def number(value: float | None, style: str) -> str:
    """Format a number, or return the mark of an unknown value."""
    return UNKNOWN if value is None else f"{value:{style}}"


def perplexity(value: float | None) -> str:
    """Format a perplexity; above a million only that it is. None is one too large for a float."""
    return ">1,000,000" if value is None or value > 1e6 else f"{value:,.1f}"


def duration(seconds: float) -> str:
    """Format seconds as 42s, 3m07s or 3h12m."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest}s"
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def byte_size(n_bytes: float) -> str:
    """Format a number of bytes in MiB, GiB or TiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30)):
        if n_bytes >= size:
            return f"{n_bytes / size:,.1f} {unit}"
    return f"{n_bytes / 2**20:.1f} MiB"


def counted(n: int, word: str) -> str:
    """A number of things: 1 row, 2 rows."""
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"
