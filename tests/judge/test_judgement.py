"""`judge` against a judge on loopback: results, faults, resuming, and input that is refused before any call."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from gpt2small_hf.commands.judge import main
from gpt2small_hf.errors import UsageError
from gpt2small_hf.judge.arguments import KEY_VARIABLE, JudgementFolder
from gpt2small_hf.judge.endpoint import MAX_ATTEMPTS, EndpointError
from gpt2small_hf.judge.judgement import judge
from gpt2small_hf.judge.records import MODEL, Scores
from gpt2small_hf.runs.files import read_jsonl
from judge.conftest import write_answers
from judge.server import fair

SECRET = "sk-test-0123456789abcdefghij"


def calls_of(settings) -> list[dict]:
    return read_jsonl(JudgementFolder(settings.output).calls)[1:]


def files_of(settings) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in settings.output.iterdir()}


def test_judgement_orders_models_by_quality_and_passes_its_controls(answers, serve, settings, capsys):
    server = serve()
    flags = settings(server, runs=3, price_in=1.0, price_out=10.0, baseline="middle")
    scores = judge(answers, flags)
    assert len(server.requests) == 36 == scores.n_calls
    printed = capsys.readouterr().out
    assert printed.index("36 calls") < printed.index("95 % interval") < printed.index("mean rank")
    assert [one.label for one in sorted(scores.of_kind(MODEL), key=lambda one: one.rank)] == [
        "strong",
        "middle",
        "weak",
    ]
    assert [one.verdict for one in scores.of_kind(MODEL)] == ["worse", None, "better"]
    assert {one.name: one.is_passed for one in scores.controls} == dict.fromkeys(
        ("repeated model", "reference answers", "shuffled answers"), True
    )
    assert scores.judge_versions == ["judge-2026-11 fp_1"]
    assert scores.cost == (scores.prompt_tokens + 10 * scores.completion_tokens) / 1e6 > 0
    assert Scores.load(JudgementFolder(flags.output).scores).to_json() == {**scores.to_json(), "schema_version": 1}
    table = JudgementFolder(flags.output).table.read_text(encoding="utf-8").splitlines()[2:8]
    assert [line.split("|")[1].strip() for line in table[2:5]] == ["strong", "middle", "weak"]  # by test loss
    assert "4 of 5" in table[2]


def test_every_call_is_stored_as_it_was(answers, serve, settings):
    server = serve(faults=["500", None])
    flags = settings(server)
    judge(answers, flags)
    calls = calls_of(flags)
    assert [call["attempts"] for call in calls] == [2, *[1] * 23]
    assert sorted(call["prompt"] for call in calls) == sorted(server.prompts[1:])
    assert {(call["run"], call["question"]) for call in calls} == {(run, at) for run in (0, 1) for at in range(12)}
    for call in calls:
        assert sorted(call["order"]) == sorted(calls[0]["order"])
        assert set(json.loads(call["reply"])) == set("ABCDEF")
        assert (call["model"], call["seed"], call["is_structured"]) == ("judge-2026-11", call["run"], True)
        assert call["prompt_tokens"] == len(call["prompt"]) // 4
    # Each entry is in each place equally often: 24 calls are four Latin squares of six.
    places = Counter((label, place) for call in calls for place, label in enumerate(call["order"]))
    assert set(places.values()) == {4}


@pytest.mark.parametrize("fault", ["429", "500", "503", "timeout", "closed", "half body", "short body"])
def test_temporary_failures_are_repeated(answers, serve, settings, fault):
    flags = settings(serve(faults=[None, fault, fault]), runs=1, concurrency=1)
    scores = judge(answers, flags)
    assert [call["attempts"] for call in calls_of(flags)] == [1, 3, *[1] * 10]
    assert sum(one.n_missing for one in scores.entries) == 0


@pytest.mark.parametrize(
    ("fault", "missing"), [("prose", 0), ("strings", 0), ("half reply", 6), ("few", 5), ("duplicate", 1), ("empty", 6)]
)
def test_invalid_scores_are_excluded_and_counted(answers, serve, settings, fault, missing):
    scores = judge(answers, settings(serve(faults=[fault]), runs=1))
    assert sum(one.n_missing for one in scores.entries) == missing
    valid = [score for one in scores.questions for found in one.scores.values() for score in found if score is not None]
    assert len(valid) == 12 * 6 - missing
    for one in scores.entries:
        given = [question.scores[one.label][0] for question in scores.questions]
        given = [score for score in given if score is not None]
        assert one.mean == pytest.approx(sum(given) / len(given))


def test_fields_that_the_endpoint_lacks_are_left_out_after_one_call(answers, serve, settings):
    server = serve(without=["response_format", "seed"])
    flags = settings(server)
    judge(answers, flags)
    assert ["response_format" in body or "seed" in body for body in server.requests] == [True, True, *[False] * 24]
    assert {(call["is_structured"], call["seed"]) for call in calls_of(flags)} == {(False, None)}


def test_refused_call_is_excluded_and_not_repeated(answers, serve, settings):
    server = serve(faults=[None, "refused"])
    flags = settings(server, concurrency=1)
    scores = judge(answers, flags)
    assert scores.n_refused == 1
    assert [one.n_missing for one in scores.entries] == [1] * 6
    judge(answers, flags)
    assert len(server.requests) == 24


def test_failing_endpoint_stops_and_the_same_command_resumes(answers, serve, settings):
    server = serve(faults=[*[None] * 5, *["503"] * MAX_ATTEMPTS])
    flags = settings(server, concurrency=1)
    with pytest.raises(EndpointError, match="503"):
        judge(answers, flags)
    assert len(calls_of(flags)) == 5
    assert len(server.requests) == 5 + MAX_ATTEMPTS
    with JudgementFolder(flags.output).calls.open("a", encoding="utf-8") as file:
        file.write('{"run": 0, "question": 7, "reply": "torn')
    judge(answers, flags)
    assert len(server.requests) == 24 + MAX_ATTEMPTS
    assert len(set(server.prompts)) == len(calls_of(flags)) == 24


def test_more_runs_extend_a_judgement(answers, serve, settings):
    server = serve()
    judge(answers, settings(server, runs=1))
    scores = judge(answers, settings(server, runs=3))
    assert (len(server.requests), scores.n_calls) == (36, 36)
    assert judge(answers, settings(server, runs=1)).n_calls == 12
    assert len(server.requests) == 36


def test_dry_run_makes_no_call_and_no_file(answers, serve, settings, capsys):
    server = serve()
    assert judge(answers, settings(server, dry_run=True, price_in=2.0, price_out=0.0)) is None
    printed = capsys.readouterr().out
    assert (len(server.requests), settings().output.exists()) == (0, False)
    assert "24 calls" in printed
    assert '"question": "What is 0?"' in printed
    assert "± 28.3 points" in printed


@pytest.mark.slow
def test_killed_judgement_resumes_without_repeating_a_call(answers, serve, settings):
    server = serve(seconds=0.03)
    flags = settings(server, runs=4)
    words = [*map(str, answers), "--judge_model", "judge", "--base_url", server.url, "--runs", "4"]
    words += ["--output", str(flags.output), "--concurrency", "2"]
    code = "import sys; sys.argv[0] = 'gpt2small'; from gpt2small_hf.cli import main; main(['judge', *sys.argv[1:]])"
    for kill_after in (5, 15, 30):
        process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.DEVNULL)
        while len(server.requests) < kill_after and process.poll() is None:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    stored = {call["prompt"] for call in calls_of(flags)}
    n_before = len(server.requests)
    assert 20 < len(stored) < 48
    scores = judge(answers, flags)
    later = server.prompts[n_before:]
    assert not stored & set(later)
    assert len(stored) + len(later) == 48 == scores.n_calls
    assert len({(call["run"], call["question"]) for call in calls_of(flags)}) == 48
    # Only calls under way at a kill, two at a time, were made again.
    assert len(server.prompts) - 48 <= 3 * 2
    undisturbed = judge(answers, settings(server, runs=4, output=flags.output.with_name("other")))
    assert undisturbed.questions == scores.questions


# ---- the key --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [[None] * 3, ["401"], ["500"] * MAX_ATTEMPTS, [None, "refused"]])
def test_key_is_sent_and_never_written(answers, serve, settings, monkeypatch, capsys, faults):
    """Also not where the endpoint repeats it in an error."""
    server = serve(faults=faults, judge=lambda task, noise: fair(task, noise))
    flags = settings(server, concurrency=1, runs=1)
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    error = ""
    try:
        judge(answers, flags)
    except (UsageError, EndpointError) as found:
        error = str(found)
        assert "[API key]" in error
    assert server.keys == {f"Bearer {SECRET}"}
    captured = capsys.readouterr()
    for text in (error, captured.out, captured.err, *map(bytes.decode, files_of(flags).values())):
        assert SECRET not in text


def test_hosted_endpoint_needs_a_key(answers, settings, tmp_path):
    with pytest.raises(UsageError, match=KEY_VARIABLE):
        main([*map(str, answers), "--judge_model", "gpt", "--output", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


def test_key_of_other_characters_is_not_printed(settings, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "sk-\nsecret-ä")
    with pytest.raises(UsageError) as found:
        settings().api_key()
    assert "secret" not in str(found.value)


# ---- refused before any call ----------------------------------------------------------------------------------------


def test_unreachable_endpoint_is_refused_and_leaves_no_calls(answers, settings):
    with pytest.raises(UsageError, match="cannot be reached"):
        judge(answers, settings(base_url="http://127.0.0.1:9/v1"))
    assert not JudgementFolder(settings().output).calls.exists()


def test_unknown_judge_is_refused_at_the_first_call(answers, serve, settings):
    server = serve(without=["model"])
    with pytest.raises(EndpointError, match="--judge_model"):
        judge(answers, settings(server))
    assert calls_of(settings(server)) == []


@pytest.mark.parametrize(
    ("label", "how", "words"),
    [
        ("weak", {}, "label 'weak' occurs 2 times"),
        ("other", {"of": " really"}, "other questions"),
        ("other", {"n": 11}, "other questions"),
        ("JUDGE", {}, "is also judged"),
        ("weak (repeated)", {}, "label of a control|that of a control"),
    ],
)
def test_answers_that_cannot_be_compared_are_refused(answers, serve, settings, tmp_path, label, how, words):
    server = serve()
    with pytest.raises(UsageError, match=words):
        judge([*answers, write_answers(tmp_path / "more.jsonl", label, 50, **how)], settings(server))
    assert server.requests == []


def test_one_file_missing_files_and_empty_files_are_refused(answers, settings, tmp_path):
    for paths, words in ((answers[:1], "1 file"), ([*answers, tmp_path / "none"], "is not a file")):
        with pytest.raises(UsageError, match=words):
            judge(paths, settings())
    answers[1].write_text(answers[1].read_text().splitlines(keepends=True)[0])
    with pytest.raises(UsageError, match="has no answers"):
        judge(answers, settings())


def test_judge_with_the_id_of_a_model_is_refused(answers, settings):
    with pytest.raises(UsageError, match="is also judged"):
        judge(answers, settings(judge_model="runs/Weak"))


@pytest.mark.parametrize(
    "change",
    [{"judge_model": "other"}, {"seed": 1}, {"limit": 3}, {"no_controls": True}, {"temperature": 0.5}],
    ids=lambda change: next(iter(change)),
)
def test_folder_of_another_judgement_is_refused_and_unchanged(answers, serve, settings, change):
    server = serve()
    judge(answers, settings(server, runs=1))
    before = files_of(settings())
    with pytest.raises(UsageError, match="Choose another folder"):
        judge(answers, settings(server, runs=1, **change))
    assert (len(server.requests), files_of(settings())) == (12, before)


def test_folder_of_other_answers_or_files_is_refused(answers, serve, settings, tmp_path):
    server = serve()
    judge(answers, settings(server, runs=1))
    answers[0].write_text(answers[0].read_text().replace("w quality", "w  quality"))
    with pytest.raises(UsageError, match="other answers of the same labels"):
        judge(answers, settings(server, runs=1))
    with pytest.raises(UsageError, match="has other files"):
        judge(answers, settings(server, output=tmp_path))
    assert len(server.requests) == 12


@pytest.mark.parametrize(
    "change",
    [
        *({"base_url": url} for url in ("localhost:8000", "ftp://a/v1", "http://", "http://a:port/v1")),
        *({"base_url": url} for url in ("http://user:word@a/v1", "http://a/v1?key=word")),
        *({name: 0} for name in ("runs", "limit", "concurrency")),
        *({name: -1} for name in ("seed", "price_in", "timeout", "backoff", "temperature")),
        {"price_in": 1.0},
    ],
    ids=str,
)
def test_invalid_settings_name_the_flag(settings, change):
    with pytest.raises(UsageError, match=f"--{next(iter(change))}") as found:
        settings(**change)
    assert "word" not in str(found.value).replace("password", "")


def test_unknown_baseline_is_refused(answers, settings):
    with pytest.raises(UsageError, match="Labels: weak, middle, strong"):
        judge(answers, settings(baseline="best"))


def test_command_needs_no_torch(answers, serve, settings):
    server = serve()
    code = (
        "import sys; sys.argv[0] = 'gpt2small'; from gpt2small_hf.cli import main; main(['judge', *sys.argv[1:]]); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    words = [*map(str, answers), "--judge_model", "judge", "--base_url", server.url, "--runs", "1"]
    words += ["--output", str(settings().output)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "table.md" in done.stdout.splitlines()[-2]
    assert done.stdout.splitlines()[-1].endswith(f"--output {settings().output} --runs 3 (two more runs)")
