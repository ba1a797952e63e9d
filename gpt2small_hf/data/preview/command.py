"""Print rows of chats or of a prepared folder as training uses them: `gpt2small preview DATA …`.

`render.py` formats the rows, which are those of `ChatDataset` and `TextDataset`.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.config.data import (
    CHAT_PACKINGS,
    CHAT_SEQ_LEN,
    PACKINGS,
    TEXT_SEQ_LEN,
    VOCABULARY,
    ChatFlags,
    PreviewArguments,
)
from gpt2small_hf.config.parser import as_flags
from gpt2small_hf.data.chat.conversations import Conversation, describe_source, read_places
from gpt2small_hf.data.chat.files import find_places
from gpt2small_hf.data.chat.template_checks import set_template, stop_tokens
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.corpus.metadata import read_meta
from gpt2small_hf.data.preview.render import as_html, as_text, one_line
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.data.tokenizer import load_tokenizer, train_tokenizer
from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import counted
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.files import atomic_write, read_json
from gpt2small_hf.runs.layout import DataFolder, RunFolder

SAMPLE_CHARACTERS = 5_000_000
"""Characters of chats to train a tokenizer on that only the preview uses."""

Facts: TypeAlias = list[tuple[str, str]]


def preview(names: list[str], args: PreviewArguments, chat: ChatFlags, *, ids: bool = False) -> None:
    """Print rows of the data `names`, and write them as a page if `args` names one.

    Raises: UsageError for invalid data or settings.
    """
    open_set = _open_text if any(map(_is_prepared, names)) else _open_chats
    rows, tokenizer, facts, then = open_set(names, args, chat)
    if args.first_row >= len(rows):
        raise UsageError(f"--first_row is {args.first_row:,}, but the last row is number {len(rows) - 1:,}. Lower it.")
    numbers = range(args.first_row, min(args.first_row + args.n_rows, len(rows)))
    if isinstance(sys.stdout, io.TextIOWrapper):  # one that cannot write a character writes its number
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console()
    color = console.color_system is not None and not console.no_color
    print("\n".join(f"{name:<11}{one_line(fact)}" for name, fact in facts))
    print(as_text(rows, tokenizer, numbers, ids=ids, color=color))
    if args.html is not None:
        title = f"Supervised tokens of {', '.join(names)}"
        with atomic_write(args.html) as temporary:
            page = as_html(rows, tokenizer, numbers, ids=ids, title=title, facts=facts)
            temporary.write_text(page, encoding="utf-8")
        print(f"wrote {args.html}")
    print(f"next: {then}")


def _is_prepared(name: str) -> bool:
    return DataFolder(Path(name).expanduser()).exists


def _open_text(
    names: list[str], args: PreviewArguments, chat: ChatFlags
) -> tuple[TextDataset, PreTrainedTokenizerFast, Facts, str]:
    """Return the rows of a prepared folder, its tokenizer, facts to print, and the command that trains on them."""
    if len(names) > 1:
        prepared = next(filter(_is_prepared, names))
        raise UsageError(f"{prepared} is prepared text, which is previewed separately. Name it alone, or leave it out.")
    idle = [*chat.as_given(), *(["tokenizer"] if args.tokenizer is not None else [])]
    if idle:
        why = "it contains its tokenizer" if idle[0] == "tokenizer" else "it contains no chats"
        raise UsageError(f"--{idle[0]} does not apply to {names[0]}, which is prepared text: {why}. Leave it out.")
    if args.packing in CHAT_PACKINGS:
        raise UsageError(f"--packing {args.packing} applies to chats. For text choose one of {', '.join(PACKINGS)}.")
    if args.split == "validation" and args.packing not in (None, "stream"):
        raise UsageError(
            f"--packing {args.packing} applies to training rows; held-out rows always use stream. Leave it out."
        )
    folder, split, packing = Path(names[0]).expanduser(), args.split or "train", args.packing or "stream"
    meta = read_meta(folder)
    n_tokens = meta.splits[split].tokens if split in meta.splits else TEXT_SEQ_LEN
    rows = TextDataset(folder, split, args.seq_len or min(TEXT_SEQ_LEN, n_tokens), packing=packing)
    documents = counted(rows.counts.documents, "document")
    if meta.held_out == "tails":
        documents = f"the end of {documents}" if split == "validation" else f"{documents} without the end"
    facts = [
        ("data", f"{folder}, {split}: {rows.n_tokens:,} tokens in {documents}"),
        (
            "rows",
            f"{len(rows):,} of {rows.seq_len:,} tokens ({packing}), {rows.cropped_share:.1%} of the tokens in none; "
            "all of a row is supervised but its first token",
        ),
        ("tokenizer", f"{meta.tokenizer.name}, {meta.tokenizer.vocab_size:,} entries"),
    ]
    given = as_flags({"data_dir": names[0], "seq_len": args.seq_len, "packing": args.packing})
    return rows, load_tokenizer(str(DataFolder(folder).tokenizer)), facts, command("train", *given)


def _open_chats(
    names: list[str], args: PreviewArguments, chat: ChatFlags
) -> tuple[ChatDataset, PreTrainedTokenizerFast, Facts, str]:
    """Return the rows of chats, their tokenizer, facts to print, and the command that trains on them."""
    if args.packing in PACKINGS:
        raise UsageError(f"--packing {args.packing} applies to text. For chats choose {' or '.join(CHAT_PACKINGS)}.")
    place = None if args.tokenizer is None else find_tokenizer(args.tokenizer)
    tokenizer = None if place is None else load_tokenizer(place)
    # The tokenizer of a model knows its context; one without a model says some 10^30.
    context = CHAT_SEQ_LEN if tokenizer is None else tokenizer.model_max_length
    seq_len = args.seq_len or min(context, CHAT_SEQ_LEN)
    if chat.max_length is not None and chat.max_length > seq_len:
        raise UsageError(f"--max_length is {chat.max_length}, but a row has {seq_len} tokens. Raise --seq_len.")
    places = [place for name in names for place in find_places(name) if args.split in (None, place.split)]
    if not places:
        raise UsageError(f"no file in {', '.join(names)} is named {args.split}. Leave --split out to see all.")
    read = read_places(places, chat.skip_bad_rows)
    if chat.loss_on != "all" and not any(turn["role"] == "assistant" for one in read.chats for turn in one.messages):
        raise UsageError(
            f"{', '.join(names)} has no assistant turns, so no token is supervised. Preview it anyway "
            "with --loss_on all."
        )
    if tokenizer is None:
        tokenizer = train_tokenizer(_said(read.chats), VOCABULARY)
        words = (
            f"trained on these chats for this preview, {len(tokenizer):,} entries; a model's tokens differ. "
            "Name yours with --tokenizer FOLDER or HUB_ID"
        )
    else:
        words = f"{args.tokenizer}, {len(tokenizer):,} entries"
    # Repeated in the next command, because its recipe sets another.
    template = chat.template or (None if isinstance(tokenizer.chat_template, str) else "chatml")
    new = set_template(tokenizer, template, add_special_tokens=chat.add_special_tokens)
    rows = ChatDataset(
        read.chats,
        tokenizer,
        seq_len=seq_len,
        max_length=chat.max_length,
        loss_on=chat.loss_on,
        packing=args.packing or "padding",
        overlong=chat.overlong,
    )
    settings = Path(place or "") / "config.json"
    is_model = place is not None and settings.is_file()
    base_context = read_json(settings).get("max_position_embeddings", 0) if is_model else 0
    facts = [("data", describe_source(source)) for source in read.sources]
    facts += _chat_facts(rows, tokenizer, template, words)
    if rows.counts.too_long or rows.counts.shortened:
        facts.append(("too long", _lost(rows, args, chat, context, least=base_context)))
    if new:
        facts.append(("new tokens", " ".join(new)))
    given = {"chat_data": names, "init_from": place if is_model else None, "template": template}
    given |= {"add_special_tokens": chat.add_special_tokens, **chat.as_given()}
    # Override the recipe's context with this one. A base model keeps its context; only the rows get shorter.
    given |= {"max_position_embeddings": max(seq_len, base_context) if place else args.seq_len}
    given |= {"seq_len": seq_len if seq_len < base_context else None, "packing": args.packing}
    return rows, tokenizer, facts, command("train", "examples/chat.yaml", *as_flags(given))


def _chat_facts(rows: ChatDataset, tokenizer: PreTrainedTokenizerFast, template: str | None, words: str) -> Facts:
    """Return counts, rows, template and tokenizer (`words`) of a preview of chats."""
    share = rows.n_supervised / rows.n_tokens
    named = "the tokenizer's own" if template is None else "as given" if re.search("{[{%]", template) else template
    return [
        ("of these", str(rows.counts)),
        (
            "rows",
            f"{len(rows):,} of at most {rows.seq_len:,} tokens ({rows.packing}): {rows.n_tokens:,} tokens, "
            f"{rows.n_supervised:,} supervised ({share:.1%}), loss on {rows.loss_on}",
        ),
        ("template", f"{named}; an answer ends with {' or '.join(stop_tokens(tokenizer))}"),
        ("tokenizer", words),
    ]


def _lost(rows: ChatDataset, args: PreviewArguments, chat: ChatFlags, context: int, *, least: int) -> str:
    """Return how many conversations do not fit, why, and which settings keep them.

    `context` is that of the tokenizer; `least` that of the base model, which no run makes shorter, or 0.
    """
    counts, limit = rows.counts, chat.max_length or rows.seq_len
    longest = rows.longest
    if chat.max_length is not None:
        why, flags = "--max_length", f"--max_length {longest}" + f" --seq_len {longest}" * (longest > rows.seq_len)
    else:
        of_tokenizer = f"the context of {args.tokenizer}" if context <= CHAT_SEQ_LEN and args.tokenizer else None
        why = "--seq_len" if args.seq_len else of_tokenizer or "the default of --seq_len"
        trained = f"--max_position_embeddings {max(longest, least)}"
        flags = f"--seq_len {longest}; when training, {trained} and no shorter --seq_len"
    became = [f"{counts.too_long:,} left out"] * (counts.too_long > 0)
    became += [f"{counts.shortened:,} without their first turns"] * (counts.shortened > 0)
    return (
        f"{counts.too_long + counts.shortened:,} of {counts.conversations:,} conversations have more than {limit:,} "
        f"tokens ({why}): {', '.join(became)}. The longest has {longest:,}; to keep all: {flags}"
    )


def find_tokenizer(name: str) -> str:
    """Resolve a name to the folder of its tokenizer: the model of a run, or the tokenizer of a prepared set."""
    folder = Path(name).expanduser()
    for inside in (RunFolder(folder).model, DataFolder(folder).tokenizer):
        if inside.is_dir() and not (folder / "tokenizer_config.json").is_file():
            return str(inside)
    return str(folder) if folder.is_dir() else name


def _said(chats: Iterable[Conversation]) -> Iterator[str]:
    """Yield the contents of messages, up to SAMPLE_CHARACTERS."""
    taken = 0
    for message in (message for chat in chats for message in chat.messages):
        for text in (text for key, text in message.items() if key != "role"):
            yield text
            taken += len(text)
        if taken >= SAMPLE_CHARACTERS:
            return
