"""Every loss of TRL, with and without constraints, against an independent float64 implementation.

A rollout goes through the trainer's own pipeline: sampling, masks, old and reference log-probs, shuffling, two
micro-batches. With two iterations the policy then moves. The loss of one optimizer step, its gradients with respect
to all parameters, and the metrics are compared with tests/loss_oracle.py.
"""

import ast
import dataclasses
import inspect
import itertools
import textwrap
from typing import NamedTuple

import pytest
import torch
from trl import GRPOTrainer

from tests.support.exhaustive import exhaustive_but
from tests.support.loss_rollouts import GROUP, Cell, Laboratory, objective
from trl_grpo_tasks.constraints import scoring
from trl_grpo_tasks.training.config import CHOICES


class Setting(NamedTuple):
    num_iterations: int
    temperature: float
    beta: float
    entropy_coef: float


def trl_choices(option):
    """The values of an option that TRL's loss knows, from its source: TRL has no list of them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss)))
    comparisons = [
        node for node in ast.walk(tree) if isinstance(node, ast.Compare) and ast.unparse(node.left) == f"self.{option}"
    ]
    constants = [part for node in comparisons for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return sorted({constant.value for constant in constants})


def assert_same(ours, expected):
    """A loss, its gradients and its metrics in float32 against those in float64."""
    (loss, grads, metrics), (expected_loss, expected_grads, expected_metrics) = ours, expected
    assert loss.item() == pytest.approx(expected_loss.item(), abs=2e-5)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        scale = expected_grads[name].abs().max().item()
        torch.testing.assert_close(grad.double(), expected_grads[name], rtol=0, atol=1e-4 * scale, msg=name)
    for logged, wanted in zip(metrics, expected_metrics, strict=True):
        assert {name: logged[name] for name in wanted} == pytest.approx(wanted, abs=2e-5)


@pytest.fixture(scope="module")
def the_laboratory(tmp_path_factory):
    return Laboratory(tmp_path_factory.mktemp("losses"))


@pytest.fixture
def laboratory(the_laboratory, monkeypatch):
    monkeypatch.setattr(scoring, "WIDE_TOKENS", 0)  # so that masks over this small vocabulary can be wide
    return the_laboratory


every_loss = pytest.mark.parametrize("loss_type", trl_choices("loss_type"))
every_level = pytest.mark.parametrize("level", trl_choices("importance_sampling_level"))
both_constraints = pytest.mark.parametrize("kind", ["narrow", "wide"])
# Every loss with all parts that have an effect, and then in two of the 15 other settings.
FULL, *OTHERS = [Setting(*values) for values in itertools.product([2, 1], [0.7, 1.0], [0.3, 0.0], [0.2, 0.0])]
LOSSES = list(itertools.product(["none", "narrow", "wide"], trl_choices("loss_type"),
                                trl_choices("importance_sampling_level")))  # fmt: skip
FULL_CASES = [(*loss, FULL) for loss in LOSSES]
CASES = [(*loss, OTHERS[(i + 4 * turn) % 15]) for turn in range(2) for i, loss in enumerate(LOSSES)]


@pytest.mark.parametrize("option", ["loss_type", "importance_sampling_level"])
def test_the_matrix_has_every_choice_of_trl(option):
    assert trl_choices(option) == sorted(CHOICES[option])


def test_the_settings_are_pairwise():
    """Each pair of two values of different settings, and each value of a setting with each kind, loss and level."""
    columns = [(*one[:3], *one[3]) for one in CASES]
    for i, j in itertools.combinations(range(7), 2):
        pairs = {(one[i], one[j]) for one in columns}
        assert len(pairs) == len({one[i] for one in columns}) * len({one[j] for one in columns}), (i, j)


@pytest.mark.parametrize(
    ("kind", "loss_type", "level", "setting"), exhaustive_but(FULL_CASES, [*FULL_CASES, *CASES]), ids=str
)
def test_loss(laboratory, kind, loss_type, level, setting):
    cell = Cell(kind, setting.temperature, setting.num_iterations)
    what = objective(loss_type, level, setting.beta, setting.entropy_coef)
    ours = laboratory.step(cell, what)
    assert_same(ours, laboratory.expected_step(cell, what))
    if kind == "none":
        trainer = laboratory.trl_trainer(setting.temperature)
        loss, grads, metrics = laboratory.step(cell, what, trainer, laboratory.rollout(cell))
        assert torch.equal(ours[0], loss) and ours[2] == metrics
        assert all(torch.equal(ours[1][name], grads[name]) for name in grads)


@every_loss
@both_constraints
def test_forced_tokens_are_not_among_the_top_entropies(laboratory, kind, loss_type):
    """More than half of the tokens are forced, so with them the threshold would be 0 and select every token."""
    cell = Cell(kind)
    what = objective(loss_type, "token", top_entropy_quantile=0.4)
    assert_same(laboratory.step(cell, what), laboratory.expected_step(cell, what))


@every_level
@every_loss
def test_a_micro_batch_without_decisions(laboratory, loss_type, level):
    cell = Cell("narrow")
    whole = laboratory.rollout(cell)
    is_forced = [
        (laboratory.allowed("narrow", batch).sum(-1) == 1) | (batch["completion_mask"] == 0) for batch in whole
    ]
    batches = [
        {name: value[forced.all(1)] if value.ndim else value for name, value in batch.items()}
        for batch, forced in zip(whole, is_forced, strict=True)
    ]
    assert sum(len(batch["advantages"]) for batch in batches) == GROUP
    _, grads, metrics = laboratory.step(cell, objective(loss_type, level), batches=batches)
    assert all((grad == 0).all() for grad in grads.values())
    assert all(logged["kl"] == logged["entropy"] == 0 for logged in metrics)


@every_level
@pytest.mark.parametrize("kind", ["none", "narrow", "wide"])
def test_the_matrix_reaches_every_case(laboratory, kind, level):
    """Ratios are clipped at both ends and by delta; masks are as narrow or as wide as their name says."""
    cells, what = [Cell(kind, temperature) for temperature in (0.7, 1.0)], objective("grpo", level)
    steps = [laboratory.expected_step(cell, what) for cell in cells]
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean"):
        assert 0 < max(logged[name] for step in steps for logged in step[2]) < 1, name
    no_delta = dataclasses.replace(what, delta=100.0)
    assert any(step[0] != laboratory.expected_step(cell, no_delta)[0] for cell, step in zip(cells, steps, strict=True))
    counts = torch.cat([laboratory.allowed(kind, batch).sum(-1).flatten() for batch in laboratory.rollout(cells[0])])
    vocab_size = counts.max()  # of the prompt that is not constrained
    choices = counts[(counts > 1) & (counts < vocab_size)]
    if kind == "none":
        assert (counts == vocab_size).all()
    else:
        assert (counts == 1).sum() > 20 and len(choices) > 20
        assert ((choices > scoring.WIDE * vocab_size) == (kind == "wide")).all()
