"""One run: text or prepared rows → a run folder with a model that loads anywhere, its measure and its chart.

Assembles the other rooms around HF's `Trainer`. Settings come from `arguments.py`, file names from `runs.py`.
"""

from __future__ import annotations

import platform
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PrinterCallback, Trainer, set_seed
from transformers.utils import logging

from gpt2small_hf.data.dataset import TokenDataset, collate, read_meta
from gpt2small_hf.data.tokens import prepare
from gpt2small_hf.evaluation.completions import complete
from gpt2small_hf.evaluation.heldout import heldout_losses, measures, seen_in_training, unigram_losses
from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.report.charts import draw_loss
from gpt2small_hf.report.tables import console_table, heldout_rows
from gpt2small_hf.runs import DataFolder, RunFolder, UsageError, append_jsonl, made_by, read_json, whole, write_json
from gpt2small_hf.training.arguments import Arguments
from gpt2small_hf.training.callbacks import MetricsLog, ProgressLine, duration


def train(args: Arguments) -> RunFolder:
    """Do the whole run.

    Raises: UsageError for anything a user can fix, before the first step.
    """
    began = time.perf_counter()
    logging.disable_progress_bar()  # the run has its own; a bar a saved file would push it off the screen
    run = RunFolder(args.run.output_dir)
    check_folder(run, overwrite=args.run.overwrite, resume=args.trainer.resume_from_checkpoint)
    with args.trainer.main_process_first(local=False, desc="preparing the data"):
        data_dir = find_data(args)
    tokenizer = AutoTokenizer.from_pretrained(DataFolder(data_dir).tokenizer)
    config = build_config(args, data_dir)
    seq_len = args.run.seq_len or config.max_position_embeddings
    if seq_len > config.max_position_embeddings:
        raise UsageError(
            f"seq_len is {seq_len}, the model takes {config.max_position_embeddings}. "
            f"Lower --seq_len, or raise --max_position_embeddings to {seq_len}."
        )
    rows = TokenDataset(data_dir, "train", seq_len)
    heldout = TokenDataset(data_dir, "validation", seq_len, max_rows=args.run.max_eval_samples)

    set_seed(args.trainer.seed)
    model = GPT2SmallForCausalLM(config)
    if config.tie_word_embeddings:
        # Saved under the embedding's name alone; Trainer would report it missing whenever it resumes.
        model._keys_to_ignore_on_save = {"lm_head.weight"}
    trainer = build_trainer(args, run, model, tokenizer, rows, heldout)
    first = trainer.is_world_process_zero()
    if first:
        begin_folder(args, run, data_dir, config)
        tokens_per_step = args.trainer.train_batch_size * args.trainer.gradient_accumulation_steps * seq_len
        print(
            f"{model.num_parameters():,} parameters · {len(rows):,} rows of {seq_len} tokens to train on, "
            f"{len(heldout):,} held out · {tokens_per_step * args.trainer.world_size:,} tokens a step"
        )

    before = heldout_losses(model, heldout, batch_size=args.trainer.eval_batch_size) if first else None
    if before is not None and not run.metrics.exists():
        append_jsonl(run.metrics, {"step": 0, "eval_loss": before.mean()})
    trainer.train(resume_from_checkpoint=_resume(args.trainer.resume_from_checkpoint))
    if before is not None:
        finish_folder(args, run, data_dir, trainer, tokenizer, rows, heldout, before)
        print(f"done in {duration(time.perf_counter() - began)} · wrote {run.root}")
        print(f"next: python examples/use_from_hub.py {run.model}")
    return run


# ---- before the first step ---------------------------------------------------------------------------------------


def check_folder(run: RunFolder, *, overwrite: bool, resume: str | None) -> None:
    """See that the run folder is free, or that the user said what to do with what is in it.

    Raises: UsageError otherwise.
    """
    if not run.root.exists() or (run.root.is_dir() and not any(run.root.iterdir())):
        return
    if not run.resolved.exists():
        raise UsageError(f"{run.root} exists and is not a run folder. Choose another with --output_dir.")
    if overwrite or resume:
        return
    if run.finished:
        raise UsageError(
            f"{run.root} holds a finished run. Do it again with --overwrite, or choose another --output_dir."
        )
    raise UsageError(
        f"{run.root} holds a run that did not finish. Go on with --resume_from_checkpoint true, "
        "or begin again with --overwrite."
    )


def find_data(args: Arguments) -> Path:
    """The prepared folder: the one named, or the text named, prepared now.

    Raises: UsageError when both are named, or as `prepare` does.
    """
    if args.run.data_dir is None:
        return prepare(args.data, None)
    named = [name for name in ("text", "dataset", "validation_text", "tokenizer") if getattr(args.data, name)]
    if named:
        raise UsageError(f"--data_dir and --{named[0]} exclude each other: a prepared folder has text and tokenizer.")
    read_meta(args.run.data_dir)
    return args.run.data_dir


def build_config(args: Arguments, data_dir: Path) -> GPT2SmallConfig:
    """The model's configuration: sizes from the flags, vocabulary and special ids from the tokenizer.

    Raises: UsageError for sizes that do not fit together.
    """
    meta = read_meta(data_dir)["tokenizer"]
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), meta["eos_token_id"])
    try:
        return GPT2SmallConfig(vocab_size=meta["vocab_size"], **ids, **vars(args.model))
    except StrictDataclassError as error:
        raise UsageError(" ".join(str(error).split())) from None


def build_trainer(
    args: Arguments,
    run: RunFolder,
    model: GPT2SmallForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: TokenDataset,
    heldout: TokenDataset,
) -> Trainer:
    """HF's Trainer with our rows, our files and our progress line.

    Raises: UsageError when the arguments and the rows do not fit.
    """
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokens_per_step = args.trainer.train_batch_size * args.trainer.gradient_accumulation_steps * rows.seq_len
    trainer = Trainer(
        model=model,
        args=args.trainer,
        data_collator=collate,
        train_dataset=rows,
        eval_dataset=heldout,
        processing_class=tokenizer,
        callbacks=[MetricsLog(run.metrics), ProgressLine(tokens_per_step * args.trainer.world_size)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def begin_folder(args: Arguments, run: RunFolder, data_dir: Path, config: GPT2SmallConfig) -> None:
    """Write the recipe as given and every value in force, before the first step."""
    if args.run.overwrite and run.root.exists():
        shutil.rmtree(run.root)
    run.root.mkdir(parents=True, exist_ok=True)
    with whole(run.recipe) as temporary:
        shutil.copyfile(args.recipe, temporary)
    device = args.trainer.device
    write_json(
        run.resolved,
        {
            "run": {name: _plain(value) for name, value in vars(args.run).items()},
            "data": {"folder": str(data_dir), "fingerprint": read_meta(data_dir)["fingerprint"]},
            "model": config.to_diff_dict(),
            "trainer": {name: _plain(value) for name, value in args.trainer.to_dict().items()},
            "device": {
                "type": device.type,
                "name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
                "count": args.trainer.world_size,
                "threads": torch.get_num_threads(),
            },
            "made_by": made_by([args.recipe]),
        },
    )


# ---- after the last step -----------------------------------------------------------------------------------------


def finish_folder(
    args: Arguments,
    run: RunFolder,
    data_dir: Path,
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    rows: TokenDataset,
    heldout: TokenDataset,
    before: np.ndarray,
) -> None:
    """Write the model, measure it, draw its chart and let it speak. `heldout.json`, written last, ends the run."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    assert isinstance(model, GPT2SmallForCausalLM)
    save_model(model, tokenizer, run.model)

    after = heldout_losses(model, heldout, batch_size=args.trainer.eval_batch_size)
    unigram = unigram_losses(rows, heldout, vocab_size=model.config.vocab_size)
    new = ~seen_in_training(rows, heldout)
    scale = heldout.bytes_per_token
    measured = {
        "rows": {"rows": len(heldout), "seq_len": heldout.seq_len, "predicted_tokens": new.size},
        "before": measures(before, scale),
        "unigram": measures(unigram, scale),
        "after": measures(after, scale),
        # Held-out tokens that do not stand in the training text too; None if all do.
        "new_text": {"share": new.mean(), **measures(after[new], scale)} if new.any() else None,
        "made_by": made_by([run.model / "model.safetensors", DataFolder(data_dir).meta]),
    }
    draw_loss(run.metrics, run.loss_chart, title=run.root.name, unigram=measured["unigram"]["loss"])
    completions = complete(model, tokenizer, args.run.prompts)
    write_json(run.completions, {"completions": completions, "made_by": made_by([run.model / "model.safetensors"])})
    write_json(run.heldout, measured)

    for completion in completions:
        print(f"\nsample: {completion['prompt']} ▸{completion['sampled']}")
    print(f"\n{console_table(*heldout_rows(read_json(run.heldout)))}\n")


def save_model(model: GPT2SmallForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights, config, code, tokenizer and generation settings: all that a stranger needs, in one folder."""
    context = model.config.max_position_embeddings
    if context < 512:
        # The pipeline asks for 256 new tokens unless the model says otherwise, which a short context cannot hold.
        model.generation_config.max_new_tokens = context // 2
    with whole(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def _resume(value: str | None) -> str | bool | None:
    return True if value is not None and value.lower() == "true" else value


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
