"""What a run takes, before anything runs: `python -m gpt2small_hf plan [recipe.yaml] [--flag value …]`.

The arithmetic is in `training/budget.py`; here the answer is put together.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gpt2small_hf.config.resolve import Arguments, check_sizes
from gpt2small_hf.data.tokenizer import load_tokenizer
from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import byte_size
from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.report.tables import console_table
from gpt2small_hf.training import budget
from gpt2small_hf.training.checkpoint_files import is_complete
from gpt2small_hf.training.inputs import build_run_inputs
from gpt2small_hf.training.resume import steps_of_branch

if TYPE_CHECKING:
    from gpt2small_hf.commands.plan import PlanArguments


def describe(args: Arguments, plan: PlanArguments) -> str:
    """The plan as text. Raises: UsageError for sizes that do not fit together, or if the length of the run is unknown.

    Rows that are there already are opened and counted, as training counts them; text is not prepared for a plan, unless
    the run starts from a model.
    """
    n_devices = plan.n_devices or max(1, torch.cuda.device_count())
    is_ready = args.run.init_from is not None or args.run.data_dir is not None
    inputs = build_run_inputs(args, n_devices) if is_ready else None
    if args.run.branch_from is not None and not is_complete(args.run.branch_from):
        raise UsageError(f"--branch_from {args.run.branch_from} is not a whole checkpoint: name a folder of a run's.")
    if inputs is not None:
        config, seq_len, tokens_a_row = inputs.config, inputs.rows.seq_len, inputs.rows.tokens_per_row
        vocab_size, whence = config.vocab_size, f"({args.run.init_from or args.run.data_dir})"
        one_pass = budget.one_pass(len(inputs.rows), args.trainer, n_devices)
    else:
        seq_len = tokens_a_row = check_sizes(args)
        vocab_size, whence = vocabulary(args)
        no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        config = GPT2SmallConfig(vocab_size=vocab_size, **no_ids, **vars(args.model))
        one_pass = None
    n = budget.sizes(config)
    rows = args.trainer.per_device_train_batch_size * args.trainer.gradient_accumulation_steps * n_devices
    per_step = round(rows * tokens_a_row)
    tokens = budget.wanted_tokens(config, args.run.tokens, args.run.tokens_per_parameter, args.run.parameters_counted)
    if tokens is not None:
        total = budget.steps_for(tokens, per_step)
    elif args.trainer.max_steps > 0:
        total = args.trainer.max_steps
    elif inputs is not None:
        total = budget.steps_of_epochs(len(inputs.rows), args.trainer, n_devices)
    else:
        raise UsageError(
            "the length of this run is unknown, because its text is not prepared yet. Pass --max_steps, --tokens or "
            "--tokens_per_parameter, or prepare the text and name it with --data_dir."
        )
    # A branch trains only what follows its checkpoint.
    steps = total if args.run.branch_from is None else steps_of_branch(args.run.branch_from, total)
    seen = steps * per_step
    prepared = None
    if inputs is not None and one_pass is not None:
        seen = round((one_pass.rows_in(total) - one_pass.rows_in(total - steps)) * tokens_a_row)
        there = round(len(inputs.rows) * tokens_a_row)
        prepared = f"{there:,} tokens in {len(inputs.rows):,} rows, {seen / there:.1f} passes"
    a_token = budget.flops_per_token(config, seq_len, args.run.lora_rank)
    up_to = "up to " if args.chat.chat_data else ""
    facts = {
        "model": f"{n.total:,} parameters, {n.non_embedding:,} without embeddings",
        "words": f"{vocab_size:,} entries in the vocabulary {whence}",
        "tokens": f"{seen:,}: {seen / n.total:.1f} a parameter, {seen / n.non_embedding:.1f} without embeddings",
        "text": prepared,
        "steps": f"{steps:,} of {per_step:,} tokens ({rows:,} rows of {up_to}{seq_len:,})",
        "compute": f"{a_token * seen:.2e} FLOPs, {a_token:,} a token (PaLM's count)",
        "time": time_needed(a_token * seen, plan, n_devices, budget.precision_of(args.trainer)),
        "disk": disk_needed(n.total, steps, args, one_pass),
    }
    lines = [f"{name:<9}{fact}" for name, fact in facts.items() if fact]
    if args.run.init_from is not None:  # the rules are of training from initial weights
        return "\n".join(lines)
    return "\n".join([*lines, "", advice(config, seen, rows, seq_len, args)])


def vocabulary(args: Arguments) -> tuple[int, str]:
    """Size of the vocabulary of text that is not prepared yet, and where it is from."""
    if args.data.trains_tokenizer:
        return args.data.new_vocab_size, "(to be trained)"
    assert args.data.tokenizer is not None
    if Path(args.data.tokenizer).is_dir():
        return len(load_tokenizer(args.data.tokenizer)), f"({args.data.tokenizer})"
    return GPT2SmallConfig().vocab_size, f"(GPT-2's; {args.data.tokenizer} was not looked up)"


def time_needed(flops: float, plan: PlanArguments, n_devices: int, precision: str) -> str:
    """Hours on the device named or found, if its peak in this precision is known."""
    device = plan.device_name or (torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    known = None if device is None else budget.find_device(device)
    if known is None:
        return f"unknown: {device or 'no GPU'} here. Name one: --device_name H100 --n_devices 8"
    peak = budget.peak_flops(known, precision)
    if peak is None:
        return f"unknown: the {known} does not compute in {precision}. Take --fp16, or neither it nor --bf16 and --tf32"
    hours = flops / (peak * n_devices) / 3600  # at 100 %
    where, of_peak = f"on {n_devices} x {known}", f"of {peak / 1e12:,.4g} TFLOP/s in {precision}"
    measured = budget.measured_mfu(precision)
    low, high = min(measured.values()), max(measured.values())
    if plan.mfu is not None:
        said = f"{hours / plan.mfu:.1f} h {where} at {plan.mfu:.0%} {of_peak}"
        if known in measured:
            said += f" (measured by the reference series: {measured[known]:.0%}, {hours / measured[known]:.1f} h)"
        return said
    if known in measured:
        share = measured[known]
        return f"{hours / share:.1f} h {where} at {share:.0%} {of_peak}, as the reference series measured there"
    span = f"{hours / high:.1f} to {hours / low:.1f} h" if high > low else f"{hours / low:.1f} h"
    shares = f"{high:.0%} to {low:.0%}" if high > low else f"{low:.0%}"
    others = " and ".join(measured)
    return f"{span} {where} at {shares} {of_peak}, as the reference series measured on {others}; --mfu sets it"


def disk_needed(n_parameters: int, steps: int, args: Arguments, one_pass: budget.Pass | None) -> str:
    """Space for the checkpoints that are kept, one more while it is written, and the model."""
    kept, most = budget.checkpoints_saved(args.trainer, steps, one_pass and one_pass.steps)
    model = budget.BYTES_A_NUMBER * n_parameters
    one = model if args.trainer.save_only_model else 3 * model
    needed = byte_size(budget.disk_bytes(model, most, args.trainer))
    return f"{needed} at most: {kept} checkpoints of {byte_size(one)} kept, and the model"


def advice(config: GPT2SmallConfig, tokens: int, rows: int, seq_len: int, args: Arguments) -> str:
    """The recipe's values beside those of rules of thumb, as a table. Nothing follows the advice by itself."""
    C, N = budget.deepseek_flops(config, seq_len, tokens), budget.sizes(config).total
    rate, batch = args.trainer.learning_rate, rows * seq_len
    tau = budget.cerebras_timescale(tokens / N)
    decay = budget.cerebras_weight_decay(batch, rate, tokens, tokens / N)
    n_rows = budget.cerebras_batch_rows(tokens)
    lines = [
        ["learning rate: 0.3118·C^-0.1250 (DeepSeek)", f"{rate:.2e}", f"{budget.deepseek_learning_rate(C):.2e}"],
        ["tokens a step: 0.2920·C^0.3271 (DeepSeek)", f"{batch:,}", f"{budget.deepseek_batch_tokens(C):,.0f}"],
        ["tokens a step: 0.0306·D^0.383 rows (Power Lines)", f"{batch:,}", f"{n_rows * 2048:,.0f}"],
        ["weight decay: B/(lr·D·tau) (Power Lines)", f"{args.trainer.weight_decay:.3g}", f"{decay:.3g}"],
    ]
    notes = [
        f"C = {C:.2e} FLOPs, without embeddings and head: (72·L·d² + 12·L·d·T)·D",
        f"D = {tokens:,} tokens, N = {N:,} parameters (all), tau = 1.084·(D/N)^-0.527 = {tau:.3f}",
        f"B = {batch:,} tokens a step of the recipe, lr its learning rate",
        f"Power Lines: {n_rows:.1f} rows, of 2,048 tokens in its paper; of {seq_len:,}: {n_rows * seq_len:,.0f} tokens",
    ]
    return "\n".join([console_table(["rules of thumb", "recipe", "rule"], lines), *notes])
