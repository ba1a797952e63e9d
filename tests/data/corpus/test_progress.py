"""The progress line of `data/corpus/progress.py`."""

from gpt2small_hf.data.corpus.progress import Progress
from gpt2small_hf.data.corpus.readers import Meter
from gpt2small_hf.data.corpus.shards import SplitCounts


def test_the_line_says_what_is_done_how_fast_and_how_long_it_will_take():
    meters = [Meter(size=2_000_000, done=500_000), Meter(size=2_000_000)]
    progress = Progress(meters)
    progress.show([SplitCounts(tokens=1_000_000, documents=1, bytes=4_000_000)])  # where a stopped run had come
    meters[0].done = 1_500_000
    line = progress.line(
        [SplitCounts(tokens=3_000_000, documents=1_234, bytes=12_000_000)], 3_000_000, progress.began + 50
    )
    assert line == "1,234 documents  12.0 MB  3,000,000 tokens  0.04M tok/s  38 %  2m05s left"


def test_without_known_sizes_no_time_is_promised():
    meters = [Meter(size=10, done=5), Meter()]
    progress = Progress(meters)
    progress.show([SplitCounts()])
    meters[1].done = 7
    assert "left" not in progress.line([SplitCounts(tokens=5)], 5, progress.began + 1)


def test_off_a_terminal_it_is_quiet_at_first(capsys):
    with Progress([Meter(size=10)]) as progress:
        for tokens in range(5):
            progress.show([SplitCounts(tokens=tokens)])
        assert capsys.readouterr().err == ""
        progress.shown -= 60
        progress.show([SplitCounts(tokens=1_000)])
    assert "1,000 tokens" in capsys.readouterr().err
