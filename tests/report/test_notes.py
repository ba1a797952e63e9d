"""Tables are rounded once, aligned and escaped."""

import html
import re

import pytest
from conftest import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from gpt2small_hf.evaluation.tasks import notes, results_of, tables
from gpt2small_hf.formatting import console_table, escaped, markdown_table, one_line
from gpt2small_hf.report.notes import worse_line
from gpt2small_hf.runs.files import read_json
from gpt2small_hf.runs.results import HeldOut

MEASURES = {"loss": 2.5, "perplexity": 12.18, "bits_per_byte": 1.2}
OLD = read_json(REPOSITORY / "tests" / "runs" / "old_run" / "text" / "evaluation" / "heldout.json")


def overlap_line(heldout):
    """Return the note below the table, if there is one."""
    return next(iter(notes(results_of(heldout))), None)


def heldout_with(**results):
    """Return results of a run on text with these values."""
    rows = {**OLD["rows"], **results.pop("rows", {})}
    return HeldOut.from_json({"rows": rows, "made_by": OLD["made_by"], **results}, "heldout.json:")


def heldout_rows(heldout):
    """Return header and rows of the table of held-out losses."""
    (table,) = tables(results_of(heldout))
    return table[0], table[1:]


def rendered(markdown):
    """Return Markdown rendered as HTML, as on GitHub."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown)


def cells(markdown):
    """Return the text of each cell of a rendered table, by row."""
    lines = re.findall(r"<tr>(.*?)</tr>", rendered(markdown), flags=re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)] for line in lines]


def test_the_held_out_table_rounds_once_and_aligns():
    heldout = {
        "before": {"loss": 6.93147, "perplexity": 1024.0, "bits_per_byte": 3.3333},
        "after": MEASURES,
        "new_text": {"share": 0.4, "loss": 2.75, "perplexity": 15.64, "bits_per_byte": 1.3},
    }
    lines = console_table(*heldout_rows(heldout_with(**heldout))).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["before", "training", "6.931", "1,024.0", "3.333"]
    assert lines[3].split()[:5] == ["on", "the", "40%", "outside", "13-token"]
    assert "the 12 tokens before it" in str(overlap_line(heldout_with(**heldout)))
    recorded = {**heldout["new_text"], "overlap_tokens": 8, "searched_tokens": 5000}
    assert "outside 8-token overlaps" in console_table(*heldout_rows(heldout_with(**heldout | {"new_text": recorded})))
    said = str(overlap_line(heldout_with(new_text=recorded)))
    assert "the 7 tokens before it" in said
    assert "5,000 tokens" in said


def test_table_without_overlaps_has_no_row_for_them():
    assert len(heldout_rows(heldout_with(after=MEASURES, new_text=None))[1]) == 1
    assert overlap_line(heldout_with(after=MEASURES, new_text=None)) is None


@pytest.mark.parametrize(("value", "shown"), [(999_999.94, "999,999.9"), (1.2e272, ">1,000,000"), (None, ">1,000,000")])
def test_perplexity_above_a_million_is_shown_as_that(value, shown):
    assert heldout_rows(heldout_with(after=MEASURES | {"perplexity": value}))[1][0][2] == shown


def test_worse_line_names_both_losses_only_if_the_loss_rose():
    better, worse = MEASURES | {"loss": 2.4}, MEASURES | {"loss": 133.0}
    assert worse_line(heldout_with(before=MEASURES, after=better), None) is None
    assert worse_line(heldout_with(before=MEASURES, after=MEASURES), None) is None
    line = worse_line(heldout_with(before=MEASURES, after=worse), 134.0)
    assert line is not None
    assert "2.500" in line
    assert "133.000" in line
    assert "--learning_rate" in line


@pytest.mark.parametrize(("conversations", "data"), [(None, "more text"), (20, "more chats")])
def test_worse_line_advises_less_training_if_the_training_loss_fell(conversations, data):
    results = {"before": MEASURES, "after": MEASURES | {"loss": 2.6}, "rows": {"conversations": conversations}}
    line = str(worse_line(heldout_with(**results), 0.8))
    assert "0.800" in line
    assert "fewer epochs" in line
    assert data in line
    assert "--learning_rate" not in line
    assert "--learning_rate" in str(worse_line(heldout_with(**results), 2.55))


@pytest.mark.parametrize(("conversations", "after", "is_worse"), [(3, 2.6, False), (3, 133.0, True), (10, 2.6, True)])
def test_worse_line_on_few_held_out_chats_is_of_divergence_only(conversations, after, is_worse):
    rows, measured = {"conversations": conversations}, {"before": MEASURES, "after": MEASURES | {"loss": after}}
    assert (worse_line(heldout_with(rows=rows, **measured), None) is not None) == is_worse


def test_console_and_markdown_show_the_same_cells():
    header, rows = heldout_rows(heldout_with(before=MEASURES, after=MEASURES))
    assert cells(markdown_table(header, rows)) == [header, *rows]
    assert "| :--- | ---: | ---: | ---: |" in markdown_table(header, rows)


@given(text=st.text() | st.text(alphabet="\\`*_[]()<>#|~$&-!a \n:;x1."))
def test_markdown_shows_any_text_as_it_is(text):
    words = f"says {one_line(text)} so"
    assert html.unescape(rendered(escaped(words))) == f"<p>{words}</p>\n"
    assert cells(markdown_table(["a", "b"], [["1", words]]))[1] == ["1", words]


@given(text=st.text(), width=st.integers(1, 30))
def test_any_text_fits_on_one_printable_line(text, width):
    line = one_line(text, width)
    assert len(line) == min(len(text), width)
    assert line.isprintable()


def test_newlines_stay_visible():
    assert one_line("if x:\n\treturn\x1b[31m\u2028") == "if x:⏎␉return␛[31m·"
    assert one_line("a long sentence", 8) == "a long …"
