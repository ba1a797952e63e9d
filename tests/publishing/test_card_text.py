"""Text that a model or a user wrote cannot break the model card or its page."""

import ast
import html.parser
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gpt2small_hf.publishing.card import TEMPLATE, check_finished, is_unedited, page, render
from gpt2small_hf.publishing.facts import PROMPT, QUESTION, example_prompts
from gpt2small_hf.runs.files import read_json, write_json, write_jsonl
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.reader import Run
from publishing.cards import HEADER, card_of, change, copied, parsed, plain

pytest_plugins = ["publishing.cards"]
pytestmark = pytest.mark.usefixtures("in_checkout")


# ---- what a model or a user wrote -------------------------------------------------------------------------------

WRITTEN = (
    "def f(x):\n    if x is None:  # TODO\n        return {{ x }}\n\n\n\n\treturn {% if %}\n",
    "```\nout of the block\n```\n\n````text\n# A heading\n````",
    "---\nlicense: stolen\n---\n",
    "<script>alert(1)</script></code></pre><img src=x onerror=alert(1)><!-- <style>",
    "| a | b |\n| --- | --- |\n| [](x) | ![](gone.png) |\n\n# Heading\n\n* * *\n",
    "<!-- made by gpt2small_hf, 0123456789abcdef -->\n~~~\n    ```\n",
    "\U0001f600 \\ \\\\ $x$ &lt; &amp; `` ` ``` nan \ufffd",
    "\x1b[31m\x00\x07\x0c\x1c\x85\u2028\u202e",
    "one\r\ntwo\rthree\r\n",
)


def write_everywhere(run: RunFolder, text: str) -> None:
    """As if this was the prompt, and what the model made of it."""
    completions = read_json(run.completions)
    made = {"prompt": text.strip(), "greedy": f"{text}\nlikely", "sampled": f"{text}\nother"}
    sample = {**completions["completions"][0], **made}
    write_json(run.completions, {**completions, "completions": [sample]})
    write_jsonl(run.samples, [{"step": step, **sample} for step in (0, 10, 20)])
    change(run.resolved, run={"prompts": [text.strip()]})


@pytest.mark.parametrize("text", WRITTEN)
@pytest.mark.parametrize("of", ["run", "chat"])
def test_what_a_model_writes_cannot_break_its_card(of, text, tiny_run, chat_run, cards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = copied({"run": tiny_run, "chat": chat_run}[of], {"run": "short", "chat": "chat"}[of])
    write_everywhere(run, text)
    settings = run.model / "config.json"
    write_json(
        settings, {**read_json(settings), "max_position_embeddings": 1024}
    )  # the card's code has prompts that fit
    card = card_of(run.root, license=cards[of].publication.license, languages=cards[of].publication.languages)
    check_finished(card.text, card.files)
    assert is_unedited(card.text)
    assert card.headings() == cards[of].headings()
    metadata = [
        {name: value for name, value in told.items() if name != "widget"}
        for told in (card.metadata, cards[of].metadata)
    ]
    assert metadata[0] == metadata[1]
    example = {"messages": [{"role": "user", "content": text.strip()}]} if of == "chat" else {"text": text.strip()}
    assert card.metadata.get("widget") in (None, [example])
    assert [table[0] for table in card.tables()] == [table[0] for table in cards[of].tables()]
    assert not live(page(card.text, "staged"))
    (shown,) = [code for code in card.codes("text") if "greedy" in code]
    for end in ("likely", "other"):  # where lines are broken is another matter
        assert letters(f"{text}{end}") in letters(shown)
    (prompt,) = [code for code in card.codes("python") if "pipeline(" in code]
    assert text.strip() in [node.value for node in ast.walk(ast.parse(prompt)) if isinstance(node, ast.Constant)]


def letters(text: str) -> str:
    """What is neither space nor a character that some mark may stand for."""
    return "".join(c for c in text if (c.isascii() and c.isprintable() and c != " ") or c == "\U0001f600")


@pytest.mark.slow
@pytest.mark.parametrize("text", WRITTEN)
def test_a_card_is_text_that_any_editor_keeps_as_it_is(text, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = copied(tiny_run, "short")
    write_everywhere(run, text)
    card = card_of(run.root)
    assert not re.search("[\\x00-\\x08\\x0b-\\x1f\\x7f\\x85\\u2028\\u2029]", card.text)
    (card.folder / "README.md").write_text(card.text, encoding="utf-8")
    assert is_unedited((card.folder / "README.md").read_text(encoding="utf-8"))
    assert is_unedited(card.text.replace("\n", "\r\n"))


def test_what_a_model_writes_is_shown_line_by_line_as_it_wrote_it(tiny_run):
    run = copied(tiny_run, "lines")
    write_everywhere(run, WRITTEN[0])
    (shown,) = [code for code in card_of(run.root).codes("text") if "greedy" in code]
    assert f"{WRITTEN[0]}\nlikely" in shown
    assert f"{WRITTEN[0]}\nother" in shown


NAMES = (
    "my_first_model_v1",
    "l'ö\"ß 日本 😀",
    "a [b] | *d* `e` # {f} $h$ ~i &amp; j",
    "<script>alert(1)<img src=x onerror=alert(1)>",
    "--- name: x",
    "-5",
    "yes: no",
)


@pytest.mark.parametrize("name", NAMES)
def test_names_cannot_break_a_card(name, tiny_run, cards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = copied(tiny_run, "short")
    other = copied(tiny_run, f"{name}")
    change(other.resolved, run={"init_seed": 3})
    data = read_json(run.resolved)["data"]
    source = {**data["sources"]["train"][0], "file": f"{name}.txt"}
    tokenizer = {**data["tokenizer"], "name": f"words/{name}"}
    change(run.resolved, data={"sources": {"train": [source]}, "tokenizer": tokenizer})
    change(
        run.resolved,
        base={"init_from": f"runs/{name}/model", "sha256": "0" * 64},
        made_by={"command": f"python {name}"},
    )
    card = card_of(run.root, baseline=Run(other))
    assert card.metadata["model-index"][0]["results"][0]["dataset"]["name"].startswith("held-out part of ")
    assert [heading for heading in card.headings() if "baseline" not in heading] == cards["run"].headings()
    assert not live(page(card.text, "staged"))
    shown = [plain(token) for token in parsed(card.prose) if token.type == "inline"]
    assert any(line.startswith(f"{name}.txt, ") for line in shown)
    assert f"Compared with the baseline {name}" in shown
    check_finished(card.text, card.files)


@pytest.mark.parametrize("name", ["my_first_model_v1", "_a_", "v1.0-rc_2"])
def test_the_name_of_a_repository_is_shown_as_it_is(name, cards):
    card = card_of(Path("runs/short"), repo_id=f"you_too/{name}")
    assert card.headings()[0].replace("\\", "") == f"# {name}"
    shown = page(card.text, "staged")
    assert f"<h1>{name}</h1>" in shown
    assert f"<title>{name}</title>" in shown


@pytest.mark.parametrize(
    "text",
    [
        *("'", '"', "'\"", "'''", '"""', "\\", "\\n", "a\nb", "a\r\nb", "\t", "\x00\x1b", "\x85\u2028"),
        *("é", "日本", "\U0001f600 \U0001f468\u200d\U0001f469", "{{ x }}", "{x}", "</script>", "&<>", "```", "# a"),
    ],
)
def test_code_in_a_card_has_the_prompt_whatever_it_is(cards, text, tmp_path):
    card, folder = cards["run"], tmp_path / "staged"
    shutil.copytree(card.folder, folder)
    change(folder / "resolved.json", run={"prompts": [text]})
    codes = replace(card, text=render(card.source, folder, card.publication)).codes("python")
    for code in codes:
        assert text in [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]


@pytest.mark.parametrize(("kind", "default"), [("run", PROMPT), ("chat", QUESTION)])
def test_code_and_widget_of_a_card_have_prompts_that_fit_the_context(kind, default, cards, tmp_path):
    card, folder = cards[kind], tmp_path / "staged"
    shutil.copytree(card.folder, folder)
    context = card.source.run.resolved.model.max_position_embeddings
    long = "the fox " * context
    for prompts, kept in (([long, "The fox"], ["The fox"]), ([long], [])):
        change(folder / "resolved.json", run={"prompts": prompts})
        rendered = replace(card, text=render(card.source, folder, card.publication))
        chosen = example_prompts(folder, context)
        prompt, new_tokens, fitting = chosen.prompt, chosen.new_tokens, chosen.fitting
        assert fitting == kept
        assert len(rendered.metadata.get("widget", [])) == len(kept)
        assert prompt == "The fox" if kept else default.startswith(prompt)
        assert all(
            f'"{prompt}"' in code and f"max_new_tokens={new_tokens}" in code for code in rendered.codes("python")
        )


# ---- for a browser ----------------------------------------------------------------------------------------------


class Tags(html.parser.HTMLParser):
    """The tags of a page, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def live(shown: str) -> list[tuple[str, dict[str, str | None]]]:
    """Tags of a page that our template does not make."""
    tags = Tags()
    tags.feed(shown)
    ours = {
        *("html", "meta", "title", "style", "details", "summary", "pre", "code", "p", "h1", "h2", "h3", "a", "strong"),
        *("em", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "span"),
    }
    return [
        (tag, attributes)
        for tag, attributes in tags.found
        if (tag not in ours and not (tag == "img" and (attributes.get("src") or "").startswith("staged/charts/")))
        or any(name.startswith("on") for name in attributes)
        or (attributes.get("href") or "https:").split(":")[0] != "https"
    ]


def test_the_page_shows_the_whole_card_with_its_pictures(cards):
    card = cards["run"]
    shown = page(card.text, "my staged")
    tags = Tags()
    tags.feed(shown)
    pictures = [attributes["src"] for tag, attributes in tags.found if tag == "img"]
    assert sorted(pictures) == sorted(f"my%20staged/{name}" for name in card.files if name.endswith(".png"))
    assert "library_name: transformers" in shown
    assert shown.count("<h2>") == sum(heading.startswith("## ") for heading in card.headings())
    assert shown.count("<table>") == len(card.tables())
    assert not live(page(card.text, "staged"))


@pytest.mark.parametrize("text", ["<script>x</script>", "<b onclick=x>", "<a href='javascript:x'>", "<iframe>"])
def test_no_live_page_is_taken_for_a_dead_one(text):
    assert live(page(f"{HEADER}{text}\n", "staged"))


def test_the_template_names_no_number_of_its_own():
    prose = re.sub(r"\{[{%#].*?[#%}]\}|```.*?```|`[^`]*`", " ", TEMPLATE.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"(?<![\w.-])\d[\d.,]*", prose)
    assert not found


def test_what_sounds_unfinished_and_is_a_name_or_a_command_is_no_reason(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = copied(tiny_run, "short")
    source = {**read_json(run.resolved)["data"]["sources"]["train"][0], "file": "TODO.txt"}
    change(run.resolved, data={"sources": {"train": [source, {**source, "file": "a/nan-None.txt"}]}})
    change(run.resolved, made_by={"command": "python train.py --prompts 'return None' TODO"})
    card = card_of(run.root)
    check_finished(card.text, card.files)
    assert any("--prompts 'return None' TODO" in code for code in card.codes("text"))


@pytest.mark.parametrize("settings", [{"warmup_period_percent": None}, {"min_train_tokens": "3e9"}, {"dataset": [1]}])
def test_settings_of_other_code_may_be_anything(settings, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bare = tmp_path / "mine"
    shutil.copytree(tiny_run.model, bare)
    write_json(bare / "converted.json", {"what": "reference series", "settings": settings})
    card = card_of(bare)
    check_finished(card.text, card.files)
