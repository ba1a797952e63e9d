"""How much a run takes, and what rules of thumb say of it: parameters, tokens, steps, FLOPs, hours, disk.

Parameters and FLOPs are counted on the model itself, built on PyTorch's meta device; only these counts import torch.
`plan.py` reads a recipe and prints the result.
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
# Parts of a device's full name that say nothing about its speed: maker, line of products, memory, board.
_NOT_THE_MODEL = re.compile(r"\b(nvidia|amd|tesla|geforce|instinct|generation|gpu|sxm\d?|\d+gb|hbm3e?)\b")


# Tokens a second and device that the reference series' code made on GPT-2 small with rows of 1,024: baseline and full
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
    """Parameters of a model, counted in the three ways that rules of thumb mean."""

    total: int
    """All, a tied head once."""
    embeddings: int
    """Token and position embeddings."""
    multiplied: int
    """Those that every token is multiplied with: the matrices of the blocks, and the head, tied or not."""
    head: int
    """Those of the head, tied or not."""

    @property
    def non_embedding(self) -> int:
        """All but the embeddings (an untied head is not one)."""
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
    """Count the parameters of LoRA's two matrices beside each linear layer but the head."""
    from torch import nn

    layers = [module for module in _on_meta(_key(config)).model.modules() if isinstance(module, nn.Linear)]
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def flops_per_token(config: GPT2SmallConfig, seq_len: int, lora_rank: int | None = None) -> int:
    """Count the FLOPs of training on one token: three times those of the matrix products in a forward pass.

    For GPT-2 this is 6 for each multiplied parameter and 12·L·C·T for attention (Chowdhery et al. 2022, PaLM, appendix
    B; the causal half of the scores is counted too, as is the custom).

    Of the 6, 2 are the forward pass, 2 the gradient of the layer's input and 2 that of the parameter (Kaplan et al.
    2020, section 2.1). With LoRA the model's own parameters are frozen and take 4, those of the adapter 6; the rows of
    new tokens and positions, which are trained too, are not counted among the latter.
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
    """Count the FLOPs of all matrix products in a forward pass over one row."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        _on_meta(settings)(torch.zeros(1, seq_len, dtype=torch.long, device="meta"))
    return counter.get_total_flops()


def _model_name(device_name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _NOT_THE_MODEL.sub("", device_name.lower().replace("_", " ")))


_DEVICES = {_model_name(name): name for name in PEAK_TFLOPS}


def find_device(device_name: str) -> str | None:
    """Name a device as it is listed here: "NVIDIA H100 80GB HBM3" is H100, "rtx4090" is RTX 4090. None if unknown.

    The whole name counts: a variant that is not listed ("RTX 4090 Laptop GPU", "H1000") is not taken for another card.
    """
    return _DEVICES.get(_model_name(device_name))


def suggest_device(device_name: str) -> str:
    """Suggest the device nearest to an unknown name, or list all."""
    near = difflib.get_close_matches(_model_name(device_name), _DEVICES, 1)
    return f"Did you mean {_DEVICES[near[0]]}?" if near else f"Known: {', '.join(PEAK_TFLOPS)}."


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense FLOPs a second of a device in one of `PRECISIONS`; None for an unknown device, or a precision it lacks."""
    device = find_device(device_name)
    tflops = None if device is None else PEAK_TFLOPS[device][PRECISIONS.index(precision)]
    return None if tflops is None else tflops * 1e12


def measured_mfu(precision: str) -> dict[str, float]:
    """Share of their peak that devices made of the reference series' code in this precision; bfloat16 as float16."""
    precision = "float16" if precision == "bfloat16" else precision
    return {
        device: speed * SERIES_FLOPS_A_TOKEN / (peak_flops(device, precision) or math.nan)
        for (device, measured_in), speed in MEASURED_TOKENS_PER_SECOND.items()
        if measured_in == precision
    }


def precision_of(args: Any) -> str:
    """Which of `PRECISIONS` the matrix products of a run are computed in. `args`: the Trainer's."""
    if args.bf16:
        return "bfloat16"
    if args.fp16:
        return "float16"
    # The Trainer turns TF32 on by itself when it compiles.
    return "tf32" if args.tf32 or (args.tf32 is None and args.torch_compile) else "float32"


@dataclass(frozen=True)
class Pass:
    """One pass over some rows, as the Trainer makes it: its last step may be small."""

    steps: int
    """Optimizer steps."""
    rows: int
    """Rows that all devices together train on."""
    rows_per_step: int

    def rows_in(self, steps: int) -> int:
        """Rows that the first `steps` optimizer steps of training see, in as many passes as they make."""
        passes, rest = divmod(steps, self.steps)
        return passes * self.rows + min(rest * self.rows_per_step, self.rows)


def one_pass(n_rows: int, args: Any, n_devices: int) -> Pass:
    """Count one pass over `n_rows` rows, as the Trainer does. `args`: the Trainer's."""
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    n_batches = n_rows / (size * n_devices)  # of all devices at a time
    if args.dataloader_drop_last:
        n_batches = math.floor(n_batches)
        rows = n_batches * size * n_devices
    else:
        n_batches = math.ceil(n_batches)
        # Several devices take batches of one size: rows from the beginning complete the last ones.
        rows = n_rows if n_devices == 1 else n_batches * size * n_devices
    return Pass(max(1, math.ceil(n_batches / accumulation)), rows, size * accumulation * n_devices)


def steps_of_epochs(n_rows: int, args: Any, n_devices: int) -> int:
    """Optimizer steps of the Trainer's `num_train_epochs` passes over some rows, counted as the Trainer counts."""
    return max(1, math.ceil(args.num_train_epochs * one_pass(n_rows, args, n_devices).steps))


def checkpoints_saved(args: Any, steps: int, steps_a_pass: int | None = None) -> tuple[int, int]:
    """Count the checkpoints that a run keeps, and the most that are on the disk at once.

    A new one is complete before an old one goes. The last step is saved too, unless each epoch is.

    Args:
        args: the Trainer's.
        steps: optimizer steps of the run.
        steps_a_pass: optimizer steps of one pass over the rows; None if it is not known how many rows there are.
    """
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    if strategy == "no":
        return 0, 0
    if strategy == "epoch":
        n_saves = math.ceil(steps / steps_a_pass) if steps_a_pass else math.ceil(args.num_train_epochs)
    else:  # `best` saves at most as often as it measures
        every = args.save_steps if strategy == "steps" else args.eval_steps or args.logging_steps
        n_saves = math.ceil(steps / (every if every >= 1 else math.ceil(every * steps)))
    limit = args.save_total_limit or n_saves
    if args.load_best_model_at_end and limit == 1:
        limit = 2  # the best and the newest
    return min(n_saves, limit), min(n_saves, limit + 1)


def disk_bytes(weight_bytes: int, n_checkpoints: int, args: Any) -> int:
    """Bytes of the checkpoints and of the model after them. AdamW's state is two numbers for each parameter.

    Args:
        weight_bytes: size of the model's weights.
        n_checkpoints: the most that are on the disk at once, see `checkpoints_saved`.
        args: the Trainer's.
    """
    return n_checkpoints * weight_bytes * (1 if args.save_only_model else 3) + weight_bytes


BYTES_A_NUMBER = 4
"""Weights, gradients and optimizer state are float32 in every precision of the products."""
# Numbers for each trained parameter: the weight, its gradient and the optimizer's state. Of others only the weight is
# counted: they may keep 8-bit or no state, or one gradient at a time.
_NUMBERS = {"adamw_torch": 4, "adamw_torch_fused": 4, "muon": 3}


def memory_bytes(n_parameters: int, config: Any, args: Any, *, trains: bool, batch_tokens: int = 0) -> int:
    """Bytes that a run takes at least on the device that holds all of it: less than it will take.

    Args:
        n_parameters: of the model.
        config: the model's sizes.
        args: the settings of the run.
        trains: whether the device trains the model, or only builds it.
        batch_tokens: tokens of a batch, as far as they are known.
    """
    if not trains:
        return n_parameters * BYTES_A_NUMBER
    optimizer = getattr(args.trainer.optim, "value", args.trainer.optim)
    numbers = _NUMBERS.get(optimizer, 1) if args.run.lora_rank is None else 1
    # A block keeps its input for the backward pass, whatever else is computed again there.
    kept = batch_tokens * config.hidden_size * config.num_hidden_layers
    return (n_parameters * numbers + kept) * BYTES_A_NUMBER


def steps_for(tokens: float, tokens_per_step: int) -> int:
    """Whole steps that see at least so many tokens."""
    return max(1, math.ceil(tokens / tokens_per_step))


def wanted_tokens(
    config: GPT2SmallConfig, tokens: int | None, tokens_per_parameter: float | None, counted: str
) -> float | None:
    """Tokens to train on, as asked for outright or as a multiple of `all` or `non_embedding` parameters; else None."""
    if tokens_per_parameter is None:
        return tokens
    n = sizes(config)
    return tokens_per_parameter * {"all": n.total, "non_embedding": n.non_embedding}[counted]


# ---- rules of thumb: advice, never applied by itself ----------------------------------------------------------------


def deepseek_flops(config: GPT2SmallConfig, seq_len: int, tokens: int) -> int:
    """The C of DeepSeek's rules: FLOPs of training without embeddings and head, (72·L·d² + 12·L·d·T)·D."""
    return (flops_per_token(config, seq_len) - 6 * sizes(config).head) * tokens


def deepseek_learning_rate(flops: float) -> float:
    """Peak learning rate for `deepseek_flops`: 0.3118·C^-0.1250 (Bi et al. 2024, DeepSeek LLM)."""
    return 0.3118 * flops**-0.125


def deepseek_batch_tokens(flops: float) -> float:
    """Tokens a step for `deepseek_flops`: 0.2920·C^0.3271 (Bi et al. 2024, DeepSeek LLM)."""
    return 0.2920 * flops**0.3271


def cerebras_batch_rows(tokens: float) -> float:
    """Rows a step for D training tokens: 0.0306·D^0.383 (Bergsma et al. 2025, Power Lines).

    The paper's models have rows of 2,048 tokens; that its B counts such rows is our reading.
    """
    return 0.0306 * tokens**0.383


def cerebras_timescale(tokens_per_parameter: float) -> float:
    """AdamW's memory, as a share of training, at its best: 1.084·TPP^-0.527 (Bergsma et al. 2025, Power Lines)."""
    return 1.084 * tokens_per_parameter**-0.527


def cerebras_weight_decay(
    batch_tokens: float, learning_rate: float, tokens: float, tokens_per_parameter: float
) -> float:
    """Weight decay that gives AdamW that memory: B / (lr·D·tau), B and D in tokens."""
    return batch_tokens / (learning_rate * tokens * cerebras_timescale(tokens_per_parameter))
