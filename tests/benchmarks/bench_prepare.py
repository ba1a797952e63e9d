"""`prepare` against `tokenizers`' own batch encoding: tokens a second, and memory for a small and a large corpus.

    python tests/benchmarks/bench_prepare.py [--megabytes 60] [--pairs 5] [--skip_memory]

Both get the same text with the same vocabulary on the same machine, in turns. Ours is the whole of `prepare`, from the
file on disk to the finished folder on disk. Theirs is `Tokenizer.encode_batch` alone, on texts in memory
already, with all the threads it wants.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.data.corpus.metadata import read_meta
from gpt2small_hf.data.corpus.prepare import prepare
from gpt2small_hf.data.corpus.sources import open_python_docs
from gpt2small_hf.data.tokenizer import load_tokenizer, train_tokenizer

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
MEMORY_MEGABYTES = (10, 200)


def material() -> tuple[str, PreTrainedTokenizerFast, str]:
    """Some megabytes of text, a tokenizer, and what they are."""
    if SHARED_DATA.is_dir():
        files = sorted((SHARED_DATA / "pretrain").rglob("*.txt"))
        text = "\n".join(path.read_text(encoding="utf-8") for path in files)
        return text, load_tokenizer(str(SHARED_DATA / "tokenizer_gpt2")), f"{len(files)} books, GPT-2's vocabulary"
    topics = ["".join(map(str, document.blocks)) for document in open_python_docs().documents()]
    return "\n".join(topics), train_tokenizer(topics, 8192), "the Python documentation, 8,192 entries trained on it"


def write(text: str, megabytes: float, path: Path) -> list[str]:
    """Repeat `text` up to a size in one file. Returns: the file's text in parts of about 100 kB, cut at lines."""
    n_bytes = int(megabytes * 1e6)
    data = text.encode() * (n_bytes // len(text.encode()) + 1)
    path.write_bytes(data[: data.rindex(b"\n", 0, n_bytes) + 1])
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return ["".join(lines[at : at + 2000]) for at in range(0, len(lines), 2000)]


def prepare_quietly(path: Path, tokenizer: Path, folder: Path) -> int:
    """Prepare and return the number of tokens."""
    with contextlib.redirect_stdout(io.StringIO()):
        prepare(PrepareArguments(text=[str(path)], tokenizer=str(tokenizer), validation_fraction=0.0), folder)
    n_tokens = read_meta(folder).splits["train"].tokens
    shutil.rmtree(folder)
    return n_tokens


def compare_speed(path: Path, parts: list[str], tokenizer: Path, n_pairs: int) -> None:
    backend: Tokenizer = load_tokenizer(str(tokenizer)).backend_tokenizer
    ratios = []
    for pair in range(n_pairs):
        began = time.perf_counter()
        ours = prepare_quietly(path, tokenizer, path.with_name("set")) / (time.perf_counter() - began)
        began = time.perf_counter()
        n_tokens = 0
        for at in range(
            0, len(parts), 100
        ):  # about 10 MB at a time: its results take a hundred times the memory of ids
            n_tokens += sum(len(encoding.ids) for encoding in backend.encode_batch(parts[at : at + 100]))
        theirs = n_tokens / (time.perf_counter() - began)
        ratios.append(ours / theirs)
        speeds = f"prepare {ours / 1e6:6.2f}M tok/s  encode_batch {theirs / 1e6:6.2f}M tok/s"
        print(f"pair {pair + 1}  {speeds}  {ratios[-1]:.2f}x", flush=True)
    print(f"ratio: median {statistics.median(ratios):.2f}x, from {min(ratios):.2f}x to {max(ratios):.2f}x")


def compare_memory(text: str, tokenizer: Path, place: Path) -> None:
    for megabytes in MEMORY_MEGABYTES:
        path = place / f"{megabytes}.txt"
        write(text, megabytes, path)
        command = [sys.executable, __file__, "--peak_of", str(path), str(tokenizer), str(place / "set")]
        peak = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(f"peak memory of prepare on {megabytes:>3} MB: {peak:,.0f} MiB")


def main() -> None:
    """Run the comparison the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=60, help="Size of the corpus for the speed.")
    parser.add_argument("--pairs", type=int, default=5, help="Times that each side is measured.")
    parser.add_argument("--skip_memory", action="store_true", help="Leave out the memory part.")
    parser.add_argument("--peak_of", nargs=3, metavar=("TEXT", "TOKENIZER", "SET"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_of:
        prepare_quietly(*map(Path, args.peak_of))
        # Not ru_maxrss: Linux counts in it what the parent process had when it started this one.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        print(next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")))
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        text, tokenizer, what = material()
        tokenizer.save_pretrained(place / "tokenizer")
        print(f"{args.megabytes:g} MB: {what}; {os.cpu_count()} cores")
        parts = write(text, args.megabytes, place / "corpus.txt")
        compare_speed(place / "corpus.txt", parts, place / "tokenizer", args.pairs)
        if not args.skip_memory and Path("/proc/self/status").exists():
            compare_memory(text, place / "tokenizer", place)


if __name__ == "__main__":
    main()
