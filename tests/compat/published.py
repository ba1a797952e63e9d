"""A published folder as a user downloads it: a tiny model after 40 training steps, and its tokenizer."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from gpt2small_hf import GPT2SmallConfig, GPT2SmallForCausalLM
from gpt2small_hf.data.tokenizer import train_tokenizer

CONTEXT = 128
QUESTION = "What did the fox see?"

# The generation tags mark the supervised tokens.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversations() -> list[list[dict[str, str]]]:
    """Return twelve short conversations of different lengths."""
    return [
        [
            {"role": "user", "content": f"What did the {who} {verb}?"},
            {"role": "assistant", "content": f"The {who} {past} the {what}" + " and the crow" * (n % 3) + "."},
        ]
        for n, (who, what) in enumerate((w, t) for w in ("fox", "dog", "hare") for t in ("river", "stone"))
        for verb, past in (("see", "saw"), ("meet", "met"))
    ]


def publish(folder: Path) -> None:
    """Save model, code, tokenizer and template into `folder`."""
    tokenizer = chat_tokenizer()
    model = trained_model(tokenizer)
    model.generation_config._from_model_config = False
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with ChatML's two markers and its template."""
    tokenizer = train_tokenizer([turn["content"] + " " for chat in conversations() for turn in chat] * 4, 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def trained_model(tokenizer: PreTrainedTokenizerFast) -> GPT2SmallForCausalLM:
    """Return a model after 40 steps, so that its logits differ and equal texts and losses are informative."""
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    torch.manual_seed(0)
    model = GPT2SmallForCausalLM(
        GPT2SmallConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=CONTEXT,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            tie_word_embeddings=True,
            **ids,
        )
    )
    texts = tokenizer.apply_chat_template(conversations(), tokenize=False)
    rows = tokenizer(texts, padding=True, return_tensors="pt")
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(40):
        model(**rows, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
