"""`python -m gpt2small_hf prepare`: what it makes, finds again, resumes and refuses."""

import importlib
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from itertools import pairwise
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHARED_DATA, needs_shared_data, processes
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from training.test_resume import die_at_call
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gpt2small_hf.commands.prepare import main
from gpt2small_hf.data.corpus import batches
from gpt2small_hf.data.corpus import prepare as tokens
from gpt2small_hf.data.corpus.encoder import Encoder
from gpt2small_hf.data.corpus.metadata import read_meta
from gpt2small_hf.data.corpus.prepare import Progress
from gpt2small_hf.data.corpus.readers import Meter
from gpt2small_hf.data.corpus.sources import open_python_docs
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.data.tokenizer import load_tokenizer
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import read_json, sha256
from gpt2small_hf.runs.layout import DataFolder
from gpt2small_hf.runs.provenance import git_commit
from gpt2small_hf.runs.records import SplitCounts


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of thirty small documents; the working folder is its sibling."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(30):
        (folder / f"{n:02}.txt").write_text(f"Document {n} says that it's number {n}.\n" * (n + 1))
    return folder


def files_of(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but meta.json, which has a date."""
    return {
        str(path.relative_to(folder)): sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "meta.json"
    }


def texts_of(folder: Path, split: str) -> list[str]:
    """The documents of a split, decoded back."""
    meta = read_meta(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    stream = np.concatenate([np.fromfile(folder / name, meta.dtype) for name in meta.splits[split].files])
    offsets = np.fromfile(DataFolder(folder).documents(split), "<u8")
    assert offsets[-1] == len(stream) == meta.splits[split].tokens
    documents = [stream[start:end].tolist() for start, end in pairwise(offsets)]
    assert all(document.count(tokenizer.eos_token_id) == 1 for document in documents)
    assert all(document[-1] == tokenizer.eos_token_id for document in documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


def prepare(*words: str | Path) -> Path:
    """Run the command and return the folder it made."""
    main([str(word) for word in words])
    return Path(words[words.index("--output_dir") + 1])


# ---- what is made -----------------------------------------------------------------------------------------------


def test_every_document_is_in_one_split_with_one_end_of_text(text: Path):
    folder = prepare("--text", text, "--vocab_size", "300", "--validation_fraction", "0.1", "--output_dir", "set")
    given = [path.read_text() for path in sorted(text.iterdir())]
    train, validation = texts_of(folder, "train"), texts_of(folder, "validation")
    assert sorted(train + validation) == sorted(given)
    assert train == [document for document in given if document in train]
    assert 0 < sum(map(len, validation)) <= 0.1 * sum(map(len, given))
    assert read_meta(folder).held_out == "documents"


def test_meta_says_what_the_set_is_and_was_made_of(text: Path, capsys: pytest.CaptureFixture[str]):
    folder = prepare("--text", text / "0*.txt", "--vocab_size", "300", "--output_dir", "set")
    meta = read_meta(folder)
    train = meta.splits["train"]
    assert meta.dtype == "uint16"
    assert train.bytes == sum(len(document.encode()) for document in texts_of(folder, "train"))
    assert train.documents == len(texts_of(folder, "train")) == 10
    assert train.files == ["train-00000.bin"]
    assert train.max_id == np.fromfile(folder / "train-00000.bin", "<u2").max()
    assert meta.tokenizer.vocab_size == len(AutoTokenizer.from_pretrained(folder / "tokenizer")) == 290
    out, err = capsys.readouterr()
    assert "the text is enough for a tokenizer of 290 entries, not 300" in err
    assert meta.held_out == "tails"
    assert "fewer than 20 documents: validation is the end of each" in out
    assert meta.tokenizer.sha256 == sha256(folder / "tokenizer" / "tokenizer.json")
    first = text / "00.txt"
    source = {"file": str(first), "bytes": first.stat().st_size, "sha256": sha256(first)}
    assert meta.sources["train"][0].to_json() == source
    assert len(meta.fingerprint) == 64
    assert meta.made_by is not None
    assert meta.made_by.commit == git_commit()
    assert not DataFolder(folder).progress.exists()
    assert not DataFolder(folder).unfinished().root.exists()


def test_without_flags_it_reads_the_python_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    main([])
    out = capsys.readouterr().out
    folder = Path(re.search(r"^next: .*train --data_dir (\S+) --output_dir runs/\S+$", out, re.MULTILINE)[1])  # type: ignore[index]
    meta = read_meta(folder)
    assert folder.name == f"python-docs-{meta.fingerprint[:8]}"
    assert meta.tokenizer.vocab_size == 1024
    counts = meta.splits["train"]
    assert re.search(rf"^train +{counts.tokens:,} +{counts.documents:,} +{counts.bytes:,}  \S+\.bin$", out, re.M)
    main([])
    assert "is already prepared from the same inputs" in capsys.readouterr().out


def test_end_of_text_in_a_document_stays_text(text: Path):
    odd = text.parent / "odd.txt"
    odd.write_text("one<|endoftext|>two\nthree<|endoftext|>\n" * 9)
    folder = prepare("--text", odd, "--vocab_size", "300", "--validation_fraction", "0", "--output_dir", "set")
    assert texts_of(folder, "train") == [odd.read_text()]
    assert list(read_meta(folder).splits) == ["train"]
    assert read_meta(folder).held_out is None


def test_tokenizer_learns_from_train_documents_alone(text: Path):
    held = text.parent / "held.txt"
    held.write_text("zzzzqqqq " * 500)
    words = ("--text", text, "--validation_text", held, "--vocab_size", "400")
    folder = prepare(*words, "--output_dir", "set")
    assert texts_of(folder, "validation") == [held.read_text()]
    assert read_meta(folder).held_out == "files"
    assert len(texts_of(folder, "train")) == 30
    vocabulary = AutoTokenizer.from_pretrained(folder / "tokenizer").get_vocab()
    assert not [token for token in vocabulary if "zz" in token]


def test_large_corpus_is_sampled_evenly_for_the_tokenizer(text: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batches, "BATCH_CHARS", 100)
    monkeypatch.setattr(tokens, "TRAINING_SAMPLE_BYTES", 3000)
    args = tokens.PrepareArguments(text=[str(text)])
    sources = tokens.open_sources(args, None)["train"]
    holdout = tokens.Holdout(tokens.documents_of(sources), 0.05)
    sample = list(tokens.sample(sources, holdout))
    assert 2000 < sum(map(len, sample)) < 4000
    assert {re.findall(r"\d+", piece)[0] for piece in sample} >= {"12", "20", "29"}


def test_result_is_the_same_whatever_the_number_of_workers(text: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batches, "BATCH_CHARS", 200)
    made = [
        files_of(prepare("--text", text, "--vocab_size", "300", "--num_workers", n, "--output_dir", f"with{n}"))
        for n in ("1", "7")
    ]
    assert made[0] == made[1]


def test_batches_of_another_size_give_the_same_files(text: Path, monkeypatch: pytest.MonkeyPatch):
    one = prepare("--text", text, "--vocab_size", "300", "--output_dir", "one")
    monkeypatch.setattr(batches, "BATCH_CHARS", 50)
    two = prepare("--text", text, "--vocab_size", "300", "--output_dir", "two")
    assert files_of(one) == files_of(two)


@pytest.mark.slow
def test_large_vocabulary_of_another_kind_is_stored_in_four_bytes(text: Path):
    words = {word: n for n, word in enumerate(["<|endoftext|>", "<unk>", *map(str, range(70_000))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    Path("numbers.txt").write_text("7 69999 unknown  x\n1")
    words = ("--tokenizer", save(tokenizer, text.parent / "wide"), "--validation_fraction", "0")
    folder = prepare("--text", "numbers.txt", *words, "--output_dir", "set")
    assert read_meta(folder).dtype == "uint32"
    assert np.fromfile(folder / "train-00000.bin", "<u4").tolist() == [9, 70_001, 1, 1, 3, 0]
    assert TextDataset(folder, "train", 6)[0]["input_ids"].tolist() == [9, 70_001, 1, 1, 3, 0]

    Path("numbers.txt").write_text("7 <|endoftext|> 8")  # this kind of model knows the special token itself
    with pytest.raises(UsageError, match=r"gives 0, its end-of-text id, to something inside a document"):
        prepare("--text", "numbers.txt", *words, "--output_dir", "other")


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    tokenizer.save_pretrained(folder)
    return folder


def test_files_of_token_ids_keep_their_ids(text: Path, tiny_tokenizer):
    eos_id = tiny_tokenizer.eos_token_id
    ids = [5, 6, 7, eos_id, 8, 9, eos_id]
    save_file({"tokens": torch.tensor(ids, dtype=torch.uint16)}, text.parent / "ids.safetensors")
    folder = prepare(
        *("--text", text.parent / "ids.safetensors", "--tokenizer", save(tiny_tokenizer, text.parent / "tokenizer")),
        *("--validation_fraction", "0", "--output_dir", "set"),
    )
    assert np.fromfile(folder / "train-00000.bin", "<u2").tolist() == ids
    assert read_meta(folder).tokenizer.of_hub is False
    counts = read_meta(folder).splits["train"]
    assert (counts.documents, counts.tokens) == (2, 7)
    assert counts.bytes == len(tiny_tokenizer.decode([5, 6, 7, 8, 9]).encode())


# ---- made once --------------------------------------------------------------------------------------------------


def test_same_inputs_again_stop_at_once(text: Path, capsys: pytest.CaptureFixture[str]):
    words = ("--text", text, "--vocab_size", "300", "--output_dir", "set")
    folder = prepare(*words)
    before = (folder / "meta.json").stat().st_mtime_ns
    prepare(*words)
    assert "set is already prepared from the same inputs." in capsys.readouterr().out
    assert (folder / "meta.json").stat().st_mtime_ns == before


def test_other_inputs_are_refused_by_name_until_overwrite(text: Path):
    words = ("--text", text, "--vocab_size", "300", "--output_dir", "set")
    folder = prepare(*words)
    with pytest.raises(UsageError, match=r"differ in validation_fraction \(there 0\.05, now 0\.2\)\..*--overwrite"):
        prepare(*words, "--validation_fraction", "0.2")
    (text / "00.txt").write_text("changed")
    with pytest.raises(UsageError, match=rf"differ in text \({re.escape(str(text / '00.txt'))}\)\."):
        prepare(*words)
    prepare(*words, "--overwrite")
    assert "changed" in texts_of(folder, "train") + texts_of(folder, "validation")


def test_folder_that_is_something_else_is_never_replaced(text: Path):
    with pytest.raises(UsageError, match=r"text exists and is not a prepared set"):
        prepare("--text", text, "--output_dir", text, "--overwrite")
    assert len(list(text.iterdir())) == 30


def test_failed_overwrite_leaves_the_old_set(text: Path):
    words = ("--text", text, "--vocab_size", "300", "--output_dir", "set")
    folder = prepare(*words)
    before = files_of(folder)
    (text / "99.txt").write_bytes(b"bad \xff")
    with pytest.raises(UsageError, match=r"99\.txt is not UTF-8: byte 4"):
        prepare(*words, "--overwrite")
    assert files_of(folder) == before
    assert not DataFolder(folder).unfinished().root.exists()


# ---- stopped and resumed ----------------------------------------------------------------------------------------


def prepare_slowly(seconds_a_batch: float, words: tuple[str, ...]) -> None:
    """Prepare with small batches that take their time."""

    def slowly(batch, **how):
        time.sleep(seconds_a_batch)
        return batches.encode_batch(batch, **how)

    batches.BATCH_CHARS, tokens.BATCHES_PER_SAVE, tokens.encode_batch = 20_000, 3, slowly
    with Path("errors.txt").open("w", encoding="utf-8") as errors, redirect_stderr(errors):
        main([*words])


def start(*words: str, seconds_a_batch: float) -> BaseProcess:
    process = processes.Process(target=prepare_slowly, args=(seconds_a_batch, words))
    process.start()
    return process


def end(process: BaseProcess) -> int | None:
    process.join(60)
    return process.exitcode


@pytest.mark.slow
def test_killed_preparation_resumes_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert end(start("--num_workers", "2", "--output_dir", "whole", seconds_a_batch=0)) == 0

    half = DataFolder(tmp_path / "half")
    progress = half.unfinished().progress
    for stop_after in (3, 9):
        process = start("--num_workers", "2", "--output_dir", "half", seconds_a_batch=0.2)
        while not (progress.exists() and read_json(progress)["batches"] >= stop_after):
            assert process.is_alive(), "it ended before it could be killed"
            time.sleep(0.01)
        process.kill()
        assert end(process) == -signal.SIGKILL
        assert not half.root.exists()
        with pytest.raises(UsageError, match="half is not finished"):
            TextDataset(half.root, "train", 8)

    assert end(start("--num_workers", "1", "--output_dir", "half", seconds_a_batch=0)) == 0
    assert re.search(r"resuming \S*half\.partial after [\d,]+ tokens", Path("errors.txt").read_text())
    assert files_of(half.root) == files_of(tmp_path / "whole")


def test_unfinished_set_from_other_inputs_needs_overwrite(text: Path):
    unfinished = DataFolder(Path("set")).unfinished()
    unfinished.root.mkdir()
    unfinished.progress.write_text(json.dumps({"fingerprint": "another", "batch_chars": 1, "batches": 5, "splits": {}}))
    with pytest.raises(
        UsageError, match=r"set\.partial is an unfinished set from other inputs.*--overwrite to delete it"
    ):
        prepare("--text", text, "--vocab_size", "300", "--output_dir", "set")
    prepare("--text", text, "--vocab_size", "300", "--output_dir", "set", "--overwrite")
    assert len(texts_of(Path("set"), "train") + texts_of(Path("set"), "validation")) == 30


def test_foreign_partial_folder_is_refused(text: Path):
    Path("set.partial").mkdir()
    Path("set.partial", "precious").touch()
    with pytest.raises(UsageError, match=r"set\.partial exists and was not made by prepare"):
        prepare("--text", text, "--vocab_size", "300", "--output_dir", "set")
    assert Path("set.partial", "precious").exists()


def test_any_empty_folder_is_prepared_in_and_replaced_in(fixed_folder: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("Every effort moves you forward.\n" * 99)
    inode = fixed_folder.stat().st_ino
    for size in ("300", "290"):
        words = ("--text", text, "--validation_fraction", "0", "--vocab_size", size)
        expected = prepare(*words, "--output_dir", tmp_path / size)
        prepare(*words, "--output_dir", fixed_folder, "--overwrite")
        assert files_of(fixed_folder) == files_of(expected)
        prepare(*words, "--output_dir", fixed_folder)  # it is known again
    assert {path.name for path in fixed_folder.iterdir()} == {path.name for path in expected.iterdir()}
    assert fixed_folder.stat().st_ino == inode


def prepare_until(number: int, owner: str, name: str, words: list[str]) -> None:
    die_at_call(number, pathlib.Path if owner == "Path" else importlib.import_module(owner), name)
    main(words)


PREPARE_MOMENTS = {
    "before progress.json has its name": (1, "gpt2small_hf.runs.files", "replace_path"),
    "before the tokenizer has its name": (2, "gpt2small_hf.runs.files", "replace_path"),
    "before meta.json has its name": (3, "gpt2small_hf.runs.files", "replace_path"),
    "before the set has its name": (1, "gpt2small_hf.data.corpus.prepare", "replace_path"),
    "while the set that it replaces is removed": (1, "gpt2small_hf.data.corpus.prepare", "discard"),
    "between two files of the set": (3, "Path", "rename"),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["new", "link"])
@pytest.mark.parametrize("moment", PREPARE_MOMENTS)
def test_preparation_killed_at_any_moment_is_finished_by_the_same_command(text: Path, moment: str, place: str):
    words = ["--text", str(text), "--validation_fraction", "0.2", "--vocab_size", "300"]
    expected = files_of(prepare(*words, "--output_dir", "expected"))
    if place == "link":
        Path("real").mkdir()
        Path("set").symlink_to("real")
    words += ["--output_dir", "set", "--overwrite"]
    if "replaces" in moment:
        DataFolder(Path("set")).unfinished().root.mkdir()
        DataFolder(Path("set")).unfinished().progress.write_text('{"fingerprint": "another", "batch_chars": 1}')
    elif place == "link":
        prepare("--text", text, "--vocab_size", "290", "--output_dir", "set")
    process = processes.Process(target=prepare_until, args=(*PREPARE_MOMENTS[moment], words))
    process.start()
    process.join(120)
    assert process.exitcode == (0 if (moment, place) == ("between two files of the set", "new") else -signal.SIGKILL)
    assert files_of(prepare(*words)) == expected
    assert not DataFolder(Path("set")).unfinished().root.exists()


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "text", "--dataset", "a/b"], r"--text cannot be combined with --dataset"),
        (
            ["--validation_text", "text", "--validation_fraction", "0.1"],
            "--validation_text cannot be combined with --validation_fraction",
        ),
        (["--validation_fraction", "1"], r"--validation_fraction is 1\.0\. Give a number from 0 to below 1"),
        (["--vocab_size", "100"], r"--vocab_size is 100, .* give at least 257"),
        (["--num_workers", "0"], r"--num_workers is 0"),
        (["--text", "nowhere.txt"], r"nowhere\.txt does not exist"),
        (["--textt", "x"], r"--textt is not a flag. Did you mean --text\?"),
        (["--tokenizer", "nobody/nothing"], r"--tokenizer nobody/nothing does not exist"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(text: Path, words: list[str], message: str):
    with pytest.raises(UsageError, match=message) as raised:
        main([*words, "--output_dir", "set"])
    assert "\n" not in str(raised.value)
    assert not Path("set").exists()
    assert not Path("set.partial").exists()


def test_ids_beyond_the_model_are_refused(text: Path, tiny_tokenizer):
    tokenizer = save(tiny_tokenizer, text.parent / "tokenizer")
    with pytest.raises(UsageError, match=r"has token id \d+, too large for --vocab_size 100. Give at least \d+"):
        prepare("--text", text, "--tokenizer", tokenizer, "--vocab_size", "100", "--output_dir", "set")
    assert not Path("set.partial").exists()


def test_text_without_anything_to_hold_out_is_refused(text: Path):
    Path("tiny.txt").write_text("x")
    with pytest.raises(UsageError, match=r"the validation split is empty"):
        prepare("--text", "tiny.txt", "--output_dir", "set")


def test_command_ends_with_status_2_and_no_traceback(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "gpt2small_hf", "prepare", "--text", "nowhere.txt"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: nowhere\.txt does not exist\. .*\n", done.stderr)


# ---- real text --------------------------------------------------------------------------------------------------

GPT2 = SHARED_DATA / "tokenizer_gpt2"


def table_of_counts() -> list[tuple[str, int, int]]:
    """(file, bytes, tokens) of each pre-training text in the table of the data's README."""
    if not SHARED_DATA.is_dir():
        return []
    row = re.compile(r"^\| (pretrain/\S+) \|.*\| ([\d,]+) \| [\d,]+ (?:lines|rows) \| ([\d,]+) \|", re.MULTILINE)
    found = row.findall((SHARED_DATA / "README.md").read_text(encoding="utf-8"))
    return [(file, int(size.replace(",", "")), int(count.replace(",", ""))) for file, size, count in found]


@needs_shared_data
def test_token_counts_of_real_books_are_those_published_with_them(tmp_path: Path):
    table = table_of_counts()
    assert len(table) == 16
    folder = prepare(
        *("--text", *(SHARED_DATA / file for file, _, _ in table)),
        *("--tokenizer", GPT2, "--validation_fraction", "0", "--output_dir", tmp_path / "set"),
    )
    lengths = np.diff(np.fromfile(DataFolder(folder).documents("train"), "<u8")) - 1  # less the end of text
    documents = iter(lengths.tolist())
    for file, size, count in table:
        rows = len((SHARED_DATA / file).read_bytes().splitlines()) if file.endswith(".jsonl") else 1
        assert (SHARED_DATA / file).stat().st_size == size
        assert sum(next(documents) for _ in range(rows)) == count, file


@needs_shared_data
def test_golden_ids_of_gpt2_are_met(tmp_path: Path):
    tokenizer = load_tokenizer(str(GPT2))
    encoder = Encoder(tokenizer)
    for item in read_json(GPT2 / "golden_public.json"):
        assert tokenizer(item["text"])["input_ids"] == item["ids"]  # here alone the special token is parsed
        if tokenizer.eos_token not in item["text"]:
            assert encoder.encode([item["text"]])[0].tolist() == item["ids"]


# ---- memory -----------------------------------------------------------------------------------------------------


def peak_of(words: list[str], results: SimpleQueue) -> None:
    """Prepare, and report the most memory used, in MiB."""
    main(words)
    # Not ru_maxrss: Linux counts in it what the parent process had when it started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    results.put(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_text(tmp_path: Path):
    topics = b"".join("".join(map(str, d.blocks)).encode() for d in open_python_docs().documents())
    peaks = {}
    for megabytes in (5, 35):
        path = tmp_path / f"{megabytes}.txt"
        with path.open("wb") as file:
            while file.tell() < megabytes * 1_000_000:
                file.write(topics)
        folder = tmp_path / f"set{megabytes}"
        words = ["--text", str(path), "--vocab_size", "300", "--num_workers", "2", "--output_dir", str(folder)]
        results = processes.SimpleQueue()
        process = processes.Process(target=peak_of, args=(words, results))
        process.start()
        peaks[megabytes] = results.get()
        process.join()
        shutil.rmtree(folder)
    assert peaks[35] < peaks[5] + 25, peaks  # MiB; the text is 30 MB longer


# ---- progress ---------------------------------------------------------------------------------------------------


def test_progress_line_has_counts_speed_and_time_left():
    meters = [Meter(size=2_000_000, done=500_000), Meter(size=2_000_000)]
    progress = Progress(meters)
    progress.show([SplitCounts(tokens=1_000_000, documents=1, bytes=4_000_000)])  # where a stopped run had come
    meters[0].done = 1_500_000
    counts = SplitCounts(tokens=3_000_000, documents=1_234, bytes=12_000_000)
    assert progress.start is not None
    line = progress.line([counts], progress.start[0] + 50)
    assert line == "1,234 documents  12.0 MB  3,000,000 tokens  0.04M tok/s  38 %  2m05s left"


def test_progress_of_sources_of_unknown_size_has_no_time_left():
    meters = [Meter(size=10, done=5), Meter()]
    progress = Progress(meters)
    progress.show([SplitCounts(tokens=0, documents=0, bytes=0)])
    meters[1].done = 7
    assert progress.start is not None
    assert "left" not in progress.line([SplitCounts(tokens=5, documents=0, bytes=0)], progress.start[0] + 1)


def test_progress_without_a_terminal_is_quiet_at_first(capsys):
    progress = Progress([Meter(size=10)])
    with progress.live:
        for tokens in range(5):
            progress.show([SplitCounts(tokens=tokens, documents=0, bytes=0)])
        assert capsys.readouterr().err == ""
        progress.shown -= 60
        progress.show([SplitCounts(tokens=1_000, documents=0, bytes=0)])
    assert "1,000 tokens" in capsys.readouterr().err
