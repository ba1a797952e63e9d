"""A staged model and its run's files → `CardFacts`, which `model_card.j2` puts into words.

Each part is in a file of its own: `data_facts.py`, `lineage_facts.py`, `training_facts.py`, `result_facts.py`; the
model itself is described here. What no file states is None or empty.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import safe_open

from gpt2small_hf.config.run import PROMPT
from gpt2small_hf.data.tokenizer import load_tokenizer
from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.model.gpt import make_norm
from gpt2small_hf.peft_targets import LORA_TARGETS
from gpt2small_hf.publishing.checks import check_sizes, modified_code, weight_files
from gpt2small_hf.publishing.data_facts import DataFacts, data_facts
from gpt2small_hf.publishing.isolated_load import chat_ids
from gpt2small_hf.publishing.license import TEXT, TEXT_OF_CODE, License
from gpt2small_hf.publishing.lineage_facts import (
    BaseFacts,
    ConvertedFacts,
    Origin,
    base_facts,
    converted_facts,
    developers,
    origin_facts,
)
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.result_facts import (
    MAX_SAMPLES,
    Answers,
    Comparison,
    HeldOutFacts,
    LossAtStep,
    LossRise,
    Samples,
    answers,
    comparison,
    held_out_facts,
    loss_at_step,
    loss_rise,
    samples,
    samples_over_training,
)
from gpt2small_hf.publishing.source import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PushSource
from gpt2small_hf.publishing.stage import CHARTS
from gpt2small_hf.publishing.training_facts import (
    ComputeFacts,
    Provenance,
    TrainingFacts,
    TrainingTotals,
    compute_facts,
    provenance,
    training_facts,
    training_totals,
)
from gpt2small_hf.report.page import SampleTable
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
class LicenseFacts:
    """The license of the weights."""

    license: License
    file: str | None
    """Its text in the repository."""
    is_of_code: bool
    """Whether the code is under it too."""


@dataclass(frozen=True)
class AdapterFacts:
    """A LoRA adapter that is published without its base."""

    base: str
    commit: str
    rank: int
    alpha: float
    layers: list[str]
    parameters: int


@dataclass(frozen=True)
class ModelFacts:
    """The published model."""

    config: GPT2SmallConfig
    model_type: str
    norm: str
    """Name of the norm's class."""
    parameters: int
    non_embedding: int
    dtypes: list[str]
    hashes: list[str]
    """SHA-256 of each file of weights."""
    has_zero_biases: bool
    """Whether queries, keys and values have biases only because transformers' GPT-2 always has them."""
    code: list[str]
    modified_code: list[str]
    lora_targets: tuple[str, ...] | None
    """Layers to name to PEFT, which has no defaults for this architecture; None if it has."""


@dataclass(frozen=True)
class ExamplePrompts:
    """Prompts that leave room for new tokens within the context."""

    prompt: str
    """The run's first one, else a default one."""
    new_tokens: int
    fitting: list[str]
    """All of the run's."""


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Everything that the template can name. What is not known is None or empty."""

    name: str
    publication: Publication
    twin: str | None
    """The repository of the same weights in the other form, if it is public."""
    license: LicenseFacts | None
    developers: list[str]
    origin: Origin | None
    minimum_transformers: str
    native_transformers: list[str]
    model: ModelFacts
    adapter: AdapterFacts | None
    is_chat: bool
    example: ExamplePrompts
    rendered_chat: str | None
    """A chat as the template renders it."""
    base: BaseFacts | None
    converted: ConvertedFacts | None
    step: int | None
    is_checkpoint: bool
    is_last_step: bool
    loss_at_step: LossAtStep | None
    loss_rise: LossRise | None
    run: TrainingTotals | None
    """None of weights without a run."""
    data: DataFacts | None
    training: TrainingFacts | None
    compute: ComputeFacts | None
    provenance: Provenance | None
    heldout: HeldOutFacts | None
    nothing_held_out: bool
    comparison: Comparison | None
    charts: list[str]
    samples: Samples | None
    answers: Answers | None
    samples_over_training: SampleTable | None


def card_facts(source: PushSource, folder: Path, publication: Publication) -> CardFacts:
    """Collect the facts of a staged folder's card."""
    run, model = source.run, _model(source, folder, publication)
    is_chat, prompts = _is_chat(folder), staged_prompts(folder)
    example = example_prompts(folder, model.config.max_position_embeddings)
    return CardFacts(
        name=publication.repo_id.split("/")[-1],
        publication=publication,
        twin=None if publication.twin in publication.private else publication.twin,
        license=_license(folder, publication.license),
        developers=developers(source, publication),
        origin=origin_facts(publication),
        minimum_transformers=MINIMUM_TRANSFORMERS,
        native_transformers=[NATIVE_TRANSFORMERS, version("transformers")],
        model=model,
        adapter=_adapter(folder) if source.adapter else None,
        is_chat=is_chat,
        example=example,
        rendered_chat=_rendered_chat(folder, example.prompt) if is_chat else None,
        base=base_facts(run, publication),
        converted=converted_facts(source, publication.private),
        step=source.step,
        is_checkpoint=source.is_checkpoint,
        is_last_step=run is not None and run.heldout is not None and source.step == run.step,
        loss_at_step=loss_at_step(source),
        loss_rise=loss_rise(source),
        run=training_totals(source) if run else None,
        data=data_facts(run, publication.private),
        training=training_facts(run) if run else None,
        compute=compute_facts(source, model.config) if run else None,
        provenance=provenance(run, publication.private) if run else None,
        heldout=held_out_facts(source),
        nothing_held_out=bool(run and run.heldout and not run.measured),
        comparison=comparison(run, publication.baseline, publication) if run and publication.baseline else None,
        charts=[name for name in CHARTS if (folder / "charts" / f"{name}.png").is_file()],
        samples=samples(source, folder, prompts),
        answers=answers(source) if publication.questions else None,
        samples_over_training=samples_over_training(source, prompts),
    )


def _model(source: PushSource, folder: Path, publication: Publication) -> ModelFacts:
    config = check_sizes(source.model)
    has_zero_biases = publication.native and not config.attention_bias
    if has_zero_biases:
        config.attention_bias = True
    count, weights = sizes(config), sorted(folder.glob("*.safetensors"))
    with torch.device("meta"):
        norm = type(make_norm(config)).__name__
    return ModelFacts(
        config=config,
        model_type=read_json((source.model if source.adapter else folder) / "config.json")["model_type"],
        norm=norm,
        parameters=count.total,
        non_embedding=count.non_embedding,
        dtypes=_dtypes(weights if source.adapter else weight_files(folder)),
        hashes=[sha256(path) for path in weights],
        has_zero_biases=has_zero_biases,
        code=sorted(path.name for path in folder.glob("*.py")),
        modified_code=modified_code(source, folder),
        lora_targets=None if publication.native or source.adapter else tuple(LORA_TARGETS),
    )


def _dtypes(paths: list[Path]) -> list[str]:
    """Return the types of the weights, as torch names them."""
    found: set[str] = set()
    for path in paths:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as tensors:
                found |= {str(tensors.get_slice(name).get_dtype()) for name in tensors.keys()}  # noqa: SIM118
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
    return sorted(names.get(name, name) for name in found)


def _adapter(folder: Path) -> AdapterFacts:
    settings, count = read_json(folder / ADAPTER_CONFIG), 0
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            count += math.prod(tensors.get_slice(name).get_shape())
    return AdapterFacts(
        base=settings["base_model_name_or_path"],
        commit=settings["revision"],
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        layers=sorted({name.rpartition(".")[2] for name in settings["target_modules"]}),
        parameters=count,
    )


def _license(folder: Path, license: License | None) -> LicenseFacts | None:
    if license is None:
        return None
    file = TEXT if (folder / TEXT).is_file() else None
    return LicenseFacts(license, file, file is not None and not (folder / TEXT_OF_CODE).is_file())


def _is_chat(folder: Path) -> bool:
    return (folder / "chat_template.jinja").is_file() or "chat_template" in read_json(folder / "tokenizer_config.json")


def _rendered_chat(folder: Path, question: str) -> str:
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "…"}]
    return str(load_tokenizer(str(folder)).apply_chat_template(chat, tokenize=False))


def staged_prompts(folder: Path) -> list[str]:
    """Return the prompts of a run as they are staged: without those that are not to be published."""
    settings = RunFolder(folder).resolved
    return Resolved.load(settings).run.prompts if settings.is_file() else []


def example_prompts(folder: Path, context: int) -> ExamplePrompts:
    """Choose the prompts of the card's code and of the widget, so that prompt and answer are within the context.

    A default prompt is cut until it fits.
    """
    is_chat, generation = _is_chat(folder), read_json(folder / "generation_config.json")
    new_tokens = min((generation.get("max_new_tokens") or 128) if is_chat else 40, context // 2)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.model_max_length = sys.maxsize  # no warning that a prompt is too long

    def fits(text: str) -> bool:
        ids = chat_ids(tokenizer, [{"role": "user", "content": text}]) if is_chat else tokenizer(text)["input_ids"]
        return len(ids) + new_tokens <= context  # pyright: ignore[reportArgumentType]

    if fitting := [prompt for prompt in staged_prompts(folder) if fits(prompt)]:
        return ExamplePrompts(fitting[0], new_tokens, fitting[:MAX_SAMPLES])
    words = (QUESTION if is_chat else PROMPT).split()
    while len(words) > 1 and not fits(" ".join(words)):
        words.pop()
    return ExamplePrompts(" ".join(words), new_tokens, [])
