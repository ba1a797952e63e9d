"""Complete prompts, greedily and by sampling with a seed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from gpt2small_hf.data.chat.encoding import encode
from gpt2small_hf.evaluation.models import context_length
from gpt2small_hf.runs.results import Completion, SamplingSettings


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
) -> list[Completion]:
    """Continue each prompt twice, greedily and sampled. With `chat`, answer it twice.

    All completions are decoded in one batch, padded on the left, with the key-value cache. Each sampled one draws from
    its own generator, seeded with `seed`, so it does not depend on the other prompts beyond rounding.
    The global random state is not used.

    By default a continuation has up to 60 tokens and an answer up to 128, within the context length. Longer prompts are
    truncated to their last tokens, half the context length.

    Returns: one completion for each prompt.
    """
    context = context_length(model)
    if max_new_tokens is None:
        max_new_tokens = 128 if chat else 60
    ids = [one[-context // 2 :] for one in encode_prompts(tokenizer, prompts, chat=chat)]
    limits = [min(max_new_tokens, context - len(one)) for one in ids]
    results: dict[int, Completion] = {}
    was_training = model.training
    model.eval()
    # A batch has one limit: prompts with fewer tokens left in the context are decoded in a batch of their own.
    for limit in sorted(set(limits)):
        settings = SamplingSettings(max_new_tokens=limit, temperature=temperature, top_k=top_k, seed=seed)
        numbers = [number for number in range(len(prompts)) if limits[number] == limit]
        texts = _decode(model, tokenizer, [ids[number] for number in numbers], limit, (temperature, top_k, seed))
        for number, (greedy, sampled) in zip(numbers, texts, strict=True):
            results[number] = Completion(
                prompt=prompts[number] if chat else str(tokenizer.decode(ids[number])),
                greedy=greedy,
                sampled=sampled,
                settings=settings,
            )
    model.train(was_training)
    return [results[number] for number in range(len(prompts))]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: list[str], *, chat: bool) -> list[list[int]]:
    """Return the token ids of each prompt; with `chat`, as a user message with the generation prompt."""
    if chat:
        asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return [one.input_ids.tolist() for one in encode(tokenizer, asked, add_generation_prompt=True)]  # pyright: ignore[reportArgumentType]
    return [list(tokenizer(prompt, verbose=False)["input_ids"]) for prompt in prompts]  # pyright: ignore[reportArgumentType]


def _decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: tuple[float, int, int],
) -> list[tuple[str, str]]:
    """Return the greedy and the sampled continuation of each prompt, from one batch with two rows for each."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    pad_id = tokenizer.pad_token_id or 0
    ids = torch.tensor([[pad_id] * n + list(prompt) for n, prompt in zip(padding, prompts, strict=True)] * 2)
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding] * 2)
    decoded = model.generate(  # pyright: ignore[reportCallIssue]
        ids.to(model.device),  # pyright: ignore[reportArgumentType]
        attention_mask=mask.to(model.device),
        do_sample=False,
        use_cache=True,  # the Trainer turns it off in the model's configuration
        max_new_tokens=max_new_tokens,
        # Diverged weights may give NaN, which must not abort the run.
        remove_invalid_values=True,
        logits_processor=LogitsProcessorList([SampleRows(len(prompts), *sampling)]),
    )
    new = decoded[:, longest:].tolist()
    stops = stop_tokens(model)
    texts = [tokenizer.decode(until_stop(row, stops), skip_special_tokens=True) for row in new]
    return list(zip(map(str, texts[: len(prompts)]), map(str, texts[len(prompts) :]), strict=True))


def stop_tokens(model: PreTrainedModel) -> set[int]:
    """Return the ids that end a generated text."""
    ends = model.generation_config.eos_token_id  # pyright: ignore[reportOptionalMemberAccess]
    return {ends} if isinstance(ends, int) else set(ends or ())


def until_stop(ids: list[int], stops: set[int]) -> list[int]:
    """Return the ids before the first stop token; the rest is padding."""
    return list(takewhile(lambda id: id not in stops, ids))


class SampleRows(LogitsProcessor):
    """Sample the next token of all rows but the first `n_greedy`, and mask all other tokens, so that it is chosen.

    A batch can then contain greedy and sampled rows, and each sampled row has its own generator, whereas
    `do_sample=True` uses the global one. Generators are on the CPU, so every device draws the same numbers.
    """

    def __init__(self, n_greedy: int, temperature: float, top_k: int, seed: int) -> None:
        self.n_greedy, self.seed = n_greedy, seed
        self.warp = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k)])
        self.generators: list[torch.Generator] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Mask all but one token in the sampled rows of scores of shape (rows, vocabulary)."""
        if not self.generators:
            self.generators = [torch.Generator().manual_seed(self.seed) for _ in range(len(scores) - self.n_greedy)]
        probabilities = self.warp(input_ids[self.n_greedy :], scores[self.n_greedy :]).softmax(-1).cpu()  # pyright: ignore[reportArgumentType]
        drawn = torch.stack(
            [
                torch.multinomial(row, 1, generator=generator)
                for row, generator in zip(probabilities, self.generators, strict=True)
            ]
        )
        left = torch.full_like(scores[self.n_greedy :], -torch.inf)
        return torch.cat([scores[: self.n_greedy], left.scatter_(1, drawn.to(scores.device), 0.0)])
