"""`report`: run folders → a page for each, by `report/page.py`."""

from __future__ import annotations

from pathlib import Path

from gpt2small_hf.config.parser import FlagParser
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.reader import Run


def main(words: list[str]) -> None:
    """Run `report`."""
    parser = FlagParser(
        prog=command("report"),
        description="Write report.md into each run folder: settings, results, charts, symptoms and samples. "
        "Several runs are also compared. Unfinished runs are accepted.",
    )
    parser.add_argument("RUN", nargs="+", type=Path, help="A run folder.")
    (args,) = parser.fill(words)
    runs = [Run(RunFolder(root)) for root in args.RUN]
    from gpt2small_hf.report.page import write_reports

    write_reports(runs)
