"""Optimizers that transformers does not have: a function for each, and its name for --optim in `OPTIMIZERS`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from transformers import TrainingArguments

from gpt2small_hf.errors import UsageError


def muon_with_adamw(
    model: nn.Module, decayed: Collection[str], args: TrainingArguments, is_sharded: bool = False
) -> MuonWithAdamW:
    """Create an optimizer: Muon for the matrices in `layers`, AdamW for embeddings, head, norms and biases.

    Raises: UsageError if parameters are sharded, or this PyTorch has no Muon.
    """
    if is_sharded:
        raise UsageError(
            "--optim muon needs whole matrices, and FSDP, DeepSpeed and tensor parallelism shard them. "
            "Train without those, or with --optim adamw_torch_fused."
        )
    if not hasattr(torch.optim, "Muon"):
        raise UsageError(
            f"--optim muon needs PyTorch 2.9 or newer; this is {torch.__version__}. Update it, or use another --optim."
        )
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {
        (muon, decay): [] for muon in (True, False) for decay in (True, False)
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Each row of an embedding or of the head is the vector of one token. They are not linear maps, whose
            # singular values Muon equalizes (Jordan et al. 2024).
            muon = parameter.ndim == 2 and "layers" in name.split(".")
            groups[muon, name in decayed].append(parameter)
    return MuonWithAdamW(
        [
            {"params": parameters, "muon": muon, "weight_decay": args.weight_decay if decay else 0.0}
            for (muon, decay), parameters in groups.items()
        ],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )


class MuonWithAdamW(Optimizer):
    """PyTorch's Muon for the groups with `"muon": True` and its fused AdamW for the others, as one optimizer.

    Muon's update is scaled to the size of AdamW's, 0.2·sqrt(max(rows, columns)) times the orthogonal matrix, so both
    share learning rate and weight decay (Liu et al. 2025, Muon is Scalable for LLM Training). Both work on the groups
    and the state of this optimizer, so schedulers, gradient scalers and checkpoints need no special handling.
    """

    def __init__(
        self, params: list[dict[str, Any]], *, lr: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
    ) -> None:
        """Initialise both optimizers. `betas` and `eps` are AdamW's; Muon's parameters must be two-dimensional."""
        adamw = {"betas": betas, "eps": eps}  # only for AdamW's groups: Muon has a different `eps`
        groups = [group if group.get("muon") else adamw | group for group in params]
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "muon": False})
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; only the constructor may. Raises: RuntimeError afterwards."""
        if hasattr(self, "_parts"):
            raise RuntimeError("MuonWithAdamW takes all its parameters when it is made.")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()  # loading and unpickling replace the dictionaries of groups and state

    def _share(self) -> None:
        """Let Muon and AdamW work on this optimizer's groups and state: the same dictionaries, not copies."""
        self._parts: list[Optimizer] = []
        for muon in (True, False):
            groups = [group for group in self.param_groups if group["muon"] == muon]
            if groups:
                part = torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw") if muon else AdamW(groups, fused=True)
                part.state = self.state
                self._parts.append(part)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both optimizers; skip parameters without gradient. Returns: the result of `closure`."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self._parts:
            part.step()
        return loss


CreateOptimizer: TypeAlias = Callable[[nn.Module, Collection[str], TrainingArguments, bool], Optimizer]
"""Takes the model, the names of the parameters with weight decay, the Trainer's arguments (learning rate, betas, …) and
whether parameters are sharded."""
OPTIMIZERS: dict[str, CreateOptimizer] = {"muon": muon_with_adamw}
"""`config/trainer.py` reads the names from this line, without importing the module."""
