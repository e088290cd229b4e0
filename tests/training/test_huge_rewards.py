"""Infinite and huge rewards: the completion is not scored, a line says why, and the metrics file stays valid JSON."""

import json

import pytest
import torch

from tests.support.toy import ToyTask
from tests.support.training import config, parameters, toy_trainer
from tests.training.test_trainer import PROMPTS
from trl_grpo_tasks import TaskGRPOTrainer


class Huge(ToyTask):
    """The component is out of range where the completion has an "a"."""

    spec = None

    def score(self, row, completion):
        match = 1e300 if "a" in completion else len(completion) / 5
        return self.make_score({"match": match, "short": 0.0}, True, False)


class HugeInGroups(ToyTask):
    """Its third component, which depends on the group, is infinite for the first completion."""

    weights = {**ToyTask.weights, "novelty": 1.0}
    spec = None

    def group_components(self, rows, completions, scores):
        return {"novelty": [float("inf"), *(float(len(text)) for text in completions[1:])]}


def strict(folder):
    """The lines of the metrics file, read by a parser that knows neither NaN nor Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = (folder / "training_metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.mark.parametrize(("task", "component"), [(Huge(), "'match' is 1e+300"), (HugeInGroups(), "'novelty' is inf")])
def test_such_completions_are_left_out(tiny_path, tmp_path, capsys, task, component):
    trainer = toy_trainer(tiny_path, tmp_path, task=task, max_steps=1)
    before = parameters(trainer)
    trainer.train()
    said = capsys.readouterr().out
    assert said.count(component) == 1 and '"prompt"' in said, "which component of which row, once"
    rewards = trainer.latest_rollout.rewards_N_F
    assert rewards.isnan().all(1).any() and not rewards.isnan().all() and not rewards.isinf().any()
    assert all(abs(line["reward"]) < 100 for line in strict(tmp_path))
    assert any(not value.equal(before[name]) for name, value in parameters(trainer).items()), "it learns from the rest"


def test_reward_functions_keep_trls_behaviour_but_it_is_reported(tiny_path, tmp_path, capsys):
    def overflowing(completions, **kwargs):
        return [1e300 * (i % 2) for i in range(len(completions))]

    trainer = TaskGRPOTrainer(tiny_path, overflowing, config(tmp_path, max_steps=1), PROMPTS)
    trainer.train()
    assert capsys.readouterr().out.count("'overflowing' is inf for ") == 1
    assert trainer.state.log_history[0]["reward"] == torch.inf
    assert strict(tmp_path)[0]["reward"] is None
