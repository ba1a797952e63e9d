"""How a model is published, as far as its card depends on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpt2small_hf.publishing.license import License
from gpt2small_hf.runs.reader import Run


@dataclass(frozen=True)
class Publication:
    """How a model is published, as far as its card depends on it."""

    repo_id: str
    pin: str | None = None
    """The tag or branch that the card's code names."""
    pin_moves: bool = False
    """Whether `pin` is a branch."""
    native: bool = False
    """Whether it is published as transformers' own GPT-2, which needs no remote code."""
    twin: str | None = None
    """The repository of the same weights in the other form."""
    license: License | None = None
    languages: list[str] = field(default_factory=list)
    baseline: Run | None = None
    branches: list[dict[str, Any]] = field(default_factory=list)
    """`revision`, `step`, `tokens` and `loss` of the checkpoints that are published too."""
    private: frozenset[str] = frozenset()
    """Repositories that are not public: the card does not link them."""
    developers: list[str] = field(default_factory=list)
    """Who trained the model, as given."""
    contact: str | None = None
    origin: str | None = None
    """Where weights that were not trained here come from: a Hub id or an address."""
    questions: bool = False
    """Whether the card has questions of the run's chats, with the model's answers."""

    @property
    def namespace(self) -> str:
        """The account that publishes."""
        return self.repo_id.split("/")[0]
