"""Answer held-out questions in batches, and record whether each answer ends with a stop token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.data.chat.conversations import Conversation
from gpt2small_hf.data.chat.encoding import encode
from gpt2small_hf.data.chat.formats import Message
from gpt2small_hf.evaluation.completions import stop_tokens, until_stop
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.runs.results import Answer

MOST_NEW_TOKENS = 128


def questions(chats: Sequence[Conversation], most: int) -> list[list[Message]]:
    """Return the messages before the first answer of each conversation: the system message, if any, and a question.

    Of more than `most` conversations, `most` are chosen at equal distances.
    """
    asked = [chat.messages[: 2 if chat.messages[0]["role"] == "system" else 1] for chat in chats]
    return [asked[number * len(asked) // most] for number in range(most)] if len(asked) > most else asked


def first_questions(chats: Sequence[Conversation], most: int = 3) -> list[str]:
    """Return up to `most` different questions that open a conversation."""
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
) -> list[Answer]:
    """Generate an answer to each chat, which ends with a user message. The global random state is unchanged.

    Questions that fill the context are skipped.

    Returns: one answer for each of the other questions.
    """
    was_training = model.training
    model.eval()
    context = model.config.max_position_embeddings
    stops = stop_tokens(model)
    asked = [
        (list(chat), encoded.input_ids)
        for chat, encoded in zip(chats, encode(tokenizer, chats, add_generation_prompt=True), strict=True)
        if len(encoded.input_ids) < context
    ]
    # Batches of similar length need less padding and leave short questions more tokens for the answer.
    order = sorted(range(len(asked)), key=lambda number: len(asked[number][1]))
    answers: dict[int, Answer] = {}
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
            limit = min(max_new_tokens, context - longest)
            written = model.generate(**inputs, do_sample=do_sample, max_new_tokens=limit, **sampling)  # pyright: ignore[reportAttributeAccessIssue]
            for number, ids in zip(numbers, written[:, longest:].tolist(), strict=True):
                said = until_stop(ids, stops)
                ended = len(said) < len(ids)
                answers[number] = Answer(
                    messages=asked[number][0],
                    answer=str(tokenizer.decode(said, skip_special_tokens=True)),
                    ended=ended,
                    tokens=len(said) + ended,
                )
    model.train(was_training)
    return [answers[number] for number in range(len(asked))]
