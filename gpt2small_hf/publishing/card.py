"""The facts of a model → README.md, its model card: the words are in `model_card.j2`, the facts from `facts.py`.

Also what keeps a card honest: the gate that refuses an unfinished one, and the mark by which an edited one is known.
"""

from __future__ import annotations

import hashlib
import re
from html import escape
from pathlib import Path
from textwrap import fill
from typing import Any
from urllib.parse import quote

import jinja2
import yaml
from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import counted, number, perplexity
from gpt2small_hf.publishing.facts import Publication, facts
from gpt2small_hf.publishing.source import PushSource
from gpt2small_hf.publishing.stage import is_loaded
from gpt2small_hf.report.page import fenced
from gpt2small_hf.report.tables import escaped, one_line
from gpt2small_hf.resources import resource

TEMPLATE = resource("model_card.j2")


def render(source: PushSource, folder: Path, publication: Publication, template: Path = TEMPLATE) -> str:
    """The card of a staged folder, with its metadata, and a mark at its end by which `is_unedited` knows it again.

    Raises: UsageError if the template asks for what is not known, or is no template.
    """
    known = facts(source, folder, publication)
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS
    try:
        text = environment.get_template(template.name).render(known)
    except jinja2.UndefinedError as error:
        raise UsageError(f"{template} asks for what is not known: {error.message}. Mend the template.") from None
    except jinja2.TemplateError as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise UsageError(f"{template}{line} cannot be rendered: {error.message}.") from None
    text = squeezed(text).strip() + "\n"
    return add_mark(f"---\n{header(known)}\n---\n\n{text}")


def squeezed(text: str) -> str:
    """Markdown with one empty line where a template left several, but for code blocks."""
    kept: list[str] = []
    for line, prose in zip(text.split("\n"), without_code(text, "\0").split("\n"), strict=True):
        if prose or not kept or kept[-1]:
            kept.append(line)
    return "\n".join(kept)


def shown(text: str) -> str:
    """Text of several lines as any editor keeps it: control characters become visible marks."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join("\t".join(one_line(part) for part in line.split("\t")) for line in lines)


def quoted(text: str) -> str:
    """A string as Python source; what is not printable is escaped."""
    letters = [f"\\{c}" if c in '"\\' else c if c.isprintable() else repr(c)[1:-1] for c in text]
    return f'"{"".join(letters)}"'


def bibtex(text: str) -> str:
    """Text for a BibTeX field: characters that LaTeX reads as commands are escaped."""
    return re.sub(r"[~^]", r"\\\g<0>{}", re.sub(r"[&%_#$]", r"\\\g<0>", text))


def authors(names: list[str]) -> str:
    """Names for BibTeX, each in braces, without which `and` and commas in it would separate names."""
    return " and ".join(f"{{{bibtex(name)}}}" for name in names)


FILTERS = {
    "n": lambda value: f"{value:,}",
    "loss": lambda value: number(value, ".3f"),
    "perplexity": perplexity,
    "counted": counted,
    "percent": lambda value: f"{100 * value:.3g}%",
    "g": lambda value: f"{value:g}",
    "md": lambda value: escaped(str(value)),
    "code": lambda value: one_line(str(value)).replace("`", "'"),  # between backticks
    "fenced": lambda text: fenced(shown(text)),
    "quoted": quoted,
    "wrapped": lambda text: "\n".join(fill(line, 90, subsequent_indent=" " * 11) for line in shown(text).split("\n")),
    "short": lambda value: str(value)[:12],
    "url": lambda value: quote(value, safe="/"),
    "bibtex": bibtex,
    "authors": authors,
}


# ---- metadata ------------------------------------------------------------------------------------------------------


def header(known: dict[str, Any]) -> str:
    """The metadata that the Hub reads, as YAML."""
    data, heldout = known["data"], known["heldout"]
    results = []
    if heldout is not None and data is not None and data["measured_on"]:
        results = [
            EvalResult(
                task_type="text-generation",
                task_name="Text generation",
                dataset_type=data["measured_on"]["hub"] or "custom",
                dataset_name=data["measured_on"]["name"],
                metric_type=kind,
                metric_name=name,
                metric_value=round(value, 6),
            )
            for kind, name, value in (
                ("loss", "loss, nats per token", heldout.after.loss_nats),
                ("perplexity", "perplexity", heldout.after.perplexity),
                ("bits_per_byte", "bits per byte", heldout.after.bits_per_byte),
            )
            if value is not None
        ]
    of_hub = set(data["datasets"]) if data else set()
    if known["converted"] and known["converted"]["dataset"]:
        of_hub.add(known["converted"]["dataset"])
    base, license, origin = known["base"], known["license"], known["origin"]
    card = ModelCardData(
        language=known["languages"] or None,
        license=license["id"] if license else None,
        license_name=license["name"] if license else None,
        license_link=license["metadata_link"] if license else None,
        library_name="peft" if known["adapter"] else "transformers",
        pipeline_tag="text-generation",
        tags=[
            "gpt2small_hf",
            "gpt2",
            *(["conversational"] if known["chat"] else []),
            *(["lora"] if known["adapter"] else []),
        ],
        datasets=sorted(of_hub) or None,
        # Of a converted model no relation is set: it is neither fine-tuned, quantized, merged nor an adapter.
        base_model=base["repo"] if base and base["repo"] else origin["repo"] if origin else None,
        base_model_relation=("adapter" if known["adapter"] else "finetune") if base and base["repo"] else None,
        widget=widget(known["prompts"], chat=known["chat"]) or None,
        model_name=known["name"] if results else None,
        eval_results=results or None,
    )
    return card.to_yaml().strip()


def widget(prompts: list[str], *, chat: bool) -> list[dict[str, Any]]:
    """Return the prompts as examples for the widget of the model's page, as far as metadata can hold them.

    Left out are prompts of several lines, and those that would end the metadata or that the gate takes for the card's.
    """
    no_text = re.compile("|".join([*UNFINISHED.values(), r"\]\(|---|^\s*$"]))
    shown = [prompt for prompt in prompts if prompt.isprintable() and not no_text.search(prompt)]
    return [{"messages": [{"role": "user", "content": one}]} if chat else {"text": one} for one in shown]


# ---- the gate ------------------------------------------------------------------------------------------------------

_WORD = r"(?<![\w./\\-])(?:{})(?![\w/\\-]|\.\w)"  # and no part of a file's name
UNFINISHED = {
    "TODO": _WORD.format("TODO|FIXME"),
    "More Information Needed": r"[Mm]ore [Ii]nformation [Nn]eeded",
    "an empty link": r"\[[^\]]*\]\(\s*\)|(?<!!)\[\s*\]\(",
    "None": _WORD.format("None"),
    "nan": _WORD.format("nan|NaN"),
    "an unrendered placeholder": r"\{\{|\{%",
}


def check_card(card: str, files: set[str]) -> None:
    """See that a card is finished: in its words and metadata, not in what a model wrote, which stands in code blocks.

    `files` are those beside it.

    Raises: UsageError that names the line.
    """
    prose = without_code(card)
    metadata_ends = card.count("\n", 0, card.find("\n---\n", 4) + 5)
    for at, line in enumerate(prose.splitlines(), start=1):
        for what, pattern in UNFINISHED.items():
            if re.search(pattern, line):
                raise UsageError(f"the card has {what} in line {at}: {line.strip()[:80]!r}. Mend model_card.j2.")
        for target in re.findall(r"(?<!\\)\]\(\s*<?([^)\s>]+)", line) if at > metadata_ends else ():
            if not re.match(r"[a-z]+:|#", target) and target not in files:
                raise UsageError(f"the card names {target} in line {at}, which is not published. Mend model_card.j2.")
    parts = card.split("---\n", 2)
    try:
        metadata = yaml.safe_load(parts[1]) if len(parts) == 3 else None
    except yaml.YAMLError as error:
        raise UsageError(f"the card's metadata is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(metadata, dict):
        raise UsageError("the card has no metadata between two lines of ---. Mend model_card.j2.")


def without_code(card: str, instead: str = "") -> str:
    """A card without what stands in code blocks and code spans, line for line."""
    lines, fence = [], None
    for line in card.split("\n"):
        ticks = re.match(r"`{3,}", line)
        if fence is None and ticks:
            fence = ticks[0]
            lines.append(instead)
        elif fence is not None:
            if line.strip() == fence:
                fence = None
            lines.append(instead)
        else:
            lines.append(re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "code", line))
    return "\n".join(lines)


_MARK = r"\n<!-- made by gpt2small_hf, ([0-9a-f]{16}) -->"


def add_mark(card: str) -> str:
    """A card with a hash of itself at its end, in a comment that nobody sees."""
    return f"{card}\n<!-- made by gpt2small_hf, {_hash(card)} -->\n"


def is_unedited(card: str) -> bool:
    """Whether a card is one of ours and nobody has edited it since: on whatever machine it was made."""
    card = card.replace("\r\n", "\n")
    found = re.search(_MARK + r"\n?\Z", card)
    return found is not None and found[1] == _hash(card[: found.start()])


def is_marked(card: str) -> bool:
    """Return whether a push made a card, even if it was edited since."""
    return re.search(_MARK, card.replace("\r\n", "\n")) is not None


def only_metadata(card: str) -> dict[str, Any] | None:
    """The metadata of a card without any text, as the Hub's website makes it. None for every other card."""
    found = re.fullmatch(r"---\n(.*?)\n?---\s*", card.replace("\r\n", "\n").lstrip(), re.DOTALL)
    try:
        metadata = yaml.safe_load(found[1]) or {} if found else None
    except yaml.YAMLError:
        return None
    return metadata if isinstance(metadata, dict) else None


def _hash(card: str) -> str:
    return hashlib.sha256(card.encode()).hexdigest()[:16]


# ---- for a browser --------------------------------------------------------------------------------------------------

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 16px/1.6 system-ui, sans-serif; color: #1f2937; max-width: 800px; margin: 2rem auto; padding: 0 1rem }}
h1, h2, h3 {{ line-height: 1.25; margin: 1.8em 0 .6em }} h1 {{ margin-top: 0 }}
h2 {{ border-bottom: 1px solid #e5e7eb; padding-bottom: .3em }}
pre {{ background: #f6f8fa; padding: 12px 14px; border-radius: 8px; overflow-x: auto; line-height: 1.45 }}
code {{ font: 13.5px/1.45 ui-monospace, Menlo, Consolas, monospace }}
p code, td code, li code {{ background: #f1f3f5; padding: 1px 4px; border-radius: 4px }}
table {{ border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto }}
th, td {{ border: 1px solid #e5e7eb; padding: 5px 12px; vertical-align: top }}
thead th:empty {{ padding: 0; border: 0 }}
{highlighting}
img {{ max-width: 100% }} a {{ color: #2563eb }} details {{ color: #6b7280; margin-bottom: 2em }}
</style><details><summary>metadata</summary><pre>{metadata}</pre></details>{body}</html>
"""


def page(card: str, folder: str) -> str:
    """The card as a page, much as the Hub shows it; its pictures are looked for in `folder`."""
    _, metadata, text = card.split("---\n", 2)
    text = re.sub(r"\]\((charts/[^)]+)\)", rf"]({quote(folder)}/\1)", text)
    title = next((line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), "model card")
    title = escape(re.sub(r"\\(.)", r"\1", title))
    parser = MarkdownIt("commonmark", {"html": True, "highlight": highlighted}).enable("table")
    look = "\n".join(HtmlFormatter().get_token_style_defs("pre code"))
    return _PAGE.format(title=title, metadata=escape(metadata), body=parser.render(text), highlighting=look)


def highlighted(code: str, language: str, _attributes: str) -> str:
    """Code as HTML with a class for each kind of token; empty, which leaves it plain, for an unknown language."""
    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return ""
    return highlight(code, lexer, HtmlFormatter(nowrap=True))


def content_hash(files: dict[str, dict[str, Any]]) -> str:
    """Eight hexadecimal digits of all that a stranger loads: the same for the same model, whatever its card says."""
    loaded = {name: file["sha256"] for name, file in sorted(files.items()) if is_loaded(name)}
    return hashlib.sha256(repr(loaded).encode()).hexdigest()[:8]
