"""`judge` with a real `transformers serve`, whose requests and replies are those of the API."""

import pytest
from judge.conftest import write_answers

from compat.published import chat_tokenizer, trained_model
from compat.test_serve import serving
from gpt2small_hf.judge.arguments import JudgeArguments, JudgementFolder
from gpt2small_hf.judge.judgement import judge
from gpt2small_hf.runs.files import read_jsonl

pytestmark = pytest.mark.slow

CONTEXT = 4096  # of a prompt whose tokens are little more than bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge") / "model"
    tokenizer = chat_tokenizer()
    tokenizer.model_max_length = CONTEXT
    model = trained_model(tokenizer)
    model.resize_position_embeddings(CONTEXT)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_every_call_is_answered_and_stored_and_scores_of_noise_are_marked(folder, without_package, tmp_path):
    """A tiny model writes no scores: all are counted as missing, and the controls fail."""
    answers = [write_answers(tmp_path / f"{label}.jsonl", label, 50, 3) for label in ("one", "two")]
    with serving(folder, without_package, tmp_path / "output.txt") as address:
        settings = JudgeArguments(str(folder), f"{address}/v1", runs=1, output=tmp_path / "judgement", timeout=120)
        scores = judge(answers, settings)
    calls = read_jsonl(JudgementFolder(settings.output).calls)[1:]
    assert len(calls) == 3
    for call in calls:
        assert call["reply"]
        assert call["error"] is None
        assert call["prompt_tokens"] > 500
        assert call["completion_tokens"] > 0
    assert scores.judge_versions
    assert [one.n_missing for one in scores.entries] == [3] * 5
    assert len(scores.failed_controls) == 3
    assert judge(answers, settings).questions == scores.questions  # the server is gone: no call is repeated
