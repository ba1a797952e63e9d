"""One run: text or prepared rows → a run folder with a model that loads anywhere, its measure and its chart.

Assembles the other rooms around HF's `Trainer`. Settings come from `arguments.py`, file names from `runs.py`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import shutil
import stat
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase, PrinterCallback, Trainer
from transformers.utils import logging

from gpt2small_hf.data.dataset import TokenDataset, collate, read_meta
from gpt2small_hf.data.tokenizer import load_tokenizer
from gpt2small_hf.data.tokens import prepare
from gpt2small_hf.evaluation.completions import complete
from gpt2small_hf.evaluation.heldout import heldout_losses, measures, seen_in_training, unigram_losses
from gpt2small_hf.flags import recipe_text
from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.model.gpt import init_weights
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.report.charts import draw_loss
from gpt2small_hf.report.tables import console_table, heldout_rows
from gpt2small_hf.runs import (
    DataFolder,
    RunFolder,
    RunStoppedError,
    UsageError,
    append_jsonl,
    made_by,
    read_json,
    whole,
    write_json,
)
from gpt2small_hf.training.arguments import ALTERNATIVES, Arguments
from gpt2small_hf.training.budget import steps_for, wanted_tokens
from gpt2small_hf.training.callbacks import MetricsLog, ProgressLine, duration
from gpt2small_hf.training.trainer import LanguageModelTrainer


def train(args: Arguments) -> RunFolder:
    """Do the whole run.

    Raises: UsageError for anything a user can fix, before the first step.
    """
    began = time.perf_counter()
    logging.disable_progress_bar()  # the run has its own; a bar a saved file would push it off the screen
    if args.run.num_threads is not None:
        torch.set_num_threads(args.run.num_threads)
    run = RunFolder(args.run.output_dir)
    checkpoint = find_checkpoint(run, args.trainer.resume_from_checkpoint)
    check_folder(run, overwrite=args.run.overwrite, resume=checkpoint is not None)
    seq_len = check_sizes(args)
    with args.trainer.main_process_first(local=False, desc="preparing the data"):
        data_dir = find_data(args)
    tokenizer = load_tokenizer(str(DataFolder(data_dir).tokenizer))
    meta = read_meta(data_dir)
    vocabulary = meta["tokenizer"]
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), vocabulary["eos_token_id"])
    config = GPT2SmallConfig(vocab_size=vocabulary["vocab_size"], **ids, **vars(args.model))
    tokens_per_step = (
        args.trainer.train_batch_size * args.trainer.gradient_accumulation_steps * args.trainer.world_size * seq_len
    )
    tokens = wanted_tokens(config, args.run.tokens, args.run.tokens_per_parameter, args.run.parameters_counted)
    if tokens is not None:
        args.trainer.max_steps = steps_for(tokens, tokens_per_step)
    if checkpoint is not None:
        check_resume(run, checkpoint, args, config, meta["fingerprint"])
    rows = TokenDataset(data_dir, "train", seq_len)
    heldout = TokenDataset(data_dir, "validation", seq_len, max_rows=args.run.max_eval_samples)

    described = config.to_diff_dict()  # before the Trainer turns use_cache off in it
    model = GPT2SmallForCausalLM(config)
    draw_weights(model, args.trainer.seed if args.run.init_seed is None else args.run.init_seed)
    if config.tie_word_embeddings:
        # Saved under the embedding's name alone; Trainer would report it missing whenever it resumes.
        model._keys_to_ignore_on_save = {"lm_head.weight"}
    progress = ProgressLine(tokens_per_step)
    tokenizer.model_max_length = config.max_position_embeddings
    try:
        trainer = LanguageModelTrainer(
            model=model,
            args=args.trainer,
            data_collator=collate,
            train_dataset=rows,
            eval_dataset=heldout,
            processing_class=tokenizer,
            decay=args.run.decay,
            spike_factor=args.run.spike_factor,
            max_bad_steps=args.run.max_bad_steps,
            callbacks=[MetricsLog(run.metrics), progress],
        )
    except (ImportError, RuntimeError, ValueError) as error:  # a reporter or kernel that is not installed, say
        raise UsageError(" ".join(str(error).split())) from error
    trainer.remove_callback(PrinterCallback)
    first = trainer.is_world_process_zero()
    if first:
        begin_folder(args, run, data_dir, described)
        print(
            f"{model.num_parameters():,} parameters · {len(rows):,} rows of {seq_len} tokens to train on, "
            f"{len(heldout):,} held out · {tokens_per_step:,} tokens a step"
        )

    before = heldout_losses(model, heldout, batch_size=args.trainer.eval_batch_size) if first else None
    if before is not None and not run.metrics.exists():
        append_jsonl(run.metrics, {"step": 0, "eval_loss": before.mean()})
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except ImportError as error:  # an optimizer that is not installed
        raise UsageError(" ".join(str(error).split())) from error
    except RunStoppedError as error:
        good = next((str(path) for path in whole_checkpoints(run)), None)
        raise RunStoppedError(f"{error} Last good checkpoint: {good or 'none was saved'}.") from None
    finally:
        progress.close()
    if before is not None:
        finish_folder(args, run, data_dir, trainer, tokenizer, rows, heldout, before)
        print(f"done in {duration(time.perf_counter() - began)} · wrote {run.root}")
        print(f"next: python {_example('use_from_hub.py')} {shlex.quote(str(run.model))}")
    return run


# ---- before the first step ---------------------------------------------------------------------------------------


def find_checkpoint(run: RunFolder, named: str | None) -> str | None:
    """The checkpoint to go on from: the folder named, or for "true" the run's newest.

    Raises: UsageError when there is none.
    """
    if named is None or named.lower() == "false":
        return None
    if named.lower() == "true":
        checkpoint = next(whole_checkpoints(run), None)
        if checkpoint is None:
            raise UsageError(f"{run.checkpoints} holds no checkpoint to go on from. Begin again with --overwrite.")
        return str(checkpoint)
    if not is_whole(Path(named)):
        raise UsageError(f"{named} is not a whole checkpoint (trainer_state.json, model, optimizer and scheduler).")
    return named


def whole_checkpoints(run: RunFolder) -> Iterator[Path]:
    """The run's checkpoints that can be resumed from, newest first; says which ones it passes over."""
    checkpoints = run.checkpoints.glob("checkpoint-*")
    for path in sorted(checkpoints, key=lambda path: (len(path.name), path.name), reverse=True):
        if is_whole(path):
            yield path
        else:
            print(f"passing over {path}: it was not written to its end.", file=sys.stderr)


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint can be resumed from: a killed process leaves some files out, or cut short."""
    try:
        with safe_open(checkpoint / "model.safetensors", framework="pt"):  # compares the file's length to its header
            pass
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, SafetensorError, ValueError):
        return False
    return all(zipfile.is_zipfile(checkpoint / name) for name in ("optimizer.pt", "scheduler.pt"))


def check_resume(run: RunFolder, checkpoint: str, args: Arguments, config: GPT2SmallConfig, fingerprint: str) -> None:
    """See that the run goes on with the model and the text that it was begun with, and that steps are left.

    Raises: UsageError otherwise.
    """
    if run.resolved.exists():
        before = read_json(run.resolved)
        if before["data"]["fingerprint"] != fingerprint:
            raise UsageError(
                f"{run.root} was begun with other text ({before['data']['folder']}). Resume with that, "
                "or begin another run with --output_dir."
            )
        then, now = before["model"], config.to_diff_dict()
        if differs := [name for name in then | now if then.get(name) != now.get(name)]:
            raise UsageError(
                f"{run.root} was begun with another model (they differ in {', '.join(differs)}). "
                "Resume without that change, or begin another run with --output_dir."
            )
    done = read_json(Path(checkpoint) / "trainer_state.json")["global_step"]
    if 0 < args.trainer.max_steps <= done:
        raise UsageError(f"{checkpoint} is at step {done}: nothing is left of {args.trainer.max_steps} steps.")


def check_folder(run: RunFolder, *, overwrite: bool, resume: bool) -> None:
    """See that the run folder is free, or that the user said what to do with what is in it.

    Raises: UsageError otherwise.
    """
    if not run.root.exists() or (run.root.is_dir() and not any(run.root.iterdir())):
        return
    if not run.resolved.exists():
        raise UsageError(f"{run.root} exists and is not a run folder. Choose another with --output_dir.")
    if overwrite and resume:
        raise UsageError("--overwrite begins again and --resume_from_checkpoint goes on. Leave one out.")
    if overwrite or resume:
        return
    if run.finished:
        raise UsageError(
            f"{run.root} holds a finished run. Do it again with --overwrite, or choose another --output_dir."
        )
    go_on = "Go on with --resume_from_checkpoint true, or begin" if any(run.checkpoints.glob("*")) else "Begin"
    kept = f" The run it was to replace is kept in {run.former}." if run.former.exists() else ""
    raise UsageError(f"{run.root} holds a run that did not finish. {go_on} again with --overwrite.{kept}")


def check_sizes(args: Arguments) -> int:
    """See that model and rows fit together, before any text is prepared for them. Returns: `seq_len`.

    Raises: UsageError for sizes that do not.
    """
    try:
        config = GPT2SmallConfig(**vars(args.model))
    except StrictDataclassError as error:
        raise UsageError(str(error).split("Error: ")[-1].strip()) from None
    limit = config.max_position_embeddings
    seq_len = limit if args.run.seq_len is None else args.run.seq_len
    if not 2 <= seq_len <= limit:
        raise UsageError(
            f"seq_len is {seq_len}; a row has from 2 to {limit} tokens (max_position_embeddings). "
            "Change --seq_len or --max_position_embeddings."
        )
    return seq_len


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
    if args.run.overwrite and args.run.data_dir.resolve().is_relative_to(args.run.output_dir.resolve()):
        raise UsageError(f"{args.run.data_dir} lies in the run folder that --overwrite replaces. Move it out.")
    return args.run.data_dir


def draw_weights(model: GPT2SmallForCausalLM, seed: int) -> None:
    """Draw the initial weights, each module's from a seed of its own, made of `seed` and the module's name.

    So two models that differ in one setting (a bias, a head, a layer more) start with the same weights elsewhere.
    """
    for name, module in model.named_modules():
        if module is model.lm_head and model.config.tie_word_embeddings:
            continue  # it is the embedding
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big"))
        init_weights(module, model.config)


def begin_folder(args: Arguments, run: RunFolder, data_dir: Path, model: dict[str, Any]) -> None:
    """Write the recipe as given and every value in force, before the first step.

    A run that is there already, and is to be overwritten, steps aside until this one is finished.
    """
    recipe, made = recipe_text(args.recipe, ALTERNATIVES), made_by([args.recipe])
    if args.run.overwrite and run.root.exists():
        if run.former.exists():  # this is a run that did not finish, over one that may have
            shutil.rmtree(run.root)
        else:
            run.root.rename(run.former)
    run.root.mkdir(parents=True, exist_ok=True)
    with whole(run.recipe) as temporary:
        temporary.write_text(recipe, encoding="utf-8")
    device = args.trainer.device
    write_json(
        run.resolved,
        {
            "run": {name: _plain(value) for name, value in vars(args.run).items()},
            "data": {"folder": str(data_dir), "fingerprint": read_meta(data_dir)["fingerprint"]},
            "model": model,
            "trainer": {name: _plain(value) for name, value in args.trainer.to_dict().items()},
            "device": {
                "type": device.type,
                "name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
                "count": args.trainer.world_size,
                "threads": torch.get_num_threads(),
            },
            "made_by": made,
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
    after = heldout_losses(model, heldout, batch_size=args.trainer.eval_batch_size)
    if not np.isfinite(after).all():
        raise UsageError(
            "the trained model's held-out loss is not finite, so the model was not saved. Lower --learning_rate; "
            f"{run.metrics} shows when it broke."
        )
    save_model(model, tokenizer, run.model)
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
    if run.former.exists():
        shutil.rmtree(run.former)

    for completion in completions:
        print(f"\nsample: {completion['prompt']} ▸{completion['sampled']}")
    print(f"\n{console_table(*heldout_rows(read_json(run.heldout)))}\n")


def save_model(model: GPT2SmallForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights, config, code, tokenizer and generation settings: all that a stranger needs, in one folder."""
    model.config.use_cache = True  # the Trainer turns it off for training
    model.generation_config._from_model_config = False
    context = model.config.max_position_embeddings
    if context < 512:
        # The pipeline asks for 256 new tokens unless the model says otherwise, which a short context cannot hold.
        model.generation_config.max_new_tokens = context // 2
    with whole(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for path in temporary.iterdir():  # safetensors makes files that only their owner may read
            path.chmod(stat.S_IMODE((temporary / "config.json").stat().st_mode))


def _example(name: str) -> str:
    """Path of an example, as it can be typed in the current folder."""
    path = Path(__file__).parents[2] / "examples" / name
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
