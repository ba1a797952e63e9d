"""Fine-tune all weights of a published model, or of a run's model folder, on chats, with the stock Trainer.

pip install torch "transformers[torch]"
python examples/finetune_from_hub.py runs/tiny/model --epochs 20 --learning_rate 3e-3  on examples/data: a minute
python examples/finetune_from_hub.py runs/tiny/model --data my.jsonl --learning_rate 3e-3  your 30 chats: a minute
python examples/finetune_from_hub.py you/yours --data my.jsonl --learning_rate 5e-5    a model on the Hub, your own data

A line of data: {"messages": [{"role": "user", "content": "Who's there?"}, {"role": "assistant", "content": "Me."}]}
"""

import argparse
import json
import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BATCH, STEPS_PER_EPOCH, STEPS, HELD_OUT = 8, 10, 400, 10
ROLES = ("system", "user", "assistant")
# A turn is its role, its content and the end-of-text token, which the model already has: no embedding is added.
# Tokens between the generation tags are the assistant's; only they are supervised.
TEMPLATE = """\
{%- for message in messages %}{{ message.role | capitalize + ':\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim + eos_token }}{% endgeneration %}
    {%- else %}{{ message.content | trim + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"""


def main() -> None:
    args = parse()
    chats = read(args.data)
    # Imported after the arguments are checked: these imports take seconds.
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        EarlyStoppingCallback,
        Trainer,
        TrainingArguments,
        pipeline,
    )

    # 1. The model. trust_remote_code: runs the four short Python files that are stored with the weights.
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=True)
    # In float32, whatever dtype was saved: in bfloat16, small updates are rounded to zero.
    model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=True, dtype=torch.float32)
    length = args.max_length or max(256, model.config.max_position_embeddings)
    if length > model.config.max_position_embeddings:
        # The old positions stay; the new ones are initialised at random and learned from these conversations only.
        torch.manual_seed(42)
        model.resize_position_embeddings(length)
        tokenizer.model_max_length = length
    if tokenizer.chat_template is None:
        tokenizer.chat_template = TEMPLATE
        model.generation_config.eos_token_id = tokenizer.eos_token_id  # generation stops at the end of a turn

    # 2. One row per conversation; every tenth is held out.
    rows = [labelled(chat, tokenizer) for chat in chats]
    fitting = [n for n, row in enumerate(rows) if len(row["labels"]) <= length]
    kept = [n for n in fitting if set(rows[n]["labels"]) != {-100}]
    longer, unanswered = len(chats) - len(fitting), len(fitting) - len(kept)
    found = f"{len(kept)} conversations; left out: {longer} longer than {length} tokens, {unanswered} without an answer"
    if len(kept) < 10:
        raise ValueError(f"{args.data} has {found}. Give at least ten.")
    print(found)
    heldout, training = kept[9::10], [n for at, n in enumerate(kept) if at % 10 != 9]

    # 3. Training. With few conversations, batches are small and epochs are many, so that there are enough steps.
    batch = max(1, min(BATCH, len(training) // STEPS_PER_EPOCH))
    steps = math.ceil(len(training) / batch)
    epochs = args.epochs or max(3, math.ceil(STEPS / steps))
    # Early stopping keeps the epoch with the lowest validation loss. On few conversations that choice would be noise.
    enough = len(heldout) >= HELD_OUT
    print(f"{epochs} epochs{' at most' if enough else ''} of {steps} steps, {batch} conversations each; ", end="")
    print("the best is kept" if enough else f"the last is kept: {len(heldout)} held-out ones are too few to choose by")
    settings = TrainingArguments(
        output_dir=str(args.output_dir / "checkpoints"),
        num_train_epochs=epochs,
        learning_rate=args.learning_rate,
        weight_decay=0.1,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=1,  # the Trainer averages over batches: so each is one conversation
        eval_strategy="epoch",
        save_strategy="epoch" if enough else "no",
        logging_strategy="epoch",
        save_only_model=True,
        save_total_limit=1,
        load_best_model_at_end=enough,  # warns about a missing lm_head if it is tied to the embedding
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,  # warns without a GPU
    )
    trainer = Trainer(
        model,
        settings,
        data_collator=padded,
        train_dataset=[rows[n] for n in training],  # pyright: ignore[reportArgumentType]
        eval_dataset=[rows[n] for n in heldout],  # pyright: ignore[reportArgumentType]
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)] if enough else [],
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"validation loss, nats per answer token: {before:.3f} before, {after:.3f} after")

    # 4. Save weights, code, the tokenizer with its template, and the stop token.
    folder = args.output_dir / "model"
    model.config.use_cache = True  # the Trainer turns it off for training
    context = model.config.max_position_embeddings
    if context < 512:  # the pipeline asks for 256 new tokens unless the model sets a length
        model.generation_config.update(max_length=context, max_new_tokens=None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # safetensors creates files that only their owner may read
        weights.chmod((folder / "config.json").stat().st_mode)

    # 5. Load the saved folder and answer held-out questions.
    write = pipeline("text-generation", model=str(folder), trust_remote_code=True)
    short = [chats[n] for n in heldout if len(rows[n]["labels"]) <= length // 2]  # leaves room for the answer
    asked = [chat[:t] for chat in short for t, turn in enumerate(chat) if t and turn["role"] == "assistant"]
    for question in asked[:2]:
        answer = write(question, do_sample=False)[0]["generated_text"][-1]
        print(f"\n{question[-1]['role']}: {question[-1]['content']}\nassistant: {answer['content']}")
    print(f"\nwrote {folder}")
    print(f'next: pip install "transformers[serving]"; transformers serve {folder} --trust-remote-code')


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder, or a Hub id like user/name")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "chats.jsonl", metavar="FILE")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/finetuned"))
    parser.add_argument("--epochs", type=int, help=f"maximum (default: 3, or enough for {STEPS} steps)")
    parser.add_argument(
        "--learning_rate", type=float, default=1e-3, help="%(default)s; for 100 million parameters, try 5e-5"
    )
    parser.add_argument("--max_length", type=int, help="maximum tokens (default: the context, at least 256)")
    args = parser.parse_args()
    if missing := [name for name in ("torch", "transformers", "accelerate") if find_spec(name) is None]:
        raise ValueError(f'{", ".join(missing)} not installed: pip install torch "transformers[torch]"')
    for name in ("epochs", "learning_rate", "max_length"):
        if (value := getattr(args, name)) is not None and value <= 0:
            raise ValueError(f"--{name} is {value:g}. Give a number above 0.")
    if (args.output_dir / "model").exists():
        raise ValueError(f"{args.output_dir} already contains a model. Choose another folder with --output_dir.")
    if not (Path(args.model) / "config.json").is_file() and not re.fullmatch(r"[\w.-]+/[\w.-]+", args.model):
        raise ValueError(f"{args.model} is neither a model folder nor a Hub id like user/name.")
    return args


def read(path: Path) -> list[list[dict[str, str]]]:
    """Read the conversations of a file, one per line."""
    chats = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            chats.append(json.loads(line)["messages"])
            known = [turn["role"] in ROLES and isinstance(turn["content"], str) for turn in chats[-1]]
        except (KeyError, TypeError, ValueError):  # ValueError: not JSON, or not UTF-8
            known = []
        if not known or not all(known):
            form = '{"messages": [{"role": "user", "content": "text"}, ...]}'
            raise ValueError(f"{path}, line {number}, is not {form} in UTF-8 with the roles {', '.join(ROLES)}.")
    return chats


def labelled(chat: list[dict[str, str]], tokenizer: Any) -> dict[str, list[int]]:
    """Encode a conversation. Labels are -100 (ignored) except on the assistant's tokens and their end tokens."""
    how = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
    encoded = tokenizer.apply_chat_template(chat, **how)  # not verbose: longer conversations are left out anyway
    ids, answers = encoded["input_ids"], encoded["assistant_masks"]
    return {"input_ids": ids, "labels": [id if own else -100 for id, own in zip(ids, answers, strict=True)]}


def padded(rows: list[dict[str, list[int]]]) -> "dict[str, torch.Tensor]":
    """Collate rows into one batch, padded on the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    # The mask follows from the lengths, not from a token: the padding token may be the one that ends a turn.
    ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


if __name__ == "__main__":
    try:
        main()
    except (ImportError, OSError, ValueError) as error:  # errors that the user can fix: one line
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
