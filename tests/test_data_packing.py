"""How `data/packing.py` cuts a stream into rows."""

from hypothesis import given
from hypothesis import strategies as st

from gpt2small_hf.data.packing import count_rows, row_span


@given(n_tokens=st.integers(0, 1000), seq_len=st.integers(1, 50))
def test_rows_hold_every_token_in_order_but_for_a_last_partial_row(n_tokens: int, seq_len: int):
    spans = [row_span(row, seq_len) for row in range(count_rows(n_tokens, seq_len))]
    covered = [token for start, end in spans for token in range(start, end)]
    assert all(end - start == seq_len for start, end in spans)
    assert covered == list(range(len(covered)))
    assert 0 <= n_tokens - len(covered) < seq_len
