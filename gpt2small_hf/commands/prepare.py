"""`prepare`: text → a folder of token files, by `data/corpus/prepare.py`."""

from __future__ import annotations

from pathlib import Path

from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.config.parser import FlagParser
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.files import check_writable
from gpt2small_hf.runs.layout import check_named


def main(words: list[str]) -> None:
    """Run `prepare`."""
    parser = FlagParser(
        PrepareArguments,
        prog=command("prepare"),
        usage=f"{command('prepare')} --text FILES … | --dataset ID [--flag value …]",
        description="Tokenize text into a folder of token files. Without flags: the Python language reference.",
    )
    parser.add_argument(
        "--output_dir", "--output-dir", type=Path, help="Folder to write (default: data/<source>-<hash>)."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace the folder if it contains other data.")
    args, where = parser.fill(words)
    from gpt2small_hf.data.corpus.sources import check_text

    if not args.trains_tokenizer:
        check_named("--tokenizer", args.tokenizer)
    check_text(args)
    place = where.output_dir or Path("data")
    if not place.is_dir():  # an existing data set is only read
        check_writable("--output_dir", place)
    from gpt2small_hf.data.corpus.metadata import read_meta
    from gpt2small_hf.data.corpus.prepare import prepare

    folder = prepare(args, where.output_dir, overwrite=where.overwrite)
    train = ("train", "--data_dir", str(folder), "--output_dir", str(Path("runs", folder.name)))
    if "validation" in read_meta(folder).splits:
        print(f"next: {command(*train)}")
    else:
        print(f"next: {command(*train, '--eval_strategy', 'no')} (no text is held out)")
