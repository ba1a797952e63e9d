"""What people look at: the table's words and the chart's file."""

from gpt2small_hf.report.charts import draw_loss
from gpt2small_hf.report.tables import console_table, heldout_rows
from gpt2small_hf.runs import append_jsonl


def test_the_held_out_table_rounds_once_and_aligns():
    heldout = {
        "before": {"loss": 6.93147, "perplexity": 1024.0, "bits_per_byte": 3.3333},
        "after": {"loss": 2.5, "perplexity": 12.18, "bits_per_byte": 1.2},
        "new_text": {"share": 0.4, "loss": 2.75, "perplexity": 15.64, "bits_per_byte": 1.3},
    }
    lines = console_table(*heldout_rows(heldout)).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["before", "training", "6.931", "1,024.0", "3.333"]
    assert lines[3].split()[:3] == ["on", "the", "40%"]


def test_without_repeats_there_is_no_row_for_them():
    heldout = {"after": {"loss": 2.5, "perplexity": 12.18, "bits_per_byte": 1.2}, "new_text": None}
    assert len(heldout_rows(heldout)[1]) == 1


def test_a_chart_is_drawn_from_the_metrics_of_a_run(tiny_run, tmp_path):
    draw_loss(tiny_run.metrics, tmp_path / "loss.png", title="a run", unigram=5.0)
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_a_chart_bears_a_loss_that_was_not_finite(tmp_path):
    for step, loss in enumerate([3.0, float("nan"), 2.0]):
        append_jsonl(tmp_path / "metrics.jsonl", {"step": step, "loss": loss})
    draw_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", title="a run")
    assert (tmp_path / "loss.png").exists()
