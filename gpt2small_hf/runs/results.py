# pyright: strict
"""Typed contents of the files of a run folder other than resolved.json, of checkpoints, and of sweep.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpt2small_hf.runs.files import finite
from gpt2small_hf.runs.records import MadeBy
from gpt2small_hf.runs.typed_json import Part, Record

# ---- scores of benchmarks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Score(Part):
    """A measure with its error."""

    value: float
    standard_error: float | None
    low: float | None
    """Ends of the 95 % interval."""
    high: float | None
    n_items: int


@dataclass(frozen=True, kw_only=True)
class TaskScore(Part):
    """A model's scores in a task."""

    task: str
    model: str
    scores: dict[str, Score]
    chance: float | None = None
    """Accuracy of a guess."""
    items_sha256: str = ""

    @property
    def has_signal(self) -> bool:
        """Whether the interval of the accuracy, or of the one per character, is above chance."""
        known = [self.scores[name].low for name in ("accuracy", "accuracy_norm") if name in self.scores]
        return self.chance is None or any(low is not None and low > self.chance for low in known)


@dataclass(frozen=True, kw_only=True)
class BenchmarkScores(Part):
    """The scores of `--eval_tasks` by the model of a step."""

    scores: list[TaskScore]
    harness: str
    """Version of lm-evaluation-harness."""
    limit: int | None = None
    """Maximum number of items of a task."""
    seconds: float


# ---- metrics.jsonl and checkpoints ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MetricsRow(Part):
    """A line of `metrics.jsonl`: what was logged at a step, under the Trainer's names, or a symptom of bad training.

    Losses are in nats. Values that are not finite are null in the file: `has` tells them from those not logged.
    """

    step: int
    loss: float | None = None
    """Mean over the steps since the last row with a loss, like the next seven."""
    loss_min: float | None = None
    loss_max: float | None = None
    grad_norm_mean: float | None = None
    grad_norm_max: float | None = None
    clipped: float | None = None
    """Share of the steps whose gradients were clipped."""
    tokens_per_second: float | None = None
    mfu: float | None = None
    data_wait: float | None = None
    """Share of the time spent waiting for batches."""
    grad_norm: float | None = None
    learning_rate: float | None = None
    memory_gib: float | None = None
    num_input_tokens_seen: int | None = None
    epoch: float | None = None
    eval_loss: float | None = None
    """Held-out loss; at step 0, before training."""
    train_loss: float | None = None
    """At the end of training: mean over all steps."""
    benchmarks: BenchmarkScores | None = None
    symptom: str | None = None
    says: str | None = None
    """Description of the symptom, likely cause and what to try."""

    @classmethod
    def of(cls, step: int, **logged: Any) -> MetricsRow:
        """Return the row of what is logged at a step; numbers that are not finite become null."""
        return cls.from_json(finite({"step": step, **logged}), f"log of step {step}:")

    def has(self, *names: str) -> bool:
        """Return whether one of these was logged, finite or not."""
        return any(name not in self.absent for name in names)

    @property
    def skipped(self) -> dict[str, int]:
        """The number of steps skipped so far, by kind."""
        return {key.removeprefix("skipped_"): n for key, n in self.extra.items() if key.startswith("skipped_")}


@dataclass(frozen=True, kw_only=True)
class TrainerProgress(Part):
    """`trainer_state.json` of a checkpoint, which the Trainer writes; what is not read is `extra`."""

    global_step: int
    max_steps: int
    epoch: float | None = None
    num_input_tokens_seen: int
    """As of the last log."""
    best_model_checkpoint: str | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def learning_rate(self) -> float | None:
        """The learning rate that was logged last; None if none was."""
        rates = (row["learning_rate"] for row in reversed(self.log_history) if "learning_rate" in row)
        return next(rates, None)


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest(Record):
    """`checkpoint.json`, the last file of a checkpoint to be written."""

    scheduled: bool = True
    """False if only a signal requested the checkpoint."""
    crc32: dict[str, int]
    """Of each other file, by its path in the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class GuardState(Part):
    """`guard_<rank>.json` of a checkpoint: what `GradientGuard` of this rank has counted."""

    world_size: int
    skipped: dict[str, int]
    in_a_row: int
    history: list[float]
    """Gradient norms that a spike is compared with."""
    losses: list[float | None]
    """Of the steps since the last log, like `norms`."""
    norms: list[float | None]
    loss_sum: float = 0.0
    n_losses: int = 0
    tokens: int = 0
    """That are not logged yet."""


# ---- evaluation/heldout.json -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measures(Part):
    """The mean loss of some tokens, in three units."""

    loss_nats: float = field(metadata={"key": "loss"})
    perplexity: float | None = None
    """exp(loss); None if it is too large for a number."""
    bits_per_byte: float | None = None
    """loss / ln 2 / bytes per token, which is comparable between tokenizers."""
    standard_error_nats: float | None = field(default=None, metadata={"key": "standard_error"})


@dataclass(frozen=True, kw_only=True)
class NewText(Measures):
    """The loss of the held-out tokens that are in no overlap with the training text."""

    share: float
    """Of all held-out tokens."""
    recorded_overlap_tokens: int | None = field(default=None, metadata={"key": "overlap_tokens"})
    searched_tokens: int | None = None
    """Training tokens that were compared, from the first."""

    @property
    def overlap_tokens(self) -> int:
        """The length of an overlap, in tokens; earlier versions did not record it."""
        return self.recorded_overlap_tokens or 13


@dataclass(frozen=True, kw_only=True)
class HeldOutRows(Part):
    """The rows that a loss was measured on."""

    rows: int
    seq_len: int
    predicted_tokens: int | None = None
    conversations: int | None = None
    loss_on: str | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerCounts(Part):
    """Number of answered held-out questions, and of answers that end with a stop token."""

    asked: int
    ended: int
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class HeldOutLosses(Part):
    """The loss on held-out rows. If nothing is held out there are 0 rows and no losses."""

    rows: HeldOutRows
    before: Measures | None = None
    """Before training."""
    unigram: Measures | None = None
    """Of a model that predicts the token frequencies of the training data."""
    after: Measures | None = None
    """After training."""


@dataclass(frozen=True, kw_only=True)
class HeldOut(HeldOutLosses, Record):
    """`evaluation/heldout.json`: the results of the evaluation tasks, without generated text."""

    new_text: NewText | None = None
    """After training; None of chats, and if all tokens are in an overlap with the training text."""
    answers: AnswerCounts | None = None
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Results of further tasks, by name."""
    step: int | None = None
    """Of the weights."""
    last_step: int | None = None
    """That training ended at."""
    made_by: MadeBy


# ---- evaluation/answers.jsonl ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Answer(Part):
    """A line of `evaluation/answers.jsonl`: a held-out question and the finished model's answer."""

    messages: list[dict[str, Any]]
    """The conversation up to the question."""
    answer: str
    ended: bool
    """Whether the answer ended with a stop token."""
    tokens: int | None = None
    """Of the answer, with the stop token."""

    @property
    def turns(self) -> list[str]:
        """Return the text of each message, up to the question."""
        return [message["content"] for message in self.messages]


@dataclass(frozen=True, kw_only=True)
class Answers(AnswerCounts):
    """The result of the task `answers`: counts for `heldout.json`, and the lines of `answers.jsonl`."""

    answers: list[Answer] = field(default_factory=list[Answer])

    @property
    def counts(self) -> AnswerCounts:
        """Return the counts alone."""
        return AnswerCounts(asked=self.asked, ended=self.ended, max_new_tokens=self.max_new_tokens)


# ---- evaluation/completions.json and samples.jsonl ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Part):
    """How text was generated."""

    max_new_tokens: int
    temperature: float
    top_k: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Completion(Part):
    """A prompt and its two continuations, without the prompt."""

    prompt: str
    """As the model read it."""
    greedy: str
    sampled: str
    settings: SamplingSettings


@dataclass(frozen=True, kw_only=True)
class Sample(Completion):
    """A line of `samples.jsonl`: a completion by the model of a step."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Completions(Record):
    """`evaluation/completions.json`: prompts that the finished model continued or answered."""

    completions: list[Completion]
    is_chat: bool | None = None
    made_by: MadeBy | None = None


# ---- sweep.json ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SeedNoise(Part):
    """Standard deviations, in nats, of a recipe's loss over seeds; None without two runs to compare."""

    init_seed: float | None
    """Over initial weights."""
    seed: float | None
    """Over training seeds: dropout and the order of rows."""
    both: float | None


@dataclass(frozen=True, kw_only=True)
class Noise(Part):
    """The noise of a sweep."""

    baseline: SeedNoise


@dataclass(frozen=True, kw_only=True)
class SweepRun(Part):
    """A finished run of a sweep."""

    init_seed: int
    seed: int
    loss_nats: float = field(metadata={"key": "loss"})
    difference: float | None
    """From the baseline's run of the same seeds; of the baseline, from its mean."""


@dataclass(frozen=True, kw_only=True)
class StoppedRun(Part):
    """A run of a sweep that its loss or gradients ended."""

    init_seed: int
    seed: int
    because: str


@dataclass(frozen=True, kw_only=True)
class RecipeResult(Part):
    """A recipe of a sweep. Differences are from the baseline, in nats; None of the baseline and of stopped recipes."""

    recipe: str
    changes: str
    loss_nats: float | None = field(metadata={"key": "heldout_loss"})
    """Mean of the finished runs."""
    runs: list[SweepRun]
    stopped: list[StoppedRun]
    difference: float | None
    standard_error: float | None
    decided_above: float | None
    verdict: str | None
    """`lower`, `higher`, `undecided` or `stopped`."""
    tokens_per_second: int | None
    parameters: int | None

    @property
    def n_pairs(self) -> int:
        """The number of runs that have a run of the baseline with the same seeds."""
        return sum(run.difference is not None for run in self.runs)


@dataclass(frozen=True, kw_only=True)
class SweepResults(Record):
    """`sweep.json`."""

    noise: Noise
    recipes: list[RecipeResult]
    made_by: MadeBy
