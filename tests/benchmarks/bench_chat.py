"""Chats → rows with labels, against TRL's way: conversations a second, and how full the packed rows are.

    python tests/benchmarks/bench_chat.py [--conversations 5000] [--pairs 5]

Both get the same conversations, template and tokenizer, in turns, in one process. Ours is `ChatDataset`, from messages
to packed rows; it encodes a thousand at a time, with as many threads as tokenizers likes. TRL's way is what its
`SFTTrainer` maps over a data set: `apply_chat_template` with `return_assistant_tokens_mask`, a conversation at a time,
here without the cost of `datasets.map`; its packing is `trl.data_utils.pack_dataset`, if TRL is installed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.data.chat.conversations import Conversation, read_conversations
from gpt2small_hf.data.chat.template_checks import set_template
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.tokenizer import train_tokenizer

CHATS = Path(__file__).resolve().parents[2] / "examples" / "data" / "chats.jsonl"
SEQ_LEN = 1024


def trls_way(tokenizer: PreTrainedTokenizerFast, chats: list[Conversation]) -> list[dict[str, Any]]:
    rows = []
    for chat in chats:
        found = tokenizer.apply_chat_template(
            chat.messages, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        labels = [id if said else -100 for id, said in zip(found["input_ids"], found["assistant_masks"], strict=True)]
        rows.append({"input_ids": found["input_ids"], "labels": labels})
    return rows


def compare_packing(rows: list[dict[str, Any]], ours: ChatDataset) -> None:
    fill = ours.n_tokens / (len(ours) * SEQ_LEN)
    print(f"packed by us: {len(ours):,} rows of {SEQ_LEN:,}, {fill:.2%} full")
    try:
        import datasets
        from trl.data_utils import pack_dataset
    except ImportError:
        print("TRL is not installed: its packing was not compared")
        return
    theirs = pack_dataset(datasets.Dataset.from_list(rows), SEQ_LEN, strategy="bfd")
    print(f"packed by TRL: {len(theirs):,} rows, {ours.n_tokens / (len(theirs) * SEQ_LEN):.2%} full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=5000)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    found = read_conversations([str(CHATS)], None, validation_fraction=0.01)["train"].chats
    # Joined in twos and threes, so that lengths differ as in real sets.
    chats = [
        Conversation([m for c in some for m in c.messages if m["role"] != "system"], "")
        for n in range(args.conversations)
        for some in [[found[(n * 7 + k) % len(found)] for k in range(1 + n % 3)]]
    ]
    tokenizer = train_tokenizer([m["content"] for c in found for m in c.messages], 1024)
    set_template(tokenizer, "chatml", add_special_tokens=True)
    ratios = []
    for pair in range(args.pairs):
        began = time.perf_counter()
        ours = ChatDataset(chats, tokenizer, seq_len=SEQ_LEN)
        took = time.perf_counter() - began
        began = time.perf_counter()
        theirs = trls_way(tokenizer, chats)
        took_theirs = time.perf_counter() - began
        if pair == 0:  # the same work, or the times mean nothing
            for one, other in zip(ours.encoded, theirs, strict=True):
                labels = np.where(one.supervised("assistant"), one.input_ids, -100)
                assert (one.input_ids.tolist(), labels.tolist()) == (other["input_ids"], other["labels"])
        ratios.append(took_theirs / took)
        print(
            f"ours {len(chats) / took:8,.0f} conversations/s, {ours.n_tokens / took:11,.0f} tokens/s   "
            f"TRL's way {len(chats) / took_theirs:8,.0f} conversations/s   {ratios[-1]:.2f}x"
        )
    print(f"median {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
    compare_packing(theirs, ours)


if __name__ == "__main__":
    main()
