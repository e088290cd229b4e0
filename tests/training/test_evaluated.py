"""Evaluations during training: means over samples, whatever the sizes of the batches, and rows that count once."""

import json

import pytest
import torch

from tests.support.toy import ToyTask
from tests.support.training import run_processes, toy_trainer
from trl_grpo_tasks.training.dataset import split_held_out
from trl_grpo_tasks.training.evaluated import EvaluatedBatches

EVALUATED = {
    "max_steps": 1, "num_generations": 4, "per_device_eval_batch_size": 8, "eval_strategy": "steps", "eval_steps": 1,
}  # fmt: skip


class ByLetter(ToyTask):
    """Answers to a and b succeed, those to c fail, whatever they are."""

    spec = None

    def dataset(self, split, size, seed):
        letters = "abc" if split == "test" else "abcd"
        return [{"prompt": f"{letter}1x", "letter": letter, "level": "1"} for letter in letters]

    def score(self, row, completion):
        is_good = row["letter"] in "ab"
        return self.make_score({"match": float(is_good), "short": 0.0}, True, is_good)


def test_the_last_batch_may_be_smaller(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, task=ByLetter(), **EVALUATED)
    trainer.train()
    trainer.evaluate()
    logs = [line for line in trainer.state.log_history if "eval_reward" in line]
    assert len(logs) == 2
    for line in logs:
        for name in ("reward", "rewards/success/mean", "pass@1", "pass@4", "max@4"):
            assert line[f"eval_{name}"] == pytest.approx(2 / 3), name


SCRIPT = """
from tests.support.training import toy_trainer
from tests.training.test_evaluated import ByLetter
trainer = toy_trainer(model, output_dir, task=ByLetter(), **options)
"""


@pytest.mark.exhaustive
def test_rows_that_fill_up_the_last_batch_of_several_processes_do_not_count(tiny_path, tmp_path):
    options = EVALUATED | {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    _, lines = run_processes(SCRIPT, tiny_path, tmp_path, 2, options)  # two batches of two rows: one row comes twice
    (line,) = [one for one in lines if "eval_reward" in one]
    for name in ("reward", "rewards/success/mean", "pass@1", "pass@4", "max@4"):
        assert line[f"eval_{name}"] == pytest.approx(2 / 3), name


def test_means_over_batches_by_hand():
    batches, metrics = EvaluatedBatches(), {"reward": [], "tokens": [], "once": [7.0]}
    for indexes, rewards, tokens in (
        ([0, 0, 1, 1, 2, 2], [1, 1, 0, torch.nan, 1, 0], 10.0),
        ([3, 3, 0, 0, 1, 1], [5, 1, 9, 9, 9, 9], 40.0),
    ):
        counted = batches.add(indexes, torch.tensor(rewards).float()[:, None], group_size=2)
        metrics["reward"].append(counted.nanmean().item())
        metrics["tokens"].append(tokens)
    assert batches.is_new_N == [True, True, False, False, False, False]
    batches.average(metrics)
    assert metrics["reward"] == [pytest.approx((1 + 1 + 0 + 1 + 0 + 5 + 1) / 7)]
    assert metrics["tokens"] == [(6 * 10 + 2 * 40) / 8] and metrics["once"] == [7.0]
    assert batches.add([None, None], torch.ones(2, 1), 1).tolist() == [[1], [1]], "rows of a data set without numbers"


class Rows(ToyTask):
    """`requests` held-out requests, each with two rows."""

    def __init__(self, requests):
        super().__init__()
        self.requests = requests

    def dataset(self, split, size, seed):
        return [{"prompt": f"a{n // 2}", "letter": "a", "gold": n} for n in range(2 * self.requests)][:size]


@pytest.mark.parametrize(("requests", "size"), [(20, 8), (5, 8), (4, 8), (4, None), (2, 2), (2, 3)])
def test_models_are_compared_on_other_requests_than_those_reported(requests, size):
    said = []
    reported, compared = split_held_out(Rows(requests), size, 0, said.append)
    of_reported, of_compared = ({row["prompt"] for row in rows} for rows in (reported, compared))
    assert of_reported and of_compared and not of_reported & of_compared
    if requests == 20:
        assert len(reported) == len(compared) == 8 and not said
    assert split_held_out(Rows(requests), size, 0) == (reported, compared)


def test_a_single_request_is_not_both_compared_and_reported():
    with pytest.raises(ValueError, match="task 'toy' has only one held-out request; leave best_by out"):
        split_held_out(Rows(1), 8, 0)


@pytest.mark.parametrize("rows", [None, 40])
def test_a_trainer_compares_models_on_rows_that_evaluations_leave_out(tiny_path, tmp_path, rows):
    trainer = toy_trainer(
        tiny_path, tmp_path, best_by="success", save_strategy="steps", save_steps=1, max_steps=1, eval_rows=rows
    )
    trainer.train()
    compared = {json.loads(row)["prompt"] for row in trainer.eval_dataset["row"]}
    reported, _ = split_held_out(ToyTask(), rows, trainer.args.seed)
    assert compared and not compared & {row["prompt"] for row in reported}
    assert len(json.loads((tmp_path / "outcome.json").read_text())["requests"]) == len(compared)
