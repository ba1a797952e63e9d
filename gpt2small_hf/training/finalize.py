"""A trained model → the finished run folder: model, held-out losses, completions, charts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from gpt2small_hf.config.resolve import RunConfig
from gpt2small_hf.errors import RunStoppedError
from gpt2small_hf.evaluation.task import EvaluationInputs
from gpt2small_hf.evaluation.tasks import notes, run_tasks, save_results, tables
from gpt2small_hf.formatting import console_table
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.report.charts import draw_charts
from gpt2small_hf.report.notes import NOTHING_HELD_OUT, kept_line, worse_line
from gpt2small_hf.runs.files import atomic_write, set_default_permissions
from gpt2small_hf.runs.layout import RunFolder, number_of
from gpt2small_hf.runs.provenance import made_by
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.training.inputs import RunInputs
from gpt2small_hf.training.trainer import CausalLMTrainer


def finalize(config: RunConfig, inputs: RunInputs, trainer: CausalLMTrainer, model: GPT2SmallForCausalLM) -> None:
    """Write the model, its held-out loss, completions and charts. `heldout.json` marks the run as finished.

    Args:
        config: the settings of the run.
        inputs: data and tokenizer.
        trainer: after training.
        model: the trained model, without adapters.

    Raises: RunStoppedError if the model's loss is not finite.
    """
    run, args, state = config.folder, trainer.args, trainer.state
    best, last_step = state.best_model_checkpoint, state.global_step
    step = number_of(Path(best)) if args.load_best_model_at_end and best else last_step
    rows, tokenizer = inputs.rows, inputs.tokenizer
    measured_on = EvaluationInputs(
        tokenizer=tokenizer,
        heldout=inputs.heldout,
        train=rows,
        prompts=config.run.prompts or [],
        is_chat=rows.is_chat,
        loss_before=Run(run).loss_before_nats,
        max_answers=config.run.max_answers,
        batch_size=args.eval_batch_size,
    )
    if inputs.heldout and not np.isfinite(measured_on.losses(model)).all():
        raise RunStoppedError(
            "the trained model's held-out loss is not finite, so the model was not saved. Lower --learning_rate; "
            f"{run.metrics} shows when it stopped being finite."
        )
    save_model(model, tokenizer, run.model)
    results = run_tasks(model, measured_on)
    made = made_by([run.model / "model.safetensors", run.model / "tokenizer.json", *inputs.inputs])
    measured = save_results(run, results, seq_len=rows.seq_len, step=step, last_step=last_step, made_by=made)
    draw_charts(run)
    if run.former.exists():
        shutil.rmtree(run.former)

    _print_results(results, kept=kept_line(step, last_step), has_heldout=inputs.heldout is not None)
    print()
    if worse := worse_line(measured, Run(run).train_loss_nats):
        print(f"warning: {worse}\n")


def _print_results(results: dict[str, Any], *, kept: str | None, has_heldout: bool) -> None:
    texts = {name: results.pop(name) for name in ("completions",) if name in results}
    tables_printed = [console_table(table[0], table[1:]) for table in tables(results)]
    nothing_held_out = [] if has_heldout else [NOTHING_HELD_OUT]
    for block in (*notes(texts), *tables_printed, *nothing_held_out, kept, *notes(results)):
        if block:
            print(f"\n{block}")


def merge_adapter(model: Any, run: RunFolder) -> GPT2SmallForCausalLM:
    """Return the model without adapters. If it has one, the adapter is saved first and merged."""
    if isinstance(model, GPT2SmallForCausalLM):
        return model
    with atomic_write(run.adapter) as temporary:
        # With new tokens, peft would save all rows of the embedding and the head, also those of the base model.
        model.save_pretrained(temporary, save_embedding_layers=False)
        (temporary / "README.md").unlink(missing_ok=True)  # an empty template
        set_default_permissions(temporary)
    return model.merge_and_unload()


def save_model(model: GPT2SmallForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights, config, code, tokenizer and generation settings. Users need only `torch` and `transformers`."""
    model.config.use_cache = True  # the Trainer turns it off for training
    model.generation_config._from_model_config = False
    context = model.config.max_position_embeddings
    # The pipeline asks for 256 new tokens unless the model sets a length, which a short context cannot hold. The length
    # is a max_length: a max_new_tokens would also override the max_length of a caller.
    model.generation_config.max_length = context if context < 512 else None
    if context < 512:
        model.generation_config.max_new_tokens = None
    with atomic_write(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        set_default_permissions(temporary)
