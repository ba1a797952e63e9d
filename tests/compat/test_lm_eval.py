"""lm-evaluation-harness: its command on the published folder, and the same numbers worked out by hand."""

import json
import math
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compat.published import CONTEXT
from gpt2small_hf.commands.evaluate import main
from gpt2small_hf.evaluation.items import TaskItems

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow

# What the installed command `lm_eval` does, in a process that cannot import our package.
COMMAND = "sys.argv[0] = 'lm_eval'\nfrom lm_eval.__main__ import cli_evaluate\nsys.exit(cli_evaluate())"
QUESTIONS = [
    {
        "question": f"What did the {who} {verb}? The {who} {past} the",
        "choices": ["river", "stone", "moon"],
        "answer": n % 3,
    }
    for n, (who, verb, past) in enumerate(
        (who, verb, past) for who in ("fox", "dog", "hare") for verb, past in (("see", "saw"), ("meet", "met"))
    )
]
TEXT = "The fox saw the river and the crow. The hare met the stone. " * 20
TASKS = {
    "our_choices": """
task: our_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
""",
    "our_text": """
task: our_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
}


@pytest.fixture(scope="module")
def results(published, without_package, tmp_path_factory):
    """What the command wrote: results, and each question's scores."""
    place = tmp_path_factory.mktemp("lm_eval")
    for task, rows in (("our_choices", QUESTIONS), ("our_text", [{"text": TEXT}])):
        (place / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (place / f"{task}.yaml").write_text(TASKS[task].replace("FILE", str(place / f"{task}.jsonl")))
    words = ("--model", "hf", "--model_args", f"pretrained={published},trust_remote_code=True")
    words += ("--include_path", str(place), "--tasks", ",".join(TASKS), "--device", "cpu", "--batch_size", "4")
    done = subprocess.run(
        **without_package(COMMAND, *words, "--output_path", str(place / "out"), "--log_samples"), capture_output=True
    )
    assert done.returncode == 0, done.stderr
    (summary,) = (place / "out").rglob("results_*.json")
    (samples,) = (place / "out").rglob("samples_our_choices_*.jsonl")
    return json.loads(summary.read_text())["results"], [json.loads(line) for line in samples.read_text().splitlines()]


@pytest.fixture(scope="module")
def score(published):
    """Log-probabilities of the last `count` of some tokens, given those before."""
    model = AutoModelForCausalLM.from_pretrained(published).eval()

    @torch.no_grad()
    def of(tokens, count):
        logits = model(torch.tensor([tokens[:-1]])).logits[0, -count:]
        return logits.log_softmax(-1)[torch.arange(count), torch.tensor(tokens[-count:])].tolist()

    return of


def test_multiple_choice_equals_a_hand_computation(results, score, published):
    summary, samples = results
    tokenizer = AutoTokenizer.from_pretrained(published)
    right = 0
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        question = QUESTIONS[sample["doc_id"]]
        by_hand = []
        for choice in question["choices"]:
            whole = tokenizer(f"{question['question']} {choice}").input_ids
            by_hand.append(sum(score(whole, len(whole) - len(tokenizer(question["question"]).input_ids))))
        theirs = [float(answer[0]) for answer in sample["filtered_resps"]]
        assert theirs == pytest.approx(by_hand, abs=1e-4)
        right += by_hand.index(max(by_hand)) == question["answer"]
    assert 0 < right < len(QUESTIONS)
    assert summary["our_choices"]["acc,none"] == pytest.approx(right / len(QUESTIONS))


def test_bits_per_byte_of_a_text_longer_than_the_context_equal_a_hand_computation(results, score, published):
    summary, _ = results
    tokenizer = AutoTokenizer.from_pretrained(published)
    stream = [tokenizer.bos_token_id, *tokenizer(TEXT).input_ids]
    assert len(stream) > 2 * CONTEXT
    # Every token once, after at most a context's worth of others: whole windows, and a last one that reaches back.
    total = 0.0
    for begin in range(1, len(stream), CONTEXT):
        end = min(begin + CONTEXT, len(stream))
        total += sum(score(stream[max(0, end - CONTEXT - 1) : end], end - begin))
    bits_per_byte = -total / math.log(2) / len(TEXT.encode())
    print(f"{bits_per_byte} bits a byte by hand, {summary['our_text']['bits_per_byte,none']} by lm_eval")
    assert summary["our_text"]["bits_per_byte,none"] == pytest.approx(bits_per_byte, rel=1e-5)
    words = len(TEXT.split()) + 1  # it counts an empty word after the last space
    assert summary["our_text"]["word_perplexity,none"] == pytest.approx(math.exp(-total / words), rel=1e-4)


def test_evaluate_gives_the_scores_of_the_command(published, without_package, tmp_path):
    """The command runs the published code without our package on the tasks that `evaluate` wrote."""
    questions = tmp_path / "questions"
    (questions / "pairs").mkdir(parents=True)
    rows = [{"query": row["question"], "choices": row["choices"], "gold": row["answer"]} for row in QUESTIONS]
    ends = [{"context": row["question"], "continuation": row["choices"][0]} for row in QUESTIONS]
    pairs = [
        {"sentence_good": f"The {one} saw the stone.", "sentence_bad": f"The {one} saw stone the."}
        for one in ("fox", "dog", "hare")
    ]
    for name, found in (("choices", rows), ("ends", ends), ("pairs/order", pairs)):
        (questions / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    place = tmp_path / "evaluation"
    main([str(published), "--task_data", str(questions), "--output_dir", str(place), "--device", "cpu"])
    names = ("choices", "ends", "pairs_order")
    words = ("--model", "hf", "--model_args", f"pretrained={published},trust_remote_code=True", "--device", "cpu")
    words += ("--include_path", str(place / "tasks"), "--tasks", ",".join(names), "--batch_size", "32")
    done = subprocess.run(
        **without_package(COMMAND, *words, "--output_path", str(tmp_path / "out"), "--log_samples"), capture_output=True
    )
    assert done.returncode == 0, done.stderr
    (summary,) = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(summary.read_text())["results"]
    for name in names:
        (path,) = (place / "items").rglob(f"{name}.jsonl")
        items = TaskItems.load(path)
        (samples,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        logged = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        for item, sample in zip(items.items, logged, strict=True):
            expected = [float(answer[0][0]) for answer in sample["resps"]]
            assert item.log_likelihoods == pytest.approx(expected, abs=1e-5)
        measures = items.measures()
        assert measures["accuracy"].values.mean() == pytest.approx(theirs[name]["acc,none"], abs=1e-6)
        if "accuracy_norm" in measures and "acc_norm,none" in theirs[name]:
            assert measures["accuracy_norm"].values.mean() == pytest.approx(theirs[name]["acc_norm,none"], abs=1e-6)


def test_generate_until_writes_within_a_short_context(tiny_run):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(tiny_run.model), trust_remote_code=True, device="cpu", batch_size=1)
    asked = {"until": ["\n"], "max_gen_toks": 4, "do_sample": False}
    requests = [Instance("generate_until", {}, ("Once the fox saw the river " * n, asked), 0) for n in (1, 20)]
    texts = model.generate_until(requests)
    assert len(texts) == 2
    assert all(len(model.tok_encode(text)) <= 4 for text in texts)
