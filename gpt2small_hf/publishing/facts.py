"""A staged model and its run's files → the facts of its card. `card.py` puts them into words.

Nothing is invented: what no file tells is None or empty.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import safe_open

from gpt2small_hf.config.recipe import BASELINE
from gpt2small_hf.config.run import PROMPT
from gpt2small_hf.data.tokenizer import load_tokenizer
from gpt2small_hf.formatting import counted, duration
from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.peft_targets import LORA_TARGETS
from gpt2small_hf.publishing.checks import check_sizes, modified_code, weight_files
from gpt2small_hf.publishing.isolated_load import chat_ids
from gpt2small_hf.publishing.license import TEXT, TEXT_OF_CODE, License
from gpt2small_hf.publishing.privacy import (
    hub_dataset,
    hub_ids,
    is_hub_id,
    is_of_hub,
    public_ids,
    scrub,
    scrub_command,
)
from gpt2small_hf.publishing.source import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PushSource
from gpt2small_hf.publishing.stage import CHARTS
from gpt2small_hf.report.page import (
    Ladder,
    held_out,
    ladders,
    lora,
    prompts_line,
    trained_parameters,
)
from gpt2small_hf.report.sweep import SweepFolder, six
from gpt2small_hf.report.tables import (
    kept_line,
    markdown_table,
    new_text,
    one_line,
    overlap_line,
    rise_line,
    worse_line,
)
from gpt2small_hf.runs.files import read_json, sha256
from gpt2small_hf.runs.layout import HUB_ID, RunFolder
from gpt2small_hf.runs.reader import Run, logged_tokens, tokens_of
from gpt2small_hf.runs.records import Answer, DataSource, Resolved
from gpt2small_hf.training.budget import flops_per_token, sizes
from gpt2small_hf.training.resume import changed

MINIMUM_TRANSFORMERS = "5.4.0"
"""The oldest that tests/compat/versions.py runs a published folder under."""
NATIVE_TRANSFORMERS = "4.57.1"
"""The version of transformers 4 under which a native folder was tried."""
QUESTION = "Who are you?"
"""Of the example in the card of a chat model that has no prompt to publish."""
MOST_SAMPLES = 3
MOST_LETTERS = 66
"""Of a text in the ladder."""
MOST_FILES = 8
"""Of the training text, that are named one by one."""
PSF = {"name": "PSF-2.0", "url": "https://docs.python.org/3/license.html"}
"""The license of Python's documentation."""
IGNORED_SETTINGS = {"output_dir", "prompts", "num_threads", "data_dir", "data_seed"}
"""Settings whose difference from a baseline is no change to the recipe."""


@dataclass(frozen=True)
class Publication:
    """How a model is published, as far as its card tells."""

    repo_id: str
    pin: str | None = None
    """The tag or branch that the card's code names."""
    pin_moves: bool = False
    """Whether `pin` is a branch."""
    native: bool = False
    """A GPT-2 of transformers' own, which needs no remote code."""
    twin: str | None = None
    """The repository of the same weights in the other form."""
    license: License | None = None
    languages: list[str] = field(default_factory=list)
    baseline: Run | None = None
    branches: list[dict[str, Any]] = field(default_factory=list)
    """Of the checkpoints beside it: `revision`, `step`, `tokens`, `loss`."""
    private: frozenset[str] = frozenset()
    """Repositories that not everybody may see: the card does not link them."""
    developers: list[str] = field(default_factory=list)
    """Who trained the model, as given."""
    contact: str | None = None
    origin: str | None = None
    """Where weights that were not trained here come from: a Hub id or an address."""
    questions: bool = False
    """Whether questions of the run's chats are shown, with the model's answers."""


def linked_repositories(source: PushSource, publication: Publication) -> list[tuple[str, str]]:
    """List the repositories that are named beside its own: type (`model` or `dataset`) and id."""
    base, data, converted = _base(source.run, publication), _data(source.run, frozenset()), _converted(source)
    datasets = {*(data["datasets"] if data else []), converted["dataset"] if converted else None}
    baseline = _published_baseline(publication) if source.run else None
    origin = _credit(source, publication)["origin"]
    models = {base["repo"] if base else None, baseline, publication.twin, origin["repo"] if origin else None}
    linked = {(kind, name) for kind, names in (("model", models), ("dataset", datasets)) for name in names if name}
    return sorted(linked | (hub_ids(source.run.resolved) if source.run else set()))


def facts(source: PushSource, folder: Path, publication: Publication) -> dict[str, Any]:
    """Everything that the template may speak of. What is not known is None or empty."""
    settings = read_json((source.model if source.adapter else folder) / "config.json")
    config = check_sizes(source.model)
    zero_biases = publication.native and not config.attention_bias
    if zero_biases:  # transformers' GPT-2 always has them
        config.attention_bias = True
    n_parameters = sizes(config)
    run = source.run
    chat = _is_chat(folder)
    prompts = staged_prompts(folder)
    prompt, new_tokens, fitting = examples(folder, config.max_position_embeddings)
    public = public_ids(run.resolved, publication.private) if run else set()
    base, converted = _base(run, publication), _converted(source)
    if converted and converted["dataset"] in publication.private:
        converted["dataset"] = None
    return {
        "name": publication.repo_id.split("/")[-1],
        "repo_id": publication.repo_id,
        "pin": publication.pin,
        "pin_moves": publication.pin_moves,
        "native": publication.native,
        "twin": None if publication.twin in publication.private else publication.twin,
        "license": _license(folder, publication.license),
        "languages": publication.languages,
        "config": {**config.to_dict(), "model_type": settings["model_type"]},
        "zero_biases": zero_biases,
        "sizes": {
            "total": n_parameters.total,
            "non_embedding": n_parameters.non_embedding,
            "about": about(n_parameters.total),
        },
        "dtype": _dtype(sorted(folder.glob("*.safetensors")) if source.adapter else weight_files(folder)),
        "adapter": _adapter(folder) if source.adapter else None,
        "hashes": [sha256(path)[:16] for path in sorted(folder.glob("*.safetensors"))],
        "lora_targets": None
        if publication.native or source.adapter
        else LORA_TARGETS,  # PEFT knows transformers' own GPT-2
        "code": sorted(path.name for path in folder.glob("*.py")),
        "modified_code": modified_code(source, folder),
        "minimum_transformers": MINIMUM_TRANSFORMERS,
        "native_transformers": [NATIVE_TRANSFORMERS, version("transformers")],
        "chat": chat,
        "spoken": _spoken(folder, prompt) if chat else None,
        "prompt": prompt,
        "new_tokens": new_tokens,
        **_credit(source, publication),
        "prompts": fitting[:MOST_SAMPLES],
        "base": base,
        "converted": converted,
        "checkpoint": source.is_checkpoint,
        "on_the_way": source.is_checkpoint and not _is_last(source),
        "step": source.step,
        "run": trained(source) if run else None,
        "heldout": run.measured if run and not source.is_checkpoint else None,
        "nothing_held_out": bool(run and run.heldout and not run.measured),
        "new_text": new_text(run.measured) if run and run.measured and not source.is_checkpoint else None,
        "overlap_line": overlap_line(run.measured) if run and run.measured and not source.is_checkpoint else None,
        "rows": _measured(run) if run and not source.is_checkpoint else None,
        "heldout_label": heldout_label(run) if run else None,
        "loss_then": loss_at_step(source),
        "worse": worse(source),
        "difference": _difference(run, publication.baseline, publication) if run and publication.baseline else None,
        "charts": [name for name in CHARTS if (folder / "charts" / f"{name}.png").is_file()],
        "samples": _samples(source, folder, prompts),
        "answers": _answers(source) if publication.questions else None,
        "ladder": _ladder(source, prompts),
        "data": _data(run, publication.private),
        "training": _training(source) if run else None,
        "compute": _compute(source, config),
        "command": scrub_command(run.resolved.made_by.command, public) if run else None,
        "provenance": _provenance(source),
        "branches": publication.branches,
        "namespace": publication.repo_id.split("/")[0],
    }


def _is_chat(folder: Path) -> bool:
    return (folder / "chat_template.jinja").is_file() or "chat_template" in read_json(folder / "tokenizer_config.json")


def staged_prompts(folder: Path) -> list[str]:
    """Return the prompts of a run as they are staged: without those that are not to be published."""
    settings = RunFolder(folder).resolved
    return Resolved.load(settings).run.prompts if settings.is_file() else []


def examples(folder: Path, context: int) -> tuple[str, int, list[str]]:
    """Choose what the card's code asks the model, so that prompt and answer are within the context.

    Returns: the prompt; the number of new tokens; and all prompts of the run that leave room for these. If none does,
        the prompt is a default one, cut to what fits.
    """
    chat, generation = _is_chat(folder), read_json(folder / "generation_config.json")
    new_tokens = min((generation.get("max_new_tokens") or 128) if chat else 40, context // 2)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.model_max_length = sys.maxsize  # no warning that a prompt is too long: that is what is looked for

    def fits(text: str) -> bool:
        ids = chat_ids(tokenizer, [{"role": "user", "content": text}]) if chat else tokenizer(text)["input_ids"]
        return len(ids) + new_tokens <= context  # pyright: ignore[reportArgumentType]

    if fitting := [prompt for prompt in staged_prompts(folder) if fits(prompt)]:
        return fitting[0], new_tokens, fitting
    words = (QUESTION if chat else PROMPT).split()
    while len(words) > 1 and not fits(" ".join(words)):
        words.pop()
    return " ".join(words), new_tokens, []


def copyright_holders(source: PushSource, publication: Publication) -> dict[str, Any]:
    """Return the copyright `holders` of the weights and its `year`, as far as they are known."""
    year = source.run.resolved.made_by.date[:4] if source.run else None
    owner = [publication.repo_id.split("/")[0]] if source.run else []
    return {"holders": publication.developers or owner, "year": year}


def _credit(source: PushSource, publication: Publication) -> dict[str, Any]:
    """Whose weights these are: `developers`, `origin`, who published them if that is somebody else, and `contact`."""
    namespace, origin = publication.repo_id.split("/")[0], None
    if publication.origin is not None and not publication.origin.startswith("http"):
        private = publication.origin in publication.private
        origin = {
            "name": "a private repository" if private else publication.origin,
            "repo": None if private else publication.origin,
            "url": None if private else f"https://huggingface.co/{publication.origin}",
        }
    elif publication.origin is not None:
        origin = {"name": publication.origin, "repo": None, "url": publication.origin}
    owner = origin["repo"].rpartition("/")[0] if origin and origin["repo"] else ""
    developers = publication.developers or ([namespace] if source.run else [owner] * bool(owner))
    published_by = namespace if developers != [namespace] else None
    return {"developers": developers, "published_by": published_by, "origin": origin, "contact": publication.contact}


def _license(folder: Path, license: License | None) -> dict[str, Any] | None:
    """The license of the weights: `id`, `name`, `label`, where its text is, and whether it covers the code too."""
    if license is None:
        return None
    file = TEXT if (folder / TEXT).is_file() else None
    return {
        "id": license.id,
        "name": license.name,
        "label": license.label,
        "file": file,
        "page": license.page,
        "metadata_link": license.metadata_link,
        "of_code": file is not None and not (folder / TEXT_OF_CODE).is_file(),
    }


def _spoken(folder: Path, question: str) -> str:
    """A short chat as the model reads it."""
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "…"}]
    return str(load_tokenizer(str(folder)).apply_chat_template(chat, tokenize=False))


def _is_last(source: PushSource) -> bool:
    """Whether a checkpoint is of the step that its finished run ended with."""
    return source.run is not None and source.run.heldout is not None and source.step == source.run.step


def _adapter(folder: Path) -> dict[str, Any]:
    """A staged adapter: its base with commit, rank, alpha, layers, and number of parameters."""
    settings, count = read_json(folder / ADAPTER_CONFIG), 0
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            count += math.prod(tensors.get_slice(name).get_shape())
    return {
        "base": settings["base_model_name_or_path"],
        "commit": settings["revision"],
        "rank": settings["r"],
        "alpha": settings["lora_alpha"],
        "layers": sorted({name.rpartition(".")[2] for name in settings["target_modules"]}),
        "parameters": count,
    }


def _dtype(paths: list[Path]) -> str:
    """Of the weights; several are joined by commas."""
    found: set[str] = set()
    for path in paths:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as tensors:
                found |= {str(tensors.get_slice(name).get_dtype()) for name in tensors.keys()}  # noqa: SIM118
    words = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
    return ", ".join(sorted(words.get(name, name) for name in found))


def _base(run: Run | None, publication: Publication) -> dict[str, Any] | None:
    """Return the base model of a run: `kind`, `name`, `repo` if all can see it on the Hub, `sources` of its data."""
    if run is None or run.resolved.base is None:
        return None
    base = run.resolved.base
    name, origins = base.init_from, base.trained_on or []  # earlier versions did not record them
    data = {
        "sources": [_origin(origin, publication.private) for origin in origins[:MOST_FILES]],
        "more": max(0, len(origins) - MOST_FILES),
    }
    path = Path(name)
    if record := published_base(path, base.sha256, publication):
        return {"kind": "run", "name": record["repo_id"], "repo": record["repo_id"], **data}
    is_id = is_of_hub(name, base.of_hub) and HUB_ID.fullmatch(name)
    shown = path.parent.name if path.name == "model" else path.name
    if is_id and name in publication.private:
        return {"kind": "private model", "name": shown, "repo": None, **data}
    return {"kind": "run", "name": name if is_id else shown, "repo": name if is_id else None, **data}


def _published_as(run: RunFolder, digest: str, publication: Publication) -> str | None:
    """Return the repository, visible to everybody and verified, that has the weights of this SHA-256; else None."""
    record = published_record(run, digest, publication)
    return record["repo_id"] if record else None


def published_base(path: Path, digest: str, publication: Publication) -> dict[str, Any] | None:
    """Return the record of the repository with the weights of a base: from its run, or from `runs/NAME`."""
    places = (path, path.parent, Path("runs") / path.name)  # the last: of a folder without a run
    return next(filter(None, (published_record(RunFolder(place), digest, publication) for place in places)), None)


def published_record(run: RunFolder, digest: str, publication: Publication) -> dict[str, Any] | None:
    """Return what `published.json` has of the repository with the weights of this SHA-256; None if there is none."""
    if not run.published.is_file():
        return None
    for told in [found := read_json(run.published), *found.get("others", [])]:
        same = any(file["sha256"] == digest for file in told.get("files", {}).values())
        there = told.get("verified") and not told.get("pull_request") and not told.get("native")
        if same and there and told["repo_id"] not in (publication.repo_id, *publication.private):
            return told
    return None


def _published_baseline(publication: Publication) -> str | None:
    """Return the repository of the baseline's model, if it is published."""
    if publication.baseline is None or not publication.baseline.folder.published.is_file():
        return None
    folder = publication.baseline.folder
    found = [_published_as(folder, sha256(path), publication) for path in folder.model.glob("*.safetensors")]
    return found[0] if found and all(found) else None


def _converted(source: PushSource) -> dict[str, Any] | None:
    """Of other people's weights: what they were, and what their settings tell of the training."""
    if source.converted is None:
        return None
    numbers = {name for name, value in source.converted["settings"].items() if isinstance(value, (int, float))}
    told = {n: v for n, v in source.converted["settings"].items() if n in numbers or isinstance(v, str)}
    warmup = told["warmup_period_percent"] if "warmup_period_percent" in numbers else None
    rows = {
        "data set": told.get("dataset"),
        "tokens, at least": _n(told.get("min_train_tokens")),
        "micro-batch, rows": _n(told.get("microbatch_size")),
        "gradient accumulation": _n(told.get("gradient_accumulation_steps")),
        "learning rate": told.get("learning_rate"),
        "schedule": "warm-up, then cosine" if told.get("schedule_learning_rate") else None,
        "warm-up": None if warmup is None else f"{warmup:g}% of the steps",
        "weight decay": told.get("weight_decay"),
        "gradients clipped at": told.get("clipping_max_norm"),
        "seed": told.get("random_seed"),
    }
    return {
        "what": source.converted["what"],
        "table": _table(rows),
        "dataset": told.get("dataset") if is_hub_id(told.get("dataset")) else None,
    }


def _n(value: Any) -> str | None:
    return f"{value:,}" if isinstance(value, (int, float)) else value


def _table(rows: dict[str, Any], header: tuple[str, str] = ("", "")) -> str | None:
    """Names and values as Markdown, those that are not known left out; None if none is."""
    cells = [[name, str(value)] for name, value in rows.items() if value is not None]
    return markdown_table(header, cells, text=(0, 1)) if cells else None


def _hub_dataset(origin: DataSource, private: frozenset[str]) -> str | None:
    """The Hub id of a source of training data that everybody may see."""
    name = hub_dataset(origin)
    return None if name in private else name


def _rows_until(source: PushSource) -> list[dict[str, Any]]:
    """What was logged up to the weights' step."""
    assert source.run is not None
    last = source.run.step if source.step is None or not source.is_checkpoint else source.step
    return [row for row in source.run.metrics if row["step"] <= last]


def trained(source: PushSource) -> dict[str, Any]:
    """How much was trained."""
    run = source.run
    assert run is not None
    rows = _rows_until(source)
    tokens, epochs = logged_tokens(rows), _last(rows, "epoch")
    if source.is_checkpoint:  # it may be between two lines of the log
        tokens = max(tokens or 0, tokens_of(source.model)) or None  # earlier versions counted none
        epochs = read_json(source.model / "trainer_state.json").get("epoch", epochs)
    return {
        "name": run.name,
        "steps": source.step if source.is_checkpoint else run.step,
        "kept": _kept(source),
        "tokens": tokens,
        "about": None if tokens is None else about(tokens),
        "epochs": epochs,
        "chats": run.resolved.data.train.trained_on if run.resolved.data.train else None,
        "train_loss": _last(rows, "loss"),
        "train_loss_until": _logged_until(source, "loss"),
        "date": run.resolved.made_by.date[:10],
    }


def _logged_until(source: PushSource, name: str) -> int | None:
    """Return the step of a checkpoint's last logged value of this name; None if it is the checkpoint's own step."""
    last = next((row["step"] for row in reversed(_rows_until(source)) if name in row), None)
    return last if source.is_checkpoint and last != source.step else None


def _kept(source: PushSource) -> dict[str, Any] | None:
    """Of a finished run that kept an earlier step than its last: what is known of that step; else None."""
    run = source.run
    assert run is not None
    if source.is_checkpoint or (line := kept_line(source.step, run.step)) is None:
        return None
    rows = [row for row in run.metrics if row["step"] <= (source.step or 0)]
    return {"line": line, "step": source.step, "epochs": _last(rows, "epoch"), "train_loss": _last(rows, "loss")}


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    return next((row[name] for row in reversed(rows) if name in row), None)


def _measured(run: Run) -> dict[str, Any] | None:
    """On what the held-out results were measured."""
    if run.heldout is None or run.heldout.after is None:
        return None
    rows, error = run.heldout.rows, run.heldout.after.standard_error_nats
    return {"rows": rows.rows, "predicted_tokens": rows.predicted_tokens, "conversations": rows.conversations} | (
        {"standard_error": error}
    )


def loss_at_step(source: PushSource) -> dict[str, Any] | None:
    """Of a checkpoint: the last held-out loss up to its step."""
    if not source.is_checkpoint:
        return None
    held = [row for row in _rows_until(source) if row.get("eval_loss") is not None and row["step"] > 0]
    return {"loss": held[-1]["eval_loss"], "step": held[-1]["step"]} if held else None


def worse(source: PushSource) -> str | None:
    """Say that the held-out loss of these weights is above that before training; None if it is not, or is not known."""
    run = source.run
    if run is None or not source.is_checkpoint:
        return None if run is None or run.heldout is None else worse_line(run.heldout)
    then = loss_at_step(source)
    before = next((row["eval_loss"] for row in run.metrics if row["step"] == 0 and "eval_loss" in row), None)
    chats = run.resolved.data.validation
    if then is None or before is None:
        return None
    return rise_line(before, then["loss"], chats.trained_on if chats else None)


def _saved_samples(run: Run, prompts: list[str]) -> list[dict[str, Any]]:
    """What a run wrote on the way; after questions of chats only if they are among `prompts`, which are published."""
    return [sample for sample in run.samples if not run.resolved.chat or sample["prompt"] in prompts]


def _samples(source: PushSource, folder: Path, prompts: list[str]) -> dict[str, Any] | None:
    """What it writes after fixed prompts: `completions`, and `settings` of the sampled ones."""
    if source.run is None:
        return None
    file = RunFolder(folder).completions
    if source.is_checkpoint:
        found = [sample for sample in _saved_samples(source.run, prompts) if sample["step"] == source.step]
    else:
        found = read_json(file)["completions"] if file.is_file() else []
    if not found:
        return None
    return {
        "prompts": prompts_line(source.run, [sample["prompt"] for sample in found[:MOST_SAMPLES]]),
        "completions": [
            {"prompt": one_line(sample["prompt"]), "greedy": sample["greedy"], "sampled": sample["sampled"]}
            for sample in found[:MOST_SAMPLES]
        ],
        "of": len(found),
        "settings": found[0]["settings"],
    }


def held_out_answers(source: PushSource) -> list[Answer]:
    """Return the answers to held-out questions that the card may show beside the samples, which may be such already."""
    run = source.run
    if run is None or source.is_checkpoint or run.resolved.prompts_from == "held-out chats":
        return []
    return run.answers


def _answers(source: PushSource) -> dict[str, Any] | None:
    found = held_out_answers(source)
    return {"shown": found[:MOST_SAMPLES], "of": len(found)} if found else None


def _ladder(source: PushSource, prompts: list[str]) -> str | None:
    """How the text after the first prompt became coherent, up to these weights."""
    if source.run is None:
        return None
    samples = _saved_samples(source.run, prompts)
    if len({sample["step"] for sample in samples}) < 2:
        return None
    first = ladders(samples, source.run.metrics)[0]
    until = source.run.step if source.step is None else source.step
    kept = [row for row in first.rows if int(row[0].replace(",", "")) <= until]
    if len(kept) < 2:
        return None
    # Narrower than a report: what is wider than the Hub's column would have to be scrolled.
    return (
        f"{first.prompt} ▸\n"
        + Ladder(first.prompt, [[*row[:-1], one_line(row[-1], MOST_LETTERS)] for row in kept]).table()
    )


def _data(run: Run | None, private: frozenset[str]) -> dict[str, Any] | None:
    """What it was trained on, as far as the run knows."""
    if run is None or not run.resolved.data.sources:
        return None
    data = run.resolved.data
    origins, tokenizer, chats = data.sources["train"], data.tokenizer, data.train
    return {
        "sources": [_origin(origin, private) for origin in origins[:MOST_FILES]],
        "more": max(0, len(origins) - MOST_FILES),
        "n_sources": len(origins),
        "datasets": sorted({name for origin in origins if (name := _hub_dataset(origin, private))}),
        "train_tokens": (chats or data.splits["train"]).tokens,
        "documents": None if chats else data.splits["train"].documents,
        "conversations": chats.trained_on if chats else None,
        "left_out": chats.conversations - chats.trained_on if chats else 0,
        "shortened": chats.shortened if chats else 0,
        "supervised_share": chats.supervised_share if chats else None,
        "loss_on": run.resolved.chat.loss_on if run.resolved.chat else None,
        "held_out": held_out(run),
        "measured_on": _measured_on(data.sources, private),
        "tokenizer": scrub(tokenizer.name, public_ids(run.resolved, private)) if tokenizer else None,
        "trained_tokenizer": tokenizer is not None and tokenizer.name == "trained here",
        "packing": run.resolved.run.packing,
        "new_tokens": data.new_tokens,
        "fingerprint": data.fingerprint,
        "seq_len": run.resolved.seq_len,
    }


def heldout_label(run: Run) -> str:
    """Say what the held-out loss of a run is of."""
    labels = {"assistant": "held-out answers", "last": "held-out last answers", "all": "held-out conversations"}
    return labels[run.resolved.chat.loss_on] if run.resolved.chat else "held-out text"


def _measured_on(sources: dict[str, list[DataSource]], private: frozenset[str]) -> dict[str, Any] | None:
    """Return the data that the held-out results are of: `name`, and `hub`, its id if all can see it there."""
    separate = sources.get("validation") or []  # empty if a part of the training data is held out
    origins = [_origin(origin, private) for origin in separate or sources["train"]]
    if not origins:
        return None
    hub = next((origin["hub"] for origin in origins if origin["hub"]), None)
    more = f" and {len(origins) - 1:,} more" if len(origins) > 1 else ""
    return {"name": f"{'' if separate else 'held-out part of '}{hub or origins[0]['name']}{more}", "hub": hub}


def _origin(origin: DataSource, private: frozenset[str]) -> dict[str, Any]:
    """One source of training data."""
    name, hub = origin.label, _hub_dataset(origin, private)
    return {
        "name": "Python's language reference, as CPython carries it" if name == "python-docs" else hub or scrub(name),
        "hub": hub,
        "config": origin.config,
        "split": origin.split,
        "revision": origin.revision,
        "bytes": origin.bytes,
        "sha256": origin.sha256,
        "conversations": origin.conversations,
        "license": PSF if name == "python-docs" else None,
    }


def _steps(source: PushSource) -> str:
    """Say how many optimizer steps there were, and of which the weights are if not of the last."""
    run = source.run
    assert run is not None
    planned = _planned_steps(run)
    if source.is_checkpoint:
        return f"{source.step:,}" + (f" of {planned:,}" if planned != source.step else "")
    stopped = f" of {planned:,} planned, then training stopped" if planned != run.step else ""
    kept = "" if source.step == run.step else f"; the weights are those of step {source.step:,}"
    return f"{run.step:,}{stopped}{kept}"


def _planned_steps(run: Run) -> int:
    """Return the number of steps that the schedule of a run was made for."""
    if run.newest is not None:
        return read_json(run.newest / "trainer_state.json")["max_steps"]
    planned = run.resolved.trainer.max_steps
    return planned if planned > 0 else run.step


def _training(source: PushSource) -> dict[str, Any]:
    """The hyper-parameters, as a table."""
    run = source.run
    assert run is not None
    t, r, model = run.resolved.trainer, run.resolved.run, run.resolved.model
    rows, per_row, about_tokens = run.resolved.rows_per_step, run.resolved.seq_len, ""
    if counts := run.resolved.data.train:
        per_row, about_tokens = counts.tokens / counts.rows, "about "
    given = dict(t.lr_scheduler_kwargs or {})
    schedule = t.lr_scheduler_type.replace("_", " ")
    if t.lr_scheduler_type == "cosine_with_min_lr" and "min_lr_rate" in given:
        schedule = f"cosine to {given.pop('min_lr_rate'):.0%} of the peak"
    warmup, planned = t.warmup_steps, _planned_steps(run)
    of_steps = "steps" if planned == run.step else f"{planned:,} planned steps"
    devices = counted(run.resolved.device.count, "device")
    on_gpu = run.resolved.device.type != "cpu"  # Accelerate turns float16 off on a CPU
    precision = [name for name, on in (("bfloat16 autocast", t.bf16), ("float16 autocast", t.fp16 and on_gpu)) if on]
    precision += ["TF32"] if t.tf32 else []
    dropout = {name: getattr(model, name) for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    decayed = "matrices alone" if r.decay == "matrices" else "all parameters"
    return {
        "table": _table(
            {
                "rows a step": None
                if rows is None
                else f"{rows:,} ({t.per_device_train_batch_size:,} a device x "
                f"{t.gradient_accumulation_steps:,} accumulated x {devices})",
                "tokens a step": None if rows is None else f"{about_tokens}{round(rows * per_row):,}",
                "steps": _steps(source),
                "learning rate": f"{t.learning_rate:.1e} at its peak, {schedule}"
                + (f" ({said(given)})" if given else ""),
                "warm-up": f"{100 * warmup:g}% of the {of_steps}" if 0 < warmup < 1 else f"{warmup:,.0f} steps",
                "optimizer": f"{t.optim}, betas {t.adam_beta1:g} and {t.adam_beta2:g}, epsilon {t.adam_epsilon:g}",
                "weight decay": f"{t.weight_decay:g} ({decayed})",
                "gradients clipped at norm": f"{t.max_grad_norm:g}" if t.max_grad_norm else "not clipped",
                "dropout": ", ".join(f"{name} {value:g}" for name, value in dropout.items()),
                "LoRA": lora(run),
                "trained": trained_parameters(run),
                "precision": ", ".join(precision) or "float32",
                "torch.compile": "yes" if t.torch_compile else "no",
                "seed": f"{t.seed}"
                + (f", {r.init_seed} for the initial weights" if r.init_seed not in (None, t.seed) else ""),
            },
            ("setting", "value"),
        )
    }


def training_seconds(rows: list[dict[str, Any]]) -> float | None:
    """Time spent in training steps, of all sittings of a run: tokens of each logged interval by its tokens a second."""
    total, before = 0.0, 0
    for row in rows:
        if row.get("tokens_per_second") and "num_input_tokens_seen" in row:
            total += (row["num_input_tokens_seen"] - before) / row["tokens_per_second"]
            before = row["num_input_tokens_seen"]
    return total or None


def _compute(source: PushSource, config: GPT2SmallConfig) -> str | None:
    """Hardware and time, as a table."""
    if source.run is None:
        return None
    run, rows = source.run, _rows_until(source)
    rank = run.resolved.run.lora_rank
    flops = flops_per_token(config, run.resolved.seq_len, rank)
    count = "PaLM's count" if rank is None else "PaLM's count, without gradients of frozen weights"
    device, seconds = run.resolved.device, training_seconds(rows)
    gpu = device.type != "cpu"
    n, tokens, memory = (
        device.count,
        trained(source)["tokens"],
        [row["memory_gib"] for row in rows if "memory_gib" in row],
    )
    hardware = f"{n} x {device.name}"
    if not gpu:
        hardware = f"CPU ({device.name}), {counted(device.threads, 'thread')}{f', {n} processes' if n > 1 else ''}"
    speed, mfu = run.usual("tokens_per_second"), run.usual("mfu")
    until = _logged_until(source, "tokens_per_second")
    of_steps = f" (to step {until:,})" if until else ""
    return _table(
        {
            "measured over": f"the whole training, to step {run.step:,}" if _kept(source) else None,
            "hardware": hardware,
            "time in training steps": f"{duration(seconds)}{of_steps}" if seconds else None,
            "device hours": f"{n * seconds / 3600:.1f}{of_steps}" if gpu and seconds else None,
            "tokens/s (median)": None if speed is None else f"{speed:,.0f}",
            "MFU (median)": None if mfu is None else f"{mfu:.1%}",
            "peak memory": f"{max(memory):.1f} GiB" if memory else None,
            f"FLOPs ({count})": None if tokens is None else f"{flops * tokens:.2e}",
        }
    )


def _provenance(source: PushSource) -> str | None:
    """Where it comes from, as a table."""
    if source.run is None:
        return None
    told = source.run.resolved.made_by
    commit, dirty, _ = (told.commit or "").partition("-dirty")
    code = f"gpt2small_hf, commit {commit[:12]}{', with changes that are not in it' * bool(dirty)}"
    return _table(
        {
            "code": code if commit else None,
            "begun": told.date,
            "versions": ", ".join(f"{name} {version}" for name, version in told.versions.items()),
            "weights": f"of step {source.step:,}",
        }
    )


def _difference(run: Run, baseline: Run, publication: Publication) -> dict[str, Any]:
    """What differs from a baseline run, in what is given to it, in settings and in loss."""
    now_given = _given(run)
    changes = [[name, then, now_given[name]] for name, then in _given(baseline).items() if then != now_given[name]]
    changes += [
        [name, said(then), said(now)]
        for name, then, now in changed(_scrubbed(baseline), _scrubbed(run))
        if name not in IGNORED_SETTINGS
    ]
    losses = None
    if run.measured and baseline.measured and run.measured_on == baseline.measured_on:
        losses = (run.loss_nats, baseline.loss_nats)
    return {
        "baseline": baseline.name,
        "repo": _published_baseline(publication),
        "table": markdown_table(["setting", "baseline", "this model"], changes, text=(0, 1, 2)) if changes else None,
        "losses": losses,
        "paired": paired(run, baseline) if losses else None,
    }


def _scrubbed(run: Run) -> Resolved:
    return Resolved.from_json(scrub(run.resolved.to_json()), f"{run.folder.resolved}:")


def _given(run: Run) -> dict[str, str]:
    """Say what decides what a run learns beside the settings that `changed` compares.

    Base and data by their content: files have other names elsewhere, and a repository's may be private.
    """
    base, rows = run.resolved.base, run.resolved.rows_per_step
    return {
        "begun with": f"a model (SHA-256 {base.sha256[:16]}…)" if base else "new weights",
        "data": f"fingerprint {run.resolved.data.fingerprint[:16]}…",
        "rows a step": "not known" if rows is None else f"{rows:,}",
        "processes": f"{run.resolved.device.count:,}",
    }


def paired(run: Run, baseline: Run) -> dict[str, Any] | None:
    """Read the verdict on a run's recipe from the sweep that has both, as `report.sweep.compare` computed it.

    Returns: `recipe`, `value`, `standard_error`, `decided_above`, `verdict`, and `pairs`, the number of runs compared;
        None if the two are not runs of one sweep, or if too few of them ended to estimate the noise.
    """
    root = run.folder.root.resolve().parent
    if not (results := SweepFolder(root).results).is_file() or baseline.folder.root.resolve().parent != root:
        return None
    rows = {row["recipe"]: row for row in read_json(results)["recipes"]}
    for row in rows.values():
        if _has(row, run) and _has(rows.get(BASELINE), baseline) and row["standard_error"] is not None:
            told = {name: row[name] for name in ("recipe", "standard_error", "decided_above", "verdict")}
            pairs = sum(one["difference"] is not None for one in row["runs"])
            return {**told, "value": row["difference"], "pairs": pairs}
    return None


def _has(row: dict[str, Any] | None, run: Run) -> bool:
    """Whether a run is among those of a recipe's row, with the loss that it has now."""
    if row is None or run.measured is None:
        return False
    losses = {SweepFolder(Path()).run(row["recipe"], r["init_seed"], r["seed"]).root.name: r for r in row["runs"]}
    found = losses.get(run.folder.root.resolve().name)
    return found is not None and found["loss"] == six(run.loss_nats)


# ---- words for numbers ----------------------------------------------------------------------------------------------


def said(value: Any) -> str:
    """A setting for people."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {said(item)}" for name, item in value.items()) or "not set"
    if isinstance(value, list):
        return ", ".join(map(said, value)) or "not set"
    words = {None: "not set", True: "yes", False: "no"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def about(count: float) -> str:
    """A count as people say it: 281,344 → `0.28 million`, 163,009,536 → `163 million`."""
    for size, word, least in ((1e9, "billion", 0.9995), (1e6, "million", 0.1)):
        if count >= least * size:
            return f"{count / size:.{2 if count < size / 2 else 3}g} {word}"
    return f"{count:,.0f}"
