"""A staged model and its run's files → the facts of its card, which `model_card.j2` puts into words.

The parts are in `lineage_facts.py`, `training_facts.py` and `result_facts.py`; the model itself is described here.
Settings are those of the staged `resolved.json`, which has nothing private. What no file states is None or empty.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from gpt2small_hf.config.run import PROMPT
from gpt2small_hf.data.tokenizer import load_tokenizer
from gpt2small_hf.evaluation.tasks import further_results
from gpt2small_hf.model.gpt import make_norm
from gpt2small_hf.peft_targets import LORA_TARGETS
from gpt2small_hf.publishing import lineage_facts as lineage
from gpt2small_hf.publishing import result_facts as results
from gpt2small_hf.publishing.checks import modified_code, read_model_config, weight_files
from gpt2small_hf.publishing.isolated_load import chat_ids
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.source import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PushSource
from gpt2small_hf.publishing.stage import CHARTS
from gpt2small_hf.publishing.training_facts import training_facts
from gpt2small_hf.report.notes import new_text
from gpt2small_hf.runs.files import read_json, sha256
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.records import Resolved
from gpt2small_hf.training.budget import sizes

MINIMUM_TRANSFORMERS = "5.4.0"
"""The oldest that tests/compat/versions.py runs a published folder under."""
NATIVE_TRANSFORMERS = "4.57.1"
"""The version of transformers 4 that a native folder was tested with."""
QUESTION = "Who are you?"
"""In the example of a chat model whose prompts are not published."""


@dataclass(frozen=True)
class ExamplePrompts:
    """Prompts that leave room for new tokens within the context."""

    prompt: str
    """The run's first one, else a default one."""
    new_tokens: int
    fitting: list[str]
    """All of the run's."""


def card_facts(source: PushSource, folder: Path, publication: Publication) -> dict[str, Any]:
    """Collect everything that the template can name about a staged folder. What is not known is None or empty."""
    run, model = source.run, _model(source, folder, publication)
    is_chat, resolved = _is_chat(folder), _staged_settings(folder) if run else None
    prompts = resolved.run.prompts if resolved else []
    example = example_prompts(folder, model["config"].max_position_embeddings)
    heldout, samples = results.held_out_facts(source), results.samples(source, folder, prompts)
    baseline = publication.baseline
    return {
        "name": publication.repo_id.split("/")[-1],
        "publication": publication,
        "twin": None if publication.twin in publication.private else publication.twin,
        "files": sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()),
        "developers": lineage.developers(source, publication),
        "origin": lineage.origin_facts(publication),
        "minimum_transformers": MINIMUM_TRANSFORMERS,
        "native_transformers": [NATIVE_TRANSFORMERS, version("transformers")],
        "model": model,
        "adapter": _adapter(folder) if source.adapter else None,
        "is_chat": is_chat,
        "example": example,
        "rendered_chat": _rendered_chat(folder, example.prompt) if is_chat else None,
        "base": lineage.base_facts(run, publication),
        "base_data": lineage.data_sources(resolved.base.trained_on or []) if resolved and resolved.base else None,
        "converted": lineage.converted_facts(source, publication.private),
        "step": source.step,
        "is_checkpoint": source.is_checkpoint,
        "loss_at_step": results.loss_at_step(source),
        "loss_rise": results.loss_rise(source),
        "resolved": resolved,  # as published; None of weights without a run, as are the next two
        "training": training_facts(source, model["config"]) if run else None,
        "data": lineage.data_facts(resolved) if resolved else None,
        "heldout": heldout,
        "new_text": new_text(heldout) if heldout else None,
        "nothing_held_out": bool(run and run.heldout and not run.measured),
        "further_results": further_results(run.heldout) if run and run.heldout and not source.is_checkpoint else {},
        "benchmarks": results.benchmarks(source),
        "comparison": results.comparison(run, baseline, publication) if run and baseline else None,
        "charts": [name for name in CHARTS if (folder / "charts" / f"{name}.png").is_file()],
        "samples": samples,
        "prompts_in_training": results.prompts_in_training(run, samples) if run and samples else None,
        "answers": results.answers(source) if publication.questions else None,
        "samples_over_training": results.samples_over_training(source, prompts),
    }


def _model(source: PushSource, folder: Path, publication: Publication) -> dict[str, Any]:
    config = read_model_config(source.model)
    # transformers' GPT-2 always has biases of queries, keys and values
    has_zero_biases = publication.native and not config.attention_bias
    if has_zero_biases:
        config.attention_bias = True
    weights = sorted(folder.glob("*.safetensors"))
    with torch.device("meta"):
        norm = type(make_norm(config)).__name__
    return {
        "config": config,
        "model_type": read_json((source.model if source.adapter else folder) / "config.json")["model_type"],
        "norm": norm,
        "sizes": sizes(config),
        "dtypes": _dtypes(weights if source.adapter else weight_files(folder)),
        "hashes": [sha256(path) for path in weights],
        "has_zero_biases": has_zero_biases,
        "code": sorted(path.name for path in folder.glob("*.py")),
        "modified_code": modified_code(source, folder),
        # layers to name to PEFT, which has no defaults for this architecture
        "lora_targets": None if publication.native or source.adapter else tuple(LORA_TARGETS),
    }


def _dtypes(paths: list[Path]) -> list[str]:
    """Return the types of the weights, as torch names them."""
    found: set[str] = set()
    for path in paths:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as tensors:
                found |= {str(tensors.get_slice(name).get_dtype()) for name in tensors.keys()}  # noqa: SIM118
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
    return sorted(names.get(name, name) for name in found)


def _adapter(folder: Path) -> dict[str, Any]:
    """Return `adapter_config.json` of a LoRA adapter that is published without its base, and its size."""
    settings, count = read_json(folder / ADAPTER_CONFIG), 0
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            count += math.prod(tensors.get_slice(name).get_shape())
    layers = {name.rpartition(".")[2] for name in settings["target_modules"]}
    return {**settings, "layers": sorted(layers), "parameters": count}


def _is_chat(folder: Path) -> bool:
    return (folder / "chat_template.jinja").is_file() or "chat_template" in read_json(folder / "tokenizer_config.json")


def _rendered_chat(folder: Path, question: str) -> str:
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "…"}]
    return str(load_tokenizer(str(folder)).apply_chat_template(chat, tokenize=False))


def _staged_settings(folder: Path) -> Resolved | None:
    """Return the settings of a run as they are staged: without prompts that are not to be published."""
    settings = RunFolder(folder).resolved
    return Resolved.load(settings) if settings.is_file() else None


def example_prompts(folder: Path, context: int) -> ExamplePrompts:
    """Choose the prompts of the card's code and of the widget, so that prompt and answer are within the context.

    A default prompt is cut until it fits.
    """
    is_chat, generation = _is_chat(folder), read_json(folder / "generation_config.json")
    new_tokens = min((generation.get("max_new_tokens") or 128) if is_chat else 40, context // 2)
    settings, tokenizer = _staged_settings(folder), load_tokenizer(str(folder))
    tokenizer.model_max_length = sys.maxsize  # no warning that a prompt is too long

    def fits(text: str) -> bool:
        ids = chat_ids(tokenizer, [{"role": "user", "content": text}]) if is_chat else tokenizer(text)["input_ids"]
        return len(ids) + new_tokens <= context  # pyright: ignore[reportArgumentType]

    if fitting := [prompt for prompt in (settings.run.prompts if settings else []) if fits(prompt)]:
        return ExamplePrompts(fitting[0], new_tokens, fitting[: results.MAX_SAMPLES])
    words = (QUESTION if is_chat else PROMPT).split()
    while len(words) > 1 and not fits(" ".join(words)):
        words.pop()
    return ExamplePrompts(" ".join(words), new_tokens, [])
