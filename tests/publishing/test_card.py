"""The model card: its values are those of the run's files, and generated text cannot break it."""

import ast
import html.parser
import re
import shutil
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, chat_words, chats, run_train, tiny_words
from conversion import test_conversion
from conversion.test_conversion import write_reference
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from safetensors.torch import load_file

from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import counted, duration
from gpt2small_hf.peft_targets import LORA_TARGETS
from gpt2small_hf.publishing.card import (
    TEMPLATE,
    approximate,
    check_finished,
    is_unedited,
    page,
    render,
    without_code,
)
from gpt2small_hf.publishing.checks import read_model_config
from gpt2small_hf.publishing.facts import PROMPT, QUESTION, example_prompts
from gpt2small_hf.publishing.license import License, write_license
from gpt2small_hf.publishing.lineage_facts import copyright_holders, linked_repositories
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.result_facts import held_out_answers, loss_at_step, loss_rise
from gpt2small_hf.publishing.source import PushSource, checkpoint_source, find_source
from gpt2small_hf.publishing.stage import list_files, stage, stage_native
from gpt2small_hf.publishing.training_facts import training_facts, training_seconds
from gpt2small_hf.report.page import as_markdown, facts, status, trained_parameters
from gpt2small_hf.report.sweep import write_report
from gpt2small_hf.runs.files import read_json, read_jsonl, sha256, write_json, write_jsonl
from gpt2small_hf.runs.layout import RunFolder, SweepFolder
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.records import ChatCounts, ParameterCounts
from gpt2small_hf.runs.results import MetricsRow
from gpt2small_hf.training.base_model import sources_of
from gpt2small_hf.training.budget import flops_per_token


@dataclass
class Card:
    """A card, and what it was made of."""

    text: str
    source: PushSource
    folder: Path
    publication: Publication

    @property
    def files(self) -> set[str]:
        return {*list_files(self.folder), "README.md"}

    @property
    def metadata(self) -> dict[str, Any]:
        return ModelCard(self.text).data.to_dict()

    @property
    def prose(self) -> str:
        return ModelCard(self.text).text

    def headings(self) -> list[str]:
        tokens = parsed(self.prose)
        return [f"{t.markup} {then.content}" for t, then in pairwise(tokens) if t.type == "heading_open"]

    def tables(self) -> list[list[list[str]]]:
        """Each table as rows of cells, the header first."""
        found: list[list[list[str]]] = []
        for token, then in pairwise(parsed(self.prose)):
            if token.type == "table_open":
                found.append([])
            elif token.type == "tr_open":
                found[-1].append([])
            elif token.type in ("th_open", "td_open"):
                found[-1][-1].append(plain(then))
        return found

    def table(self, first: str) -> dict[str, list[str]]:
        """The one table with this cell in it: the first cell of each row, and the others."""
        (table,) = [table for table in self.tables() if any(row[0] == first for row in table)]
        return {row[0]: row[1:] for row in table[1:]}

    def codes(self, language: str) -> list[str]:
        return [t.content for t in parsed(self.prose) if t.type == "fence" and t.info == language]


def parsed(markdown: str) -> list[Any]:
    return MarkdownIt("commonmark", {"html": True}).enable("table").parse(markdown)


def plain(inline: Any) -> str:
    """What a reader sees of a line."""
    return "".join(t.content for t in inline.children if t.type in ("text", "text_special", "code_inline"))


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A folder like a checkout, in which all of these tests are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("checkout"))
        yield Path.cwd()


def copied(run: RunFolder, name: str) -> RunFolder:
    """A run under another name, to be changed."""
    shutil.copytree(run.root, f"runs/{name}", ignore=shutil.ignore_patterns("checkpoints"))
    return RunFolder(Path("runs") / name)


def change(path: Path, **parts: dict[str, Any]) -> None:
    """Change some values in some parts of a run's file."""
    told = read_json(path)
    for part, values in parts.items():
        told[part] = {**(told[part] or {}), **values}
    write_json(path, told)


COUNT = iter(range(10**6))


def card_of(name: Path | PushSource, **more: Any) -> Card:
    """Stage and render as push.py does."""
    source = name if isinstance(name, PushSource) else find_source(name)
    publication = Publication(**{"repo_id": f"you/{source.name}", "pin": "v1", **more})
    folder = Path(f"staged/{next(COUNT)}")
    stage(source, folder, private=publication.private)
    if publication.native:
        ours, folder = folder, Path(f"staged/{next(COUNT)}")
        stage_native(ours, folder)
    write_license(folder, publication.license, native=publication.native, **copyright_holders(source, publication))
    return Card(render(source, folder, publication), source, folder, publication)


VARIANTS = (
    *("run", "chat", "checkpoint", "unfinished", "bare", "native", "converted", "converted without settings"),
    *(
        "nothing held out",
        "adapters",
        "older run",
        "nothing but weights",
        "branches",
        "baseline",
        "sweep",
        "data of the Hub",
    ),
)


@pytest.fixture(scope="module")
def cards(place, tiny_run, chat_run, chat_place, tiny_tokenizer, tmp_path_factory) -> dict[str, Card]:
    """A card of each kind of model that can be published."""
    shutil.copytree(tiny_run.root, "runs/short")
    shutil.copytree(tiny_run.root, "runs/half")
    Path("runs/half/evaluation/heldout.json").unlink()
    shutil.copytree(tiny_run.model, "mine")
    shutil.copytree(chat_run.root, "runs/chat")
    tiny_tokenizer.save_pretrained("words")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_conversion, "V", len(tiny_tokenizer))
        write_reference(Path("theirs"))
        write_reference(Path("theirs-bare"))
    told = {"dataset": "somebody/some-text", "min_train_tokens": 3_260_190_720, "microbatch_size": 6}
    told |= {"learning_rate": 0.0014, "schedule_learning_rate": True, "warmup_period_percent": 5, "weight_decay": 0.1}
    write_json(Path("theirs/train.json"), {**told, "gradient_accumulation_steps": 81, "clipping_max_norm": 1.0})

    adapters = copied(chat_run, "adapters")
    change(
        adapters.resolved,
        run={"lora_rank": 8, "lora_alpha": None},
        parameters={"total": 20_000, "trained": 1000, "adapter": 900},
    )
    older = copied(tiny_run, "older")
    resolved, heldout = read_json(older.resolved), read_json(older.heldout)
    for name in ("sources", "splits", "tokenizer"):
        del resolved["data"][name]
    del resolved["rows_per_step"]
    write_json(older.resolved, {**resolved, "made_by": {**resolved["made_by"], "commit": None}})
    del heldout["new_text"], heldout["after"]["standard_error"]
    write_json(older.heldout, heldout)
    poor = copied(tiny_run, "poor")
    shutil.rmtree(poor.root / "charts")
    poor.completions.unlink()
    poor.samples.unlink()
    write_jsonl(poor.metrics, [{"step": 20, "loss": 3.7}])

    nothing_out = ("--validation_fraction", "0", "--eval_strategy", "no", "--max_steps", "2")
    run_train(chat_words(chat_place, Path("runs/all"), *nothing_out))

    of_hub = copied(tiny_run, "of-hub")
    origin = {"dataset": "somebody/some-text", "config": "plain", "split": "train", "revision": "0123456789abcdef" * 2}
    change(of_hub.resolved, data={"sources": {"train": [origin, {**origin, "split": "more"}]}})

    rate = {"learning_rate": 0.02, "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"min_lr": None}}
    other = copied(tiny_run, "other")
    change(other.resolved, trainer=rate, run={"init_seed": 7, "seq_len": 16})
    change(other.heldout, after={"loss": 3.5})
    seeds = [(i, t) for i in (1, 2) for t in (1, 2)]
    for n, (i, t) in enumerate(seeds):
        one = copied(tiny_run, f"sweep/baseline-i{i}-t{t}")
        change(one.heldout, after={"loss": 3.6 + n * n / 100})
    for seed, loss in ((1, 3.4), (2, 3.7)):
        change(copied(tiny_run, f"sweep/slower-i{seed}-t{seed}").heldout, after={"loss": loss})
    recipes = {name: Path(f"{name}.yaml") for name in ("baseline", "slower")}
    for path in recipes.values():
        path.write_text("# Shows: something.\n")
    write_report(SweepFolder(Path("runs/sweep")), recipes)
    branches = [
        {"revision": "step-10", "step": 10, "tokens": 1280, "loss": 4.273},
        {"revision": "step-20", "step": 20, "tokens": None, "loss": None},
    ]
    return {
        "run": card_of(Path("runs/short"), license=License("apache-2.0"), languages=["en"]),
        "chat": card_of(Path("runs/chat"), license=License("cc-by-4.0")),
        "checkpoint": card_of(Path("runs/short/checkpoints/checkpoint-10"), pin="step-10"),
        "unfinished": card_of(Path("runs/half")),
        "bare": card_of(Path("mine"), pin=None),
        "native": card_of(Path("runs/short"), native=True, repo_id="you/short-native", twin="you/short"),
        "converted": card_of(find_source(Path("theirs"), "words"), twin="you/theirs-native"),
        "converted without settings": card_of(find_source(Path("theirs-bare"), "words")),
        "nothing held out": card_of(Path("runs/all")),
        "adapters": card_of(adapters.root),
        "older run": card_of(older.root),
        "nothing but weights": card_of(poor.root),
        "branches": card_of(Path("runs/short"), branches=branches),
        "baseline": card_of(Path("runs/short"), baseline=Run(other)),
        "sweep": card_of(Path("runs/sweep/slower-i1-t1"), baseline=Run(RunFolder(Path("runs/sweep/baseline-i1-t1")))),
        "data of the Hub": card_of(of_hub.root),
    }


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
        (None, None, "The source of the questions was not recorded; whether the training chats contain them was not"),
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
    changed |= {} if source is None else {"prompts_from": source, "prompts_in_training": flags}
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


# ---- numbers ----------------------------------------------------------------------------------------------------


def told_by(name: str, losses: dict[str, Any]) -> list[str]:
    return [f"{losses['loss']:.3f}", f"{losses['perplexity']:,.1f}", f"{losses['bits_per_byte']:.3f}"]


def test_where_nothing_was_held_out_the_card_says_so(cards):
    card = cards["nothing held out"]
    assert "Held out: " not in card.prose
    counts = read_json(cards["chat"].source.run_folder.resolved)["data"]["validation"]
    assert f"). Held out: {counts['conversations']} conversations. Special tokens" in cards["chat"].prose
    assert "Nothing was held out: all of the data was trained on, so the loss on new chats is not known." in card.prose
    assert "before training" not in card.text


@pytest.mark.parametrize("variant", ["run", "chat", "native", "older run"])
def test_the_results_are_those_that_were_measured(variant, cards):
    card = cards[variant]
    heldout = read_json(card.source.run_folder.heldout)
    labels = {
        "before": "before training",
        "unigram": "unigram baseline (token frequencies only)",
        "after": "after training",
    }
    expected = {label: told_by(name, heldout[name]) for name, label in labels.items()}
    if heldout.get("new_text"):
        share = f"{100 * heldout['new_text']['share']:.3g}%"
        (label,) = [label for label in card.table("after training") if share in label]
        expected[label] = told_by("", heldout["new_text"])
        assert "outside 13-token overlaps" in label
        assert f"the first {heldout['new_text']['searched_tokens']:,} tokens of the training text" in card.prose
    assert card.table("after training") == expected
    after, rows = heldout["after"], heldout["rows"]
    assert (
        f"its loss is **{after['loss']:.3f}** nats per token, from {heldout['before']['loss']:.3f} before" in card.prose
    )
    n = f"{rows['conversations']:,} conversations" if variant == "chat" else f"{rows['rows']:,} rows"
    assert (
        f"Measured without dropout on {rows['predicted_tokens']:,} tokens in {n} that were not trained on" in card.prose
    )
    error = f"The standard error of the loss over rows is {after.get('standard_error', 0):.3f}."
    assert (error in card.prose) == (variant != "older run")
    if variant == "chat":
        told = heldout["answers"]
        assert f"Of {told['asked']} sampled answers to held-out questions, {told['ended']} ended" in card.prose


@pytest.mark.parametrize("variant", ["run", "chat"])
def test_the_settings_are_those_in_force(variant, cards):
    card = cards[variant]
    resolved = read_json(card.source.run_folder.resolved)
    t, model, data = resolved["trainer"], resolved["model"], resolved["data"]
    row = data["train"]["tokens"] / data["train"]["rows"] if variant == "chat" else model["max_position_embeddings"]
    about_ = "about " if variant == "chat" else ""
    told = {name: cell for name, (cell,) in card.table("optimizer").items()}
    assert told.pop("learning rate").startswith(f"{t['learning_rate']:.1e}")
    assert told.pop("seed") == str(t["seed"])
    least = t["lr_scheduler_kwargs"]["min_lr_rate"]
    assert f"{least:.0%}" in card.table("optimizer")["learning rate"][0]
    assert told == {
        "rows per step": f"{resolved['rows_per_step']} ({t['per_device_train_batch_size']} per device x "
        "1 accumulation step x 1 device)",
        "tokens per step": f"{about_}{round(resolved['rows_per_step'] * row)}",
        "steps": f"{card.source.step}",
        "warmup": "2 steps" if variant == "run" else f"{100 * t['warmup_steps']:g}% of the steps",
        "optimizer": f"{t['optim']}, betas {t['adam_beta1']:g} and {t['adam_beta2']:g}, epsilon {t['adam_epsilon']:g}",
        "weight decay": f"{t['weight_decay']:g} (matrices only)",
        "gradient clipping": f"norm {t['max_grad_norm']:g}",
        "dropout": ", ".join(f"{name} {model[name]:g}" for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop")),
        "precision": "float32",
        "torch.compile": "no",
    }
    rank = cards["adapters"].table("optimizer")
    words = "rank 8, alpha 16, dropout 0, on all linear layers of each block; merged into the model's weights"
    assert rank.pop("LoRA") == [words]
    assert rank.pop("trained") == [
        "1,000 of 20,000 parameters (5.0%): 900 of the adapter, 100 of new rows of the embeddings; "
        "the merged model has 19,000"
    ]
    assert rank == cards["chat"].table("optimizer")


def test_parameters_trained_with_lora_are_those_of_the_adapter_unless_the_run_is_of_an_earlier_version(tiny_run):
    run = Run(tiny_run)
    for adapter, words in (
        (None, ", those of the adapter included"),
        (1000, ": 1,000 of the adapter; the merged model has 19,000"),
    ):
        run.resolved = replace(run.resolved, parameters=ParameterCounts(total=20_000, trained=1000, adapter=adapter))
        assert trained_parameters(run) == f"1,000 of 20,000 parameters (5.0%){words}"


@pytest.mark.parametrize("variant", ["run", "chat", "native", "checkpoint", "converted"])
def test_the_sizes_are_those_of_the_weights(variant, cards):
    card = cards[variant]
    weights = load_file(card.folder / "model.safetensors")
    config = read_json(card.source.model / "config.json")
    total = sum(weight.numel() for weight in weights.values())
    embeddings = sum(weight.numel() for name, weight in weights.items() if re.search("embed_|wte|wpe", name))
    told = card.table("parameters")
    assert told["parameters"] == [f"{total:,} ({total - embeddings:,} without embeddings)"]
    sizes = [config[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")]
    if variant == "native":
        config = read_json(card.folder / "config.json")
        sizes = [config["n_layer"], config["n_embd"], config["n_head"]]
        config["max_position_embeddings"] = config["n_positions"]
    (layers,) = [cells[0] for name, cells in told.items() if name.startswith("layers")]
    assert [int(number) for number in re.findall(r"\d+", layers)] == sizes
    assert told["context"] == [f"{config['max_position_embeddings']} tokens, learned position embeddings"]
    assert told["vocabulary"] == [
        f"{config['vocab_size']}; output head {'tied to the embedding' if config['tie_word_embeddings'] else 'untied'}"
    ]
    digest = sha256(card.folder / "model.safetensors")[:16]
    assert told["weights"] == [f"float32, safetensors, SHA-256 {digest}…"]
    assert f"A {'small chat model:' if variant == 'chat' else 'language model of'} {total:,} parameters" in card.prose


@pytest.mark.parametrize("variant", ["run", "chat", "checkpoint", "adapters"])
def test_time_and_hardware_are_those_that_were_logged(variant, cards):
    card = cards[variant]
    source, resolved = card.source, read_json(card.source.run_folder.resolved)
    rows = [
        row
        for row in read_jsonl(source.run_folder.metrics)
        if row["step"] <= source.step and "tokens_per_second" in row
    ]
    tokens = rows[-1]["num_input_tokens_seen"]
    if variant not in ("chat", "adapters"):
        assert f" {approximate(tokens)} tokens" in card.prose
    seconds = round(training_seconds([MetricsRow.of(**row) for row in rows]))
    told = card.table("hardware")
    device = resolved["device"]
    assert told["hardware"][0].startswith(f"CPU ({device['name']}), {counted(device['threads'], 'thread')}")
    assert told["time in training steps"] == [duration(seconds)]
    assert told["peak memory"] == [f"{max(row['memory_gib'] for row in rows):.1f} GiB"]
    row_length = resolved["run"]["seq_len"] or resolved["model"]["max_position_embeddings"]
    flops = flops_per_token(read_model_config(source.model), row_length, resolved["run"]["lora_rank"]) * tokens
    ((name, told_flops),) = [item for item in told.items() if item[0].startswith("FLOPs")]
    assert ("without gradients of frozen weights" in name) == (variant == "adapters")
    assert told_flops == [f"{flops:.2e}"]
    made_by = resolved["made_by"]
    origin = card.table("started")
    assert origin["started"] == [made_by["date"]]
    assert made_by["versions"]["torch"] in origin["versions"][0]
    assert origin["weights"] == [f"of step {source.step}"]


def test_numbers_of_results_and_settings_are_in_a_file_of_the_run(cards):
    for variant in ("run", "chat", "baseline", "sweep"):
        card = cards[variant]
        files = [card.source.run_folder.resolved, card.source.run_folder.heldout, card.source.model / "config.json"]
        baseline = card.publication.baseline
        if baseline is not None:
            files += [baseline.folder.resolved, baseline.folder.heldout]
        known = {number for path in files for number in numbers(read_json(path))}
        known |= {round(card.source.run.resolved.rows_per_step * tokens) for tokens in row_lengths(card)}
        known |= {card.source.step}
        for first in ("after training", "optimizer", *(["setting"] if variant == "baseline" else [])):
            for table in card.tables():
                if not any(row[0] == first for row in table):
                    continue
                for token in re.findall(
                    r"(?<![\w.])[\d,]*\d(?:\.\d+)?(?:e[+-]?\d+)?%?", " ".join(chain.from_iterable(table[1:]))
                ):
                    assert any(told_as(token, number) for number in known), (variant, token)


def row_lengths(card: Card) -> list[float]:
    chats = card.source.run.resolved.data.train
    of_chats = [chats.tokens / chats.rows] if chats else []
    return [card.source.run.resolved.model.max_position_embeddings, *of_chats]


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def told_as(token: str, number: float) -> bool:
    """Whether a number, rounded as it is told, is this one."""
    if token.endswith("%"):
        return f"{100 * number:.3g}%" == token
    digits = len(token.partition(".")[2]) if "e" not in token else 1
    return token in (f"{number:,.{digits}f}", f"{number:.{digits}e}", f"{number:g}", f"{number}")


def test_beside_a_baseline_settings_and_losses_are_told_apart(cards):
    card = cards["baseline"]
    told = card.table("learning_rate")
    assert list(told) == ["seq_len", "init_seed", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs"]
    assert told["learning_rate"] == ["0.02", "0.01"]
    assert told["lr_scheduler_type"] == ["constant", "cosine_with_min_lr"]
    assert (told["seq_len"][0], told["init_seed"][0]) == ("16", "7")  # and in this run: unset, whatever that is called
    loss = read_json(card.source.run_folder.heldout)["after"]["loss"]
    assert f"Held-out loss of this run: {loss:.4f}; of the baseline: 3.5000.\nThese are single runs." in card.prose
    assert f"{loss - 3.5:+.4f}" not in card.prose


def test_baseline_of_the_same_sweep_is_compared_by_the_paired_verdict_of_that_sweep(cards):
    card, results = cards["sweep"], read_json(Path("runs/sweep/sweep.json"))
    row = next(row for row in results["recipes"] if row["recipe"] == "slower")
    assert (row["difference"], row["standard_error"], row["verdict"]) == (-0.095, 0.105, "undecided")
    assert (
        "Held-out loss of this run: 3.4000; of the baseline: 3.6000.\nThe two are single runs of a sweep. Over its 2 "
        "pairs of runs with equal seeds, recipe slower changes the held-out loss by -0.0950 on average, standard error "
        f"0.1050; a paired t test decides differences above {row['decided_above']:.4f}: **undecided**, so the seeds "
        "alone may explain it."
    ) in card.prose
    assert "-0.2000" not in card.prose
    assert "standard deviation" not in card.prose
    assert "No setting that affects the training result differs." in card.prose
    assert "This is one run; the variation between seeds was not measured." not in card.prose


def test_baseline_of_a_sweep_is_not_judged_by_it_for_a_run_that_the_sweep_has_not_seen(cards, tiny_run):
    baseline = Run(RunFolder(Path("runs/sweep/baseline-i1-t1")))
    changed = copied(tiny_run, "sweep/slower-i3-t3")  # since sweep.json was written
    for run in (Path("runs/short"), changed.root):
        card = card_of(run, baseline=baseline)
        assert "These are single runs. How much of the difference is due to the seeds is not known." in card.prose
        assert "standard" not in card.prose.partition("### Compared with the baseline")[2].partition("## ")[0]


@pytest.mark.slow
def test_baseline_is_linked_where_its_model_is_published_for_everybody(cards, tiny_run):
    other = copied(tiny_run, "published-baseline")
    named = "### Compared with the baseline published-baseline\n"
    weights = sha256(other.model / "model.safetensors")
    for not_there in ({"digest": "0" * 64}, {"verified": None}, {"native": True}):
        publish(other.root, **{"digest": weights, **not_there})
        assert named in card_of(Path("runs/short"), baseline=Run(other)).prose
    publish(other.root, weights)
    card = card_of(Path("runs/short"), baseline=Run(other))
    assert "### Compared with the baseline [you/base-model](https://huggingface.co/you/base-model)\n" in card.prose
    assert linked_repositories(card.source, card.publication) == [("model", "you/base-model")]
    assert named in card_of(Path("runs/short"), baseline=Run(other), private=frozenset({"you/base-model"})).prose


def test_beside_a_baseline_batch_processes_base_and_data_are_compared(tiny_run):
    other = copied(tiny_run, "other-batch")
    batch = {"per_device_train_batch_size": 1}
    change(other.resolved, trainer=batch, device={"count": 3}, data={"fingerprint": "ab" * 32, "folder": "elsewhere"})
    change(other.resolved, base={"init_from": "/home/somebody/models/first", "sha256": "cd" * 32, "of_hub": False})
    write_json(other.resolved, {**read_json(other.resolved), "rows_per_step": 1})
    card = card_of(Path("runs/short"), baseline=Run(other))
    resolved = card.source.run.resolved
    assert card.table("initial weights") == {
        "initial weights": ["SHA-256 cdcdcdcdcdcdcdcd…", "new"],
        "data": ["fingerprint abababababababab…", f"fingerprint {resolved.data.fingerprint[:16]}…"],
        "rows per step": ["1", "4"],
        "processes": ["3", "1"],
    }
    assert "No setting that affects the training result differs." not in card.prose
    assert "/home/" not in card.text


def test_losses_on_other_rows_are_not_compared(tiny_run):
    other = copied(tiny_run, "other-rows")
    change(other.heldout, rows={"rows": 13})
    card = card_of(Path("runs/short"), baseline=Run(other))
    assert "The two were not measured on the same held-out rows, so their losses cannot be compared." in card.prose
    assert "Held-out loss of this run" not in card.prose


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0"),
        (7, "7"),
        (16608, "16,608"),
        (99_999, "99,999"),
        (100_000, "0.1 million"),
        (281_344, "0.28 million"),
        (999_999, "1 million"),
        (1_234_567, "1.23 million"),
        (99_999_999, "100 million"),
        (124_439_808, "124 million"),
        (163_009_536, "163 million"),
        (999_900_000, "1 billion"),
        (3_260_190_720, "3.26 billion"),
    ],
)
def test_a_count_is_told_as_people_say_it(count, said):
    assert approximate(count) == said


@pytest.mark.parametrize(
    ("kind", "documents", "said"),
    [
        ("tails", 1, "the end of the document (99 tokens)"),
        ("tails", 3, "the ends of all 3 documents (99 tokens)"),
        ("documents", 1, "1 complete document (99 tokens)"),
        ("documents", 5, "5 complete documents (99 tokens)"),
        ("files", 1, "1 document of separate files (99 tokens)"),
        (None, 1, "99 tokens"),  # a run of an earlier version
    ],
)
def test_card_and_report_state_what_was_held_out(kind, documents, said, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = copied(tiny_run, "held-out")
    data = read_json(run.resolved)["data"]
    assert data["held_out"] == "documents"
    counts = {name: {**split, "documents": documents, "tokens": 99} for name, split in data["splits"].items()}
    sources = data["sources"] | ({"validation": [{"file": "other.txt", "bytes": 9}]} if kind == "files" else {})
    change(run.resolved, data={"splits": counts, "held_out": kind, "sources": sources})
    card = card_of(run.root)
    assert f" training tokens in {counted(documents, 'document')}, " in card.prose
    assert f". Held out: {said}. Rows" in card.prose
    name = card.metadata["model-index"][0]["results"][0]["dataset"]["name"]
    assert name == ("other.txt" if kind == "files" else "held-out part of corpus.jsonl")
    assert [
        "held out",
        said.replace("1 complete", "one whole").replace("1 document", "one document").replace("complete", "whole"),
    ] in facts(Run(run))


def test_card_and_report_tell_the_kept_step_from_the_end_of_training(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = copied(tiny_run, "kept")
    assert {"step": 20, "last_step": 20}.items() <= read_json(run.heldout).items()
    at_end, rows = card_of(run.root), read_jsonl(run.metrics)
    losses, epochs = ({row["step"]: row[name] for row in rows if name in row} for name in ("loss", "epoch"))
    kept = "The weights are those of step 10, the best checkpoint; training ended at step 20."
    assert at_end.table("optimizer")["steps"] == ["20"]
    assert f"The last logged training loss was {losses[20]:.3f}. " in at_end.prose
    assert f" documents, in {epochs[20]:.3g} passes over the rows. " in at_end.prose
    assert kept not in at_end.prose + status(Run(run))
    write_json(run.heldout, {**read_json(run.heldout), "step": 10})
    card = card_of(run.root)
    assert f"{kept} Tokens, FLOPs and time on this card are those of the entire training." in card.prose
    assert kept in status(Run(run))
    assert card.table("optimizer")["steps"] == ["20; the weights are those of step 10"]
    assert card.table("hardware")["measured over"] == ["the entire training, to step 20"]
    assert f"loss was {losses[20]:.3f} up to the end of training, and {losses[10]:.3f} up to step 10." in card.prose
    assert f", in {epochs[20]:.3g} passes over the rows, {epochs[10]:.3g} of them up to the kept step. " in card.prose
    assert card.table("started")["weights"] == ["of step 10"]


def test_steps_of_a_run_that_stopped_early_are_those_taken_and_those_planned(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = copied(tiny_run, "stopped")
    shutil.copytree(tiny_run.checkpoints, run.checkpoints)
    state = run.checkpoints / "checkpoint-20" / "trainer_state.json"
    write_json(state, {**read_json(state), "max_steps": 40})
    resolved = read_json(run.resolved)
    write_json(run.resolved, {**resolved, "trainer": {**resolved["trainer"], "warmup_steps": 0.05}})
    table = card_of(run.root).table("optimizer")
    assert table["steps"] == ["20 of 40 planned, then training stopped"]
    assert table["warmup"] == ["5% of the 40 planned steps"]


def test_conversations_that_were_left_out_or_shortened_are_not_counted_as_learned():
    left_out = {"too_long": 237, "nothing_to_learn": 2, "shortened": 6}
    assert ChatCounts(conversations=251, rows=12, tokens=900, supervised_share=0.5, **left_out).trained_on == 12


def test_names_in_the_metadata_may_look_like_links():
    card = "---\nlicense: mit\nname: 'held-out part of texts [a](b)'\n---\n\n# title\n"
    check_finished(card, set())
    with pytest.raises(UsageError, match="links b in line 7"):
        check_finished(f"{card}[a](b)\n", set())


@pytest.mark.slow
def test_steps_and_tokens_of_an_interrupted_run_are_those_of_its_checkpoint(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run.root, "runs/short")
    run = RunFolder(Path("runs/short"))
    run.heldout.unlink()
    write_jsonl(run.metrics, [row for row in read_jsonl(run.metrics) if row["step"] <= 15])
    state, guard = (run.checkpoints / "checkpoint-20" / name for name in ("trainer_state.json", "guard_0.json"))
    write_json(state, {**read_json(state), "num_input_tokens_seen": 1920, "epoch": 2.13})
    write_json(guard, {**read_json(guard), "tokens": 640})
    card = card_of(checkpoint_source(run.checkpoints / "checkpoint-20", run))
    assert card.table("optimizer")["steps"] == ["20"]
    assert ", in 2.13 passes over the rows. " in card.prose
    assert training_facts(card.source, read_model_config(card.source.model))["train_loss_step"] == 15
    assert card.table("hardware")["time in training steps"][0].endswith("s (to step 15)")
    assert " trained from scratch on 2,560 tokens" in card.prose
    assert "ends at step 15 of 20, the newest checkpoint is of step 20, 2,560 tokens." in status(Run(run))
    shutil.rmtree(run.checkpoints / "checkpoint-20")
    assert card_of(checkpoint_source(run.checkpoints / "checkpoint-10", run)).table("optimizer")["steps"] == [
        "10 of 20"
    ]


# ---- time -------------------------------------------------------------------------------------------------------


def test_a_run_shorter_than_the_interval_of_its_log_has_a_card(tiny_run):
    run = copied(tiny_run, "shorter")
    rows = read_jsonl(run.metrics)
    assert "train_loss" in rows[-1]
    write_jsonl(run.metrics, [rows[0], {**rows[-1], "num_input_tokens_seen": 2560, "tokens_per_second": 1280.0}])
    card = card_of(run.root)
    assert " trained from scratch on 2,560 tokens" in card.prose
    assert card.table("hardware")["time in training steps"] == ["2s"]
    assert "last logged training loss" not in card.prose


def test_tokens_of_a_checkpoint_between_two_lines_of_the_log_are_all_counted(tiny_run):
    run = copied(tiny_run, "between")
    shutil.copytree(tiny_run.checkpoints / "checkpoint-10", run.checkpoints / "checkpoint-10")
    write_jsonl(run.metrics, [row for row in read_jsonl(run.metrics) if row["step"] > 10])  # nor any before
    state, guard = (run.checkpoints / "checkpoint-10" / name for name in ("trainer_state.json", "guard_0.json"))
    write_json(state, {**read_json(state), "num_input_tokens_seen": 640})
    write_json(guard, {**read_json(guard), "tokens": 640})
    assert " trained from scratch on 1,280 tokens" in card_of(run.checkpoints / "checkpoint-10").prose


def test_training_time_is_that_of_the_steps_of_all_sittings():
    rows = [
        MetricsRow.of(0, eval_loss=5.0),
        MetricsRow.of(10, loss=4.0, num_input_tokens_seen=1000, tokens_per_second=100.0),
        MetricsRow.of(10, eval_loss=4.5),
        MetricsRow.of(20, loss=3.0, num_input_tokens_seen=3000, tokens_per_second=500.0),
    ]
    assert training_seconds(rows) == pytest.approx(1000 / 100 + 2000 / 500)
    assert training_seconds([]) is None
    assert training_seconds([MetricsRow.of(5, loss=1.0)]) is None


@pytest.mark.slow
def test_of_a_resumed_run_the_steps_of_both_sittings_count_once(tiny_run, tmp_path):
    root = tmp_path / "runs" / "short"
    shutil.copytree(tiny_run.root, root)
    for path in (root / "checkpoints" / "checkpoint-20", root / "model", root / "evaluation"):
        shutil.rmtree(path)
    before = read_jsonl(root / "metrics.jsonl")
    run = run_train(tiny_words(tmp_path, root))
    rows = read_jsonl(run.metrics)
    steps = [row for row in rows if "tokens_per_second" in row]
    assert [row["step"] for row in steps] == [5, 10, 15, 20]
    assert rows[:3] == before[:3]
    assert steps[-1]["tokens_per_second"] != before[-3]["tokens_per_second"]
    assert training_seconds(Run(run).metrics) == pytest.approx(
        sum(5 * 4 * 32 / row["tokens_per_second"] for row in steps)
    )


# ---- metadata ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_hub_is_told_how_to_load_it_and_what_it_does(variant, cards):
    told = cards[variant].metadata
    assert told["library_name"] == "transformers"
    assert told["pipeline_tag"] == "text-generation"
    chats = variant in ("chat", "adapters", "nothing held out")
    assert told["tags"] == ["gpt2small_hf", "gpt2", *(["conversational"] if chats else [])]
    assert told.get("language") == (["en"] if variant == "run" else None)
    assert told.get("license") == {"run": "apache-2.0", "chat": "cc-by-4.0"}.get(variant)


@pytest.mark.parametrize("variant", ["run", "chat", "native", "data of the Hub"])
def test_the_hub_is_told_the_loss_that_was_measured(variant, cards):
    card = cards[variant]
    after = read_json(card.source.run_folder.heldout)["after"]
    told = {result.metric_type: result for result in ModelCard(card.text).data.eval_results}
    assert {kind: result.metric_value for kind, result in told.items()} == {
        kind: pytest.approx(after[kind], abs=1e-6) for kind in ("loss", "perplexity", "bits_per_byte")
    }
    assert card.metadata["model-index"][0]["name"] == card.publication.repo_id.split("/")[1]
    of = {"chat": "chats.jsonl", "data of the Hub": "somebody/some-text"}.get(variant, "corpus.jsonl")
    assert told["loss"].dataset_name.startswith(f"held-out part of {of}")
    assert (told["loss"].dataset_type == of) == (variant == "data of the Hub")


@pytest.mark.parametrize("variant", ["checkpoint", "unfinished", "bare", "converted", "older run", "nothing held out"])
def test_nothing_is_claimed_where_nothing_was_measured_or_nobody_knows_on_what(variant, cards):
    assert "model-index" not in cards[variant].metadata


def test_data_sets_are_named_only_where_they_are_the_hubs(cards, chat_run):
    named = {variant: card.metadata.get("datasets") for variant, card in cards.items()}
    expected = dict.fromkeys(VARIANTS)
    assert named == expected | {"converted": ["somebody/some-text"], "data of the Hub": ["somebody/some-text"]}
    assert "[somebody/some-text](https://huggingface.co/datasets/somebody/some-text), configuration plain" in (
        cards["data of the Hub"].prose
    )


@pytest.mark.parametrize("name", ["data/chats.jsonl", "gone/chats.parquet", "data/chats"])
def test_a_file_that_is_no_longer_there_is_not_taken_for_a_data_set_of_the_hub(name, chat_run):
    run = copied(chat_run, f"moved-{name.replace('/', '-')}")
    origin = read_json(run.resolved)["data"]["sources"]["train"][0]
    assert "sha256" in origin
    change(run.resolved, data={"sources": {"train": [{**origin, "name": name}], "validation": []}})
    assert card_of(run.root).metadata.get("datasets") is None


@pytest.mark.slow
def test_chats_of_the_hub_are_named_with_their_revision(chat_run):
    run = copied(chat_run, "chats-of-hub")
    origin = {"name": "somebody/chats:test", "shape": "x", "conversations": 32, "unreadable": 0, "revision": "abc123"}
    change(run.resolved, data={"sources": {"train": [origin], "validation": []}})
    card = card_of(run.root)
    assert card.metadata["datasets"] == ["somebody/chats"]
    assert "[somebody/chats](https://huggingface.co/datasets/somebody/chats), 32 conversations, revision abc123" in (
        card.prose.replace("`", "")
    )


def test_names_from_a_runs_files_are_no_markup(tiny_run):
    run = copied(tiny_run, "marked-up")
    mark = "` ](http://evil/x) ![x](http://evil/x.png) <img src=http://evil/x> `"
    origin = {"dataset": "somebody/text", "config": mark, "split": mark, "revision": mark}
    change(run.resolved, data={"sources": {"train": [origin]}})
    base = {"init_from": f"acme/base{mark}", "of_hub": True, "sha256": "0" * 64}
    write_json(run.resolved, {**read_json(run.resolved), "base": base})
    branch = {"revision": mark, "step": 10, "tokens": 1280, "loss": 4.273}
    shown = page(card_of(run.root, branches=[branch]).text, "staged")
    assert "evil" in shown
    found = re.search(r"<[^>]*evil", shown)
    assert not found, shown[found.start() - 300 : found.end()]


@pytest.fixture
def with_base(tiny_run, chat_run, tmp_path, monkeypatch) -> RunFolder:
    """A chat run whose base lies beside it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run.root, "runs/MyBase")
    run = copied(chat_run, "talk")
    change(run.resolved, base={"init_from": "runs/MyBase/model"})
    return run


def publish(run: Path, digest: str, **more: Any) -> None:
    file = {"size": 1, "sha256": digest}
    told = {"repo_id": "you/base-model", "commit": "0" * 40, "pull_request": None, "verified": {"checksums": 1}}
    write_json(run / "published.json", {**told, "files": {"model.safetensors": file}, **more})


@pytest.mark.slow
def test_a_base_is_named_to_the_hub_only_if_these_weights_were_published(with_base):
    card = card_of(with_base.root)
    assert card.metadata.get("base_model") is None
    assert card.metadata.get("base_model_relation") is None
    assert "The model of the run MyBase was fine-tuned on" in card.prose
    weights = sha256(Path("runs/MyBase/model/model.safetensors"))
    assert weights == read_json(with_base.resolved)["base"]["sha256"]
    for not_there in ({"digest": "0" * 64}, {"verified": None}, {"pull_request": "https://example.com/1"}):
        publish(Path("runs/MyBase"), **{"digest": weights, **not_there})
        assert card_of(with_base.root).text == card.text
    publish(Path("runs/MyBase"), weights)
    card = card_of(with_base.root)
    assert (card.metadata["base_model"], card.metadata["base_model_relation"]) == ("you/base-model", "finetune")
    assert "[you/base-model](https://huggingface.co/you/base-model) was fine-tuned on" in card.prose


@pytest.mark.slow
def test_the_card_of_a_fine_tune_names_the_training_data_of_its_base(with_base):
    base = read_json(with_base.resolved)["base"]
    assert [Path(origin["file"]).name for origin in base["trained_on"]] == ["corpus.jsonl"]
    card = card_of(with_base.root)
    assert "The base model was trained on corpus.jsonl." in card.prose
    assert "/" not in read_json(card.folder / "resolved.json")["base"]["trained_on"][0]["file"]
    origins = [{"dataset": "somebody/some-text", "revision": "0" * 40}, *base["trained_on"]]
    change(with_base.resolved, base={"trained_on": origins})
    card = card_of(with_base.root)
    link = "[somebody/some-text](https://huggingface.co/datasets/somebody/some-text)"
    assert f"The base model was trained on {link}, corpus.jsonl." in card.prose
    assert linked_repositories(card.source, card.publication) == [("dataset", "somebody/some-text")]
    assert "somebody/some-text](" not in card_of(with_base.root, private=frozenset({"somebody/some-text"})).prose
    change(with_base.resolved, base={"trained_on": None})  # as of a run of an earlier version
    assert "The training data of the base model was not recorded." in card_of(with_base.root).prose
    change(with_base.resolved, base={"init_from": "somebody/their-base", "of_hub": True})
    assert "For the training data of the base model see [somebody/their-base]" in card_of(with_base.root).prose


@pytest.mark.parametrize("inside", ["model", "checkpoints/checkpoint-10", "."])
def test_the_training_data_of_a_base_are_found_beside_its_weights(inside, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    first, second = {"file": "first.txt"}, {"file": "second.txt"}
    told = read_json(REPOSITORY / "tests" / "runs" / "old_run" / "text" / "resolved.json")
    told["data"]["sources"] = {"train": [second]}
    told["base"] = {"init_from": "base", "sha256": "0" * 64, "trained_on": [first]}
    assert sources_of(run.root / inside) is None
    write_json(run.resolved, told)
    assert sources_of(run.root / inside) == [second, first]
    assert sources_of(run.root / "elsewhere") is None


@pytest.mark.slow
def test_a_base_from_the_hub_is_named_to_it_and_one_that_is_gone_is_not(with_base):
    change(with_base.resolved, base={"init_from": "somebody/their-base", "of_hub": True})
    card = card_of(with_base.root)
    assert card.metadata["base_model"] == "somebody/their-base"
    assert linked_repositories(card.source, card.publication) == [("model", "somebody/their-base")]
    card = card_of(with_base.root, private=frozenset({"somebody/their-base"}))
    assert card.metadata.get("base_model") is None
    assert "The private model their-base was fine-tuned" in card.prose
    assert "somebody/their-base" not in card.prose
    for gone in ("runs/gone/model", "/data/runs/gone/model", "out/checkpoints/checkpoint-10", "out/mine"):
        change(with_base.resolved, base={"init_from": gone, "of_hub": False})
        assert card_of(with_base.root).metadata.get("base_model") is None


# ---- the template -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("{{ carbon_footprint }}", "names an unknown fact: 'carbon_footprint' is undefined"),
        (
            "{{ training.emissions }}",
            "dict object' has no attribute 'emissions'",
        ),
        ("{% if budget %}x{% endif %}", "names an unknown fact: 'budget' is undefined"),
        ("\n{% if training %}", ", line 2 cannot be rendered: Unexpected end of template."),
        ("{{ name | shouted }}", ", line 1 cannot be rendered: No filter named 'shouted'."),
        ("{% include 'more.j2' %}", " cannot be rendered: 'more.j2' not found"),
    ],
)
def test_a_template_that_asks_for_what_nobody_knows_is_refused_by_the_name_of_it(words, said, cards, tmp_path):
    card, template = cards["run"], tmp_path / "mine.j2"
    template.write_text(words)
    with pytest.raises(UsageError) as refused:
        render(card.source, card.folder, card.publication, template)
    assert str(refused.value).startswith(f"{template}")
    assert said in str(refused.value)


def test_a_template_of_ones_own_is_rendered_with_the_same_facts(cards, tmp_path):
    card, template = cards["run"], tmp_path / "mine.j2"
    template.write_text(
        "# {{ name | md }}\n\n{{ model.sizes.total | approximate }} parameters, "
        "loss {{ heldout.after.loss_nats | loss }}\n"
    )
    text = render(card.source, card.folder, card.publication, template)
    loss = card.source.run.loss_nats
    assert ModelCard(text).text.strip().startswith(f"# short\n\n16,608 parameters, loss {loss:.3f}\n")
    assert is_unedited(text)


# ---- the gate ---------------------------------------------------------------------------------------------------

HEADER = "---\nlibrary_name: transformers\n---\n\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Machine type: TODO", "the card has TODO in line 7: 'Machine type: TODO'"),
        ("FIXME later", "the card has TODO in line 7"),
        ("[More Information Needed]", "the card has More Information Needed in line 7"),
        ("A tuned version of [](https://huggingface.co/).", "the card has an empty link in line 7"),
        ("A tuned version of [gpt2]().", "the card has an empty link in line 7"),
        ("A tuned version of []().", "the card has an empty link in line 7"),
        ("| loss | None |", "the card has None in line 7: '| loss | None |'"),
        ("| loss | nan |", "the card has nan in line 7"),
        ("**NaN**", "the card has nan in line 7"),
        ("{{ loss }}", "the card has an unrendered placeholder in line 7"),
        ("{% if loss %}", "the card has an unrendered placeholder in line 7"),
        ("![loss](charts/loss.png)", "the card links charts/loss.png in line 7, which is not published"),
        ("See [the settings](resolved.json).", "the card links resolved.json in line 7, which is not published"),
        ("See `code` and [x](y.md) and `more`.", "the card links y.md in line 7, which is not published"),
        ('See [x](y.md "title").', "the card links y.md in line 7, which is not published"),
    ],
)
def test_an_unfinished_card_is_refused_with_the_line(line, said):
    with pytest.raises(UsageError) as refused:
        check_finished(f"{HEADER}# A model\n\n{line}\n", {"README.md"})
    assert str(refused.value).startswith(said)
    assert "Correct model_card.j2." in str(refused.value)


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("---\nlicense: TODO\n---\n\n# A model\n", "the card has TODO in line 2: 'license: TODO'"),
        ("---\nlicense: None\n---\n\n# A model\n", "the card has None in line 2"),
        ("---\nlicense: [\n---\n\n# A model\n", "the card's metadata is not YAML: "),
        ("---\nlicense\n---\n\n# A model\n", "the card has no metadata between two lines of ---"),
        ("# A model\n", "the card has no metadata between two lines of ---"),
        ("---\nlicense: mit\n", "the card has no metadata between two lines of ---"),
        ("", "the card has no metadata between two lines of ---"),
    ],
)
def test_metadata_that_is_missing_or_unfinished_is_refused(card, said):
    with pytest.raises(UsageError) as refused:
        check_finished(card, set())
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "lines",
    [
        "```text\nreturn None  # TODO {{ x }} {% if %} nan []() ![](gone.png)\n```",
        "```python\ndef f() -> None: ...\n```",
        "````text\n```\nNone\n```\nNone\n````",
        "a `None` and ``a ` None`` and `{{ x }}`",
        "| `None` | `TODO` |",
        "TODOs, nano, NaNs, Nonesuch, None_such",
        "[up](#results) [out](https://example.com) [mail](mailto:a@b.c) ![there](charts/loss.png) [it](README.md)",
        "an array[0] (zero) and \\[a\\](b)",
    ],
)
def test_the_same_words_in_code_and_other_words_are_no_reason(lines):
    check_finished(f"{HEADER}# A model\n\n{lines}\n", {"README.md", "charts/loss.png"})


def test_after_a_block_of_code_the_gate_looks_again():
    with pytest.raises(UsageError, match=r"the card has None in line 10: 'None'"):
        check_finished(f"{HEADER}# A model\n\n```text\nNone\n```\nNone\n", {"README.md"})


def test_a_missing_picture_of_a_real_card_is_refused(cards):
    card = cards["run"]
    with pytest.raises(UsageError, match=r"^the card links charts/loss\.png in line \d+, which is not published"):
        check_finished(card.text, card.files - {"charts/loss.png"})


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
