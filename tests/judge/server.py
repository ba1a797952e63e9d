"""A chat-completions server on loopback: simulated judges that know each answer's quality, and faults of endpoints."""

import json
import re
import threading
import time
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

Judge = Callable[[dict, np.random.Generator], dict[str, float]]
"""The task of a prompt, and noise → scores by letter."""

QUALITY = re.compile(r"quality (\d+) about (\d+)")


def task_of(prompt: str) -> dict:
    """Return the JSON at the end of a prompt."""
    return json.loads(prompt[prompt.index("\n{\n") :])


def qualities(task: dict) -> dict[str, float]:
    """Return the quality in each answer's text; 0 for an answer about another question, or an empty one."""
    about = re.search(r"\d+", task["question"])[0]
    found = {letter: QUALITY.search(text) for letter, text in task["answers"].items()}
    return {letter: float(match[1]) if match and match[2] == about else 0.0 for letter, match in found.items()}


def fair(task: dict, noise: np.random.Generator) -> dict[str, float]:
    """Score quality with noise of 8 points."""
    return {letter: quality + noise.normal(0, 8) for letter, quality in qualities(task).items()}


def position_biased(task: dict, noise: np.random.Generator) -> dict[str, float]:
    """Add 20 points to the first answer, and 10 to the second."""
    return {letter: score + {"A": 20, "B": 10}.get(letter, 0) for letter, score in fair(task, noise).items()}


def length_biased(task: dict, noise: np.random.Generator) -> dict[str, float]:
    """Add 10 points for each 100 characters."""
    return {letter: score + len(task["answers"][letter]) / 10 for letter, score in fair(task, noise).items()}


def blind(task: dict, noise: np.random.Generator) -> dict[str, float]:
    """Score without reading."""
    return {letter: 50 + noise.normal(0, 8) for letter in task["answers"]}


def reply_of(judge: Judge, prompt: str, seed: int) -> str:
    """Return a judge's reply, as JSON; the noise depends on prompt and seed only."""
    scores = judge(task_of(prompt), np.random.default_rng([seed, zlib.crc32(prompt.encode())]))
    return json.dumps({letter: {"comment": "…", "score": round(min(100, max(0, s)))} for letter, s in scores.items()})


REPLIES = {  # fault → the reply, from the right one
    "prose": lambda reply: (
        f"<think>maybe {{'A': 3}}</think> Here are the scores:\n```json\n{reply}\n```\nGood luck {{}}!"
    ),
    "strings": lambda reply: re.sub(r'"score": (\d+)', r'"score": "\1/100"', reply),
    "half reply": lambda reply: reply[: len(reply) // 2],
    "few": lambda reply: json.dumps({"A": json.loads(reply)["A"]}),
    "duplicate": lambda reply: reply[:-1] + ', "A": {"comment": "again", "score": 0}}',
    "no scores": lambda reply: "I cannot grade these answers.",
    "empty": lambda reply: "",
}
STATUS = {"429": 429, "500": 500, "503": 503, "refused": 400, "401": 401}


class JudgeServer(ThreadingHTTPServer):
    """Answers `POST /v1/chat/completions` and `GET /v1/models`.

    Args:
        judge: writes the scores.
        faults: of the next requests, in their order; None answers as usual.
        without: fields of a request that are refused with status 400.
        seconds: before each reply.
    """

    daemon_threads = True

    def __init__(self, judge: Judge = fair, faults=(), without=(), seconds: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.judge, self.faults, self.without, self.seconds = judge, list(faults), set(without), seconds
        self.requests: list[dict] = []
        """Bodies of all requests, refused ones too."""
        self.keys: set[str | None] = set()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def prompts(self) -> list[str]:
        """Prompts of all requests, in the order of their arrival."""
        return [body["messages"][0]["content"] for body in self.requests]

    def handle_error(self, request, client_address) -> None:
        """Ignore clients that were killed."""


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def log_message(self, format, *args) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "judge"}]}))

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            server.requests.append(body)
            server.keys.add(self.headers.get("authorization"))
            fault = server.faults.pop(0) if server.faults else None
        time.sleep(server.seconds)
        if unknown := server.without & body.keys():
            return self._error(400, f"unknown fields {sorted(unknown)}")
        if fault in STATUS:
            return self._error(STATUS[fault], f"bad key {self.headers.get('authorization')}")
        if fault == "timeout":
            time.sleep(0.6)
        if fault in ("closed", "timeout"):
            return None
        prompt = body["messages"][0]["content"]
        reply = REPLIES.get(fault, str)(reply_of(server.judge, prompt, body.get("seed", 0)))
        text = json.dumps(
            {
                "model": "judge-2026-11",
                "system_fingerprint": "fp_1",
                "choices": [{"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": len(prompt) // 4, "completion_tokens": len(reply) // 4},
            }
        )
        if fault == "half body":
            return self._send(200, text[: len(text) // 2])
        return self._send(200, text, promised=len(text) + 9 if fault == "short body" else None)

    def _error(self, status: int, message: str) -> None:
        self._send(status, json.dumps({"error": {"message": message}}))

    def _send(self, status: int, text: str, promised: int | None = None) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-length", str(promised or len(data)))
        if status == 429:
            self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(data)
