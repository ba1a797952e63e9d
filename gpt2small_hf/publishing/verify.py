"""A staged folder or a published repository → proof that a stranger can use it, and gets what was trained.

An isolated process without this package (`isolated_load.py`) loads it, tries what must hold of any
published model, and runs the card's code. Its logits, token ids and chat are compared here with those of the model
folder it was staged from. Nothing is staged or sent: that is `stage.py`'s and `hub.py`'s business.
"""

from __future__ import annotations

import importlib.metadata as metadata
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gpt2small_hf.publishing.isolated_load import Request, chat_ids, digest, normalized

if TYPE_CHECKING:
    from torch import Tensor

STRANGER = Path(__file__).resolve().with_name("isolated_load.py")
ENOUGH_SECONDS = 3600.0  # some GB over a slow line, and a card that writes much on one core

CHAT = [{"role": "user", "content": "What does pass do?"}]
OPENING = "Once upon a time there was a model"
TEXTS = ["def f(x):\n    return  x  # two spaces\n\n", "naïve café: 12,345 ≥ 日本語 🙂"]
PROMPT_TOKENS = 64

# The only variables of ours that the isolated process has: model code runs there, and a credential may be in any other.
KEPT = {"PATH", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}
# These decide how additions are ordered.
KEPT_PREFIXES = ("OMP_", "MKL_", "KMP_", "ONEDNN_", "DNNL_", "ATEN_", "GPT2SMALL_")


class CheckError(Exception):
    """What was staged or published is not what it should be; one line. `details` may have the stranger's traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Checked:
    """What a check found, all of it as it should be."""

    logit_difference: float  # the largest, from the model it was staged from
    tolerance: float  # what it might have been: 0 for our own class in float32
    seconds: float
    versions: dict[str, str]  # of python, torch and transformers, as the stranger has them
    classes: tuple[str, ...]  # of config, model and base model, with their modules
    text: str  # what the pipeline wrote
    n_codes: int
    printed: tuple[str, ...]  # by each of the card's code blocks
    commit: str | None  # that everything was loaded from; None for a folder


@dataclass(frozen=True)
class Expected:
    """The same things as the stranger's answer, computed here from the model it was staged from."""

    ids: list[int]
    logits: Tensor  # (T, V), float32
    dtype: str
    weights: dict[str, str]
    texts: list[str]
    tokens: list[list[int]]
    decoded: list[str]
    chat_template: str | None
    chat: list[int] | None


def check(
    where: str | Path,
    *,
    reference: Path,
    card: str,
    repo_id: str,
    tag: str | None,
    revision: str | None = None,
    native: bool = False,
    adapter: bool = False,
    cache: Path | None = None,
    timeout: float = ENOUGH_SECONDS,
) -> Checked:
    """Let a stranger load and use a model, and compare it with the one it was staged from.

    Args:
        where: the staged folder, or, with `revision`, a repository's id.
        reference: the model folder that `where` was staged from. It is loaded in this process, by our own classes.
        card: the Markdown whose Python blocks are run.
        repo_id: what the card calls the model.
        tag: the revision that the card names, which need not exist yet.
        revision: a commit.
        native: `where` is a GPT-2 that needs no remote code.
        adapter: `where` has a LoRA adapter, which peft applies to a base in `cache`; `reference` has it merged.
        cache: the Hub cache into which that commit was downloaded. The process that loads it has no network.
        timeout: seconds after which the stranger is ended.

    Raises: CheckError for the first thing that is not as it should be.
    """
    began = time.perf_counter()
    if revision is None:
        where = Path(where).resolve()
    what = f"{where} at {revision[:8]}" if revision else str(where)
    expected = read_reference(reference)
    blocks = [bound(code, repo_id, where, tag, revision) for code in codes(card)]
    how = {"native": native, "adapter": adapter}
    answer, logits = visit(str(where), revision, what, expected, blocks, **how, cache=cache, timeout=timeout)
    difference, allowed = compare(answer, logits, expected, what, **how)
    return Checked(
        logit_difference=difference,
        tolerance=allowed,
        seconds=round(time.perf_counter() - began, 1),
        versions=answer["versions"],
        classes=tuple(answer["classes"]),
        text=answer["text"],
        n_codes=len(blocks),
        printed=tuple(answer["printed"]),
        commit=answer["commit"],
    )


# ---- the card's code --------------------------------------------------------------------------------------------


def codes(card: str) -> list[str]:
    """The Python blocks of a Markdown text, in order."""
    from markdown_it import MarkdownIt

    fences = [token for token in MarkdownIt().parse(card) if token.type == "fence"]
    return [fence.content for fence in fences if fence.info.lower().split()[:1] in (["python"], ["py"])]


def bound(code: str, repo_id: str, where: str | Path, tag: str | None, revision: str | None) -> str:
    """The card's code, to be run on what is checked: a folder for the model's name, a commit for its tag.

    Only whole quoted strings are replaced: not `"you/tiny-2"`, and nothing unquoted. Code that names no revision would
    load main, where the model is not yet if it is a pull request: it is told the commit as well.
    """
    name = rf"""(["']){re.escape(repo_id)}\1"""
    if revision is None:
        return re.sub(name, lambda _: repr(str(where)), code)
    if tag is None:
        return re.sub(name, lambda found: f"{found[0]}, revision={revision!r}", code)
    named = rf"""(\brevision\s*=\s*)(["']){re.escape(tag)}\2"""
    return re.sub(named, lambda found: found[1] + repr(revision), code)


# ---- the stranger -----------------------------------------------------------------------------------------------


def visit(
    where: str,
    revision: str | None,
    what: str,
    expected: Expected,
    blocks: list[str],
    *,
    native: bool = False,
    adapter: bool = False,
    cache: Path | None = None,
    timeout: float = ENOUGH_SECONDS,
) -> tuple[dict[str, Any], Tensor]:
    """Let a stranger load `where`, which messages call `what`, and run `blocks`.

    Returns: its answer (what is in it, `isolated_load.py` shows), and the logits of `expected.ids`, (T, V).
    Raises: CheckError if a step fails.
    """
    import torch

    # On some systems a file that was mapped into memory cannot be deleted at once.
    with tempfile.TemporaryDirectory(prefix="stranger-", ignore_cleanup_errors=True) as place:
        request = Request(
            **packages(("torch", "transformers", *(["peft"] if adapter else []))),
            adapter=adapter,
            where=where,
            revision=revision,
            remote_code=not native,
            ids=expected.ids,
            texts=expected.texts,
            chat=None if expected.chat is None else CHAT,
            codes=blocks,
            answer=str(Path(place, "answer.json")),
            threads=torch.get_num_threads(),  # more, or fewer, would add in another order
        )
        answer = ask(request, Path(place), what, environment(Path(place), cache), timeout)
        if failed := answer.get("failed"):
            report(failed, what, request)
        raw = bytearray(Path(request.answer + ".logits").read_bytes())
    return answer, torch.frombuffer(raw, dtype=torch.float32).view(answer["shape"])


def packages(names: tuple[str, ...] = ("torch", "transformers")) -> dict[str, list[str]]:
    """What somebody has who installed these and nothing else: distributions, the modules in them, and their folders.

    Requirements are followed as pip does it: where their markers hold, with the extras that they ask for themselves.
    """
    from packaging.requirements import Requirement

    open_, seen, modules, folders = [(name, "") for name in names], set(), set(), {}
    while open_:
        name, extra = pair = open_.pop()
        if pair in seen:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # if it matters, the import says so
        seen.add(pair)
        folders[str(distribution.locate_file(""))] = None
        modules |= modules_of(distribution)
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                open_ += [(normalized(requirement.name), wanted) for wanted in ("", *requirement.extras)]
    distributions = {name for name, _ in seen}
    return {"path": list(folders), "modules": sorted(modules), "distributions": sorted(distributions)}


def modules_of(distribution: metadata.Distribution) -> set[str]:
    """The top-level modules of an installed package. Not by `packages_distributions`: in Python 3.10 it misses many."""
    names = set((distribution.read_text("top_level.txt") or "").split())
    for file in distribution.files or ():
        names.add(file.parts[0] if len(file.parts) > 1 else inspect.getmodulename(file.name) or "")
    return {name for name in names if name.isidentifier()} - {"__pycache__"}


def environment(place: Path, cache: Path | None = None, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of the isolated process: no network, no GPU, no credential.

    Model code runs there. Home and the Hub's home are empty folders in `place`: no stored token is found through them.
    `cache` is the Hub cache to load from. Of `given`, only `KEPT` and `KEPT_PREFIXES` are passed on.
    """
    kept = {name: value for name, value in given.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
    home, hub = str(place / "home"), place / "cache"
    kept |= {"HOME": home, "USERPROFILE": home, "CUDA_VISIBLE_DEVICES": ""}
    return {**kept, "HF_HOME": str(hub), "HF_HUB_CACHE": str(cache or hub / "hub"), "HF_HUB_OFFLINE": "1"}


def ask(request: Request, place: Path, what: str, env: dict[str, str], timeout: float) -> dict[str, Any]:
    """Run the stranger in `place` and read its answer. It is ended with us, however we end.

    Raises: CheckError if it gives none.
    """
    here, written, said, complained = (place / name for name in ("empty", "request.json", "stdout", "stderr"))
    for folder in (here, place / "home"):
        folder.mkdir()
    written.write_text(json.dumps(asdict(request)), encoding="utf-8")
    command = [sys.executable, "-I", "-S", str(STRANGER), str(written)]
    # Into files: with pipes, whoever the card's code started could keep us waiting.
    with said.open("wb") as stdout, complained.open("wb") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=here, env=env)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            step = last_line(said)
            raise CheckError(f"{what}: loading it did not end within {timeout:,g} s; it was at: {step}.") from None
        finally:
            process.kill()
            process.wait()
    try:
        return json.loads(Path(request.answer).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        status, words = process.returncode, last_line(complained)
        how = f"signal {-status}" + ("; is there enough memory?" if status == -9 else "") if status < 0 else words
        details = complained.read_text(encoding="utf-8", errors="replace")
        raise CheckError(f"{what}: the process that loads it died at: {last_line(said)} ({how}).", details) from None


def last_line(path: Path) -> str:
    """The last line of a log."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "the start")


def report(failed: dict[str, Any], what: str, request: Request) -> NoReturn:
    """Raise: CheckError for a step at which the stranger failed, with the likeliest reason."""
    step, error, missing = failed["step"], shortened(failed["error"]), ", ".join(failed["missing"])
    if step.startswith("code block"):
        code = request.codes[int(step.split()[-1]) - 1]
        begins = next((line.strip() for line in code.splitlines() if line.strip()), "")
        fails = f" at `{failed['line']}`" if failed["line"] and failed["line"] != begins else ""
        needs = f"; a stranger does not have {missing}" if missing else ""
        message = f"the card's {step} (`{begins}`) fails{fails}: {error}{needs}."
    elif step == "import":
        message = f"torch or transformers cannot be imported ({error}). Mend this environment: pip install transformers"
    elif missing:
        message = (
            f"{step}: its code needs what a stranger does not have: {missing}{importing(request, failed['missing'])}. "
            "Published code may import torch, transformers and the files beside it."
        )
    elif step == "AutoTokenizer" and "custom code" in failed["error"]:
        message = "its tokenizer needs remote code. Convert it to a fast one, which is tokenizer.json alone."
    else:
        hint = HINTS.get(step, "")
        message = f"{step}: {error}." + (f" {hint}" if hint else "")
    raise CheckError(f"{what}: {message}", failed["traceback"])


HINTS = {
    "AutoModelForCausalLM": "Likeliest: the weights are not whole, or are another class's. Stage the folder again.",
    "AutoModel": "Likeliest: config.json and the code beside it do not belong together. Stage the folder again.",
    "tied head": "Likeliest: config.json was edited after the model was saved.",
    "left padding": "Likeliest: its code counts positions without regard to attention_mask.",
    "generate": "Likeliest: its code gives cached tokens wrong positions.",
    "commit": "Likeliest: somebody else pushed at the same time.",
}


def importing(request: Request, missing: list[str]) -> str:
    """The files of a model folder that import one of these modules, in brackets; nothing if they cannot be seen."""
    names = "|".join(map(re.escape, missing))
    pattern = re.compile(rf"\b(?:import|from)\s+(?:{names})\b|import_module\(\s*[\"'](?:{names})\b")
    sources = sorted(Path(request.where).glob("*.py")) if request.revision is None else []
    files = [path.name for path in sources if pattern.search(path.read_text(encoding="utf-8", errors="replace"))]
    return f" ({', '.join(files)})" if files else ""


def shortened(text: str, most: int = 400) -> str:
    """A text of at most so many characters, without its full stop."""
    return (text if len(text) <= most else text[:most] + " …").rstrip(". ")


# ---- the comparison ---------------------------------------------------------------------------------------------


def read_reference(folder: Path) -> Expected:
    """Load a model folder with our own classes, on the CPU in the dtype it is in, and try it as the stranger will."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import gpt2small_hf.model  # noqa: F401  # registers the classes

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.model_max_length = sys.maxsize  # the model does not read these texts: no warning that they are too long
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    vocab_size, context = model.config.vocab_size, model.config.max_position_embeddings
    ids = torch.randint(vocab_size, (min(PROMPT_TOKENS, context),), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids[None]).logits[0].float()
    words = OPENING.split()
    while len(words) > 1 and len(tokenizer(" ".join(words))["input_ids"]) > context // 2:
        words.pop()  # there shall be room to go on
    texts = [" ".join(words), *TEXTS]
    bare = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return Expected(
        ids=ids.tolist(),
        logits=logits,
        dtype=str(model.dtype).removeprefix("torch."),
        weights={name: digest(weight) for name, weight in model.named_parameters()},
        texts=texts,
        tokens=[tokenizer(text)["input_ids"] for text in texts],
        decoded=texts if keeps_every_byte(tokenizer) else [str(tokenizer.decode(ids)) for ids in bare],
        chat_template=tokenizer.chat_template,
        chat=None if tokenizer.chat_template is None else chat_ids(tokenizer, CHAT),
    )


def keeps_every_byte(tokenizer: Any) -> bool:
    """Whether decoding must give back any text: a byte-level tokenizer, like GPT-2's, that changes nothing before."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    splitter, decoder = json.dumps(parts["pre_tokenizer"]), json.dumps(parts["decoder"])
    return parts["normalizer"] is None and '"ByteLevel"' in decoder and '"add_prefix_space": true' not in splitter


def compare(
    answer: dict[str, Any], logits: Tensor, expected: Expected, what: str, *, native: bool, adapter: bool = False
) -> tuple[float, float]:
    """Compare a stranger's answer with the model that it was staged from.

    Returns: the largest difference of logits, and how large it may be.
    Raises: CheckError if they are not the same.
    """
    remote = [name for name in answer["classes"] if name.startswith("transformers_modules.")]
    if native and remote:
        raise CheckError(f"{what}: {remote[0]} is remote code, and this form promises to need none.")
    if not (native or adapter) and len(remote) < len(answer["classes"]):
        other = next(name for name in answer["classes"] if name not in remote)
        raise CheckError(
            f"{what}: it is loaded as {other}, not by the code beside it. See auto_map in its config.json."
        )
    if answer["commit"] and not adapter and not all(answer["commit"] in name for name in remote):
        raise CheckError(f"{what}: its code comes from another commit: {remote[0]}.")
    if answer["tokens"] != expected.tokens:
        pairs = zip(expected.texts, answer["tokens"], expected.tokens, strict=True)
        text, found, wanted = next(pair for pair in pairs if pair[1] != pair[2])
        raise CheckError(
            f"{what}: its tokenizer is not the one the model was trained with: {text!r} becomes {few(found)}, "
            f"there {few(wanted)}. Likeliest: tokenizer.json was replaced, or belongs to another run."
        )
    for text, found in zip(expected.decoded, answer["decoded"], strict=True):
        if found != text:
            raise CheckError(f"{what}: its tokenizer decodes what was {text!r} as {found!r}.")
    if answer["chat_template"] != expected.chat_template or answer["chat"] != expected.chat:
        raise CheckError(f"{what}: its chat template is not the one the model was taught with. Stage the folder again.")
    if answer["dtype"] != expected.dtype:
        raise CheckError(
            f"{what}: its weights are {answer['dtype']}, those of the model it was staged from {expected.dtype}."
        )
    if not (native or adapter) and answer["weights"] != expected.weights:
        names = {*answer["weights"], *expected.weights}
        changed = sorted(name for name in names if answer["weights"].get(name) != expected.weights.get(name))
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise CheckError(
            f"{what}: its weights are not those of the model it was staged from: {changed[0]}{more}. "
            "Likeliest: that model was trained on or replaced since. Stage it again."
        )
    return compare_logits(logits, expected, what, native=native, adapter=adapter)


def compare_logits(
    logits: Tensor, expected: Expected, what: str, *, native: bool, adapter: bool = False
) -> tuple[float, float]:
    """The part of `compare` that is about numbers."""
    if logits.shape != expected.logits.shape:
        shapes = f"{tuple(logits.shape)}, not {tuple(expected.logits.shape)}"
        raise CheckError(f"{what}: its logits have the shape {shapes}. Its vocabulary is another.")
    difference = (logits - expected.logits).abs().max().item()
    allowed = tolerance(expected.dtype, expected.logits.abs().max().item(), native=native or adapter)
    if not difference <= allowed:
        reason = (
            "Likeliest: it was not converted from this model."
            if native
            else "Likeliest: the base is another one, or the adapter was changed after it was merged."
            if adapter
            else "The weights are the same: likeliest, the code beside them is of another version of this package."
        )
        raise CheckError(
            f"{what}: its logits differ by {difference:.1e} from those of the model it was staged from, allowed are "
            f"{allowed:.1e}. {reason}"
        )
    return difference, allowed


def tolerance(dtype: str, largest: float, *, native: bool) -> float:
    """How far logits may lie apart, if the largest is `largest`.

    The same code in float32: not at all. Transformers' GPT-2 in place of ours: as in `convert`. In another dtype: eight
    times the spacing of numbers of that size, since a rounding may fall either way.
    """
    import torch

    from gpt2small_hf.conversion.convert import TOLERANCE

    if dtype == "float32":
        return TOLERANCE * max(1.0, largest) if native else 0.0
    return 8 * torch.finfo(getattr(torch, dtype)).eps * max(1.0, largest)


def few(ids: list[int]) -> str:
    """A list of ids, not all of them."""
    return str(ids) if len(ids) <= 12 else f"{str(ids[:12])[:-1]}, …]"
