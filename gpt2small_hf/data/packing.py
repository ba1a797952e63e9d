"""Token stream → fixed-length rows. Pure functions: no files, no tokenizer.

`tokens.py` makes the stream, documents joined by one end-of-text token as in GPT-2; `dataset.py` serves the rows.
"""

from __future__ import annotations


def count_rows(n_tokens: int, seq_len: int) -> int:
    """Rows cut from a stream of `n_tokens`. The last partial row is dropped."""
    return n_tokens // seq_len


def row_span(row: int, seq_len: int) -> tuple[int, int]:
    """Where row number `row` starts and ends in the stream."""
    return row * seq_len, (row + 1) * seq_len
