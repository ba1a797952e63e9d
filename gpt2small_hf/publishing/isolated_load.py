"""Load and try a model in a process that can import torch, transformers (peft for an adapter) and their requirements.

python -I -S gpt2small_hf/publishing/isolated_load.py REQUEST.json

`-I -S` leave only the standard library on sys.path: no current folder, no site-packages and no editable install. The
request (`Request`) names the other packages that may be imported, the model, and the file for the result. What holds
for any model is checked here; `verify.py` compares the result with the model that was staged. This is not a sandbox:
model code can open network connections and read files by their full path.
Exit status: 0, or 1 if a step failed, which the result then describes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import linecache
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import Any

TOLERANCE = 1e-5
"""Maximum difference of float32 logits that are summed in another order, relative to the largest if that is above 1."""
NEW_TOKENS = 8


@dataclass(frozen=True)
class Request:
    """The content of REQUEST.json."""

    path: list[str]  # folders with packages
    modules: list[str]  # top-level modules that may be imported from them
    distributions: list[str]  # normalized names of the packages with these modules
    where: str  # a model folder, or the id of a repository in the cache
    revision: str | None  # commit of the repository
    remote_code: bool  # whether the model has its own classes
    adapter: bool  # whether it is a LoRA adapter, loaded by peft onto a base model in the cache
    ids: list[int]  # token ids to compute logits for
    texts: list[str]  # to encode and decode; the first is also continued
    chat: list[dict[str, str]] | None  # to render and encode
    code_blocks: list[str]  # Python sources to run
    result: str  # path of the result; the logits are written to the same path + .logits, as raw float32
    threads: int


class InvalidModelError(Exception):
    """The model lacks a property that every published model must have."""


class PackageFinder:
    """Find the standard library and the allowed packages, and nothing else."""

    def __init__(self, modules: list[str], distributions: list[str]) -> None:
        self.modules = {*modules, "transformers_modules"}  # the package of remote code
        self.distributions = set(distributions)
        self.standard_library = list(sys.path)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module; `path` is None for a top-level one."""
        if path is None and name not in self.modules:
            path = self.standard_library
        return PathFinder.find_spec(name, path, target)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """Find metadata: torch loads the plugins registered there, and transformers reads versions."""
        for found in PathFinder.find_distributions(context or DistributionFinder.Context()):
            if normalized(found.metadata["Name"] or "") in self.distributions:
                yield found

    def invalidate_caches(self) -> None:
        """Forget what was found."""
        PathFinder.invalidate_caches()


def normalized(distribution: str) -> str:
    """Return a distribution's name as the packaging rules compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def digest(tensor: Any) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    import torch

    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


class IsolatedCheck:
    """The steps of `STEPS`, in their order."""

    config: Any
    tokenizer: Any
    model: Any

    def __init__(self, request: Request) -> None:
        self.request = request
        self.name: dict[str, Any] = {"pretrained_model_name_or_path": request.where, "revision": request.revision}
        self.trust: dict[str, Any] = {"trust_remote_code": request.remote_code}
        self.step = "import"
        self.result: dict[str, Any] = {}

    def run(self) -> None:
        """Run all steps. Each is printed first, so that a process that dies has named it."""
        steps = ADAPTER_STEPS if self.request.adapter else STEPS
        for self.step, function in steps.items():
            print(self.step, flush=True)
            function(self)

    def import_packages(self) -> None:
        import platform

        import torch
        import transformers

        torch.set_num_threads(self.request.threads)
        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self.result["versions"] = {"python": platform.python_version(), **versions}

    def load_config(self) -> None:
        from transformers import AutoConfig

        self.config = AutoConfig.from_pretrained(**self.name, **self.trust)
        self.result["classes"] = [class_name(self.config)]

    def load_tokenizer(self) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(**self.name, trust_remote_code=False)

    def tokenize(self) -> None:
        tokens = [self.tokenizer(text)["input_ids"] for text in self.request.texts]
        plain = [self.tokenizer.encode(text, add_special_tokens=False) for text in self.request.texts]
        self.result |= {"tokens": tokens, "decoded": [self.tokenizer.decode(ids) for ids in plain]}

    def render_chat(self) -> None:
        chat = None if self.request.chat is None else chat_ids(self.tokenizer, self.request.chat)
        self.result |= {"chat_template": self.tokenizer.chat_template, "chat": chat}

    def load_model(self) -> None:
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(**self.name, **self.trust, output_loading_info=True)
        self.model, info = loaded
        check_loading_info(info)
        self.result["dtype"] = str(self.model.dtype).removeprefix("torch.")
        self.result["classes"].append(class_name(self.model))

    def load_adapter(self) -> None:
        from peft import AutoPeftModelForCausalLM  # pyright: ignore[reportMissingImports]

        where, revision = self.request.where, self.request.revision
        self.model = AutoPeftModelForCausalLM.from_pretrained(where, revision=revision, **self.trust).eval()
        self.config = self.model.config
        self.result |= {"dtype": str(self.model.dtype).removeprefix("torch."), "weights": {}}
        self.result |= {"classes": [class_name(self.model.get_base_model())], "text": ""}

    def hash_weights(self) -> None:
        # Another class has other names: only its logits can be compared.
        own = self.model.named_parameters() if self.request.remote_code else ()
        self.result["weights"] = {name: digest(weight) for name, weight in own}

    def check_tied_head(self) -> None:
        embedding, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        shared, expected = embedding.data_ptr() == head.data_ptr(), self.config.tie_word_embeddings
        if shared != expected:
            memory = "share their memory" if shared else "do not share their memory"
            raise InvalidModelError(f"tie_word_embeddings={expected} in the config, but embedding and head {memory}")

    def compute_logits(self) -> None:
        logits = self.logits(self.model)
        if not logits.isfinite().all():
            raise InvalidModelError("they are not all finite: the model is broken")
        self.result["shape"] = list(logits.shape)
        Path(self.request.result + ".logits").write_bytes(logits.numpy().tobytes())

    def load_base_model(self) -> None:
        from transformers import AutoModel

        loaded: Any = AutoModel.from_pretrained(**self.name, **self.trust, output_loading_info=True)
        base, info = loaded
        check_loading_info({**info, "unexpected_keys": []})  # the head's
        self.result["classes"].append(class_name(base))
        base.float()
        self.model.float()  # from here on nothing depends on the dtype, apart from rounding
        head = self.model.get_output_embeddings()
        difference = max_difference(self.logits(lambda ids: head(base(ids).last_hidden_state)), self.logits(self.model))
        if difference is not None:
            raise InvalidModelError(f"its logits differ by {difference:.1e} from those of AutoModelForCausalLM")

    def pad_left(self) -> None:
        import torch

        long, short = self.request.ids, self.request.ids[len(self.request.ids) // 2 :]
        pad_id, n_padding = self.config.pad_token_id or 0, len(long) - len(short)
        rows, mask = torch.tensor([long, [pad_id] * n_padding + short]), torch.ones(2, len(long), dtype=torch.long)
        mask[1, :n_padding] = 0
        # Our code derives positions from the mask; for GPT-2, `generate` does.
        positions = {} if self.request.remote_code else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        padded = self.model(rows, attention_mask=mask, **positions).logits[1, -1]
        alone = self.model(torch.tensor([short])).logits[0, -1]
        if (difference := max_difference(padded, alone)) is not None:
            raise InvalidModelError(
                f"a left-padded row's logits differ by {difference:.1e} from those of the row alone"
            )

    def generate(self) -> None:
        import torch

        prompt = torch.tensor([self.request.ids[: max(1, len(self.request.ids) // 2)]])
        start = prompt.shape[1]
        count = min(NEW_TOKENS, self.config.max_position_embeddings - start)
        if count < 1:
            return
        options = {"attention_mask": torch.ones_like(prompt), "min_new_tokens": count, "max_new_tokens": count}
        options |= {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        cached, plain = (self.model.generate(prompt, use_cache=cache, **options) for cache in (True, False))
        for place in range(count):
            if (difference := max_difference(cached.logits[place], plain.logits[place])) is not None:
                raise InvalidModelError(f"with the cache, logits of new token {place + 1} differ by {difference:.1e}")
            if cached.sequences[0, start + place] != plain.sequences[0, start + place]:
                return  # a tie within the tolerance: the texts differ from here on

    def exceed_context(self) -> None:
        import torch

        if not self.request.remote_code:
            return  # transformers' GPT-2 decides that itself
        length = self.config.max_position_embeddings + 1
        try:
            self.model(torch.zeros(1, length, dtype=torch.long))
        except ValueError:
            return
        except Exception as error:
            raise InvalidModelError(
                f"{length} tokens, one more than the context, raise {type(error).__name__}"
            ) from error
        raise InvalidModelError(f"{length} tokens, one more than the context, raise no error")

    def run_pipeline(self) -> None:
        from transformers import pipeline

        del self.model
        where, revision = self.request.where, self.request.revision
        write = pipeline("text-generation", model=where, revision=revision, **self.trust, device="cpu")
        context, text = self.config.max_position_embeddings, self.request.texts[0]
        n_new = max(1, min(2 * NEW_TOKENS, context - len(self.result["tokens"][0])))
        self.result["text"] = write(text, do_sample=False, max_new_tokens=n_new)[0]["generated_text"]
        if not self.result["text"].strip():
            raise InvalidModelError(f"the continuation of {text!r} is empty")
        n_left = context - len(self.result["chat"] or ())
        if self.request.chat and n_left > 0:
            answered = write(self.request.chat, do_sample=False, max_new_tokens=min(2 * NEW_TOKENS, n_left))
            if answered[0]["generated_text"][-1]["role"] != "assistant":
                raise InvalidModelError("a question has no answer")

    def run_code_blocks(self) -> None:
        import torch

        self.result["printed"] = []
        for number, code in enumerate(self.request.code_blocks, 1):
            self.step, name = f"code block {number}", f"<code block {number}>"
            print(self.step, flush=True)
            linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
            printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
            with contextlib.redirect_stdout(printed), torch.enable_grad():
                try:
                    exec(compile(code, name, "exec"), {"__name__": "__main__"})
                except SystemExit as end:
                    if end.code not in (None, 0):
                        raise
            printed.seek(0)
            self.result["printed"].append(printed.read())

    def logits(self, model: Callable[[Any], Any]) -> Any:
        """Return a model's logits of the request's ids, shape (T, V), float32."""
        import torch

        found = model(torch.tensor([self.request.ids]))
        return getattr(found, "logits", found)[0].float()


STEPS: dict[str, Callable[[IsolatedCheck], None]] = {
    "import": IsolatedCheck.import_packages,
    "AutoConfig": IsolatedCheck.load_config,
    "AutoTokenizer": IsolatedCheck.load_tokenizer,
    "tokens": IsolatedCheck.tokenize,
    "chat template": IsolatedCheck.render_chat,
    "AutoModelForCausalLM": IsolatedCheck.load_model,
    "weights": IsolatedCheck.hash_weights,
    "tied head": IsolatedCheck.check_tied_head,
    "logits": IsolatedCheck.compute_logits,
    "AutoModel": IsolatedCheck.load_base_model,
    "left padding": IsolatedCheck.pad_left,
    "generate": IsolatedCheck.generate,
    "context length": IsolatedCheck.exceed_context,
    "pipeline": IsolatedCheck.run_pipeline,
    "code blocks": IsolatedCheck.run_code_blocks,
}
ADAPTER_STEPS: dict[str, Callable[[IsolatedCheck], None]] = {
    **{step: STEPS[step] for step in ("import", "AutoTokenizer", "tokens", "chat template")},
    "AutoPeftModelForCausalLM": IsolatedCheck.load_adapter,
    **{step: STEPS[step] for step in ("logits", "generate", "code blocks")},
}


def chat_ids(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
    """Return the token ids of a chat and of the start of the assistant's answer."""
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def class_name(thing: Any) -> str:
    """Return module and name of an object's class; the module of remote code contains the commit, or a hash."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def check_loading_info(info: dict[str, Any]) -> None:
    """Raise: InvalidModelError for missing, unexpected or mismatched weights in `output_loading_info`."""
    problems = {what.replace("_", " "): ", ".join(sorted(map(str, keys))[:3]) for what, keys in info.items() if keys}
    if problems:
        raise InvalidModelError("; ".join(f"{what}: {keys}" for what, keys in problems.items()))


def max_difference(one: Any, other: Any) -> float | None:
    """Return the largest difference of float32 logits, None within the tolerance."""
    difference = (one - other).abs().max().item()
    return None if difference <= TOLERANCE * max(1.0, other.abs().max().item()) else difference


def failure(step: str, error: BaseException) -> dict[str, Any]:
    """Describe a failed step. `missing`: modules that were not found; `line`: of a code block."""
    message = " ".join(str(error).split())
    listed = re.search(r"packages that were not found in your environment: (.+?)\. Run", message)
    missing = listed[1].split(", ") if listed else []
    if not missing and isinstance(error, ModuleNotFoundError) and error.name:
        missing = [name for name in [error.name.partition(".")[0]] if name != "transformers_modules"]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<code block")]
    return {
        "step": step,
        "error": message if isinstance(error, InvalidModelError) else f"{type(error).__name__}: {message}".rstrip(": "),
        "missing": missing,
        "line": frames[-1].line if frames else (error.text or "").strip() if isinstance(error, SyntaxError) else None,
        "traceback": "".join(traceback.format_exception(error)),
    }


def main(path: str) -> int:
    """Run the request at `path`. Returns: the exit status."""
    request = Request(**json.loads(Path(path).read_text(encoding="utf-8")))
    sys.meta_path[sys.meta_path.index(PathFinder)] = PackageFinder(request.modules, request.distributions)
    sys.path += request.path
    warnings.simplefilter("ignore")
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    check = IsolatedCheck(request)
    try:
        check.run()
    except (Exception, SystemExit) as error:
        check.result["failed"] = failure(check.step, error)
    Path(request.result).write_text(json.dumps(check.result), encoding="utf-8")
    return 1 if "failed" in check.result else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
