"""Text → a prepared folder: flat token files, document starts, the tokenizer and meta.json.

`sources.py` lists documents, `holdout.py` splits them, `batches.py` encodes them and `shards.py` writes them. `seq_len`
and packing are chosen when the folder is opened (`text_dataset.py`).
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.config.data import SMALLEST_VOCABULARY, PrepareArguments
from gpt2small_hf.data.corpus.batches import BATCH_CHARS, batches, encode_batch, in_order
from gpt2small_hf.data.corpus.encoder import Encoder, cut
from gpt2small_hf.data.corpus.holdout import FEW_DOCUMENTS, Holdout
from gpt2small_hf.data.corpus.metadata import check_complete, check_inputs, describe_inputs, read_meta
from gpt2small_hf.data.corpus.readers import Document, Meter
from gpt2small_hf.data.corpus.shards import SplitWriter
from gpt2small_hf.data.corpus.sources import TextSource, open_sources
from gpt2small_hf.data.tokenizer import load_tokenizer, train_tokenizer
from gpt2small_hf.errors import UsageError, print_stderr
from gpt2small_hf.formatting import duration
from gpt2small_hf.runs.files import (
    atomic_write,
    exclusive_writer,
    is_leftover,
    remove,
    replace_path,
    sha256,
    sync,
)
from gpt2small_hf.runs.layout import DataFolder
from gpt2small_hf.runs.provenance import made_by
from gpt2small_hf.runs.records import PreparationProgress, PreparedSet, SplitCounts, TokenizerFacts

BATCHES_PER_SAVE = 64
TRAINING_SAMPLE_BYTES = 100_000_000
SECONDS_BETWEEN_LINES = 30.0


# ---- a folder, made once ---------------------------------------------------------------------------------------


def prepare(args: PrepareArguments, output_dir: Path | None, *, overwrite: bool = False) -> Path:
    """Prepare a folder, unless it was already prepared from the same inputs.

    Without `output_dir` it is `data/<source>-<first 8 digits of the fingerprint>`. The set is built under
    another name and renamed when complete; an interrupted build is resumed by the next call.

    Returns: the folder.
    Raises:  UsageError for inputs that cannot be read, and for a folder with other contents.
    """
    tokenizer = None if args.trains_tokenizer else load_tokenizer(str(args.tokenizer))
    sources = open_sources(args, tokenizer)
    inputs = describe_inputs(args, sources, tokenizer)
    fingerprint = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    folder = DataFolder(output_dir or Path("data") / f"{short_name(args)}-{fingerprint[:8]}")
    if folder.root.exists() and not may_be_replaced(folder, overwrite=overwrite):
        meta = read_meta(folder.root)
        check_inputs(folder.root, meta, inputs, sources)
        check_complete(folder.root, meta)
        print(f"{folder.root} is already prepared from the same inputs.")
        return folder.root
    with exclusive_writer(folder.root):
        unfinished = folder.unfinished()
        built = unfinished.meta.exists() and read_meta(unfinished.root).fingerprint == fingerprint
        if built:  # interrupted before it was renamed
            meta = read_meta(unfinished.root)
        else:
            state = resume_or_start(unfinished, fingerprint, overwrite=overwrite)
            try:
                meta = build(args, sources, tokenizer, unfinished, state)
            except BaseException:
                if not PreparationProgress.load(unfinished.progress).batches:  # nothing to resume from
                    discard(unfinished)
                raise
            meta = replace(meta, inputs=inputs, made_by=made_by())
            meta.save(unfinished.meta)
        unfinished.progress.unlink(missing_ok=True)
        replace_path(unfinished.root, folder.root, is_partly_moved=built and not folder.meta.exists())
        sync(folder.root.parent, contents=False)
    print(summary(folder, meta))
    return folder.root


def may_be_replaced(folder: DataFolder, *, overwrite: bool) -> bool:
    """Return whether an existing folder is empty, incomplete, or a set that `overwrite` replaces.

    Raises: UsageError if it contains something else.
    """
    if folder.meta.exists():
        read_meta(folder.root)
        return overwrite
    if folder.root.is_dir():
        unfinished = folder.unfinished().root
        is_partly_moved = unfinished.parent == folder.root and unfinished.exists()
        if is_partly_moved or all(path == folder.lock for path in folder.root.iterdir()):
            return True
    raise UsageError(f"{folder.root} exists and is not a prepared set. Choose another with --output_dir.")


def short_name(args: PrepareArguments) -> str:
    """Return a short name of the text, for its folder."""
    if args.dataset:
        return Path(args.dataset).name
    if not args.text:
        return "python-docs"
    return Path(args.text[0]).stem if len(args.text) == 1 and not glob.has_magic(args.text[0]) else "text"


# ---- from documents to files ------------------------------------------------------------------------------------


def build(
    args: PrepareArguments,
    sources: dict[str, list[TextSource]],
    tokenizer: PreTrainedTokenizerFast | None,
    folder: DataFolder,
    state: PreparationProgress,
) -> PreparedSet:
    """Write everything but meta.json to `folder`, resuming from `state`, which is saved in progress.json.

    Returns: the contents of meta.json, without inputs and provenance.
    """
    holdout = Holdout(documents_of(sources["train"]), args.held_out)
    encoder = open_encoder(args, sources["train"], tokenizer, holdout, folder)
    dtype = np.dtype("<u2" if encoder.vocab_size <= 1 << 16 else "<u4")
    splits = write_splits(args, sources, holdout, encoder, dtype, folder, state)
    return PreparedSet(
        dtype=dtype.name,
        splits=splits,
        held_out="files" if args.validation_text else holdout.held_out,
        tokenizer=TokenizerFacts(
            name="trained here" if args.trains_tokenizer else str(args.tokenizer),
            of_hub=not args.trains_tokenizer and not Path(str(args.tokenizer)).expanduser().exists(),
            sha256=sha256(folder.tokenizer / "tokenizer.json"),
            vocab_size=encoder.vocab_size,
            eos_token_id=encoder.eos_id,
        ),
        sources={split: [source.origin for source in of_split] for split, of_split in sources.items()},
        fingerprint=state.fingerprint,
    )


def open_encoder(
    args: PrepareArguments,
    train: list[TextSource],
    tokenizer: PreTrainedTokenizerFast | None,
    holdout: Holdout,
    folder: DataFolder,
) -> Encoder:
    """Save the tokenizer in `folder` if it is not there yet, training it if there is none, and open its encoder."""
    if not folder.tokenizer.exists():
        # Each entry joins at least two bytes. The trainer reserves memory for as many entries as it is asked for.
        n_entries = min(args.new_vocab_size, SMALLEST_VOCABULARY + TRAINING_SAMPLE_BYTES)
        made = tokenizer or train_tokenizer(sample(train, holdout), n_entries)
        with atomic_write(folder.tokenizer) as temporary:
            made.save_pretrained(temporary)
    encoder = Encoder(load_tokenizer(str(folder.tokenizer)))  # what is saved makes the ids
    if args.trains_tokenizer and encoder.vocab_size < args.new_vocab_size:
        print_stderr(
            f"the text is enough for a tokenizer of {encoder.vocab_size:,} entries, not {args.new_vocab_size:,}."
        )
    return encoder


def write_splits(
    args: PrepareArguments,
    sources: dict[str, list[TextSource]],
    holdout: Holdout,
    encoder: Encoder,
    dtype: np.dtype,
    folder: DataFolder,
    state: PreparationProgress,
) -> dict[str, SplitCounts]:
    """Write token ids and document starts of every split, resuming from `state`. Returns: counts and files of each.

    Raises: UsageError for a split without text.
    """
    documents = chain(
        holdout.split(documents_of(sources["train"])),
        (("validation", document.blocks) for document in documents_of(sources.get("validation", []))),
    )
    todo = islice(batches(documents, cuttable=encoder.cuttable), state.batches, None)
    progress = Progress([source.meter for source in chain(*sources.values())])
    with ExitStack() as files, progress.live:
        writers = {}
        for split in ["train", "validation"] if args.held_out or args.validation_text else ["train"]:
            counts = state.splits.get(split) or SplitCounts(tokens=0, documents=0, bytes=0)
            writers[split] = SplitWriter(folder, split, dtype, counts)
            files.callback(writers[split].close)
        encoded_batches = in_order(partial(encode_batch, encoder=encoder), todo, args.n_workers)
        for n_batches, encoded in enumerate(encoded_batches, start=state.batches + 1):
            for split, part in encoded.items():
                writers[split].append(*part)
                max_id = writers[split].counts.max_id
                if not args.trains_tokenizer and args.vocab_size is not None and max_id >= args.vocab_size:
                    raise UsageError(
                        f"the text has token id {max_id:,}, too large for --vocab_size {args.vocab_size:,}. "
                        f"Give at least {max_id + 1:,}, or a smaller tokenizer."
                    )
            if n_batches % BATCHES_PER_SAVE == 0:
                counts = {split: writer.flush() for split, writer in writers.items()}
                replace(state, batches=n_batches, splits=counts).save(folder.progress)
            progress.show([writer.counts for writer in writers.values()])
        for split, writer in writers.items():
            if not writer.counts.tokens:
                raise UsageError(
                    f"the {split} split is empty. Give more --text, another --validation_fraction "
                    "(0: hold out nothing), or --validation_text."
                )
        return {split: writer.finish() for split, writer in writers.items()}


def resume_or_start(folder: DataFolder, fingerprint: str, *, overwrite: bool) -> PreparationProgress:
    """Return the saved state of `folder` if it has the same inputs, else empty it and return a new state.

    Raises: UsageError if it was started from other inputs and `overwrite` is not set, or was not made by prepare.
    """
    if folder.progress.exists():
        state = PreparationProgress.load(folder.progress)
        if (state.fingerprint, state.batch_chars) == (fingerprint, BATCH_CHARS):
            n_tokens = sum(counts.tokens for counts in state.splits.values())
            print_stderr(f"resuming {folder.root} after {n_tokens:,} tokens.")
            return state
        if not overwrite:
            raise UsageError(
                f"{folder.root} is an unfinished set from other inputs. Run the command that started it to finish it, "
                "pass --overwrite to delete it, or choose another --output_dir."
            )
    elif folder.root.exists() and not folder.meta.exists() and not all(map(is_leftover, folder.root.iterdir())):
        raise UsageError(f"{folder.root} exists and was not made by prepare. Move it, or choose another --output_dir.")
    if folder.root.exists():
        discard(folder)
    folder.root.mkdir(parents=True)
    state = PreparationProgress(fingerprint=fingerprint, batch_chars=BATCH_CHARS)
    state.save(folder.progress)
    return state


def discard(folder: DataFolder) -> None:
    """Remove an unfinished set; the file that identifies it last."""
    for path in sorted(folder.root.iterdir(), key=lambda path: path in (folder.progress, folder.meta)):
        remove(path)
    folder.root.rmdir()


def documents_of(sources: list[TextSource]) -> Iterator[Document]:
    return chain.from_iterable(source.documents() for source in sources)


def sample(sources: list[TextSource], holdout: Holdout) -> Iterator[str]:
    """Train text to train a tokenizer on: all of it, or batches evenly spread up to TRAINING_SAMPLE_BYTES.

    Where the size of a source is not known beforehand (streaming) they are the first ones.
    """
    sizes = [source.meter.size for source in sources]
    n_bytes = sum(sizes) if all(sizes) else 0
    stride = math.ceil(max(1, n_bytes / TRAINING_SAMPLE_BYTES))
    train = (document for document in holdout.split(documents_of(sources)) if document[0] == "train")
    taken = 0
    for batch in islice(batches(train, cuttable=True), 0, None, stride):
        for piece in batch:
            if isinstance(piece.content, str) and taken < TRAINING_SAMPLE_BYTES:
                taken += len(piece.content.encode())
                yield from cut([piece.content], 10_000)  # tokenizers keeps hundreds of texts in memory at a time
        if taken >= TRAINING_SAMPLE_BYTES:
            return


# ---- what the terminal shows ------------------------------------------------------------------------------------


class Progress:
    """Documents, bytes and tokens a second on stderr, and the time left where the sources' sizes are known.

    It is one live line on a terminal, and a line every SECONDS_BETWEEN_LINES elsewhere.
    """

    def __init__(self, meters: list[Meter]) -> None:
        self.meters = meters
        self.size = sum(meter.size for meter in meters) if all(meter.size for meter in meters) else 0
        self.console = Console(stderr=True)
        self.live = self.console.status("")
        self.start: tuple[float, int, int] | None = None  # time, tokens and bytes: a resumed run has some already
        self.shown = time.monotonic()

    def show(self, counts: list[SplitCounts]) -> None:
        """Update the live line, or print a line if it is time for one."""
        now = time.monotonic()
        self.start = self.start or (now, sum(split.tokens for split in counts), self.done())
        if self.console.is_terminal:
            self.live.update(Text(self.line(counts, now)))
        elif now - self.shown >= SECONDS_BETWEEN_LINES:
            self.shown = now
            self.console.print(self.line(counts, now), highlight=False, soft_wrap=True)

    def line(self, counts: list[SplitCounts], now: float) -> str:
        assert self.start is not None
        began, tokens_before, done_before = self.start
        seconds = max(now - began, 1e-9)
        tokens = sum(split.tokens for split in counts)
        words = [
            f"{sum(split.documents for split in counts):,} documents",
            f"{sum(split.bytes for split in counts) / 1e6:,.1f} MB",
            f"{tokens:,} tokens",
            f"{(tokens - tokens_before) / seconds / 1e6:.2f}M tok/s",
        ]
        done = self.done()
        if self.size and done > done_before:
            left = seconds * max(0, self.size - done) / (done - done_before)
            words += [f"{100 * min(1, done / self.size):.0f} %", f"{duration(left)} left"]
        return "  ".join(words)

    def done(self) -> int:
        return sum(meter.done for meter in self.meters)


def summary(folder: DataFolder, meta: PreparedSet) -> str:
    lines = [f"{'split':<10} {'tokens':>15} {'documents':>12} {'bytes of text':>16}  file"]
    for split, counts in meta.splits.items():
        first, *others = counts.files
        file = f"{folder.root / first}" + (f" and {len(others):,} more" if others else "")
        lines.append(f"{split:<10} {counts.tokens:>15,} {counts.documents:>12,} {counts.bytes:>16,}  {file}")
    if meta.held_out == "tails":
        lines.append(f"fewer than {FEW_DOCUMENTS} documents: validation is the end of each, train is the rest.")
    return "\n".join(lines)
