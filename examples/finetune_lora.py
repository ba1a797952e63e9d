"""Fine-tune a published model, or a run's model folder, on your own text with a LoRA adapter.

Needs only torch, transformers and PEFT.

pip install torch "transformers[torch]" peft
python examples/finetune_lora.py runs/tiny/model                        the Zen of Python, in less than a minute
python examples/finetune_lora.py you/yours --text notes.txt more.jsonl  a model on the Hub, and your own text
"""

import argparse
import codecs
import contextlib
import io
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def main() -> None:
    args = parse()
    documents = [text for path in args.text for text in read(path)] if args.text else zen_of_python()
    # Imported after the arguments are checked: these imports take seconds.
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    # trust_remote_code: runs the four short Python files that are stored with the weights.
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=True)
    training, heldout = rows(documents, tokenizer, min(args.seq_len, model.config.max_position_embeddings))

    # LoRA trains two low-rank matrices for each linear layer; the base weights are frozen.
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora)
    settings = TrainingArguments(
        output_dir=str(args.output_dir),
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=4,
        logging_steps=max(1, args.max_steps // 4),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,  # warns without a GPU
    )
    trainer = Trainer(adapted, settings, train_dataset=training, eval_dataset=heldout)  # pyright: ignore[reportArgumentType]
    trained, total = adapted.get_nb_trainable_parameters()
    print(
        f"training {trained:,} of {total:,} parameters on {len(training)} rows of {len(training[0]['labels'])} tokens"
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"loss on {len(heldout)} held-out rows, nats a token: {before:.3f} before, {after:.3f} after")

    adapted.save_pretrained(args.output_dir / "adapter")
    adapted.merge_and_unload()  # pyright: ignore[reportCallIssue]  # into `model`, in place
    model.config.use_cache = True  # the Trainer turns it off for training
    model.save_pretrained(args.output_dir / "merged")
    tokenizer.save_pretrained(args.output_dir / "merged")
    for weights in args.output_dir.glob("*/*.safetensors"):  # safetensors creates files that only their owner may read
        weights.chmod((args.output_dir / "merged" / "config.json").stat().st_mode)
    print(f"wrote {args.output_dir / 'adapter'} (the adapter) and {args.output_dir / 'merged'} (the merged model)")
    print(f"next: python examples/use_from_hub.py {args.output_dir / 'merged'}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder, or a Hub id like user/name")
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help=".jsonl with a field text, or plain text")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/lora"))
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--seq_len", type=int, default=256, help="maximum tokens of a row; at most the model's context")
    args = parser.parse_args()
    if missing := [name for name in ("torch", "transformers", "accelerate", "peft") if find_spec(name) is None]:
        raise ValueError(f'{", ".join(missing)} not installed: pip install torch "transformers[torch]" peft')
    for name, least in {"max_steps": 1, "seq_len": 8}.items():
        if getattr(args, name) < least:
            raise ValueError(f"--{name} is {getattr(args, name)}. Give {least} or more.")
    if args.learning_rate <= 0:
        raise ValueError(f"--learning_rate is {args.learning_rate:g}. Give a number above 0.")
    if any((args.output_dir / name).exists() for name in ("adapter", "merged")):
        raise ValueError(f"{args.output_dir} already contains an adapter. Choose another folder with --output_dir.")
    if not (Path(args.model) / "config.json").is_file() and not re.fullmatch(r"[\w.-]+/[\w.-]+", args.model):
        raise ValueError(f"{args.model} is neither a model folder nor a Hub id like user/name.")
    return args


def read(path: Path) -> list[str]:
    """Read the documents of a file: the field `text` of each line of .jsonl, else paragraphs between blank lines."""
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}). Save it as UTF-8.") from None
    if path.suffix != ".jsonl":
        return [part for part in re.split(r"\n\s*\n", content) if part.strip()]
    try:
        texts = [json.loads(line)["text"] for line in content.split("\n") if line.strip()]
        if all(isinstance(text, str) for text in texts):
            return texts
    except (json.JSONDecodeError, KeyError, TypeError):
        pass
    raise ValueError(f'{path} needs on every line an object with a string field "text".')


def zen_of_python() -> list[str]:
    """Return the nineteen lines of the module `this`, which prints them when it is imported."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13").splitlines()[2:]


def rows(documents: list[str], tokenizer: Any, length: int) -> tuple[list, list]:
    """Return training rows, and held-out rows of every fourth document."""

    def joined(some: list[str]) -> list[int]:
        # not verbose: documents longer than the context are cut below
        return [id for text in some for id in [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id]]

    heldout = joined(documents[3::4])
    training = joined([text for n, text in enumerate(documents) if n % 4 != 3])
    length = min(length, len(heldout) // 4, len(training) // 4)
    if length < 8:
        raise ValueError(
            f"The {len(documents)} documents are too little text. Give at least four documents of a few lines: "
            "a document is a paragraph between blank lines, or a line of .jsonl."
        )

    def cut(ids: list[int]) -> list[dict[str, list[int]]]:
        pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        return [{"input_ids": piece, "labels": piece} for piece in pieces]

    return cut(training), cut(heldout)


if __name__ == "__main__":
    try:
        main()
    except (ImportError, OSError, ValueError) as error:  # errors that the user can fix: one line
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
