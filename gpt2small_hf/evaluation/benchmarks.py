"""Benchmarks on lm-evaluation-harness (extra `eval`): its tasks by name, and questions in local files.

Only log-likelihoods and responses are taken from the harness; `items.py` computes the measures. Local files become YAML
tasks that the harness's own command runs too: `lm_eval --include_path OUTPUT/tasks --tasks NAME`.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.items import Choices, Item, Metrics, Text, hash_items
from gpt2small_hf.runs.files import atomic_write

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PRESETS = {"small": ["blimp", "lambada_openai", "arc_easy", "hellaswag", "piqa"]}
"""Tasks with some signal at 124 M parameters (docs/evaluation.md)."""
INSTALL = 'Benchmarks need lm-evaluation-harness, which is not installed: pip install "lm_eval[hf]>=0.4.13".'

CHOICE = "output_type: multiple_choice\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
FORMS = {
    ("sentence_good", "sentence_bad"): "output_type: multiple_choice\nmetric_list: [{metric: acc}]\n"
    'doc_to_text: ""\ndoc_to_target: 0\ndoc_to_choice: "{{[sentence_good, sentence_bad]}}"\n',
    ("goal", "sol1", "sol2", "label"): CHOICE + 'doc_to_text: "Question: {{goal}}\\nAnswer:"\n'
    'doc_to_target: label\ndoc_to_choice: "{{[sol1, sol2]}}"\n',
    ("context", "continuation"): 'output_type: loglikelihood\ndoc_to_text: "{{context}}"\n'
    'doc_to_target: " {{continuation}}"\nmetric_list: [{metric: perplexity}, {metric: acc}]\n',
    ("query", "choices", "gold"): CHOICE + "doc_to_choice: choices\ndoc_to_target: gold\n",
    ("text",): 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    "metric_list: [{metric: bits_per_byte}]\n",
    ("question", "answer"): 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
    "metric_list: [{metric: exact_match, ignore_case: true, ignore_punctuation: true}]\n"
    'generation_kwargs: {until: ["\\n\\n"], do_sample: false}\n',
}
"""Keys of the objects in a .jsonl file → the fields of its task, as the harness names them."""


@dataclass(frozen=True)
class Benchmarks:
    """Tasks of the harness."""

    tasks: dict[str, Any]
    groups: dict[str, list[str]]
    """Names of groups → names of their tasks."""


# ---- local files -----------------------------------------------------------------------------------------------------


def local_names(folder: Path) -> dict[str, list[Path]]:
    """Return the tasks of a folder: each .jsonl file is one, each folder of them a group.

    Raises: UsageError if there is none.
    """
    found = {_task_name(file.stem): [file] for file in sorted(folder.glob("*.jsonl")) if _form(file)}
    for inner in sorted(one for one in folder.iterdir() if one.is_dir()):
        if files := [file for file in sorted(inner.glob("*.jsonl")) if _form(file)]:
            found[inner.name] = files
    if not found:
        known = "; ".join(", ".join(keys) for keys in FORMS)
        raise UsageError(f"--task_data {folder} has no .jsonl file with the keys of a task. Known keys: {known}.")
    return found


def write_tasks(names: dict[str, list[Path]], output: Path) -> None:
    """Write a YAML task for each file and a group for each folder.

    Raises: UsageError naming the first line of a file that is not an item of its task.
    """
    output.mkdir(parents=True, exist_ok=True)
    for name, files in names.items():
        leaves = {name: files[0]} if files[0].parent.name != name else {f"{name}_{file.stem}": file for file in files}
        for leaf, file in leaves.items():
            form = _form(file)
            assert form is not None
            _check_lines(file, form)
            form_fields = FORMS[form] + (_query_text(file) if form[0] == "query" else "")
            data = json.dumps(str(file.resolve()))
            _write(
                output / f"{leaf}.yaml",
                f"task: {leaf}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
                f"test_split: test\nnum_fewshot: 0\n{form_fields}",
            )
        if leaves.keys() != {name}:
            members = ", ".join(leaves)
            _write(
                output / f"{name}.yaml",
                f"group: {name}\ntask: [{members}]\naggregate_metric_list: [{{metric: acc, weight_by_size: true}}]\n",
            )


def _task_name(stem: str) -> str:
    return stem.removesuffix("_val").removesuffix("_test")


def _form(file: Path) -> tuple[str, ...] | None:
    """Return the keys of FORMS that a file's first object has; None if it has none of them."""
    first = _first(file)
    return next((keys for keys in FORMS if first.keys() >= set(keys)), None)


def _first(file: Path) -> dict[str, Any]:
    with file.open(encoding="utf-8") as lines:
        line = next(islice(lines, 1), "")
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _check_lines(file: Path, keys: tuple[str, ...]) -> None:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                item = json.loads(line)
                is_whole = all(item[key] is not None for key in keys)
                is_gold = "choices" not in keys or item["gold"] in range(len(item["choices"]))
            except (ValueError, LookupError, TypeError):
                is_whole, is_gold = False, True
            if not (is_whole and is_gold):
                allowed = f"it has {', '.join(keys)}" if is_gold else "gold is the number of one of its choices, from 0"
                raise UsageError(f"{file}, line {number} is not an item like those before it: {allowed}. Correct it.")


def _query_text(file: Path) -> str:
    """A query that begins with "Question:" is asked for an answer, as ARC's; others are continued, as HellaSwag's."""
    is_question = str(_first(file)["query"]).startswith("Question:")
    return 'doc_to_text: "{{query}}\\nAnswer:"\n' if is_question else "doc_to_text: query\n"


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


# ---- the harness -----------------------------------------------------------------------------------------------------


def check_installed() -> str:
    """Return the harness's version. Raises: UsageError with the pip line if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lm_eval")
    except PackageNotFoundError:
        raise UsageError(INSTALL) from None


def _harness(module: str) -> Any:
    """Import a module of lm-evaluation-harness, whose types differ from those of its documentation."""
    return importlib.import_module(f"lm_eval.{module}")


def load_benchmarks(names: Sequence[str], local: Path | None, num_fewshot: int | None) -> Benchmarks:
    """Load tasks by name, those in the folder of YAML files `local` first.

    Raises: UsageError for an unknown task, and for data that cannot be loaded.
    """
    import datasets

    TaskManager = _harness("tasks").TaskManager
    templates = _harness("utils").env
    # The harness compiles a task's template again for each item, which takes longer than a small model's forward pass.
    if "from_string" not in vars(templates):
        templates.from_string = cache(templates.from_string)

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    known = {path.stem for path in local.glob("*.yaml")} if local else set[str]()
    # Reading the harness's own list takes seconds.
    manager = TaskManager(include_path=local, include_defaults=not known.issuperset(names))
    for name in names:
        if not Path(name).is_file() and not manager.match_tasks([name]):
            raise UsageError(
                f"--tasks {name} is not a task of lm-evaluation-harness or of --task_data. "
                "`lm_eval ls tasks` lists its tasks."
            )
    try:
        loaded = manager.load(list(names))
    except (OSError, ConnectionError) as error:
        why = str(error).splitlines()[0]
        raise UsageError(
            f"the data of {', '.join(names)} cannot be loaded: {why} Check the network, or give --task_data."
        ) from None
    for task in loaded["tasks"].values():
        if num_fewshot is not None:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)  # the harness's default
    groups = {name: leaves for name, leaves in loaded["group_map"].items() if name in names}
    return Benchmarks(loaded["tasks"], groups)


class ContextTooShortError(UsageError):
    """An answer is longer than a model's context."""


def wrap_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    started: Callable[[int], None],
    advance: Callable[[int], None],
) -> Any:
    """Return the model as the harness takes it.

    Args:
        model: a causal language model.
        tokenizer: of the model.
        batch_size: rows of a forward pass.
        started: called with the number of requests of a task.
        advance: called with the number of rows after each forward pass.
    """

    class Model(_harness("models.huggingface").HFLM):
        @property
        def max_gen_toks(self) -> int:  # the harness's 256 can be more than the context
            return min(256, self.max_length // 2)

        def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> Any:
            longest = max(len(answer) for _, _, answer in requests)
            if longest > self.max_length:
                raise ContextTooShortError(
                    f"it has an answer of {longest} tokens, more than the model's context of {self.max_length}."
                )
            started(len(requests))
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

        def _model_call(self, inps: Any, *args: Any, **kwargs: Any) -> Any:
            logits = super()._model_call(inps, *args, **kwargs)
            advance(len(inps))
            return logits

    # The harness truncates what is longer than the context; transformers would warn of it.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    if model.generation_config is not None:
        model.generation_config.max_new_tokens = None  # it would take precedence over the task's limit
    return Model(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, add_bos_token=False)


def run_benchmark(
    task: Any, model: Any, *, limit: int | None = None, chat_template: bool = False
) -> tuple[list[Item], str]:
    """Measure a model, from `wrap_model`, on the items of a task. No global random state is used.

    Returns: the items, and the hash of their prompts and answers.
    """
    name = task.config.task
    with redirect_stderr(io.StringIO()):  # the harness's progress bars
        found = _harness("evaluator").evaluate(
            model,
            {"tasks": {name: task}, "groups": {}},
            limit=limit,
            bootstrap_iters=0,
            apply_chat_template=chat_template,
        )
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    kind = task.OUTPUT_TYPE
    items = [_item(sample, kind) for sample in samples]
    return items, hash_items([[sample["arguments"], sample["target"]] for sample in samples])


def _item(sample: dict[str, Any], kind: str) -> Item:
    number, responses = sample["doc_id"], [response[0] for response in sample["resps"]]
    if kind in ("multiple_choice", "loglikelihood"):
        answers = [arguments[1] for arguments in sample["arguments"]]
        found = [float(response[0]) for response in responses]
        is_single = kind == "loglikelihood"
        return Choices(
            id=number,
            log_likelihoods=[one if math.isfinite(one) else None for one in found],
            n_bytes=[len(answer.encode()) for answer in answers],
            n_characters=[len(answer) for answer in answers],
            gold=0 if is_single else int(sample["target"]),
            is_greedy=bool(responses[0][1]) if is_single else None,
        )
    if kind == "loglikelihood_rolling":
        nats = -float(responses[0])
        n_bytes = float(len(sample["target"].encode()))
        return Text(id=number, nats=nats if math.isfinite(nats) else None, n_bytes=n_bytes)
    metrics = {name: float(sample[name]) for name in sample["metrics"]}
    return Metrics(id=number, metrics=metrics, response=str(responses[0]))
