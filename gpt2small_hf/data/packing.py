"""Token stream → rows of one length; conversations → rows that never split one. Pure functions: no files, no tokenizer.

In a stream, documents are separated by one end-of-text token as in GPT-2.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import islice

import numpy as np

BUFFER_DOCUMENTS = 1024
PACK_CROPPED_VERSION = 1  # goes up when `pack_cropped` would give other rows


def restarting_positions(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """Return positions that restart at 0 at each `eos_id`, the first token of the document after it.

    Returns: int64, shape of `tokens` (one row). Tokens before the first `eos_id` start at 0 too.
    """
    places = np.arange(len(tokens))
    return places - np.maximum.accumulate(np.where(tokens == eos_id, places, 0))


def pack_cropped(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Fill rows of exactly `seq_len` tokens with whole documents where they fit, and with beginnings where none does.

    A row takes, of the next BUFFER_DOCUMENTS documents, the longest that fits the space left; if none does, the
    shortest, cropped to that space: it loses least. A document longer than a row counts as one of `seq_len` tokens, as
    it can fill no more than that. What is cropped is in no row, nor are the documents of a last row that is not full.
    No document is used twice. Of equally long ones the earlier is placed, or the later cropped.

    `lengths`: tokens of each document, 1 or more, in the order of the stream.

    Returns: int64, flat. Row r contains the documents numbered `index[index[r] : index[r + 1]]`; there
        are `index[0] - 1` rows. Only the last of them may be cropped, to the space left in the row.
    """
    # One integer a document, so that a plain sorted list serves: by length, then the later documents.
    shift = len(lengths).bit_length()
    latest = len(lengths) - 1
    keys = (np.minimum(lengths, seq_len).astype(np.int64) << shift) + np.arange(latest, -1, -1)
    upcoming = iter(keys.data)
    buffer = sorted(islice(upcoming, BUFFER_DOCUMENTS))
    placed, ends = array("q"), array("q", [0])
    room = seq_len
    while buffer:
        n_fitting = bisect_left(buffer, (room + 1) << shift)
        key = buffer.pop(max(n_fitting - 1, 0))
        placed.append(key)
        room -= min(room, key >> shift)
        if not room:
            ends.append(len(placed))
            room = seq_len
        if (key := next(upcoming, None)) is not None:
            insort(buffer, key)
    documents = latest - (np.array(placed[: ends[-1]], np.int64) & ((1 << shift) - 1))
    return np.concatenate([np.array(ends, np.int64) + len(ends), documents])


def pack_unsplit(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Put whole pieces into rows of at most `seq_len` tokens: the longest first, each where it leaves the least room.

    This is best-fit decreasing, which needs at most 11/9 of the fewest rows possible, and four (Johnson 1974).

    Returns: for each row the numbers of its pieces. Raises: ValueError if a piece is longer than a row.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(seq_len + 1)]  # rows by the room that is left in them
    there = 0  # bit r is set where with_room[r] is not empty
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        length = lengths[piece]
        if length > seq_len:
            raise ValueError(f"A piece of {length} tokens does not fit a row of {seq_len}.")
        fitting = there >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            there ^= (not with_room[room]) << room
        else:
            room, row = seq_len, len(rows)
            rows.append([])
        rows[row].append(piece)
        with_room[room - length].append(row)
        there |= 1 << (room - length)
    return rows
