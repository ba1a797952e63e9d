"""The model that a run starts from: initial weights, or a base model, with adapters if they are trained."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.config.resolve import RunConfig
from gpt2small_hf.data.tokenizer import load_tokenizer
from gpt2small_hf.errors import UsageError
from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.model.gpt import init_weights
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.runs.files import sha256
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.records import Resolved
from gpt2small_hf.training.paths import locate_base

CHANGEABLE = {"embd_pdrop", "attn_pdrop", "resid_pdrop", "max_position_embeddings"}
"""Model settings that a fine-tuning run may change."""


def initial_seed(run_config: RunConfig) -> int:
    """Return the seed of weights that are drawn before training."""
    return run_config.trainer.seed if run_config.run.init_seed is None else run_config.run.init_seed


def draw_weights(model: GPT2SmallForCausalLM, seed: int) -> GPT2SmallForCausalLM:
    """Draw the initial weights, those of each module from a seed made of `seed` and the name of the module.

    Two models that differ in one setting (a bias, a head, another layer) start with the same weights elsewhere.
    """
    for name, module in model.named_modules():
        if module is model.get_output_embeddings() and model.config.tie_word_embeddings:
            continue  # it is the embedding
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big"))
        init_weights(module, model.config)
    return model


@dataclass(frozen=True)
class Base:
    """A model of this package that a run starts from."""

    name: str
    """Its folder, or its id on the Hub."""
    config: GPT2SmallConfig
    sha256: str
    """Of its weights."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Load its tokenizer. Raises: UsageError if it has none."""
        return load_tokenizer(self.name)

    def describe(self) -> dict[str, Any]:
        """Return its entry in `resolved.json`."""
        is_local = Path(self.name).exists()
        trained_on = sources_of(Path(self.name)) if is_local else None
        return {"init_from": self.name, "sha256": self.sha256, "of_hub": not is_local, "trained_on": trained_on}


def sources_of(model: Path) -> list[dict[str, Any]] | None:
    """Return the sources of the training data of a model folder and of its own base; None if they are not recorded."""
    model = model.resolve()
    places = [model]  # as it was published
    if model.name == "model":
        places.append(model.parent)
    elif model.parent.name == "checkpoints":
        places.append(model.parents[1])
    for run in map(RunFolder, places):
        with suppress(UsageError):  # missing, or another program's file
            found = Resolved.load(run.resolved)
            if found.data.sources:
                origins = [*found.data.sources["train"], *((found.base and found.base.trained_on) or [])]
                return [origin.to_json() for origin in origins]
    return None


def find_base(name: str) -> Base:
    """Find a base model, without loading its weights. Raises: UsageError as `locate_base`."""
    name, weights = locate_base(name)
    return Base(name, GPT2SmallConfig.from_pretrained(name), sha256(weights))


def adapt_base_config(base: Base, run_config: RunConfig) -> GPT2SmallConfig:
    """Return the configuration of the base model with the changes of the run: dropout, and a longer context.

    Raises: UsageError for other sizes than those of the base model, and for a shorter context.
    """
    config = GPT2SmallConfig.from_dict(base.config.to_dict())
    for name in [name for name in vars(run_config.model) if name in run_config.named]:
        found, wanted = getattr(config, name), getattr(run_config.model, name)
        if wanted == found or (wanted is None and name == "intermediate_size"):
            continue
        if name not in CHANGEABLE:
            raise UsageError(f"--{name} is {wanted}, but the base model {base.name} has {found}. Leave it out.")
        if name == "max_position_embeddings" and wanted < found:
            raise UsageError(
                f"--{name} is {wanted}, but {base.name} has {found}. For shorter rows use --seq_len {wanted}."
            )
        setattr(config, name, wanted)
    try:
        config.validate()
    except StrictDataclassError as error:
        raise UsageError(str(error).split("Error: ")[-1].strip()) from None
    return config


def load_base(
    base: Base, config: GPT2SmallConfig, seed: int, *, new_ids: Sequence[int] = (), stop_ids: Sequence[int] = ()
) -> GPT2SmallForCausalLM:
    """Load the weights of a base model into a model of `config`, whose vocabulary and context may be larger.

    Embeddings of new tokens (`new_ids`) are the mean of the others; new positions are drawn as initial weights are.
    `stop_ids` end a generation.

    Raises: UsageError if the weights cannot be read.
    """
    base_config = GPT2SmallConfig.from_dict(base.config.to_dict())
    for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):  # layers read them when they are built
        setattr(base_config, name, getattr(config, name))
    try:
        model = GPT2SmallForCausalLM.from_pretrained(base.name, config=base_config, dtype=torch.float32)
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        first = (str(error).splitlines() or ["?"])[0].rstrip(". ")
        raise UsageError(f"the weights of {base.name} cannot be read: {first}. Copy the model again.") from None
    if config.max_position_embeddings > model.config.max_position_embeddings:
        torch.manual_seed(seed)
        model.resize_position_embeddings(config.max_position_embeddings)
    if config.vocab_size > model.config.vocab_size:
        model.resize_token_embeddings(config.vocab_size, mean_resizing=False)
    if new_ids:
        old = sorted(set(range(base.config.vocab_size)) - set(new_ids))
        with torch.no_grad():
            modules: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
            for weight in {module.weight for module in modules}:  # one, if they are tied
                weight[list(new_ids)] = weight[old].mean(0)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, getattr(config, name))
    if stop_ids:
        generation = model.generation_config
        generation.eos_token_id = list(stop_ids) if len(stop_ids) > 1 else stop_ids[0]
        generation.bos_token_id, generation.pad_token_id = config.bos_token_id, config.pad_token_id
    return model


def add_adapter(model: GPT2SmallForCausalLM, run_config: RunConfig, base: Base, new_ids: Sequence[int] = ()) -> Any:
    """Return the model with a LoRA adapter if the run has --lora_rank; new embeddings and positions are trained too."""
    if run_config.run.lora_rank is None:
        return model
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

    added: dict[str, list[int]] = {}
    if new_ids:
        names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
        added[names[model.get_input_embeddings()]] = list(new_ids)
        if not model.config.tie_word_embeddings:
            added[names[model.get_output_embeddings()]] = list(new_ids)
    positions = range(base.config.max_position_embeddings, model.config.max_position_embeddings)
    if positions and model.config.position_embedding is not None:
        added[model.config.position_embedding] = list(positions)
    # Warnings of peft about its own code and files, which a user cannot act on.
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
    warnings.filterwarnings("ignore", ".*save_embedding_layers.*", UserWarning)
    torch.manual_seed(initial_seed(run_config))
    settings = LoraConfig(
        r=run_config.run.lora_rank,
        lora_alpha=run_config.run.lora_alpha or 2 * run_config.run.lora_rank,  # pyright: ignore[reportArgumentType]
        lora_dropout=run_config.run.lora_dropout,
        target_modules="all-linear",
        trainable_token_indices=added or None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, settings)
