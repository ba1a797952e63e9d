"""Render the model card, README.md, from `model_card.j2` and the facts of `facts.py`.

Also checks that a card is finished, marks it with its hash to recognise edits, and renders it as HTML.
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

from gpt2small_hf import formatting
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.tasks import notes, tables
from gpt2small_hf.publishing.facts import card_facts
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.source import PushSource
from gpt2small_hf.publishing.stage import is_loaded
from gpt2small_hf.report.page import fenced
from gpt2small_hf.resources import resource

TEMPLATE, PAGE = resource("model_card.j2"), Path(__file__).with_name("card_page.html")


def render(source: PushSource, folder: Path, publication: Publication, template: Path = TEMPLATE) -> str:
    """Render the card of a staged folder, with its metadata and the mark that `is_unedited` checks.

    Raises: UsageError if the template is invalid or names a fact that does not exist.
    """
    facts = card_facts(source, folder, publication)
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS
    try:
        text = environment.get_template(template.name).render(facts)
    except jinja2.UndefinedError as error:
        raise UsageError(f"{template} names an unknown fact: {error.message}. Correct the template.") from None
    except jinja2.TemplateError as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise UsageError(f"{template}{line} cannot be rendered: {error.message}. Correct the template.") from None
    text = collapse_empty_lines(text).strip() + "\n"
    return add_mark(f"---\n{metadata(facts)}\n---\n\n{text}")


def collapse_empty_lines(text: str) -> str:
    """Replace consecutive empty lines outside code blocks by one."""
    kept: list[str] = []
    for line, prose in zip(text.split("\n"), without_code(text, "\0").split("\n"), strict=True):
        if prose or not kept or kept[-1]:
            kept.append(line)
    return "\n".join(kept)


def printable(text: str) -> str:
    """Replace control characters, except line ends and tabs, by visible marks, so that editors keep the text."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join("\t".join(formatting.one_line(part) for part in line.split("\t")) for line in lines)


def quoted(text: str) -> str:
    """Return a string literal of Python; characters that are not printable are escaped."""
    letters = [f"\\{c}" if c in '"\\' else c if c.isprintable() else repr(c)[1:-1] for c in text]
    return f'"{"".join(letters)}"'


def bibtex(text: str) -> str:
    """Escape text for a BibTeX field: characters that LaTeX reads as commands."""
    return re.sub(r"[~^]", r"\\\g<0>{}", re.sub(r"[&%_#$]", r"\\\g<0>", text))


def authors(names: list[str]) -> str:
    """Join names for BibTeX, each in braces, without which `and` and commas in it would separate names."""
    return " and ".join(f"{{{bibtex(name)}}}" for name in names)


def setting(value: Any) -> str:
    """Format the value of a setting."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {setting(item)}" for name, item in value.items()) or "not set"
    if isinstance(value, list):
        return ", ".join(map(setting, value)) or "not set"
    if value is None or isinstance(value, bool):
        return {None: "not set", True: "yes", False: "no"}[value]
    return str(value)


def approximate(count: float) -> str:
    """Format a count with up to three digits: 281,344 → `0.28 million`, 163,009,536 → `163 million`."""
    for size, word, least in ((1e9, "billion", 0.9995), (1e6, "million", 0.1)):
        if count >= least * size:
            return f"{count / size:.{2 if count < size / 2 else 3}g} {word}"
    return f"{count:,.0f}"


def wrapped(text: str) -> str:
    """Wrap lines, indented below a label of eleven characters."""
    return "\n".join(fill(line, 90, subsequent_indent=" " * 11) for line in printable(text).split("\n"))


FILTERS = {
    "n": lambda value: f"{value:,}" if isinstance(value, (int, float)) else value,
    "loss": lambda value: formatting.number(value, ".3f"),
    "perplexity": formatting.perplexity,
    "counted": formatting.counted,
    "approximate": approximate,
    "percent": lambda value: f"{100 * value:.3g}%",
    "g": lambda value: f"{value:g}",
    "duration": formatting.duration,
    "setting": setting,
    "md": lambda value: formatting.escaped(str(value)),
    "code": lambda value: formatting.one_line(str(value)).replace("`", "'"),  # between backticks
    "one_line": formatting.one_line,
    "fenced": lambda text: fenced(printable(text)),
    "quoted": quoted,
    "wrapped": wrapped,
    "tables": lambda results: [formatting.markdown_table(rows[0], rows[1:]) for rows in tables(results)],
    "notes": notes,
    "columns": lambda rows, *header: formatting.console_table(header, rows, text=(len(header) - 1,)),
    "short": lambda value: str(value)[:12],
    "url": lambda value: quote(value, safe="/"),
    "bibtex": bibtex,
    "authors": authors,
}


# ---- metadata ------------------------------------------------------------------------------------------------------


def metadata(facts: dict[str, Any]) -> str:
    """Return the metadata that the Hub reads, as YAML."""
    publication, data, converted = facts["publication"], facts["data"], facts["converted"]
    base, origin, license = facts["base"], facts["origin"], publication.license
    eval_results = evaluation_results(facts) + benchmark_results(facts)
    datasets = {*(data["datasets"] if data else ()), converted["dataset"] if converted else None}
    card = ModelCardData(
        language=publication.languages or None,
        license=license.id if license else None,
        license_name=license.name if license else None,
        license_link=license.metadata_link if license else None,
        library_name="peft" if facts["adapter"] else "transformers",
        pipeline_tag="text-generation",
        tags=["gpt2small_hf", "gpt2", *["conversational"] * facts["is_chat"], *["lora"] * bool(facts["adapter"])],
        datasets=sorted(filter(None, datasets)) or None,
        # A converted model has no relation: it is neither fine-tuned, quantized, merged nor an adapter.
        base_model=base["repo"] if base and base["repo"] else origin["repo"] if origin else None,
        base_model_relation=("adapter" if facts["adapter"] else "finetune") if base and base["repo"] else None,
        widget=widget(facts["example"].fitting, chat=facts["is_chat"]) or None,
        model_name=facts["name"] if eval_results else None,
        eval_results=eval_results or None,
    )
    return card.to_yaml().strip()


def evaluation_results(facts: dict[str, Any]) -> list[EvalResult]:
    """Return the held-out results for the metadata; none if nothing was measured or the data are not known."""
    heldout, data, resolved = facts["heldout"], facts["data"], facts["resolved"]
    if heldout is None or data is None or not data["measured_on"].shown or resolved is None:
        return []
    after, sources = heldout.after, data["measured_on"].shown
    hub = next((source.dataset for source in sources if source.dataset), None)
    n_more = data["measured_on"].n_total - 1
    part = "" if resolved.data.sources.get("validation") else "held-out part of "
    measured = {
        "loss": ("loss, nats per token", after and after.loss_nats),
        "perplexity": ("perplexity", after and after.perplexity),
        "bits_per_byte": ("bits per byte", after and after.bits_per_byte),
    }
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_type=hub or "custom",
            dataset_name=f"{part}{hub or sources[0].name}{f' and {n_more:,} more' if n_more else ''}",
            metric_type=kind,
            metric_name=name,
            metric_value=round(value, 6),
        )
        for kind, (name, value) in measured.items()
        if value is not None
    ]


def benchmark_results(facts: dict[str, Any]) -> list[EvalResult]:
    """Return the scores of benchmarks for the metadata, with the harness and its version as their source."""
    found = facts["benchmarks"]
    names = {"accuracy_norm": "accuracy per character", "bits_per_byte": "bits per byte"}
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_type=one.task,  # results of one type are merged
            dataset_name=one.task if found.limit is None else f"{one.task}, first {found.limit:,} items",
            metric_type=one.measure,
            metric_name=names.get(one.measure, one.measure),
            metric_value=round(one.score.value, 6),
            source_name=f"lm-evaluation-harness {found.harness}",
            source_url="https://github.com/EleutherAI/lm-evaluation-harness",
        )
        for one in (found.rows if found else ())
    ]


def widget(prompts: list[str], *, chat: bool) -> list[dict[str, Any]]:
    """Return the prompts as examples for the widget of the model's page.

    Prompts of several lines are left out, and those that would end the metadata or fail `check_finished`.
    """
    unusable = re.compile("|".join([*UNFINISHED.values(), r"\]\(|---|^\s*$"]))
    shown = [prompt for prompt in prompts if prompt.isprintable() and not unusable.search(prompt)]
    return [{"messages": [{"role": "user", "content": one}]} if chat else {"text": one} for one in shown]


# ---- check, mark ----------------------------------------------------------------------------------------------------

_WORD = r"(?<![\w./\\-])(?:{})(?![\w/\\-]|\.\w)"  # not a part of a file name
UNFINISHED = {
    "TODO": _WORD.format("TODO|FIXME"),
    "More Information Needed": r"[Mm]ore [Ii]nformation [Nn]eeded",
    "an empty link": r"\[[^\]]*\]\(\s*\)|(?<!!)\[\s*\]\(",
    "None": _WORD.format("None"),
    "nan": _WORD.format("nan|NaN"),
    "an unrendered placeholder": r"\{\{|\{%",
}


def check_finished(card: str, files: set[str]) -> None:
    """Check that a card is finished and links only published files; code blocks, which quote the model, are ignored.

    Raises: UsageError that names the line.
    """
    prose = without_code(card)
    metadata_ends = card.count("\n", 0, card.find("\n---\n", 4) + 5)
    for at, line in enumerate(prose.splitlines(), start=1):
        for what, pattern in UNFINISHED.items():
            if re.search(pattern, line):
                raise UsageError(f"the card has {what} in line {at}: {line.strip()[:80]!r}. Correct model_card.j2.")
        for target in re.findall(r"(?<!\\)\]\(\s*<?([^)\s>]+)", line) if at > metadata_ends else ():
            if not re.match(r"[a-z]+:|#", target) and target not in files:
                raise UsageError(
                    f"the card links {target} in line {at}, which is not published. Correct model_card.j2."
                )
    parts = card.split("---\n", 2)
    try:
        metadata = yaml.safe_load(parts[1]) if len(parts) == 3 else None
    except yaml.YAMLError as error:
        raise UsageError(f"the card's metadata is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(metadata, dict):
        raise UsageError("the card has no metadata between two lines of ---. Correct model_card.j2.")


def without_code(card: str, instead: str = "") -> str:
    """Replace code blocks and code spans of a card; its lines keep their numbers."""
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
    """Append a hash of the card, in a comment, which is not rendered."""
    return f"{card}\n<!-- made by gpt2small_hf, {_hash(card)} -->\n"


def is_unedited(card: str) -> bool:
    """Return whether a card was made by a push, on any machine, and not edited since."""
    card = card.replace("\r\n", "\n")
    found = re.search(_MARK + r"\n?\Z", card)
    return found is not None and found[1] == _hash(card[: found.start()])


def is_marked(card: str) -> bool:
    """Return whether a card was made by a push, even if it was edited since."""
    return re.search(_MARK, card.replace("\r\n", "\n")) is not None


def only_metadata(card: str) -> dict[str, Any] | None:
    """Return the metadata of a card that has no text, as the Hub's website makes it; None of other cards."""
    found = re.fullmatch(r"---\n(.*?)\n?---\s*", card.replace("\r\n", "\n").lstrip(), re.DOTALL)
    try:
        metadata = yaml.safe_load(found[1]) or {} if found else None
    except yaml.YAMLError:
        return None
    return metadata if isinstance(metadata, dict) else None


def _hash(card: str) -> str:
    return hashlib.sha256(card.encode()).hexdigest()[:16]


# ---- HTML -----------------------------------------------------------------------------------------------------------


def page(card: str, folder: str) -> str:
    """Render a card as HTML, similar to the Hub; `folder` has its pictures."""
    _, header, text = card.split("---\n", 2)
    text = re.sub(r"\]\((charts/[^)]+)\)", rf"]({quote(folder)}/\1)", text)
    title = next((line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), "model card")
    title = escape(re.sub(r"\\(.)", r"\1", title))
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    return PAGE.read_text(encoding="utf-8").format(title=title, metadata=escape(header), body=parser.render(text))


def content_hash(files: dict[str, dict[str, Any]]) -> str:
    """Return eight hexadecimal digits of a hash of all files that are loaded; the card is not."""
    loaded = {name: file["sha256"] for name, file in sorted(files.items()) if is_loaded(name)}
    return hashlib.sha256(repr(loaded).encode()).hexdigest()[:8]
