"""Small real models, runs and chats that many tests share, and processes that start without importing torch again."""

import io
import itertools
import json
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

# No test may use the network; set before any import of huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tiny models are fastest on one thread, and threads of several processes would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from hypothesis import settings
from transformers import PreTrainedTokenizerFast

from gpt2small_hf import GPT2SmallConfig, GPT2SmallForCausalLM
from gpt2small_hf.config.resolve import read_config
from gpt2small_hf.data.tokenizer import train_tokenizer
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.training.run import train

settings.register_profile("steady", deadline=None)  # a slow machine must not fail a test
settings.load_profile("steady")

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"

needs_shared_data = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the real data beside the checkout is absent")


# Processes of this context are forks of one that has imported what training needs, which takes five seconds. It cannot
# import modules of the tests: Python 3.11 starts it without their path, and skips a module that it does not find.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["gpt2small_hf.training.run", "gpt2small_hf.commands.prepare", "pytest", "hypothesis"])


def _run_script(words: list[str], place: Path, variables: dict[str, str], out: Connection, err: Connection) -> None:
    os.chdir(place)
    os.environ.update(variables)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    # New ones: those of the parent may be of a file, in which a position can be set.
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding="utf-8", write_through=True)
    sys.orig_argv = [sys.executable, *words]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def run_script(words: Sequence[str | Path], place: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS…` in a folder, without the time that its imports take.

    Args:
        words: a script, `-m` and a module, or `-c` and code; then its arguments.
        place: the folder.
        variables: environment variables to set; those that a library reads when it is imported have no effect.
    """
    pipes = out, err = processes.Pipe(duplex=False), processes.Pipe(duplex=False)
    arguments = ([str(word) for word in words], place, variables, out[1], err[1])
    process = processes.Process(target=_run_script, args=arguments)
    process.start()
    for _, theirs in pipes:
        theirs.close()
    with ThreadPoolExecutor(2) as pool:
        printed = list(pool.map(lambda pipe: Path(f"/dev/fd/{pipe[0].fileno()}").read_text("utf-8"), pipes))
    process.join()
    for ours, _ in pipes:
        ours.close()
    assert process.exitcode is not None
    return subprocess.CompletedProcess(words, process.exitcode, *printed)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use three processes for two cores, since tests wait for others a fifth of their time.

    Named files run in this process: it starts faster and can stop in a debugger.
    """
    if config.args_source is pytest.Config.ArgsSource.ARGS and config.option.numprocesses == "auto":
        return 0
    return (3 * (os.cpu_count() or 1) + 1) // 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs CUDA without CUDA, and start files with the most slow tests first, to balance the workers."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
    n_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (-n_slow[item.path], item.path))


ABSENT_WHEN_ISOLATED = {"gpt2small_hf", "accelerate", "datasets", "tiktoken", "matplotlib", "rich"}

FORK_SERVER = """
import json, os, sys
sys.path.append(sys.argv[1])
import torch, transformers.modeling_utils, transformers.pipelines
for line in sys.stdin:
    code, *outputs = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    exec(compile(code, "isolated.py", "exec"), {"__name__": "__main__"})
    sys.exit()
"""


@pytest.fixture(scope="session")
def run_isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Run code where torch, transformers and their dependencies can be imported, but not this package. Returns: stdout.

    -I and -S leave out the current folder, PYTHONPATH, site-packages and its .pth files, so also an editable install.
    The installed packages that a user needs are linked into a folder.

    Each call runs in a fork of one process that has imported torch and transformers, which takes seconds. With
    `is_cold=True` it runs in a new process, where code can extend `sys.path` before it imports transformers.
    """
    place = tmp_path_factory.mktemp("isolated")
    packages = place / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name.split("-")[0] not in ABSENT_WHEN_ISOLATED and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    environment = {
        "PATH": os.environ["PATH"],
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(place / "cache"),
    }

    def start(code: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-I", "-S", "-c", code, str(packages)]
        return subprocess.Popen(command, cwd="/", env=environment, stdin=pipe, stdout=pipe, text=True)

    server: list[subprocess.Popen[str]] = []
    numbers = itertools.count()

    def run(code: str, *, is_cold: bool = False) -> str:
        if is_cold:
            process = start(f"import sys\nsys.path.append(sys.argv[1])\n{code}")
            printed, _ = process.communicate()
            assert process.returncode == 0
            return printed
        if not server:
            server.append(start(FORK_SERVER))
        requests, answers = server[0].stdin, server[0].stdout
        assert requests is not None
        assert answers is not None
        out, err = (place / f"{next(numbers)}.{name}" for name in ("out", "err"))
        requests.write(json.dumps([code, str(out), str(err)]) + "\n")
        requests.flush()
        status = answers.readline().strip()
        assert status == "0", err.read_text(encoding="utf-8")
        return out.read_text(encoding="utf-8")

    yield run
    for process in server:
        process.communicate()


def tiny_config(**changes: object) -> GPT2SmallConfig:
    """A model small enough to run in milliseconds, with GPT-2's structure."""
    sizes = {
        "vocab_size": 101,
        "max_position_embeddings": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "bos_token_id": 100,
        "eos_token_id": 100,
        "pad_token_id": 100,
    }
    return GPT2SmallConfig(**{**sizes, **changes})


@pytest.fixture
def tiny_model() -> GPT2SmallForCausalLM:
    """A seeded model of `tiny_config` in evaluation mode."""
    torch.manual_seed(0)
    return GPT2SmallForCausalLM(tiny_config()).eval()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 entries trained on two sentences."""
    return train_tokenizer(
        ["Every effort moves you forward. ", "The quick brown fox jumps over the lazy dog. "] * 20, 300
    )


CORPUS = [
    f"{name} the {thing} {verb} the {other}, and the {other} {verb} the {thing} in turn.\n"
    for name in ("Once", "Then", "Later")
    for thing in ("fox", "dog", "crow", "hare")
    for other in ("river", "stone", "field")
    for verb in ("saw", "met", "left")
]


def tiny_words(place: Path, output_dir: Path) -> list[str]:
    """Words for `run_train`: twenty steps on a hundred short documents, which are written into `place`."""
    (place / "short.yaml").write_text("# nothing but defaults\n", encoding="utf-8")
    corpus = place / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": line * 4}) + "\n" for line in CORPUS), encoding="utf-8")
    return [
        str(place / "short.yaml"),
        *("--text", str(corpus), "--vocab_size", "300", "--output_dir", str(output_dir)),
        *("--max_position_embeddings", "32", "--hidden_size", "16", "--num_hidden_layers", "2"),
        *("--num_attention_heads", "2", "--per_device_train_batch_size", "4", "--max_steps", "20"),
        *("--learning_rate", "0.01", "--warmup_steps", "2", "--logging_steps", "5", "--save_steps", "10"),
        *(
            "--eval_strategy",
            "steps",
            "--eval_steps",
            "10",
            "--use_cpu",
            "--prompts",
            "Once the fox",
            "--sample_all_checkpoints",
        ),
    ]


def run_train(words: list[str]) -> RunFolder:
    """What `python train.py` does with these words, in this process."""
    return train(read_config(words, default_recipe=REPOSITORY / "examples" / "tiny.yaml"))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of twenty steps. Not to be changed."""
    place = tmp_path_factory.mktemp("tiny_run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return run_train(tiny_words(place, place / "runs" / "short"))


@pytest.fixture(params=["mount point", "working folder", "link"])
def fixed_folder(request, tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty folder that cannot be removed or renamed, in a working folder of its own."""
    folder = tmp_path / "place" / "folder"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    if request.param == "mount point":
        if not shutil.which("mount") or subprocess.run(["mount", "-t", "tmpfs", "x", folder]).returncode:
            pytest.skip("may not mount")
        yield folder
        subprocess.run(["umount", folder], check=True)
    elif request.param == "working folder":
        monkeypatch.chdir(folder)
        yield Path()
    else:
        (tmp_path / "link").symlink_to(folder)
        yield tmp_path / "link"


CHAT_CONTEXT = 128


def chats() -> list[dict]:
    """Thirty-two short conversations: each asks one question of four about one animal of eight."""
    asked = {"saw": "see", "met": "meet", "left": "leave", "liked": "like"}
    return [
        {
            "messages": [
                {"role": "user", "content": f"What did the {animal} {verb}?"},
                {"role": "assistant", "content": f"The {animal} {past} the {thing}."},
            ]
        }
        for animal, thing in zip(
            ("fox", "dog", "crow", "hare", "cat", "hen", "owl", "pig"),
            ("river", "stone", "field", "moon") * 2,
            strict=True,
        )
        for past, verb in asked.items()
    ]


@pytest.fixture(scope="session")
def chat_place(tmp_path_factory: pytest.TempPathFactory, tiny_run: RunFolder) -> Path:
    """A folder with a finished run to begin with, and chats. Not to be changed."""
    place = tmp_path_factory.mktemp("chats")
    shutil.copytree(tiny_run.root, place / "base")
    (place / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats()), encoding="utf-8")
    (place / "chat.yaml").write_text("# nothing but defaults\n", encoding="utf-8")
    return place


def chat_words(place: Path, output_dir: Path, *more: str) -> list[str]:
    """Words for `run_train`: three epochs on the chats of `chat_place`, a checkpoint and a measurement after each."""
    return [
        str(place / "chat.yaml"),
        *("--init_from", str(place / "base"), "--chat_data", str(place / "chats.jsonl")),
        *("--max_position_embeddings", str(CHAT_CONTEXT), "--validation_fraction", "0.2"),
        *(
            "--packing",
            "best_fit",
            "--sample_all_checkpoints",
            "--per_device_train_batch_size",
            "4",
            "--num_train_epochs",
            "3",
        ),
        *(
            "--learning_rate",
            "0.01",
            "--eval_strategy",
            "epoch",
            "--save_strategy",
            "epoch",
            "--logging_steps",
            "1",
            "--use_cpu",
        ),
        *("--prompts", "What did the fox see?", "--output_dir", str(output_dir), *more),
    ]


OF_CHAT_RUN = ("--add_special_tokens", "--save_total_limit", "9", "--num_train_epochs", "8", "--learning_rate", "0.03")


@pytest.fixture(scope="session")
def chat_run(chat_place: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run on chats, with markers of their own. Not to be changed."""
    return run_train(chat_words(chat_place, tmp_path_factory.mktemp("chat_run") / "chat", *OF_CHAT_RUN))
