"""The model against `GPT2LMHeadModel` of the same size and dtype: speed, memory, loading.

    python tests/benchmarks/bench_model.py [--only decode prefill train no_cache load memory cuda] [--pairs 7]

Both take turns in one process, and each pair gives a ratio; peaks of memory are taken in a process for each, one after
the other. Weights are random: they decide nothing here. Where CUDA is, throughput and MFU of training are measured too.
"""

from __future__ import annotations

import argparse
import gc
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from gpt2small_hf import GPT, GPT2SmallConfig, GPT2SmallForCausalLM
from gpt2small_hf.training.budget import flops_per_token, peak_flops

NEW_TOKENS = 64
console = Console(stderr=True)
rows: list[tuple[str, str, str, str, str]] = []


def ours(dtype: torch.dtype = torch.float32, **changes: Any) -> GPT2SmallForCausalLM:
    """A model of ours at GPT-2 small's sizes."""
    torch.manual_seed(0)
    return GPT2SmallForCausalLM(GPT2SmallConfig(**changes)).to(dtype).eval()


def gpt2(dtype: torch.dtype = torch.float32, **changes: Any) -> GPT2LMHeadModel:
    """GPT-2 small of transformers without dropout, as ours has none by default."""
    torch.manual_seed(0)
    config = GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **changes)
    return GPT2LMHeadModel(config).to(dtype).eval()  # pyright: ignore[reportArgumentType]


def compare(
    name: str, ours: Callable[[], Any], theirs: Callable[[], Any], n_pairs: int, unit: str, amount: int
) -> None:
    """Time both in turns; the order within a pair changes every time. Adds a row of speeds and the ratio's spread."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for warm_up in (ours, theirs):
        warm_up()
    for pair in range(n_pairs):
        for is_ours in (True, False) if pair % 2 else (False, True):
            gc.collect()
            began = time.perf_counter()
            (ours if is_ours else theirs)()
            seconds[is_ours].append(time.perf_counter() - began)
        console.print(
            f"{name}: pair {pair + 1}/{n_pairs} {seconds[False][-1] / seconds[True][-1]:.2f}x", highlight=False
        )
    ratios = [b / a for a, b in zip(seconds[True], seconds[False], strict=True)]
    speeds = [f"{amount / statistics.median(seconds[is_ours]):,.1f} {unit}" for is_ours in (True, False)]
    add(name, *speeds, ratios)


def add(name: str, ours: str, theirs: str, ratios: list[float]) -> None:
    """Keep one row for the table."""
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else ""
    rows.append((name, ours, theirs, f"{statistics.median(ratios):.2f}x", spread))


def decode(n_pairs: int) -> None:
    """Greedy text from a prompt of 32 tokens, with cache, as `generate` does it."""
    prompt = torch.randint(0, 50257, (1, 32))
    asked = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
    }
    for dtype, tied in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)):
        mine = ours(dtype, tie_word_embeddings=tied)
        theirs = gpt2(dtype, tie_word_embeddings=tied)
        name = f"decode, {str(dtype)[6:]}, {'tied' if tied else 'untied'}"
        compare(
            name,
            lambda mine=mine: mine.generate(prompt, **asked),
            lambda theirs=theirs: theirs.generate(prompt, **asked),
            n_pairs,
            "tok/s",
            NEW_TOKENS,
        )


def prefill(n_pairs: int) -> None:
    """The first step of `generate` on a prompt of 512 tokens: all hidden states and keys, one row of logits."""
    prompt = torch.randint(0, 50257, (1, 512))
    mine, theirs = ours(), gpt2(tie_word_embeddings=False)
    with torch.inference_mode():
        compare(
            "prefill, 512 tokens, float32",
            lambda: mine(prompt, use_cache=True, logits_to_keep=1),
            lambda: theirs(prompt, use_cache=True, logits_to_keep=1),
            n_pairs,
            "tok/s",
            512,
        )


def train(n_pairs: int) -> None:
    """Forward, backward and AdamW on one row of 512 tokens."""
    ids = torch.randint(0, 50257, (1, 512))

    def stepper(model: Any, **kwargs: Any) -> Callable[[], None]:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> None:
            model(ids, labels=ids, use_cache=False, **kwargs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    mine = stepper(ours(), skip_logits=True)
    compare("train step, 1 x 512, float32", mine, stepper(gpt2(tie_word_embeddings=False)), n_pairs, "tok/s", 512)


def no_cache(n_pairs: int) -> None:
    """The reference series' way to write: all positions again for every token, in plain PyTorch."""
    prompt = torch.randint(0, 50257, (1, 32))
    model = ours()
    core = GPT(GPT2SmallConfig()).eval()
    core.load_state_dict(model.state_dict())

    @torch.inference_mode()
    @torch.backends.mkldnn.flags(enabled=False)  # the series' linear layers are PyTorch's own
    def loop() -> None:
        ids = prompt
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, core(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)

    asked = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    mask = torch.ones_like(prompt)
    compare(
        "decode against a loop without cache",
        lambda: model.generate(prompt, attention_mask=mask, **asked),
        loop,
        n_pairs,
        "tok/s",
        NEW_TOKENS,
    )


def load(n_pairs: int) -> None:
    """`from_pretrained` of a folder on disk that was read before."""
    with tempfile.TemporaryDirectory() as place:
        mine, theirs = Path(place) / "ours", Path(place) / "gpt2"
        ours().save_pretrained(mine)
        gpt2(tie_word_embeddings=False).save_pretrained(theirs)
        compare(
            "from_pretrained",
            lambda: GPT2SmallForCausalLM.from_pretrained(mine),
            lambda: GPT2LMHeadModel.from_pretrained(theirs),
            n_pairs,
            "loads/s",
            1,
        )


def memory(n_pairs: int) -> None:
    """Peak memory of the whole process in one training step of 8 rows of 1,024 tokens, without the optimizer."""
    peaks = []
    for which in ("ours", "gpt2"):
        console.print(f"memory: {which} (a step of 8 x 1,024)")
        command = [sys.executable, __file__, "--peak_of", which]
        peaks.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    add("peak memory, training 8 x 1,024", *(f"{peak:,.1f} GiB" for peak in peaks), [peaks[0] / peaks[1]])


def peak_of(which: str) -> None:
    """One step in this process; prints its peak in GiB."""
    ids = torch.randint(0, 50257, (8, 1024))
    if which == "ours":
        ours().train()(ids, labels=ids, use_cache=False, skip_logits=True).loss.backward()
    else:
        gpt2(tie_word_embeddings=False).train()(ids, labels=ids, use_cache=False).loss.backward()
    unit = 2**30 if sys.platform == "darwin" else 2**20  # Linux counts in KiB
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)


def cuda(n_pairs: int) -> None:
    """Training throughput at 8 x 1,024 in bfloat16 autocast, compiled and not, and the share of the peak it makes."""
    if not torch.cuda.is_available():
        console.print("cuda: no device, left out")
        return
    device = torch.cuda.get_device_name()
    peak = peak_flops(device, "bfloat16")
    ids = torch.randint(0, 50257, (8, 1024), device="cuda")
    torch.set_float32_matmul_precision("high")
    for attention in ("sdpa", "flash_attention_2"):
        for compiled in (False, True):
            name = f"train 8 x 1,024, {attention}{', compiled' if compiled else ''}, {device}"
            steps = []
            try:
                for model, kwargs in ((ours(), {"skip_logits": True}), (gpt2(tie_word_embeddings=False), {})):
                    model.set_attn_implementation(attention)
                    steps.append(cuda_stepper(model.cuda().train(), ids, compiled, kwargs))
                compare(name, steps[0], steps[1], n_pairs, "tok/s", 10 * ids.numel())
            except (ImportError, ValueError) as error:
                console.print(f"{name}: left out ({str(error).splitlines()[0]})", highlight=False)
                continue
            speed = float(rows[-1][1].split()[0].replace(",", ""))
            if peak is not None:
                mfu = speed * flops_per_token(GPT2SmallConfig(), seq_len=1024) / peak
                rows.append((f"  its MFU, of {peak / 1e12:,.0f} TFLOP/s", f"{mfu:.1%}", "", "", ""))


def cuda_stepper(model: Any, ids: torch.Tensor, compiled: bool, kwargs: dict[str, Any]) -> Callable[[], None]:
    """Ten steps of forward, backward and fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model) if compiled else model

    def steps() -> None:
        for _ in range(10):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = forward(ids, labels=ids, use_cache=False, **kwargs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()

    return steps


MEASUREMENTS = {f.__name__: f for f in (decode, prefill, train, no_cache, load, memory, cuda)}


def main() -> None:
    """Measure what was asked for and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS), help="default: all")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of each measurement (default: 7)")
    parser.add_argument("--num_threads", type=int, help="threads of PyTorch (default: its own choice)")
    parser.add_argument("--peak_of", choices=("ours", "gpt2"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error(f"--pairs is {args.pairs}; give 1 or more")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    if args.peak_of:
        peak_of(args.peak_of)
        return
    for name in args.only:
        MEASUREMENTS[name](args.pairs)
        gc.collect()
    machine = escape(f"{platform.machine()}, {torch.get_num_threads()} threads")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"\nmedian of {args.pairs} pairs; {machine}, {versions}\n")
    print("| | ours | GPT2LMHeadModel | ratio | from pair to pair |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
