"""`gpt2small evaluate` against lm-evaluation-harness's own command: time, memory and largest difference of a score.

    python tests/benchmarks/bench_evaluate.py MODEL --task_data DIR --tasks blimp [--limit 100] [--pairs 3] [--beside]

MODEL is a folder that transformers loads, such as runs/tiny/model; DIR has questions (docs/evaluation.md). Both
commands measure the same weights on the same items, in float32 with the same batch size, as processes of their own and
in turns: imports, loading and writing of results are part of the time. The harness loads the model as remote code.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpt2small_hf.evaluation.items import Choices, TaskItems

BUSY = "while True: pass"


def measure(command: list[str | Path]) -> tuple[float, float]:
    """Run a command. Returns: seconds, and peak memory in MiB. Raises: SystemExit with its output if it fails."""
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        # VmHWM and not ru_maxrss, in which Linux counts what the parent had when it started this process.
        peak = 0.0
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            if status.exists() and (lines := [one for one in status.read_text().splitlines() if "VmHWM" in one]):
                peak = max(peak, int(lines[0].split()[1]) / 1024)
            time.sleep(0.05)
        seconds = time.perf_counter() - began
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{command[0]} failed:\n{output.read().decode()[-2000:]}")
    return seconds, peak


def largest_difference(ours: Path, theirs: Path) -> tuple[int, float]:
    """Return the number of items with answers, and the largest difference of an answer's log-likelihood in nats."""
    n_items, largest = 0, 0.0
    for path in sorted(ours.glob("*/*.jsonl")):
        items = TaskItems.load(path).items
        (samples,) = theirs.rglob(f"samples_{path.stem}_2*.jsonl")
        lines = sorted(map(json.loads, samples.read_text(encoding="utf-8").splitlines()), key=lambda one: one["doc_id"])
        for item, sample in zip(items, lines, strict=True):
            if isinstance(item, Choices):
                found = [float(response[0][0]) for response in sample["resps"]]
                pairs = zip(item.log_likelihoods, found, strict=True)
                largest = max([largest, *(abs((one or 0.0) - other) for one, other in pairs)])
                n_items += 1
    return n_items, largest


def main() -> None:
    """Run the comparison the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="A folder that transformers loads.")
    parser.add_argument("--task_data", type=Path, required=True, help="Folder with the questions.")
    parser.add_argument("--tasks", nargs="+", required=True, help="Tasks of the folder.")
    parser.add_argument("--limit", type=int, help="Maximum number of items of a task.")
    parser.add_argument("--batch_size", type=int, default=32, help="Rows of a forward pass.")
    parser.add_argument("--pairs", type=int, default=3, help="Times that each side is measured.")
    parser.add_argument("--beside", action="store_true", help="Keep one core busy with another process.")
    args = parser.parse_args()
    beside = subprocess.Popen([sys.executable, "-c", BUSY]) if args.beside else None
    limit = () if args.limit is None else ("--limit", str(args.limit))
    shared = ("--tasks", *args.tasks, "--batch_size", str(args.batch_size), *limit)
    ratios: list[float] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for pair in range(args.pairs):
                ours, theirs = Path(folder, f"ours_{pair}"), Path(folder, f"theirs_{pair}")
                evaluate = [sys.executable, "-m", "gpt2small_hf", "evaluate", args.model, *shared]
                seconds, peak = measure([*evaluate, "--task_data", args.task_data, "--output_dir", ours])
                harness = [Path(sys.executable).with_name("lm_eval"), "run", "--model", "hf", *shared, "--log_samples"]
                model = f"pretrained={args.model},trust_remote_code=True,dtype=float32"
                harness += ["--model_args", model, "--device", "cpu", "--include_path", ours / "tasks"]
                their_seconds, their_peak = measure([*harness, "--output_path", theirs])
                ratios.append(their_seconds / seconds)
                ours_text = f"evaluate {seconds:6.1f} s {peak:6,.0f} MiB"
                theirs_text = f"lm_eval {their_seconds:6.1f} s {their_peak:6,.0f} MiB"
                print(f"pair {pair + 1}   {ours_text}   {theirs_text}   {ratios[-1]:.2f}x", flush=True)
            n_items, largest = largest_difference(ours / "items", theirs)
    finally:
        if beside is not None:
            beside.kill()
            beside.wait()
    busy = " beside a busy process" if args.beside else ""
    spread = f"from {min(ratios):.2f}x to {max(ratios):.2f}x"
    print(f"ratio: median {statistics.median(ratios):.2f}x, {spread}, {os.cpu_count()} cores{busy}")
    print(f"largest difference of a log-likelihood over {n_items:,} items: {largest:.2e} nats")


if __name__ == "__main__":
    main()
