"""What a run's guard, log and callbacks cost: our Trainer against the stock Trainer and against a bare PyTorch loop.

    python tests/benchmarks/bench_training.py [--only overhead data_wait cuda] [--rounds 40]

Overhead: 4 layers, 128 wide, batches of 16 x 64. All three train the same model on the same rows in one process, a
thread each, and take turns of ten steps, so that whatever else the machine does falls on all. Each round gives a ratio.
Data wait: GPT-2 small, batches of 8 x 1,024 from a prepared folder; the share of a step that its rows take to arrive.
Where CUDA is: tokens/s and MFU of GPT-2 small, bfloat16, compiled, through the whole of our Trainer.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, get_scheduler
from transformers.utils import logging

from gpt2small_hf import GPT2SmallConfig, GPT2SmallForCausalLM
from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.data.corpus.prepare import prepare
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.formatting import console_table
from gpt2small_hf.training.budget import flops_per_token, peak_flops, precision_of
from gpt2small_hf.training.callbacks import MetricsLog, StopOnSignal
from gpt2small_hf.training.health import HealthCallback
from gpt2small_hf.training.progress import ProgressLine
from gpt2small_hf.training.trainer import CausalLMTrainer

STEPS_A_TURN = 10
console = Console(stderr=True)


class Turns:
    """Lets threads run one at a time, each for a turn, and keeps how long every turn took."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.now = names, 0
        self.changed = threading.Condition()
        self.seconds: dict[str, list[float]] = {name: [] for name in names}

    def begin(self, name: str) -> None:
        """Wait for the first turn."""
        with self.changed:
            self.changed.wait_for(lambda: self.names[self.now] == name)
        self.began = time.perf_counter()

    def next(self, name: str) -> None:
        """End a turn, wait for the next."""
        self.seconds[name].append(time.perf_counter() - self.began)
        with self.changed:
            self.now = (self.now + 1) % len(self.names)
            self.changed.notify_all()
        self.begin(name)

    def leave(self, name: str) -> None:
        """Take no more turns."""
        with self.changed:
            self.now = (self.now + 1) % len(self.names) if len(self.names) > 1 else 0
            after = self.names[self.now]
            self.names.remove(name)
            self.now = self.names.index(after) if self.names else 0
            self.changed.notify_all()


class TakeTurns(TrainerCallback):
    """Hands over after every ten steps of a Trainer."""

    def __init__(self, turns: Turns, name: str) -> None:
        self.turns, self.name = turns, name

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Everything is built: wait."""
        self.turns.begin(self.name)

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Hand over, logging of the last turn included."""
        if state.global_step and state.global_step % STEPS_A_TURN == 0:
            self.turns.next(self.name)


class Rows(list):
    """Random rows, the same for all."""

    @classmethod
    def make(cls, n_rows: int, seq_len: int, vocab_size: int) -> Rows:
        """`n_rows` rows of `seq_len` ids below `vocab_size`."""
        ids = np.random.default_rng(0).integers(0, vocab_size, (n_rows, seq_len))
        return cls({"input_ids": row} for row in ids)


def small_model() -> GPT2SmallForCausalLM:
    """4 layers, 128 wide, with the vocabulary of a small tokenizer."""
    torch.manual_seed(0)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 64}
    return GPT2SmallForCausalLM(GPT2SmallConfig(vocab_size=1024, **sizes, **ids))


def settings(place: str, steps: int, **changes: Any) -> TrainingArguments:
    """The same for the stock Trainer and ours."""
    return TrainingArguments(
        **{
            "output_dir": place,
            "max_steps": steps,
            "per_device_train_batch_size": 16,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "warmup_steps": 20,
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "logging_steps": STEPS_A_TURN,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "use_cpu": True,
        }
        | changes
    )


def overhead(n_rounds: int) -> list[list[str]]:
    """One row for each of the peers: our time a step, theirs, and the ratio's median and quartiles."""
    n_warm_up = 3
    steps = STEPS_A_TURN * (n_rounds + n_warm_up)
    rows = Rows.make(16 * steps, 64, 1024)
    turns = Turns(["bare", "ours", "stock"])

    def ours(place: str) -> None:
        metrics = Path(place) / "metrics.jsonl"
        # What a run has while it trains; samples and charts come with checkpoints, which none of the three writes.
        watching = [MetricsLog(metrics), ProgressLine(1024), HealthCallback(metrics)]
        run(CausalLMTrainer, place, "ours", [*watching], logging_nan_inf_filter=False)

    def run(kind: type[Trainer], place: str, name: str, callbacks: list[Any], **changes: Any) -> None:
        args = settings(place, steps, **changes)
        callbacks = [*callbacks, TakeTurns(turns, name)]
        trainer = kind(small_model(), args, data_collator=rows.collate, train_dataset=rows, callbacks=callbacks)  # pyright: ignore[reportArgumentType]
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        turns.leave(name)

    def bare(place: str) -> None:
        model = small_model().train()
        groups = [[p for p in model.parameters() if (p.ndim > 1) == decayed] for decayed in (True, False)]
        optimizer = torch.optim.AdamW(
            [{"params": ps, "weight_decay": decay} for ps, decay in zip(groups, (0.1, 0.0), strict=True)],
            lr=1e-3,
            betas=(0.9, 0.95),
            fused=True,
        )
        schedule = get_scheduler("cosine_with_min_lr", optimizer, 20, steps, {"min_lr_rate": 0.1})
        loader = torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True, collate_fn=rows.collate)
        turns.begin("bare")
        for step, batch in enumerate(itertools.islice(loader, steps)):
            if step and step % STEPS_A_TURN == 0:
                turns.next("bare")
            loss = model(**batch, skip_logits=True).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        turns.leave("bare")

    with tempfile.TemporaryDirectory() as place:
        gc.collect()
        gc.freeze()
        contenders: list[Callable[[], None]] = [
            lambda: bare(place),
            lambda: ours(place),
            lambda: run(Trainer, place, "stock", []),
        ]
        threads = [threading.Thread(target=contender) for contender in contenders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seconds = {name: np.array(kept[n_warm_up:]) for name, kept in turns.seconds.items()}
    table = []
    for peer, label in (("stock", "stock Trainer"), ("bare", "bare loop")):
        n = min(len(seconds["ours"]), len(seconds[peer]))
        ratios = seconds["ours"][:n] / seconds[peer][:n]
        low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        times = [f"{1000 * np.median(seconds[name]) / STEPS_A_TURN:.1f} ms" for name in ("ours", peer)]
        table.append([f"a step, against the {label}", *times, f"{median:.3f}x", f"{low:.3f} to {high:.3f}", str(n)])
    return table


def gpt2_small_trainer(place: Path, steps: int, **changes: Any) -> CausalLMTrainer:
    """Our Trainer with GPT-2 small, tied (124 M), on a prepared folder of enough rows."""
    text = place / "text.txt"
    words = np.random.default_rng(0).integers(0, 1 << 30, 400_000)
    text.write_text(" ".join(f"{word:x}" for word in words))
    arguments = PrepareArguments(text=[str(text)], vocab_size=2048)
    rows = TextDataset(prepare(arguments, place / "data"), "train", 1024)
    torch.manual_seed(0)
    config = GPT2SmallConfig(tie_word_embeddings=True)
    changes = {"per_device_train_batch_size": 8, "logging_steps": 1, "warmup_steps": 0} | changes
    arguments = settings(str(place / "run"), steps, **changes)
    on_gpu = torch.cuda.is_available()
    return CausalLMTrainer(
        GPT2SmallForCausalLM(config),
        arguments,
        data_collator=rows.collate,
        train_dataset=rows,
        flops_per_token=flops_per_token(config, 1024),
        peak_flops=peak_flops(torch.cuda.get_device_name(), precision_of(arguments)) if on_gpu else None,
        callbacks=[StopOnSignal(ProgressLine(8 * 1024))],
    )


def data_wait(n_rounds: int) -> list[list[str]]:
    """The share of a step of 8 x 1,024 that GPT-2 small waits for its rows."""
    with tempfile.TemporaryDirectory() as place:
        trainer = gpt2_small_trainer(Path(place), 3)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        logged = [row for row in trainer.state.log_history if "data_wait" in row][1:]  # the first maps the files
    share = statistics.median(row["data_wait"] for row in logged)
    pace = statistics.median(row["tokens_per_second"] for row in logged)
    return [["data wait, 124 M, 8 x 1,024", f"{pace:,.0f} tok/s", "", f"{share:.3%}", "", str(len(logged))]]


def cuda(n_rounds: int) -> list[list[str]]:
    """Throughput and MFU of GPT-2 small on the GPU, the whole Trainer around it."""
    if not torch.cuda.is_available():
        console.print("cuda: no device, left out")
        return []
    table = []
    for compiled in (False, True):
        with tempfile.TemporaryDirectory() as place:
            more = {"use_cpu": False, "bf16": True, "tf32": True, "torch_compile": compiled}
            more |= {"per_device_train_batch_size": 32, "logging_steps": 10, "dataloader_num_workers": 2}
            trainer = gpt2_small_trainer(Path(place), 60, **more)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            logged = [row for row in trainer.state.log_history if "tokens_per_second" in row][3:]
        pace = [row["tokens_per_second"] for row in logged]
        mfu = [row.get("mfu", float("nan")) for row in logged]
        name = f"124 M, bfloat16, {'compiled' if compiled else 'eager'}, 32 x 1,024"
        spread = f"{min(mfu):.1%} to {max(mfu):.1%}"
        table.append(
            [name, f"{statistics.median(pace):,.0f} tok/s", "", f"{statistics.median(mfu):.1%} MFU", spread, "3"]
        )
    return table


MEASUREMENTS = {f.__name__: f for f in (overhead, data_wait, cuda)}


def main() -> None:
    """Run what is asked for and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    table = [row for name in asked.only for row in MEASUREMENTS[name](asked.rounds)]
    print(f"{torch.get_num_threads()} threads, PyTorch {torch.__version__}; quartiles of the ratio")
    print(console_table(["", "ours", "theirs", "median", "from round to round", "rounds"], table))


if __name__ == "__main__":
    main()
