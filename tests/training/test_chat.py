"""Runs on chats: what they begin with, what they learn, when they stop, and what they refuse."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    CHAT_CONTEXT,
    OF_CHAT_RUN,
    REPOSITORY,
    chat_words,
    chats,
    run_script,
    run_train,
    tiny_config,
    tiny_words,
)
from safetensors.torch import load_file
from transformers import AutoTokenizer

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.config.parser import without_flags
from gpt2small_hf.config.resolve import RunConfig, read_config
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.answers import answer_all, first_questions, questions
from gpt2small_hf.evaluation.heldout import heldout_losses
from gpt2small_hf.report.notes import NOTHING_HELD_OUT
from gpt2small_hf.report.page import as_markdown, as_text, comparison_rows
from gpt2small_hf.runs.files import read_json, read_jsonl, write_json
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.training.callbacks import rising
from gpt2small_hf.training.inputs import build_run_inputs
from gpt2small_hf.training.run import default_prompts, train
from gpt2small_hf.training.trainer_arguments import training_arguments


@pytest.fixture(scope="module")
def place(chat_place) -> Path:
    return chat_place


def parsed(place: Path, *more: str):
    return read_config(chat_words(place, place / "unused", *more), REPOSITORY / "examples" / "tiny.yaml")


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(run.model / "model.safetensors")


def losses(run: RunFolder) -> list[float]:
    return [row["eval_loss"] for row in read_jsonl(run.metrics) if "eval_loss" in row]


# ---- what a run leaves ------------------------------------------------------------------------------------------


def test_chat_run_lowers_the_loss_and_writes_every_file(chat_run):
    measured = read_json(chat_run.heldout)
    assert measured["after"]["loss"] < measured["before"]["loss"] / 2
    assert measured["rows"]["loss_on"] == "assistant"
    assert losses(chat_run)[0] == measured["before"]["loss"]
    assert len(losses(chat_run)) == 9  # before the first step, and after each of eight epochs
    epochs = [row["epoch"] for row in read_jsonl(chat_run.metrics) if "eval_loss" in row and "epoch" in row]
    assert epochs == list(range(1, 9))
    for path in (chat_run.recipe, chat_run.first_rows, chat_run.samples, chat_run.answers, chat_run.chart("loss")):
        assert path.stat().st_size > 0
    data = read_json(chat_run.resolved)["data"]
    assert data["sources"]["train"][0]["shape"] == "messages (role, content)"
    assert data["train"]["conversations"] + data["validation"]["conversations"] == len(chats())
    assert data["validation"]["conversations"] == 6  # a fifth of 32


def test_the_trainers_held_out_loss_is_the_mean_over_supervised_tokens(chat_run, place):
    """Rows have different numbers of them; a mean over rows would be another number."""
    measured = read_json(chat_run.heldout)
    assert losses(chat_run)[-1] == pytest.approx(measured["after"]["loss"], abs=1e-5)
    inputs = build_run_inputs(parsed(place, "--add_special_tokens"))
    model = GPT2SmallForCausalLM.from_pretrained(chat_run.model)
    found = heldout_losses(model, inputs.heldout)
    assert isinstance(inputs.heldout, ChatDataset)
    assert found.size == inputs.heldout.n_supervised == measured["rows"]["predicted_tokens"]
    by_row = [
        heldout_losses(model, ChatDataset([chat], inputs.tokenizer, seq_len=CHAT_CONTEXT)).sum()
        for chat in inputs.heldout.chats
    ]
    assert measured["after"]["loss"] == pytest.approx(sum(by_row) / found.size, abs=1e-5)


def test_first_rows_are_written_to_the_run_folder(chat_run):
    text = chat_run.first_rows.read_text(encoding="utf-8")
    for word in ("<|im_start|>", "What did the", "The ", "<|im_end|>"):
        assert word in text


def test_samples_answer_the_fixed_questions_through_the_template(chat_run):
    rows = read_jsonl(chat_run.samples)
    assert len({row["step"] for row in rows}) == 9
    assert {row["prompt"] for row in rows} == {"What did the fox see?"}
    model, tokenizer = (
        GPT2SmallForCausalLM.from_pretrained(chat_run.model),
        AutoTokenizer.from_pretrained(chat_run.model),
    )
    (greedy,) = answer_all(model, tokenizer, [[{"role": "user", "content": "What did the fox see?"}]], do_sample=False)
    assert rows[-1]["greedy"] == greedy.answer


def test_answers_record_whether_they_ended(chat_run, place):
    rows = read_jsonl(chat_run.answers)
    measured = read_json(chat_run.heldout)["answers"]
    assert (measured["asked"], measured["ended"]) == (len(rows), sum(row["ended"] for row in rows))
    assert len(rows) == 6
    assert all(row["messages"][-1]["role"] == "user" for row in rows)
    assert all("<|" not in row["answer"] for row in rows)


def test_batched_answers_equal_single_answers(chat_run, place):
    """Batches are padded on the left; a stop token ends one of them while the others continue."""
    model, tokenizer = (
        GPT2SmallForCausalLM.from_pretrained(chat_run.model),
        AutoTokenizer.from_pretrained(chat_run.model),
    )
    asked = questions(build_run_inputs(parsed(place)).rows.chats, 12)
    asked.append([{"role": "user", "content": "What did the fox see, and what did it meet after that, at the river?"}])
    at_once = answer_all(model, tokenizer, asked, do_sample=False, max_new_tokens=40)
    alone = [answer_all(model, tokenizer, [chat], do_sample=False, max_new_tokens=40)[0] for chat in asked]
    assert at_once == alone
    assert len({row.tokens for row in at_once}) > 1


@pytest.mark.slow
def test_chat_pipeline_answers_without_the_package(chat_run, run_isolated):
    said = run_isolated(
        f"""
from transformers import pipeline
talk = pipeline("text-generation", model={str(chat_run.model)!r}, trust_remote_code=True)
question = [{{"role": "user", "content": "What did the fox see?"}}]
out = talk(question, do_sample=False)[0]["generated_text"]
assert [turn["role"] for turn in out] == ["user", "assistant"], out
many = talk([question, [{{"role": "user", "content": "What did the little dog meet?"}}]], batch_size=2, do_sample=False)
assert many[0][0]["generated_text"] == out, many
print(out[-1]["content"])
"""
    )
    rows = read_jsonl(chat_run.samples)
    assert said.strip() == rows[-1]["greedy"].strip()


def test_generation_stops_at_the_templates_end_token(chat_run):
    model, tokenizer = (
        GPT2SmallForCausalLM.from_pretrained(chat_run.model),
        AutoTokenizer.from_pretrained(chat_run.model),
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end == len(tokenizer) - 1
    assert end in model.generation_config.eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") in model.generation_config.eos_token_id
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == end


# ---- the base model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_new_embedding_rows_start_as_the_mean_of_the_old_ones(place, tmp_path, tied):
    tokenizer = AutoTokenizer.from_pretrained(place / "base" / "model")
    torch.manual_seed(0)
    base = GPT2SmallForCausalLM(tiny_config(vocab_size=len(tokenizer), tie_word_embeddings=tied))
    base.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = build_run_inputs(parsed(place, "--init_from", str(tmp_path / "model"), "--add_special_tokens")).build()
    assert model.config.tie_word_embeddings == tied
    old, before = base.state_dict(), base.config
    new = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(new[name][: before.vocab_size], old[name])
        added = new[name][before.vocab_size :]
        assert added.shape[0] == 2
        torch.testing.assert_close(added, old[name].mean(0).expand(2, -1))
    positions = new["model.embed_positions.weight"]
    assert positions.shape[0] == CHAT_CONTEXT
    assert torch.equal(positions[: before.max_position_embeddings], old["model.embed_positions.weight"])
    assert positions[before.max_position_embeddings :].std() == pytest.approx(before.initializer_range, rel=0.2)
    for name, tensor in old.items():
        if "embed" not in name and name != "lm_head.weight":
            assert torch.equal(new[name], tensor), name


def test_embeddings_keep_their_size_without_new_tokens(place):
    inputs = build_run_inputs(parsed(place))
    base = GPT2SmallForCausalLM.from_pretrained(place / "base" / "model")
    assert inputs.build().config.vocab_size == base.config.vocab_size == len(inputs.tokenizer)
    assert inputs.build().generation_config.eos_token_id == inputs.tokenizer.eos_token_id


def test_model_is_built_deterministically(place):
    first, second = (build_run_inputs(parsed(place, "--add_special_tokens")).build().state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_dropout_may_differ_from_the_base_model(place):
    model = build_run_inputs(parsed(place, "--resid_pdrop", "0.25")).build()
    assert model.config.resid_pdrop == 0.25
    assert {module.p for name, module in model.named_modules() if name.endswith("resid_dropout")} == {0.25}


@pytest.mark.slow
def test_fine_tuning_on_text_continues_pre_training(place, tmp_path):
    """Continued pre-training: the tokenizer is that of the base model."""
    text = tmp_path / "more.jsonl"
    text.write_text("".join(json.dumps({"text": f"The owl saw the moon {n} times. " * 9}) + "\n" for n in range(30)))
    settings = chat_words(place, tmp_path / "more", "--text", str(text), "--packing", "stream")
    at = settings.index("--chat_data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        run = run_train([*settings[:at], *settings[at + 2 :]])
    measured = read_json(run.heldout)
    assert measured["after"]["loss"] < measured["before"]["loss"]
    ours = AutoTokenizer.from_pretrained(run.model).get_vocab()
    assert ours == AutoTokenizer.from_pretrained(place / "base" / "model").get_vocab()


# ---- how a run goes ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_packed_and_padded_chats_are_measured_alike(place, tmp_path):
    packed, padded = (
        run_train(chat_words(place, tmp_path / packing, "--packing", packing, "--max_steps", "1", "--max_answers", "1"))
        for packing in ("best_fit", "padding")
    )
    assert losses(packed)[0] == pytest.approx(losses(padded)[0], abs=1e-5)
    assert read_json(padded.heldout)["rows"]["rows"] > read_json(packed.heldout)["rows"]["rows"]


@pytest.mark.slow
def test_interrupted_run_ends_with_the_same_weights(chat_run, place, tmp_path):
    expected, cut = weights(chat_run), RunFolder(tmp_path / "cut")
    shutil.copytree(chat_run.root, cut.root)
    steps = sorted(int(path.name.split("-")[1]) for path in cut.checkpoints.iterdir())
    for step in steps[5:]:
        shutil.rmtree(cut.checkpoints / f"checkpoint-{step}")
    shutil.rmtree(cut.model)
    cut.heldout.unlink()
    settings = chat_words(place, cut.root, *OF_CHAT_RUN)
    again = weights(run_train(settings))
    assert all(torch.equal(expected[name], again[name]) for name in expected)
    assert losses(cut) == losses(chat_run)


# ---- what depends on the number of chats -----------------------------------------------------------------------


def some_chats(place: Path, n: int) -> Path:
    """A file of `n` different short chats."""
    asked = [f"{i}: {row['messages'][0]['content']}" for i in range(24) for row in chats()]
    rows = [[{"role": "user", "content": text}, {"role": "assistant", "content": "A river."}] for text in asked]
    path = place / f"{n}.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows[:n]), encoding="utf-8")
    return path


def of_size(place: Path, n: int, folder: Path, *more: str) -> RunConfig:
    """Arguments of a run on `n` chats, of which no flag says how they are packed or batched."""
    words = [str(place / "chat.yaml"), "--init_from", str(place / "base"), "--chat_data", str(some_chats(folder, n))]
    words += ["--max_position_embeddings", "512", "--validation_fraction", "0.1", "--use_cpu"]
    words += ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--output_dir", str(folder / "run")]
    return read_config([*words, *more], REPOSITORY / "examples" / "tiny.yaml")


@pytest.mark.parametrize(
    ("n", "packing", "batch", "keeps_best"),
    [
        (2, "padding", 1, False),
        (12, "padding", 1, False),
        (30, "padding", 2, False),
        (60, "padding", 5, False),
        (120, "best_fit", 1, True),
        (720, "best_fit", 8, True),
    ],
)
def test_packing_batch_and_checkpoint_follow_the_number_of_chats(
    place, tmp_path, capsys, n, packing, batch, keeps_best
):
    config = of_size(place, n, tmp_path)
    inputs = build_run_inputs(config)
    args, trainer = inputs.run_config, inputs.run_config.trainer
    found = (args.run.packing, trainer.per_device_train_batch_size, trainer.load_best_model_at_end)
    assert found == (packing, batch, keeps_best)
    assert inputs.rows.packing == inputs.heldout.packing == packing
    assert len(inputs.rows) // batch >= 10 or (packing, batch) == ("padding", 1)
    flags = f"--packing {packing} --per_device_train_batch_size {batch} --load_best_model_at_end {keeps_best}".lower()
    assert re.search(rf"chosen for {inputs.rows.counts.kept} conversations?: {flags}\n", capsys.readouterr().out)
    assert build_run_inputs(config).rows.fingerprint == inputs.rows.fingerprint


@pytest.mark.slow
def test_a_full_size_set_is_packed_and_batched_as_before(tiny_run, capsys):
    """The recipe's own chats: eight packed rows a step, and the best checkpoint."""
    recipe = REPOSITORY / "examples" / "chat.yaml"
    config = read_config([str(recipe), "--init_from", str(tiny_run.root), "--add_special_tokens", "true"], recipe)
    args = build_run_inputs(config).run_config
    assert (args.run.packing, args.trainer.per_device_train_batch_size) == ("best_fit", 8)
    assert args.trainer.load_best_model_at_end
    arguments = training_arguments(args.trainer, "unused")
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("loss", False)


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (("--packing", "best_fit"), ("best_fit", 1, False)),
        (("--per_device_train_batch_size", "8"), ("padding", 8, False)),
        (("--gradient_accumulation_steps", "2"), ("padding", 1, False)),
        (("--load_best_model_at_end", "true"), ("padding", 2, True)),
        (("--early_stopping_patience", "2"), ("padding", 2, True)),
        (("--eval_strategy", "no"), ("padding", 2, False)),
    ],
)
def test_explicit_settings_are_kept(place, tmp_path, more, found):
    args = build_run_inputs(of_size(place, 30, tmp_path, *more)).run_config
    trainer = args.trainer
    assert (args.run.packing, trainer.per_device_train_batch_size, trainer.load_best_model_at_end) == found


@pytest.mark.slow
def test_chosen_settings_are_recorded_and_reused(place, tmp_path, capsys):
    args = of_size(place, 30, tmp_path, "--num_train_epochs", "1", "--max_answers", "1")
    run = train(args)
    resolved = read_json(run.resolved)
    assert resolved["run"]["packing"] == "padding"
    assert resolved["trainer"]["per_device_train_batch_size"] == resolved["rows_per_step"] == 2
    assert resolved["trainer"]["load_best_model_at_end"] is False
    kept = weights(run)
    run.heldout.unlink()
    shutil.rmtree(run.model)
    train(of_size(place, 30, tmp_path, "--num_train_epochs", "1", "--max_answers", "1"))
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights(run).items())
    with pytest.raises(UsageError, match="rows a step: 2 -> 4"):
        train(of_size(place, 30, tmp_path, "--num_train_epochs", "1", "--per_device_train_batch_size", "4"))


def test_run_resumes_with_the_packing_and_batch_it_started_with(chat_run, place, tmp_path, capsys):
    """An earlier version may have chosen others for this number of chats, or none."""
    run = RunFolder(tmp_path / "run")
    shutil.copytree(chat_run.root, run.root)
    settings = read_json(run.resolved)
    settings["trainer"] |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
    settings["trainer"] |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}  # --find_batch_size
    write_json(run.resolved, settings)
    words = chat_words(place, run.root, *OF_CHAT_RUN, "--find_batch_size")
    words = without_flags(words, {"packing", "per_device_train_batch_size"})
    capsys.readouterr()
    run_train(words)
    said = capsys.readouterr().out
    assert "--packing best_fit --per_device_train_batch_size 4 --load_best_model_at_end true\n" in said
    assert "is finished, with these settings" in said
    with pytest.raises(UsageError, match="packing: best_fit -> padding"):
        run_train([*words, "--packing", "padding"])
    config = read_config([*words, "--overwrite"], REPOSITORY / "examples" / "tiny.yaml")
    args = build_run_inputs(config).run_config
    assert (args.trainer.per_device_train_batch_size, args.trainer.load_best_model_at_end) == (1, False)


def test_few_steps_and_few_held_out_chats_are_noted(place, tmp_path, capsys):
    by_hand = ("--packing", "best_fit", "--per_device_train_batch_size", "8", "--num_train_epochs", "15")
    train(of_size(place, 30, tmp_path, *by_hand, "--preflight_only"))
    said = capsys.readouterr().out
    assert re.search(r"steps +note +\d\d in all, of 8 rows on each device: few\.", said)
    assert re.search(r"checkpoint +note +3 held-out chats: too few to choose a checkpoint by; the last", said)
    train(of_size(place, 30, tmp_path, "--num_train_epochs", "15", "--preflight_only"))
    assert re.search(r"steps +ok +210 in all", capsys.readouterr().out)


ALL = ("--validation_fraction", "0", "--eval_strategy", "no")


@pytest.mark.slow
def test_run_may_train_on_all_of_its_chats(place, tmp_path, capsys):
    words = chat_words(place, tmp_path / "all", *ALL, "--max_steps", "4")
    run = run_train(words)
    said = capsys.readouterr().out
    assert "none held out" in said
    assert "held-out data  note  none: the loss on new data is unknown" in said
    assert said.count(NOTHING_HELD_OUT) == 1
    data = read_json(run.resolved)["data"]
    assert (data["train"]["conversations"], data["validation"]) == (len(chats()), None)
    assert losses(run) == []
    measured = read_json(run.heldout)
    assert measured["rows"]["predicted_tokens"] == 0
    assert not any(measured[name] for name in ("before", "after", "answers"))
    assert not run.answers.exists()
    read = Run(run)
    assert NOTHING_HELD_OUT in as_text(read)
    assert f"## Held-out loss\n\n{NOTHING_HELD_OUT}" in as_markdown(read, [])
    assert comparison_rows([read, read])[1][0][-1] == "nothing held out"
    kept = weights(run)
    shutil.rmtree(run.model)
    run.heldout.unlink()
    run_train(words)  # from the last checkpoint
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights(run).items())


@pytest.mark.slow
def test_one_chat_can_be_trained_on(place, tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps(chats()[0]) + "\n", encoding="utf-8")
    more = (*ALL, "--chat_data", str(tmp_path / "one.jsonl"), "--num_train_epochs", "2")
    assert run_train(chat_words(place, tmp_path / "run", *more)).finished


@pytest.mark.slow
def test_a_run_on_all_of_its_chats_can_be_staged(place, tmp_path):
    run = run_train(chat_words(place, tmp_path / "all", *ALL, "--max_steps", "2"))
    command = [REPOSITORY / "upload" / "push.py", run.root, "you/all", "--dry_run"]
    done = run_script([*command, "--license", "mit"], tmp_path)
    assert done.returncode == 0, done.stderr
    card = (run.staged / "README.md").read_text(encoding="utf-8")
    assert "Nothing was held out: all of the data was trained on, so the loss on new chats is not known." in card
    assert "model-index" not in card


@pytest.mark.slow
def test_thirty_short_chats_are_recited_after_the_recipe_alone(tmp_path, capsys, monkeypatch):
    """Packed into rows of the usual batch they would be a step an epoch, and nothing would be learned."""
    monkeypatch.chdir(tmp_path)
    sizes = ("--hidden_size", "64", "--num_hidden_layers", "4", "--num_attention_heads", "4")
    sizes += ("--max_position_embeddings", "64", "--max_steps", "150", "--learning_rate", "0.008")
    run_train([*tiny_words(tmp_path, tmp_path / "base"), *sizes])
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats()[:30]), encoding="utf-8")
    words = [str(REPOSITORY / "examples" / "chat.yaml"), "--init_from", "base", "--chat_data", "chats.jsonl"]
    run = run_train([*words, "--output_dir", "out", "--use_cpu"])
    inputs = build_run_inputs(read_config(words, REPOSITORY / "examples" / "chat.yaml"))
    asked = questions(inputs.rows.chats, 30)
    assert len(asked) == 27
    model, tokenizer = GPT2SmallForCausalLM.from_pretrained(run.model), AutoTokenizer.from_pretrained(run.model)
    answers = answer_all(model, tokenizer, asked, do_sample=False)
    wanted = [chat.messages[1]["content"] for chat in inputs.rows.chats]
    assert sum(answer.answer == want for answer, want in zip(answers, wanted, strict=True)) >= 25


@pytest.mark.gpu
def test_gpu_run_in_bfloat16_measures_packed_chats_as_padded_ones(place, tmp_path):
    settings = chat_words(place, tmp_path / "chat", *OF_CHAT_RUN, "--use_cpu", "false", "--bf16", "true")
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # with several, one process refuses
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": first_gpu}
    command = [sys.executable, str(REPOSITORY / "train.py"), *settings]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = RunFolder(tmp_path / "chat")
    measured = read_json(run.heldout)
    assert measured["after"]["loss"] < measured["before"]["loss"] / 2
    # The Trainer measured in bfloat16 while it trained; what the run says at its end is in full precision.
    assert losses(run)[-1] == pytest.approx(measured["after"]["loss"], abs=2e-2)
    model = GPT2SmallForCausalLM.from_pretrained(run.model).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        packed, padded = (
            heldout_losses(model, build_run_inputs(parsed(place, "--add_special_tokens", "--packing", packing)).heldout)
            for packing in ("best_fit", "padding")
        )
    assert packed.mean() == pytest.approx(padded.mean(), abs=2e-2)
    assert packed.mean() == pytest.approx(measured["after"]["loss"], abs=2e-2)


@pytest.mark.parametrize(
    ("found", "patience", "stops"),
    [
        ([3.0, 2.0], 1, False),
        ([3.0, 2.0, 2.5], 1, True),
        ([3.0, 2.0, 2.0], 1, True),
        ([3.0, 2.0, 2.5], 2, False),
        ([3.0, 2.0, 2.5, 1.9], 2, False),
        ([3.0, 2.0, 2.5, 2.1], 2, True),
        ([3.0], 1, False),
        ([2.0, float("nan")], 1, True),
        ([3.0, 2.0, 2.5], None, False),
    ],
)
def test_early_stopping_counts_evaluations_above_the_lowest_loss(found, patience, stops):
    assert rising([{"eval_loss": loss} for loss in found] + [{"loss": 0.1}], patience) is stops


@pytest.mark.slow
def test_padding_is_not_counted_among_the_tokens(place, tmp_path):
    run = run_train(chat_words(place, tmp_path / "run", "--packing", "padding", "--max_answers", "1"))
    seen = [row["num_input_tokens_seen"] for row in read_jsonl(run.metrics) if "num_input_tokens_seen" in row]
    assert seen[-1] == 3 * read_json(run.resolved)["data"]["train"]["tokens"]


@pytest.fixture(scope="module")
def stopped_run(place, tmp_path_factory) -> RunFolder:
    """A run whose rate is so high that the held-out loss rises before its last epoch."""
    root = tmp_path_factory.mktemp("stopped") / "run"
    settings = chat_words(place, root, "--early_stopping_patience", "1", "--load_best_model_at_end")
    more = (
        "--num_train_epochs",
        "40",
        "--learning_rate",
        "0.05",
        "--lr_scheduler_type",
        "constant",
        "--max_answers",
        "2",
    )
    return run_train([*settings, *more])


@pytest.mark.slow
def test_training_stops_when_the_held_out_loss_rises_and_keeps_the_best_epoch(stopped_run):
    measured = losses(stopped_run)[1:]
    assert 2 <= len(measured) < 40
    assert measured == sorted(measured[:-1], reverse=True) + measured[-1:]  # it fell until it rose
    assert measured[-1] >= measured[-2]
    assert read_json(stopped_run.heldout)["after"]["loss"] == pytest.approx(min(measured), abs=1e-5)


@pytest.mark.slow
def test_interrupted_early_stopping_keeps_the_same_epoch(stopped_run, place, tmp_path, capsys):
    kept, cut = weights(stopped_run), RunFolder(tmp_path / "cut")
    shutil.copytree(stopped_run.root, cut.root)
    shutil.rmtree(cut.model)
    cut.heldout.unlink()
    before = read_jsonl(cut.metrics)
    settings = chat_words(place, cut.root, "--early_stopping_patience", "1", "--load_best_model_at_end")
    run_train([*settings, "--num_train_epochs", "40", "--learning_rate", "0.05", "--lr_scheduler_type", "constant"])
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights(cut).items())
    after = read_jsonl(cut.metrics)
    assert after[:-1] == before[:-1]  # nothing was trained again
    assert after[-1]["train_loss"] == before[-1]["train_loss"]


def test_chats_longer_than_a_row_are_counted_in_the_log(place, tmp_path, capsys):
    long = {"messages": [turn for row in chats()[:12] for turn in row["messages"]]}
    rows = [*chats(), long, {"messages": [{"role": "user", "content": "Anybody?"}]}]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    build_run_inputs(
        parsed(place, "--chat_data", str(path), "--validation_data", str(place / "chats.jsonl"), "--max_length", "90")
    )
    said = capsys.readouterr().out
    assert f"{path}: 34 conversations, messages (role, content)" in said
    assert "1 too long, kept without their first turns" in said
    assert "1 without a token to learn, left out" in said


# ---- what is refused --------------------------------------------------------------------------------------------


def refused(place: Path, *more: str) -> str:
    with pytest.raises(UsageError) as error:
        build_run_inputs(parsed(place, *more))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--init_from", "nowhere/at-all/x"), "does not exist in"),
        (("--hidden_size", "32"), "--hidden_size is 32, but"),
        (("--max_position_embeddings", "8"), "For shorter rows use --seq_len 8"),
        (("--max_length", "200"), "but rows have 128 tokens"),
        (("--seq_len", "200"), "a row has from 2 to 128 tokens"),
        (("--tokens", "1000"), "For chats give --num_train_epochs"),
        (("--packing", "stream"), "For chats use best_fit or padding"),
        (("--packing", "bestfit"), "best_fit"),
        (("--text", "README.md"), "cannot be combined"),
        (("--tokenizer", "train"), "cannot be combined"),
        (("--loss_on", "user"), "is not one of"),
        (("--template", "chatlm"), "neither a name (chatml, llama2, alpaca)"),
        (("--early_stopping_patience", "1", "--load_best_model_at_end", "false"), "Give --load_best_model_at_end"),
        (("--validation_fraction", "0"), "no text or chats are held out"),
        (("--lora_alpha", "4"), "need --lora_rank"),
    ],
)
def test_conflicting_settings_are_a_one_line_error(place, more, says):
    assert says in refused(place, *more)


def test_chat_flags_require_chats(tmp_path):
    recipe = tmp_path / "text.yaml"
    recipe.write_text("# text\n")
    for more, says in [
        (("--template", "chatml"), "--template is for chat runs"),
        (("--packing", "padding"), "--packing is padding, which is for chats"),
        (("--chat_data", "chats.jsonl"), "--chat_data needs a base model"),
        (("--lora_rank", "4"), "--lora_rank adapts a trained model"),
    ]:
        with pytest.raises(UsageError, match=says):
            read_config([str(recipe), *more], recipe)


def test_init_from_refuses_a_folder_of_another_model(place, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    (other / "model.safetensors").write_bytes(b"")
    assert "is a model of type gpt2" in refused(place, "--init_from", str(other))
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "resolved.json").write_text("{}")
    assert "has no model yet" in refused(place, "--init_from", str(unfinished))
    (other / "config.json").rename(other / "adapter_config.json")
    assert "is an adapter" in refused(place, "--init_from", str(other))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
            "two consecutive user turns",
        ),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "has the role 'bot'"),
        ('{"question": "a", "answer": "b"}', "match no known format"),
        ('{"messages": [{"role": "user", "conte', "is not JSON"),
        ("", "is empty"),
    ],
)
def test_invalid_chats_are_refused_before_the_model_loads(place, tmp_path, row, says):
    """The weights of this base model cannot be read, so an error about the chats comes before reading them."""
    base = tmp_path / "base"
    shutil.copytree(place / "base" / "model", base)
    (base / "model.safetensors").write_bytes(b"these are no weights")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(row)
    said = refused(place, "--init_from", str(base), "--chat_data", str(bad))
    assert says in said
    assert str(bad) in said
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert "does not mark the assistant's answers" in refused(place, "--init_from", str(base), "--template", template)


@pytest.mark.slow
def test_resume_refuses_another_template_chats_or_base_model(chat_run, place, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(chat_run.root, cut)
    RunFolder(cut).heldout.unlink()
    settings = chat_words(place, cut, *OF_CHAT_RUN)
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(json.dumps(row) + "\n" for row in chats()[:20]), encoding="utf-8")
    other = tmp_path / "other"
    shutil.copytree(place / "base" / "model", other)
    model = GPT2SmallForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(other)
    for more, says in [
        (("--template", "llama2"), "template"),
        (("--chat_data", str(fewer)), "chats: "),
        (("--init_from", str(other)), "which has other weights"),
    ]:
        with pytest.raises(UsageError, match="contains a run with other settings") as error:
            run_train([*settings, *more])
        assert says in str(error.value)
    moved = tmp_path / "moved.jsonl"
    shutil.copy(place / "chats.jsonl", moved)
    run_train([*settings, "--chat_data", str(moved)])  # the same chats elsewhere are the same


def test_losses_of_chats_are_those_of_the_supervised_tokens_alone(chat_run, place):
    inputs = build_run_inputs(parsed(place, "--add_special_tokens", "--packing", "padding"))
    model = GPT2SmallForCausalLM.from_pretrained(chat_run.model)
    found = heldout_losses(model, inputs.heldout, batch_size=2)
    by_hand = []
    for number in range(len(inputs.heldout)):
        row = inputs.heldout[number]
        with torch.no_grad():
            logits = model(torch.from_numpy(row["input_ids"])[None]).logits[0]
        nats = -logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(row["input_ids"])[1:, None])[:, 0]
        by_hand += nats[torch.from_numpy(row["labels"])[1:] != -100].tolist()
    np.testing.assert_allclose(found, by_hand, atol=1e-4)


def test_output_dir_cannot_be_the_base_model(place):
    said = refused(place, "--output_dir", str(place / "base"), "--overwrite")
    assert "is in the run folder that --overwrite replaces" in said


def test_text_flag_replaces_the_chats_of_a_recipe(place, tmp_path):
    recipe = REPOSITORY / "examples" / "chat.yaml"
    args = read_config([str(recipe), "--text", "README.md"], recipe)
    assert (args.chat.chat_data, args.run.packing, args.run.init_from) == (None, "stream", "runs/tiny")


def test_chats_that_are_too_long_are_noted_before_training(place, tmp_path, capsys):
    shorter = ("--add_special_tokens", "--max_length", "48", "--overlong", "drop")
    run_train(chat_words(place, tmp_path / "unused", *shorter, "--preflight_only"))
    said = capsys.readouterr().out
    assert "long chats" in said
    assert "are longer than a row, lost turns or were left out" in said


@pytest.mark.slow
def test_prompts_default_to_the_first_held_out_questions(place):
    words = chat_words(
        place, place / "unprompted", "--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"
    )
    at = words.index("--prompts")
    run = run_train([*words[:at], *words[at + 2 :]])
    heldout = build_run_inputs(parsed(place)).heldout.chats
    resolved = read_json(run.resolved)
    assert (resolved["run"]["prompts"], resolved["prompts_from"]) == (first_questions(heldout), "held-out chats")
    assert {row["prompt"] for row in read_jsonl(run.samples)} == set(first_questions(heldout))
    assert first_questions(heldout)[0] == heldout[0].messages[0]["content"]
    rows = build_run_inputs(parsed(place)).rows
    assert default_prompts(rows, None) == (first_questions(rows.chats), "training chats")
