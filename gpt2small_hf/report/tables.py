"""Results → aligned text for the console. One rounding for all: losses three decimals, thousands with commas."""

from __future__ import annotations

from collections.abc import Sequence


def console_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded with spaces; the first is left-aligned, the others, being numbers, right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def heldout_rows(heldout: dict[str, dict[str, float]]) -> tuple[list[str], list[list[str]]]:
    """The held-out results of a run (`evaluation/heldout.json`) as a table: header, rows."""
    names = {"before": "before training", "unigram": "unigram (no context)", "after": "after training"}
    if heldout.get("new_text") and heldout["new_text"]["share"] < 0.99:
        names["new_text"] = f"  on the {heldout['new_text']['share']:.0%} not in the training text"
    header = ["held-out rows", "loss (nats/token)", "perplexity", "bits/byte"]
    rows = [
        [
            label,
            f"{heldout[name]['loss']:.3f}",
            f"{heldout[name]['perplexity']:,.1f}",
            f"{heldout[name]['bits_per_byte']:.3f}",
        ]
        for name, label in names.items()
        if name in heldout
    ]
    return header, rows
