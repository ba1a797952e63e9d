"""Cost of a run and rules of thumb: parameters, tokens, steps, FLOPs, memory, disk.

Parameters and FLOPs are counted on the model itself, built on PyTorch's meta device; only these counts import torch.
`plan.py` prints the results for a recipe.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt2small_hf.config.run import RunArguments
    from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
    from gpt2small_hf.model.gpt import GPT

PRECISIONS = ("bfloat16", "float16", "tf32", "float32")
# Dense TFLOP/s of matrix products in each of PRECISIONS, 16-bit ones with float32 sums, from the vendors' data sheets
# (which print twice as much "with sparsity"). None: the device has no such units. A plain name is the SXM board.
PEAK_TFLOPS: dict[str, tuple[float | None, float, float | None, float]] = {
    "GB200": (2500, 2500, 1250, 80),
    "B200": (2250, 2250, 1125, 75),
    "GH200": (989, 989, 494.5, 67),
    "H200": (989, 989, 494.5, 67),
    "H200 NVL": (835.5, 835.5, 417.5, 60),
    "H100": (989, 989, 494.5, 67),
    "H100 NVL": (835.5, 835.5, 417.5, 60),
    "H100 PCIe": (756, 756, 378, 51),
    "A100": (312, 312, 156, 19.5),
    "A100 PCIe": (312, 312, 156, 19.5),
    "A800": (312, 312, 156, 19.5),
    "A40": (149.7, 149.7, 74.8, 37.4),
    "A30": (165, 165, 82, 10.3),
    "A10": (125, 125, 62.5, 31.2),
    "A10G": (70, 70, 35, 31.5),
    "L40S": (362, 362, 183, 91.6),
    "L40": (181, 181, 90.5, 90.5),
    "L4": (121, 121, 60, 30.3),
    "V100": (None, 125, None, 15.7),
    "V100 PCIe": (None, 112, None, 14),
    "V100S PCIe": (None, 130, None, 16.4),
    "P100 PCIe": (None, 18.7, None, 9.3),
    "T4": (None, 65, None, 8.1),
    "RTX 6000 Ada": (364.2, 364.2, 182.1, 91.1),
    "RTX A6000": (154.8, 154.8, 77.4, 38.7),
    "RTX A5000": (111.1, 111.1, 55.6, 27.8),
    "RTX A4000": (76.7, 76.7, 38.3, 19.2),
    "RTX 5090": (209.5, 209.5, 104.8, 104.8),
    "RTX 5080": (112.6, 112.6, 56.3, 56.3),
    "RTX 5070 Ti": (87.9, 87.9, 43.9, 43.9),
    "RTX 5070": (61.7, 61.7, 30.9, 30.9),
    "RTX 4090": (165.2, 165.2, 82.6, 82.6),
    "RTX 4080 SUPER": (104.4, 104.4, 52.2, 52.2),
    "RTX 4080": (97.5, 97.5, 48.7, 48.7),
    "RTX 4070 Ti SUPER": (88.2, 88.2, 44.1, 44.1),
    "RTX 4070 Ti": (80.2, 80.2, 40.1, 40.1),
    "RTX 4070 SUPER": (71, 71, 35.5, 35.5),
    "RTX 4070": (58.3, 58.3, 29.1, 29.1),
    "RTX 4060 Ti": (44.1, 44.1, 22.1, 22.1),
    "RTX 4060": (30.2, 30.2, 15.1, 15.1),
    "RTX 3090 Ti": (80, 80, 40, 40),
    "RTX 3090": (71, 71, 35.6, 35.6),
    "RTX 3080 Ti": (68.2, 68.2, 34.1, 34.1),
    "RTX 3080": (59.5, 59.5, 29.8, 29.8),
    "RTX 3070 Ti": (43.5, 43.5, 21.7, 21.7),
    "RTX 3070": (40.6, 40.6, 20.3, 20.3),
    "RTX 3060 Ti": (32.4, 32.4, 16.2, 16.2),
    "RTX 3060": (25.5, 25.5, 12.7, 12.7),
    "RTX 2080 Ti": (None, 53.8, None, 13.4),
    "TITAN RTX": (None, 130.5, None, 16.3),
    "MI325X": (1307.4, 1307.4, 653.7, 163.4),
    "MI300X": (1307.4, 1307.4, 653.7, 163.4),
}
# Parts of a device's full name that do not identify the model: vendor, product line, memory, board.
_NOT_THE_MODEL = re.compile(r"\b(nvidia|amd|tesla|geforce|instinct|generation|gpu|sxm\d?|\d+gb|hbm3e?)\b")


# Tokens per second and device of the reference series' code on GPT-2 small with rows of 1,024 tokens: baseline and full
# float32 on eight A100 (12,243.5 s and 8.1 h), and each precision on one RTX 3090.
SERIES_TOKENS, SERIES_FLOPS_A_TOKEN = 3_260_252_160, 854_438_400
MEASURED_TOKENS_PER_SECOND = {
    ("A100", "float16"): SERIES_TOKENS / 12_243.5 / 8,
    ("A100", "float32"): SERIES_TOKENS / (8.1 * 3600) / 8,
    ("RTX 3090", "float16"): 19_921,
    ("RTX 3090", "tf32"): 15_402,
    ("RTX 3090", "float32"): 12_599,
}


@dataclass(frozen=True)
class Sizes:
    """Parameter counts of a model, as the rules of thumb define them."""

    total: int
    """All parameters; tied weights count once."""
    embeddings: int
    """Token and position embeddings."""
    multiplied: int
    """Parameters that every token is multiplied with: the matrices of the blocks, and the head, tied or not."""
    head: int
    """Parameters of the head, tied or not."""

    @property
    def non_embedding(self) -> int:
        """All parameters but the embeddings (an untied head is not an embedding)."""
        return self.total - self.embeddings


def sizes(config: GPT2SmallConfig) -> Sizes:
    """Count the parameters of a model of this configuration."""
    from torch import nn

    model = _on_meta(_key(config))
    embeddings, multiplied = (
        sum(module.weight.numel() for module in model.modules() if isinstance(module, kind))
        for kind in (nn.Embedding, nn.Linear)
    )
    return Sizes(sum(p.numel() for p in model.parameters()), embeddings, multiplied, model.lm_head.weight.numel())


def lora_parameters(config: GPT2SmallConfig, rank: int) -> int:
    """Count the parameters of LoRA's two matrices for each linear layer except the head."""
    from torch import nn

    layers = [module for module in _on_meta(_key(config)).model.modules() if isinstance(module, nn.Linear)]
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def flops_per_token(config: GPT2SmallConfig, seq_len: int, lora_rank: int | None = None) -> int:
    """Count the FLOPs of training on one token: three times those of the matrix products in a forward pass.

    For GPT-2 this is 6 for each multiplied parameter and 12·L·C·T for attention (Chowdhery et al. 2022, PaLM, appendix
    B; all scores are counted, including those that the causal mask removes, as is customary).

    Of the 6, 2 are the forward pass, 2 the gradient of the layer's input and 2 that of the parameter (Kaplan et al.
    2020, section 2.1). With LoRA the frozen parameters of the model take 4 and those of the adapter 6; the trained
    rows of new tokens and positions are not counted as part of the adapter.
    """
    flops = 3 * _forward_flops(_key(config), seq_len) // seq_len
    if lora_rank is not None:
        flops += 6 * lora_parameters(config, lora_rank) - 2 * sizes(config).multiplied
    return flops


def _key(config: GPT2SmallConfig) -> str:
    return config.to_json_string(use_diff=False)


@lru_cache(maxsize=8)
def _on_meta(settings: str) -> GPT:
    """Build the plain model of a configuration, given as JSON, without memory for its weights."""
    import torch

    from gpt2small_hf.model import GPT, GPT2SmallConfig

    with torch.device("meta"):
        return GPT(GPT2SmallConfig.from_dict(json.loads(settings)))


@lru_cache(maxsize=8)
def _forward_flops(settings: str, seq_len: int) -> int:
    """Count the FLOPs of all matrix products in the forward pass of one row."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        _on_meta(settings)(torch.zeros(1, seq_len, dtype=torch.long, device="meta"))
    return counter.get_total_flops()


def _model_name(device_name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _NOT_THE_MODEL.sub("", device_name.lower().replace("_", " ")))


_DEVICES = {_model_name(name): name for name in PEAK_TFLOPS}


def find_device(device_name: str) -> str | None:
    """Return the listed name of a device: "NVIDIA H100 80GB HBM3" is H100, "rtx4090" is RTX 4090. None if unknown.

    The full name must match: an unlisted variant ("RTX 4090 Laptop GPU", "H1000") is unknown.
    """
    return _DEVICES.get(_model_name(device_name))


def suggest_device(device_name: str) -> str:
    """Name the device with the most similar name, or list all."""
    near = difflib.get_close_matches(_model_name(device_name), _DEVICES, 1)
    return f"Did you mean {_DEVICES[near[0]]}?" if near else f"Known: {', '.join(PEAK_TFLOPS)}."


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return a device's dense FLOP/s in one of `PRECISIONS`; None if the device is unknown or lacks the precision."""
    device = find_device(device_name)
    tflops = None if device is None else PEAK_TFLOPS[device][PRECISIONS.index(precision)]
    return None if tflops is None else tflops * 1e12


def measured_mfu(precision: str) -> dict[str, float]:
    """Return the MFU of the reference series' code per device in a precision; bfloat16 counts as float16."""
    precision = "float16" if precision == "bfloat16" else precision
    return {
        device: speed * SERIES_FLOPS_A_TOKEN / (peak_flops(device, precision) or math.nan)
        for (device, measured_in), speed in MEASURED_TOKENS_PER_SECOND.items()
        if measured_in == precision
    }


def precision_of(args: Any) -> str:
    """Return the precision, one of `PRECISIONS`, of the matrix products under these `TrainingArguments`."""
    if args.bf16:
        return "bfloat16"
    if args.fp16:
        return "float16"
    # The Trainer enables TF32 when it compiles.
    return "tf32" if args.tf32 or (args.tf32 is None and args.torch_compile) else "float32"


@dataclass(frozen=True)
class Pass:
    """One epoch of the Trainer; its last step may have fewer rows."""

    steps: int
    """Optimizer steps."""
    rows: int
    """Rows that all devices train on, in total."""
    rows_per_step: int

    def rows_in(self, steps: int) -> int:
        """Return the number of rows of the first `steps` optimizer steps of training, over all epochs."""
        passes, rest = divmod(steps, self.steps)
        return passes * self.rows + min(rest * self.rows_per_step, self.rows)


def one_pass(n_rows: int, args: Any, n_devices: int) -> Pass:
    """Count one epoch of `n_rows` rows as the Trainer does; `args` are its `TrainingArguments`."""
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    n_batches = n_rows / (size * n_devices)  # each over all devices
    if args.dataloader_drop_last:
        n_batches = math.floor(n_batches)
        rows = n_batches * size * n_devices
    else:
        n_batches = math.ceil(n_batches)
        # All devices get batches of the same size: the first rows are repeated to complete the last batches.
        rows = n_rows if n_devices == 1 else n_batches * size * n_devices
    return Pass(max(1, math.ceil(n_batches / accumulation)), rows, size * accumulation * n_devices)


def steps_of_epochs(n_rows: int, args: Any, n_devices: int) -> int:
    """Return the optimizer steps of `num_train_epochs` epochs of `n_rows` rows, as the Trainer counts them."""
    return max(1, math.ceil(args.num_train_epochs * one_pass(n_rows, args, n_devices).steps))


def checkpoints_saved(args: Any, steps: int, steps_a_pass: int | None = None) -> tuple[int, int]:
    """Return the number of checkpoints that a run keeps, and the maximum on the disk at once.

    A new checkpoint is complete before an old one is removed. The last step is saved too, unless each epoch is.
    `steps_a_pass` are the optimizer steps of one epoch; None if the number of rows is unknown.
    """
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    if strategy == "no":
        return 0, 0
    if strategy == "epoch":
        n_saves = math.ceil(steps / steps_a_pass) if steps_a_pass else math.ceil(args.num_train_epochs)
    else:  # `best` saves at most once per evaluation
        every = args.save_steps if strategy == "steps" else args.eval_steps or args.logging_steps
        n_saves = math.ceil(steps / (every if every >= 1 else math.ceil(every * steps)))
    limit = args.save_total_limit or n_saves
    if args.load_best_model_at_end and limit == 1:
        limit = 2  # the best and the latest
    return min(n_saves, limit), min(n_saves, limit + 1)


def disk_bytes(weight_bytes: int, n_checkpoints: int, args: Any) -> int:
    """Return the bytes of the final model and of `n_checkpoints`. AdamW's state is two numbers per parameter."""
    return n_checkpoints * weight_bytes * (1 if args.save_only_model else 3) + weight_bytes


BYTES_A_NUMBER = 4
"""Weights, gradients and optimizer state are float32 in every precision of the products."""
# Numbers per trained parameter: the weight, its gradient, the optimizer's state. For other optimizers only the weight
# is counted: they may keep 8-bit or no state, or one gradient at a time.
_NUMBERS = {"adamw_torch": 4, "adamw_torch_fused": 4, "muon": 3}


def memory_bytes(n_parameters: int, config: Any, args: Any, *, trains: bool, batch_tokens: int = 0) -> int:
    """Return a lower bound of the bytes that a run needs on a device without sharding, which builds or also trains it.

    `batch_tokens` is 0 if unknown.
    """
    if not trains:
        return n_parameters * BYTES_A_NUMBER
    optimizer = getattr(args.trainer.optim, "value", args.trainer.optim)
    numbers = _NUMBERS.get(optimizer, 1) if args.run.lora_rank is None else 1
    # Each block keeps its input for the backward pass, even with activation checkpointing.
    kept = batch_tokens * config.hidden_size * config.num_hidden_layers
    return (n_parameters * numbers + kept) * BYTES_A_NUMBER


def steps_for_tokens(config: GPT2SmallConfig, run: RunArguments, tokens_per_step: int) -> int | None:
    """Return the steps of --tokens or --tokens_per_parameter, rounded up; None if neither is given."""
    tokens = run.tokens
    if run.tokens_per_parameter is not None:
        n = sizes(config)
        tokens = run.tokens_per_parameter * (n.total if run.parameters_counted == "all" else n.non_embedding)
    return None if tokens is None else max(1, math.ceil(tokens / tokens_per_step))


# ---- rules of thumb: advice, never applied automatically ------------------------------------------------------------


def deepseek_flops(config: GPT2SmallConfig, seq_len: int, tokens: int) -> int:
    """Return C of DeepSeek's rules: training FLOPs without embeddings and head, (72·L·d² + 12·L·d·T)·D."""
    return (flops_per_token(config, seq_len) - 6 * sizes(config).head) * tokens


def deepseek_learning_rate(flops: float) -> float:
    """Return the peak learning rate for `deepseek_flops`: 0.3118·C^-0.1250 (Bi et al. 2024, DeepSeek LLM)."""
    return 0.3118 * flops**-0.125


def deepseek_batch_tokens(flops: float) -> float:
    """Return the tokens per step for `deepseek_flops`: 0.2920·C^0.3271 (Bi et al. 2024, DeepSeek LLM)."""
    return 0.2920 * flops**0.3271


def cerebras_batch_rows(tokens: float) -> float:
    """Return the rows per step for D training tokens: 0.0306·D^0.383 (Bergsma et al. 2025, Power Lines).

    The paper's models have rows of 2,048 tokens; we assume that its B counts such rows.
    """
    return 0.0306 * tokens**0.383


def cerebras_timescale(tokens_per_parameter: float) -> float:
    """Return AdamW's optimal timescale as a share of training: 1.084·TPP^-0.527 (Bergsma et al. 2025, Power Lines)."""
    return 1.084 * tokens_per_parameter**-0.527


def cerebras_weight_decay(
    batch_tokens: float, learning_rate: float, tokens: float, tokens_per_parameter: float
) -> float:
    """Return the weight decay for `cerebras_timescale`: B / (lr·D·tau), B and D in tokens."""
    return batch_tokens / (learning_rate * tokens * cerebras_timescale(tokens_per_parameter))
