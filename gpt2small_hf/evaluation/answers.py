"""A chat model and held-out questions → its answers, many at a time, and whether each came to an end by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.data.chat.conversations import Conversation
from gpt2small_hf.data.chat.encoding import encode
from gpt2small_hf.data.chat.formats import Message
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM

MOST_NEW_TOKENS = 128


def questions(chats: Sequence[Conversation], most: int) -> list[list[Message]]:
    """What stands before the first answer of each conversation: the system's turn, if it has one, and a question.

    One conversation in so many is asked, evenly over all, if there are more than `most`.
    """
    asked = [chat.messages[: 2 if chat.messages[0]["role"] == "system" else 1] for chat in chats]
    return [asked[number * len(asked) // most] for number in range(most)] if len(asked) > most else asked


def first_questions(chats: Sequence[Conversation], most: int = 3) -> list[str]:
    """The first different questions of users that open a conversation, at most `most`."""
    return list(dict.fromkeys(asked[-1]["content"] for asked in questions(chats, len(chats))))[:most]


def answer_all(
    model: GPT2SmallForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    chats: Sequence[Sequence[Message]],
    *,
    max_new_tokens: int = MOST_NEW_TOKENS,
    do_sample: bool = True,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    batch_size: int = 32,
) -> list[dict[str, Any]]:
    """Let the model answer each chat, which ends with the user's turn. The caller's random state is left as it was.

    A question that leaves no room for an answer in the context is not asked.

    Returns: for each the `messages`, the `answer`, whether it `ended` by a stop token, and how many `tokens` it has
        with that.
    """
    was_training = model.training
    model.eval()
    context = model.config.max_position_embeddings
    ends = model.generation_config.eos_token_id
    stops = {ends} if isinstance(ends, int) else set(ends or ())
    asked = [
        (list(chat), encoded.input_ids)
        for chat, encoded in zip(chats, encode(tokenizer, chats, add_generation_prompt=True), strict=True)
        if len(encoded.input_ids) < context
    ]
    # Alike long ones together: less filling, and nothing short is kept from a long answer.
    order = sorted(range(len(asked)), key=lambda number: len(asked[number][1]))
    answers: list[dict[str, Any]] = [{} for _ in asked]
    console = Console(stderr=True)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        for start in track(
            range(0, len(order), batch_size),
            "answers",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ):
            numbers = order[start : start + batch_size]
            prompts = [asked[number][1].tolist() for number in numbers]
            inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
            longest = inputs["input_ids"].shape[1]
            sampling = {"temperature": temperature, "top_k": top_k} if do_sample else {}
            room = min(max_new_tokens, context - longest)
            written = model.generate(**inputs, do_sample=do_sample, max_new_tokens=room, **sampling)  # pyright: ignore[reportAttributeAccessIssue]
            for number, ids in zip(numbers, written[:, longest:].tolist(), strict=True):
                end = next((place for place, id in enumerate(ids) if id in stops), None)
                said = ids if end is None else ids[:end]
                answers[number] = {
                    "messages": asked[number][0],
                    "answer": tokenizer.decode(said, skip_special_tokens=True),
                    "ended": end is not None,
                    "tokens": len(ids) if end is None else end + 1,
                }
    model.train(was_training)
    return answers
