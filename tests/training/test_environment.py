"""Training in environments: exact gradients, equal rollouts with and without workers, resumed runs."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.enumerated import assert_exact_policy_gradient, every_completion
from tests.support.toy_environment import EchoTask
from tests.support.training import parameters, resumed, toy_trainer
from trl_grpo_tasks.constraints.turns import join_turns, split_turns
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.rewards.repair import with_repair
from trl_grpo_tasks.training.cold_start import gold_dataset

ON = {"rollout": "fast", "max_completion_length": 16}
ROW = {"prompt": "a1x", "letter": "a", "level": "1"}


def test_the_policy_gradient_is_that_of_the_expected_reward(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, EchoTask(), **ON)
    constraint, task = trainer.generation.constraint, trainer.task
    completions = every_completion(constraint, ROW)
    texts = [constraint.text_of(ROW, ids) for ids, _ in completions]
    assert sorted(split_turns(text)[0] for text in texts) == sorted([a, b] for a in "abcd" for b in "abcd" if a != b)
    assert_exact_policy_gradient(trainer, ROW, completions, [task.score(ROW, text).total for text in texts])


def assert_same_with_workers(model, folder, task, **options):
    """Train two steps with and without workers: completions, masks and parameters are the same. Return the trainer
    with workers."""
    runs = []
    for workers in (0, 2):
        trainer = toy_trainer(model, folder / str(workers), task, **options, max_steps=2, reward_workers=workers)
        trainer.train()
        record = trainer.latest_rollout
        runs.append((record.completion_ids, record.mask_numbers_B_T.tolist(), record.completions, parameters(trainer)))
    assert runs[0][:3] == runs[1][:3]
    assert all(torch.equal(runs[0][3][name], weight) for name, weight in runs[1][3].items())
    return trainer


def test_training_is_the_same_with_workers(tiny_path, tmp_path):
    trainer = assert_same_with_workers(tiny_path, tmp_path, EchoTask(), **ON)
    assert not any(trainer.latest_rollout.last_turns), "all turns of a success are worth imitating"
    logs = [line for line in trainer.state.log_history if "reward" in line]
    assert all(line["environment/turns"] == 2 for line in logs)


def test_a_run_resumes_bit_for_bit(tiny_path, tmp_path):
    def make():
        return toy_trainer(tiny_path, tmp_path, EchoTask(), **ON, max_steps=3, save_strategy="steps", save_steps=1,
                           own_successes=8)  # fmt: skip

    assert list(resumed(make, tmp_path, [1]))


def test_the_cold_start_shows_each_turn_after_those_before_it(tiny_path):
    tokenizer, task = load_tokenizer(tiny_path), EchoTask()
    shown = gold_dataset(task, [ROW], tokenizer).to_list()
    assert [example["completion"] for example in shown] == ["a", "b"]
    # The tokens are those of a rollout.
    constraint = task.constraint(tokenizer)
    golds = [ids for ids, _ in every_completion(constraint, ROW) if constraint.text_of(ROW, ids) == task.gold(ROW)]
    prompt = tokenizer(ROW["prompt"])["input_ids"]
    last = tokenizer(shown[1]["prompt"])["input_ids"] + tokenizer("b")["input_ids"] + [tokenizer.eos_token_id]
    assert [last] == [prompt + ids for ids in golds]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repair_turns": 2}, "repair_turns=2 does not work with task 'echo', which has turns of its own"),
        ({"relabel": True, "own_successes": 8}, "does not work with relabel"),
        ({"max_completion_length": 4}, "max_completion_length=4 is too short for 2 turns"),
    ],
)
def test_what_cannot_work_is_refused(tiny_path, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        toy_trainer(tiny_path, tmp_path, EchoTask(), **ON | options)


def test_one_turn_is_trained_as_tasks_without_turns_are(tiny_path, tmp_path):
    """Without our rollouts, and with repairs."""
    task = EchoTask()
    task.turns = 1
    trainer = toy_trainer(tiny_path, tmp_path, task, rollout="trl", max_steps=1, max_completion_length=4)
    trainer.train()
    assert not trainer.args.constrain
    assert [trainer.task.score(ROW, text).total for text in "ab"] == [0.5, 0.0]
    repaired = with_repair(task, SimpleNamespace(repair_turns=2, repair_discount=0.9, constrain=True))
    score = repaired.score(ROW, join_turns(["b", "a"], ["no"]))
    assert (score.total, score.info["turns"]) == (0.5 * 0.9, 2)
