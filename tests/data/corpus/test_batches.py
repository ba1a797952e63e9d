"""How `data/corpus/batches.py` groups documents and turns them into ids, in order."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.data.corpus import batches as module
from gpt2small_hf.data.corpus.batches import batches, encode_batch, in_order
from gpt2small_hf.data.corpus.encoder import Encoder
from gpt2small_hf.data.corpus.readers import Block

splits = st.sampled_from(["train", "validation"])
contents = st.one_of(
    st.lists(st.text(st.sampled_from("ab \n'sé中1!"), max_size=30), max_size=3),
    st.lists(st.lists(st.integers(1, 299), min_size=1, max_size=9).map(np.array), min_size=1, max_size=3),
)


@given(documents=st.lists(st.tuples(splits, contents), max_size=8), size=st.integers(1, 40), cuttable=st.booleans())
def test_every_document_becomes_its_ids_and_one_end_of_text(
    tiny_tokenizer: PreTrainedTokenizerFast, documents: list[tuple[str, list[Block]]], size: int, cuttable: bool
):
    encoder = Encoder(tiny_tokenizer)
    streams: dict[str, list[int]] = {"train": [], "validation": []}
    starts: dict[str, list[int]] = {"train": [], "validation": []}
    n_bytes = {"train": 0, "validation": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_CHARS", size)
        for batch in batches(((split, iter(blocks)) for split, blocks in documents), cuttable=cuttable):
            for split, encoded in encode_batch(batch, encoder=encoder).items():
                starts[split] += (len(streams[split]) + encoded.starts).tolist()
                streams[split] += encoded.ids.tolist()
                n_bytes[split] += encoded.n_bytes

    for split in streams:
        expected, expected_starts, expected_bytes = [], [], 0
        for of_split, blocks in documents:
            if of_split != split or not "".join(map(str, blocks)):
                continue
            expected_starts.append(len(expected))
            if isinstance(blocks[0], str):
                text = "".join(map(str, blocks))
                expected += tiny_tokenizer(text)["input_ids"]
                expected_bytes += len(text.encode())
            else:
                ids = np.concatenate(blocks)
                expected += ids.tolist()
                expected_bytes += encoder.n_bytes(ids)
            expected.append(tiny_tokenizer.eos_token_id)
        assert streams[split] == expected
        assert starts[split] == expected_starts
        assert n_bytes[split] == expected_bytes


def test_results_come_in_order_and_few_items_are_under_way_at_once():
    taken: list[int] = []
    done: list[int] = []

    def items() -> Iterator[int]:
        for item in range(100):
            taken.append(item)
            assert len(taken) - len(done) <= 2 * 3 + 1
            yield item

    def work(item: int) -> int:
        time.sleep(0.002 if item % 7 else 0.01)
        return item

    for result in in_order(work, items(), 3):
        done.append(result)
    assert done == list(range(100))


def test_error_on_a_thread_reaches_the_caller_and_stops_the_rest():
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        return 1 // (item - 5)

    with pytest.raises(ZeroDivisionError):
        list(in_order(work, range(1000), 2))
    assert len(begun) < 20
    assert threading.active_count() < 20
