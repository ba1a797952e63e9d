"""The model card of each kind of model: sections, origin, license and citation."""

import ast
import re
import shutil
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import chats

from gpt2small_hf.peft_targets import LORA_TARGETS
from gpt2small_hf.publishing.card import TEMPLATE, check_finished, is_unedited, render, without_code
from gpt2small_hf.publishing.license import License
from gpt2small_hf.publishing.lineage_facts import copyright_holders, linked_repositories
from gpt2small_hf.publishing.result_facts import held_out_answers, loss_at_step, loss_rise
from gpt2small_hf.publishing.source import find_source
from gpt2small_hf.report.page import as_markdown
from gpt2small_hf.runs.files import read_json, read_jsonl, write_json, write_jsonl
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.reader import Run
from publishing.cards import VARIANTS, Card, card_of, change, copied, parsed

pytest_plugins = ["publishing.cards"]
pytestmark = pytest.mark.usefixtures("in_checkout")


# ---- all kinds --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_card_of_each_kind_passes_the_gate(variant, cards):
    check_finished(cards[variant].text, cards[variant].files)
    assert is_unedited(cards[variant].text)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_section_is_empty_and_no_table_without_a_row(variant, cards):
    card = cards[variant]
    top = [token for token in parsed(card.prose) if token.level == 0 and token.nesting >= 0]
    assert top[-1].type != "heading_open"
    for token, then in pairwise(top):
        if token.type == "heading_open" and then.type == "heading_open":
            assert then.tag > token.tag, then.map
    meant = re.findall(r"^\|(?: ?:?-+:? ?\|)+$", without_code(card.text), re.MULTILINE)
    assert len(card.tables()) == len(meant)  # each is seen as a table
    for table in card.tables():
        assert len(table) > 1, table
        assert {len(row) for row in table} == {len(table[0])}
        assert all(any(cell for cell in row) for row in table[1:]), table


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_card_names_no_file_that_is_not_beside_it(variant, cards):
    card = cards[variant]
    named = re.findall(r"`(resolved\.json|evaluation/|charts/|LICENSE(?:-CODE)?)`", card.prose)
    named += re.findall(r"\b\w+\.py\b", card.prose.partition("Python files of this repository")[2].partition(":")[0])
    assert named or variant == "native"
    for name in named:
        assert any(file.startswith(name) for file in card.files), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_code_of_a_card_is_python_that_names_repository_and_revision(variant, cards):
    card = cards[variant]
    codes = card.codes("python")
    assert len(codes) == 2
    for code in codes:
        calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
        loads = [call for call in calls if ast.unparse(call.func).endswith(("from_pretrained", "pipeline"))]
        assert loads
        for call in loads:
            words = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            named = [ast.literal_eval(argument) for argument in call.args]
            assert card.publication.repo_id in (words.get("model"), *named)
            assert words.get("revision") == card.publication.pin
            assert words.get("trust_remote_code", False) is not card.publication.native


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_card_of_our_architecture_names_the_layers_for_lora(variant, cards):
    named = re.findall(r"LoraConfig\(target_modules=(\[.*?\])\)", cards[variant].prose)
    assert [ast.literal_eval(names) for names in named] == ([] if variant == "native" else [list(LORA_TARGETS)])


@pytest.mark.slow
def test_the_same_files_give_the_same_card(cards):
    for card in cards.values():
        assert render(card.source, card.folder, card.publication) == card.text


SECTIONS = {  # by a word of their headings
    "use": r"^## How to get started",
    "branches": r"^### Checkpoints",
    "model": r"^## Model details",
    "results": r"^## Evaluation",
    "baseline": r"^### .*baseline",
    "samples": r"^## Samples",
    "samples over training": r"^### Samples during training",
    "data": r"^## Training data",
    "training": r"^## Training procedure",
    "intended": r"^## Intended use and limitations",
    "license": r"^## License",
    "citation": r"^## Citation",
}
EVERYWHERE = {"use", "model", "intended", "license", "citation"}
OF_RUN = {"samples", "samples over training", "data", "training"}


@pytest.mark.parametrize(
    ("variant", "there"),
    [
        ("run", {"results", *OF_RUN}),
        ("chat", {"results", *OF_RUN}),
        ("adapters", {"results", *OF_RUN}),
        ("data of the Hub", {"results", *OF_RUN}),
        ("checkpoint", OF_RUN),
        ("unfinished", OF_RUN),
        ("bare", set()),
        ("converted", {"training"}),
        ("converted without settings", {"training"}),
        ("nothing held out", {"results", *OF_RUN}),
        ("older run", {"results", *OF_RUN} - {"data"}),
        ("nothing but weights", {"results", "data", "training"}),
        ("branches", {"results", "branches", *OF_RUN}),
        ("baseline", {"results", "baseline", *OF_RUN}),
        ("sweep", {"results", "baseline", *OF_RUN}),
    ],
)
def test_a_section_without_facts_is_not_there(variant, there, cards):
    name, *headings = cards[variant].headings()
    assert name == f"# {cards[variant].source.name}"
    expected = [section for section in SECTIONS if section in EVERYWHERE | there]
    assert len(headings) == len(expected), headings
    for section, heading in zip(expected, headings, strict=True):
        assert re.match(SECTIONS[section], heading), (section, heading)


@pytest.mark.parametrize("variant", ["converted", "converted without settings"])
def test_a_converted_model_says_so_and_tells_no_more_than_the_settings_beside_it(variant, cards):
    card = cards[variant]
    assert "Its weights were trained by other code (reference series" in card.prose
    if variant == "converted":
        assert card.table("micro-batch, rows") == {
            "data set": ["somebody/some-text"],
            "minimum training tokens": ["3,260,190,720"],
            "micro-batch, rows": ["6"],
            "gradient accumulation": ["81"],
            "learning rate": ["0.0014"],
            "schedule": ["warmup, then cosine"],
            "warmup": ["5% of the steps"],
            "weight decay": ["0.1"],
            "gradient clipping, norm": ["1.0"],
        }
    else:
        assert "The original weights have no settings file." in card.prose


def citation(card: Card) -> dict[str, str]:
    (code,) = card.codes("bibtex")
    return dict(re.findall(r"^  (\w+) += \{(.*)\},?$", code, re.MULTILINE))


def test_converted_weights_are_credited_to_their_origin_and_never_to_the_account_that_publishes_them(cards):
    card = cards["converted"]
    assert "author" not in citation(card)
    assert citation(card)["note"] == "Published by you"
    assert "The author of these weights is unknown; the citation names none." in card.prose
    assert card.table("parameters")["published by"] == ["you"]
    assert "developed by" not in card.table("parameters")

    card = card_of(card.source, origin="somebody/their-gpt")
    link = "[somebody/their-gpt](https://huggingface.co/somebody/their-gpt)"
    assert f"trained by other code (reference series), published as {link} and converted" in card.prose
    assert (citation(card)["author"], citation(card)["url"]) == (
        "{somebody}",
        "https://huggingface.co/somebody/their-gpt",
    )
    assert citation(card)["note"] == "Published by you as https://huggingface.co/you/theirs"
    assert card.table("parameters")["developed by"] == ["somebody"]
    assert card.metadata["base_model"] == "somebody/their-gpt"
    assert "base_model_relation" not in card.metadata
    assert ("model", "somebody/their-gpt") in linked_repositories(card.source, card.publication)
    check_finished(card.text, card.files)

    card = card_of(card.source, origin="somebody/their-gpt", private=frozenset({"somebody/their-gpt"}))
    assert "their-gpt" not in card.prose
    assert "base_model" not in card.metadata
    assert "author" not in citation(card)

    card = card_of(card.source, origin="https://example.com/weights", developers=["Ada L.", "A Lab"])
    assert "published as [https://example.com/weights](https://example.com/weights) and" in card.prose
    assert (citation(card)["author"], citation(card)["url"]) == ("{Ada L.} and {A Lab}", "https://example.com/weights")
    assert "base_model" not in card.metadata


def test_citation_escapes_what_latex_would_read_as_a_command_and_keeps_names_whole(cards):
    names = ["R&D_Group 100%", "Black and White", "Lovelace, Ada", "C# $~^"]
    card = card_of(cards["bare"].source, repo_id="A_Lab/my_model", developers=names)
    assert citation(card) == {
        "title": r"my\_model",
        "author": r"{R\&D\_Group 100\%} and {Black and White} and {Lovelace, Ada} and {C\# \$\~{}\^{}}",
        "note": r"Published by A\_Lab",
        "url": "https://huggingface.co/A_Lab/my_model",
    }
    check_finished(card.text, card.files)


def test_weights_without_a_run_are_credited_to_their_origin_else_to_nobody(cards):
    card = card_of(cards["bare"].source, license=License("mit"))
    assert copyright_holders(card.source, card.publication)["holders"] == []
    assert "LICENSE" not in card.files
    assert "author" not in citation(card)
    assert card.table("parameters")["published by"] == ["you"]
    card = card_of(cards["bare"].source, origin="ada/tiny")
    assert "Its weights come from [ada/tiny](https://huggingface.co/ada/tiny)." in card.prose
    assert card.table("parameters")["developed by"] == ["ada"]
    check_finished(card.text, card.files)


def test_developers_contact_and_languages_are_on_the_card_as_given(cards):
    card = card_of(Path("runs/short"), developers=["Ada_L", "A Lab"], contact="ada@example.com", languages=["en", "de"])
    told = card.table("parameters")
    names = ("developed by", "published by", "contact", "language")
    assert [told[name] for name in names] == [["Ada_L, A Lab"], ["you"], ["ada@example.com"], ["en, de"]]
    assert citation(card)["author"] == r"{Ada\_L} and {A Lab}"
    told = cards["run"].table("parameters")
    assert (told["developed by"], told["license of the weights"]) == (["you"], ["Apache-2.0"])
    assert told.keys().isdisjoint({"published by", "contact", "fine-tuned from"})


def test_widget_has_the_published_prompts_of_the_run_as_text_or_messages(cards, chat_run):
    prompts = read_json(cards["run"].folder / "resolved.json")["run"]["prompts"]
    assert cards["run"].metadata["widget"] == [{"text": prompt} for prompt in prompts[:3]]
    run = copied(chat_run, "asked")
    change(run.resolved, run={"prompts": ["Who are you?", " "]})
    write_json(run.resolved, {**read_json(run.resolved), "prompts_from": "given"})
    messages = [{"role": "user", "content": "Who are you?"}]
    assert card_of(run.root).metadata["widget"] == [{"messages": messages}]
    assert "widget" not in cards["bare"].metadata


def test_license_of_the_training_data_is_named_where_it_is_known(tiny_run):
    run = copied(tiny_run, "docs")
    origin = {"name": "python-docs", "revision": "3.11.9", "bytes": 5, "sha256": "ab" * 32}
    change(run.resolved, data={"sources": {"train": [origin]}})
    linked = "license [PSF-2.0](https://docs.python.org/3/license.html)"
    assert linked in card_of(run.root).prose
    assert "PSF" not in card_of(tiny_run.root).prose


def test_a_checkpoint_says_which_step_it_is_of_and_claims_none_of_the_runs_results(cards):
    card = cards["checkpoint"]
    then = {row.step: row.eval_loss for row in card.source.run.metrics if row.has("eval_loss")}
    assert re.search(rf"weights at step 10\b.* the held-out loss was {then[10]:.3f} nats", card.prose)
    logged = loss_at_step(card.source)
    assert logged is not None
    assert (logged.step, logged.eval_loss) == (10, then[10])
    assert "1,280 tokens" in card.prose
    assert "2,560" not in card.prose
    after = read_json(card.source.run_folder.heldout)["after"]
    assert f"{after['loss']:.3f}" not in without_code(card.text)
    assert card.table("parameters")
    assert "model-index" not in card.metadata
    assert loss_at_step(cards["run"].source) is None


@pytest.mark.parametrize("finished", [True, False])
def test_a_checkpoint_with_few_held_out_chats_is_worse_only_from_twice_the_loss_on(finished, chat_run, tmp_path):
    shutil.copytree(chat_run.root, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    if not finished:
        run.heldout.unlink()
    rows = read_jsonl(run.metrics)
    for factor, is_worse in ((1.5, False), (2.5, True)):
        changed = [row | {"eval_loss": factor * rows[0]["eval_loss"]} if "eval_loss" in row else row for row in rows]
        write_jsonl(run.metrics, [rows[0], *changed[1:]])
        assert (loss_rise(find_source(run.checkpoints / f"checkpoint-{Run(run).step}")) is not None) == is_worse


def test_of_an_unfinished_run_the_card_is_that_of_its_checkpoint(cards):
    card = cards["unfinished"]
    assert "weights at step 20" in card.prose
    assert "## Evaluation" not in card.headings()


def test_the_native_form_names_its_class_needs_no_remote_code_and_points_to_the_other(cards):
    card = cards["native"]
    assert "trust_remote_code" not in card.prose
    assert f"This format was tested with transformers 4.57.1 and {version('transformers')}." in card.prose
    assert "[you/short](https://huggingface.co/you/short)" in card.prose
    assert card.table("class")["class"] == ["GPT2LMHeadModel (model_type gpt2)"]
    assert "trust_remote_code=True" in cards["converted"].prose
    assert "(https://huggingface.co/you/theirs-native)" in cards["converted"].prose


def test_branches_are_listed_and_what_is_not_known_of_them_is_a_dash(cards):
    assert cards["branches"].table("step-10") == {
        "step-10": ["10", "1,280", "4.273"],
        "step-20": ["20", "–", "–"],
    }


TERMS_LINK = "https://example.com/terms"


@pytest.mark.parametrize(
    ("license", "said", "file"),
    [
        (License("apache-2.0"), "Apache-2.0, weights and code (`LICENSE`).", True),
        (License("mit"), "The weights: [MIT](https://spdx.org/licenses/MIT.html) (`LICENSE`). The code: ", True),
        (License("cc-by-4.0"), "The weights: [CC-BY-4.0](https://spdx.org/licenses/CC-BY-4.0.html). The code: ", False),
        (License("openrail"), "The weights: openrail. The code: Apache-2.0 (`LICENSE-CODE`).", False),
        (License("other", "ours-1.0", TERMS_LINK), f"The weights: [ours-1.0]({TERMS_LINK}). The code: ", False),
        (License("other", "ours-1.0", file=TEMPLATE), "The weights: ours-1.0 (`LICENSE`). The code: ", True),
        (
            None,
            "The owner has not named a license for the weights. The code is licensed under Apache-2.0 (",
            False,
        ),
    ],
)
def test_a_license_is_named_only_if_it_was_named_to_us(license, said, file, cards):
    card = card_of(Path("runs/short"), license=license)
    assert said in card.prose
    assert ("LICENSE" in card.files) == file
    metadata = {name: card.metadata.get(name) for name in ("license", "license_name", "license_link")}
    is_other = license is not None and license.id == "other"
    assert metadata == {
        "license": license and license.id,
        "license_name": "ours-1.0" if is_other else None,
        "license_link": (license.link or "LICENSE") if is_other else None,
    }
    check_finished(card.text, card.files)


@pytest.mark.parametrize(
    ("source", "flags", "said"),
    [
        (
            "given",
            [True],
            "The questions were given with the recipe or --prompts; the training chats contain all of them.",
        ),
        (
            "given",
            [False],
            "The questions were given with the recipe or --prompts; the training chats contain none of them.",
        ),
        (
            "training chats",
            [True],
            "The questions are from the training chats.",
        ),
    ],
)
def test_the_card_of_a_chat_model_states_where_its_questions_are_from(
    source, flags, said, chat_run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    asked = [chat["messages"][0]["content"] for chat in chats()]
    resolved = read_json(chat_run.resolved)
    in_training = "What did the fox see?" not in held_out_questions(chat_run)
    assert resolved["run"]["prompts"] == ["What did the fox see?"]
    assert "What did the fox see?" in asked
    assert (resolved["prompts_from"], resolved["prompts_in_training"]) == ("given", [in_training])
    run = copied(chat_run, "talk")
    changed = {name: value for name, value in resolved.items() if not name.startswith("prompts_")}
    changed |= {"prompts_from": source, "prompts_in_training": flags}
    write_json(run.resolved, changed)
    card = card_of(run.root)
    assert (said in card.prose) == (source != "training chats")  # such questions are not on a card
    assert said in as_markdown(Run(run), [])


def held_out_questions(run: RunFolder) -> list[str]:
    return [row["messages"][-1]["content"] for row in read_jsonl(run.answers)]


def test_held_out_answers_are_on_the_card_only_if_their_questions_may_be_published(chat_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = copied(chat_run, "talk")
    rows = read_jsonl(run.answers)
    system = {"role": "system", "content": "Be brief."}
    rows[0] = {**rows[0], "messages": [system, *rows[0]["messages"]], "ended": False}
    write_jsonl(run.answers, rows)
    asked = held_out_questions(run)
    assert len(asked) > 3
    for allowed in (False, True):
        card = card_of(run.root, questions=allowed)
        check_finished(card.text, card.files)
        blocks = [code for code in card.codes("text") if "question:" in code and "greedy:" not in code]
        assert (
            "Questions of held-out chats; whether the training chats contain them too was not" in card.prose
        ) == allowed
        assert f"the first 3 of {len(asked)}, sampled once" in card.prose or not allowed
        assert len(blocks) == (3 if allowed else 0)
        for block, row, question in zip(blocks, rows, asked, strict=False):
            assert f"question:  {question}" in block
            assert f"sampled:   {row['answer'].strip()}" in " ".join(block.split(" " * 11))
    assert blocks[0].startswith("system:    Be brief.\n")
    assert blocks[0].endswith(" …\n")
    assert not blocks[1].endswith(" …\n")
    write_json(run.resolved, read_json(run.resolved) | {"prompts_from": "held-out chats"})
    source = find_source(run.root)
    assert held_out_answers(source) == []  # the samples are of such questions already


def test_mit_license_names_the_year_of_the_run_and_its_publisher_and_nobody_for_converted_weights(cards):
    card = card_of(Path("runs/short"), license=License("mit"))
    year = card.source.run.resolved.made_by.date[:4]
    assert f"Copyright (c) {year} you\n" in (card.folder / "LICENSE").read_text(encoding="utf-8")
    card = card_of(cards["converted"].source, license=License("mit"))
    assert "LICENSE" not in card.files
    assert "The weights: [MIT](https://spdx.org/licenses/MIT.html). The code: Apache-2.0" in card.prose
