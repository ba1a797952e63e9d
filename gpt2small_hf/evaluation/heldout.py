"""Compute loss, perplexity and bits per byte on held-out rows, and the unigram baseline.

Also find held-out tokens in sequences that occur in the training text, which a model may have memorised.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gpt2small_hf.data.row_dataset import IGNORED, RowDataset
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.runs.results import Measures

# Maximum number of training tokens that baselines read: enough for frequencies, in about a minute.
MOST_TRAINING_TOKENS = 100_000_000
OVERLAP_TOKENS = 13
"""Length of an overlap of held-out and training text, as in Brown et al. (2020, appendix C): the loss on overlaps
measures memorisation."""


def heldout_losses(model: torch.nn.Module, rows: RowDataset, *, batch_size: int = 8) -> np.ndarray:
    """Compute the loss on each predicted token, without dropout.

    Returns: nats, float64, shape (predicted tokens,), row by row: seq_len - 1 for each row of text, the
        supervised tokens of chats. Values do not depend on `batch_size` beyond rounding.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    console = Console(stderr=True)
    # A loader draws a seed for its workers: its own generator leaves the random state of training unchanged.
    batches = DataLoader(rows, batch_size=batch_size, collate_fn=rows.collate, generator=torch.Generator())
    losses = []
    with torch.no_grad():
        for batch in track(batches, "held-out rows", console=console, transient=True, disable=not console.is_terminal):
            inputs = {name: tensor.to(device) for name, tensor in batch.items()}
            labels = inputs.pop("labels")[:, 1:].flatten()
            logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            loss = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
            losses.append(loss[labels != IGNORED].cpu().double().numpy())
    model.train(was_training)
    return np.concatenate(losses)


def unigram_losses(train: RowDataset, heldout: RowDataset, *, vocab_size: int) -> np.ndarray:
    """Compute these losses for a model that predicts the frequencies of supervised tokens in training.

    Frequencies are counted in the first 100 million training tokens, plus one for each token of the vocabulary.
    """
    counts = np.ones(vocab_size)
    for tokens in train.training_tokens(MOST_TRAINING_TOKENS):
        counts += np.bincount(tokens, minlength=vocab_size)
    nats = -np.log(counts / counts.sum())
    return nats[heldout.supervised_tokens()]


def seen_in_training(train: TextDataset, heldout: TextDataset, *, length: int = OVERLAP_TOKENS) -> np.ndarray:
    """Mark predicted tokens that end a sequence of `length` tokens found in the first 100 million training tokens.

    Returns: bool, shape (rows, seq_len - 1).
    """
    stream = heldout.tokens(0, len(heldout) * heldout.seq_len)
    keys = _hashes(stream, length)
    if not len(keys):
        return _predicted(heldout, np.zeros(len(stream), dtype=bool))
    wanted = np.unique(keys)
    found = np.zeros(len(wanted), dtype=bool)
    for tokens in train.training_tokens(MOST_TRAINING_TOKENS, overlap=length - 1):
        hashes = _hashes(tokens, length)
        places = np.searchsorted(wanted, hashes).clip(max=len(wanted) - 1)
        found[places[wanted[places] == hashes]] = True
    seen = np.zeros(len(stream), dtype=bool)
    seen[length - 1 :] = found[np.searchsorted(wanted, keys)]
    return _predicted(heldout, seen)


def measures(losses: np.ndarray, bytes_per_token: float, *, standard_error_nats: float | None = None) -> Measures:
    """Return the mean of some losses in three units.

    Args:
        losses: nats.
        bytes_per_token: of the tokens that have these losses, not of a larger set that they belong to.
        standard_error_nats: of the mean, if it is known.
    """
    loss = float(losses.mean())
    return Measures(
        loss_nats=loss,
        perplexity=math.exp(loss) if loss < 700 else None,
        bits_per_byte=loss / math.log(2) / bytes_per_token if bytes_per_token else None,
        standard_error_nats=standard_error_nats,
    )


def standard_error(losses: np.ndarray, rows: RowDataset) -> float | None:
    """Estimate the standard error of the mean of `heldout_losses`, in nats; None for a single row.

    Losses within a row are correlated, so rows are the sampling unit: the ratio estimator
    sqrt(n/(n-1) Σ(s - L m)²) / Σm over n rows of m tokens whose losses sum to s, with mean L (Cochran, Sampling
    Techniques, 1977, 2.11). The correlation between rows of one document is ignored.
    """
    sizes = rows.supervised_per_row()
    n = len(sizes)
    if n < 2:
        return None
    sums = np.array([part.sum() for part in np.split(losses, np.cumsum(sizes)[:-1])])
    off = sums - losses.mean() * sizes
    return float(math.sqrt(n / (n - 1) * (off**2).sum()) / sizes.sum())


def _predicted(rows: TextDataset, stream: np.ndarray) -> np.ndarray:
    return stream.reshape(len(rows), rows.seq_len)[:, 1:]


def _hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """Hash each `length` consecutive tokens to 64 bits, shape (tokens - length + 1,); collisions are negligible."""
    n = max(0, len(tokens) - length + 1)
    hashes = np.zeros(n, dtype=np.uint64)
    for i in range(length):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + tokens[i : i + n].astype(np.uint64) + np.uint64(1)
    return hashes
