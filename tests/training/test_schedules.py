"""Schedules: rates are between 0 and the peak, and a resumed run has the same rates to the bit, or the new ones."""

import json
import math

import pytest
import torch
from conftest import REPOSITORY, tiny_config
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import SchedulerType, TrainingArguments, get_scheduler

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.config.resolve import full_recipe, read_config
from gpt2small_hf.config.trainer import WITHOUT_WARMUP, TrainerSettings
from gpt2small_hf.errors import UsageError
from gpt2small_hf.training.schedules import Schedule, rates
from gpt2small_hf.training.trainer import CausalLMTrainer
from gpt2small_hf.training.trainer_arguments import training_arguments

TINY = REPOSITORY / "examples" / "tiny.yaml"
FOLLOW_THE_LOSS = ("reduce_lr_on_plateau", "greedy")
NAMES = [*(kind.value for kind in SchedulerType), "deepseek_steps"]
SHAPES = [name for name in NAMES if name not in FOLLOW_THE_LOSS]
ROWS = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 100, (96, 8), generator=torch.Generator())]


def arguments(name="cosine_with_min_lr", settings=None, **changes):
    more = {"eval_strategy": "steps", "eval_steps": 5} if name in FOLLOW_THE_LOSS else {}
    settings = TrainerSettings(
        lr_scheduler_type=name,
        lr_scheduler_kwargs=settings,
        use_cpu=True,
        report_to="none",
        **more | changes,
    )
    return training_arguments(settings, "unused")


def schedule(args, total_steps, peak=None):
    """A schedule on an optimizer of two groups."""
    groups = [{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=peak or args.learning_rate)
    share = rates(args, total_steps)
    assert share is not None
    return Schedule(optimizer, share)


def advance(scheduler, n_steps):
    """Return the rates of `n_steps` steps; all groups have the same."""
    used = []
    for _ in range(n_steps):
        first, second = (group["lr"] for group in scheduler.optimizer.param_groups)
        assert first == second == scheduler.get_last_lr()[0]
        used.append(first)
        scheduler.optimizer.step()
        scheduler.step()
    return used


# ---- shapes ------------------------------------------------------------------------------------------------------


@given(st.sampled_from(SHAPES), st.integers(1, 400), st.one_of(st.floats(0, 0.9), st.integers(0, 500)), st.floats(0, 1))
def test_rates_are_between_zero_and_the_peak_with_linear_warm_up(name, total_steps, warmup_steps, end):
    settings = {"min_lr_rate": end} if "min_lr" in name else None
    args = arguments(name, settings, warmup_steps=0 if name in WITHOUT_WARMUP else warmup_steps)
    share = rates(args, total_steps)
    shares = [share(step) for step in range(total_steps + 1)]
    assert all(0 <= value <= 1 for value in shares)
    warmup = args.get_warmup_steps(total_steps)
    # This one of transformers' counts from 1 to the warm-up's last step.
    ahead = 1 if name == "cosine_warmup_with_min_lr" else 0
    for step in range(min(warmup, total_steps + 1)):
        assert shares[step] == pytest.approx((step + ahead) / warmup)
    if warmup < total_steps and name not in ("cosine_warmup_with_min_lr", "deepseek_steps"):
        assert shares[warmup] == 1


@pytest.mark.parametrize(
    ("name", "settings", "end"),
    [
        ("cosine_with_min_lr", None, 0.1),
        ("cosine_with_min_lr", {"min_lr_rate": 0.25}, 0.25),
        ("cosine_with_min_lr", {"min_lr": 3e-4}, 0.5),
        ("warmup_stable_decay", None, 0),
        ("warmup_stable_decay", {"min_lr_ratio": 0.05}, 0.05),
        ("linear", None, 0),
        ("cosine", None, 0),
        ("constant", None, 1),
        ("constant_with_warmup", None, 1),
        ("deepseek_steps", None, 0.1),
    ],
)
@pytest.mark.parametrize("total_steps", [20, 1000])
def test_schedule_ends_at_its_final_rate(name, settings, end, total_steps):
    assert rates(arguments(name, settings), total_steps)(total_steps) == pytest.approx(end)


@given(st.integers(10, 10_000), st.integers(0, 2000))
def test_deepseek_rate_falls_at_80_and_90_percent_of_training(total_steps, warmup_steps):
    assume(warmup_steps <= 0.8 * total_steps)
    share = rates(arguments("deepseek_steps", warmup_steps=warmup_steps), total_steps)
    first, second = math.ceil(total_steps * 8 / 10), math.ceil(total_steps * 9 / 10)
    assert {share(step) for step in range(warmup_steps, first)} <= {1.0}
    assert {share(step) for step in range(max(first, warmup_steps), second)} <= {0.316}
    assert {share(step) for step in range(second, total_steps + 1)} == {0.1}


@given(st.integers(2, 2000), st.floats(0.01, 0.95), st.sampled_from(["linear", "cosine", "1-sqrt"]), st.floats(0, 0.5))
def test_decay_takes_decay_share_of_all_steps(total_steps, decay_share, decay_type, end):
    settings = {"decay_share": decay_share, "decay_type": decay_type, "min_lr_ratio": end}
    share = rates(arguments("warmup_stable_decay", settings, warmup_steps=0), total_steps)
    n_decay = round(decay_share * total_steps)
    begin = total_steps - n_decay
    assert {share(step) for step in range(begin)} <= {1.0}
    falling = [share(step) for step in range(begin, total_steps + 1)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(end)
    if decay_type == "linear" and n_decay:
        middle = n_decay // 2
        assert falling[middle] == pytest.approx(1 - (1 - end) * middle / n_decay)


def test_default_decay_is_linear_to_zero_over_the_last_fifth():
    args = arguments("warmup_stable_decay", warmup_steps=10)
    share = rates(args, 100)
    assert [share(step) for step in (5, 10, 80, 90, 95, 100)] == [0.5, 1, 1, 0.5, 0.25, 0]
    assert args.lr_scheduler_kwargs == {"decay_type": "linear", "decay_share": 0.2}
    # Steps given outright win over a share.
    share = rates(arguments("warmup_stable_decay", {"num_decay_steps": 50, "decay_share": 0.1}, warmup_steps=0), 100)
    assert [share(step) for step in (50, 75, 100)] == [1, 0.5, 0]
    # A long warm-up leaves the decay what is left.
    share = rates(arguments("warmup_stable_decay", {"decay_share": 0.5}, warmup_steps=90), 100)
    assert [share(step) for step in (45, 90, 95, 100)] == [0.5, 1, 0.5, 0]
    # Transformers' other way to say it: the stable steps, whatever the total.
    share = rates(arguments("warmup_stable_decay", {"num_stable_steps": 30, "num_decay_steps": 10}, warmup_steps=0), 99)
    assert [share(step) for step in (30, 35, 40, 99)] == [1, 0.5, 0, 0]


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "deepseek_steps"])
def test_schedules_of_transformers_are_unchanged(name):
    args = arguments(name, {"num_decay_steps": 20} if name == "warmup_stable_decay" else None)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    theirs = get_scheduler(name, optimizer, args.get_warmup_steps(60), 60, args.lr_scheduler_kwargs)
    expected = []
    for _ in range(60):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert advance(schedule(args, 60), 60) == expected


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("warmup_stable_decay", {"decay_share": 0}, "decay_share is 0; give a number above 0"),
        ("warmup_stable_decay", {"decay_share": "x"}, "does not suit --lr_scheduler_type warmup_stable_decay"),
        ("warmup_stable_decay", {"num_decay_steps": 0.2}, "give whole steps, or a share as decay_share"),
        ("warmup_stable_decay", {"num_decay_steps": 90}, "20 steps of warm-up and 90 of decay are more than 100"),
        ("warmup_stable_decay", {"decay_type": "sudden"}, "Unknown decay type: sudden"),
        ("warmup_stable_decay", {"min_lr_ratio": 1.5}, "the rate ranges from 1 to 1.5 times its peak"),
        ("cosine_with_min_lr", {"min_lr_rate": 3}, "times its peak"),
        ("cosine_with_min_lr", {"min_lr": 1e-3, "min_lr_rate": 0.1}, "Only one of min_lr or min_lr_rate"),
        ("deepseek_steps", {"decay_share": 0.1}, "it takes none"),
        ("constant_with_warmup", {"min_lr": 0.1}, "it takes none"),
        ("inverse_sqrt", {"timescale": 0}, "does not suit --lr_scheduler_type inverse_sqrt"),
        ("polynomial", {"lr_end": 1}, "must be smaller than initial lr"),
        ("greedy", {"x": 1}, "does not suit --lr_scheduler_type greedy"),
        ("reduce_lr_on_plateau", {"x": 1}, "does not suit --lr_scheduler_type reduce_lr_on_plateau"),
        ("linear", {"min_lr": 0}, "does not suit --lr_scheduler_type linear"),
        ("constnt", None, "--lr_scheduler_type constnt is not known. Did you mean constant?"),
        ("deepseek", None, "--lr_scheduler_type deepseek is not known. Did you mean deepseek_steps?"),
        ("wsd", None, "--lr_scheduler_type wsd is not known. Choose one of linear, cosine,"),
    ],
)
def test_invalid_settings_are_a_one_line_error(name, settings, message):
    with pytest.raises(UsageError) as caught:
        arguments(name, settings, max_steps=100, warmup_steps=0 if name in WITHOUT_WARMUP else 20)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(WITHOUT_WARMUP))
def test_warm_up_that_the_schedule_ignores_is_refused(name):
    with pytest.raises(
        UsageError, match=rf"{name} has no warm-up, but --warmup_steps is 0\.1.*constant_with_warmup\.$"
    ):
        arguments(name, warmup_steps=0.1)
    assert arguments(name).warmup_steps == 0
    assert arguments(name).get_warmup_steps(100) == 0
    assert arguments("constant_with_warmup").get_warmup_steps(100) == 5


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_accepted_as_a_flag_and_recorded(name, tmp_path):
    words = ["--lr_scheduler_type", name]
    words += ["--warmup_steps", "0"] if name in WITHOUT_WARMUP else []
    config = read_config([str(TINY), *words])
    assert json.loads(training_arguments(config.trainer, "unused").to_json_string())["lr_scheduler_type"] == name
    whole = full_recipe(config)
    (tmp_path / "saved.yaml").write_text(json.dumps(whole))
    assert full_recipe(read_config([str(tmp_path / "saved.yaml")])) == whole


# ---- in the Trainer, and resuming --------------------------------------------------------------------------------


def trainer(args, place):
    args.output_dir = str(place)
    torch.manual_seed(0)
    return CausalLMTrainer(GPT2SmallForCausalLM(tiny_config()), args, train_dataset=ROWS, eval_dataset=ROWS[:4])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_trainer_uses_the_named_schedule(name, tmp_path):
    args = arguments(name, max_steps=10, logging_steps=1, per_device_train_batch_size=2, save_strategy="no")
    made = trainer(args, tmp_path)
    made.train()
    logged = [row["learning_rate"] for row in made.state.log_history if "learning_rate" in row]
    share = rates(args, 10)
    if name in FOLLOW_THE_LOSS:
        assert share is None
        assert 0 < logged[-1] <= args.learning_rate
    else:
        assert logged == [args.learning_rate * share(step) for step in range(10)]


@pytest.mark.slow
def test_training_again_restarts_the_schedule(tmp_path):
    args = arguments("linear", max_steps=4, logging_steps=1, warmup_steps=0, save_strategy="no")
    made = trainer(args, tmp_path)
    for _ in range(2):
        made.train()
        logged = [row["learning_rate"] for row in made.state.log_history if "learning_rate" in row]
        assert logged == [6e-4 * (4 - step) / 4 for step in range(4)]


@pytest.mark.slow
def test_training_arguments_of_transformers_are_accepted(tmp_path):
    args = TrainingArguments(
        str(tmp_path), max_steps=4, logging_steps=1, save_strategy="no", use_cpu=True, report_to="none"
    )
    made = trainer(args, tmp_path)
    made.train()
    logged = [row["learning_rate"] for row in made.state.log_history if "learning_rate" in row]
    assert logged == [5e-5 * (4 - step) / 4 for step in range(4)]


@given(st.sampled_from(SHAPES), st.integers(0, 59))
def test_resumed_schedule_has_the_same_rates_to_the_bit(name, done):
    args = arguments(name)
    expected = advance(schedule(args, 60), 60)
    before, after = schedule(args, 60), schedule(args, 60)
    advance(before, done)
    saved = json.loads(json.dumps(before.optimizer.state_dict())), json.loads(json.dumps(before.state_dict()))
    after.optimizer.load_state_dict(saved[0])
    after.load_state_dict(saved[1])
    assert after.get_last_lr() == before.get_last_lr()
    assert advance(after, 60 - done) == expected[done:]


@given(st.integers(10, 79), st.integers(1, 60))
def test_branch_of_a_stable_run_decays_over_its_own_steps(done, n_decay):
    main = schedule(arguments("warmup_stable_decay", warmup_steps=10), 100)
    advance(main, done)
    branch = arguments("warmup_stable_decay", {"num_decay_steps": n_decay, "decay_type": "linear"}, warmup_steps=0)
    resumed = schedule(branch, done + n_decay)
    resumed.optimizer.load_state_dict(main.optimizer.state_dict())
    resumed.load_state_dict(main.state_dict())
    used = advance(resumed, n_decay)
    assert used == pytest.approx([6e-4 * (1 - step / n_decay) for step in range(n_decay)])
    assert resumed.get_last_lr() == [0, 0]


def test_resumed_schedule_uses_the_new_length_shape_and_peak():
    old = schedule(arguments("cosine_with_min_lr"), 100)
    advance(old, 50)
    new = arguments("linear", learning_rate=1e-3)
    resumed = schedule(new, 400)
    resumed.optimizer.load_state_dict(old.optimizer.state_dict())
    resumed.load_state_dict(old.state_dict())
    share = rates(new, 400)
    assert advance(resumed, 350) == [1e-3 * share(step) for step in range(50, 400)]
    assert {group["initial_lr"] for group in resumed.optimizer.param_groups} == {1e-3}
