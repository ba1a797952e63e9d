"""`report`: a page for each run folder, and a comparison of runs."""

import html
import re
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2small_hf import GPT2SmallForCausalLM, cli
from gpt2small_hf.commands.report import main
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.tasks import notes, results_of, tables
from gpt2small_hf.formatting import console_table
from gpt2small_hf.report.page import comparison_rows, latest_loss, problems, sample_tables, spaced_steps, status
from gpt2small_hf.runs.files import append_jsonl, read_json, read_jsonl, write_json, write_jsonl
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.results import HeldOut
from report.test_notes import cells, rendered


@pytest.fixture
def run(tiny_run, tmp_path):
    """A copy of a real run without a report, which tests may change."""
    shutil.copytree(tiny_run.root, tmp_path / "runs" / "short", ignore=shutil.ignore_patterns("report.md"))
    return RunFolder(tmp_path / "runs" / "short")


SETTINGS = {"max_new_tokens": 26, "temperature": 0.8, "top_k": 50, "seed": 0}


def sample(step, prompt, sampled):
    return {"step": step, "prompt": prompt, "greedy": "", "sampled": sampled, "settings": SETTINGS}


def blocks(page):
    """Return the code blocks of a rendered page."""
    return [html.unescape(block) for block in re.findall(r"<code.*?>(.*?)</code>", rendered(page), flags=re.DOTALL)]


def test_page_of_a_run_contains_results_and_charts(run, capsys):
    assert cli.main(["report", str(run.root)]) == 0
    page = run.report.read_text(encoding="utf-8")
    ((_, *results),) = tables(results_of(HeldOut.load(run.heldout)))
    for line in results:
        assert [cell.strip() for cell in line] in cells(page)
    shown = capsys.readouterr().out
    assert all(cell in shown for line in results for cell in line)
    (line,) = notes(results_of(HeldOut.load(run.heldout)))
    assert line in shown
    assert line in page
    pictures = re.findall(r'<img src="(.+?)"', rendered(page))
    assert {"charts/loss.png", "charts/grad_norm.png", "charts/learning_rate.png"} <= set(pictures)
    assert all((run.root / picture).is_file() for picture in pictures)
    assert "Finished: 20 steps" in page
    said = {name: value for name, value, *_ in (line for line in cells(page) if len(line) == 2)}
    model = GPT2SmallForCausalLM.from_pretrained(run.model)
    assert said["model"].startswith(f"{model.num_parameters():,} parameters: 2 layers, 16 wide")
    assert said["command"] == read_json(run.resolved)["made_by"]["command"]
    assert f"wrote {run.report} and {len(pictures)} charts\n" in shown
    assert shown.endswith(f"next: python examples/use_from_hub.py {run.model}\n")


def test_page_contains_samples_over_training(run, capsys):
    write_jsonl(
        run.samples,
        [
            *(sample(step, "Once", f" text {step}") for step in range(0, 21, 2)),
            *(sample(step, "Then\nlater", f"\n\ttext {step}") for step in (0, 20)),
        ],
    )
    main([str(run.root)])
    page, shown = run.report.read_text(encoding="utf-8"), capsys.readouterr().out
    once, then = (block.splitlines() for block in blocks(page))
    assert "Prompt: Then⏎later" in page
    assert [line.split()[0] for line in then] == ["step", "0", "20"]
    assert then[2].endswith("  ⏎␉text 20")
    losses = {row["step"]: row["eval_loss"] for row in read_jsonl(run.metrics) if "eval_loss" in row}
    assert once[1].split()[:2] == ["0", f"{losses[0]:.3f}"]
    assert once[-1].split()[:2] == ["20", f"{losses[20]:.3f}"]
    assert 6 <= len(once) - 1 <= 8
    assert all(line in shown for line in (*once, *then))


def test_completions_replace_missing_samples(run):
    run.samples.unlink(missing_ok=True)
    (table,) = sample_tables(Run(run).samples, Run(run).metrics)
    assert table.prompt == "Once the fox"
    assert [line[0] for line in table.rows] == ["20"]


def test_text_of_models_and_users_is_escaped(run, tmp_path):
    nasty = "<b>x</b> ```` | *y* [z](http://a) $1$\n# heading\n```\x1b[2J"
    write_jsonl(run.samples, [sample(0, nasty, nasty)])
    append_jsonl(run.metrics, {"step": 20, "symptom": "plateau", "says": nasty})
    other = run.root.rename(tmp_path / "runs" / "_a_ <i>*b*")
    main([str(other)])
    page = (other / "report.md").read_text(encoding="utf-8")
    assert not re.search(r"<(b|i|em|strong|a)\b", rendered(page))
    assert "\x1b" not in page
    assert len(re.findall("<h1>", rendered(page))) == 1
    (block,) = blocks(page)
    assert block.splitlines()[1].endswith("<b>x</b> ```` | *y* [z](http://a) $1$⏎# heading⏎```␛[2J")


def test_unreadable_newest_checkpoint_is_ignored(run):
    run.heldout.unlink()
    before = status(Run(run))
    assert Run(run).newest == run.checkpoints / "checkpoint-20"
    intact = (run.checkpoints / "checkpoint-20" / "trainer_state.json").read_text()
    for name, files in (
        ("checkpoint-9000", {}),
        ("checkpoint-9001", {"trainer_state.json": ""}),
        ("checkpoint-9002", {"trainer_state.json": "{}"}),
        ("checkpoint-9003", {"trainer_state.json": intact, "guard_0.json": "["}),
    ):
        (run.checkpoints / name).mkdir()
        for file, content in files.items():
            (run.checkpoints / name / file).write_text(content)
        assert Run(run).newest == run.checkpoints / "checkpoint-20"
        assert Run(run).step == 20
        assert status(Run(run)) == before


def test_page_of_an_unfinished_run_names_the_checkpoint_to_use(run, capsys):
    run.heldout.unlink()
    run.completions.unlink()
    run.samples.unlink(missing_ok=True)
    shutil.rmtree(run.model)
    main([str(run.root)])
    page, shown = run.report.read_text(encoding="utf-8"), capsys.readouterr().out
    assert "Not finished: the log ends at step 20 of 20" in page
    assert r"If it no longer runs, run the same command to resume." in page
    assert "No samples were saved." in page
    assert shown.endswith(f"next: python examples/use_from_hub.py {run.checkpoints / 'checkpoint-20'}\n")


def test_tokens_are_counted_to_the_last_step(run):
    append_jsonl(run.metrics, {"step": 23, "train_loss": 3.9, "num_input_tokens_seen": 2944})
    assert status(Run(run)) == "Finished: 23 steps, 2,944 tokens."


def test_page_of_a_run_without_a_log(run, capsys):
    for path in run.root.iterdir():
        if path != run.resolved:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    main([str(run.root)])
    assert "Not finished: no step was logged." in run.report.read_text(encoding="utf-8")
    assert f"next: gpt2small report {run.root}" in capsys.readouterr().out
    write_jsonl(run.metrics, [{"step": 0, "eval_loss": 7.0}])
    main([str(run.root)])
    assert f"wrote {run.report} and 1 chart\n" in capsys.readouterr().out


def test_symptoms_and_skipped_steps_are_listed(run):
    symptom = {"step": 20, "symptom": "plateau", "says": "Loss has not fallen for 10 steps; raise the learning rate."}
    append_jsonl(run.metrics, symptom)
    for step, spikes in [(21, 2), (22, 5)]:
        append_jsonl(run.metrics, {"step": step, "loss": 3.0, "skipped_loss": 1, "skipped_spike": spikes})
    told = problems(Run(run))
    assert told == [
        f"step 20, plateau: {symptom['says']}",
        "6 steps skipped (1 loss, 5 spike), logged at step 21 to 22",
    ]
    main([str(run.root)])
    assert all(f"<li>{line}</li>" in rendered(run.report.read_text(encoding="utf-8")) for line in told)


def test_losses_on_other_rows_are_marked_as_not_comparable(run, tmp_path):
    names = ("twin", "other text", "fewer rows", "unfinished")
    for name in names:
        shutil.copytree(run.root, tmp_path / "runs" / name)
    twin, text, fewer, unfinished = (RunFolder(tmp_path / "runs" / name) for name in names)
    resolved, heldout = read_json(run.resolved), read_json(run.heldout)
    write_json(text.resolved, resolved | {"data": resolved["data"] | {"fingerprint": "0" * 64}})
    write_json(fewer.heldout, heldout | {"rows": heldout["rows"] | {"rows": 1}})
    unfinished.heldout.unlink()
    speed = {"num_input_tokens_seen": 2560, "tokens_per_second": 1234.4}
    write_jsonl(twin.metrics, [{"step": 20, "loss": 3.0, **speed}])
    header, rows = comparison_rows([Run(r) for r in (unfinished, run, twin, text, fewer)])
    assert [line[0] for line in rows] == [str(r.root) for r in (unfinished, run, twin, text, fewer)]
    assert [line[-1] for line in rows] == ["not finished", "", "", *["measured on other rows"] * 2]
    after = [f"{heldout['after']['loss']:.3f}", f"{heldout['after']['bits_per_byte']:.3f}"]
    assert [line[1:3] for line in rows] == [["–", "–"], *[after] * 4]
    assert rows[2][3:6] == ["20", "2,560", "1,234"]
    assert header[3:6] == ["steps", "tokens", "tokens/s"]


@pytest.mark.slow
def test_comparison_is_printed_for_several_runs_only(run, tmp_path, capsys):
    main([str(run.root)])
    assert "bits/byte  steps" not in capsys.readouterr().out
    shutil.copytree(run.root, tmp_path / "runs" / "twin")
    main([str(run.root), str(tmp_path / "runs" / "twin")])
    shown = capsys.readouterr().out
    assert console_table(*comparison_rows([Run(run), Run(RunFolder(tmp_path / "runs" / "twin"))]), text=(0, 6)) in shown


@pytest.mark.parametrize(("name", "message"), [("nothing/here", "does not exist"), (".", "is not a run folder")])
def test_report_of_another_folder_is_refused_before_anything_is_written(run, tmp_path, name, message):
    with pytest.raises(UsageError, match=message):
        main([str(run.root), str(tmp_path / name)])
    assert not run.report.exists()


def test_error_of_a_damaged_log_names_the_file(run):
    run.metrics.write_text('{"step": 1}\n{"step": \n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"metrics\.jsonl, line \d+, is not JSON"):
        main([str(run.root)])


def test_help_names_the_file_written(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    assert "Write report.md into each run folder" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_report_is_reproducible(run):
    main([str(run.root)])
    first = {path.name: path.read_bytes() for path in [run.report, *run.chart("loss").parent.iterdir()]}
    main([str(run.root)])
    assert first == {path.name: path.read_bytes() for path in [run.report, *run.chart("loss").parent.iterdir()]}


@given(steps=st.lists(st.integers(0, 10**6), min_size=1, max_size=60), most=st.integers(3, 9))
def test_spaced_steps_include_the_first_and_the_last(steps, most):
    chosen = spaced_steps(steps, most)
    assert chosen == sorted(set(chosen) & set(steps))
    assert len(chosen) <= most
    assert (chosen[0], chosen[-1]) == (min(steps), max(steps))


def test_spaced_steps_are_even_on_a_logarithmic_scale():
    assert spaced_steps(range(0, 100_001, 1000)) == [0, 1000, 2000, 5000, 10_000, 22_000, 46_000, 100_000]
    assert spaced_steps([5, 3, 3]) == [3, 5]


def test_loss_of_a_sample_is_the_last_one_measured_before_it():
    held = [(0, 6.9357), (100, 5.5)]
    assert [latest_loss(held, step) for step in (0, 60, 100, 250)] == ["6.936", "–", "5.500", "5.500 at 100"]
    assert latest_loss([], 10) == "–"


def test_status_of_a_run_by_epochs_has_no_total_of_steps(run):
    resolved = read_json(run.resolved)
    write_json(run.resolved, resolved | {"trainer": resolved["trainer"] | {"max_steps": -1}})
    run.heldout.unlink()
    assert "ends at step 20." in status(Run(run)).replace(", 2,560 tokens", "")
