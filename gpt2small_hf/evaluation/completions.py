"""Fixed prompts → what the model makes of them, greedily and sampled with a seed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gpt2small_hf.data.chat import encode


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    chat: bool = False,
) -> list[dict[str, Any]]:
    """Continue each prompt twice: with the likeliest token each time, and sampled. With `chat`, answer it twice.

    A continuation has up to 60 tokens unless said otherwise, an answer up to 128. Text stops at the end of the context
    at the latest; of a prompt that fills more than half of it, the end is read.
    The caller's random state is left as it was.

    Returns: one object a prompt: `prompt`, `greedy`, `sampled` (continuations without the prompt), and the settings.
    """
    was_training = model.training
    model.eval()
    context = model.config.max_position_embeddings
    if max_new_tokens is None:
        max_new_tokens = 128 if chat else 60
    results = []
    for prompt in prompts:
        if chat:
            question = [{"role": "user", "content": prompt}]
            ids = torch.from_numpy(encode(tokenizer, [question], add_generation_prompt=True)[0].input_ids)[None]  # pyright: ignore[reportArgumentType]
        else:
            ids = tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"]  # pyright: ignore[reportCallIssue]
        ids = ids[:, -context // 2 :].to(model.device)  # pyright: ignore[reportArgumentType, reportCallIssue]
        room = {"max_new_tokens": min(max_new_tokens, context - ids.shape[1])}
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            sampled = _continue(model, tokenizer, ids, do_sample=True, temperature=temperature, top_k=top_k, **room)
        results.append(
            {
                "prompt": prompt if chat else str(tokenizer.decode(ids[0])),  # as the model read it
                "greedy": _continue(model, tokenizer, ids, do_sample=False, **room),
                "sampled": sampled,
                "settings": {**room, "temperature": temperature, "top_k": top_k, "seed": seed},
            }
        )
    model.train(was_training)
    return results


def _continue(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, **how: Any) -> str:
    # A model that has come apart may give NaN: that is to be seen in what it writes, and not to end a run.
    how["remove_invalid_values"] = True
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), **how)  # pyright: ignore[reportCallIssue]
    return str(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
