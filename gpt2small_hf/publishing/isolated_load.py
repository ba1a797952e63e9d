"""Loads a model, of a folder or Hub cache, with torch, transformers and what these need alone.

python -I -S gpt2small_hf/publishing/isolated_load.py REQUEST.json

`-I -S` leave sys.path with the standard library alone: no current folder, no site-packages, no .pth files and so no
editable install. The request (`Request`) says what else may be imported, what to load and where the answer goes. What
must hold of any model is checked here; what must equal the model it came from, `verify.py` judges by the answer.
Exit status: 0, or 1 if a step failed: the answer then says which, and why.
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
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import Any

TOLERANCE = 1e-5  # of float32 logits that only another order of additions may part, times the largest where above 1
NEW_TOKENS = 8


@dataclass(frozen=True)
class Request:
    """What REQUEST.json holds."""

    path: list[str]  # folders with packages
    modules: list[str]  # top-level names that may be imported from them
    distributions: list[str]  # what pip calls the packages that these belong to, normalized
    where: str  # a model folder, or the id of a repository in the cache
    revision: str | None  # of the repository: a commit
    remote_code: bool  # whether the model brings its classes
    adapter: bool  # a LoRA adapter, loaded by peft onto a base in the cache
    ids: list[int]  # token ids whose logits are asked for
    texts: list[str]  # to encode and decode; the first is also continued
    chat: list[dict[str, str]] | None  # to render and encode
    codes: list[str]  # Python sources to run
    answer: str  # the path of the answer; the logits go beside it, as raw float32
    threads: int


class NotSoError(Exception):
    """Something that must hold of a published model does not."""


class Fence:
    """Finds the standard library and what is allowed of the packages; has not heard of anything else."""

    def __init__(self, modules: list[str], distributions: list[str]) -> None:
        self.modules = {*modules, "transformers_modules"}  # the latter is what transformers calls remote code
        self.distributions = set(distributions)
        self.standard_library = list(sys.path)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Like every finder's; for a top-level name `path` is None."""
        if path is None and name not in self.modules:
            path = self.standard_library
        return PathFinder.find_spec(name, path, target)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """The allowed packages' metadata: torch loads what others registered there, and transformers reads versions."""
        for found in PathFinder.find_distributions(context or DistributionFinder.Context()):
            if normalized(found.metadata["Name"] or "") in self.distributions:
                yield found

    def invalidate_caches(self) -> None:
        """Like every finder's."""
        PathFinder.invalidate_caches()


def normalized(distribution: str) -> str:
    """A distribution's name as the packaging rules compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def digest(tensor: Any) -> str:
    """The SHA-256 of a tensor's bytes."""
    import torch

    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


class Visit:
    """The steps, in the order of `STEPS`, and what they leave for later ones and for the answer."""

    config: Any
    tokenizer: Any
    model: Any

    def __init__(self, request: Request) -> None:
        self.request = request
        self.name: dict[str, Any] = {"pretrained_model_name_or_path": request.where, "revision": request.revision}
        self.trust: dict[str, Any] = {"trust_remote_code": request.remote_code}
        self.step = "import"
        self.answer: dict[str, Any] = {"seconds": {}}

    def run(self) -> None:
        """Every step, named on stdout as it begins: a process that dies has then said where."""
        steps = STEPS_OF_ADAPTER if self.request.adapter else STEPS
        for self.step, do in steps.items():
            print(self.step, flush=True)
            began = time.perf_counter()
            do(self)
            self.answer["seconds"][self.step] = round(time.perf_counter() - began, 3)

    def come_in(self) -> None:
        import platform

        import torch
        import transformers

        torch.set_num_threads(self.request.threads)
        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        self.answer["versions"] = {**versions, "transformers": transformers.__version__}

    def load_config(self) -> None:
        from transformers import AutoConfig

        self.config = AutoConfig.from_pretrained(**self.name, **self.trust)
        self.answer["classes"] = [name_of(self.config)]

    def load_tokenizer(self) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(**self.name, trust_remote_code=False)

    def encode(self) -> None:
        tokens = [self.tokenizer(text)["input_ids"] for text in self.request.texts]
        bare = [self.tokenizer.encode(text, add_special_tokens=False) for text in self.request.texts]
        self.answer |= {"tokens": tokens, "decoded": [self.tokenizer.decode(ids) for ids in bare]}

    def render(self) -> None:
        self.answer |= {"chat_template": self.tokenizer.chat_template, "chat": None}
        if self.request.chat is not None:
            self.answer["chat"] = chat_ids(self.tokenizer, self.request.chat)

    def load_model(self) -> None:
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(**self.name, **self.trust, output_loading_info=True)
        self.model, info = loaded
        complain(info)
        self.answer |= {"dtype": str(self.model.dtype).removeprefix("torch.")}
        self.answer["classes"].append(name_of(self.model))

    def load_adapter(self) -> None:
        from peft import AutoPeftModelForCausalLM  # pyright: ignore[reportMissingImports]

        where, revision = self.request.where, self.request.revision
        self.model = AutoPeftModelForCausalLM.from_pretrained(where, revision=revision, **self.trust).eval()
        self.config = self.model.config
        self.answer |= {"dtype": str(self.model.dtype).removeprefix("torch."), "weights": {}}
        self.answer |= {"classes": [name_of(self.model.get_base_model())], "text": ""}

    def read_weights(self) -> None:
        # Another class has other names: its logits alone can be compared.
        own = self.model.named_parameters() if self.request.remote_code else ()
        self.answer["weights"] = {name: digest(weight) for name, weight in own}

    def compare_head(self) -> None:
        embedding, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        shared, wanted = embedding.data_ptr() == head.data_ptr(), self.config.tie_word_embeddings
        if shared != wanted:
            memory = "share their memory" if shared else "do not share their memory"
            raise NotSoError(f"the config says tie_word_embeddings={wanted}, but embedding and head {memory}")

    def score(self) -> None:
        logits = self.logits(self.model)
        if not logits.isfinite().all():
            raise NotSoError("they are not all finite: the model is broken")
        self.answer["shape"] = list(logits.shape)
        Path(self.request.answer + ".logits").write_bytes(logits.numpy().tobytes())

    def load_base_model(self) -> None:
        from transformers import AutoModel

        loaded: Any = AutoModel.from_pretrained(**self.name, **self.trust, output_loading_info=True)
        base, info = loaded
        complain({**info, "unexpected_keys": []})  # it has no place for the head
        self.answer["classes"].append(name_of(base))
        base.float()
        self.model.float()  # rounding apart, nothing from here on depends on the dtype
        head = self.model.get_output_embeddings()
        difference = apart(self.logits(lambda ids: head(base(ids).last_hidden_state)), self.logits(self.model))
        if difference is not None:
            raise NotSoError(f"its logits differ by {difference:.1e} from those of AutoModelForCausalLM")

    def pad(self) -> None:
        import torch

        long, short = self.request.ids, self.request.ids[len(self.request.ids) // 2 :]
        filler, padding = self.config.pad_token_id or 0, len(long) - len(short)
        rows, mask = torch.tensor([long, [filler] * padding + short]), torch.ones(2, len(long), dtype=torch.long)
        mask[1, :padding] = 0
        # Ours counts positions by the mask; GPT-2 leaves that to `generate`, which does it so.
        given = {} if self.request.remote_code else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        together = self.model(rows, attention_mask=mask, **given).logits[1, -1]
        alone = self.model(torch.tensor([short])).logits[0, -1]
        if (difference := apart(together, alone)) is not None:
            raise NotSoError(f"a left-padded row's logits differ by {difference:.1e} from those of the row alone")

    def generate(self) -> None:
        import torch

        prompt = torch.tensor([self.request.ids[: max(1, len(self.request.ids) // 2)]])
        count = min(NEW_TOKENS, self.config.max_position_embeddings - prompt.shape[1])
        if count < 1:
            return
        told = {"attention_mask": torch.ones_like(prompt), "min_new_tokens": count, "max_new_tokens": count}
        both = [
            self.model.generate(
                prompt, **told, do_sample=False, use_cache=cache, output_logits=True, return_dict_in_generate=True
            )
            for cache in (True, False)
        ]
        starts = prompt.shape[1]
        for place, (cached, plain) in enumerate(zip(both[0].logits, both[1].logits, strict=True)):
            if (difference := apart(cached, plain)) is not None:
                raise NotSoError(f"with the cache, logits of new token {place + 1} differ by {difference:.1e}")
            if both[0].sequences[0, starts + place] != both[1].sequences[0, starts + place]:
                return  # as likely as each other: from here on they are different texts

    def pass_context(self) -> None:
        import torch

        if not self.request.remote_code:
            return  # what GPT-2 does there is not for us to say
        length = self.config.max_position_embeddings + 1
        try:
            self.model(torch.zeros(1, length, dtype=torch.long))
        except ValueError:
            return
        except Exception as error:
            raise NotSoError(f"{length} tokens, one more than the context, raise {type(error).__name__}") from error
        raise NotSoError(f"{length} tokens, one more than the context, are taken without a word")

    def write(self) -> None:
        from transformers import pipeline

        del self.model
        where, revision = self.request.where, self.request.revision
        write = pipeline("text-generation", model=where, revision=revision, **self.trust, device="cpu")
        text = self.request.texts[0]
        room = self.config.max_position_embeddings - len(self.answer["tokens"][0])
        told = {"do_sample": False, "max_new_tokens": max(1, min(2 * NEW_TOKENS, room))}
        self.answer["text"] = write(text, **told)[0]["generated_text"]
        if not self.answer["text"].strip():
            raise NotSoError(f"nothing came after {text!r}")
        room = self.config.max_position_embeddings - len(self.answer["chat"] or ())
        if self.request.chat and room > 0:
            told["max_new_tokens"] = min(2 * NEW_TOKENS, room)
            if write(self.request.chat, **told)[0]["generated_text"][-1]["role"] != "assistant":
                raise NotSoError("a question got no answer")

    def note_commit(self) -> None:
        self.answer["commit"] = None
        if self.request.revision is None:
            return
        from huggingface_hub import constants

        # Another commit in the cache could have been loaded in its place.
        cached = Path(constants.HF_HUB_CACHE) / ("models--" + self.request.where.replace("/", "--")) / "snapshots"
        commits = sorted(folder.name for folder in cached.iterdir())
        if commits != [self.request.revision]:
            raise NotSoError(f"files came from {' and '.join(commits)}, asked was for {self.request.revision}")
        self.answer["commit"] = self.request.revision

    def run_codes(self) -> None:
        import torch

        self.answer["printed"] = []
        for number, code in enumerate(self.request.codes, 1):
            self.step, name = f"code block {number}", f"<code block {number}>"
            print(self.step, flush=True)
            linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
            printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
            with contextlib.redirect_stdout(printed), torch.enable_grad():
                try:
                    exec(compile(code, name, "exec"), {"__name__": "__main__"})
                except SystemExit as left:
                    if left.code not in (None, 0):
                        raise
            printed.seek(0)
            self.answer["printed"].append(printed.read())

    def logits(self, model: Callable[[Any], Any]) -> Any:
        """What a model makes of the request's ids: (T, V), as float32."""
        import torch

        found = model(torch.tensor([self.request.ids]))
        return getattr(found, "logits", found)[0].float()


STEPS: dict[str, Callable[[Visit], None]] = {
    "import": Visit.come_in,
    "AutoConfig": Visit.load_config,
    "AutoTokenizer": Visit.load_tokenizer,
    "tokens": Visit.encode,
    "chat template": Visit.render,
    "AutoModelForCausalLM": Visit.load_model,
    "weights": Visit.read_weights,
    "tied head": Visit.compare_head,
    "logits": Visit.score,
    "AutoModel": Visit.load_base_model,
    "left padding": Visit.pad,
    "generate": Visit.generate,
    "past the context": Visit.pass_context,
    "pipeline": Visit.write,
    "commit": Visit.note_commit,
    "code blocks": Visit.run_codes,
}


STEPS_OF_ADAPTER: dict[str, Callable[[Visit], None]] = {
    **{step: STEPS[step] for step in ("import", "AutoTokenizer", "tokens", "chat template")},
    "AutoPeftModelForCausalLM": Visit.load_adapter,
    **{step: STEPS[step] for step in ("logits", "generate", "commit", "code blocks")},
}


def chat_ids(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
    """The ids of a conversation that the assistant is to answer."""
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def name_of(thing: Any) -> str:
    """Module and name of something's class; of remote code the module has the commit, or a hash, in it."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def complain(info: dict[str, Any]) -> None:
    """Raise: NotSoError if `output_loading_info` has anything to say."""
    said = [
        f"{what.replace('_', ' ')}: {', '.join(sorted(map(str, found))[:3])}" for what, found in info.items() if found
    ]
    if said:
        raise NotSoError("; ".join(said))


def apart(one: Any, other: Any) -> float | None:
    """How far float32 logits lie apart; None within the tolerance."""
    difference = (one - other).abs().max().item()
    return None if difference <= TOLERANCE * max(1.0, other.abs().max().item()) else difference


def failure(step: str, error: BaseException) -> dict[str, Any]:
    """A failed step, for the answer. `missing`: the modules that were not found; `line`: of a code block."""
    said = " ".join(str(error).split())
    lacked = re.search(r"packages that were not found in your environment: (.+?)\. Run", said)
    missing = lacked[1].split(", ") if lacked else []
    if not missing and isinstance(error, ModuleNotFoundError) and error.name:
        missing = [name for name in [error.name.partition(".")[0]] if name != "transformers_modules"]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<code block")]
    return {
        "step": step,
        "error": said if isinstance(error, NotSoError) else f"{type(error).__name__}: {said}".rstrip(": "),
        "missing": missing,
        "line": frames[-1].line if frames else (error.text or "").strip() if isinstance(error, SyntaxError) else None,
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }


def main(path: str) -> int:
    """Answer the request at `path`; returns the exit status."""
    request = Request(**json.loads(Path(path).read_text(encoding="utf-8")))
    sys.meta_path[sys.meta_path.index(PathFinder)] = Fence(request.modules, request.distributions)
    sys.path += request.path
    warnings.simplefilter("ignore")
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    visit = Visit(request)
    try:
        visit.run()
    except (Exception, SystemExit) as error:
        visit.answer["failed"] = failure(visit.step, error)
    Path(request.answer).write_text(json.dumps(visit.answer), encoding="utf-8")
    return 1 if "failed" in visit.answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
