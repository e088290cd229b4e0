"""Evaluation: metrics against hand-computed values, sampling, resuming, and preservation of the random state."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from tests.support.toy import LETTERS, LettersConstraint, ToyTask
from trl_grpo_tasks.evaluation.evaluate import KeptSamples, evaluate
from trl_grpo_tasks.evaluation.samples import Evaluation, Sample
from trl_grpo_tasks.evaluation.summary import summarise, table
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.rewards.components import component_weights
from trl_grpo_tasks.rewards.executor import RewardExecutor

TASK = ToyTask()
ROWS = TASK.dataset("train", None, 0)


def sample(success, total=0.0, tokens=3, cut_off=False, **components):
    score = {"success": success, "valid": True, "total": total, "components": components, "reason": "", "info": {}}
    return Sample({"prompt": "p"}, "text", tokens, score, cut_off=cut_off)


def test_metrics_of_samples_made_by_hand():
    unscored = Sample({"prompt": "p"}, "text", 8, None, "the worker died", cut_off=True)
    samples = [sample(True, 1.0, 2, match=1.0), sample(False, 0.5, 4, match=0.5)]
    samples += [sample(False, 0.0, 8, True, match=0.0), unscored]
    samples += [sample(False, 0.0, 2, match=0.0, extra=2.0)] * 4
    metrics, _ = summarise(samples, num_samples=4)
    assert metrics["success"] == pytest.approx(1 / 7) and metrics["valid"] == 1
    assert metrics["reward"] == pytest.approx(1.5 / 7) and metrics["match"] == pytest.approx(1.5 / 7)
    assert metrics["extra"] == 2 and metrics["unscored"] == 1 / 8
    assert metrics["tokens"] == (2 + 4 + 8 + 8 + 4 * 2) / 8 and metrics["cut_off"] == 2 / 8
    nothing, _ = summarise([unscored] * 4, 2)
    assert nothing["unscored"] == 1 and nothing["success"] != nothing["success"]


def test_success_is_reported_per_level_if_there_are_several():
    successes = {"easy": [(True, True), (True, False)], "hard": [(False, True)]}
    samples = []
    for level, rows in successes.items():
        for row in rows:
            samples += [Sample({"prompt": "p", "level": level}, "text", 3, sample(success).score) for success in row]
    metrics, intervals = summarise(samples, num_samples=2)
    assert metrics["success"] == pytest.approx(4 / 6)
    assert metrics["success/easy"] == pytest.approx(3 / 4) and intervals["success/easy"] == [0.5, 1.0]
    assert metrics["success/hard"] == pytest.approx(1 / 2)
    assert not any("/" in name for name in summarise(samples[:4], 2)[0])


@pytest.mark.parametrize(
    ("rewards", "ks"),
    [([0.1, 0.7, 0.7, -1.0], [1, 2, 4]), ([3.0, 0.0, 1.0], [1, 2, 3]), ([3.0, 0.0, 1.0, 2.0, 0.5], [1, 2, 4, 5])],
)
def test_pass_at_k_and_max_at_k_are_means_over_all_subsets(rewards, ks):
    """For k = 1, 2, 4, ... and the number of samples itself. Rewards above 0.5 are successes."""
    metrics, _ = summarise([sample(one > 0.5, total=one) for one in rewards], len(rewards))
    assert {name for name in metrics if "@" in name} == {f"{kind}@{k}" for kind in ("pass", "max") for k in ks}
    for k in ks:
        best = [max(subset) for subset in itertools.combinations(rewards, k)]
        assert metrics[f"pass@{k}"] == pytest.approx(sum(one > 0.5 for one in best) / len(best)), k
        assert metrics[f"max@{k}"] == pytest.approx(sum(best) / len(best)), k


def test_intervals_agree_with_scipys_bootstrap():
    """Whole rows are resampled, because samples of a row are correlated. scipy draws other resamples, so the intervals
    agree up to the noise of 2,000 resamples."""
    rng = np.random.default_rng(3)
    success_P_G = rng.random((60, 4)) < rng.beta(0.4, 0.6, size=(60, 1))
    reward_P_G = rng.normal(size=(60, 4)) + 3 * success_P_G
    samples = [sample(bool(s), total=float(r)) for s, r in zip(success_P_G.flat, reward_P_G.flat, strict=True)]
    metrics, intervals = summarise(samples, 4)
    per_row = {"success": success_P_G.mean(1), "reward": reward_P_G.mean(1), "pass@4": success_P_G.any(1),
               "max@4": reward_P_G.max(1)}  # fmt: skip
    for name, values in per_row.items():
        found = stats.bootstrap((values.astype(float),), np.mean, n_resamples=2000, method="percentile", rng=1)
        width = found.confidence_interval.high - found.confidence_interval.low
        assert intervals[name] == pytest.approx(list(found.confidence_interval), abs=0.08 * width), name
        assert intervals[name][0] < metrics[name] < intervals[name][1]
    alone = (success_P_G.mean() * (1 - success_P_G.mean()) / 240) ** 0.5
    width = intervals["success"][1] - intervals["success"][0]
    assert width > 1.3 * 3.92 * alone, "samples were resampled instead of whole rows"


def test_intervals_cover_the_truth_if_requests_are_resampled_and_not_if_rows_are():
    """Simulated evaluations of 40 requests with 1 to 6 rows each, which differ in their gold answer only: requests
    differ in difficulty, and success is 50% over all possible requests."""
    rng, covered, evaluations = np.random.default_rng(0), np.zeros(2), 80
    for _ in range(evaluations):
        samples = []
        for request, chance in enumerate(rng.beta(0.5, 0.5, size=40)):
            for _ in range(rng.integers(1, 7)):
                samples.append(sample(bool(rng.random() < chance)))
                samples[-1].request = str(request)
        clustered, plain = samples, [replace(one, request="") for one in samples]
        intervals = [summarise(given, 1)[1]["success"] for given in (clustered, plain)]
        covered += [low <= 0.5 <= high for low, high in intervals]
    assert 0.9 <= covered[0] / evaluations <= 0.99 and covered[1] / evaluations <= 0.8


def test_rows_of_a_single_request_are_resampled():
    samples = [sample(bool(i % 2)) for i in range(40)]
    unknown = summarise(samples, 1)[1]["success"]
    for one in samples:
        one.request = "the same"
    assert summarise(samples, 1)[1]["success"] == unknown and unknown[0] < 0.4 < 0.6 < unknown[1]


def test_distinct_answers_are_counted_by_the_tasks_normal_form():
    texts = [("a b c d", "1"), ("a b c d", "2"), (" a  b c d", "1"), ("e", "3")]
    samples = [sample(True) for _ in texts]
    for one, (text, form) in zip(samples, texts, strict=True):
        one.completion, one.form = text, form
    samples[3].score["valid"] = False
    metrics, _ = summarise(samples, 4)
    assert metrics["distinct_answers"] == 2 / 4  # 1 and 2; 3 is not valid
    assert metrics["distinct_ngrams"] == 3 / 7  # abc and bcd three times each, and e


def test_brick_structures_that_differ_in_order_only_are_one_answer():
    task, row = get_task("brick"), {"world": 8}
    assert task.canonical(row, "2x4 (0,0,0)\n2x4 (0,0,1)\n") == task.canonical(row, "2x4 (0,0,1)\n2x4 (0,0,0)")
    assert task.canonical(row, "2x4 (0,0,0)\n") != task.canonical(row, "2x4 (0,0,1)\n")
    assert task.canonical(row, "2x4 (0,0,0)\nwell") == "2x4 (0,0,0)\nwell"


def chat_rows():
    return [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]


def run(model, tokenizer, rows=ROWS, **options):
    with RewardExecutor(TASK) as executor:
        options = {"max_completion_length": 5, "num_samples": 4, **options}
        return evaluate("a name", model, tokenizer, TASK, rows, executor=executor, **options)


@pytest.fixture(scope="module")
def loaded(tiny_path):
    return AutoModelForCausalLM.from_pretrained(tiny_path), load_tokenizer(tiny_path)


def test_the_global_random_state_and_the_training_mode_are_restored(loaded):
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


class StopsAfter:
    """An executor that raises KeyboardInterrupt after `batches` batches."""

    def __init__(self, executor, batches):
        self.executor, self.left, self.weights = executor, batches, executor.weights

    def submit(self, *args):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.executor.submit(*args)


def test_an_interrupted_evaluation_resumes(loaded, tmp_path):
    """24 samples in batches of 5: two batches are kept, and an incomplete line is discarded."""
    model, tokenizer = loaded
    options = {"max_completion_length": 5, "num_samples": 4, "batch_size": 5, "seed": 3}
    file, settings = tmp_path / "kept" / "samples.jsonl", {"seed": 3}
    with RewardExecutor(TASK) as executor:
        whole = evaluate("a", model, tokenizer, TASK, ROWS, executor=executor, **options)
        for stop in (3, 1):
            with pytest.raises(KeyboardInterrupt):
                evaluate("a", model, tokenizer, TASK, ROWS, executor=StopsAfter(executor, stop),
                         kept=KeptSamples(file, settings), **options)  # fmt: skip
            assert len(file.read_text().splitlines()) == 10
            file.write_text(file.read_text() + '{"row": {"prompt"')
        counted = StopsAfter(executor, 99)
        options["kept"] = KeptSamples(file, settings)
        again = evaluate("a", model, tokenizer, TASK, ROWS, executor=counted, **options)
        assert counted.left == 96 and again.samples == whole.samples
        assert again.metrics | {"seconds": 0} == whole.metrics | {"seconds": 0}
        evaluate("a", model, tokenizer, TASK, ROWS, executor=StopsAfter(executor, 0), **options)
        options["kept"] = KeptSamples(file, {"seed": 4})  # with other settings, no kept sample is reused
        with pytest.raises(KeyboardInterrupt):
            evaluate("a", model, tokenizer, TASK, ROWS, executor=StopsAfter(executor, 0), **options)


@pytest.mark.parametrize("line", [b"[1]", b'{"row": {}, "unheard_of": 1}', b"\xff\xfe"])
def test_kept_samples_that_cannot_be_read_are_discarded(tmp_path, line):
    file = tmp_path / "samples.jsonl"
    file.write_bytes(line + b"\n")
    assert KeptSamples(file, {}).read() == ([], 0.0) and file.read_bytes() == b""


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


def test_an_evaluation_goes_through_json_and_into_a_table(loaded):
    first = run(*loaded)
    again = Evaluation.from_dict(json.loads(json.dumps(first.as_dict())))
    assert again == first
    again.name = "a much longer name"
    text = table([first, again])
    assert all(len(line) == len(text.splitlines()[0]) for line in text.splitlines())
    assert text.splitlines()[0].split("  ")[-1] == "a much longer name" and "unscored" not in text
    head, rule, success, *_ = table([first, again], markdown=True).splitlines()
    assert head.count("|") == rule.count("|") == success.count("|") == 4 and rule.startswith("|---|---:|")
    low, high = first.intervals["success"]
    assert f"| {first.metrics['success']:.3f} [{low:.3f}, {high:.3f}] |" in success


@pytest.mark.parametrize("most", [4, 3])
def test_an_answer_that_ends_with_the_last_token_is_not_cut_off(loaded, most):
    """Up to 3 letters and the end, in at most 4 or 3 tokens: without room for the end, 3 letters are cut off."""
    constraint = LettersConstraint(loaded[1], most=3)
    result = run(*loaded, constraint=constraint, max_completion_length=most)
    longest = [one for one in result.samples if len(one.completion) == 3]
    assert longest and all(one.tokens == most for one in longest)
    assert result.metrics["cut_off"] == (0 if most == 4 else len(longest) / len(result.samples))


def test_the_reward_of_an_evaluation_has_the_weights_of_the_executor(loaded):
    model, tokenizer = loaded
    weights = component_weights(TASK, {"match": 0.5, "short": 0.0, "success": 2.0, "valid": -1.0})
    with RewardExecutor(TASK, weights=weights) as executor:
        result = evaluate("a", model, tokenizer, TASK, ROWS, executor=executor, max_completion_length=5)
    totals = [0.5 * s.score["components"]["match"] + 2 * s.score["success"] - s.score["valid"] for s in result.samples]
    assert [s.score["total"] for s in result.samples] == pytest.approx(totals) and len(set(totals)) > 1
    assert result.metrics["reward"] == pytest.approx(sum(totals) / len(totals))
    best = [max(totals[first : first + 4]) for first in range(0, len(totals), 4)]
    assert result.metrics["max@4"] == pytest.approx(sum(best) / len(best))


class Different(ToyTask):
    """Each completion is also worth the share of its group that differs from it; those without letters have none."""

    spec = None
    weights = {**ToyTask.weights, "different": 2.0}

    def group_components(self, rows, completions, scores):
        assert len({row["prompt"] for row in rows}) == 1 and all(score.components for score in scores)
        found = [sum(text != other for other in completions) / len(completions) for text in completions]
        return {"different": [value if text else None for value, text in zip(found, completions, strict=True)]}


def test_components_of_whole_groups_are_part_of_the_reward(loaded, tmp_path):
    model, tokenizer = loaded
    task, options = Different(), {"num_samples": 4, "max_completion_length": 3, "batch_size": 5}
    with RewardExecutor(task) as executor:
        found = evaluate("a", model, tokenizer, task, ROWS, executor=executor, **options)
    for first in range(0, len(found.samples), 4):
        texts = [one.completion for one in found.samples[first : first + 4]]
        for one in found.samples[first : first + 4]:
            part = sum(one.completion != text for text in texts) / 4 if one.completion else None
            assert one.score["components"].get("different") == part
            assert one.score["total"] == pytest.approx(TASK.score(one.row, one.completion).total + 2 * (part or 0))
    assert found.metrics["different"] > 0
