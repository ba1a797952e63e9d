"""Settings of a run: one home for each default, recipes and flags in order, mistakes refused early."""

import importlib.util
import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from conftest import REPOSITORY
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.training_args import OptimizerNames

from gpt2small_hf import GPT2SmallConfig
from gpt2small_hf.config.recipe import extended
from gpt2small_hf.config.resolve import full_recipe, load_recipe, read_config, show_recipe
from gpt2small_hf.errors import UsageError
from gpt2small_hf.training.paths import check_packages
from gpt2small_hf.training.trainer_arguments import training_arguments

TINY = REPOSITORY / "examples" / "tiny.yaml"


def parse(*words):
    return read_config(list(words), default_recipe=TINY)


def test_without_arguments_it_is_the_tiny_recipe_in_a_folder_of_that_name():
    args = parse()
    assert args.run.output_dir.as_posix() == "runs/tiny"
    assert args.trainer.max_steps > 0
    assert args.data.text is None


def test_a_models_defaults_are_the_configurations_own(tmp_path):
    empty = tmp_path / "empty.yaml"
    empty.write_text("# all defaults\n")
    config = GPT2SmallConfig(vocab_size=50257, **vars(parse(str(empty)).model))
    assert config.to_dict() == GPT2SmallConfig().to_dict()


def test_a_flag_wins_over_the_recipe(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("hidden_size: 32\nlearning_rate: 1e-3\nbf16: false\nprompts: [One, Two words]\n")
    args = parse(str(recipe), "--hidden_size", "48")
    assert (args.model.hidden_size, args.trainer.learning_rate) == (48, 1e-3)
    assert args.run.prompts == ["One", "Two words"]
    assert args.run.output_dir.as_posix() == "runs/mine"


def test_a_text_named_by_a_flag_replaces_the_recipes_text(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("text: [a.txt]\ntokenizer: train\nvocab_size: 500\n")
    args = parse(str(recipe), "--dataset", "user/set")
    assert (args.data.text, args.data.dataset, args.data.vocab_size) == (None, "user/set", 500)
    args = parse(str(recipe), "--data-dir", "data/mine")
    assert (args.data.text, args.data.tokenizer, args.data.vocab_size) == (None, None, None)
    assert args.run.data_dir.as_posix() == "data/mine"


def test_a_length_of_training_named_by_a_flag_replaces_the_recipes(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("max_steps: 70\n")
    args = parse(str(recipe), "--tokens_per_parameter", "20")
    assert (args.trainer.max_steps, args.run.tokens_per_parameter) == (-1, 20)
    assert parse(str(recipe), "--num_train_epochs", "2").trainer.max_steps == -1


def test_a_mistyped_recipe_key_is_refused_with_the_file_and_the_nearest_name(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("learning_rat: 1e-3\n")
    with pytest.raises(UsageError, match=r"mine\.yaml: learning_rat is not a flag\. Did you mean learning_rate\?"):
        parse(str(recipe))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hidden_sise", "8"], "--hidden_sise is not a flag. Did you mean --hidden_size?"),
        (["--init_scheme", "gpt3"], "--init_scheme: 'gpt3' is not one of gpt2, torch"),
        (["missing.yaml"], "Cannot read the recipe missing.yaml"),
        (["--validation_fraction", "1.5"], "--validation_fraction is 1.5"),
        (["--optim", "adamv"], "adamv"),
        ([str(TINY), "max_steps=100"], "max_steps=100 is not a flag. Usage: gpt2small train [recipe.yaml]"),
        (["tiny", "chat"], "tiny and chat are two recipes. Give one; a line `extends: tiny`"),
        (["--use_cache", "true"], "--use_cache true keeps keys and values"),
        (["--output_dir", ""], "--output_dir is empty"),
        (["--validation_fraction", "0"], "no text or chats are held out"),
        (["--max_steps", "many"], "--max_steps: 'many' is not a whole number"),
        (["--max_steps", "1e6"], "--max_steps: '1e6' is not a whole number. Write 1000000."),
        (["--eval_strategy", "stepz"], "'stepz' is not one of no, steps, epoch. Did you mean steps?"),
        (["--max_steps", "0"], "--max_steps is 0. Give 1 or more"),
        (["--save_steps", "0"], "--save_steps is 0. Give steps"),
        (["--eval_steps", "0"], "for none: --eval_strategy no"),
        (["--logging_steps", "-0.5"], "--logging_steps is -0.5"),
        (["--per_device_train_batch_size", "0"], "--per_device_train_batch_size is 0. Give 1 or more"),
        (["--learning_rate", "-1"], "--learning_rate is -1.0. Give 0 or more"),
        (["--learning_rate", "nan"], "--learning_rate is nan"),
        (["--lr_scheduler_kwargs", "xx"], "--lr_scheduler_kwargs xx is not JSON"),
        (["--lr_scheduler_kwargs", "{bad"], "--lr_scheduler_kwargs {bad is not JSON"),
        (["--load_best_model_at_end", "true", "--eval_strategy", "no"], "give --eval_strategy steps"),
        (["--seed", "4294967296"], "--seed is 4294967296. Give a number below 2^32"),
        (["--prompts", " "], "--prompts has an empty text"),
        (["--num_threads", "0"], "--num_threads is 0"),
        (["--hub_token", "hf_secret"], "a token is never a flag"),
        (["--report_to", "wandbb"], "--report_to wandbb is not known. Did you mean wandb?"),
        (
            ["--hidden_size", "65"],
            "--hidden_size 65 is not a multiple of --num_attention_heads 4. Use 64 or 68",
        ),
        (["--bf16", "maybe"], "--bf16: 'maybe' is not true or false"),
        (["--data_dir", "data", "--text", "x.txt"], "--data_dir cannot be combined with --text"),
        (["--max_steps", "5", "--tokens", "9"], "--max_steps cannot be combined with --tokens"),
        (["--hidden_size", "6.5"], "--hidden_size: '6.5' is not a whole number"),
        (["--hidden_size", "1" + 20 * "0"], "--hidden_size has 21 digits. Whole numbers are at most 2^63 - 1"),
        (["--num_hidden_layers", "0"], "--num_hidden_layers is 0; it must be 1 or more"),
        (["--max_position_embeddings", "-8"], "--max_position_embeddings is -8; it must be 1 or more"),
        (["--intermediate_size", "-1"], "--intermediate_size is -1; it must be 1 or more"),
        (["--layer_norm_eps", "nan"], "--layer_norm_eps is nan; it must be a number above 0"),
        (["--seq_len", "65"], "--seq_len is 65; a row has from 2 to 64 tokens (--max_position_embeddings)"),
        (["--vocab_size", "4294967297"], "--vocab_size is 4,294,967,297, but token ids have 32 bits"),
    ],
)
def test_a_mistake_is_one_line(words, message):
    with pytest.raises(UsageError) as caught:
        parse(*words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "the same command"),
        ("--overwrite", "the same command without --overwrite"),
        ("--resume runs/x/checkpoints/checkpoint-5", "the same command without --resume"),
        ("--overwrite --resume never", "the same command without --overwrite and --resume"),
    ],
)
def test_command_to_resume_has_no_flag_that_starts_again(words, said):
    assert parse(*words.split()).run.command_to_resume == said


def test_a_schedule_without_a_lowest_rate_gets_none():
    assert parse().trainer.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert not parse("--lr_scheduler_type", "linear").trainer.lr_scheduler_kwargs


def test_help_describes_every_flag(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help_all")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--output_dir", "--text", "--vocab_size", "--hidden_size", "--learning_rate", "--seed"):
        assert flag in text
    assert "dataclasses._MISSING_TYPE" not in text
    assert "--hub_token" not in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_steps: many", "max_steps: 'many' is not a whole number"),
        ("max_steps: 2.5", "max_steps: '2.5' is not a whole number"),
        ("max_steps: 1.0e+6", "max_steps: '1000000.0' is not a whole number. Write 1000000."),
        ("max_steps: [1, 2]", "max_steps is [1, 2], not a whole number"),
        ("learning_rate: true", "learning_rate is True, not a number"),
        ("bf16: maybe", "bf16: 'maybe' is not true or false"),
        ("packing: loose", "packing: 'loose' is not one of"),
        ("prompts: [{a: 1}]", "prompts is {'a': 1}, not text"),
        (f"seed: 1{20 * '0'}", "seed has 21 digits"),
    ],
)
def test_invalid_value_of_a_recipe_is_refused_with_the_file(tmp_path, line, message):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"{line}\n")
    with pytest.raises(UsageError) as caught:
        load_recipe(recipe)
    assert str(caught.value).startswith(f"{recipe}: {message}")


def test_recipe_values_have_the_type_of_the_setting(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("learning_rate: 1e-3\nmax_steps: '20'\nbf16: yes\nprompts: One\nweight_decay: 0\nrun_name: 7\n")
    config = load_recipe(recipe, lr_scheduler_kwargs={"min_lr_rate": 0.2})
    trainer = config.trainer
    assert (trainer.learning_rate, trainer.max_steps, trainer.bf16, trainer.run_name) == (1e-3, 20, True, "7")
    assert (config.run.prompts, trainer.lr_scheduler_kwargs) == (["One"], {"min_lr_rate": 0.2})
    assert type(trainer.weight_decay) is float


def test_loaded_recipe_equals_the_command_line():
    config = load_recipe("tiny", max_steps=20, output_dir="runs/x", bf16=False, prompts=["One", "Two"])
    typed = ["tiny", "--max_steps", "20", "--output_dir", "runs/x", "--bf16", "false", "--prompts", "One", "Two"]
    assert config == read_config(typed)
    assert list(config.words) == typed
    assert load_recipe("tiny", max_steps=None).trainer.max_steps == -1
    with pytest.raises(UsageError, match=r"load_recipe\('tiny'\): max_step is not a flag. Did you mean max_steps\?"):
        load_recipe("tiny", max_step=3)


def test_config_cannot_be_changed():
    config = load_recipe("tiny")
    for part in (config, config.run, config.data, config.chat, config.model, config.trainer):
        for name in vars(part):
            with pytest.raises(FrozenInstanceError):
                setattr(part, name, None)
    changed = config.with_settings(max_steps=7, packing="isolate")
    assert (changed.trainer.max_steps, changed.run.packing, changed.model) == (7, "isolate", config.model)
    assert (config.trainer.max_steps, config.run.packing) == (2500, "stream")


def test_trainer_arguments_share_nothing_with_the_settings():
    config = load_recipe("tiny", lr_scheduler_kwargs={"min_lr_rate": 0.2}, use_cpu=True)
    arguments = training_arguments(config.trainer, "unused")
    arguments.lr_scheduler_kwargs["min_lr_rate"] = 0.5
    arguments.max_steps = 3
    assert config == load_recipe("tiny", lr_scheduler_kwargs={"min_lr_rate": 0.2}, use_cpu=True)
    with pytest.raises(UsageError, match="does not suit --lr_scheduler_type cosine_with_min_lr"):
        training_arguments(load_recipe("tiny", lr_scheduler_kwargs={"x": 1}, use_cpu=True).trainer, "unused")


RECIPES = [
    path
    for path in sorted((REPOSITORY / "examples").rglob("*.yaml"))
    if path.parent.name not in ("accelerate", "cloud")  # other programs read those
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_recipe_parses_and_opens_with_three_lines_of_comment(recipe):
    float32 = (word for name in ("bf16", "fp16", "tf32") for word in (f"--{name}", "false"))
    assert parse(str(recipe), *float32).recipe == recipe  # half precision is refused where there is no GPU
    assert [line[0] for line in recipe.read_text().splitlines()[:3]] == ["#", "#", "#"]


INTERVENTIONS = sorted((REPOSITORY / "examples" / "interventions").glob("*.yaml"))


@pytest.mark.parametrize("path", INTERVENTIONS, ids=lambda path: path.stem)
def test_an_intervention_opens_with_what_it_shows_and_says_only_what_differs(path):
    shows, machine, expect, *settings = path.read_text().splitlines()
    assert (shows[:8], machine[:10], expect[:9]) == ("# Shows:", "# Machine:", "# Expect:")
    whole = full_recipe(read_config([str(path)]))
    if path.stem != "baseline":
        base = full_recipe(read_config([str(extended(path))]))
        said = [line.split(":")[0] for line in settings[1:]]
        assert [name for name in said if whole[name] == base.get(name)] == []
        assert 1 <= len(said) <= 5
    # Rows a step, tokens and the rows to measure on are the same for all: else losses could not be compared.
    assert whole["per_device_train_batch_size"] * whole.get("gradient_accumulation_steps", 8) == 96
    assert (whole["tokens"], whole["max_eval_samples"], whole["seed"]) == (3_260_252_160, 3200, 42)


def test_stacked_is_the_baseline_with_what_helped():
    stacked, baseline = (
        full_recipe(read_config([str(INTERVENTIONS[0].with_name(f"{n}.yaml"))])) for n in ("stacked", "baseline")
    )
    assert {name: value for name, value in stacked.items() if baseline.get(name) != value} == {
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        "learning_rate": 0.0014,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 0.05,
        "weight_decay": 0.01,
        "max_grad_norm": 3.5,
    }


def test_the_baseline_skips_no_spike_and_float32_and_tied_change_nothing_else():
    """The series had no guard against spikes, ran float32 alone, and kept torch's initial weights for the tied head."""
    baseline, float32, tied, small = (
        full_recipe(read_config([str(INTERVENTIONS[0].with_name(f"{name}.yaml"))]))
        for name in ("baseline", "float32", "tied", "tied-small-init")
    )

    def changed(recipe: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in recipe.items() if baseline.get(name) != value}

    assert baseline["spike_factor"] == math.inf
    assert changed(float32) == {"fp16": False, "tf32": False}
    assert changed(tied) == {"tie_word_embeddings": True, "allow_high_initial_loss": True}
    assert changed(small) == {"tie_word_embeddings": True, "init_scheme": "gpt2"}


def test_the_full_size_recipe_names_every_setting_that_differs_from_the_series():
    recipe = REPOSITORY / "examples" / "gpt2-small.yaml"
    ours, series = (
        full_recipe(read_config([str(path)])) for path in (recipe, INTERVENTIONS[0].with_name("stacked.yaml"))
    )
    # Its rows a step are those of one device, not of eight; 42 is the default seed.
    same = {"per_device_train_batch_size", "seed"}
    differs = {name for name in ours | series if ours.get(name) != series.get(name)} - same
    comments = " ".join(line for line in recipe.read_text().splitlines() if line.startswith("#"))
    assert {"init_scheme", "adam_beta2", "decay"} <= differs
    assert {name for name in differs if name not in comments} == set()
    assert ours["per_device_train_batch_size"] == 8 * series["per_device_train_batch_size"]


def test_a_printed_recipe_can_be_saved_and_means_the_same(tmp_path):
    (tmp_path / "base.yaml").write_text("hidden_size: 48\nlearning_rate: 1e-3\nbf16: true\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nlearning_rate: 2e-3\nprompts: [One, Two words]\n")
    shown = show_recipe(read_config([str(tmp_path / "mine.yaml"), "--num_attention_heads", "4"]))
    assert shown.endswith(
        f"# {tmp_path}/mine.yaml changes in {tmp_path}/base.yaml:\n"
        "# prompts: unset -> ['One', 'Two words']\n"
        "# num_attention_heads: 12 -> 4\n# learning_rate: 0.001 -> 0.002\n"
    )
    (tmp_path / "saved.yaml").write_text(shown)
    again = full_recipe(read_config([str(tmp_path / "saved.yaml")]))
    assert again == full_recipe(read_config([str(tmp_path / "mine.yaml"), "--num_attention_heads", "4"]))
    assert (again["bf16"], again["hidden_size"], again["prompts"]) == (True, 48, ["One", "Two words"])
    assert show_recipe(read_config([str(tmp_path / "base.yaml"), "--bf16", "false"])).count("bf16: false") == 1


def test_own_chats_replace_the_prompts_of_the_recipe():
    recipe = str(REPOSITORY / "examples" / "chat.yaml")
    default = REPOSITORY / "examples" / "tiny.yaml"
    assert read_config([recipe], default).run.prompts == ["What does pass do?", "Who are you?"]
    own = ["--chat_data", "own.jsonl"]
    assert read_config([recipe, *own], default).run.prompts is None
    assert read_config([recipe, *own, "--prompts", "Hm?"], default).run.prompts == ["Hm?"]


def test_packages_that_settings_ask_for_are_named_before_any_work(monkeypatch):
    """Of each optimizer and reporter of transformers that cannot be made with what every run has."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    needed = {}
    for flag, names in {"optim": [one.value for one in OptimizerNames], "report_to": INTEGRATION_TO_CALLBACK}.items():
        for name in names:
            args = read_config([f"--{flag}", name], TINY)
            try:
                check_packages(args)
            except UsageError as error:
                needed[name] = str(error)
    with_torch = {"adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"}
    with_torch |= {"adafactor", "sgd", "adagrad", "rmsprop", "kubeflow"}  # the latter needs a server
    assert needed.keys() == ({one.value for one in OptimizerNames} | INTEGRATION_TO_CALLBACK.keys()) - with_torch
    assert all(line.count("pip install ") == 1 for line in needed.values())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: name == "tensorboardX" or None)
    check_packages(read_config(["--report_to", "tensorboard"], TINY))  # transformers takes either
