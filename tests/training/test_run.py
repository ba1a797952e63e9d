"""A whole run: what it leaves on disk, that it learns, repeats to the bit, and loses nothing."""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import REPOSITORY, SHARED_DATA, needs_shared_data, run_script, run_train, tiny_config, tiny_words
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments, pipeline
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.errors import RunStoppedError, UsageError
from gpt2small_hf.formatting import escaped
from gpt2small_hf.publishing.arguments import parse_arguments as push_arguments
from gpt2small_hf.publishing.push import publish
from gpt2small_hf.report.notes import worse_line
from gpt2small_hf.report.page import as_markdown, as_text
from gpt2small_hf.runs.files import read_json, read_jsonl, sha256
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.provenance import processor_name
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.results import HeldOut
from gpt2small_hf.training.base_model import draw_weights
from gpt2small_hf.training.trainer import CausalLMTrainer


def test_a_run_leaves_every_file_it_promises(tiny_run):
    found = {str(path.relative_to(tiny_run.root)) for path in tiny_run.root.rglob("*") if path.is_file()}
    assert {
        "recipe.yaml",
        "resolved.json",
        "metrics.jsonl",
        "evaluation/heldout.json",
        "evaluation/completions.json",
        "charts/loss.png",
        "model/model.safetensors",
        "model/config.json",
        "model/generation_config.json",
        "model/tokenizer.json",
        "model/tokenizer_config.json",
        "model/gpt.py",
        "model/cpu_linear.py",
        "model/configuration_gpt2small.py",
        "model/modeling_gpt2small.py",
    } <= found
    assert not [name for name in found if name.endswith(".tmp")]
    assert {"checkpoint-10", "checkpoint-20"} == {path.name for path in tiny_run.checkpoints.iterdir()}
    assert tiny_run.chart("loss").read_bytes()[:4] == b"\x89PNG"


def test_training_lowers_the_held_out_loss_and_the_file_says_on_which_rows(tiny_run):
    heldout = read_json(tiny_run.heldout)
    assert heldout["before"]["loss"] == pytest.approx(math.log(300), rel=0.02)
    assert heldout["after"]["loss"] < heldout["before"]["loss"] - 0.5
    assert heldout["after"]["perplexity"] == pytest.approx(math.exp(heldout["after"]["loss"]))
    assert heldout["rows"]["predicted_tokens"] == heldout["rows"]["rows"] * 31
    assert heldout["made_by"]["inputs"][str(tiny_run.model / "model.safetensors")] == sha256(
        tiny_run.model / "model.safetensors"
    )


@pytest.mark.slow
def test_a_tied_head_with_torchs_weights_trains_only_when_asked_to(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tied = ["--tie_word_embeddings", "--init_scheme", "torch", "--spike_factor", "inf"]
    words = [*tiny_words(tmp_path, tmp_path / "run"), *tied]
    with pytest.raises(UsageError, match="--allow_high_initial_loss"):
        run_train(words)
    run = run_train([*words, "--allow_high_initial_loss"])
    said = capsys.readouterr().out
    assert "initial loss" in said
    assert "too large for a tied head" in said
    assert read_json(run.heldout)["before"]["loss"] > 1.5 * math.log(300)
    run_train([*words, "--allow_high_initial_loss"])
    assert "is finished, with these settings" in capsys.readouterr().out


def test_resolved_holds_every_value_in_force(tiny_run):
    resolved = read_json(tiny_run.resolved)
    assert resolved["trainer"]["learning_rate"] == 0.01
    assert resolved["trainer"]["adam_beta2"] == 0.95
    assert resolved["model"]["hidden_size"] == 16
    assert resolved["model"]["eos_token_id"] == 0
    assert resolved["device"]["type"] == "cpu"
    name = resolved["device"]["name"]
    assert name == processor_name() == " ".join(name.split())
    cpuinfo = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    assert (name in cpuinfo and name != platform.machine()) == ("model name" in cpuinfo)
    assert {"python", "torch", "transformers"} <= set(resolved["made_by"]["versions"])


def test_metrics_have_a_step_on_every_line_and_the_trainers_held_out_loss_is_ours(tiny_run):
    rows = read_jsonl(tiny_run.metrics)
    assert [row["step"] for row in rows if "loss" in row] == [5, 10, 15, 20]
    evaluated = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    assert evaluated[20] == pytest.approx(read_json(tiny_run.heldout)["after"]["loss"], abs=1e-5)


def test_the_model_folder_carries_tokenizer_lengths_and_ids_that_agree(tiny_run):
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    model = AutoModelForCausalLM.from_pretrained(tiny_run.model)
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 32
    assert len(tokenizer) == model.config.vocab_size == 300
    ids = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert ids == {model.config.eos_token_id} == {model.generation_config.eos_token_id}
    assert (model.generation_config.max_length, model.generation_config.max_new_tokens) == (32, None)


@pytest.mark.parametrize("remote", [False, True], ids=["package", "remote"])
def test_short_model_writes_within_its_context_and_as_long_as_asked(tiny_run, remote, caplog):
    name = "modeling_gpt2small.GPT2SmallForCausalLM"
    kind = get_class_from_dynamic_module(name, str(tiny_run.model)) if remote else AutoModelForCausalLM
    model, tokenizer = kind.from_pretrained(tiny_run.model), AutoTokenizer.from_pretrained(tiny_run.model)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    model.generation_config.eos_token_id = None
    for prompt in ("Once", "Once the fox " * 4):  # the pipeline's default is 256 new tokens
        assert write(prompt)[0]["generated_text"].startswith(prompt)
    ids = torch.arange(28)[None]
    assert model.generate(ids, max_length=30).shape[1] == 30  # as lm-evaluation-harness asks
    assert model.generate(ids[:, :4], max_new_tokens=5).shape[1] == 9
    assert model.generate(ids).shape[1] == 32
    assert "seem to have been set" not in caplog.text
    assert model.generate(ids[:, :4], max_new_tokens=5, max_length=20).shape[1] == 9
    assert "seem to have been set" in caplog.text  # by this caller


def test_every_checkpoint_loads_by_itself(tiny_run):
    folder = tiny_run.checkpoints / "checkpoint-20"
    model = AutoModelForCausalLM.from_pretrained(folder)
    final = AutoModelForCausalLM.from_pretrained(tiny_run.model)
    for (name, a), b in zip(model.named_parameters(), final.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert (folder / "modeling_gpt2small.py").exists()
    assert len(AutoTokenizer.from_pretrained(folder)) == 300


@pytest.mark.slow
def test_pipeline_without_the_package_gives_the_same_greedy_text(tiny_run, run_isolated):
    prompt = "Once the fox"
    # The plain prompt and its default length: what somebody tries first must fit the context.
    ours = pipeline("text-generation", model=str(tiny_run.model))(prompt, do_sample=False)[0]["generated_text"]
    assert ours.startswith(prompt)
    printed = run_isolated(f"""
import importlib.util, json
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
folder = {str(tiny_run.model)!r}
assert importlib.util.find_spec("gpt2small_hf") is None
AutoConfig.from_pretrained(folder, trust_remote_code=True)
AutoModel.from_pretrained(folder, trust_remote_code=True)
_, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
pipe = pipeline("text-generation", model=folder, trust_remote_code=True)
print(json.dumps(pipe({prompt!r}, do_sample=False)[0]["generated_text"]))
""")
    assert json.loads(printed) == ours


@pytest.mark.slow
def test_two_runs_with_one_seed_are_equal_to_the_bit_and_another_seed_differs(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    again = run_train(tiny_words(tmp_path, tmp_path / "again"))
    other = run_train([*tiny_words(tmp_path, tmp_path / "other"), "--seed", "7"])
    weights = [sha256(run.model / "model.safetensors") for run in (tiny_run, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_a_finished_run_is_never_lost(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sha256(tiny_run.model / "model.safetensors")
    words = tiny_words(tmp_path, tiny_run.root)
    run_train(words)
    with pytest.raises(UsageError, match=r"other settings: seed: 42 -> 7\. .*--overwrite"):
        run_train([*words, "--seed", "7"])
    with pytest.raises(
        UsageError, match="multiple of --num_attention_heads"
    ):  # found out before the old run is removed
        run_train([*words, "--overwrite", "--hidden_size", "17"])
    assert sha256(tiny_run.model / "model.safetensors") == before


@pytest.mark.slow
def test_overwrite_does_a_run_again_and_keeps_its_hands_off_other_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words(tmp_path, tmp_path / "run"), "--max_steps", "2", "--eval_strategy", "no"]
    first = run_train(words)
    (first.root / "mine.txt").touch()
    (first.model / "stray").touch()
    run_train([*words, "--overwrite"])
    assert (first.root / "mine.txt").exists()
    assert not (first.model / "stray").exists()
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").touch()
    with pytest.raises(UsageError, match="is not a run folder"):
        run_train([*words, "--output_dir", str(home), "--overwrite"])
    assert (home / "letter.txt").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seq_len", "64"], "seq_len is 64; a row has from 2 to 32 tokens"),
        (["--data_dir", "nowhere", "--text", "x.txt"], "--data_dir cannot be combined with --text"),
        (["--num_attention_heads", "3"], "--hidden_size 16 is not a multiple of --num_attention_heads 3"),
        (["--resid_pdrop", "1.5"], "resid_pdrop is 1.5"),
        (["--resume", "nowhere"], "nowhere is not a complete checkpoint"),
        (["--resume_from_checkpoint", "true"], "--resume_from_checkpoint is not supported. Use --resume."),
        (["--auto_find_batch_size"], "Use --find_batch_size"),
        (["--per_device_train_batch_size", "100000000"], " rows of 32 tokens. Give "),
        (["--branch_from", "nowhere"], "nowhere is not a complete checkpoint"),
    ],
)
def test_bad_input_is_one_line_before_the_run_begins(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        run_train([*tiny_words(tmp_path, tmp_path / "run"), *words])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_ends_with_the_folder_and_the_next_command(tmp_path):
    words = [*tiny_words(tmp_path, tmp_path / "run"), "--max_steps", "3"]
    done = run_script(["-m", "gpt2small_hf", "train", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    *_, wrote, talk, following = done.stdout.splitlines()
    assert wrote.endswith(f"wrote {tmp_path / 'run'}")
    assert talk == f"next: python -m gpt2small_hf chat {tmp_path / 'run'}"
    assert following == f"next: python -m gpt2small_hf report {tmp_path / 'run'}"
    # ... and that command works.
    words = shlex.split(following.removeprefix("next: "))
    report = run_script(words[1:], tmp_path)
    assert report.returncode == 0, report.stderr
    assert "held-out loss  sampled" in report.stdout
    assert report.stdout.splitlines()[-1].startswith("next: python ")


@pytest.mark.slow
def test_preflight_shows_all_it_looked_at_and_touches_no_run(tmp_path, monkeypatch, capsys, tiny_run):
    monkeypatch.chdir(tmp_path)
    files = {path: sha256(path) for path in tiny_run.root.rglob("*") if path.is_file()}
    for folder in (tmp_path / "new", tiny_run.root):
        run_train([*tiny_words(tmp_path, folder), "--preflight_only", "--seed", "3", "--overwrite"])
        said = capsys.readouterr().out
        assert "causality        ok" in said
        assert "learning rate" in said
        assert "next: gpt2small train" in said
    assert not (tmp_path / "new").exists()
    assert {path: sha256(path) for path in tiny_run.root.rglob("*") if path.is_file()} == files
    with pytest.raises(UsageError, match="warm"):
        run_train([*tiny_words(tmp_path, tmp_path / "new"), "--warmup_steps", "50"])
    assert not (tmp_path / "new").exists()
    run_train([*tiny_words(tmp_path, tmp_path / "new"), "--max_steps", "2", "--eval_strategy", "no"])


def test_a_mistake_on_the_command_line_is_one_line_and_status_two(tmp_path):
    done = run_script([REPOSITORY / "train.py", "--learning_rat", "1"], tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: --learning_rat is not a flag. Did you mean --learning_rate?\n"


def test_the_recipe_of_a_run_is_kept_as_it_was_given(tiny_run):
    assert yaml.safe_load(tiny_run.recipe.read_text()) is None
    assert tiny_run.recipe.read_text() == "# nothing but defaults\n"


@pytest.mark.slow
@needs_shared_data
def test_real_books_train_well_below_the_unigram_loss_and_twice_to_the_same_weights(tmp_path):
    books = sorted((SHARED_DATA / "pretrain" / "gutenberg-nltk").glob("*-*.txt"))
    books = [str(book) for book in books if "SOURCE" not in book.name]
    assert len(books) == 12
    hashes = []
    for name in ("one", "two"):
        words = ["--text", *books, "--max_steps", "300", "--eval_strategy", "no", "--output_dir", name]
        subprocess.run([sys.executable, REPOSITORY / "train.py", *words], cwd=tmp_path, check=True, env={**os.environ})
        run = RunFolder(Path(tmp_path / name))
        heldout = read_json(run.heldout)
        assert heldout["after"]["loss"] < heldout["unigram"]["loss"] - 0.5
        hashes.append(sha256(run.model / "model.safetensors"))
    assert hashes[0] == hashes[1]


@pytest.mark.slow
def test_the_run_that_is_overwritten_stays_until_the_new_one_is_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = tiny_words(tmp_path, tmp_path / "run")
    run = run_train([*words, "--max_steps", "2", "--eval_strategy", "no"])
    before = sha256(run.model / "model.safetensors")
    (run.root / "notes").mkdir()
    (own := run.root / "notes" / "mine.txt").write_text("a file of the user")
    for _ in range(2):  # the second failure is of a run over one that failed
        with pytest.raises(RunStoppedError, match="loss is not finite"):
            run_train(
                [*words, "--overwrite", "--learning_rate", "1e30", "--max_grad_norm", "0", "--eval_strategy", "no"]
            )
        assert sha256(run.former / "model" / "model.safetensors") == before
    with pytest.raises(UsageError, match=r"is kept in .*former"):
        run_train(words)
    run_train([*words, "--overwrite", "--max_steps", "2", "--eval_strategy", "no"])
    assert not run.former.exists()
    assert sha256(run.model / "model.safetensors") == before
    # Its own recipe may be given: it is read before the folder steps aside.
    run_train([str(run.recipe), *words[1:], "--overwrite", "--max_steps", "2", "--eval_strategy", "no"])
    assert sha256(run.model / "model.safetensors") == before
    assert own.read_text() == "a file of the user"


def test_what_is_published_carries_no_trace_of_the_machine_and_anybody_may_read_it(tiny_run):
    config, settings = (read_json(tiny_run.model / name) for name in ("config.json", "tokenizer_config.json"))
    assert config["use_cache"] is True
    assert not {"is_local", "local_files_only"} & settings.keys()
    assert not read_json(tiny_run.model / "generation_config.json").get("_from_model_config")
    checkpoints = list(tiny_run.checkpoints.iterdir())
    for folder in (tiny_run.model, *checkpoints):
        assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert checkpoints


@pytest.mark.parametrize("scheme", ["gpt2", "torch", "small_init"])
@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"num_hidden_layers": 3},
        {"max_position_embeddings": 48},
    ],
    ids=str,
)
def test_a_changed_shape_leaves_the_other_weights_as_they_were_drawn(change, scheme):
    models = [GPT2SmallForCausalLM(tiny_config(init_scheme=scheme, **more)) for more in ({}, change)]
    for model in models:
        draw_weights(model, seed=3)
    before, after = (model.state_dict() for model in models)
    scaled = {"num_hidden_layers"} & change.keys() and scheme != "torch"  # by the depth: what writes to the stream
    kept = [
        name
        for name in before.keys() & after.keys()
        if before[name].shape == after[name].shape
        and not (scaled and name.endswith(("o_proj.weight", "down_proj.weight")))
        and not (name == "lm_head.weight" and change.get("tie_word_embeddings"))
    ]
    assert len(kept) >= len(before) - 4
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert models[1].lm_head.weight is models[1].model.embed_tokens.weight or "tie_word_embeddings" not in change


@pytest.mark.slow
def test_each_seed_decides_its_own(tmp_path, monkeypatch):
    """Initial weights, dropout and the order of rows; the words of the other two are left as they are."""
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words(tmp_path, tmp_path / "run"), "--overwrite", "--max_steps", "2", "--resid_pdrop", "0.2"]
    words += ["--logging_steps", "1", "--eval_strategy", "no"]
    seeds = {"init_seed": "1", "seed": "1", "data_seed": "1"}

    def losses(**changes):
        run = run_train([*words, *(w for n, v in {**seeds, **changes}.items() for w in (f"--{n}", v))])
        rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        return next(row["eval_loss"] for row in rows if row["step"] == 0), [
            row["loss"] for row in rows if "loss" in row
        ]

    start, first = losses()
    assert losses() == (start, first)
    for name in ("seed", "data_seed"):
        same_start, other = losses(**{name: "2"})
        assert same_start == start
        assert other != first
    assert losses(init_seed="2")[0] != start


@pytest.mark.parametrize(("decay", "decayed"), [("matrices", 15), ("all", 31)])
def test_weight_decay_shrinks_what_it_is_told_to(decay, decayed, tmp_path):
    model = GPT2SmallForCausalLM(tiny_config())
    args = TrainingArguments(output_dir=str(tmp_path), weight_decay=0.1, use_cpu=True)
    trainer = CausalLMTrainer(model, args, decay=decay)
    shrunk = [p for group in trainer.create_optimizer().param_groups if group["weight_decay"] for p in group["params"]]
    assert len(shrunk) == decayed
    assert (min(p.ndim for p in shrunk) == 1) == (decay == "all")


@pytest.mark.slow
def test_a_run_may_train_on_all_of_its_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words(tmp_path, tmp_path / "all"), "--validation_fraction", "0", "--max_steps", "10"]
    with pytest.raises(UsageError, match=r"no text or chats are held out.*--eval_strategy no"):
        run_train(words)
    run = run_train([*words, "--eval_strategy", "no"])
    assert "Nothing was held out" in capsys.readouterr().out
    rows = read_json(run.heldout)["rows"]
    assert {name: value for name, value in rows.items() if value is not None} == {
        "rows": 0,
        "seq_len": 32,
        "predicted_tokens": 0,
    }
    assert run.chart("loss").exists()
    assert not any("eval_loss" in row for row in read_jsonl(run.metrics))


@pytest.mark.slow
def test_divergence_is_named_in_the_run_its_report_and_card_and_refused_by_push(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = tiny_words(tmp_path, Path("runs/short"))
    run = run_train([*words, "--learning_rate", "5", "--max_grad_norm", "0", "--spike_factor", "1e9"])
    shown = capsys.readouterr()
    measured = read_json(run.heldout)
    assert measured["after"]["loss"] > measured["before"]["loss"]
    worse = worse_line(HeldOut.load(run.heldout), Run(run).train_loss_nats)
    assert worse is not None
    assert "Lower --learning_rate" in worse
    assert f"warning: {worse}" in "\n".join(shown.out.splitlines()[-5:])
    assert "divergence" in [row.get("symptom") for row in read_jsonl(run.metrics)]
    assert "symptom: step 10, divergence: the held-out loss is" in shown.err
    page = Run(run)
    assert worse in as_text(page)
    assert escaped(worse) in as_markdown(page, [])
    with pytest.raises(UsageError, match="--allow_worse_than_base"):
        publish(push_arguments(["runs/short", "--dry_run"]))
    with pytest.raises(UsageError, match="--allow_worse_than_base"):
        publish(push_arguments([str(run.checkpoints / "checkpoint-20"), "--dry_run"]))
    publish(push_arguments(["runs/short", "--dry_run", "--allow_worse_than_base"]))
    assert f"{worse.partition(':')[0]}: the model is worse" in (run.staged / "README.md").read_text(encoding="utf-8")
