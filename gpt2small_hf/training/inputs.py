"""Settings → the rows of a run, and the model that it starts from, before weights are loaded or drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed as dist
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.config.parser import as_flags
from gpt2small_hf.config.resolve import (
    NOTHING_TO_MEASURE,
    RunConfig,
    check_sizes,
    keeps_best_by_default,
    row_length,
)
from gpt2small_hf.config.trainer import TrainerSettings
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
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.report.notes import CHATS_TO_JUDGE_BY
from gpt2small_hf.runs.layout import DataFolder, RunFolder
from gpt2small_hf.training.base_model import (
    Base,
    adapt_base_config,
    add_adapter,
    draw_weights,
    find_base,
    initial_seed,
    load_base,
)
from gpt2small_hf.training.distributed import run_on_rank_0
from gpt2small_hf.training.resume import settings_to_resume

STEPS_PER_EPOCH = 10


@dataclass(frozen=True)
class RunInputs:
    """Data, tokenizer and model of a run."""

    run_config: RunConfig
    """The settings, with those that depend on the data."""
    rows: RowDataset
    heldout: RowDataset | None
    """None if all is trained on."""
    tokenizer: PreTrainedTokenizerFast
    config: GPT2SmallConfig
    """Of the model as it will be trained."""
    build: Callable[[], Any]
    """Returns the model with the weights that training starts from, with adapters if they are trained."""
    data: dict[str, Any]
    """For `resolved.json`: the sources of the data, and their fingerprint."""
    inputs: list[Path]
    """Files that a result is made from."""
    base: dict[str, Any] | None = None
    """For `resolved.json`: the base model and the hash of its weights."""
    known_positions: int = 0
    """Positions that the base model was trained on; 0 for initial weights."""
    prompts_from: str = "given"
    """For `resolved.json`: the source of the prompts."""


def build_run_inputs(config: RunConfig, n_processes: int | None = None) -> RunInputs:
    """Find or prepare the data, and the configuration of the model. Raises: UsageError for anything a user can fix.

    `n_processes` train together; None: those that were launched.
    """
    base = None if config.run.init_from is None else find_base(config.run.init_from)
    output_dir = config.run.output_dir
    if base and config.run.overwrite and Path(base.name).resolve().is_relative_to(output_dir.resolve()):
        raise UsageError(f"{base.name} is in the run folder that --overwrite replaces. Choose another --output_dir.")
    n_processes = n_processes or (dist.get_world_size() if dist.is_initialized() else 1)
    if config.chat.chat_data is None:
        inputs = _text_inputs(config, base)
        _check_batch(config, inputs.rows, n_processes)
    else:
        assert base is not None
        inputs = _chat_inputs(config, base, n_processes)
    if inputs.heldout is None and config.trainer.eval_strategy != "no":
        raise UsageError(NOTHING_TO_MEASURE)
    return inputs


def _check_batch(config: RunConfig, rows: RowDataset, n_processes: int) -> None:
    """Refuse a micro-batch larger than the training set: one process would train on all rows, several repeat some.

    More micro-batches per step than an epoch has are accepted: the step has fewer, and its loss is their mean. A few
    packed chats are often one batch: the preflight notes that.
    """
    size = config.trainer.per_device_train_batch_size
    most = max(1, len(rows) // n_processes)
    if "per_device_train_batch_size" in config.named and size > most:
        of_each = f" on each of {n_processes} processes" if n_processes > 1 else ""
        raise UsageError(
            f"--per_device_train_batch_size is {size:,}{of_each}, but the training set has {counted(len(rows), 'row')} "
            f"of {rows.seq_len:,} tokens. Give {most:,} or less, or train on more text."
        )


# ---- text -------------------------------------------------------------------------------------------------------


def _text_inputs(run_config: RunConfig, base: Base | None) -> RunInputs:
    config = None if base is None else adapt_base_config(base, run_config)
    run = run_config.run
    seq_len = check_sizes(run_config) if config is None else row_length(run_config, config.max_position_embeddings)
    if base is not None and run.data_dir is None:
        if run_config.data.tokenizer not in (None, base.name):
            raise UsageError(
                f"--tokenizer {run_config.data.tokenizer} cannot be combined with --init_from: the base model has a "
                "tokenizer. Leave it out."
            )
        run_config = run_config.with_settings(tokenizer=base.name)

    def open_rows(folder: Path) -> TextDataset:
        return TextDataset(folder, "train", seq_len, packing=run.packing or "stream")

    def prepare_rows() -> Path:
        folder = find_data(run_config)
        open_rows(folder)  # writes the index that other ranks read
        return folder

    data_dir = run_on_rank_0(prepare_rows)
    rows, meta = open_rows(data_dir), read_meta(data_dir)
    heldout = None
    if "validation" in meta.splits:
        heldout = TextDataset(data_dir, "validation", seq_len, max_rows=run.max_eval_samples)
    stored, kept = meta.to_json(), ("fingerprint", "sources", "splits", "tokenizer", "held_out")
    data = {"folder": str(data_dir), **{name: stored.get(name) for name in kept}}  # a run does not need its data folder
    files = [DataFolder(data_dir).meta]
    tokenizer = load_tokenizer(str(DataFolder(data_dir).tokenizer))
    if base is None or config is None:
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), meta.tokenizer.eos_token_id)
        new = GPT2SmallConfig(vocab_size=meta.tokenizer.vocab_size, **ids, **vars(run_config.model))

        def build() -> GPT2SmallForCausalLM:
            return draw_weights(GPT2SmallForCausalLM(new), initial_seed(run_config))

        return RunInputs(run_config, rows, heldout, tokenizer, new, build, data, files)
    own = base.tokenizer()
    if tokenizer.get_vocab() != own.get_vocab():
        raise UsageError(
            f"{data_dir} was prepared with another tokenizer than that of {base.name}. "
            f"Prepare the text again: {command('prepare', '--tokenizer', str(base.name))} …"
        )

    def build_from_base() -> Any:
        return add_adapter(load_base(base, config, initial_seed(run_config)), run_config, base)

    known = base.config.max_position_embeddings
    return RunInputs(
        run_config, rows, heldout, own, config, build_from_base, data, files, base.describe(), known_positions=known
    )


def find_data(config: RunConfig) -> Path:
    """Return --data_dir, or prepare the text. Raises: UsageError if the folder is not complete, or as `prepare`."""
    data_dir, run = config.run.data_dir, config.run
    if data_dir is None:
        return prepare(config.data, None)
    read_meta(data_dir)
    if run.overwrite and data_dir.resolve().is_relative_to(run.output_dir.resolve()):
        raise UsageError(f"{data_dir} is in the run folder that --overwrite replaces. Move it elsewhere.")
    return data_dir


# ---- chats ------------------------------------------------------------------------------------------------------


def _chat_inputs(config: RunConfig, base: Base, n_processes: int) -> RunInputs:
    model_config, tokenizer = adapt_base_config(base, config), base.tokenizer()
    seq_len = row_length(config, model_config.max_position_embeddings)
    new_tokens = set_template(tokenizer, config.chat.template, add_special_tokens=config.chat.add_special_tokens)
    sets, datasets = _encode_chats(config, tokenizer, seq_len)
    rows, heldout = datasets["train"], datasets.get("validation")
    chosen = choose_by_size(config, rows, heldout, n_processes)
    config = config.with_settings(**chosen)
    for some in datasets.values():
        some.pack(config.run.packing or "padding")
    print_chats(sets, datasets)
    if chosen:
        print(f"chosen for {counted(rows.counts.kept, 'conversation')}: {' '.join(as_flags(chosen))}")
    model_config.vocab_size = max(model_config.vocab_size, len(tokenizer))
    for name in ("bos_token", "eos_token", "pad_token"):
        setattr(model_config, f"{name}_id", getattr(tokenizer, f"{name}_id"))
    ends = [*stop_tokens(tokenizer), str(tokenizer.eos_token), str(base.tokenizer().eos_token)]
    vocabulary = tokenizer.get_vocab()
    stop_ids = list(dict.fromkeys(vocabulary[token] for token in ends))
    new_ids = [vocabulary[token] for token in new_tokens]
    sources = {split: found.sources for split, found in sets.items()}
    fingerprints = f"{rows.fingerprint}{heldout.fingerprint if heldout else ''}"
    data = {
        "folder": ", ".join(source["name"] for source in sources["train"]),
        "fingerprint": hashlib.sha256(fingerprints.encode()).hexdigest(),
        "sources": sources,
        "train": rows.describe(),
        "validation": heldout.describe() if heldout else None,
        "template": tokenizer.chat_template,
        "new_tokens": new_tokens,
    }
    files = [Path(source["name"].partition("[")[0]) for found in sources.values() for source in found]
    files = [path for path in files if path.is_file()]

    def build() -> Any:
        model = load_base(base, model_config, initial_seed(config), new_ids=new_ids, stop_ids=stop_ids)
        return add_adapter(model, config, base, new_ids)

    known = base.config.max_position_embeddings
    return RunInputs(
        config, rows, heldout, tokenizer, model_config, build, data, files, base.describe(), known_positions=known
    )


def _encode_chats(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast, seq_len: int
) -> tuple[dict[str, Conversations], dict[str, ChatDataset]]:
    """Read and encode the chats of each split."""
    chat, run = config.chat, config.run
    if chat.max_length is not None and chat.max_length > seq_len:
        raise UsageError(f"--max_length is {chat.max_length}, but rows have {seq_len} tokens. Use at most {seq_len}.")
    sets = read_conversations(
        chat.chat_data or [],
        chat.validation_data,
        validation_fraction=config.data.held_out,
        skip_bad_rows=chat.skip_bad_rows,
    )
    if run.max_eval_samples is not None and "validation" in sets:
        sets["validation"].chats = sets["validation"].chats[: run.max_eval_samples]
    return sets, {
        split: ChatDataset(
            found.chats,
            tokenizer,
            seq_len=seq_len,
            max_length=chat.max_length,
            loss_on=chat.loss_on,
            packing=run.packing or "padding",
            overlong=chat.overlong,
        )
        for split, found in sets.items()
    }


def choose_by_size(
    config: RunConfig, rows: ChatDataset, heldout: ChatDataset | None, n_processes: int
) -> dict[str, Any]:
    """Choose the unset settings that depend on the number of chats: packing, batch size, which checkpoint is kept.

    - Packing and batch size are the largest with which an epoch has STEPS_PER_EPOCH steps: 30 short chats, packed,
      would be one step of the default batch.
    - The best checkpoint is kept if CHATS_TO_JUDGE_BY chats or more are held out, else the last.

    A resumed run keeps the settings that it started with, which another version of this code may have chosen.

    Returns: the settings, by the names of their flags.
    """
    trainer, chosen = config.trainer, {}
    batches_per_step = trainer.gradient_accumulation_steps * n_processes
    before = settings_to_resume(RunFolder(config.run.output_dir), config)
    if before is not None and not before.chat:  # another run, which is refused later
        before = None
    n_rows, smallest = len(rows), 1
    if "per_device_train_batch_size" in config.named:
        smallest = trainer.per_device_train_batch_size
    if "packing" not in config.named and before is not None:
        chosen["packing"] = before.run.packing or "padding"
    elif "packing" not in config.named:
        n_packed = len(pack_unsplit(rows.lengths, rows.seq_len))
        packs = n_packed >= STEPS_PER_EPOCH * smallest * batches_per_step
        chosen["packing"] = "best_fit" if packs else "padding"
        n_rows = n_packed if packs else len(rows)
    if "per_device_train_batch_size" not in config.named:
        size = min(TrainerSettings.per_device_train_batch_size, n_rows // (STEPS_PER_EPOCH * batches_per_step))
        if before is not None:  # --find_batch_size may have split its rows per step otherwise
            then = before.trainer.per_device_train_batch_size * before.trainer.gradient_accumulation_steps
            size = then * before.device.count // batches_per_step
        chosen["per_device_train_batch_size"] = max(1, size)
    if heldout and keeps_best_by_default(config):
        keeps_best = heldout.counts.kept >= CHATS_TO_JUDGE_BY or config.run.early_stopping_patience is not None
        chosen["load_best_model_at_end"] = before.trainer.load_best_model_at_end if before is not None else keeps_best
    return chosen


def print_chats(sets: dict[str, Conversations], datasets: dict[str, ChatDataset]) -> None:
    """Print the detected format of the data, and how many conversations and tokens are used."""
    for found in sets.values():
        for source in found.sources:
            print(describe_source(source))
    for name, some in datasets.items():
        share = some.n_supervised / some.n_tokens
        print(f"{name}: {some.counts} · {some.n_tokens:,} tokens, {share:.1%} of them supervised")
