"""A staged folder or a published commit → loaded in an isolated process and compared with its model.

The isolated process (`isolated_load.py`) cannot import this package. It loads the folder, checks what holds for any
model, and runs the card's code. Its weights, logits, token ids and chat are compared here with those of the model
folder that was staged. `stage.py` makes the staged folder and `commit.py` sends it.
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

SCRIPT = Path(__file__).resolve().with_name("isolated_load.py")
TIMEOUT_SECONDS = 3600.0  # for some GB over a slow connection, and a card that generates much on one core
CHAT = [{"role": "user", "content": "What does pass do?"}]
OPENING = "Once upon a time there was a model"
TEXTS = ["def f(x):\n    return  x  # two spaces\n\n", "naïve café: 12,345 ≥ 日本語 🙂"]
PROMPT_TOKENS = 64

# The isolated process runs model code, and any other variable may contain a credential.
KEPT = {"PATH", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}
# These decide the order of additions.
KEPT_PREFIXES = ("OMP_", "MKL_", "KMP_", "ONEDNN_", "DNNL_", "ATEN_", "GPT2SMALL_")


class CheckError(Exception):
    """A staged or published model failed a check. `details` has the traceback of the isolated process, if any."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Checked:
    """The results of a successful check."""

    logit_difference: float  # the largest
    tolerance: float  # for logit_difference; 0 for the same code in float32
    seconds: float
    versions: dict[str, str]  # of python, torch and transformers in the isolated process
    classes: tuple[str, ...]  # of config, model and base model, with their modules
    text: str  # of the pipeline
    printed: tuple[str, ...]  # by each code block of the card


@dataclass(frozen=True)
class Expected:
    """The result that the isolated process should have, computed here from the model that was staged."""

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
    timeout: float = TIMEOUT_SECONDS,
) -> Checked:
    """Load and use a model in an isolated process, and compare it with the model that was staged.

    Args:
        where: The staged folder or, with `revision`, a repository.
        reference: The model folder that was staged. It is loaded in this process, by this package's classes.
        card: Markdown whose Python blocks are run.
        repo_id: The card's name for the model.
        tag: The revision in the card's code, which need not exist yet.
        revision: A commit.
        native: Whether `where` is transformers' GPT-2, without remote code.
        adapter: Whether `where` is a LoRA adapter, whose base model is in `cache`; `reference` has it merged.
        cache: The Hub cache with the commit: the isolated process downloads nothing (HF_HUB_OFFLINE).
        timeout: Maximum seconds of the isolated process.

    Raises: CheckError for the first failed check.
    """
    start = time.perf_counter()
    where = str(where if revision else Path(where).resolve())
    expected = read_reference(reference)
    blocks = [bind_names(code, repo_id, where, tag, revision) for code in code_blocks(card)]
    form = {"native": native, "adapter": adapter}
    try:
        result, logits = run_isolated(where, revision, expected, blocks, **form, cache=cache, timeout=timeout)
        difference, allowed = compare(result, logits, expected, **form)
    except CheckError as error:
        name = f"{where} at {revision[:8]}" if revision else where
        raise CheckError(f"{name}: {error}", error.details) from None
    seconds, printed = round(time.perf_counter() - start, 1), tuple(result["printed"])
    return Checked(difference, allowed, seconds, result["versions"], tuple(result["classes"]), result["text"], printed)


def code_blocks(card: str) -> list[str]:
    """Return the Python blocks of a Markdown text, in order."""
    from markdown_it import MarkdownIt

    fences = [token for token in MarkdownIt().parse(card) if token.type == "fence"]
    return [fence.content for fence in fences if fence.info.lower().split()[:1] in (["python"], ["py"])]


def bind_names(code: str, repo_id: str, where: str, tag: str | None, revision: str | None) -> str:
    """Replace the model's name in the card's code by a folder, or its tag by a commit.

    Only whole quoted strings are replaced: not `"you/tiny-2"`, and nothing unquoted. Code without a revision gets the
    commit too: it would load main, where the model of a pull request is not.
    """
    name = rf"""(["']){re.escape(repo_id)}\1"""
    if revision is None:
        return re.sub(name, lambda _: repr(where), code)
    if tag is None:
        return re.sub(name, lambda found: f"{found[0]}, revision={revision!r}", code)
    named = rf"""(\brevision\s*=\s*)(["']){re.escape(tag)}\2"""
    return re.sub(named, lambda found: found[1] + repr(revision), code)


def run_isolated(
    where: str,
    revision: str | None,
    expected: Expected,
    blocks: list[str],
    *,
    native: bool = False,
    adapter: bool = False,
    cache: Path | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> tuple[dict[str, Any], Tensor]:
    """Load `where` and run `blocks` in an isolated process. Raises: CheckError if a step fails.

    Returns: its result (the keys are those that `isolated_load.py` sets), and the logits of `expected.ids`, (T, V).
    """
    import torch

    # On some systems a file that was mapped into memory cannot be deleted at once.
    with tempfile.TemporaryDirectory(prefix="isolated-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        request = Request(
            **packages(("torch", "transformers", *(["peft"] if adapter else []))),
            adapter=adapter,
            where=where,
            revision=revision,
            remote_code=not native,
            ids=expected.ids,
            texts=expected.texts,
            chat=None if expected.chat is None else CHAT,
            code_blocks=blocks,
            result=str(folder / "result.json"),
            threads=torch.get_num_threads(),  # another number would add in another order
        )
        result = run_process(request, folder, environment(folder, cache), timeout)
        if failed := result.get("failed"):
            raise_failure(failed, request)
        raw = bytearray(Path(request.result + ".logits").read_bytes())
    return result, torch.frombuffer(raw, dtype=torch.float32).view(result["shape"])


def packages(names: tuple[str, ...] = ("torch", "transformers")) -> dict[str, list[str]]:
    """Return what `pip install` of these names would install: distributions, their modules, and their folders."""
    from packaging.requirements import Requirement

    pending, seen, modules, folders = [(name, "") for name in names], set(), set(), {}
    while pending:
        name, extra = pair = pending.pop()
        if pair in seen:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # the import fails if it is needed
        seen.add(pair)
        folders[str(distribution.locate_file(""))] = None
        modules |= modules_of(distribution)
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                pending += [(normalized(requirement.name), wanted) for wanted in ("", *requirement.extras)]
    distributions = {name for name, _ in seen}
    return {"path": list(folders), "modules": sorted(modules), "distributions": sorted(distributions)}


def modules_of(distribution: metadata.Distribution) -> set[str]:
    """Return the top-level modules of a package; `packages_distributions` of Python 3.10 misses many."""
    names = set((distribution.read_text("top_level.txt") or "").split())
    for file in distribution.files or ():
        names.add(file.parts[0] if len(file.parts) > 1 else inspect.getmodulename(file.name) or "")
    return {name for name in names if name.isidentifier()} - {"__pycache__"}


def environment(folder: Path, cache: Path | None = None, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of the isolated process: the Hub is offline, no GPU, no credential.

    HF_HUB_OFFLINE keeps `huggingface_hub` from connecting; connections that model code opens itself are not blocked.
    Home and the Hub's home are empty folders in `folder`, so that no stored token is found. `cache` is the Hub cache to
    load from. Of `given`, only `KEPT` and `KEPT_PREFIXES` are passed on.
    """
    kept = {name: value for name, value in given.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
    home, hub = str(folder / "home"), folder / "cache"
    kept |= {"HOME": home, "USERPROFILE": home, "CUDA_VISIBLE_DEVICES": ""}
    return {**kept, "HF_HOME": str(hub), "HF_HUB_CACHE": str(cache or hub / "hub"), "HF_HUB_OFFLINE": "1"}


def run_process(request: Request, folder: Path, env: dict[str, str], timeout: float) -> dict[str, Any]:
    """Run `SCRIPT` in `folder` and return its result. Raises: CheckError if it has none."""
    empty, path, out, err = (folder / name for name in ("empty", "request.json", "stdout", "stderr"))
    for new in (empty, folder / "home"):
        new.mkdir()
    path.write_text(json.dumps(asdict(request)), encoding="utf-8")
    command = [sys.executable, "-I", "-S", str(SCRIPT), str(path)]
    # Files and not pipes: a process that the card's code started could keep a pipe open.
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=empty, env=env)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise CheckError(f"loading it took over {timeout:,g} s; the last step was {last_line(out)}.") from None
        finally:
            process.kill()
            process.wait()
    try:
        return json.loads(Path(request.result).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        status, reason = process.returncode, last_line(err)
        if status < 0:
            reason = f"signal {-status}" + ("; is there enough memory?" if status == -9 else "")
        details = err.read_text(encoding="utf-8", errors="replace")
        raise CheckError(f"the process that loads it died at step {last_line(out)} ({reason}).", details) from None


def last_line(path: Path) -> str:
    """Return the last line of a log."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().split("\n")
    return lines[-1].strip() or "start"


def raise_failure(failed: dict[str, Any], request: Request) -> NoReturn:
    """Raise: CheckError for a step that failed in the isolated process."""
    step, missing = failed["step"], ", ".join(failed["missing"])
    error = failed["error"] if len(failed["error"]) <= 400 else failed["error"][:400] + " …"
    error = error.rstrip(". ")
    if step.startswith("code block"):
        code = request.code_blocks[int(step.split()[-1]) - 1]
        first = next((line.strip() for line in code.splitlines() if line.strip()), "")
        line = f" at `{failed['line']}`" if failed["line"] and failed["line"] != first else ""
        needs = f"; users may not have {missing}" if missing else ""
        message = f"the card's {step} (`{first}`) fails{line}: {error}{needs}."
    elif step == "import":
        message = f"torch or transformers cannot be imported ({error}). Fix this environment: pip install transformers"
    elif missing:
        message = (
            f"{step}: its code imports {missing}. Published code may import only torch, transformers and its own files."
        )
    elif step == "AutoTokenizer" and "custom code" in failed["error"]:
        message = "its tokenizer needs remote code. Convert it to a fast one, which is tokenizer.json alone."
    else:
        message = f"{step}: {error}."
    raise CheckError(message, failed["traceback"])


def read_reference(folder: Path) -> Expected:
    """Load a model folder with this package's classes, on the CPU in its own dtype, and compute the expected result."""
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
        words.pop()  # so that it can be continued
    texts = [" ".join(words), *TEXTS]
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return Expected(
        ids=ids.tolist(),
        logits=logits,
        dtype=str(model.dtype).removeprefix("torch."),
        weights={name: digest(weight) for name, weight in model.named_parameters()},
        texts=texts,
        tokens=[tokenizer(text)["input_ids"] for text in texts],
        decoded=[str(tokenizer.decode(ids)) for ids in plain],
        chat_template=tokenizer.chat_template,
        chat=None if tokenizer.chat_template is None else chat_ids(tokenizer, CHAT),
    )


def compare(
    result: dict[str, Any], logits: Tensor, expected: Expected, *, native: bool, adapter: bool = False
) -> tuple[float, float]:
    """Compare the result of an isolated process with the model that was staged.

    Returns: the largest difference of logits, and its maximum.
    Raises: CheckError if they are not the same.
    """
    own_code = not (native or adapter)
    remote = [name for name in result["classes"] if name.startswith("transformers_modules.")]
    if native and remote:
        raise CheckError(f"{remote[0]} is remote code, which a native model must not need.")
    if own_code and len(remote) < len(result["classes"]):
        other = next(name for name in result["classes"] if name not in remote)
        raise CheckError(f"it is loaded as {other}, not by its own code. See auto_map in its config.json.")
    if result["tokens"] != expected.tokens:
        pairs = zip(expected.texts, result["tokens"], expected.tokens, strict=True)
        text, found, wanted = next(pair for pair in pairs if pair[1] != pair[2])
        change = f"{text!r} becomes {found[:12]}, not {wanted[:12]}"
        raise CheckError(f"its tokenizer is not the one the model was trained with: {change}.")
    for text, found in zip(expected.decoded, result["decoded"], strict=True):
        if found != text:
            raise CheckError(f"its tokenizer decodes {text!r} as {found!r}.")
    if result["chat_template"] != expected.chat_template or result["chat"] != expected.chat:
        raise CheckError("its chat template is not the one of the training. Stage the folder again.")
    if result["dtype"] != expected.dtype:
        raise CheckError(f"its weights are {result['dtype']}, those of the staged model {expected.dtype}.")
    if own_code and result["weights"] != expected.weights:
        names = {*result["weights"], *expected.weights}
        changed = sorted(name for name in names if result["weights"].get(name) != expected.weights.get(name))
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise CheckError(
            f"its weights are not those of the model it was staged from: {changed[0]}{more}. The model may have been "
            "trained or replaced since. Stage it again."
        )
    if logits.shape != expected.logits.shape:
        raise CheckError(f"its logits have the shape {(*logits.shape,)}, not {(*expected.logits.shape,)}.")
    difference = (logits - expected.logits).abs().max().item()
    allowed = tolerance(expected.dtype, expected.logits.abs().max().item(), native=native or adapter)
    if not difference <= allowed:
        reason = "The weights are the same, so its code may be of another version of this package."
        if native:
            reason = "It may have been converted from another model."
        elif adapter:
            reason = "The base model may be another one, or the adapter was changed after it was merged."
        raise CheckError(
            f"its logits differ by {difference:.1e} from those of the staged model (maximum {allowed:.1e}). {reason}"
        )
    return difference, allowed


def tolerance(dtype: str, largest: float, *, native: bool) -> float:
    """Return the maximum difference of logits, if the largest logit is `largest`."""
    import torch

    from gpt2small_hf.conversion.convert import TOLERANCE

    if dtype == "float32":  # equal, if the code is the same
        return TOLERANCE * max(1.0, largest) if native else 0.0
    # Eight times the spacing of numbers of that size: a rounding may go either way.
    return 8 * torch.finfo(getattr(torch, dtype)).eps * max(1.0, largest)
