"""`convert`: a model folder → the same model in another format, by `conversion/convert.py`."""

from __future__ import annotations

from pathlib import Path

from gpt2small_hf.config.parser import FlagParser
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.files import check_writable
from gpt2small_hf.runs.hub import check_on_hub
from gpt2small_hf.runs.layout import check_named


def main(words: list[str]) -> None:
    """Run `convert`."""
    parser = FlagParser(
        prog=command("convert"),
        description="Convert GPT-2 weights of other code to this package's format, or a model of this package to "
        "transformers' GPT-2 format, which needs no remote code. No code in SRC is executed.",
    )
    parser.add_argument(
        "SRC",
        help="A run, model or checkpoint folder of this package; a folder or Hub id of a transformers GPT-2; the "
        "reference series' model.json with *.safetensors, or its published form; nanoGPT's ckpt.pt.",
    )
    parser.add_argument("DST", type=Path, help="Folder to write.")
    parser.add_argument("--to", required=True, choices=["gpt2small", "gpt2"], help="Format to write.")
    parser.add_argument("--config", type=Path, help="The reference series' model.json, if it is not in SRC.")
    parser.add_argument("--tokenizer", help="Folder or Hub id of a tokenizer, if SRC has none.")
    parser.add_argument("--overwrite", action="store_true", help="Replace the model folder DST.")
    (args,) = parser.fill(words)
    from gpt2small_hf.conversion.convert import check_destination, check_model, convert, locate, next_command

    source = locate(args.SRC)
    check_destination(args.DST, source, overwrite=args.overwrite)
    check_writable("DST", args.DST)
    if source is None:
        check_on_hub(args.SRC, ["config.json"])
    elif args.config is None:
        check_model(source)
    check_named("--tokenizer", args.tokenizer)
    if args.config is not None and not args.config.is_file():
        raise UsageError(f"--config {args.config} is not a file. Name the reference series' model.json.")
    convert(args.SRC, args.DST, args.to, settings=args.config, tokenizer=args.tokenizer, overwrite=args.overwrite)
    print(f"next: {next_command(args.DST, args.to)}")
