"""How `data/packing.py` makes rows of a stream and of documents."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2small_hf.data.packing import (
    BUFFER_DOCUMENTS,
    pack_cropped,
    pack_unsplit,
    restarting_positions,
)

LENGTHS = st.lists(st.integers(1, 60) | st.integers(1, 5), min_size=1, max_size=200)


def pieces(lengths: list[int], seq_len: int) -> list[list[tuple[int, int]]]:
    """For each row that `pack_cropped` makes, its documents and how many tokens of each."""
    index = pack_cropped(np.array(lengths), seq_len).tolist()
    assert index[index[0] - 1] == len(index)
    rows = []
    for row in range(index[0] - 1):
        room = seq_len
        rows.append([])
        for document in index[index[row] : index[row + 1]]:
            rows[-1].append((document, min(lengths[document], room)))
            room -= rows[-1][-1][1]
    return rows


# ---- best fit ---------------------------------------------------------------------------------------------------


@given(lengths=LENGTHS, seq_len=st.integers(1, 64))
def test_pack_cropped_fills_every_row_exactly_and_uses_no_document_twice(lengths: list[int], seq_len: int):
    rows = pieces(lengths, seq_len)
    assert all(sum(length for _, length in row) == seq_len for row in rows)
    assert all(length >= 1 for row in rows for _, length in row)
    used = [document for row in rows for document, _ in row]
    assert len(used) == len(set(used))
    assert set(used) <= set(range(len(lengths)))


@given(lengths=LENGTHS, seq_len=st.integers(1, 64))
def test_pack_cropped_crops_only_the_last_document_of_a_row(lengths: list[int], seq_len: int):
    for row in pieces(lengths, seq_len):
        assert all(length == lengths[document] for document, length in row[:-1])


@given(lengths=LENGTHS, seq_len=st.integers(1, 64))
def test_pack_cropped_leaves_out_less_than_a_row_of_whole_documents(lengths: list[int], seq_len: int):
    used = {document for row in pieces(lengths, seq_len) for document, _ in row}
    assert sum(length for document, length in enumerate(lengths) if document not in used) < seq_len
    assert len(used) > 0 or sum(lengths) < seq_len


@given(lengths=LENGTHS, seq_len=st.integers(1, 64))
def test_pack_cropped_takes_the_longest_that_fits_or_crops_the_shortest(lengths: list[int], seq_len: int):
    waiting = dict(enumerate(lengths))  # fewer than the buffer holds
    assert len(waiting) <= BUFFER_DOCUMENTS
    for row in pieces(lengths, seq_len):
        room = seq_len
        for document, length in row:
            fitting = {other: min(n, seq_len) for other, n in waiting.items() if min(n, seq_len) <= room}
            if fitting:
                longest = max(fitting.values())
                assert document == min(other for other, n in fitting.items() if n == longest)
            else:
                assert lengths[document] == min(waiting.values())
            room -= length
            del waiting[document]


def test_pack_cropped_looks_no_further_ahead_than_its_buffer():
    lengths = [3] * BUFFER_DOCUMENTS + [2, 3]
    assert pieces(lengths, 5)[0] == [(0, 3), (BUFFER_DOCUMENTS, 2)]  # the first taken lets it in
    assert pieces([3, *lengths], 5)[0] == [(0, 3), (BUFFER_DOCUMENTS, 2)]  # cropped


def test_pack_cropped_of_documents_that_fit_together_loses_nothing():
    assert pieces([4, 9, 6, 1, 10], 10) == [[(4, 10)], [(1, 9), (3, 1)], [(2, 6), (0, 4)]]


# ---- whole pieces -----------------------------------------------------------------------------------------------


@st.composite
def fitting(draw: st.DrawFn) -> tuple[list[int], int]:
    seq_len = draw(st.integers(1, 64))
    return draw(st.lists(st.integers(1, seq_len), max_size=120)), seq_len


@given(fitting())
def test_every_whole_piece_is_in_one_row_and_no_row_is_too_long(given: tuple[list[int], int]):
    lengths, seq_len = given
    rows = pack_unsplit(lengths, seq_len)
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[piece] for piece in row) <= seq_len for row in rows)
    assert pack_unsplit(lengths, seq_len) == rows
    # Any two rows together are more than one, or they would be one.
    loads = sorted(sum(lengths[piece] for piece in row) for row in rows)
    assert len(rows) < 2 or loads[0] + loads[1] > seq_len


@given(fitting())
def test_each_piece_is_placed_where_the_least_room_remains(given: tuple[list[int], int]):
    """The same packing, found by looking at every row for every piece."""
    lengths, seq_len = given
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting_rooms = [room for room in rooms if room >= length]
        if fitting_rooms:
            rooms.remove(min(fitting_rooms))
        rooms.append(min(fitting_rooms, default=seq_len) - length)
    found = [seq_len - sum(lengths[piece] for piece in row) for row in pack_unsplit(lengths, seq_len)]
    assert sorted(found) == sorted(rooms)


@given(st.integers(2, 100), st.data())
def test_few_more_rows_are_needed_than_the_fewest(seq_len: int, data: st.DataObject):
    """Full rows cut into pieces at random: as many rows as there were are the fewest."""
    cuts = data.draw(st.lists(st.sets(st.integers(1, seq_len - 1), max_size=6), min_size=1, max_size=40))
    lengths = [end - start for some in cuts for start, end in pairwise([0, *sorted(some), seq_len])]
    shuffled = data.draw(st.permutations(lengths))
    assert len(cuts) <= len(pack_unsplit(shuffled, seq_len)) <= 11 / 9 * len(cuts) + 4


def test_pieces_that_fit_together_share_a_row():
    assert pack_unsplit([4, 9, 6, 1, 10], 10) == [[4], [1, 3], [2, 0]]
    assert pack_unsplit([], 10) == []


def test_piece_longer_than_a_row_is_an_error():
    with pytest.raises(ValueError, match="A piece of 11 tokens does not fit a row of 10"):
        pack_unsplit([10, 11], 10)


# ---- positions --------------------------------------------------------------------------------------------------


def test_positions_start_again_at_each_end_of_text():
    row = np.array([7, 8, 0, 5, 0, 0, 6, 6])
    assert restarting_positions(row, 0).tolist() == [0, 1, 0, 1, 0, 0, 1, 2]


@given(row=st.lists(st.integers(0, 3), min_size=1, max_size=50))
def test_positions_count_from_the_last_end_of_text_on(row: list[int]):
    positions = restarting_positions(np.array(row), 0)
    assert positions.dtype == np.int64
    for place, position in enumerate(positions):
        since = row[place - position : place + 1]
        assert 0 not in since[1:]
        assert since[0] == 0 or position == place
