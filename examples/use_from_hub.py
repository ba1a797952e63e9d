"""Generate text with a published model or a run's model folder: a continuation, or an answer if it is a chat model.

Needs only torch and transformers.

python examples/use_from_hub.py runs/tiny/model "The expression"
python examples/use_from_hub.py runs/chat/model "What does pass do?"
"""

import argparse
import re
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder, or a Hub id like user/name")
    parser.add_argument("prompt", nargs="*", default=["The"], help="text to continue, or a question (default: The)")
    args = parser.parse_args()
    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        raise ValueError(f"{', '.join(missing)} not installed: pip install torch transformers")
    if not (Path(args.model) / "config.json").is_file() and not re.fullmatch(r"[\w.-]+/[\w.-]+", args.model):
        raise ValueError(f"{args.model} is neither a model folder nor a Hub id like user/name.")

    from transformers import pipeline  # imported after the arguments are checked: it takes seconds

    # trust_remote_code: runs the four short Python files that are stored with the weights.
    write = pipeline("text-generation", model=args.model, trust_remote_code=True)
    text = " ".join(args.prompt)
    n_tokens, limit = len(write.tokenizer(text)["input_ids"]), write.model.config.max_position_embeddings  # pyright: ignore
    if n_tokens >= limit:
        raise ValueError(f"the prompt has {n_tokens:,} tokens, but the model takes fewer than {limit:,}. Shorten it.")
    if write.tokenizer.chat_template:  # pyright: ignore[reportOptionalMemberAccess]
        chat = [{"role": "user", "content": text}]
        # Encode the question as text, also where it spells a special token of the template.
        as_text = {"sanitize_control_tokens": True}
        answered = write(chat, do_sample=False, tokenizer_encode_kwargs=as_text)[0]["generated_text"]
        print(answered[-1]["content"])
    else:
        print(write(text)[0]["generated_text"])


if __name__ == "__main__":
    try:
        main()
    except (ImportError, OSError, ValueError) as error:  # errors that the user can fix: one line
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
