"""The examples for several devices: accelerate's launcher and SkyPilot read every key of them as it is meant."""

import os
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from conftest import REPOSITORY, tiny_config, tiny_words
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.config.parser import FlagParser
from gpt2small_hf.config.trainer import TrainerSettings
from gpt2small_hf.runs.files import read_json
from gpt2small_hf.runs.layout import RunFolder

ACCELERATE = sorted((REPOSITORY / "examples" / "accelerate").glob("*.yaml"))
SKY = REPOSITORY / "examples" / "cloud" / "sky.yaml"


def head(path: Path) -> dict[str, str]:
    """The three comment lines that an example opens with."""
    lines = path.read_text(encoding="utf-8").splitlines()[:3]
    return {line[2:].partition(":")[0]: line.partition(":")[2].strip() for line in lines}


def commanded(path: Path) -> Namespace:
    """What `accelerate launch` makes of the example's own command."""
    words = shlex.split(head(path)["Command"])
    assert words[:2] == ["accelerate", "launch"]
    args = launch_command_parser().parse_args(words[2:])
    assert REPOSITORY / args.config_file == path
    assert (REPOSITORY / args.training_script).exists()
    return args


@pytest.mark.parametrize("path", [*ACCELERATE, SKY], ids=lambda path: path.name)
def test_example_config_starts_with_three_comment_lines(path):
    assert list(head(path)) == ["Shows", "Machine", "Command"]
    assert all(head(path).values())
    assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 120


def unknown_keys(config: ClusterConfig, args: Namespace) -> list[str]:
    """Keys of the nested sections that no launcher's flag answers to: accelerate ignores them silently."""
    sections = (config.fsdp_config, config.deepspeed_config)
    return [key for section in sections for key in section if not hasattr(args, key)]


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.name)
def test_accelerate_knows_every_key_and_every_word_of_the_command(path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    config = load_config_from_file(str(path))  # raises for unknown keys of the outer level
    assert unknown_keys(config, commanded(path)) == []
    assert config.num_processes == 8 * config.num_machines
    # Only the recipe sets these, so that the two cannot contradict each other.
    assert config.mixed_precision is None
    recipe = {action.dest for action in FlagParser(TrainerSettings)._actions}
    assert {*config.fsdp_config, *config.deepspeed_config} & recipe == set()


def test_key_unknown_to_accelerate_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    path = REPOSITORY / "examples" / "accelerate" / "fsdp2-8gpu.yaml"
    text = path.read_text(encoding="utf-8")
    (tmp_path / "inner.yaml").write_text(text.replace("fsdp_reshard_after_forward", "fsdp_reshard_after"))
    assert unknown_keys(load_config_from_file(str(tmp_path / "inner.yaml")), commanded(path)) == ["fsdp_reshard_after"]
    (tmp_path / "outer.yaml").write_text(text.replace("num_machines", "machines"))
    with pytest.raises(ValueError, match=r"unknown keys.*machines"):
        load_config_from_file(str(tmp_path / "outer.yaml"))


def environment(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables that accelerate's launcher would start each process with."""
    monkeypatch.chdir(REPOSITORY)
    args = commanded(REPOSITORY / "examples" / "accelerate" / name)
    args.main_process_port = 0  # any free one
    args, *_ = _validate_launch_command(args)
    args.deepspeed_fields_from_accelerate_config = ""
    return prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.name)
def test_the_launcher_leaves_precision_and_accumulation_to_the_recipe(path, monkeypatch):
    variables = environment(path.name, monkeypatch)
    assert variables["ACCELERATE_MIXED_PRECISION"] == "no"
    assert not {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING"} & variables.keys()


def test_the_shards_are_what_the_file_says_and_each_layer_is_one(monkeypatch):
    for name, value in environment("fsdp2-8gpu.yaml", monkeypatch).items():
        if name.startswith("FSDP_"):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    assert plugin.cpu_ram_efficient_loading is False
    assert plugin.activation_checkpointing is False
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    model = GPT2SmallForCausalLM(tiny_config())
    plugin.set_auto_wrap_policy(model)  # raises for a class that is not in the model
    assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == {type(layer) for layer in model.model.layers}


def test_two_nodes_share_sixteen_processes_and_rendezvous_at_the_first(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    args, *_ = _validate_launch_command(commanded(REPOSITORY / "examples" / "accelerate" / "two-nodes.yaml"))
    args.machine_rank = 1  # on the first, accelerate would look whether the port is free
    prepare_multi_gpu_env(args)
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", 1)
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("static", "10.0.0.1:29500")


def test_deepspeed_shards_gradients_and_optimizer_and_offloads_nothing(monkeypatch):
    variables = environment("deepspeed-zero2.yaml", monkeypatch)
    assert variables["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    assert variables["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "none"


# ---- the cloud ---------------------------------------------------------------------------------------------------


def sky_task() -> dict[str, Any]:
    return yaml.safe_load(SKY.read_text(encoding="utf-8"))


def test_cloud_example_requests_eight_gpus_and_a_bucket_and_has_no_secret():
    task = sky_task()
    assert set(task["resources"]["accelerators"].values()) == {8}
    ((mounted, bucket),) = task["file_mounts"].items()
    assert (bucket["mode"], "store" in bucket) == ("MOUNT_CACHED", True)
    assert f'--output_dir "{mounted}/' in task["run"]
    assert (REPOSITORY / task["envs"]["RECIPE"]).exists()
    assert not {"secrets", "HF_TOKEN", "WANDB_API_KEY"} & {*task, *task["envs"]}


def test_skypilot_accepts_the_cloud_example(tmp_path):
    pytest.importorskip("sky", reason="SkyPilot is large and pins its own dependencies: pip install skypilot")
    code = f"import sky; print(sorted(str(r.accelerators) for r in sky.Task.from_yaml({str(SKY)!r}).resources))"
    variables = {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}  # it writes into its user's home
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[\"{'A100': 8}\", \"{'A100-80GB': 8}\", \"{'H100': 8}\"]"


@pytest.mark.slow
def test_cloud_example_trains_locally_and_can_be_repeated(tmp_path):
    words, alone = iter(tiny_words(tmp_path, tmp_path)[1:]), ("--use_cpu", "--sample_all_checkpoints")
    settings = {word.removeprefix("--"): True if word in alone else next(words) for word in words}
    del settings["output_dir"]
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({**settings, "max_steps": 4}))
    for name in ("train.py", "examples"):  # the checkout, without the data that it may hold
        (tmp_path / name).symlink_to(REPOSITORY / name)
    job = sky_task()["run"].replace('"/runs/', f'"{tmp_path}/runs/')
    variables = {
        "RECIPE": str(tmp_path / "small.yaml"),
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        "ACCELERATE_USE_CPU": "true",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    said = []
    for _ in range(2):
        done = subprocess.run(
            ["bash", "-c", job], cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    run = RunFolder(tmp_path / "runs" / "small")
    assert run.finished
    assert read_json(run.resolved)["device"]["count"] == 2
    assert "wrote" in said[0]
    assert "is finished" in said[1]
