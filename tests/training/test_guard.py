"""The guard: it keeps a component at its floor, at the analytic optimum of the constrained problem."""

import math

import pytest
import torch

from tests.support.toy import ToyTask
from tests.support.training import config, toy_trainer
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.training.extras.guard import Guard, GuardExtra


def logit(p):
    return math.log(p / (1 - p))


@pytest.mark.parametrize("floor", [0.2, 0.4, 0.9])
def test_the_weight_converges_to_the_lagrange_multiplier(floor):
    """Two arms, exact gradients: arm 1 gives reward, arm 0 is guarded, and the KL penalty to q has weight beta. At the
    optimum the guarded arm has probability `floor`, and the weight is 1 + beta * (logit(floor) - logit(q))."""
    beta, q, theta, guard = 0.1, 0.5, 0.0, Guard("kept", floor, rate=0.05, start=1)
    for _ in range(4000):
        p = 1 / (1 + math.exp(-theta))
        theta += 0.5 * p * (1 - p) * (guard.weight - 1 - beta * (logit(p) - logit(q)))
        guard.observe(p)
    assert p == pytest.approx(floor, abs=1e-3)
    assert guard.weight == pytest.approx(1 + beta * (logit(floor) - logit(q)), abs=1e-2)


def test_the_weight_is_bounded_and_the_floor_is_the_mean_at_the_start():
    guard = Guard("kept", None, rate=1.0, start=2)
    for mean in (0.2, math.nan, 0.4):
        assert guard.floor is None and guard.weight == 0
        guard.observe(mean)
    assert guard.floor == pytest.approx(0.3)
    guard.observe(0.2)
    assert guard.weight == pytest.approx(0.1 + 20 * 0.1)
    guard.observe(0.9)
    assert guard.weight == 0, "a component above its floor is never penalised"
    for _ in range(100):
        guard.observe(-1.0)
    assert guard.weight == 10
    again = Guard("kept", None, rate=1.0, start=2)
    again.load_state_dict(guard.state_dict())
    assert (again.weight, again.floor) == (10, guard.floor)


def test_reward_functions_can_be_guarded_without_a_task(tiny_path, tmp_path):
    from datasets import Dataset

    from trl_grpo_tasks import TaskGRPOTrainer

    def length(completions, **_):
        return [float(len(text)) for text in completions]

    args = config(tmp_path, max_steps=2, guard="length", guard_floor=4.0)
    trainer = TaskGRPOTrainer(tiny_path, length, args, Dataset.from_dict({"prompt": ["ab", "ba"]}))
    trainer.train()
    logs = [line for line in trainer.state.log_history if "reward" in line]
    weight = min(max(4.2 * (4 - logs[0]["rewards/length/mean"]), 0), 10)
    assert [line["guard/weight"] for line in logs] == [0, pytest.approx(weight)]
    assert logs[1]["reward"] == pytest.approx((1 + logs[1]["guard/weight"]) * logs[1]["rewards/length/mean"])
    assert trainer.extras["guard"].state.weight > 0 and trainer.reward_weights.item() > 1
    trainer.model.eval()
    trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    assert torch.equal(trainer.reward_weights, torch.ones(1)), "an evaluation has the weights without the guard's"


@pytest.mark.parametrize(("words", "guard"), [([], "agreement"), (["--guard", "none"], None)])
def test_the_guard_of_a_recipe_can_be_turned_off(tmp_path, words, guard):
    given = ["--config", "infill/single_gpu", "--use_cpu", "true", "--output_dir", str(tmp_path)]
    assert parse([*given, *words])[2].guard == guard


def test_unknown_and_watched_components_are_rejected(tiny_path, tmp_path):
    with pytest.raises(ValueError, match=r"unknown guard 'succes' \(did you mean 'success'\?\); choose one of: valid"):
        toy_trainer(tiny_path, tmp_path, task=ToyTask(), guard="succes")
    task = get_task("infill")
    with pytest.raises(ValueError, match="guard='held_out' would reward a component that is only logged"):
        GuardExtra.check_components(config(tmp_path, guard="held_out"), task, list(task.weights))
