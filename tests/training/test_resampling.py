"""Groups without signal are sampled again: the batch is the one that would have been sampled with the new prompts.
Which groups have a signal, and what replayed groups keep."""

import json

import pytest
import torch

from tests.support.scripted import ScriptedTrainer
from tests.support.toy import ToyTask
from tests.support.training import config, toy_trainer
from trl_grpo_tasks.training.extras.resampling import _paired

MIXED, EQUAL = ["a", "ab", "abc", "bb"], ["dd", "dd", "dd", "dd"]
CUT_OFF = ["a-", "ab-", "abc-", "bb-"]


def make(tiny_path, folder, script, task=None, steps=1, **options):
    trainer = ScriptedTrainer(tiny_path, args=config(folder, max_steps=steps, **options), task=task or ToyTask())
    trainer.script, trainer.current_gradient_accumulation_steps = list(script), 1
    trainer.model.train()
    return trainer


CONSTRAINED = {"constrain": True, "beta": 0.1, "advantage_estimator": "mean"}
CORRECTED = {"importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate"}
DISCOUNTED = {"gamma": 0.9, "beta": 0.1}
PER_SEQUENCE = CORRECTED | {"vllm_importance_sampling_mode": "sequence_truncate"}


@pytest.mark.parametrize("options", [{}, CONSTRAINED, CORRECTED, PER_SEQUENCE, DISCOUNTED],
                         ids=["free", "constrained", "corrected", "corrected per sequence", "discounted"])  # fmt: skip
def test_the_batch_is_that_of_the_new_prompts(tiny_path, tmp_path, options):
    """The new group may be longer, so that everything is padded again. The constraint allows three letters."""
    new = MIXED[::-1] if "constrain" in options else ["aabab", "ab", "abba", "bbabb"]
    ours = make(tiny_path, tmp_path / "ours", [*MIXED, *EQUAL, *EQUAL, *new], resample_rounds=2, **options)
    examples = [ours.train_dataset[0]] * 4 + [ours.train_dataset[1]] * 4
    output = ours._generate_and_score_completions(examples)
    drawn = ours.train_example(ours.extras["resampling"].draw(1, 0))  # the first round has no signal either
    plain = make(tiny_path, tmp_path / "plain", [*MIXED, *new], **options)
    expected = plain._generate_and_score_completions([plain.train_dataset[0]] * 4 + [drawn] * 4)
    assert not ours.script, "two rounds were sampled"
    assert output.keys() == expected.keys()
    mask = expected["completion_mask"].bool()
    for name in output.keys() - {"mask_numbers"}:
        pair = [batch[name] for batch in (output, expected)]
        if pair[1].shape == mask.shape:  # padding differs: TRL's ratio is 1 there
            assert pair[0].shape == mask.shape
            pair = [values[mask] for values in pair]
        torch.testing.assert_close(*pair, atol=1e-6, rtol=1e-5, msg=name)
    losses = [trainer._compute_loss(trainer.model, batch) for trainer, batch in ((ours, output), (plain, expected))]
    torch.testing.assert_close(*losses, atol=1e-7, rtol=1e-6)
    metrics = ours._metrics["train"]
    assert metrics["resample/sampled_groups"] == [2] and metrics["resample/replaced_groups"] == [1]
    assert metrics["resample/dropped_solved"] == [0]
    assert metrics["groups_without_signal"] == [0.5], "other metrics are those of the first rollout"
    assert len(metrics["rewards/match/mean"]) == 1
    assert len(ours._logs["completion"]) == 8
    assert [row for row, _, _ in ours.latest_samples()][4:] == [json.loads(examples[4]["row"])] * 4


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
    drawn = trainer.train_example(trainer.extras["resampling"].draw(0, 0))
    groups = trainer.extras["replay"].state.state_dict()["groups"]
    assert [group["row"] for group in groups] == [drawn["row"], trainer.train_dataset[1]["row"]]
    for group in groups:
        scores = [ToyTask().score(json.loads(group["row"]), text) for text in MIXED]
        assert group["mean_reward"] == pytest.approx(sum(score.total for score in scores) / 4)
        assert group["success"] == sum(score.success for score in scores) / 4


# ---- which groups have a signal


@pytest.mark.parametrize("options", [{}, {"gamma": 0.9}], ids=["completions", "tokens"])
def test_groups_without_a_token_in_the_loss_are_replaced_and_not_stored(tiny_path, tmp_path, options):
    """Rewards differ, but all completions of these groups are cut off, and masked."""
    script = [*CUT_OFF, *CUT_OFF, *CUT_OFF, "a", "ab-", "abc", "bb"]
    options |= {"mask_truncated_completions": True, "resample_rounds": 1, "replay_size": 4}
    trainer = make(tiny_path, tmp_path, script, **options)
    output = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4 + [trainer.train_dataset[1]] * 4)
    metrics = trainer._metrics["train"]
    assert metrics["groups_without_signal"] == [1] and metrics["resample/replaced_groups"] == [1]
    tokens = output["completion_mask"].sum(1).tolist()
    assert tokens == [2, 0, 4, 3, 0, 0, 0, 0] and output["num_items_in_batch"] == sum(tokens)
    (group,) = trainer.extras["replay"].state._groups
    advantages = output["advantages"][:4]
    used = advantages[output["completion_mask"][:4].bool()] if advantages.ndim == 2 else advantages[[0, 2, 3]]
    assert group.priority == pytest.approx(used.abs().mean().item() + 0.01)
    loss = trainer._compute_loss(trainer.model, output)
    loss.backward()
    assert loss.isfinite() and any(p.grad.abs().sum() > 0 for p in trainer.model.parameters())


class TwoGoals(ToyTask):
    """The total is 1 whatever the completion is; its two parts are not."""

    weights = {"first": 1.0, "second": 0.5}
    spec = None

    def score(self, row, completion):
        first = float(completion.startswith("a"))
        return self.make_score({"first": first, "second": 2 - 2 * first}, True, False)


def test_components_that_differ_are_a_signal_if_they_are_normalised_before_the_sum(tiny_path, tmp_path):
    options = {"multi_objective_aggregation": "normalize_then_sum", "task": TwoGoals()}
    trainer = make(tiny_path, tmp_path / "ours", [*MIXED, *EQUAL], **options)
    output = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8)
    assert trainer.latest_rollout.without_signal_P.tolist() == [False, True]
    assert (output["advantages"][:4].abs() > 0.1).all() and (output["advantages"][4:].abs() < 1e-6).all()
    summed = make(tiny_path, tmp_path / "sum", [*MIXED, *EQUAL], task=TwoGoals())
    summed._generate_and_score_completions([summed.train_dataset[0]] * 8)
    assert summed.latest_rollout.without_signal_P.tolist() == [True, True]


def test_new_rows_follow_the_curriculum(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, curriculum=True, resample_rounds=1, max_steps=2)
    levels = {json.loads(trainer.train_example(i)["row"])["level"] for i in range(len(trainer.train_dataset))}
    assert levels == {trainer.task.levels[0]}
    trainer.train()


def test_pairs_stay_within_their_process():
    empty = [True, False, True, True, False, False]  # two processes with three groups each
    assert _paired(empty, [False, True, False, False], processes=2) == [(0, 0), (3, 2)]
    assert _paired(empty, [True, True, True, True], processes=2) == []
