"""Real small things that many tests share, and a process that has never heard of this package."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

# Nothing may reach for the network; set before any import of huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from transformers import PreTrainedTokenizerFast

from gpt2small_hf import GPT2SmallConfig, GPT2SmallForCausalLM

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"

needs_shared_data = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the real data beside the checkout is absent")

UNKNOWN_TO_STRANGERS = {"gpt2small_hf", "accelerate", "datasets", "tiktoken", "matplotlib", "rich"}


@pytest.fixture(scope="session")
def as_stranger(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Run code where torch, transformers and what they need can be imported, and nothing of ours; get what it printed.

    -I and -S leave out the current folder, PYTHONPATH, site-packages and its .pth files, hence an editable install;
    what a stranger has is linked into a folder of its own.
    """
    place = tmp_path_factory.mktemp("stranger")
    (place / "packages").mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name.split("-")[0] not in UNKNOWN_TO_STRANGERS and entry.suffix != ".pth":
            (place / "packages" / entry.name).symlink_to(entry)

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-"],
            input=f"import sys\nsys.path.append({str(place / 'packages')!r})\n{code}",
            cwd="/",
            env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "cache")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


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
    from gpt2small_hf.data.tokenizer import train_tokenizer

    return train_tokenizer(
        ["Every effort moves you forward. ", "The quick brown fox jumps over the lazy dog. "] * 20, 300
    )
