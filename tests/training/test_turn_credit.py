"""Credit per turn: advantages by hand, exact gradients by enumeration, and what it does in a run."""

import itertools

import pytest
import torch

from tests.support.enumerated import every_completion
from tests.support.toy import ToyTask
from tests.support.toy_environment import EchoTask
from tests.support.training import toy_trainer
from trl_grpo_tasks.constraints.rebuilt import replay_all
from trl_grpo_tasks.constraints.table import pad_mask_numbers
from trl_grpo_tasks.training.extras.turn_credit import turn_advantages
from trl_grpo_tasks.training.record import RolloutRecord

ON = {"rollout": "fast", "max_completion_length": 16}
ROW = {"prompt": "a1x", "letter": "a", "level": "1"}


def test_advantages_by_hand():
    """Returns are [1, 1], [3], [2.5, 1] with discount 0.5 and 2 for the last reward; one was not scored."""
    found = turn_advantages([[0.5, 1.0], [3.0], [2.0, 1.0], None], 0.5)
    assert found == [[1.0 - 2.75, 0.0], [3.0 - 1.75], [2.5 - 2.0, 0.0], []]
    assert turn_advantages([[1.0, 2.0], [5.0]], 1.0) == [[-2.0, 0.0], [2.0]]


def test_the_gradient_is_that_of_the_expected_reward(tiny_path, tmp_path):
    """The expectation over all pairs of conversations, of half the sum over both of advantage x grad(log p)."""
    trainer = toy_trainer(tiny_path, tmp_path, EchoTask(), **ON)
    generation, task, prompt = trainer.generation, trainer.task, trainer._tokenizer(ROW["prompt"])["input_ids"]
    constraint = generation.constraint
    ids = [one for one, _ in every_completion(constraint, ROW)]
    table = generation.tables.start("train", generation.output_size())
    numbers = pad_mask_numbers(replay_all(constraint, [ROW] * len(ids), ids, table))
    width = max(map(len, ids))
    ids_B_T = torch.tensor([prompt + one + [0] * (width - len(one)) for one in ids])
    mask_B_T = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in ids])
    attention = torch.cat([torch.ones(len(ids), len(prompt), dtype=torch.long), mask_B_T], 1)
    with trainer.scoring.under(RolloutRecord("train", mask_numbers_B_T=numbers)):
        logps_B_T = trainer._get_per_token_logps_and_entropies(trainer.model, ids_B_T, attention, width)[0] * mask_B_T
    turns = [[logps_B_T[b, slice(*span)].sum() for span in constraint.turns_of(ROW, one)] for b, one in enumerate(ids)]
    scores = [task.score(ROW, constraint.text_of(ROW, one)) for one in ids]
    p_B = logps_B_T.sum(1).exp()
    assert p_B.sum().item() == pytest.approx(1, abs=1e-5)

    weights = [[0.0] * len(own) for own in turns]
    for a, b in itertools.product(range(len(ids)), repeat=2):
        pair = turn_advantages([scores[a].info["turn_rewards"], scores[b].info["turn_rewards"]], 1.0)
        for which, values in zip((a, b), pair, strict=True):
            for place, value in enumerate(values):
                weights[which][place] += 0.5 * p_B[a].item() * p_B[b].item() * value
    surrogate = sum(
        w * logp for own, found in zip(weights, turns, strict=True) for w, logp in zip(own, found, strict=True)
    )
    surrogate.backward(retain_graph=True)
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    (p_B * torch.tensor([score.total for score in scores])).sum().backward()
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-3, atol=1e-6, msg=name)
    assert max(p.grad.abs().max() for p in trainer.model.parameters()) > 1e-3


@pytest.mark.parametrize(("scale", "clip"), [("none", None), ("group", None), ("batch", 0.8)])
def test_a_rollout_has_the_advantages_of_its_turns(tiny_path, tmp_path, scale, clip):
    """Divided by their root mean square in the group or in the batch, then clipped."""
    options = {"turn_credit": 0.5, "scale_rewards": scale, "advantage_clip": clip}
    trainer = toy_trainer(tiny_path, tmp_path, EchoTask(), **ON, **options)
    trainer.model.train()
    output = trainer._generate_and_score_completions([trainer.train_dataset[i // 4] for i in range(8)])
    record, constraint = trainer.latest_rollout, trainer.generation.constraint
    rewards = [outcome.score.info["turn_rewards"] for outcome in record.outcomes]
    groups = torch.tensor([turn_advantages(rewards[first : first + 4], 0.5) for first in (0, 4)])  # of two turns each
    sizes = {"group": groups.square().mean((1, 2), keepdim=True), "batch": groups.square().mean()}
    expected = groups / (sizes[scale].sqrt() + 1e-4) if scale in sizes else groups
    assert groups.any() and not record.without_signal_P.all()
    if clip is not None:
        assert expected.abs().max() > clip
        expected = expected.clamp(-clip, clip)
    wanted = torch.zeros(output["completion_ids"].shape)
    for b, values in enumerate(expected.view(8, 2)):
        spans = constraint.turns_of(record.rows[b], record.completion_ids[b])
        for span, value in zip(spans, values, strict=True):
            wanted[b, slice(*span)] = value
    torch.testing.assert_close(output["advantages"], wanted * output["completion_mask"])
    masked = {"completion_mask": torch.zeros_like(output["completion_mask"])}  # mask_truncated_completions
    trainer.extras["turn_credit"].after_rewards(masked)
    assert record.without_signal_P.all() and not masked["advantages"].any(), "no token is in the loss"


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (ToyTask, {}, "turn_credit=1.0 needs a task with an environment"),
        (EchoTask, {"advantage_estimator": "mean"}, "has an advantage of its own"),
        (EchoTask, {"gamma": 0.9}, "does not work with gamma=0.9"),
        (EchoTask, {"importance_sampling_level": "sequence"}, "importance_sampling_level='sequence'"),
    ],
)
def test_what_cannot_work_is_refused(tiny_path, tmp_path, task, options, message):
    with pytest.raises(ValueError, match=message):
        toy_trainer(tiny_path, tmp_path, task(), **ON, turn_credit=1.0, **options)
