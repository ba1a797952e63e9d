"""The settings, data and device of a run → its record, `resolved.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from gpt2small_hf.config.resolve import RunConfig
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.row_dataset import RowDataset
from gpt2small_hf.runs.files import finite
from gpt2small_hf.runs.provenance import made_by, processor_name
from gpt2small_hf.runs.records import ParameterCounts, Resolved
from gpt2small_hf.training.inputs import RunInputs


def rows_per_step(config: RunConfig, n_processes: int) -> int:
    """Return the training rows of one optimizer step, over all processes."""
    return config.trainer.per_device_train_batch_size * config.trainer.gradient_accumulation_steps * n_processes


def tokens_per_step(config: RunConfig, rows: RowDataset, n_processes: int) -> int:
    """Return the training tokens of one optimizer step; of chats, their mean."""
    return round(rows_per_step(config, n_processes) * rows.tokens_per_row)


def prompts_in_training(prompts: list[str], rows: RowDataset) -> list[bool] | None:
    """Return for each prompt whether it is also a user's turn in the training chats; None of a run on text."""
    if not isinstance(rows, ChatDataset):
        return None
    turns = (turn["content"].strip() for chat in rows.chats for turn in chat.messages if turn["role"] == "user")
    found = {prompt.strip() for prompt in prompts}.intersection(turns)  # holds prompts alone, not all turns
    return [prompt.strip() in found for prompt in prompts]


def describe_run(config: RunConfig, inputs: RunInputs, arguments: TrainingArguments) -> Resolved:
    """Return all settings of the run, as `resolved.json` contains them."""
    device = arguments.device
    chat = config.chat
    values = {
        "run": _plain(vars(config.run)),
        "prompts_from": inputs.prompts_from,
        "prompts_in_training": prompts_in_training(config.run.prompts or [], inputs.rows),
        "chat": _plain(vars(chat)) if chat.chat_data else None,
        "data": inputs.data,
        "base": inputs.base,
        "model": inputs.config.to_diff_dict(),
        "trainer": _plain(arguments.to_dict()),
        "rows_per_step": rows_per_step(config, arguments.world_size),
        "device": {
            "type": device.type,
            "name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
            "count": arguments.world_size,
            "threads": torch.get_num_threads(),
        },
        "made_by": made_by([config.recipe]).to_json(),
    }
    # As it will be read again, by an earlier or later version of this code too.
    return Resolved.from_json(json.loads(json.dumps(finite(values))), "the run's settings:")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def count_parameters(model: Any) -> ParameterCounts:
    """Count the parameters of a model: all, the trained ones and those of an adapter."""
    trained = model.num_parameters(only_trainable=True)
    adapter = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    return ParameterCounts(total=model.num_parameters(), trained=trained, adapter=adapter)
