"""What a run says about its evaluations: a start that never succeeds, and a model that GRPO made worse."""

import random
from types import SimpleNamespace

import pytest

from trl_grpo_tasks.commands.arguments import RunArguments
from trl_grpo_tasks.commands.run_hints import before_training_hints, outcome
from trl_grpo_tasks.evaluation.samples import Evaluation, Sample
from trl_grpo_tasks.evaluation.summary import change

SAMPLES = 4
ARGS = SimpleNamespace(output_dir="run", learning_rate=1e-3)


def evaluation(name, share, rows=60, seed=0):
    rng = random.Random(f"{name} {share} {seed}")
    samples = []
    for row in range(rows):
        for _ in range(SAMPLES):
            success = rng.random() < share
            score = {"components": {}, "total": 0.0, "valid": True, "success": success, "info": {}}
            samples.append(Sample({"prompt": str(row)}, "x", 1, score, request=str(row)))
    success = sum(sample.score["success"] for sample in samples) / len(samples)
    return Evaluation(name, {"success": success}, samples)


def run_arguments(cold_start_steps):
    return RunArguments(cold_start_steps=cold_start_steps, samples=SAMPLES)


@pytest.mark.parametrize("steps, place", [(100, "run/cold_start"), (0, "me/model")])
def test_a_model_that_became_worse_is_said_with_the_way_to_the_better_one(steps, place):
    (line,) = outcome(evaluation("before", 0.87), evaluation("GRPO", 0.0), run_arguments(steps), ARGS, "me/model")
    assert "made the model worse" in line and "-> 0.000" in line and "--lr (now 0.001)" in line and place in line


@pytest.mark.parametrize("after", [0.55, 0.9])
def test_nothing_is_said_of_noise_or_progress(after):
    assert outcome(evaluation("before", 0.5), evaluation("GRPO", after), run_arguments(100), ARGS, "me/model") == []


def test_a_run_in_which_nothing_succeeds_says_so_at_the_start_and_at_the_end():
    nothing = evaluation("cold start", 0.0)
    (hint,) = before_training_hints(nothing, run_arguments(100))
    assert "--cold_start_steps, now 100" in hint
    (line,) = outcome(nothing, evaluation("GRPO", 0.0), run_arguments(100), ARGS, "me/model")
    assert "did not learn" in line
    assert before_training_hints(evaluation("cold start", 0.5), run_arguments(100)) == []


def test_the_interval_of_a_change_covers_no_change_for_most_pairs_of_equal_models():
    pairs = [(evaluation("a", 0.5, seed=seed), evaluation("b", 0.5, seed=seed)) for seed in range(100)]
    wrong = sum(not low <= 0 <= high for low, high in (change(*pair, "success", SAMPLES) for pair in pairs))
    assert wrong <= 12  # 5 are expected; 13 or more have a probability below 0.1%
