"""A model to publish → a folder with exactly the bytes to push, or a refusal.

An allow-list decides what goes in: what is not known to belong to a model stays here. `card.py` writes README.md into
the folder, `verify.py` loads it, `hub.py` sends it.
"""

from __future__ import annotations

import ast
import getpass
import hashlib
import io
import json
import mmap
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from gpt2small_hf.convert import convert
from gpt2small_hf.data.tokenizer import load_tokenizer
from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.runs import RunFolder, UsageError, read_json, sha256, write_json
from upload.source import Source

REPOSITORY = Path(__file__).resolve().parents[1]
CODE = REPOSITORY / "gpt2small_hf" / "model"
LICENSE = REPOSITORY / "LICENSE"
CODE_NAMES = ("configuration_gpt2small", "modeling_gpt2small", "gpt")

TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
SETTINGS = ("config.json", "generation_config.json")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
RESULTS = ("resolved.json", "evaluation/heldout.json", "evaluation/completions.json")
CHARTS = ("loss", "grad_norm", "learning_rate", "throughput")
OF_CHECKPOINTS = re.compile(
    r"(optimizer|scheduler|scaler|guard_\d+|rng_state\w*|trainer_state|training_args)\.(pt|pth|bin|json)"
)
"""What the Trainer keeps beside a checkpoint's weights. training_args.bin can hold a token."""
PICKLED = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"}
STRANGERS_HAVE = {"torch", "transformers", "huggingface_hub"} | sys.stdlib_module_names
SHORT_CONTEXT = 512
"""Below it the pipeline's 256 new tokens, unless the model says otherwise, leave too little for a prompt."""

SECRETS = {
    "a Hugging Face token": rb"hf_[A-Za-z0-9]{30,}",
    "an organisation's Hugging Face token": rb"api_org_[A-Za-z0-9]{30,}",
    "a GitHub token": rb"(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{60,})",
    # Capitals and a digit in one piece, or 32 hexadecimal digits: `risk-assessment-of-…` and `task-<commit>` are none.
    "an API key": rb"sk-(?:(?:[A-Za-z0-9]{1,24}[_-]){0,6}(?=[A-Za-z]*[0-9])(?=[a-z0-9]*[A-Z])[A-Za-z0-9]{16,}"
    rb"|(?<![A-Za-z0-9]sk-)[0-9a-f]{32}(?![0-9A-Za-z]))",
    "a Google API key": rb"AIza[A-Za-z0-9_-]{35}",
    "a GitLab token": rb"glpat-[A-Za-z0-9_-]{20,}",
    "an AWS access key": rb"(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])",
    "a Slack token": rb"xox[abprs]-[0-9]{8,}-[A-Za-z0-9-]{10,}",
    "a private key": rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY(?: BLOCK)?-----",
}

STAGED_BY = "upload/push.py"

LEAST_TOKEN = 8
"""Letters: a shorter one is none, and may stand anywhere."""

Files = dict[str, dict[str, Any]]
"""Path in the repository → `size` in bytes and `sha256`."""


def stage(source: Source, folder: Path, *, new_code: bool = False) -> None:
    """Put what a stranger needs, and what shows how it came to be, into an empty `folder`. README.md is not made here.

    `new_code` takes the model's code from this checkout, not from beside the weights.

    Raises: UsageError for a link out of the run, pickled files, files that are missing, code that a stranger cannot
        run, weights that are not finite or not those that were measured, and a tokenizer of another model.
    """
    folder.mkdir(parents=True)
    check_links(source)
    check_nothing_pickled(source)
    weights = weight_files(source.model)
    settings = read_json(source.model / "config.json")
    for path in weights:
        shutil.copyfile(path, folder / path.name)
    for name in TOKENIZER:
        if (source.model / name).is_file():
            shutil.copyfile(source.model / name, folder / name)
    for path in code_files(CODE if new_code else source.model, settings):
        shutil.copyfile(path, folder / path.name)
    settings.pop("_name_or_path", None)  # where it was loaded from here: nobody else's business
    settings["use_cache"] = True  # a checkpoint says false: it is saved while the Trainer has turned it off
    write(folder / "config.json", settings)
    write(folder / "generation_config.json", generation(source.model, settings))
    if source.run is not None and not source.is_checkpoint:
        _results(source, folder)
    elif source.run is not None:
        write(folder / "resolved.json", scrubbed(source.run.resolved))

    check_nothing_empty(source, folder)
    check_code(folder)
    check_results_are_theirs(source, folder)
    check_tokenizer(source, folder)
    forget_place(folder / "tokenizer_config.json")
    check_finite(folder)


def _results(source: Source, folder: Path) -> None:
    for name in RESULTS:
        path = source.root / name
        if path.is_file():
            write(folder / name, scrubbed(read_json(path)))
    for name in CHARTS:
        path = source.place.chart(name)
        if path.is_file():
            (folder / "charts").mkdir(exist_ok=True)
            shutil.copyfile(path, folder / "charts" / path.name)


def files_of(folder: Path) -> Files:
    """Size and SHA-256 of every file in a staged folder, sorted by name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {p.relative_to(folder).as_posix(): {"size": p.stat().st_size, "sha256": sha256(p)} for p in paths}


def is_loaded(name: str) -> bool:
    """Whether a file of the repository decides what a stranger computes: weights, settings, code, tokenizer."""
    return name in (*SETTINGS, *TOKENIZER, INDEX) or ("/" not in name and name.endswith((".safetensors", ".py")))


def record_of(folder: Path) -> Path:
    """What is known of a staged folder: its files, and what a stranger made of them."""
    return folder.with_name(f"{folder.name}.json")


def page_of(folder: Path) -> Path:
    """Its card as a page."""
    return folder.with_name(f"{folder.name}.html")


def read_record(folder: Path) -> dict[str, Any]:
    """That record, empty if there is none. Raises: UsageError for another file of this name."""
    path = record_of(folder)
    try:
        found = read_json(path) if path.is_file() else {}
    except UsageError:
        found = None
    if not isinstance(found, dict) or (found and found.get("staged_by") != STAGED_BY):
        raise UsageError(f"{path} is there and is not ours. Move it away, or name another --output_dir.")
    return found


def check_owned(folder: Path) -> None:
    """Raise: UsageError if a folder to stage in, or a file beside it, holds what no earlier push put there."""
    known = read_record(folder)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"{folder} is there and is no folder of ours. Name another --output_dir.")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    names |= {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir() and not any(path.iterdir())
    }
    if not known and (names or page_of(folder).exists()):
        there = folder if names else page_of(folder)
        raise UsageError(f"{there} is there and was not staged by this command. Name another --output_dir.")
    if strange := sorted(names - set(known.get("names", []))):
        raise UsageError(
            f"{folder / strange[0]} was not staged by this command, and staging would remove it. Move it away."
        )
    card = folder / "README.md"
    if card.is_file() and known["files"].get("README.md", {}).get("sha256") not in (None, sha256(card)):
        raise UsageError(
            f"{card} was edited, and staging would write over it. Its words belong into model_card.j2; then delete it."
        )


def remember(folder: Path, files: Files, known: dict[str, Any], **checked: Any) -> None:
    """Write the record of a folder that is about to get, or has, these files."""
    names = sorted({*files, *known.get("names", [])})
    write_json(record_of(folder), {"staged_by": STAGED_BY, "names": names, "files": files, **checked})


def is_ours(name: str, code: set[str]) -> bool:
    """Whether a file on the Hub is one that a push writes, so that it goes when it is no longer staged.

    `code` are the modules that the repository's own config.json names.
    """
    weights = re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin", name)
    charts = [f"charts/{chart}.png" for chart in CHARTS]
    known = (*SETTINGS, *TOKENIZER, INDEX, *RESULTS, *charts, "LICENSE-CODE")
    return bool(weights) or name in known or (name.endswith(".py") and name[:-3] in {*code, *CODE_NAMES})


def write(path: Path, value: Any) -> None:
    """JSON as transformers writes it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def forget_place(path: Path) -> None:
    """Take out of a tokenizer's settings from where it was loaded."""
    try:
        told = read_json(path)
    except UsageError:  # there is none, or `check_tokenizer` says what is wrong with it
        return
    if isinstance(told, dict) and {"name_or_path", "_name_or_path"} & told.keys():
        write(path, {name: value for name, value in told.items() if not name.endswith("name_or_path")})


def generation(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Generation settings with which a pipeline stays within the context."""
    path = model / "generation_config.json"
    told = read_json(path) if path.is_file() else {}
    told.pop("_name_or_path", None)
    context = settings.get("max_position_embeddings", settings.get("n_positions", SHORT_CONTEXT))
    if context < SHORT_CONTEXT and told.get("max_new_tokens") is None:
        told["max_new_tokens"] = context // 2
    return told


# ---- what is there, and may be taken ------------------------------------------------------------------------------


def check_links(source: Source) -> None:
    """Raise: UsageError if a link leads out of the folder that is published."""
    root = source.root.resolve()
    for folder in (source.model, source.root / "charts", source.root / "evaluation", RunFolder(source.root).resolved):
        for path in [folder, *(sorted(folder.rglob("*")) if folder.is_dir() else [])]:
            if not path.resolve().is_relative_to(root):  # it, or a folder above it, is a link
                raise UsageError(
                    f"{path} is a link out of {source.root}, so what would be published is not what lies there. "
                    "Put the file itself in its place."
                )


def check_nothing_pickled(source: Source) -> None:
    """Raise: UsageError for a pickled file that is not one of a checkpoint's own."""
    for path in sorted(source.model.iterdir()):
        known = source.is_checkpoint and OF_CHECKPOINTS.fullmatch(path.name)
        if path.suffix.lower() in PICKLED and not known:
            raise UsageError(
                f"{path} is a pickled file: opening one runs whatever code is in it, and it may hold a token. "
                "Take it away; weights are published as safetensors."
            )


def check_nothing_empty(source: Source, folder: Path) -> None:
    """Raise: UsageError for a staged file without a byte: whatever wrote it did not come to its end."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.stat().st_size:
            raise UsageError(
                f"{path.relative_to(folder)} of {source.root} is empty. Make it again with what wrote it, "
                "or take it away."
            )


def weight_files(model: Path) -> list[Path]:
    """The file of weights, or the index and the shards it names. Raises: UsageError if one is missing or not whole."""
    index, files = model / INDEX, [model / WEIGHTS]
    if index.is_file() and not files[0].is_file():  # of both, transformers loads the one file
        try:
            shards = sorted({Path(name) for name in read_json(index)["weight_map"].values()})
        except (AttributeError, KeyError, TypeError):
            shards = []
        if not shards or any(shard.name != str(shard) or shard.suffix != ".safetensors" for shard in shards):
            raise UsageError(f"{index} does not name safetensors files beside it. Save the model again.")
        files = [index, *(model / shard for shard in shards)]
    for path in files:
        if not path.is_file():
            raise UsageError(f"{path} does not exist. Save the model again, with save_pretrained.")
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt"):  # compares the file's length to its header
                    pass
            except (SafetensorError, OSError) as error:
                raise UsageError(f"{path} is not a whole safetensors file ({error}). Save the model again.") from None
    return files


def code_files(folder: Path, settings: dict[str, Any]) -> list[Path]:
    """The files that `auto_map` names and those that they import, none twice.

    Raises: UsageError if one is not there, or is imported in a way that transformers does not follow.
    """
    named = {str(value).split("--")[-1].split(".")[0] for value in settings.get("auto_map", {}).values()}
    found: dict[str, Path] = {}
    while missing := sorted(named - found.keys()):
        path = folder / f"{missing[0]}.py"
        if not path.is_file():
            raise UsageError(
                f"{folder} has no {path.name}, without which nobody can load the model. Save the model again, or take "
                "the code of this checkout: --code_only, once the weights are published."
            )
        found[missing[0]] = path
        for name in imports(path):
            if not name.startswith("."):
                continue
            if not name[1:].isidentifier():  # `.`, `..gpt` or `.parts.gpt`
                raise UsageError(
                    f"{path} imports from {name}, and transformers fetches only what is imported from a file "
                    "beside it. Import siblings as `from .gpt import GPT`."
                )
            named.add(name[1:])
    return sorted(found.values())


def imports(path: Path) -> list[str]:
    """Names of all modules that a file imports, wherever in it; relative ones begin with a dot.

    Raises: UsageError if it is not Python.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not Python ({error}).") from None
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return names


def check_code(folder: Path) -> None:
    """Raise: UsageError if code in a staged folder imports what a stranger does not have."""
    for path in sorted(folder.glob("*.py")):
        for name in imports(path):
            if not name.startswith(".") and name.split(".")[0] not in STRANGERS_HAVE:
                raise UsageError(
                    f"{path.name} imports {name}, which strangers do not have: only torch, transformers and what comes "
                    "with them. Import siblings as `from .gpt import GPT`."
                )


# ---- what must fit together ----------------------------------------------------------------------------------------


def check_results_are_theirs(source: Source, folder: Path) -> None:
    """Raise: UsageError if weights or tokenizer of a finished run are not those its results were measured with."""
    if source.run is None or source.run.heldout is None:
        return
    for path, digest in source.run.heldout["made_by"]["inputs"].items():
        name = Path(path).name
        if Path(path).parent.name != source.place.model.name:  # of the data
            continue
        if name == WEIGHTS and not source.is_checkpoint:
            found = _sha256_of_weights(folder)
        else:
            found = sha256(folder / name) if name == "tokenizer.json" and (folder / name).is_file() else digest
        if found != digest:
            what = "weights" if name == WEIGHTS else "tokenizer"
            raise UsageError(
                f"{source.model / name} is not the file that the run ended with: what it was measured with had another "
                f"SHA-256. Published so, its {what} would be out of step with the rest. Put the run's own back."
            )


def _sha256_of_weights(folder: Path) -> str:
    """Of the one file, or of that which shards would make."""
    if (folder / WEIGHTS).is_file():
        return sha256(folder / WEIGHTS)
    joined: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        joined |= load_file(path)
    return hashlib.sha256(save(joined, metadata={"format": "pt"})).hexdigest()


def check_tokenizer(source: Source, folder: Path) -> None:
    """Raise: UsageError if there is no tokenizer, or it cannot be this model's."""
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"{source.model} has no tokenizer.json. Name the tokenizer it was trained with: --tokenizer")
    try:
        tokenizer = load_tokenizer(str(folder))
    except Exception as error:  # tokenizers has no narrower one
        reason = " ".join(str(error).split()).replace(str(folder), str(source.model))
        raise UsageError(f"the tokenizer in {source.model} cannot be loaded: {reason}") from None
    settings = read_json(folder / "config.json")
    entries = settings["vocab_size"]
    largest = max(tokenizer.get_vocab().values())
    if largest >= entries:
        raise UsageError(
            f"the tokenizer in {source.model} has ids up to {largest:,}, the model {entries:,} entries. "
            "It is another model's: put back the one it was trained with."
        )
    ends: set[Any] = set()
    for told in (settings, read_json(folder / "generation_config.json")):
        value = told.get("eos_token_id")
        ends |= set(value) if isinstance(value, list) else {value}
    if ends - {None} and tokenizer.eos_token_id not in ends:
        raise UsageError(
            f"the tokenizer in {source.model} ends texts with id {tokenizer.eos_token_id} ({tokenizer.eos_token}), the "
            f"model with {', '.join(map(str, sorted(ends - {None})))}: they are out of step. Put back the one it was "
            "trained with."
        )


def check_finite(folder: Path) -> None:
    """Raise: UsageError that names the first tensor with a value that is not finite."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dictionary
                if not tensors.get_tensor(name).isfinite().all():
                    raise UsageError(
                        f"{path.name}: {name} has values that are not finite, so the model is broken. "
                        "Publish an earlier checkpoint."
                    )


def check_sizes(folder: Path) -> GPT2SmallConfig:
    """The configuration of a staged folder. Raises: UsageError if it is not one of ours."""
    try:
        return GPT2SmallConfig.from_dict(read_json(folder / "config.json"))
    except Exception as error:
        raise UsageError(f"{folder / 'config.json'}: {' '.join(str(error).split())}") from None


# ---- what nobody else should read -----------------------------------------------------------------------------------


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


def check_secrets(folder: Path, token: str | None = None) -> None:
    """Raise: UsageError that names file and kind, never the secret, if a staged file holds one."""
    patterns = dict(SECRETS)
    if token and len(token) >= LEAST_TOKEN:
        patterns = {"the Hugging Face token in use": re.escape(token.encode())} | patterns
    # The card last: what is in it is from the other files.
    for path in sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: (p.name == "README.md", p)):
        for what, at in _secrets(path, patterns):
            raise UsageError(
                f"{path.relative_to(folder)} holds what looks like {what} ({at}). Take it out of the file that it was "
                "staged from, revoke it where it was made, and push again."
            )


def check_words(words: str) -> None:
    """Raise: UsageError if what is to be published as a title holds a secret."""
    for what, pattern in SECRETS.items():
        if re.search(pattern, words.encode()):
            raise UsageError(f"--message holds what looks like {what}. Write another, and revoke it where it was made.")


def _secrets(path: Path, patterns: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    if not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for what, pattern in patterns.items():
            # mmap is read as bytes: hundreds of megabytes of weights need no memory.
            if (match := re.search(pattern, content)) is not None:  # pyright: ignore[reportCallIssue, reportArgumentType]
                before = content[: match.start()]
                line = before.count(b"\n") + 1
                yield what, f"byte {match.start():,}" if b"\0" in before else f"line {line}"


def let_others_read(folder: Path) -> None:
    """Give staged files the usual permissions."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IROTH)


def stage_native(ours: Path, folder: Path) -> None:
    """The same weights as transformers' own GPT-2, which needs no code: from a staged folder of ours, with its results.

    Raises: UsageError as `convert`.
    """
    with redirect_stdout(io.StringIO()):
        convert(str(ours), folder, "gpt2")
    for name in ("resolved.json", "evaluation", "charts"):
        if (ours / name).is_dir():
            shutil.copytree(ours / name, folder / name)
        elif (ours / name).is_file():
            shutil.copyfile(ours / name, folder / name)


def stage_license(folder: Path, license: str | None, *, native: bool) -> None:
    """The license's text: under its usual name where it is also that of the weights, else as that of the code."""
    if license == "apache-2.0":
        shutil.copyfile(LICENSE, folder / "LICENSE")
    elif not native:
        shutil.copyfile(LICENSE, folder / "LICENSE-CODE")
