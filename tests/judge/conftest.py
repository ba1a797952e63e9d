"""Files of answers of known quality, and judges on loopback."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpt2small_hf.judge.arguments import KEY_VARIABLE, JudgeArguments
from gpt2small_hf.runs.answer_files import (
    AnswersHeader,
    FineTuneEpochs,
    ModelAnswer,
    append_answers,
    questions_sha256,
    resume_answers,
)
from judge.server import JudgeServer


def write_answers(path: Path, label: str, mean: float, n: int = 12, *, of: str = "", epochs: bool = True) -> Path:
    """Write the answers of a model whose quality varies by 10 points over questions, and whose length varies freely."""
    noise = np.random.default_rng([len(label), *label.encode()])
    answers = [
        ModelAnswer(
            id=f"q{at}",
            question=f"What is {at}{of}?",
            reference=f"quality 95 about {at}",
            answer=f"{label[0]} quality {quality} about {at} {'x' * int(noise.integers(0, 300))}",
            ended=True,
            n_tokens=5,
        )
        for at, quality in enumerate(np.clip(noise.normal(mean, 10, n), 0, 94).astype(int))
    ]
    header = AnswersHeader(
        label=label,
        model=f"runs/{label}",
        test_loss=4 - mean / 100,
        epochs=FineTuneEpochs(trained=5, kept=4) if epochs else None,
        questions_sha256=questions_sha256(answers),
        n_questions=n,
        generation={},
        versions={},
        date="2026-11-22T00:00:00+00:00",
    )
    resume_answers(path, header)
    append_answers(path, answers)
    return path


@pytest.fixture
def answers(tmp_path) -> list[Path]:
    """Three models: weak, middle, strong."""
    return [
        write_answers(tmp_path / f"{label}.jsonl", label, mean)
        for label, mean in (("weak", 25), ("middle", 45), ("strong", 70))
    ]


@pytest.fixture
def serve() -> Iterator[Callable[..., JudgeServer]]:
    """Start a server with the arguments of `JudgeServer`."""
    servers: list[JudgeServer] = []

    def start(*args, **kwargs) -> JudgeServer:
        servers.append(JudgeServer(*args, **kwargs))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def settings(tmp_path, monkeypatch) -> Callable[..., JudgeArguments]:
    """Settings for a server, without waits between attempts and without a key."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)

    def build(server: JudgeServer | None = None, **changes) -> JudgeArguments:
        url = {"base_url": server.url} if server else {}
        defaults = {"judge_model": "judge", "output": tmp_path / "judgement", "backoff": 0.0, "timeout": 0.3, "runs": 2}
        return JudgeArguments(**{**defaults, **url, **changes})

    return build
