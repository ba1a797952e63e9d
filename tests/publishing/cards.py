"""A card of each kind of model, for the tests of cards.

PYTEST_DONT_REWRITE: test files import this one before they name it as a plugin.
"""

import shutil
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import chat_words, run_train
from conversion import test_conversion
from conversion.test_conversion import write_reference
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from gpt2small_hf.publishing.card import render
from gpt2small_hf.publishing.license import License, write_license
from gpt2small_hf.publishing.lineage_facts import copyright_holders
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.source import PushSource, find_source
from gpt2small_hf.publishing.stage import list_files, stage, stage_native
from gpt2small_hf.report.sweep import write_report
from gpt2small_hf.runs.files import read_json, write_json, write_jsonl
from gpt2small_hf.runs.layout import RunFolder, SweepFolder
from gpt2small_hf.runs.reader import Run

HEADER = "---\nlibrary_name: transformers\n---\n\n"


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


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> Path:
    """A folder like a checkout, in which the tests of cards are."""
    return tmp_path_factory.mktemp("checkout")


@pytest.fixture(scope="module")
def in_checkout(checkout):
    """Tests run in `checkout`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(checkout)
        yield


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


@pytest.fixture(scope="session")
def cards(checkout, tiny_run, chat_run, chat_place, tiny_tokenizer) -> dict[str, Card]:
    """A card of each kind of model that can be published."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(checkout)
        return make_cards(tiny_run, chat_run, chat_place, tiny_tokenizer)


def make_cards(tiny_run: RunFolder, chat_run: RunFolder, chat_place: Path, tiny_tokenizer: Any) -> dict[str, Card]:
    """Make them in the current folder."""
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


def publish(run: Path, digest: str, **more: Any) -> None:
    file = {"size": 1, "sha256": digest}
    told = {"repo_id": "you/base-model", "commit": "0" * 40, "pull_request": None, "verified": {"checksums": 1}}
    write_json(run / "published.json", {**told, "files": {"model.safetensors": file}, **more})
