"""Fine-tune a published model, or a run's model folder, on chats with TRL, like `python train.py examples/chat.yaml`.

pip install -e . trl
python examples/finetune_with_trl.py runs/tiny/model                                            two minutes on a CPU
python examples/finetune_with_trl.py you/yours --data my.jsonl --epochs 3 --learning_rate 5e-5  a model on the Hub

A line of data: {"messages": [{"role": "user", "content": "Who's there?"}, {"role": "assistant", "content": "Me."}]}
"""

import argparse
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def main(args: argparse.Namespace) -> None:
    # Imported after the arguments are checked: these imports take seconds.
    from datasets import Dataset
    from transformers import pipeline
    from trl import SFTTrainer  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

    found = read(args.data)
    model, tokenizer = chat_model(args.model)
    length = tokenizer.model_max_length
    rows = [row for row in found if can_be_learned(row["messages"], tokenizer)]
    summary = f"{len(rows)} of {len(found)} conversations have an answer and at most {length} tokens"
    if len(rows) < 10:
        raise ValueError(f"{args.data}: {summary}. Give at least ten.")
    print(f"{summary}; every tenth is held out")
    trainer = SFTTrainer(
        model,
        settings(args, length),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([row for n, row in enumerate(rows) if n % 10 != 9]),
        eval_dataset=Dataset.from_list(rows[9::10]),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"validation loss, nats per answer token: {before:.3f} before, {after:.3f} after")

    folder = args.output_dir / "model"
    model.config.use_cache = True  # the Trainer turns it off for training
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # safetensors creates files that only their owner may read
        weights.chmod((folder / "config.json").stat().st_mode)
    write = pipeline("text-generation", model=str(folder), trust_remote_code=True)
    for row in rows[9:20:10]:  # two of those held out
        question = row["messages"][: [turn["role"] for turn in row["messages"]].index("assistant")]
        answer = write(question, do_sample=False)[0]["generated_text"][-1]
        print(f"\nuser: {question[-1]['content']}\nassistant: {answer['content']}")
    print(f"\nwrote {folder}")
    print(f'next: pip install "transformers[serving]"; transformers serve {folder} --trust-remote-code')


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder, or a Hub id like user/name")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "chats.jsonl", metavar="FILE")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/trl"))
    parser.add_argument("--epochs", type=int, default=30, help="%(default)s; for 100 million parameters, try 3")
    parser.add_argument(
        "--learning_rate", type=float, default=4e-3, help="%(default)s; for 100 million parameters, try 5e-5"
    )
    args = parser.parse_args()
    if missing := [name for name in ("gpt2small_hf", "trl") if find_spec(name) is None]:
        raise ValueError(f"{', '.join(missing)} not installed: pip install -e . trl (in a clone of gpt2small_hf)")
    for name in ("epochs", "learning_rate"):
        if (value := getattr(args, name)) <= 0:
            raise ValueError(f"--{name} is {value:g}. Give a number above 0.")
    if (args.output_dir / "model").exists():
        raise ValueError(f"{args.output_dir} already contains a model. Choose another folder with --output_dir.")
    if not (Path(args.model) / "config.json").is_file() and not re.fullmatch(r"[\w.-]+/[\w.-]+", args.model):
        raise ValueError(f"{args.model} is neither a model folder nor a Hub id like user/name.")
    if not args.data.is_file():
        raise ValueError(f"{args.data} does not exist. Name a file of conversations with --data.")
    return args


def read(path: Path) -> list[dict[str, list[dict[str, str]]]]:
    """Read the conversations of a file, one per line."""
    from gpt2small_hf.data.chat.formats import CHAT_FORMATS, validate_messages

    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                rows.append({"messages": CHAT_FORMATS["messages"].read(json.loads(line), where)})
            except (KeyError, TypeError, ValueError):  # ValueError: not JSON, or not UTF-8
                form = '{"messages": [{"role": "user", "content": "text"}, ...]}'
                raise ValueError(f"{where}, is not {form} in UTF-8.") from None
            validate_messages(rows[-1]["messages"], where)
    return rows


def chat_model(name: str) -> tuple[Any, Any]:
    """Load a model and its tokenizer, with special tokens that mark turns and a context of at least 256 tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gpt2small_hf.data.chat.template_checks import set_template

    # trust_remote_code: runs the four short Python files that are stored with the weights.
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, dtype=torch.float32)
    if model.config.max_position_embeddings < 256:
        torch.manual_seed(42)  # the old positions stay; the new ones are random, and learned from the chats only
        model.resize_position_embeddings(256)
    tokenizer.model_max_length = model.config.max_position_embeddings

    ends = [tokenizer.eos_token_id]
    new = tokenizer.convert_tokens_to_ids(set_template(tokenizer, "chatml", add_special_tokens=True))
    model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size), mean_resizing=False)
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.lm_head.weight}:  # a single tensor if they are tied
            weight[new] = weight[: len(tokenizer) - len(new)].mean(0)
    # An answer ends at the template's end token, or at the end-of-text token of pre-training.
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = list(dict.fromkeys([tokenizer.eos_token_id, *ends]))
    context = model.config.max_position_embeddings
    if context < 512:  # the pipeline asks for 256 new tokens unless the model sets a length
        model.generation_config.update(max_length=context, max_new_tokens=None)
    return model, tokenizer


def can_be_learned(chat: list[dict[str, str]], tokenizer: Any) -> bool:
    """Return whether a conversation has an answer (TRL raises without one) and fits (TRL would truncate it)."""
    how = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
    encoded = tokenizer.apply_chat_template(chat, **how)
    return 1 in encoded["assistant_masks"] and len(encoded["input_ids"]) <= tokenizer.model_max_length


def settings(args: argparse.Namespace, context: int) -> Any:
    """Return the settings of examples/chat.yaml under TRL's names."""
    import torch
    from trl import SFTConfig  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

    return SFTConfig(
        output_dir=str(args.output_dir / "checkpoints"),
        # Labels are the tokens between the template's generation tags, as in train.py, with one difference: here a
        # marker such as <|im_end|> inside a message is encoded as a special token, in train.py as text.
        assistant_only_loss=True,
        packing=True,  # several conversations per row; position_ids that restart at 0 separate them
        max_length=context,
        # TRL concatenates a batch into one row, and attention covers all of it: micro-batches of one are faster.
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        per_device_eval_batch_size=1,  # the Trainer averages over batches: so each is one row
        num_train_epochs=args.epochs,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=0.05,
        weight_decay=0.1,
        adam_beta2=0.98,
        # TRL enables these two by default. The second saves memory and costs time.
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False),
        activation_checkpointing=False,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        save_only_model=True,
        save_total_limit=1,
        load_best_model_at_end=True,  # warns about a missing lm_head if it is tied to the embedding
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,  # warns without a GPU
    )


if __name__ == "__main__":
    user_errors: tuple[type[Exception], ...] = (ImportError, OSError, ValueError)
    try:
        arguments = parse()
        from gpt2small_hf.errors import UsageError

        user_errors = (*user_errors, UsageError)
        main(arguments)
    except user_errors as error:  # errors that the user can fix: one line
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
