"""Write a report page for each run folder, and a table that compares several runs. Command: `report RUN …`.

Everything is read from the run's files. `charts.py` draws the charts, `tables.py` formats the tables.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2small_hf.evaluation.tasks import notes, results_of, tables
from gpt2small_hf.formatting import console_table, counted, escaped, markdown_table, number, one_line
from gpt2small_hf.invocation import command
from gpt2small_hf.report.benchmarks import benchmark_sections
from gpt2small_hf.report.charts import best, describe, draw_charts, new_skips, values
from gpt2small_hf.report.notes import NOTHING_HELD_OUT, kept_line, worse_line
from gpt2small_hf.resources import example_command
from gpt2small_hf.runs.files import atomic_write, read_json
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.results import MetricsRow, Sample

MAX_SAMPLED_STEPS = 8
"""Maximum number of rows in a table of samples over training."""
MAX_ANSWERS = 8
MAX_CHARACTERS = 90
"""Maximum length of a sample in a table."""


def write_reports(runs: Sequence[Run]) -> None:
    """Write and print the page of each run; print a comparison of several runs."""
    wrote = []
    for run in runs:
        charts = draw_charts(run.folder)
        with atomic_write(run.folder.report) as temporary:
            temporary.write_text(as_markdown(run, charts), encoding="utf-8")
        wrote.append(f"wrote {run.folder.report} and {counted(len(charts), 'chart')}")
        print(f"{as_text(run)}\n")
    if len(runs) > 1:
        header, rows = comparison_rows(runs)
        print(f"{console_table(header, rows, text=(0, len(header) - 1))}\n")
    print("\n".join(wrote))
    print(f"next: {next_command(runs[0])}")


# ---- contents of a page -------------------------------------------------------------------------------------------


def status(run: Run) -> str:
    """Return the progress of the run, as a sentence."""
    seen = "" if run.tokens is None else f", {run.tokens:,} tokens"
    if run.heldout is not None:
        kept = kept_line(run.heldout.step, run.step if run.heldout.last_step is None else run.heldout.last_step)
        return f"Finished: {run.step:,} steps{seen}." + (f" {kept}" if kept else "")
    wanted = run.resolved.trainer.max_steps
    of = f" of {wanted:,}" if wanted > 0 else ""
    so_far = f"the log ends at step {run.logged_step:,}{of}" if run.metrics else "no step was logged"
    if run.step > run.logged_step:
        so_far += f", the newest checkpoint is of step {run.step:,}"
    so_far += seen
    on = " If it no longer runs, run the same command to resume." if run.newest else ""
    return f"Not finished: {so_far}.{on}"


def facts(run: Run) -> list[list[str]]:
    """Return the name and value of each known fact about the run."""
    resolved, model, trainer = run.resolved, run.resolved.model, run.resolved.trainer
    made_by, device = resolved.made_by, resolved.device
    sizes = (
        f"{model.num_hidden_layers} layers, {model.hidden_size:,} wide, {model.num_attention_heads} heads, "
        f"context {model.max_position_embeddings:,}, vocabulary {model.vocab_size:,}, "
        f"head {'tied' if model.tie_word_embeddings else 'untied'}"
    )
    clip = trainer.max_grad_norm
    speed = {"tokens_per_second": "{:,.0f} tokens/s", "mfu": "MFU {:.1%}", "memory_gib": "{:.1f} GiB of memory"}
    usual = {name: run.usual(name) for name in speed}
    known = {
        "recipe": resolved.recipe_name,
        "model": sizes if run.n_parameters is None else f"{run.n_parameters:,} parameters: {sizes}",
        "base model": resolved.base.init_from if resolved.base else None,
        "data": f"{resolved.data.folder} (fingerprint {resolved.data.fingerprint[:12]})",
        "supervised": supervised(run),
        "held out": held_out(run),
        "LoRA": lora(run),
        "trained": trained_parameters(run),
        "training": f"learning rate {trainer.learning_rate:.1e}, {trainer.lr_scheduler_type}, "
        f"gradients {f'clipped to {clip:g}' if clip else 'not clipped'}, seed {trainer.seed}",
        "speed": ", ".join(speed[name].format(value) for name, value in usual.items() if value is not None),
        "device": f"{device.count} x {device.type} {device.name}",
        "command": made_by.command,
        "commit": made_by.commit,
        "started": made_by.date,
        "versions": ", ".join(f"{name} {version}" for name, version in made_by.versions.items()),
    }
    return [[name, value] for name, value in known.items() if value]


def supervised(run: Run) -> str | None:
    """Return the number of chats and the share of supervised tokens, as words; None of a run on text."""
    chat, counts = run.resolved.chat, run.resolved.data.train
    if chat is None or counts is None:
        return None
    return (
        f"{counts.supervised_share:.1%} of {counts.tokens:,} tokens in {counts.conversations:,} conversations "
        f"(loss on {chat.loss_on}, template {one_line(chat.template or 'of the tokenizer', 40)})"
    )


def lora(run: Run) -> str | None:
    """Return the settings of LoRA, as words; None of a run without."""
    given = run.resolved.run
    if given.lora_rank is None:
        return None
    alpha, dropout = given.lora_alpha or 2 * given.lora_rank, given.lora_dropout or 0
    settings = run.folder.adapter / "adapter_config.json"
    targets = read_json(settings)["target_modules"] if settings.is_file() else []
    layers = ", ".join(sorted({target.rpartition(".")[2] for target in targets})) or "all linear layers"
    merged = "; merged into the model's weights" if run.heldout is not None else ""
    return f"rank {given.lora_rank}, alpha {alpha:g}, dropout {dropout:g}, on {layers} of each block{merged}"


def trained_parameters(run: Run) -> str | None:
    """Return how many parameters of an adapted model were trained, as words; None of others, or if not recorded."""
    counts = run.resolved.parameters
    if not counts or counts.trained == counts.total:
        return None
    said = f"{counts.trained:,} of {counts.total:,} parameters ({counts.trained / counts.total:.1%})"
    if counts.adapter is None:  # earlier versions did not record them
        return f"{said}, those of the adapter included"
    rows = counts.trained - counts.adapter
    new = f", {rows:,} of new rows of the embeddings" if rows else ""
    return f"{said}: {counts.adapter:,} of the adapter{new}; the merged model has {counts.total - counts.trained:,}"


def prompts_line(run: Run, prompts: Sequence[str]) -> str | None:
    """State where these prompts of a run on chats are from, and whether it was trained on them; None of other runs."""
    if not run.resolved.chat:
        return None
    words = {
        "given": "The questions were given with the recipe or --prompts",
        "held-out chats": "The questions are from the held-out chats",
        "training chats": "The questions are from the training chats",
    }
    kind = run.resolved.prompts_from
    if kind == "training chats":
        return f"{words[kind]}."
    source = words.get(str(kind), "The source of the questions was not recorded")
    flags = run.resolved.prompts_in_training or []  # earlier versions did not record these either
    known = dict(zip(run.resolved.run.prompts, flags, strict=False))
    if not known.keys() >= set(prompts):
        return f"{source}; whether the training chats contain them was not recorded."
    n, found = len(prompts), sum(known[prompt] for prompt in prompts)
    contained = "none of them" if not found else "all of them" if found == n else f"{found:,} of {n:,}"
    return f"{source}; the training chats contain {contained}."


def held_out(run: Run) -> str | None:
    """Return what of the data is held out, as words; None if nothing is."""
    data = run.resolved.data
    if run.resolved.chat:
        separate = " of separate files" if data.sources.get("validation") else ""
        return f"{data.validation.conversations:,} conversations{separate}" if data.validation else None
    if (counts := data.splits.get("validation")) is None:
        return None
    n, tokens = counts.documents, f"{counts.tokens:,} tokens"
    kinds = {
        "tails": "the end of the document" if n == 1 else f"the ends of all {n:,} documents",
        "documents": "one whole document" if n == 1 else f"{n:,} whole documents",
        "files": "one document of separate files" if n == 1 else f"{n:,} documents of separate files",
    }
    words = kinds.get(data.held_out or "")  # earlier versions did not record it
    return f"{words} ({tokens})" if words else tokens


def problems(run: Run) -> list[str]:
    """Return symptoms and skipped steps, one sentence each."""
    found = [f"step {row.step:,}, {row.symptom}: {row.says}" for row in run.metrics if row.symptom]
    if skips := new_skips(run.train):
        kinds = sum((Counter(grown) for _, grown in skips), Counter[str]())
        counts = ", ".join(f"{n:,} {kind}" for kind, n in kinds.items())
        when = f"logged at step {skips[0][0]:,}" + (f" to {skips[-1][0]:,}" if len(skips) > 1 else "")
        found.append(f"{sum(kinds.values()):,} steps skipped ({counts}), {when}")
    return found


def evaluations(run: Run) -> str | None:
    """Return the best and the last evaluation during training, as a sentence; None if there was none."""
    held = [row for row in run.metrics if row.eval_loss is not None]
    if all(row.step == 0 for row in held):  # evaluated before training only
        return None
    found = best(values(held, "step"), values(held, "eval_loss"))
    if found is None:
        return None
    step, loss, last = *found, held[-1]
    if step == last.step:
        return f"During training, held-out loss was lowest at the last evaluation, step {step:,}: {loss:.3f}."
    at_last = f"at the last evaluation, step {last.step:,}: {last.eval_loss:.3f}"
    return f"During training, held-out loss was lowest at step {step:,}: {loss:.3f}; {at_last}."


@dataclass(frozen=True)
class SampleTable:
    """Samples after one prompt over training, each with its step and the held-out loss at that step."""

    prompt: str
    rows: list[list[str]]

    def as_text(self) -> str:
        """Return the table for the console."""
        return console_table(["step", "held-out loss", "sampled"], self.rows, text=(2,))


def sample_tables(samples: Sequence[Sample], metrics: Sequence[MetricsRow]) -> list[SampleTable]:
    """Return one table for each prompt, from the saved samples and the logged held-out losses."""
    by_prompt: dict[str, dict[int, str]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt, {})[sample.step] = sample.sampled
    held = [(row.step, row.eval_loss) for row in metrics if row.eval_loss is not None]
    return [
        SampleTable(
            one_line(prompt),
            [
                [f"{step:,}", latest_loss(held, step), one_line(texts[step], MAX_CHARACTERS)]
                for step in spaced_steps(list(texts))
            ],
        )
        for prompt, texts in by_prompt.items()
    ]


def spaced_steps(steps: Sequence[int], most: int = MAX_SAMPLED_STEPS) -> list[int]:
    """Return at most `most` steps, the first and the last among them, evenly spaced on a logarithmic scale."""
    steps = sorted(set(steps))
    if len(steps) <= most:
        return steps
    # Zero has no logarithm: where it is the first step, the scale starts at the second.
    begin = 1 if steps[0] == 0 else 0
    wanted = np.geomspace(steps[begin], steps[-1], most - begin)
    near = {min(steps[begin:], key=lambda step, to=target: abs(step - to)) for target in wanted}
    return sorted({steps[0], steps[-1], *near})


def latest_loss(held: Sequence[tuple[int, float]], step: int) -> str:
    """Return the last held-out loss up to a step, with the step it was measured at if that is an earlier one."""
    # The loss before training does not describe a trained model.
    before = [(at, loss) for at, loss in held if at <= step and (at > 0 or step == 0)]
    if not before:
        return number(None, "")
    at, loss = before[-1]
    return f"{loss:.3f}" if at == step else f"{loss:.3f} at {at:,}"


def comparison_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of runs. The last column names losses that are not comparable."""
    reference = next((run.measured_on for run in runs if run.measured), None)
    header = ["run", "held-out loss", "bits/byte", "steps", "tokens", "tokens/s", ""]
    rows = []
    for run in runs:
        after = run.heldout and run.heldout.after
        if run.heldout is None:
            note = "not finished"
        elif after is None:
            note = "nothing held out"
        else:
            note = "" if run.measured_on == reference else "measured on other rows"
        rows.append(
            [
                str(run.folder.root),
                number(after and after.loss_nats, ".3f"),
                number(after and after.bits_per_byte, ".3f"),
                f"{run.step:,}",
                number(run.tokens, ","),
                number(run.usual("tokens_per_second"), ",.0f"),
                note,
            ]
        )
    return header, rows


# ---- a page -----------------------------------------------------------------------------------------------------


def as_markdown(run: Run, charts: Sequence[Path]) -> str:
    """Return the page. Charts are linked relative to the run folder. Text of a model or a user is escaped."""
    parts = [f"# {escaped(run.name)}", escaped(status(run)), markdown_table(["", ""], facts(run), text=(0, 1))]
    parts.append("## Held-out loss")
    if run.heldout is not None:
        results = results_of(run.heldout)
        parts += [markdown_table(table[0], table[1:]) for table in tables(results)] or [NOTHING_HELD_OUT]
        parts.append(escaped(worse_line(run.heldout, run.train_loss_nats) or ""))
        parts += map(escaped, notes(results))
    parts.append(escaped(evaluations(run) or "There was no evaluation during training."))
    for section in benchmark_sections(run):
        parts.append(f"## {escaped(section.title)}")
        parts += [markdown_table(table[0], table[1:], text=(0, 1)) for table in section.tables]
        parts.append("\n".join(f"- {escaped(note)}" for note in section.notes))
    parts.append("## Charts")
    parts += [f"![{path.stem.replace('_', ' ')}]({path.relative_to(run.folder.root).as_posix()})" for path in charts]
    if not charts:
        parts.append("Nothing was logged yet.")
    parts.append("## Symptoms and skipped steps")
    parts.append("\n".join(f"- {escaped(problem)}" for problem in problems(run)) or "None.")
    if answers := run.answers[:MAX_ANSWERS]:
        parts.append("## Answers to held-out questions")
        cells = [[row.turns[-1], row.answer + ("" if row.ended else " …")] for row in answers]
        parts.append(markdown_table(["asked", "answered (sampled)"], cells, text=(0, 1)))
    parts.append("## Samples over training")
    parts.append(prompts_line(run, run.resolved.run.prompts) or "")
    for table in sample_tables(run.samples, run.metrics):
        parts.append(f"Prompt: {escaped(table.prompt)}")
        parts.append(fenced(table.as_text()))
    if not run.samples:
        parts.append("No samples were saved.")
    return "\n\n".join(part for part in parts if part) + "\n"


def fenced(text: str) -> str:
    """Return text as a Markdown code block, with a fence longer than any in the text."""
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", text))])
    return f"{fence}text\n{text}\n{fence}"


def as_text(run: Run) -> str:
    """Return the page for the console, without facts and charts."""
    parts = ["\n".join([run.name, describe(run.resolved), status(run)])]
    if run.heldout is not None:
        results = results_of(run.heldout)
        parts += [console_table(table[0], table[1:]) for table in tables(results)] or [NOTHING_HELD_OUT]
        parts.append(worse_line(run.heldout, run.train_loss_nats) or "")
        parts += notes(results)
    for section in benchmark_sections(run):
        parts += [section.title, *(console_table(table[0], table[1:], text=(0, 1)) for table in section.tables)]
        parts.append("\n".join(section.notes))
    lines = [evaluations(run) or "", *problems(run)]
    parts.append("\n".join(line for line in lines if line))
    parts += [f"{table.prompt} ▸\n{table.as_text()}" for table in sample_tables(run.samples, run.metrics)]
    return "\n\n".join(part for part in parts if part)


def next_command(run: Run) -> str:
    """Return a command to run next: generate text, or update the report if no model is saved."""
    model = run.folder.model if run.folder.model.is_dir() else run.newest
    if model is None:
        return command("report", str(run.folder.root))
    question = run.resolved.run.prompts[:1] if run.resolved.chat else []
    return example_command("use_from_hub.py", str(model), *question)
