"""What of a run nobody else should read: paths and names of this machine, and questions of its user's chats, are taken
out. Secrets are refused: `secret_scan.py`.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gpt2small_hf.report.page import Run
from gpt2small_hf.runs import read_jsonl

# ---- what is taken out -----------------------------------------------------------------------------------------------

_LETTER = r"[^\s/\\'\"<>|,;:=\[\]{}()]"
_PART = _LETTER + "+"
_PATH = re.compile(
    rf"(?:file://|~|(?<![\w./\\~-])/?)(?:/{_PART}){{2,}}/?"  # of here, of home, or written as an address
    rf"|\b[A-Za-z]:[\\/]+(?={_LETTER}{{2}}){_PART}(?:[\\/]+{_PART})*"  # C:\texts, and not Q:\n
    rf"|(?<![\w\\])\\(?:\\{_PART}){{2,}}"  # \\server\texts
)
_URL = re.compile(r"(\b(?!file:)[A-Za-z][\w+.-]+://[^\s'\"<>]+)")
_WORDS = ("prompts", "completions")
"""What stands under these names is text, of a user or a model, and shown as it is."""


def scrubbed(value: Any) -> Any:
    """Settings and command lines without absolute paths and user names: of a path, its last part is kept.

    `/home/ada/texts/a.jsonl` becomes `a.jsonl`; in what remains, a folder called as the user here becomes `user`.
    Addresses, prompts, what a model wrote and chat templates stay as they are.
    """
    if isinstance(value, dict):
        kept: dict[Any, Any] = {}
        for key, item in value.items():
            if _names_a_token(key):
                continue
            name = scrubbed(key)
            while name in kept:  # two files of one name, in two folders
                name += " (another)"
            kept[name] = item if key in _WORDS or _is_template(key, item) else scrubbed(item)
        return kept
    if isinstance(value, list):
        return [scrubbed(item) for item in value]
    if not isinstance(value, str):
        return value
    pieces = _URL.split(value)  # every second one is an address
    return "".join(_without_access(piece) if i % 2 else _without_paths(piece) for i, piece in enumerate(pieces))


def _without_access(address: str) -> str:
    """An address without name, password and query, which let others in."""
    return re.sub(r"//[^/@]*@", "//", address).partition("?")[0]


def _without_paths(text: str) -> str:
    text = re.sub(r"(--\w*(?:_token|_key|secret|password))([ =])\S+", r"\1\2…", text)
    home = str(Path.home())
    if len(home) > 1:  # first: the pattern below knows no paths with spaces
        text = re.sub(rf"(?<![\w.~-]){re.escape(home)}(?![\w.-])", "~", text)
    text = re.sub(rf"(?<=[/\\~]){re.escape(_user())}(?![\w.-])", "user", text)
    return _PATH.sub(_last_part, text).replace("../", "")


def _last_part(path: re.Match[str]) -> str:
    *above, last = re.split(r"[/\\]", path[0].rstrip("/\\"))
    of_root = [part for part in above if part and not part.endswith(":")]
    return "user" if of_root in (["home"], ["Users"]) else last  # a home folder is called as its owner


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return "user"


def _names_a_token(key: Any) -> bool:
    return isinstance(key, str) and key.endswith("_token")


def _is_template(key: Any, value: Any) -> bool:
    return key == "template" and isinstance(value, str) and ("{{" in value or "{%" in value)


def chat_questions(run: Run | None) -> list[str]:
    """The prompts of a run that it took from its chats, because none were given; of most runs none.

    Runs of earlier versions do not say where their prompts are from: these are the chats' if one of them is among the
    held-out questions that the finished model answered.
    """
    if run is None or not run.chats:
        return []
    prompts: list[str] = run.resolved["run"]["prompts"]
    if "prompts_from" in run.resolved:
        return [] if run.resolved["prompts_from"] == "given" else prompts
    answers = read_jsonl(run.folder.answers) if run.folder.answers.is_file() else []
    asked = {answer["messages"][-1]["content"] for answer in answers}
    return prompts if asked & set(prompts) else []


def without_prompts(told: dict[str, Any], prompts: Collection[str]) -> dict[str, Any]:
    """A `resolved.json` or `completions.json` without these prompts and what the model wrote after them."""
    told = dict(told)
    if "run" in told:
        told["run"] = {**told["run"], "prompts": [one for one in told["run"]["prompts"] if one not in prompts]}
    if "completions" in told:
        told["completions"] = [one for one in told["completions"] if one["prompt"] not in prompts]
    return told
