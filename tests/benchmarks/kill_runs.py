"""Kill runs at random and at named moments, resume them until they finish, and compare each with an uninterrupted one.

    python tests/benchmarks/kill_runs.py [--kills 10] [--kinds lora,muon] [--seed 0]

Kinds of run: see `KINDS`. Each is interrupted `--kills` times at a random moment, by SIGKILL, SIGTERM or SIGINT, and
its resumption with a chance of one in three again; and once at each of `MOMENTS`. After that the same command is given
until it ends with status 0. Then these must equal those of a run without interruptions: weights, adapter, held-out
results, log (but for times and memory), samples, and the checkpoints that are kept, by name, weights, optimizer's state
and log.

Prints a table, and exits with 1 if anything differs. The runs are forks of this process, which has imported everything,
so one takes about two seconds on one core. POSIX only.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from conftest import chat_words, chats, run_train, tiny_words
from transformers import Trainer

from gpt2small_hf.errors import run_command
from gpt2small_hf.formatting import console_table
from gpt2small_hf.runs.files import read_json, read_jsonl, sha256
from gpt2small_hf.runs.layout import RunFolder, checkpoints_in
from gpt2small_hf.training import callbacks, run
from gpt2small_hf.training.trainer import CausalLMTrainer

# Of a corpus of 36 rows of training: an epoch has 9 steps of 32 rows, and of 16 rows 18.
BY_STEPS = "--gradient_accumulation_steps 2 --save_steps 5 --logging_steps 4 --embd_pdrop 0.1 --save_total_limit 2 "
BY_STEPS += "--eval_steps 8 --per_device_train_batch_size 16"
BY_EPOCHS = "--eval_strategy epoch --save_strategy epoch --logging_steps 3 --resid_pdrop 0.1 --load_best_model_at_end "
BY_EPOCHS += "--per_device_train_batch_size 32 --num_train_epochs 3 --max_steps -1"
MIXED = "--eval_strategy epoch --logging_strategy epoch --save_steps 3 --save_total_limit 9 --embd_pdrop 0.1 "
MIXED += "--per_device_train_batch_size 32"
# The best is the worst one here, so that it is not the last.
ONE_CHECKPOINT = "--save_total_limit 1 --load_best_model_at_end --eval_steps 4 --save_steps 4 "
ONE_CHECKPOINT += "--metric_for_best_model loss --greater_is_better true --per_device_train_batch_size 32"
MUON = "--optim muon --gradient_accumulation_steps 3 --per_device_train_batch_size 8 --logging_steps 3"
WSD = "--lr_scheduler_type warmup_stable_decay --save_steps 5 --eval_steps 5 --save_total_limit 9"
CHAT = "--max_answers 2 --load_best_model_at_end --resid_pdrop 0.1 --save_total_limit 2"
LORA = "--max_answers 2 --lora_rank 2 --lora_dropout 0.1 --add_special_tokens --packing padding --num_train_epochs 2"
RISING = "--max_answers 2 --early_stopping_patience 1 --load_best_model_at_end --num_train_epochs 40 "
RISING += "--learning_rate 0.05 --lr_scheduler_type constant"

TIMES = {"tokens_per_second", "memory_gib", "data_wait", "mfu"}
ENDS_WITH = ("_runtime", "_per_second")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MOST_ATTEMPTS = 12


def text(more: str) -> Callable[[Path, Path], list[str]]:
    """A run on text with these flags."""
    return lambda place, folder: [*tiny_words(place, folder), *more.split()]


def chat(more: str) -> Callable[[Path, Path], list[str]]:
    """A run on chats with these flags."""
    return lambda place, folder: chat_words(place, folder, *more.split())


def branch(place: Path, folder: Path) -> list[str]:
    """A branch of the run `stable`, to a shorter end."""
    stable = place / "stable" / "checkpoints" / "checkpoint-10"
    return [*tiny_words(place, folder), *WSD.split(), "--max_steps", "16", "--branch_from", str(stable)]


KINDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "text by steps": text(BY_STEPS),
    "text by epochs, best kept": text(BY_EPOCHS),
    "steps and epochs mixed": text(MIXED),
    "one checkpoint, best kept": text(ONE_CHECKPOINT),
    "muon, accumulation": text(MUON),
    "branch": branch,
    "chats packed, best kept": chat(CHAT),
    "chats with LoRA": chat(LORA),
    "early stopping": chat(RISING),
}


@dataclass
class Lengths:
    """What an uninterrupted run took."""

    seconds: float
    last_step: int
    steps_per_epoch: int


# ---- interruptions -----------------------------------------------------------------------------------------------


def at_step(step: int, number: int, *, after: bool = False) -> None:
    """Send this process a signal before, or after, what is due after a step (log, evaluation, checkpoint)."""
    work = CausalLMTrainer._maybe_log_save_evaluate

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        is_step = self.is_in_step and self.state.global_step == step
        if is_step and not after:
            os.kill(os.getpid(), number)
        work(self, *args, **kwargs)
        if is_step and after:
            os.kill(os.getpid(), number)

    CausalLMTrainer._maybe_log_save_evaluate = call


def at_call(owner: Any, name: str, times: int = 1) -> None:
    """Send this process SIGKILL when a function is called for the given time."""
    function, calls = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, name, call)


def after_seconds(seconds: float, number: int) -> None:
    """Send this process a signal after some time."""
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


MOMENTS: dict[str, Callable[[Lengths], None]] = {
    "SIGTERM in mid-epoch": lambda run: at_step(run.steps_per_epoch + 2, signal.SIGTERM),
    "SIGTERM at an epoch's last step": lambda run: at_step(run.steps_per_epoch, signal.SIGTERM),
    "SIGINT after an epoch's last step": lambda run: at_step(run.steps_per_epoch, signal.SIGINT, after=True),
    "SIGTERM at the last step": lambda run: at_step(run.last_step, signal.SIGTERM),
    "kill after an epoch's last step": lambda run: at_step(run.steps_per_epoch, signal.SIGKILL, after=True),
    "kill after the last step": lambda run: at_step(run.last_step, signal.SIGKILL, after=True),
    "kill before a checkpoint gets its name": lambda _: at_call(CausalLMTrainer, "_give_name"),
    "kill before older checkpoints are removed": lambda _: at_call(CausalLMTrainer, "_rotate", 2),
    "kill before a checkpoint's samples": lambda _: at_call(callbacks.SampleCallback, "on_save", 2),
    "kill before the closing line": lambda _: at_call(Trainer, "_finalize_training"),
    "kill after the closing line": lambda _: at_call(CausalLMTrainer, "tidy"),
    "kill before the model is saved": lambda _: at_call(run, "save_model"),
    "kill before the held-out results": lambda _: at_call(run, "made_by", 2),
    "kill in the first milliseconds": lambda _: after_seconds(random.uniform(0.001, 0.2), signal.SIGKILL),
}


# ---- runs --------------------------------------------------------------------------------------------------------


def start(words: list[str], log: Path, interrupt: Callable[[], None] | None = None) -> int:
    """Run `train.py` with these words in a fork. Returns: its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = ["train.py", *words]
            if interrupt is not None:
                interrupt()
            status = run_command(lambda: run_train(words) and None)
            sys.stdout.flush()
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def result(folder: RunFolder) -> dict[str, Any]:
    """All that must be equal."""
    rows = [row for row in read_jsonl(folder.metrics) if row.get("symptom") != "waiting for data"]
    kept = checkpoints_in(folder.checkpoints)
    states = {path.name: read_json(path / "trainer_state.json") for path in kept}
    weights = [path for name in ("model.safetensors", "adapter_model.safetensors") for path in folder.root.rglob(name)]
    return {
        "weights": {str(path.relative_to(folder.root)): sha256(path) for path in weights},
        "held-out results": {**read_json(folder.heldout), "made_by": None},
        "log": [timeless(row) for row in rows],
        "samples": read_jsonl(folder.samples),
        "checkpoints": {name: [timeless(row) for row in state["log_history"]] for name, state in states.items()},
        "best": {name: Path(state["best_model_checkpoint"] or "").name for name, state in states.items()},
        "optimizer": {path.name: torch.load(path / "optimizer.pt", weights_only=True) for path in kept},
    }


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the log without what depends on the machine's pace."""
    return {key: value for key, value in row.items() if key not in TIMES and not key.endswith(ENDS_WITH)}


def equal(a: Any, b: Any) -> bool:
    """Whether two results are the same, tensors to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


@dataclass
class Tally:
    """What became of one kind's interruptions."""

    runs: int = 0
    interruptions: int = 0
    differences: list[str] = field(default_factory=list)


class Matrix:
    """All kinds of run in one folder, so that text is prepared once."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.random = place, random.Random(seed)
        corpus = place / "chats.jsonl"
        corpus.write_text("".join(str(row).replace("'", '"') + "\n" for row in chats()), encoding="utf-8")
        (place / "chat.yaml").write_text("# nothing but defaults\n", encoding="utf-8")
        for name, more in (("base", ""), ("stable", WSD)):
            assert start(text(more)(place, place / name), place / f"{name}.log") == 0, place / f"{name}.log"

    def reference(self, kind: str) -> tuple[dict[str, Any], Lengths]:
        """An uninterrupted run's result."""
        folder = RunFolder(self.place / "uninterrupted")
        began = time.perf_counter()
        status = start(KINDS[kind](self.place, folder.root), self.place / "uninterrupted.log")
        assert status == 0, (self.place / "uninterrupted.log").read_text()
        seconds = time.perf_counter() - began
        last = max((row for row in read_jsonl(folder.metrics) if "epoch" in row), key=lambda row: row["step"])
        lengths = Lengths(seconds, last["step"], round(last["step"] / last["epoch"]))
        found = result(folder)
        shutil.rmtree(folder.root)
        return found, lengths

    def interrupted(
        self, kind: str, moment: Callable[[], None] | None, lengths: Lengths
    ) -> tuple[dict[str, Any] | None, int, str]:
        """Interrupt a run, at a moment or at random, and resume it until it is finished.

        Returns: its result, None if it never finished; how often it was interrupted; and how.
        """
        folder = RunFolder(self.place / "interrupted")
        shutil.rmtree(folder.root, ignore_errors=True)
        log = self.place / "interrupted.log"
        log.unlink(missing_ok=True)
        words = KINDS[kind](self.place, folder.root)
        history, status = [], 0
        for attempt in range(MOST_ATTEMPTS):
            interrupt = moment if attempt == 0 else None
            if moment is None and (attempt == 0 or (attempt < 4 and self.random.random() < 1 / 3)):
                seconds, number = self.random.uniform(0, lengths.seconds), self.random.choice(SIGNALS)
                interrupt = lambda seconds=seconds, number=number: after_seconds(seconds, number)  # noqa: E731
                history.append(f"{number.name} at {seconds:.2f} s")
            status = start(words, log, interrupt)
            if status == 0:
                return result(folder), attempt, ", ".join(history)
            if interrupt is None:
                break
        return None, 0, f"{', '.join(history)}; status {status}: {log.read_text().strip().splitlines()[-1]}"

    def run(self, kind: str, kills: int) -> Tally:
        """Interrupt one kind at every moment, and at random."""
        tally = Tally()
        expected, lengths = self.reference(kind)
        cases: list[tuple[str, Callable[[], None] | None]] = [
            (name, lambda moment=moment: moment(lengths)) for name, moment in MOMENTS.items()
        ]
        for name, moment in [*cases, *[("at random", None)] * kills]:
            found, times, how = self.interrupted(kind, moment, lengths)
            tally.runs += 1
            tally.interruptions += times
            if found is None:
                wrong = ["does not finish"]
            else:
                wrong = [part for part in expected if not equal(expected[part], found[part])]
            if wrong:
                tally.differences.append(f"{kind}, {name}{f' ({how})' * bool(how)}: {', '.join(wrong)}")
                print(tally.differences[-1], flush=True)
        return tally


def main() -> int:
    """Run all, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="Random interruptions of each kind.")
    parser.add_argument("--kinds", default=",".join(KINDS), help="Kinds of run, by the beginning of their names.")
    parser.add_argument("--seed", type=int, default=0, help="Of the random moments.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [kind for kind in KINDS if any(kind.startswith(name.strip()) for name in args.kinds.split(","))]
    tallies, began = {}, time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        matrix = Matrix(Path(place), args.seed)
        for kind in kinds:
            tallies[kind] = matrix.run(kind, args.kills)
            print(f"{kind}: {tallies[kind].runs} runs, {len(tallies[kind].differences)} differ", flush=True)
        os.chdir("/")
    rows = [[kind, str(t.runs), str(t.interruptions), str(len(t.differences))] for kind, t in tallies.items()]
    print(console_table(["kind of run", "runs", "interruptions", "different"], rows))
    print(f"{time.perf_counter() - began:.0f} s; {len(MOMENTS)} named moments and {args.kills} at random each.")
    return int(any(tally.differences for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
