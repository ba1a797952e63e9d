"""Settings → what a run learns from and is measured on, and the model it begins with: initial weights, or another's.

Everything a user can have wrong is found here, before any weights are read or drawn. `run.py` trains.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.config.parser import as_flags
from gpt2small_hf.config.resolve import NOTHING_TO_MEASURE, OF_A_BASE, Arguments, check_sizes, row_length
from gpt2small_hf.data.chat.conversations import Conversations, describe_source, read_conversations
from gpt2small_hf.data.chat.template_checks import set_template, stop_tokens
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.corpus.metadata import read_meta
from gpt2small_hf.data.corpus.prepare import prepare
from gpt2small_hf.data.packing import pack_unsplit
from gpt2small_hf.data.row_dataset import RowDataset
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.data.tokenizer import load_tokenizer
from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import counted
from gpt2small_hf.invocation import command
from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.model.gpt import init_weights
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.report.tables import CHATS_TO_JUDGE_BY
from gpt2small_hf.runs.files import sha256
from gpt2small_hf.runs.layout import DataFolder, RunFolder
from gpt2small_hf.runs.records import Resolved
from gpt2small_hf.training.paths import locate_base
from gpt2small_hf.training.resume import settings_to_resume
from gpt2small_hf.training.trainer_arguments import TrainerArguments

STEPS_PER_EPOCH = 10


@dataclass
class RunInputs:
    """What a run is made from."""

    rows: RowDataset
    heldout: RowDataset | None
    """None if all is trained on."""
    tokenizer: PreTrainedTokenizerFast
    config: GPT2SmallConfig
    """Of the model as it will be trained."""
    build: Callable[[], Any]
    """The model with the weights that training begins with, with adapters if they are trained."""
    data: dict[str, Any]
    """For `resolved.json`: where the data are from, and a fingerprint of them."""
    inputs: list[Path]
    """Files that a result is made from."""
    base: dict[str, Any] | None = None
    """For `resolved.json`: the model that the run begins with, and a fingerprint of it."""
    known_positions: int = 0
    """Positions that this model was trained on; 0 of initial weights."""


def build_run_inputs(args: Arguments, n_processes: int | None = None) -> RunInputs:
    """Find or prepare the data, and know the model.

    Args:
        args: the run's settings; those that depend on the number of chats are filled in.
        n_processes: that train together; unset, those that were launched.

    Raises: UsageError for anything a user can fix.
    """
    base = None if args.run.init_from is None else find_base(args.run.init_from)
    if base and args.run.overwrite and Path(base.name).resolve().is_relative_to(args.run.output_dir.resolve()):
        raise UsageError(f"{base.name} lies in the run folder that --overwrite replaces. Choose another --output_dir.")
    config = adapt_base_config(base, args) if base else None
    if args.chat.chat_data is not None:
        assert base is not None
        assert config is not None
        inputs = _chats(args, base, config, n_processes or args.trainer.world_size)
    else:
        inputs = _text(args, base, config)
    if inputs.heldout is None and args.trainer.eval_strategy != "no":
        raise UsageError(NOTHING_TO_MEASURE)
    return inputs


# ---- text -------------------------------------------------------------------------------------------------------


def _text(args: Arguments, base: Base | None, config: GPT2SmallConfig | None) -> RunInputs:
    seq_len = check_sizes(args) if config is None else row_length(args, config.max_position_embeddings)
    if base is not None and args.run.data_dir is None:
        if args.data.tokenizer not in (None, base.name):
            raise UsageError(
                f"--tokenizer {args.data.tokenizer}: a model keeps its own. Leave it out with --init_from."
            )
        args.data.tokenizer = base.name
    with args.trainer.main_process_first(local=False, desc="preparing the data"):
        data_dir = find_data(args)
        rows = TextDataset(data_dir, "train", seq_len, packing=args.run.packing or "stream")
    meta = read_meta(data_dir)
    heldout = None
    if "validation" in meta["splits"]:
        heldout = TextDataset(data_dir, "validation", seq_len, max_rows=args.run.max_eval_samples)
    tokenizer = load_tokenizer(str(DataFolder(data_dir).tokenizer))
    kept = ("fingerprint", "sources", "splits", "tokenizer")  # a run can be told apart from its data folder
    # Sets of earlier versions do not say whether whole documents or tails are held out.
    data = {"folder": str(data_dir), **{name: meta[name] for name in kept}, "held_out": meta.get("held_out")}
    inputs = [DataFolder(data_dir).meta]
    if base is None or config is None:
        vocabulary = meta["tokenizer"]
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), vocabulary["eos_token_id"])
        config = GPT2SmallConfig(vocab_size=vocabulary["vocab_size"], **ids, **vars(args.model))
        return RunInputs(
            rows,
            heldout,
            tokenizer,
            config,
            lambda: draw_weights(GPT2SmallForCausalLM(config), initial_seed(args)),
            data,
            inputs,
        )
    own = base.tokenizer()
    if tokenizer.get_vocab() != own.get_vocab():
        raise UsageError(
            f"{data_dir} was prepared with another tokenizer than that of {base.name}. "
            f"Prepare the text again: {command('prepare', '--tokenizer', str(base.name))} …"
        )
    return RunInputs(
        rows,
        heldout,
        own,
        config,
        lambda: adapted(loaded(base, config, initial_seed(args)), args, base),
        data,
        inputs,
        base.described(),
        base.config.max_position_embeddings,
    )


def _reason(error: StrictDataclassError) -> str:
    return str(error).split("Error: ")[-1].strip()


def find_data(args: Arguments) -> Path:
    """The prepared folder: the one named, or the text named, prepared now.

    Raises: UsageError when both are named, or as `prepare` does.
    """
    if args.run.data_dir is None:
        return prepare(args.data, None)
    named = [name for name in ("text", "dataset", "validation_text", "tokenizer") if getattr(args.data, name)]
    if named:
        raise UsageError(
            f"--data_dir cannot be combined with --{named[0]}: the prepared folder contains both text and tokenizer."
        )
    read_meta(args.run.data_dir)
    if args.run.overwrite and args.run.data_dir.resolve().is_relative_to(args.run.output_dir.resolve()):
        raise UsageError(f"{args.run.data_dir} lies in the run folder that --overwrite replaces. Move it out.")
    return args.run.data_dir


def initial_seed(args: Arguments) -> int:
    """The seed of what is drawn before training."""
    return args.trainer.seed if args.run.init_seed is None else args.run.init_seed


def draw_weights(model: GPT2SmallForCausalLM, seed: int) -> GPT2SmallForCausalLM:
    """Draw the initial weights, each module's from a seed of its own, made of `seed` and the module's name.

    So two models that differ in one setting (a bias, a head, a layer more) start with the same weights elsewhere.
    """
    for name, module in model.named_modules():
        if module is model.get_output_embeddings() and model.config.tie_word_embeddings:
            continue  # it is the embedding
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big"))
        init_weights(module, model.config)
    return model


# ---- chats ------------------------------------------------------------------------------------------------------


def _chats(args: Arguments, base: Base, config: GPT2SmallConfig, n_processes: int) -> RunInputs:
    chat = args.chat
    seq_len = row_length(args, config.max_position_embeddings)
    if chat.max_length is not None and chat.max_length > seq_len:
        raise UsageError(f"--max_length is {chat.max_length}, but a row has {seq_len} tokens. Give as many or fewer.")
    tokenizer = base.tokenizer()
    new_tokens = set_template(tokenizer, chat.template, add_special_tokens=chat.add_special_tokens)
    assert chat.chat_data is not None
    sets = read_conversations(
        chat.chat_data,
        chat.validation_data,
        validation_fraction=args.data.held_out,
        skip_bad_rows=chat.skip_bad_rows,
    )
    if args.run.max_eval_samples is not None and "validation" in sets:
        sets["validation"].chats = sets["validation"].chats[: args.run.max_eval_samples]
    made = {
        split: ChatDataset(
            found.chats,
            tokenizer,
            seq_len=seq_len,
            max_length=chat.max_length,
            loss_on=chat.loss_on,
            packing=args.run.packing or "padding",
            overlong=chat.overlong,
        )
        for split, found in sets.items()
    }
    rows, heldout = made["train"], made.get("validation")
    chosen = choose_by_size(args, rows, heldout, n_processes)
    show_chats(sets, made)
    if chosen:
        print(f"chosen for {counted(rows.counts.kept, 'conversation')}: {' '.join(as_flags(chosen))}")
    config.vocab_size = max(config.vocab_size, len(tokenizer))
    for name in ("bos_token", "eos_token", "pad_token"):
        setattr(config, f"{name}_id", getattr(tokenizer, f"{name}_id"))
    ends = [*stop_tokens(tokenizer), str(tokenizer.eos_token), str(base.tokenizer().eos_token)]
    stop_ids, new_ids = ids_of(tokenizer, ends), ids_of(tokenizer, new_tokens)
    sources = {split: found.sources for split, found in sets.items()}
    data = {
        "folder": ", ".join(source["name"] for source in sources["train"]),
        "fingerprint": hashlib.sha256(
            f"{rows.fingerprint}{heldout.fingerprint if heldout else ''}".encode()
        ).hexdigest(),
        "sources": sources,
        "train": rows.describe(),
        "validation": heldout.describe() if heldout else None,
        "template": tokenizer.chat_template,
        "new_tokens": new_tokens,
    }
    files = [Path(source["name"].partition("[")[0]) for found in sources.values() for source in found]
    return RunInputs(
        rows,
        heldout,
        tokenizer,
        config,
        lambda: adapted(
            loaded(base, config, initial_seed(args), new_ids=new_ids, stop_ids=stop_ids), args, base, new_ids
        ),
        data,
        [path for path in files if path.is_file()],
        base.described(),
        base.config.max_position_embeddings,
    )


def choose_by_size(args: Arguments, rows: ChatDataset, heldout: ChatDataset | None, n_processes: int) -> dict[str, Any]:
    """Set what nobody has set and what depends on the number of chats: packing, batch, which checkpoint is kept.

    - Packing and batch are the largest with which an epoch has STEPS_PER_EPOCH steps: 30 short chats, packed, would be
      one step of the usual batch, and a run over before anything is learned.
    - The best checkpoint is kept if CHATS_TO_JUDGE_BY chats or more are held out, else the last.

    A run that resumes keeps what it started with, which another version of this code may have chosen otherwise.

    Returns: what was set, by the names of the flags.
    """
    trainer, unset = args.trainer, {"packing", "per_device_train_batch_size", "load_best_model_at_end"} - args.named
    chosen: dict[str, Any] = {}
    batches_per_step = trainer.gradient_accumulation_steps * n_processes
    before = settings_to_resume(RunFolder(args.run.output_dir), args)
    if before is not None and not before.chat:  # the folder has another run, which is refused later
        before = None
    if "packing" in unset:
        if before is not None:
            chosen |= {"packing": before.run.packing or "padding"}
        else:
            smallest = 1 if "per_device_train_batch_size" in unset else trainer.per_device_train_batch_size
            n_packed = len(pack_unsplit(rows.lengths, rows.seq_len))
            packs = n_packed >= STEPS_PER_EPOCH * smallest * batches_per_step
            chosen["packing"] = "best_fit" if packs else "padding"
        args.run.packing = chosen["packing"]
        for some in filter(None, (rows, heldout)):
            some.pack(chosen["packing"])
    if "per_device_train_batch_size" in unset:
        if before is not None:  # --find_batch_size may have cut its rows a step into other parts
            then = before.trainer.per_device_train_batch_size * before.trainer.gradient_accumulation_steps
            size = then * before.device.count // batches_per_step
        else:
            most = len(rows) // (STEPS_PER_EPOCH * batches_per_step)
            size = min(TrainerArguments.per_device_train_batch_size, most)
        trainer.per_device_train_batch_size = chosen["per_device_train_batch_size"] = max(1, size)
    if heldout and "load_best_model_at_end" in unset and trainer.eval_strategy == trainer.save_strategy == "epoch":
        if before is not None:
            keeps_best = before.trainer.load_best_model_at_end
        else:
            keeps_best = heldout.counts.kept >= CHATS_TO_JUDGE_BY or args.run.early_stopping_patience is not None
        trainer.load_best_model_at_end = chosen["load_best_model_at_end"] = keeps_best
    return chosen


def ids_of(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str]) -> list[int]:
    """The ids of some tokens, each once."""
    vocabulary = tokenizer.get_vocab()
    return list(dict.fromkeys(vocabulary[token] for token in tokens))


def show_chats(sets: dict[str, Conversations], made: dict[str, ChatDataset]) -> None:
    """Say what the data were recognised as, and what became of them."""
    for found in sets.values():
        for source in found.sources:
            print(describe_source(source))
    for name, some in made.items():
        share = some.n_supervised / some.n_tokens
        print(f"{name}: {some.counts} · {some.n_tokens:,} tokens, {share:.1%} of them supervised")


# ---- the model that a run begins with ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """A model of ours that another run begins with."""

    name: str
    """Its folder, or its id on the Hub."""
    config: GPT2SmallConfig
    sha256: str
    """Of its weights."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Its tokenizer. Raises: UsageError if it has none."""
        return load_tokenizer(self.name)

    def described(self) -> dict[str, Any]:
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
    """Look at a model without reading its weights.

    Raises: UsageError if there is none, or it is not one of ours.
    """
    name, weights = locate_base(name)
    return Base(name, GPT2SmallConfig.from_pretrained(name), sha256(weights))


def adapt_base_config(base: Base, args: Arguments) -> GPT2SmallConfig:
    """The base's configuration with what a run may change in it: dropout, and a longer context.

    Raises: UsageError for other sizes than it has, and for a shorter context.
    """
    config = GPT2SmallConfig.from_dict(base.config.to_dict())
    for setting in fields(args.model):
        name, there = setting.name, getattr(config, setting.name)
        wanted = getattr(args.model, name)
        if name not in args.named or wanted == there or (wanted is None and name == "intermediate_size"):
            continue
        if name not in OF_A_BASE:
            raise UsageError(f"--{name} is {wanted}, but {base.name} has {there}, which comes with it. Leave it out.")
        if name == "max_position_embeddings" and wanted < there:
            raise UsageError(
                f"--{name} is {wanted}, but {base.name} has {there}: give that. Rows may be shorter: --seq_len {wanted}"
            )
        setattr(config, name, wanted)
    try:
        config.validate()
    except StrictDataclassError as error:
        raise UsageError(_reason(error)) from None
    return config


def loaded(
    base: Base,
    config: GPT2SmallConfig,
    seed: int,
    *,
    new_ids: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
) -> GPT2SmallForCausalLM:
    """The base's weights in a model of `config`: old rows as they were, new tokens at the mean of the old.

    New positions of the context are drawn as initial weights are, from `seed`.

    Raises: UsageError if the weights cannot be read.
    """
    as_it_was = GPT2SmallConfig.from_dict(base.config.to_dict())
    for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):  # layers take them when they are made
        setattr(as_it_was, name, getattr(config, name))
    try:
        model = GPT2SmallForCausalLM.from_pretrained(base.name, config=as_it_was, dtype=torch.float32)
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        first = (str(error).splitlines() or ["?"])[0].rstrip(". ")
        raise UsageError(f"the weights of {base.name} cannot be read: {first}. Copy or make them again.") from None
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


# ---- adapters ---------------------------------------------------------------------------------------------------


def adapted(model: GPT2SmallForCausalLM, args: Arguments, base: Base, new_ids: Sequence[int] = ()) -> Any:
    """The model with LoRA's matrices, if the run asks for them; what the run has added to it is trained too.

    That is: the embeddings of new tokens, and new positions.
    """
    if args.run.lora_rank is None:
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
    # Of peft about itself and about what it saves: nothing that a user could do anything about.
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
    warnings.filterwarnings("ignore", ".*save_embedding_layers.*", UserWarning)
    torch.manual_seed(initial_seed(args))
    settings = LoraConfig(
        r=args.run.lora_rank,
        lora_alpha=args.run.lora_alpha or 2 * args.run.lora_rank,
        lora_dropout=args.run.lora_dropout,
        target_modules="all-linear",
        trainable_token_indices=added or None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, settings)
