"""Remove from a run's settings what is private: folders, hosts, accounts, credentials, and questions of its chats.

Secrets are not removed but refused: `secret_scan.py`.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import re
import shlex
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gpt2small_hf.publishing.secret_scan import is_secret
from gpt2small_hf.resources import resource
from gpt2small_hf.runs.layout import HUB_ID
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.records import DataSource, Resolved

EXAMPLES = resource("examples")
HIDDEN = "…"
"""Replaces a host, an account or a credential."""


_UNCHANGED = {"prompts", "completions", "device", "versions"}
"""Text of a user or a model; and hardware and versions, which resemble paths or addresses."""
_PATHS = {
    *("output_dir", "data_dir", "branch_from", "resume", "init_from", "folder", "file", "name", "inputs"),
    *("logging_dir", "text", "validation_text", "chat_data", "dataset", "tokenizer", "deepspeed"),
    *("best_model_checkpoint", "eval_task_data"),
}
"""Settings that are paths: `Project Falcon/a.jsonl` is one too."""
_CREDENTIAL = re.compile(r"(?:.*[_-])?(?:token|key|secret|passw(?:or)?d|pwd|credentials?)", re.IGNORECASE)
_HOST = re.compile(r"(?:.*[_-])?(?:host(?:name)?|ip|addr(?:ess)?|endpoint|server|proxy|entity)", re.IGNORECASE)
_NAMED = re.compile(r"(-{0,2}[A-Za-z_][\w-]*)=(.*)", re.DOTALL)

_ADDRESS = r"[A-Za-z][A-Za-z\d+.-]+://"
_HUB = re.compile(
    r"(?:https://(?:huggingface\.co|hf\.co)/|hf://)(?:datasets/|models/|spaces/)?([\w.-]+/[\w.-]+)(?:[/@][^?#\s]*)?"
    r"|([\w.-]+/[\w.-]+)(?::[\w.-]+)?(?:\[-?\d*:-?\d*\])?"  # with a configuration and rows: `org/name:config[0:100]`
)

_IS_PATH = re.compile(
    rf"{_ADDRESS}|[/~]|\.\.?[/\\]|[A-Za-z]:[\\/]+[^\s\\/]|\\\\\w"  # address, absolute, of home or here, Windows, UNC
    r"|[\w.+-]+@[\w.-]+:|[\w.-]{2,}:[/~]"  # user@host:path, host:/path
    r"|\w[\w.-]*\\[\w.-]|(?![\d./]+$|\w+/s$)[^\s/{}<>]*/[^\s{}<>]*$"  # runs\tiny, runs/tiny; not 1/2, tokens/s
)
_LETTER = r"[^\s/\\'\"<>|,;:=\[\]{}()]"
_FOLDER = rf"{_LETTER}(?:(?! -)[^/\\'\"<>|,;:=\[\]{{}}()\n])*"  # names of folders may have spaces
_IN_TEXT = re.compile(
    rf"(?P<quote>['\"])(?=[^'\"\n]*[/\\])(?P<quoted>(?:{_ADDRESS}|[/~]|\.\.?/|\\\\\w|[A-Za-z]:[\\/]+{_LETTER}{{2}})[^'\"\n]*)(?P=quote)"
    rf"|{_ADDRESS}[^\s'\"<>]*[^\s'\"<>.,;:)\]]"
    rf"|[\w.+-]+@[\w.-]+:{_LETTER}[^\s'\"]*|\b[A-Za-z][\w.-]+:/(?:{_FOLDER}/)*{_LETTER}+"
    rf"|(?:~|(?<![\w./\\~-])/?)(?:/{_FOLDER})+/{_LETTER}+/?"
    rf"|\b[A-Za-z]:[\\/]+(?={_LETTER}{{2}})(?:{_FOLDER}[\\/]+)*{_LETTER}+"
    rf"|(?<![\w\\])\\\\{_LETTER}+(?:\\{_FOLDER})*\\{_LETTER}+"
)
_BEFORE_PATH = re.compile(rf"(?!file:){_ADDRESS}[^/]*|\\\\[^\\/]*|[\w.+-]+@[\w.-]+:|[\w.-]{{2,}}:(?=[/~])")
_OF_NETWORK = re.compile(
    r"(mailto:)?[\w.+-]+@[\w.-]+(:\d+)?|([\w-]+\.)+(internal|local|lan|corp|intranet|localdomain|cluster)(:\d+)?"
)
_NO_SPACE = re.compile(r"[\w.:@%+\[\]-]*[.:@][\w.:@%+\[\]-]*\w\]?")


def scrub(value: Any, public: Collection[str] = (), *, is_path: bool = False) -> Any:
    """Remove from settings what belongs to one machine or account; of a path or address keep the last part.

    `/srv/Acme Corp/a.jsonl`, `s3://acme/a.jsonl` and `ada@host:/srv/a.jsonl` become `a.jsonl`; hosts and credentials
    become `…`. Prompts, generated text, chat templates and the names of recipes in `examples/` are kept. So is a
    string with a secret: `check_secrets` would not recognise a part of it.

    Not recognised: a host of a public domain without a port (`gpu7.example.com`), and a relative path with spaces
    (`data/Acme Corp/a.txt`) under a name that is not in `_PATHS`. Four numbers are read as an IP address, except in
    `versions`.

    Ids in `public`, of repositories on the Hub, are kept in full. With `is_path`, strings are known to be paths.
    """
    if isinstance(value, dict):
        kept: dict[Any, Any] = {}
        for key, item in value.items():
            if isinstance(key, str) and key.endswith("_token"):
                continue
            name = scrub(key, public, is_path=is_path)
            while name in kept:  # files with the same name in two folders
                name += " (another)"
            kept[name] = _setting(key, item, public)
        return kept
    if isinstance(value, list):
        return [scrub(item, public, is_path=is_path) for item in value]
    return _text(value, public, is_path=is_path) if isinstance(value, str) else value


def _setting(key: Any, value: Any, public: Collection[str]) -> Any:
    is_text = isinstance(value, str) and isinstance(key, str)
    if key in _UNCHANGED or (is_text and key == "template" and ("{{" in value or "{%" in value)):
        return value
    if is_text and key == "command":
        return scrub_command(value, public)
    return HIDDEN if is_text and value and _HOST.fullmatch(key) else scrub(value, public, is_path=key in _PATHS)


def scrub_command(command: str, public: Collection[str] = ()) -> str:
    """Scrub each word of a command line; prompts are kept."""
    try:
        words = shlex.split(command)
    except ValueError:  # not shell syntax
        return scrub(command, public)
    kept, flag = [], ""
    for word in words:
        named = _NAMED.fullmatch(word)
        is_variable = named and named[1].isidentifier() and flag != "prompts" and not _is_list(word)
        if named and (word.startswith("-") or is_variable):
            word, flag = f"{named[1]}={_argument(named[1].lstrip('-'), named[2], public)}", ""
        elif re.match(r"--?[A-Za-z]", word):
            flag = word.lstrip("-")
        else:
            word = _argument(flag, word, public)
            flag = "prompts" if flag == "prompts" else ""  # other flags take one value
        kept.append(word)
    return shlex.join(kept)


def _argument(flag: str, word: str, public: Collection[str]) -> str:
    if flag == "prompts":
        return word
    if _is_hidden(flag):
        return HIDDEN
    if word.startswith(("{", "[")):
        try:
            return json.dumps(scrub(json.loads(word), public), ensure_ascii=False)
        except ValueError:
            pass
    return _text(word, public, is_path=True)


def _is_hidden(name: str) -> bool:
    """Whether the value of this name is a credential, a host or an account."""
    return bool(_CREDENTIAL.fullmatch(name) or _HOST.fullmatch(name))


def _is_list(text: str) -> bool:
    """Whether a string has several names and values: `a=1,b=/srv/x`."""
    return "," in text and all(map(_NAMED.fullmatch, text.split(",")))


def _text(text: str, public: Collection[str], *, is_path: bool = False) -> str:
    if is_secret(_without_login(text)):
        return text
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(rf"(?<![\w.~-]){re.escape(home)}(?![\w.-])", "~", text)
    if _is_list(text):
        return ",".join(_text(part, public, is_path=is_path) for part in text.split(","))
    if named := _NAMED.fullmatch(text):
        value = HIDDEN if _is_hidden(named[1].lstrip("-")) else _text(named[2], public, is_path=is_path)
        return f"{named[1]}={value}"
    if (hub := _HUB.fullmatch(text)) and (hub[1] or hub[2]) in public:
        return text
    if text.startswith("examples/") and (EXAMPLES / text.removeprefix("examples/")).is_file():
        return text
    if "\n" not in text and (_IS_PATH.match(text) or (is_path and "/" in text)):
        return _last_part(text)
    if re.fullmatch(r"[A-Za-z][\w.-]*:\d{4,5}|[A-Za-z][\w.-]*[\d.-][\w.-]*:\d{2,5}", text):  # host:port; not model:12
        return HIDDEN
    text = re.sub(r"(--\w*(?:_token|_key|secret|password))([ =])\S+", rf"\1\2{HIDDEN}", text)
    text = _IN_TEXT.sub(_replaced, text).replace("../", "")
    return _without_hosts(text)


def _replaced(found: re.Match[str]) -> str:
    quote, path = found["quote"] or "", found["quoted"] or found[0]
    return f"{quote}{path if is_secret(_without_login(path)) else _last_part(path)}{quote}"


def _without_login(address: str) -> str:
    """Remove user, password and query from an address."""
    return re.sub(rf"({_ADDRESS})[^\s/]*@", r"\1", address).partition("?")[0]


def _last_part(path: str) -> str:
    """Return the last part of a path or address: `a.jsonl`, or `a.jsonl[0:100]`."""
    path, rows = re.fullmatch(r"(.+?)(\[[^\[\]]*\])?", path, re.DOTALL).groups(default="")  # pyright: ignore
    host = _BEFORE_PATH.match(path)
    rest = re.split(r"[?#]", path[host.end() :])[0] if host else path
    parts = [part for part in re.split(r"[/\\]+", rest) if not re.fullmatch(r"\.{0,2}|~|[A-Za-z]:|file:", part)]
    if host and (not parts or "@" in parts[-1]):  # a password may contain a slash
        last = HIDDEN
    elif parts[:-1] in (["home"], ["Users"]) or parts[-1:] == [_user()]:  # a home folder is named after its owner
        last = "user"
    else:
        last = _without_hosts(parts[-1]) if parts else path
    return last + (f"[{_text(rows[1:-1], ())}]" if rows else "")


def _without_hosts(text: str) -> str:
    """Remove accounts, network addresses and the name of this machine."""
    here = socket.gethostname()
    if re.search(r"[\d.-]", here):  # otherwise it may be any word
        text = re.sub(rf"(?<![\w.-]){re.escape(here)}(?![\w-])", HIDDEN, text)
    return _NO_SPACE.sub(lambda word: HIDDEN if _is_of_network(word[0]) else word[0], text)


def _is_of_network(word: str) -> bool:
    """Whether a word is an account, a host of a private network, or an IP address, with or without a port."""
    number = re.fullmatch(r"\[(.+)\](?::\d+)?|([\d.]+)(?::\d+)?|(.+)", word)
    try:
        return bool(number and ipaddress.ip_address(number[1] or number[2] or number[3]))
    except ValueError:
        return _OF_NETWORK.fullmatch(word) is not None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return "user"


def is_hub_id(name: Any) -> bool:
    """Whether a name is `user/name`, and not a local folder."""
    return isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def hub_dataset(origin: DataSource) -> str | None:
    """Return the Hub id of a source of training data; None of local files, whose hash is recorded."""
    name = origin.dataset or (origin.name or "").split(":")[0].split("[")[0]
    return name if is_hub_id(name) and not origin.sha256 and not origin.file else None


def hub_ids(resolved: Resolved) -> set[tuple[str, str]]:
    """Return the Hub ids in a run's settings: type (`model` or `dataset`) and id."""
    base, tokenizer = resolved.base, resolved.data.tokenizer
    models = [base.init_from] if base and base.of_hub else []
    models += [tokenizer.name] if tokenizer and tokenizer.of_hub else []
    origins = [origin for some in resolved.data.sources.values() for origin in some]
    origins += (base and base.trained_on) or []
    found = {("model", name) for name in models} | {("dataset", hub_dataset(origin)) for origin in origins}
    return {(kind, name) for kind, name in found if name and "/" in name and HUB_ID.fullmatch(name)}


def public_ids(resolved: Resolved, private: Collection[str]) -> set[str]:
    """Return the ids of `hub_ids` that are published in full."""
    return {name for _, name in hub_ids(resolved)} - {*private}


def chat_questions(run: Run | None) -> list[str]:
    """Return the prompts that a run took from its chats because none were given."""
    if run is None or not run.resolved.chat or run.resolved.prompts_from == "given":
        return []
    return run.resolved.run.prompts


def remove_prompts(contents: dict[str, Any], prompts: Collection[str]) -> dict[str, Any]:
    """Remove prompts and their completions from the contents of `resolved.json` or `completions.json`."""
    if run := contents.get("run"):
        contents = {**contents, "run": {**run, "prompts": [one for one in run["prompts"] if one not in prompts]}}
    if completions := contents.get("completions"):
        contents = {**contents, "completions": [one for one in completions if one["prompt"] not in prompts]}
    return contents
