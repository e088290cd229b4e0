"""The guard: it keeps a component at its floor, at the analytic optimum of the constrained problem."""

import math

import pytest
import torch

from tests.support.toy import ToyTask
from tests.support.toy_fill import MASK, FillTask
from tests.support.training import config, toy_trainer
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.models.loading import load_model, load_tokenizer
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.training.control.guard import Guard, check_guard_component


class TwoArms(FillTask):
    """Letter b is rewarded, letter a is to be kept; all other letters count for neither."""

    weights = {"wanted": 1.0, "kept": 0.0}
    watched = ("watched",)
    levels = ()

    def dataset(self, split, size, seed):
        return [{"prompt": f"c {MASK}"}] * (size or 4)

    def score(self, row, completion):
        return self.make_score({"wanted": float(completion == "b"), "kept": float(completion == "a")}, True, False)


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


def test_a_run_keeps_the_component_at_its_floor(bert_path, tmp_path):
    """The optimum is known: p(a) = 0.4, p(b) = 0.6, weight = 1 - beta * log(1.5 * q(a) / q(b))."""
    options = {"beta": 0.1, "num_generations": 16, "per_device_train_batch_size": 64,
               "advantage_estimator": "mean", "loss_type": "dr_grpo", "max_completion_length": 1, "temperature": 1.0,
               "lr_scheduler_type": "constant", "learning_rate": 1e-3}  # fmt: skip
    kept, weights = {}, {}
    for guard in (None, "kept"):
        more = {"max_steps": 40} if guard is None else {"max_steps": 110, "guard": guard, "guard_floor": 0.4}
        trainer = toy_trainer(bert_path, tmp_path / str(guard), task=TwoArms(), **options, **more)
        trainer.train()
        logs = [line for line in trainer.state.log_history if "reward" in line][-60 if guard else -10 :]
        kept[guard] = sum(line["rewards/kept/mean"] for line in logs) / len(logs)
        weights[guard] = sum(line.get("guard/weight", 0.0) for line in logs) / len(logs)
    assert kept[None] < 0.1
    assert kept["kept"] == pytest.approx(0.4, abs=0.06)
    tokenizer, model = load_tokenizer(bert_path), load_model(bert_path, policy="masked")
    logits = model(**tokenizer(f"c {MASK}", return_tensors="pt")).logits[0, 2, 5:7]
    optimum = 1 - 0.1 * (math.log(1.5) + (logits[0] - logits[1]).item())
    assert weights["kept"] == pytest.approx(optimum, abs=0.15)
    assert {line["guard/floor"] for line in logs} == {0.4}
    trainer.model.eval()
    trainer._generate_and_score_completions([trainer.train_dataset[0]] * 16)
    assert torch.equal(trainer.reward_weights, trainer._plain_weights), "an evaluation used the guard's weight"


def test_reward_functions_can_be_guarded_without_a_task(tiny_path, tmp_path):
    from datasets import Dataset

    from trl_grpo_tasks import TaskGRPOTrainer

    def length(completions, **_):
        return [float(len(text)) for text in completions]

    args = config(tmp_path, max_steps=2, guard="length", guard_floor=4.0)
    trainer = TaskGRPOTrainer(tiny_path, length, args, Dataset.from_dict({"prompt": ["ab", "ba"]}))
    trainer.train()
    logs = [line for line in trainer.state.log_history if "reward" in line]
    assert [line["guard/weight"] for line in logs] == [
        0,
        pytest.approx(min(max(4.2 * (4 - logs[0]["rewards/length/mean"]), 0), 10)),
    ]
    assert logs[1]["reward"] == pytest.approx((1 + logs[1]["guard/weight"]) * logs[1]["rewards/length/mean"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"guard_floor": 0.4}, "guard_floor=0.4 needs guard"),
        ({"guard": "success", "guard_floor": math.inf}, "must be a finite number"),
        ({"guard": "success", "curriculum": True}, "set guard_floor, or leave curriculum off"),
    ],
)
def test_options_that_do_not_fit_are_rejected(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        config(tmp_path, **options)


@pytest.mark.parametrize(("words", "guard"), [([], "agreement"), (["--guard", "none"], None)])
def test_the_guard_of_a_recipe_can_be_turned_off(tmp_path, words, guard):
    given = ["--config", "infill/single_gpu", "--use_cpu", "true", "--output_dir", str(tmp_path)]
    assert parse([*given, *words])[2].guard == guard


def test_unknown_and_watched_components_are_rejected(tiny_path, tmp_path):
    with pytest.raises(ValueError, match=r"unknown guard 'succes' \(did you mean 'success'\?\); choose one of: valid"):
        toy_trainer(tiny_path, tmp_path, task=ToyTask(), guard="succes")
    task = get_task("infill")
    with pytest.raises(ValueError, match="guard='held_out' would reward a component that is only logged"):
        check_guard_component(config(tmp_path, guard="held_out"), list(task.weights), task.watched)
