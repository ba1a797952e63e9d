"""A recipe → an estimate of what its run needs. The arithmetic is in `training/budget.py`."""

from __future__ import annotations

from pathlib import Path

import torch

from gpt2small_hf.config.commands import PlanArguments
from gpt2small_hf.config.resolve import RunConfig, check_sizes
from gpt2small_hf.data.tokenizer import load_tokenizer
from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import byte_size, console_table
from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.training import budget
from gpt2small_hf.training.checkpoint_files import is_complete
from gpt2small_hf.training.inputs import build_run_inputs
from gpt2small_hf.training.resume import steps_of_branch
from gpt2small_hf.training.run_record import rows_per_step


def estimate(run_config: RunConfig, target: PlanArguments) -> str:
    """Return the estimate as text.

    Prepared rows are opened and counted, as training counts them; text is prepared only if the run has a base model.

    Raises: UsageError for invalid sizes, or if the length of the run is unknown.
    """
    n_devices = target.n_devices or max(1, torch.cuda.device_count())
    branch_from = run_config.run.branch_from
    if branch_from is not None and not is_complete(branch_from):
        raise UsageError(
            f"--branch_from {branch_from} is not a complete checkpoint. Name a folder checkpoint-<step> of a run."
        )
    inputs, one_pass = None, None
    if run_config.run.init_from is not None or run_config.run.data_dir is not None:
        inputs = build_run_inputs(run_config, n_devices)
        run_config, config = inputs.run_config, inputs.config
        seq_len, tokens_per_row = inputs.rows.seq_len, inputs.rows.tokens_per_row
        vocabulary_source = f"({run_config.run.init_from or run_config.run.data_dir})"
        one_pass = budget.one_pass(len(inputs.rows), run_config.trainer, n_devices)
    else:
        seq_len = tokens_per_row = check_sizes(run_config)
        vocab_size, vocabulary_source = vocabulary(run_config)
        no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        config = GPT2SmallConfig(vocab_size=vocab_size, **no_ids, **vars(run_config.model))
    n, n_rows = budget.sizes(config), rows_per_step(run_config, n_devices)
    per_step = round(n_rows * tokens_per_row)
    total = steps_of_run(run_config, config, per_step, inputs and len(inputs.rows), n_devices)
    # A branch trains only the steps after its checkpoint.
    steps = total if branch_from is None else steps_of_branch(branch_from, total)
    seen, prepared = steps * per_step, None
    if inputs is not None and one_pass is not None:
        seen = round((one_pass.rows_in(total) - one_pass.rows_in(total - steps)) * tokens_per_row)
        available = round(len(inputs.rows) * tokens_per_row)
        prepared = f"{available:,} tokens in {len(inputs.rows):,} rows, {seen / available:.1f} passes"
    a_token = budget.flops_per_token(config, seq_len, run_config.run.lora_rank)
    up_to = "up to " if run_config.chat.chat_data else ""
    facts = {
        "model": f"{n.total:,} parameters, {n.non_embedding:,} without embeddings",
        "vocab": f"{config.vocab_size:,} entries {vocabulary_source}",
        "tokens": f"{seen:,}: {seen / n.total:.1f} a parameter, {seen / n.non_embedding:.1f} without embeddings",
        "text": prepared,
        "steps": f"{steps:,} of {per_step:,} tokens ({n_rows:,} rows of {up_to}{seq_len:,})",
        "compute": f"{a_token * seen:.2e} FLOPs, {a_token:,} a token (PaLM's count)",
        "time": time_needed(a_token * seen, target, n_devices, budget.precision_of(run_config.trainer)),
        "disk": disk_needed(n.total, steps, run_config, one_pass),
    }
    lines = [f"{name:<9}{fact}" for name, fact in facts.items() if fact]
    if run_config.run.init_from is None:  # the rules are of training from initial weights
        lines += ["", advice(config, seen, n_rows, seq_len, run_config)]
    return "\n".join(lines)


def steps_of_run(
    run_config: RunConfig, config: GPT2SmallConfig, tokens_per_step: int, n_rows: int | None, n_devices: int
) -> int:
    """Return the optimizer steps of a run. Raises: UsageError if its epochs have an unknown number of rows."""
    run, trainer = run_config.run, run_config.trainer
    steps = budget.steps_for_tokens(config, run, tokens_per_step)
    if steps is not None:
        return steps
    if trainer.max_steps > 0:
        return trainer.max_steps
    if n_rows is not None:
        return budget.steps_of_epochs(n_rows, trainer, n_devices)
    raise UsageError(
        "the length of this run is unknown, because its text is not prepared yet. Pass --max_steps, --tokens or "
        "--tokens_per_parameter, or prepare the text and name it with --data_dir."
    )


def vocabulary(run_config: RunConfig) -> tuple[int, str]:
    """Return the size of the vocabulary of text that is not prepared yet, and its source."""
    if run_config.data.trains_tokenizer:
        return run_config.data.new_vocab_size, "(to be trained)"
    assert run_config.data.tokenizer is not None
    if Path(run_config.data.tokenizer).is_dir():
        return len(load_tokenizer(run_config.data.tokenizer)), f"({run_config.data.tokenizer})"
    return GPT2SmallConfig().vocab_size, f"(GPT-2's; {run_config.data.tokenizer} was not looked up)"


def time_needed(flops: float, target: PlanArguments, n_devices: int, precision: str) -> str:
    """Return the hours on the device, if its peak in this precision is known."""
    device = target.device_name or (torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    known = None if device is None else budget.find_device(device)
    if known is None:
        return f"unknown: {device or 'no GPU'} here. Name one: --device_name H100 --n_devices 8"
    peak = budget.peak_flops(known, precision)
    if peak is None:
        return f"unknown: the {known} does not compute in {precision}. Use --fp16, or none of --fp16, --bf16 and --tf32"
    hours = flops / (peak * n_devices) / 3600  # at 100 %
    where, of_peak = f"on {n_devices} x {known}", f"of {peak / 1e12:,.4g} TFLOP/s in {precision}"
    measured = budget.measured_mfu(precision)
    low, high = min(measured.values()), max(measured.values())
    if target.mfu is not None:
        text = f"{hours / target.mfu:.1f} h {where} at {target.mfu:.0%} {of_peak}"
        if known in measured:
            text += f" (measured by the reference series: {measured[known]:.0%}, {hours / measured[known]:.1f} h)"
        return text
    if known in measured:
        share = measured[known]
        return f"{hours / share:.1f} h {where} at {share:.0%} {of_peak}, as the reference series measured there"
    span = f"{hours / high:.1f} to {hours / low:.1f} h" if high > low else f"{hours / low:.1f} h"
    shares = f"{high:.0%} to {low:.0%}" if high > low else f"{low:.0%}"
    others = " and ".join(measured)
    return f"{span} {where} at {shares} {of_peak}, as the reference series measured on {others}; --mfu sets it"


def disk_needed(n_parameters: int, steps: int, run_config: RunConfig, one_pass: budget.Pass | None) -> str:
    """Return the space of the checkpoints that are kept, of one more while it is written, and of the model."""
    kept, most = budget.checkpoints_saved(run_config.trainer, steps, one_pass and one_pass.steps)
    model = budget.BYTES_A_NUMBER * n_parameters
    one = model if run_config.trainer.save_only_model else 3 * model
    needed = byte_size(budget.disk_bytes(model, most, run_config.trainer))
    return f"{needed} at most: {kept} checkpoints of {byte_size(one)} kept, and the model"


def advice(config: GPT2SmallConfig, tokens: int, rows: int, seq_len: int, run_config: RunConfig) -> str:
    """Return a table of the recipe's values and those of rules of thumb. Nothing is changed."""
    C, N = budget.deepseek_flops(config, seq_len, tokens), budget.sizes(config).total
    rate, batch = run_config.trainer.learning_rate, rows * seq_len
    tau = budget.cerebras_timescale(tokens / N)
    decay = budget.cerebras_weight_decay(batch, rate, tokens, tokens / N)
    n_rows = budget.cerebras_batch_rows(tokens)
    lines = [
        ["learning rate: 0.3118·C^-0.1250 (DeepSeek)", f"{rate:.2e}", f"{budget.deepseek_learning_rate(C):.2e}"],
        ["tokens a step: 0.2920·C^0.3271 (DeepSeek)", f"{batch:,}", f"{budget.deepseek_batch_tokens(C):,.0f}"],
        ["tokens a step: 0.0306·D^0.383 rows (Power Lines)", f"{batch:,}", f"{n_rows * 2048:,.0f}"],
        ["weight decay: B/(lr·D·tau) (Power Lines)", f"{run_config.trainer.weight_decay:.3g}", f"{decay:.3g}"],
    ]
    notes = [
        f"C = {C:.2e} FLOPs, without embeddings and head: (72·L·d² + 12·L·d·T)·D",
        f"D = {tokens:,} tokens, N = {N:,} parameters (all), tau = 1.084·(D/N)^-0.527 = {tau:.3f}",
        f"B = {batch:,} tokens a step of the recipe, lr its learning rate",
        f"Power Lines: {n_rows:.1f} rows, of 2,048 tokens in its paper; of {seq_len:,}: {n_rows * seq_len:,.0f} tokens",
    ]
    return "\n".join([console_table(["rules of thumb", "recipe", "rule"], lines), *notes])
