"""Rows as a model is trained on them → text and a page to look at. Door: `python -m gpt2small_hf preview DATA …`.

What is learned, which tokens are special and what did not fit is read from the rows themselves, which
`chat_dataset.py` and `dataset.py` make.
"""

from __future__ import annotations

import codecs
import html
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.data.arguments import ChatArguments
from gpt2small_hf.data.chat import set_template, stop_tokens
from gpt2small_hf.data.chat_dataset import CHAT_PACKINGS, IGNORED, ChatDataset
from gpt2small_hf.data.conversations import Conversation, counted, describe_source, find_places, read_places
from gpt2small_hf.data.dataset import TokenDataset, read_meta
from gpt2small_hf.data.encoding import byte_alphabet
from gpt2small_hf.data.packing import PACKINGS
from gpt2small_hf.data.tokenizer import load_tokenizer, train_tokenizer
from gpt2small_hf.flags import FlagParser, as_flags
from gpt2small_hf.runs import DataFolder, RunFolder, UsageError, whole

CHAT_SEQ_LEN, TEXT_SEQ_LEN = 1024, 256
VOCABULARY = 1024
SAMPLE_CHARACTERS = 5_000_000
"""Of chats, to train a tokenizer on that is only looked at."""

LEARNED, NOT_LEARNED, NOT_TEXT, LINE_END = "⟦⟧", "││", "⟨⟩", "⏎"
PICTURES = {chr(code): chr(0x2400 + code) for code in range(32) if chr(code) != "\n"} | {"\x7f": "␡"}
"""Unicode's pictures of the control characters."""
OURS = {*LEARNED, *NOT_TEXT, LINE_END, *PICTURES.values()}
LEGEND = ["⟦what is learned⟧", "⟨special token⟩", "⏎ end of a line"]
REST_OF_LEGEND = "⟨U+200B⟩ a character that does not show, or is one of these marks   ⟨0xF0⟩ a byte of a cut character"
IDS_LEGEND = "40⟦I⟧ token 40, learned   220│ │ token 220, not learned   127+102⟦é⟧ tokens that share a character"
INDENT = "  "
WIDTH = 110

Rows: TypeAlias = ChatDataset | TokenDataset
Facts: TypeAlias = list[tuple[str, str]]


# ---- the command ------------------------------------------------------------------------------------------------


@dataclass
class PreviewArguments:
    """Which rows to show, and how."""

    _argument_group_name = "rows"

    tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "Of chats: the folder of a run, a model or a tokenizer, or a Hub id. Unset: one of "
            f"{VOCABULARY:,} entries is trained on the chats, to look at them; a model is trained with its own."
        },
    )
    seq_len: int | None = field(
        default=None,
        metadata={
            "help": f"Tokens of a row; of chats, at most. Unset: {CHAT_SEQ_LEN:,} for chats; for prepared text "
            f"{TEXT_SEQ_LEN}, or as many as there are. While training it is the model's context."
        },
    )
    packing: Literal["padding", "best_fit", "stream", "bos_bestfit", "isolate"] | None = field(
        default=None,
        metadata={
            "help": "How rows are made. Of chats: padding (unset), one conversation to a row; best_fit, several. Of "
            "prepared text: stream (unset), bos_bestfit, isolate. train.py --help says what they are."
        },
    )
    split: Literal["train", "validation"] | None = field(
        default=None,
        metadata={
            "help": "Of a prepared folder: which split to show; unset, train. Of a folder of chats: only its files of "
            "that name; unset, all."
        },
    )
    n_rows: int = field(default=3, metadata={"help": "How many rows to show (also -n).", "aliases": ["-n"]})
    first_row: int = field(default=0, metadata={"help": "The first of them; rows are counted from 0."})
    html: Path | None = field(
        default=None, metadata={"help": "Also write a page to look at in a browser. It needs nothing beside itself."}
    )

    def __post_init__(self) -> None:
        least = {"seq_len": 2, "n_rows": 1, "first_row": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise UsageError(f"--{name} is {value}. Give {smallest} or more.")
        # What lies there is replaced: it had better be a page.
        if self.html is not None and (self.html.suffix.lower() not in (".html", ".htm") or self.html.is_dir()):
            raise UsageError(f"--html {self.html} is not the name of a page. Name a file that ends with .html.")


@dataclass
class ChatFlags(ChatArguments):
    """What `train.py` has for chats, without the names of the data."""

    _argument_group_name = "chats, as train.py has them"

    chat_data: list[str] | None = field(init=False, default=None)
    validation_data: list[str] | None = field(init=False, default=None)

    def as_given(self) -> dict[str, Any]:
        """Those that differ from their defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init and getattr(self, f.name) != f.default}


def main(words: list[str]) -> None:
    """`python -m gpt2small_hf preview`."""
    parser = FlagParser(
        PreviewArguments,
        ChatFlags,
        prog="python -m gpt2small_hf preview",
        usage="python -m gpt2small_hf preview DATA … [--flag value …]",
        description="Show what a model would be trained on, row by row: the template in force, what of it is learned "
        "and what did not fit.",
    )
    parser.add_argument(
        "DATA",
        nargs="+",
        help="Chats, as --chat_data of train.py takes them: files, folders, Hub ids, NAME[:100] for some rows. "
        "Or one folder that `prepare` has written.",
    )
    parser.add_argument("--ids", action="store_true", help="Show the ids of the tokens.")
    args, chat, others = parser.fill(_apart(words))
    open_set = _open_text if any(map(_is_prepared, others.DATA)) else _open_chats
    rows, tokenizer, facts, then = open_set(others.DATA, args, chat)
    if args.first_row >= len(rows):
        raise UsageError(f"--first_row is {args.first_row:,}, but the last row is number {len(rows) - 1:,}. Lower it.")
    numbers = range(args.first_row, min(args.first_row + args.n_rows, len(rows)))
    if isinstance(sys.stdout, io.TextIOWrapper):  # one that cannot write a character writes its number
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console()
    color = console.color_system is not None and not console.no_color
    print("\n".join(f"{name:<11}{one_line(fact)}" for name, fact in facts))
    print(as_text(rows, tokenizer, numbers, ids=others.ids, color=color))
    if args.html is not None:
        title = f"What is learned from {', '.join(others.DATA)}"
        with whole(args.html) as temporary:
            page = as_html(rows, tokenizer, numbers, ids=others.ids, title=title, facts=facts)
            temporary.write_text(page, encoding="utf-8")
        print(f"wrote {args.html}")
    print(f"next: {then}")


def _apart(words: list[str]) -> list[str]:
    """`--skip_bad_rows chats.jsonl` with an end to the flag: the parser would take the name for its value."""
    names = [f.name for f in fields(ChatFlags) if f.default is False]
    switches = {f"--{spelled}" for name in names for spelled in (name, name.replace("_", "-"))}
    truths = {*("yes", "true", "t", "y", "1"), *("no", "false", "f", "n", "0")}
    return [
        f"{word}=true" if word in switches and after.lower() not in truths else word
        for word, after in pairwise([*words, ""])
    ]


def _is_prepared(name: str) -> bool:
    data = DataFolder(Path(name).expanduser())
    return data.meta.is_file() or (not data.root.exists() and bool(data.root.name) and data.unfinished().root.exists())


def _open_text(
    names: list[str], args: PreviewArguments, chat: ChatFlags
) -> tuple[TokenDataset, PreTrainedTokenizerFast, Facts, str]:
    """The rows of a prepared folder, its tokenizer, what is said of them, and the command that trains on them."""
    if len(names) > 1:
        prepared = next(filter(_is_prepared, names))
        raise UsageError(f"{prepared} is prepared text, which is shown by itself. Name it alone, or leave it out.")
    idle = [*chat.as_given(), *(["tokenizer"] if args.tokenizer is not None else [])]
    if idle:
        why = "it has its tokenizer with it" if idle[0] == "tokenizer" else "there are no chats in it"
        raise UsageError(f"--{idle[0]} says nothing to {names[0]}, which is prepared text: {why}. Leave it out.")
    if args.packing in CHAT_PACKINGS:
        raise UsageError(f"--packing {args.packing} is of chats. For text choose one of {', '.join(PACKINGS)}.")
    if args.split == "validation" and args.packing not in (None, "stream"):
        raise UsageError(f"--packing {args.packing} is of training rows; held-out ones are always cut from the stream.")
    folder, split, packing = Path(names[0]).expanduser(), args.split or "train", args.packing or "stream"
    meta = read_meta(folder)
    counts = meta["splits"].get(split, {"tokens": TEXT_SEQ_LEN})
    rows = TokenDataset(folder, split, args.seq_len or min(TEXT_SEQ_LEN, counts["tokens"]), packing=packing)
    vocabulary = meta["tokenizer"]
    facts = [
        ("data", f"{folder}, {split}: {counts['tokens']:,} tokens in {counts['documents']:,} documents"),
        (
            "rows",
            f"{len(rows):,} of {rows.seq_len:,} tokens ({packing}), {rows.cropped_share:.1%} of the tokens in none; "
            "all of a row is supervised but its first token",
        ),
        ("tokenizer", f"{vocabulary['name']}, {vocabulary['vocab_size']:,} entries"),
    ]
    given = as_flags({"data_dir": names[0], "seq_len": args.seq_len, "packing": args.packing})
    return rows, load_tokenizer(str(DataFolder(folder).tokenizer)), facts, shlex.join(["python", "train.py", *given])


def _open_chats(
    names: list[str], args: PreviewArguments, chat: ChatFlags
) -> tuple[ChatDataset, PreTrainedTokenizerFast, Facts, str]:
    """The rows of chats, their tokenizer, what is said of them, and the command that trains on them."""
    if args.packing in PACKINGS:
        raise UsageError(f"--packing {args.packing} is of text. For chats choose {' or '.join(CHAT_PACKINGS)}.")
    seq_len = args.seq_len or CHAT_SEQ_LEN
    if chat.max_length is not None and chat.max_length > seq_len:
        raise UsageError(f"--max_length is {chat.max_length}, but a row has {seq_len} tokens. Raise --seq_len.")
    place = None if args.tokenizer is None else find_tokenizer(args.tokenizer)
    tokenizer = None if place is None else load_tokenizer(place)
    places = [place for name in names for place in find_places(name) if args.split in (None, place.split)]
    if not places:
        raise UsageError(f"no file in {', '.join(names)} is named {args.split}. Leave --split out to see all.")
    read = read_places(places, chat.skip_bad_rows)
    if chat.loss_on != "all" and not any(turn["role"] == "assistant" for one in read.chats for turn in one.messages):
        raise UsageError(
            f"the assistant says nothing in {', '.join(names)}, so there is nothing to learn. Look at it all the same "
            "with --loss_on all."
        )
    if tokenizer is None:
        tokenizer = train_tokenizer(_said(read.chats), VOCABULARY)
        words = (
            f"trained on these chats to look at them, {len(tokenizer):,} entries; a model has other tokens. "
            "Name yours with --tokenizer FOLDER or HUB_ID"
        )
    else:
        words = f"{args.tokenizer}, {len(tokenizer):,} entries"
    # Named in the next command too, which begins with a recipe that has its own.
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
    said = "the tokenizer's own" if template is None else "as given" if re.search("{[{%]", template) else template
    facts = [("data", describe_source(source)) for source in read.sources]
    share = rows.n_supervised / rows.n_tokens
    facts += [
        ("of these", str(rows.counts)),
        (
            "rows",
            f"{len(rows):,} of at most {seq_len:,} tokens ({rows.packing}): {rows.n_tokens:,} tokens, "
            f"{rows.n_supervised:,} supervised ({share:.1%}), loss on {rows.loss_on}",
        ),
        ("template", f"{said}; an answer ends with {' or '.join(stop_tokens(tokenizer))}"),
        ("tokenizer", words),
    ]
    if new:
        facts.append(("new tokens", " ".join(new)))
    is_model = place is not None and (Path(place) / "config.json").is_file()
    given = {"chat_data": names, "init_from": place if is_model else None, "template": template}
    given |= {"add_special_tokens": chat.add_special_tokens, **chat.as_given()}
    given |= {"seq_len": args.seq_len, "packing": args.packing}
    return rows, tokenizer, facts, shlex.join(["python", "train.py", "examples/chat.yaml", *as_flags(given)])


def find_tokenizer(name: str) -> str:
    """Where the tokenizer lies that a name stands for: a run's is with its model, a prepared set's in a folder."""
    folder = Path(name).expanduser()
    for inside in (RunFolder(folder).model, DataFolder(folder).tokenizer):
        if inside.is_dir() and not (folder / "tokenizer_config.json").is_file():
            return str(inside)
    return str(folder) if folder.is_dir() else name


def _said(chats: Iterable[Conversation]) -> Iterator[str]:
    """What is said in chats, up to SAMPLE_CHARACTERS."""
    taken = 0
    for message in (message for chat in chats for message in chat.messages):
        for text in (text for key, text in message.items() if key != "role"):
            yield text
            taken += len(text)
        if taken >= SAMPLE_CHARACTERS:
            return


# ---- a row, as it is shown --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Tokens that show together: one, or those that share a character."""

    ids: list[int]
    text: str
    """A byte that belongs to no whole character stands in it as the surrogate U+DC00 + byte."""
    special: bool
    learned: bool


@dataclass(frozen=True)
class Part:
    """What the model sees by itself: a conversation, a document, or a whole row."""

    heading: str
    pieces: list[Piece]


@dataclass(frozen=True)
class Row:
    heading: str
    parts: list[Part]


def read_row(rows: Rows, tokenizer: PreTrainedTokenizerFast, number: int) -> Row:
    """Row `number`, taken apart."""
    row = rows[number]
    ids = row["input_ids"]
    # Text has no labels of its own: all is learned but the first token, which nothing predicts.
    learned = row["labels"] != IGNORED if "labels" in row else np.arange(len(ids)) > 0
    if isinstance(rows, ChatDataset):
        lengths = [len(rows.encoded[chat].input_ids) for chat in rows.rows[number]]
        starts = np.cumsum([0, *lengths[:-1]])
    else:
        starts = np.flatnonzero(row["position_ids"] == 0) if "position_ids" in row else np.zeros(1, int)
    spans = list(pairwise([*starts.tolist(), len(ids)]))
    parts = [
        Part(
            _part_heading(rows, number, n, len(spans), learned[start:end]),
            read_tokens(tokenizer, ids[start:end], learned[start:end]),
        )
        for n, (start, end) in enumerate(spans)
    ]
    return Row(_row_heading(rows, number, ids, learned, len(spans)), parts)


def _row_heading(rows: Rows, number: int, ids: np.ndarray, learned: np.ndarray, n_parts: int) -> str:
    facts = [
        f"row {number:,} of {len(rows):,}: {len(ids):,} of {rows.seq_len:,} tokens",
        f"{learned.sum():,} supervised ({learned.mean():.1%})",
    ]
    if isinstance(rows, ChatDataset):
        facts.append(counted(n_parts, "conversation"))
        if removed := sum(rows.removed[chat] for chat in rows.rows[number]):
            facts.append(f"{counted(removed, 'turn')} did not fit")
        if len(ids) < rows.seq_len:
            facts.append("padding not shown")
    elif rows.packing == "isolate":
        facts.append(counted(n_parts, "document"))
    else:
        facts.append(counted(int((ids == rows.eos_id).sum()), "end-of-text token"))
    return ", ".join(facts)


def _part_heading(rows: Rows, row: int, n: int, n_parts: int, learned: np.ndarray) -> str:
    tokens = counted(len(learned), "token")
    if isinstance(rows, ChatDataset):
        chat = rows.rows[row][n]
        removed = rows.removed[chat]
        lost = f", without its first {counted(removed, 'turn')}" if removed else ""
        where = one_line(rows.chats[chat].where)
        return f"conversation {n + 1} of {n_parts}: {where}: {tokens}, {learned.sum():,} supervised{lost}"
    return f"document {n + 1} of {n_parts}: {tokens}" if rows.packing == "isolate" else ""


def read_tokens(tokenizer: PreTrainedTokenizerFast, input_ids: np.ndarray, learned: np.ndarray) -> list[Piece]:
    """Token ids → pieces that can be read. A piece of several tokens is learned if any of them is."""
    ids = [int(id) for id in input_ids]
    spelled = _spelling(tokenizer)
    added = tokenizer.added_tokens_decoder
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    pieces: list[Piece] = []
    begin, text = 0, ""

    def close(end: int, *, special: bool = False) -> None:
        nonlocal begin, text
        text += decoder.decode(b"", final=True)
        if begin < end:
            pieces.append(Piece(ids[begin:end], text, special, bool(learned[begin:end].any())))
        begin, text = end, ""

    for at, (id, token) in enumerate(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)):
        if token is None or (id in added and added[id].special):
            close(at)
            text = "no such token" if token is None else added[id].content
            close(at + 1, special=True)
            continue
        text += decoder.decode(added[id].content.encode() if id in added else spelled(token))
        if not decoder.getstate()[0]:  # no character is begun that the next token would end
            close(at + 1)
    close(len(ids))
    return pieces


def _spelling(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], bytes]:
    """Entry of the vocabulary → the bytes it stands for.

    GPT-2's and its kind have a character for each byte; SentencePiece's have ▁ for a space and <0x0A> for a lone byte.
    """
    alphabet = byte_alphabet()
    byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)

    def spelled(token: str) -> bytes:
        if byte_level and alphabet.keys() >= set(token):
            return bytes(alphabet[character] for character in token)
        if lone := re.fullmatch("<0x([0-9A-F]{2})>", token):
            return bytes.fromhex(lone[1])
        return token.replace("▁", " ").encode()

    return spelled


def visible(text: str) -> str:
    """Text of which every character shows and none is obeyed; ends of lines are marked, and still are ends of lines.

    No two texts come out alike: one of our marks that somebody typed is spelled by its number.
    """
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return f"{LINE_END}\n"
    if character in PICTURES:
        return PICTURES[character]
    if 0xDC80 <= code <= 0xDCFF:
        return _not_text(f"0x{code - 0xDC00:02X}")
    if character.isprintable() and character not in OURS:
        return character
    return _not_text(f"U+{code:04X}")


def _not_text(words: str) -> str:
    return f"{NOT_TEXT[0]}{words}{NOT_TEXT[1]}"


def one_line(text: str) -> str:
    """The same without ends of lines."""
    return visible(text).replace("\n", "")


def shown(piece: Piece) -> str:
    """A piece's text in plain characters, by which a special token is no more alike one that was typed."""
    return _not_text(visible(piece.text)) if piece.special else visible(piece.text)


# ---- text -------------------------------------------------------------------------------------------------------


def as_text(
    rows: Rows,
    tokenizer: PreTrainedTokenizerFast,
    row_numbers: Iterable[int],
    *,
    ids: bool = False,
    color: bool = False,
) -> str:
    """Rows for a terminal or a text file, with what the marks mean.

    What stands in the data is indented, so that nothing in it is taken for a heading.

    Args:
        rows: to show some of.
        tokenizer: the one that made them.
        row_numbers: those to show.
        ids: each token with its id in front.
        color: also by the terminal's colours: what is learned green, special tokens reversed.
    """
    lines = ["   ".join(LEGEND), REST_OF_LEGEND, *([IDS_LEGEND] if ids else [])]
    for number in row_numbers:
        row = read_row(rows, tokenizer, number)
        lines += ["", _styled(row.heading, ["1"] if color else [])]
        for part in row.parts:
            if part.heading:
                lines.append(_styled(f"── {part.heading}", ["2"] if color else []))
            body = _pairs(part.pieces, color) if ids else _running(part.pieces, color)
            lines += [INDENT + line for line in body.removesuffix("\n").split("\n")]
    return "\n".join(lines) + "\n"


def _running(pieces: Sequence[Piece], color: bool) -> str:
    """Pieces as running text, what is learned between marks."""
    parts = []
    for learned, run in groupby(pieces, lambda piece: piece.learned):
        begin, end = LEARNED if learned else ("", "")
        segments = [(special, "".join(map(shown, some))) for special, some in groupby(run, lambda piece: piece.special)]
        codes = ["32"] if learned and color else []
        parts += [
            _styled(begin, codes),
            *(_styled(text, [*codes, "7"] if special and color else codes) for special, text in segments),
            _styled(end, codes),
        ]
    return "".join(parts)


def _pairs(pieces: Sequence[Piece], color: bool) -> str:
    """Each piece with its ids in front, as many to a line as it takes; a line of the text ends one."""
    lines, width = [""], 0
    for piece in pieces:
        begin, end = LEARNED if piece.learned else NOT_LEARNED
        text = shown(piece)
        cell, codes = f"{begin}{text.replace(chr(10), '')}{end}", [*(["32"] * piece.learned), *(["7"] * piece.special)]
        numbers = "+".join(map(str, piece.ids))
        if width and width + len(numbers) + len(cell) > WIDTH:
            lines.append("")
            width = 0
        lines[-1] += f"{' ' * bool(width)}{_styled(numbers, ['2'] * color)}{_styled(cell, codes if color else [])}"
        width += len(numbers) + len(cell) + 1
        if "\n" in text:
            lines.append("")
            width = 0
    return "\n".join(lines)


def _styled(text: str, codes: Sequence[str]) -> str:
    """Text in a terminal's style, each line by itself: pagers forget a style at the end of one."""
    if not codes:
        return text
    return "\n".join(f"\x1b[{';'.join(codes)}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


# ---- a page -----------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --learned: #d5efd9; --special: #ddd6fb; --faint: #666; --edge: #0002; --line: #ccc; }
@media (prefers-color-scheme: dark) {
  :root { --learned: #1d4a2b; --special: #493b80; --faint: #aaa; --edge: #fff3; --line: #555; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
h3 { font-size: .9rem; font-weight: normal; color: var(--faint); margin: 1rem 0 .3rem; }
h1, h2, h3, dd { overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { color: var(--faint); } dd { margin: 0; }
.text { font: 14px/1.8 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
div.text { border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; }
mark { background: var(--learned); color: inherit; }
mark, b { unicode-bidi: isolate; }
b { background: var(--special); border-radius: 3px; }
span { box-shadow: inset 1px 0 var(--edge); }
sub { font-size: 10px; color: var(--faint); }
""".strip()


def as_html(
    rows: Rows,
    tokenizer: PreTrainedTokenizerFast,
    row_numbers: Iterable[int],
    *,
    ids: bool = False,
    title: str = "What is learned",
    facts: Iterable[tuple[str, str]] = (),
) -> str:
    """Rows as a page that needs nothing beside itself and runs nothing; the ids of a token show under the pointer.

    Args:
        rows: to show some of.
        tokenizer: the one that made them.
        row_numbers: those to show.
        ids: each token with its id behind it.
        title: of the page.
        facts: names and values to stand above the rows.
    """
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_plain(title)}</title>",
        f"<style>\n{STYLE}\n</style>",
        "</head>",
        "<body>",
        f"<h1>{_plain(title)}</h1>",
        "<dl>",
        *(f"<dt>{_plain(name)}</dt><dd>{_plain(fact)}</dd>" for name, fact in facts),
        "</dl>",
        f'<p class="text"><mark>{LEGEND[0]}</mark>   <b>{LEGEND[1]}</b>   {LEGEND[2]}\n{REST_OF_LEGEND}\n'
        "Where a token begins there is a thin line; its id shows under the pointer.</p>",
    ]
    for number in row_numbers:
        row = read_row(rows, tokenizer, number)
        lines.append(f"<section>\n<h2>{html.escape(row.heading)}</h2>")
        for part in row.parts:
            if part.heading:
                lines.append(f"<h3>{html.escape(part.heading)}</h3>")
            lines.append(f'<div class="text">{_marked_up(part.pieces, ids)}</div>')
        lines.append("</section>")
    return "\n".join([*lines, "</body>", "</html>"]) + "\n"


def _plain(text: str) -> str:
    return html.escape(one_line(text))


def _marked_up(pieces: Sequence[Piece], ids: bool) -> str:
    parts = []
    for learned, run in groupby(pieces, lambda piece: piece.learned):
        inside = "".join(_token(piece, ids) for piece in run)
        parts.append(f"<mark>{LEARNED[0]}{inside}{LEARNED[1]}</mark>" if learned else inside)
    return "".join(parts)


def _token(piece: Piece, ids: bool) -> str:
    tag = "b" if piece.special else "span"
    numbers = "+".join(map(str, piece.ids))
    text, line_end = shown(piece), ""
    if ids and text.endswith("\n"):  # the id stands on the line that its token ends
        text, line_end = text[:-1], "\n"
    behind = f"<sub>{numbers}</sub>{line_end}" if ids else ""
    return f'<{tag} title="{numbers}">{html.escape(text)}{behind}</{tag}>'
