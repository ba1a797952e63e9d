"""Several processes that train together: what rank 0 does for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist

from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command

T = TypeVar("T")


def run_on_rank_0(decide: Callable[[], T]) -> T:
    """Call a function on rank 0 alone. Returns: its result, on every rank. Raises: its UsageError, on every rank."""
    answer: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            answer[0] = decide()
        except UsageError as error:
            answer[1] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise UsageError(answer[1])
    return answer[0]


def check_launch(n_known: int) -> None:
    """Raise: UsageError if a launcher started several processes, and the Trainer knows of `n_known`."""
    n_launched = int(os.environ.get("WORLD_SIZE", "1"))
    if n_launched in (1, n_known):
        return
    if dist.is_initialized():
        dist.barrier()  # or the launcher may end rank 0, which prints the error, because another was first to exit
    raise UsageError(
        f"{n_launched} processes were launched (WORLD_SIZE), but each would train alone. Without a GPU, add --use_cpu. "
        f"To train in one process, run {command('train')} without a launcher."
    )
