"""Numbers and times on the model card are those of the run's files."""

import re
import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from conftest import run_train, tiny_words
from safetensors.torch import load_file

from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import counted, duration
from gpt2small_hf.publishing.card import approximate, check_finished
from gpt2small_hf.publishing.checks import read_model_config
from gpt2small_hf.publishing.lineage_facts import linked_repositories
from gpt2small_hf.publishing.source import checkpoint_source
from gpt2small_hf.publishing.training_facts import training_facts, training_seconds
from gpt2small_hf.report.page import facts, status, trained_parameters
from gpt2small_hf.runs.files import read_json, read_jsonl, sha256, write_json, write_jsonl
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.records import ChatCounts, ParameterCounts
from gpt2small_hf.runs.results import MetricsRow
from gpt2small_hf.training.budget import flops_per_token
from publishing.cards import Card, card_of, change, copied, publish

pytest_plugins = ["publishing.cards"]
pytestmark = pytest.mark.usefixtures("in_checkout")


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
