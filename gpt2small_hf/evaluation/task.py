# pyright: strict
"""Evaluation tasks and their inputs. `tasks.py` lists the tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpt2small_hf.runs.typed_json import Part

if TYPE_CHECKING:
    import numpy as np

    from gpt2small_hf.data.row_dataset import RowDataset

R = TypeVar("R", bound=Part)
Rows = list[list[str]]
"""A table: its header, then its rows."""


@dataclass
class EvaluationInputs:
    """What tasks may read besides the model."""

    tokenizer: Any = None
    heldout: RowDataset | None = None
    train: RowDataset | None = None
    prompts: Sequence[str] = ()
    is_chat: bool = False
    """Whether prompts are questions."""
    loss_before: float | None = None
    """Held-out loss before training, in nats."""
    max_answers: int = 0
    batch_size: int = 8
    _losses: np.ndarray | None = field(default=None, repr=False)

    def losses(self, model: Any) -> np.ndarray:
        """Return the model's loss on each supervised held-out token, in nats; it is computed once."""
        from gpt2small_hf.evaluation.heldout import heldout_losses

        if self._losses is None:
            assert self.heldout is not None
            self._losses = heldout_losses(model, self.heldout, batch_size=self.batch_size)
        return self._losses


@dataclass(frozen=True)
class Task(Generic[R]):
    """One measurement of a model. Its module imports torch in `run` alone: reports read results without it."""

    name: str
    record: type[R]
    applies_to: Callable[[EvaluationInputs], bool]
    run: Callable[[Any, EvaluationInputs], R]
    rows: Callable[[R], Rows] = lambda record: []
    note: Callable[[R], str | None] = lambda record: None
    """Return a sentence to print below the table."""
    published: tuple[str, ...] = ("evaluation/heldout.json",)
    """Files of the run folder with its result that are published; an unknown task's result is in `heldout.json`."""
