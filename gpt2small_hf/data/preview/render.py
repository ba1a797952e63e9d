"""Rows as text or HTML, with supervised tokens marked and every character visible.

Used by `preview`, and by every run for its first rows.
"""

from __future__ import annotations

import codecs
import html
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.data.corpus.encoder import byte_alphabet
from gpt2small_hf.data.row_dataset import IGNORED, RowDataset
from gpt2small_hf.formatting import counted

SUPERVISED, UNSUPERVISED, LINE_END = "⟦⟧", "││", "⏎"
PICTURES = {chr(code): chr(0x2400 + code) for code in range(32) if chr(code) != "\n"} | {"\x7f": "␡"}
"""Unicode's pictures of the control characters."""
OURS = {*SUPERVISED, *"⟨⟩", LINE_END, *PICTURES.values()}
LEGEND = ["⟦supervised tokens⟧", "⟨special token⟩", "⏎ line end"]
REST_OF_LEGEND = "⟨U+200B⟩ an invisible character, or one of these marks   ⟨0xF0⟩ a byte of an incomplete character"
IDS_LEGEND = "40⟦I⟧ token 40, supervised   220│ │ token 220, not supervised   127+102⟦é⟧ tokens that share a character"
INDENT = "  "
WIDTH = 110


# ---- a row, as it is shown --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenGroup:
    """Tokens that show together: one, or those that share a character."""

    ids: list[int]
    text: str
    """A byte that is not part of a complete character is the surrogate U+DC00 + byte."""
    special: bool
    supervised: bool


def read_row(
    rows: RowDataset, tokenizer: PreTrainedTokenizerFast, number: int
) -> tuple[str, list[tuple[str, list[TokenGroup]]]]:
    """Return the heading of row `number`, and heading and tokens of each part that attends only to itself."""
    row = rows[number]
    ids = row["input_ids"]
    # Rows of text have no labels: all tokens are supervised but the first token, which nothing predicts.
    supervised = row["labels"] != IGNORED if "labels" in row else np.arange(len(ids)) > 0
    parts = []
    for part, (start, end) in enumerate(pairwise([*rows.row_starts(number).tolist(), len(ids)])):
        heading = one_line(rows.part_heading(number, part, counted(end - start, "token")))
        parts.append((heading, read_tokens(tokenizer, ids[start:end], supervised[start:end])))
    facts = [
        f"row {number:,} of {len(rows):,}: {len(ids):,} of {rows.seq_len:,} tokens",
        f"{supervised.sum():,} supervised ({supervised.mean():.1%})",
        *rows.row_facts(number),
    ]
    return ", ".join(facts), parts


def read_tokens(tokenizer: PreTrainedTokenizerFast, input_ids: np.ndarray, supervised: np.ndarray) -> list[TokenGroup]:
    """Token ids → pieces that can be read. A piece of several tokens is supervised if any of them is."""
    ids = [int(id) for id in input_ids]
    spelled = _spelling(tokenizer)
    added = tokenizer.added_tokens_decoder
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    pieces: list[TokenGroup] = []
    begin, text = 0, ""

    def close(end: int, *, special: bool = False) -> None:
        nonlocal begin, text
        text += decoder.decode(b"", final=True)
        if begin < end:
            pieces.append(TokenGroup(ids[begin:end], text, special, bool(supervised[begin:end].any())))
        begin, text = end, ""

    for at, (id, token) in enumerate(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)):
        if token is None or (id in added and added[id].special):
            close(at)
            text = "no such token" if token is None else added[id].content
            close(at + 1, special=True)
            continue
        text += decoder.decode(added[id].content.encode() if id in added else spelled(token))
        if not decoder.getstate()[0]:  # no incomplete character
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
    """Return text with every control character made visible; line ends are marked and kept.

    Different texts give different results: a mark that is part of the text is written as its code point.
    """
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return f"{LINE_END}\n"
    if character in PICTURES:
        return PICTURES[character]
    if 0xDC80 <= code <= 0xDCFF:
        return f"⟨0x{code - 0xDC00:02X}⟩"
    if character.isprintable() and character not in OURS:
        return character
    return f"⟨U+{code:04X}⟩"


def one_line(text: str) -> str:
    """Return visible text without line ends."""
    return visible(text).replace("\n", "")


def shown(piece: TokenGroup) -> str:
    """Return visible text in which a special token differs from the same characters typed as text."""
    return f"⟨{visible(piece.text)}⟩" if piece.special else visible(piece.text)


# ---- text -------------------------------------------------------------------------------------------------------


def as_text(
    rows: RowDataset,
    tokenizer: PreTrainedTokenizerFast,
    row_numbers: Iterable[int],
    *,
    ids: bool = False,
    color: bool = False,
) -> str:
    """Return rows for a terminal or a text file, with a legend. Text of the data is indented, unlike headings.

    With `ids`, each token has its id in front; with `color`, supervised tokens are green and special tokens reversed.
    """
    lines = ["   ".join(LEGEND), REST_OF_LEGEND, *([IDS_LEGEND] if ids else [])]
    for number in row_numbers:
        heading, parts = read_row(rows, tokenizer, number)
        lines += ["", _styled(heading, ["1"] if color else [])]
        for part_heading, pieces in parts:
            if part_heading:
                lines.append(_styled(f"── {part_heading}", ["2"] if color else []))
            body = _pairs(pieces, color) if ids else _running(pieces, color)
            lines += [INDENT + line for line in body.removesuffix("\n").split("\n")]
    return "\n".join(lines) + "\n"


def _running(pieces: Sequence[TokenGroup], color: bool) -> str:
    """Pieces as running text, what is supervised between marks."""
    parts = []
    for supervised, run in groupby(pieces, lambda piece: piece.supervised):
        begin, end = SUPERVISED if supervised else ("", "")
        segments = [(special, "".join(map(shown, some))) for special, some in groupby(run, lambda piece: piece.special)]
        codes = ["32"] if supervised and color else []
        parts += [
            _styled(begin, codes),
            *(_styled(text, [*codes, "7"] if special and color else codes) for special, text in segments),
            _styled(end, codes),
        ]
    return "".join(parts)


def _pairs(pieces: Sequence[TokenGroup], color: bool) -> str:
    """Each piece with its ids in front, as many to a line as it takes; a line of the text ends one."""
    lines, width = [""], 0
    for piece in pieces:
        begin, end = SUPERVISED if piece.supervised else UNSUPERVISED
        text = shown(piece)
        cell, codes = (
            f"{begin}{text.replace(chr(10), '')}{end}",
            [*(["32"] * piece.supervised), *(["7"] * piece.special)],
        )
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
    """Text in a terminal's style, each line by itself: pagers reset a style at its end."""
    if not codes:
        return text
    return "\n".join(f"\x1b[{';'.join(codes)}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


# ---- a page -----------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --loss: #d5efd9; --special: #ddd6fb; --faint: #666; --edge: #0002; --line: #ccc; }
@media (prefers-color-scheme: dark) {
  :root { --loss: #1d4a2b; --special: #493b80; --faint: #aaa; --edge: #fff3; --line: #555; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
h3 { font-size: .9rem; font-weight: normal; color: var(--faint); margin: 1rem 0 .3rem; }
h1, h2, h3, dd { overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { color: var(--faint); } dd { margin: 0; }
.text { font: 14px/1.8 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
div.text { border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; }
mark { background: var(--loss); color: inherit; }
mark, b { unicode-bidi: isolate; }
b { background: var(--special); border-radius: 3px; }
span { box-shadow: inset 1px 0 var(--edge); }
sub { font-size: 10px; color: var(--faint); }
""".strip()
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<h1>{title}</h1>
<dl>
{body}
</body>
</html>
"""


def as_html(
    rows: RowDataset,
    tokenizer: PreTrainedTokenizerFast,
    row_numbers: Iterable[int],
    *,
    ids: bool = False,
    title: str = "Supervised tokens",
    facts: Iterable[tuple[str, str]] = (),
) -> str:
    """Return rows as a self-contained HTML page without scripts; hovering over a token shows its ids.

    `facts` are names and values to print above the rows; with `ids`, each token has its id behind it.
    """
    heading = html.escape(one_line(title))
    lines = [f"<dt>{html.escape(one_line(name))}</dt><dd>{html.escape(one_line(fact))}</dd>" for name, fact in facts]
    lines += [
        "</dl>",
        f'<p class="text"><mark>{LEGEND[0]}</mark>   <b>{LEGEND[1]}</b>   {LEGEND[2]}\n{REST_OF_LEGEND}\n'
        "A thin line marks the start of a token; hover to see its id.</p>",
    ]
    for number in row_numbers:
        row_heading, parts = read_row(rows, tokenizer, number)
        lines.append(f"<section>\n<h2>{html.escape(row_heading)}</h2>")
        for part_heading, pieces in parts:
            if part_heading:
                lines.append(f"<h3>{html.escape(part_heading)}</h3>")
            lines.append(f'<div class="text">{_marked_up(pieces, ids)}</div>')
        lines.append("</section>")
    return PAGE.format(title=heading, style=STYLE, body="\n".join(lines))


def _marked_up(pieces: Sequence[TokenGroup], ids: bool) -> str:
    parts = []
    for supervised, run in groupby(pieces, lambda piece: piece.supervised):
        inside = "".join(_token(piece, ids) for piece in run)
        parts.append(f"<mark>{SUPERVISED[0]}{inside}{SUPERVISED[1]}</mark>" if supervised else inside)
    return "".join(parts)


def _token(piece: TokenGroup, ids: bool) -> str:
    tag = "b" if piece.special else "span"
    numbers = "+".join(map(str, piece.ids))
    text, line_end = shown(piece), ""
    if ids and text.endswith("\n"):  # keep the id on the line that its token ends
        text, line_end = text[:-1], "\n"
    behind = f"<sub>{numbers}</sub>{line_end}" if ids else ""
    return f'<{tag} title="{numbers}">{html.escape(text)}{behind}</{tag}>'
