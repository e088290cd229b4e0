"""Evaluation: the numbers by hand, the sampling it promises, and the random state it leaves alone."""

import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.toy import LETTERS, ToyTask
from trl_grpo_tasks.evaluate import Evaluation, Sample, evaluate, summarise, table
from trl_grpo_tasks.models import load_tokenizer
from trl_grpo_tasks.report import write_report
from trl_grpo_tasks.rewards.executor import RewardExecutor

TASK = ToyTask()
ROWS = TASK.dataset("train", None, 0)


def sample(success, total=0.0, tokens=3, **components):
    score = {"success": success, "valid": True, "total": total, "components": components, "reason": "", "info": {}}
    return Sample({"prompt": "p"}, "text", tokens, score)


def test_metrics_of_samples_made_by_hand():
    unscored = Sample({"prompt": "p"}, "text", 8, None, "the worker died")
    samples = [
        *(
            sample(True, 1.0, 2, match=1.0),
            sample(False, 0.5, 4, match=0.5),
            sample(False, 0.0, 8, match=0.0),
            unscored,
        ),
        *(sample(False, 0.0, 2, match=0.0, extra=2.0) for _ in range(4)),
    ]
    metrics = summarise(samples, num_samples=4, max_completion_length=8)
    assert metrics["success"] == pytest.approx(1 / 7) and metrics["valid"] == 1
    assert metrics["reward"] == pytest.approx(1.5 / 7) and metrics["match"] == pytest.approx(1.5 / 7)
    assert metrics["extra"] == 2 and metrics["unscored"] == 1 / 8
    assert metrics["tokens"] == (2 + 4 + 8 + 8 + 4 * 2) / 8 and metrics["cut_off"] == 2 / 8


def test_nothing_scored_is_not_a_number_and_no_crash():
    metrics = summarise([Sample({}, "", 1, None)] * 4, 2, 8)
    assert metrics["unscored"] == 1 and metrics["success"] != metrics["success"]


@pytest.mark.parametrize("successes", [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
def test_pass_at_k_is_the_mean_over_all_subsets(successes):
    metrics = summarise([sample(bool(one)) for one in successes], 4, 8)
    for k in (1, 2, 4):
        subsets = list(itertools.combinations(successes, k))
        assert metrics[f"pass@{k}"] == pytest.approx(sum(map(any, subsets)) / len(subsets)), k


def chat_rows():
    return [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]


def run(model, tokenizer, rows=ROWS, **options):
    with RewardExecutor(TASK) as executor:
        options = {"max_completion_length": 5, "num_samples": 4, **options}
        return evaluate("a name", model, tokenizer, TASK, rows, executor=executor, **options)


@pytest.fixture(scope="module")
def loaded(tiny_path):
    return AutoModelForCausalLM.from_pretrained(tiny_path), load_tokenizer(tiny_path)


def test_the_random_state_outside_is_left_alone(loaded):
    model, tokenizer = loaded
    model.train()
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    first = run(model, tokenizer, seed=1)
    assert torch.equal(torch.rand(3), wanted) and model.training
    torch.rand(7)
    assert [s.completion for s in run(model, tokenizer, seed=1).samples] == [s.completion for s in first.samples]
    assert [s.completion for s in run(model, tokenizer, seed=2).samples] != [s.completion for s in first.samples]


@pytest.mark.parametrize("rows", [ROWS, chat_rows()], ids=["text", "chat"])
def test_each_row_is_sampled_and_scored(loaded, rows):
    result = run(*loaded, rows=rows, batch_size=5)
    assert [s.row["prompt"] for s in result.samples] == [row["prompt"] for row in rows for _ in range(4)]
    for one in result.samples:
        assert one.score == TASK.score(one.row, one.completion).as_dict()
        assert one.reason == one.score["reason"] and 1 <= one.tokens <= 5
        assert "<eos>" not in one.completion and "<pad>" not in one.completion
    assert result.metrics["success"] == pytest.approx(sum(s.score["success"] for s in result.samples) / 24)


def test_temperature_zero_is_greedy(loaded):
    model, tokenizer = loaded
    result = run(model, tokenizer, temperature=0, batch_size=7)
    for place, row in enumerate(ROWS):
        ids = tokenizer(row["prompt"])["input_ids"]
        for _ in range(5):
            with torch.no_grad():
                ids = [*ids, model(torch.tensor([ids])).logits[0, -1].argmax().item()]
            if ids[-1] == tokenizer.eos_token_id:
                break
        written = tokenizer.decode(ids[len(tokenizer(row["prompt"])["input_ids"]) :], skip_special_tokens=True)
        assert {s.completion for s in result.samples[4 * place : 4 * place + 4]} == {written}


def test_a_constrained_evaluation_is_always_valid(loaded):
    model, tokenizer = loaded
    assert run(model, tokenizer).metrics["valid"] < 1
    result = run(model, tokenizer, constraint=TASK.constraint(tokenizer))
    assert result.metrics["valid"] == 1 and result.metrics["cut_off"] == 0
    assert all(1 <= len(s.completion) <= 3 and set(s.completion) <= set(LETTERS) for s in result.samples)


def test_an_evaluation_goes_through_json_and_into_a_table_and_a_report(loaded, tmp_path):
    first = run(*loaded)
    again = Evaluation.from_dict(json.loads(json.dumps(first.as_dict())))
    assert again == first
    again.name = "a much longer name"
    text = table([first, again])
    assert all(len(line) == len(text.splitlines()[0]) for line in text.splitlines())
    assert text.splitlines()[0].split("  ")[-1] == "a much longer name" and "seconds" not in text
    results = {"evaluations": [first.as_dict(), again.as_dict()]}
    (tmp_path / "results.json").write_text(json.dumps(results))
    page = write_report(tmp_path, TASK).read_text()
    assert page.count("<div class=pair>") == len(ROWS) and f"{first.metrics['success']:.3f}" in page
    (tmp_path / "results.json").unlink()
    assert "No evaluation" in write_report(tmp_path, TASK).read_text()
