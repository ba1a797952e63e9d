"""Numbers and tables as text, the same way in the terminal, in reports and on the card.

Thousands have commas, and `–` is an unknown value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

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


# ---- tables ---------------------------------------------------------------------------------------------------------


VISIBLE = {number: chr(0x2400 + number) for number in range(32)} | {ord("\n"): "⏎"}
"""Unicode's pictures of the control characters."""


def console_table(header: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[int] = (0,)) -> str:
    """Return a table padded with spaces: columns in `text` are left-aligned, numbers right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in text else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[int] = (0,)) -> str:
    """Return a table in GitHub's Markdown; cells are escaped."""
    rule = [":---" if i in text else "---:" for i in range(len(header))]
    cells = [[escaped(cell) for cell in line] for line in [header, *rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in [cells[0], rule, *cells[1:]])


def escaped(text: str) -> str:
    """Escape text for Markdown, on one line, for use within a sentence or a table."""
    return re.sub(r"([\\`*_\[\]<>#|~$&])", r"\\\1", one_line(text))


def one_line(text: str, width: int | None = None) -> str:
    """Return text on one line of at most `width` characters, with visible marks for newlines and control characters.

    A model can generate terminal control sequences. Longer text ends with `…`.
    """
    line = "".join(one if one.isprintable() else VISIBLE.get(ord(one), "·") for one in text)
    return line if width is None or len(line) <= width else line[: width - 1] + "…"
