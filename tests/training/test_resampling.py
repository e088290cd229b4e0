"""Groups without signal are sampled again: the batch is the one that would have been sampled with the new prompts."""

import json

import pytest
import torch

from tests.support.toy import ToyTask
from tests.support.training import config, toy_trainer
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.training.layers.group import _paired

MIXED, EQUAL = ["a", "ab", "abc", "bb"], ["dd", "dd", "dd", "dd"]


class ScriptedTrainer(TaskGRPOTrainer):
    """Its completions are given, in the order of the rollouts; they are sampled under the constraint's masks."""

    script: list = []

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        texts, self.script = self.script[: len(prompt_ids)], self.script[len(prompt_ids) :]
        ids = [self._tokenizer(text)["input_ids"] + [self._tokenizer.eos_token_id] for text in texts]
        if self._constraint is None:
            return ids, None
        from trl_grpo_tasks.constraints.replayed import replay_all
        from trl_grpo_tasks.constraints.table import pad_mask_numbers

        table = self._tables.start("train", self._output_size())
        masks = replay_all(self._constraint, self.latest_rollout.rows, ids, table)
        self.latest_rollout.mask_numbers_B_T = pad_mask_numbers(masks)
        return ids, None


def make(tiny_path, folder, script, task=None, steps=1, **options):
    trainer = ScriptedTrainer(tiny_path, args=config(folder, max_steps=steps, **options), task=task or ToyTask())
    trainer.script, trainer.current_gradient_accumulation_steps = list(script), 1
    trainer.model.train()
    return trainer


@pytest.mark.parametrize("options", [{}, {"constrain": True, "beta": 0.1, "advantage_estimator": "mean"}],
                         ids=["free", "constrained"])  # fmt: skip
def test_the_batch_is_that_of_the_new_prompts(tiny_path, tmp_path, options):
    ours = make(tiny_path, tmp_path / "ours", [*MIXED, *EQUAL, *EQUAL, *MIXED[::-1]], resample_rounds=2, **options)
    examples = [ours.train_dataset[0]] * 4 + [ours.train_dataset[1]] * 4
    output = ours._generate_and_score_completions(examples)
    drawn = ours._train_example(ours._draw(1, 0))  # the first round has no signal either
    plain = make(tiny_path, tmp_path / "plain", [*MIXED, *MIXED[::-1]], **options)
    expected = plain._generate_and_score_completions([plain.train_dataset[0]] * 4 + [drawn] * 4)
    assert not ours.script, "two rounds were sampled"
    assert output.keys() == expected.keys()
    for name in output.keys() - {"mask_numbers"}:
        torch.testing.assert_close(output[name], expected[name], atol=1e-6, rtol=1e-5, msg=name)
    losses = [trainer._compute_loss(trainer.model, batch) for trainer, batch in ((ours, output), (plain, expected))]
    torch.testing.assert_close(*losses, atol=1e-7, rtol=1e-6)
    metrics = ours._metrics["train"]
    assert metrics["resample/sampled_groups"] == [2] and metrics["resample/replaced_groups"] == [1]
    assert metrics["resample/dropped_solved"] == [0]
    assert metrics["groups_without_signal"] == [0.5], "other metrics are those of the first rollout"
    assert len(metrics["rewards/match/mean"]) == 1
    assert (
        len(ours._logs["completion"]) == 8
        and [row for row, _, _ in ours.latest_samples()][4:] == [json.loads(examples[4]["row"])] * 4
    )


def test_the_budget_is_bounded_and_a_full_batch_costs_nothing(tiny_path, tmp_path):
    trainer = make(tiny_path, tmp_path / "none", [*EQUAL, *EQUAL, *EQUAL, *EQUAL], resample_rounds=1)
    output = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8)
    assert trainer._metrics["train"]["resample/sampled_groups"] == [2]
    assert trainer._metrics["train"]["resample/replaced_groups"] == [0]
    assert (output["advantages"] == 0).all()
    trainer = make(tiny_path, tmp_path / "full", [*MIXED, *MIXED], resample_rounds=3)
    trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8)
    assert trainer._metrics["train"]["resample/sampled_groups"] == [0]


def test_replay_stores_the_new_group_with_its_row(tiny_path, tmp_path):
    trainer = make(tiny_path, tmp_path, [*EQUAL, *MIXED, *MIXED], resample_rounds=1, replay_size=4)
    trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4 + [trainer.train_dataset[1]] * 4)
    drawn = trainer._train_example(trainer._draw(0, 0))
    groups = trainer._replay.state_dict()["groups"]
    assert [group["row"] for group in groups] == [drawn["row"], trainer.train_dataset[1]["row"]]
    for group in groups:
        scores = [ToyTask().score(json.loads(group["row"]), text) for text in MIXED]
        assert group["mean_reward"] == pytest.approx(sum(score.total for score in scores) / 4)
        assert group["success"] == sum(score.success for score in scores) / 4


def test_new_rows_follow_the_curriculum(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, curriculum=True, curriculum_review=0.0, resample_rounds=1, max_steps=2)
    levels = {json.loads(trainer._train_example(i)["row"])["level"] for i in range(len(trainer.train_dataset))}
    assert levels == {trainer.task.levels[0]}
    trainer.train()


def test_pairs_stay_within_their_process():
    empty = [True, False, True, True, False, False]  # two processes with three groups each
    assert _paired(empty, [False, True, False, False], processes=2) == [(0, 0), (3, 2)]
    assert _paired(empty, [True, True, True, True], processes=2) == []


def test_it_is_refused_with_vllm_and_without_a_task(tiny_path, tmp_path):
    with pytest.raises(ValueError, match="resample_rounds does not work with use_vllm"):
        config(tmp_path, resample_rounds=1, use_vllm=True)
    with pytest.raises(ValueError, match="resample_rounds=-1"):
        config(tmp_path, resample_rounds=-1)
