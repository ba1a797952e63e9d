"""Teach a published model, or a run's model folder, to answer: all its weights, on the stock Trainer.

pip install torch "transformers[torch]"
python examples/finetune_from_hub.py runs/tiny/model --epochs 20 --learning_rate 3e-3  on examples/data: a minute
python examples/finetune_from_hub.py runs/tiny/model --data my.jsonl --learning_rate 3e-3  30 chats of yours: a minute
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
# A turn: its role, its words, and the end-of-text token, which the model has already: no embedding has to be added.
# What stands between the generation marks is the assistant's, and what will be learned.
TEMPLATE = """\
{%- for message in messages %}{{ message.role | capitalize + ':\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim + eos_token }}{% endgeneration %}
    {%- else %}{{ message.content | trim + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"""


def main() -> None:
    args = parse()
    chats = read(args.data)
    # Importing these takes seconds: mistakes are answered before.
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        EarlyStoppingCallback,
        Trainer,
        TrainingArguments,
        pipeline,
    )

    # 1. The model. trust_remote_code: its own Python files, three short ones beside its weights, run on your machine.
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=True)
    # In float32, whatever the weights were saved in: bfloat16 would round small steps away.
    model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=True, dtype=torch.float32)
    length = args.max_length or max(256, model.config.max_position_embeddings)
    if length > model.config.max_position_embeddings:
        # The old positions stay; the new ones begin as random numbers and are learned from these conversations alone.
        torch.manual_seed(42)
        model.resize_position_embeddings(length)
        tokenizer.model_max_length = length
    if tokenizer.chat_template is None:
        tokenizer.chat_template = TEMPLATE
        model.generation_config.eos_token_id = tokenizer.eos_token_id  # a turn's end is where to stop

    # 2. The rows, a conversation each: every tenth is for validation.
    rows = [labelled(chat, tokenizer) for chat in chats]
    fitting = [n for n, row in enumerate(rows) if len(row["labels"]) <= length]
    kept = [n for n in fitting if set(rows[n]["labels"]) != {-100}]
    longer, mute = len(chats) - len(fitting), len(fitting) - len(kept)
    found = f"{len(kept)} conversations; left out: {longer} longer than {length} tokens, {mute} without an answer"
    if len(kept) < 10:
        raise ValueError(f"{args.data} has {found}. Give ten or more to learn from.")
    print(found)
    heldout, training = kept[9::10], [n for at, n in enumerate(kept) if at % 10 != 9]

    # 3. The training. Few conversations make small batches and more epochs, or it would end before it has learned them.
    batch = max(1, min(BATCH, len(training) // STEPS_PER_EPOCH))
    steps = math.ceil(len(training) / batch)
    epochs = args.epochs or max(3, math.ceil(STEPS / steps))
    # It ends early if the validation loss rises, and the best epoch is kept. On few conversations that would be chance.
    enough = len(heldout) >= HELD_OUT
    print(f"{epochs} epochs{' at most' if enough else ''} of {steps} steps, {batch} conversations each; ", end="")
    print("the best is kept" if enough else f"the last is kept, as {len(heldout)} are too few to choose one by")
    settings = TrainingArguments(
        output_dir=str(args.output_dir / "checkpoints"),
        num_train_epochs=epochs,
        learning_rate=args.learning_rate,
        weight_decay=0.1,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=1,  # the Trainer's mean is one over batches: here over conversations
        eval_strategy="epoch",
        save_strategy="epoch" if enough else "no",
        logging_strategy="epoch",
        save_only_model=True,
        save_total_limit=1,
        load_best_model_at_end=enough,  # it warns that a tied lm_head is missing: that is the embedding
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,  # it matters only for large batches, and warns where there is no GPU
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

    # 4. The folder: weights, code, tokenizer with its template, and when to stop.
    folder = args.output_dir / "model"
    model.config.use_cache = True  # the Trainer turns it off for training
    context = model.config.max_position_embeddings
    if context < 512:  # the pipeline asks for 256 new tokens unless the model sets a length
        model.generation_config.update(max_length=context, max_new_tokens=None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # safetensors makes files that only their owner may read
        weights.chmod((folder / "config.json").stat().st_mode)

    # 5. What anybody can do with that folder: ask it something, here what it was not trained on.
    write = pipeline("text-generation", model=str(folder), trust_remote_code=True)
    short = [chats[n] for n in heldout if len(rows[n]["labels"]) <= length // 2]  # whatever comes, it will fit
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
    parser.add_argument("--epochs", type=int, help=f"at most (default: 3, or as many as give {STEPS} steps)")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="for 100 million parameters rather 5e-5")
    parser.add_argument("--max_length", type=int, help="tokens in a conversation (default: the context; at least 256)")
    args = parser.parse_args()
    if missing := [name for name in ("torch", "transformers", "accelerate") if find_spec(name) is None]:
        raise ValueError(f'{", ".join(missing)} not installed: pip install torch "transformers[torch]"')
    for name in ("epochs", "learning_rate", "max_length"):
        if (value := getattr(args, name)) is not None and value <= 0:
            raise ValueError(f"--{name} is {value:g}. Give a number above 0.")
    if (args.output_dir / "model").exists():
        raise ValueError(f"{args.output_dir} holds a model already. Choose another folder with --output_dir.")
    if not (Path(args.model) / "config.json").is_file() and not re.fullmatch(r"[\w.-]+/[\w.-]+", args.model):
        raise ValueError(f"{args.model} is neither a folder with a model in it nor a Hub id like user/name.")
    return args


def read(path: Path) -> list[list[dict[str, str]]]:
    """The conversations in a file, one a line."""
    chats = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            chats.append(json.loads(line)["messages"])
            known = [turn["role"] in ROLES and isinstance(turn["content"], str) for turn in chats[-1]]
        except (KeyError, TypeError, ValueError):  # the last: neither JSON nor UTF-8
            known = []
        if not known or not all(known):
            form = '{"messages": [{"role": "user", "content": "text"}, ...]}'
            raise ValueError(f"{path}, line {number}, is not {form} in UTF-8 with the roles {', '.join(ROLES)}.")
    return chats


def labelled(chat: list[dict[str, str]], tokenizer: Any) -> dict[str, list[int]]:
    """A conversation as ids and labels: -100, which no loss counts, but on the assistant's words and what ends them."""
    how = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
    encoded = tokenizer.apply_chat_template(chat, **how)  # not verbose: what is too long is left out anyway
    ids, answers = encoded["input_ids"], encoded["assistant_masks"]
    return {"input_ids": ids, "labels": [id if own else -100 for id, own in zip(ids, answers, strict=True)]}


def padded(rows: list[dict[str, list[int]]]) -> "dict[str, torch.Tensor]":
    """Rows as one batch, filled up on the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    # Which places are filled is told by the lengths, not by a token: the one that pads may be the one that ends a turn.
    ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


if __name__ == "__main__":
    try:
        main()
    except (ImportError, OSError, ValueError) as error:  # a mistake one can mend, in one line
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
