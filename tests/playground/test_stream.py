"""Streams: each token's distribution against a dense softmax in float64, and against what the Solver samples."""

import math
from collections import Counter

import pytest
import torch

from tests.support.toy import LETTERS, ToyTask
from tests.support.toy_fill import FillTask
from tests.support.toy_repair import AdvisingToy
from trl_grpo_tasks import Solver
from trl_grpo_tasks.constraints import unpack
from trl_grpo_tasks.constraints.turns import MARK
from trl_grpo_tasks.evaluation.samples import Completion
from trl_grpo_tasks.playground.stream import ALTERNATIVES, stream
from trl_grpo_tasks.rewards.repair import RepairTask

ROW = {"prompt": "a1x", "letter": "a", "level": "1"}


@pytest.fixture
def solver_with(tiny_path):
    opened = []

    def make(task=None, path=tiny_path, **options):
        options = {"max_completion_length": 5, "reward_workers": 1} | options
        opened.append(Solver.from_pretrained(path, task or ToyTask(), **options))
        return opened[-1]

    yield make
    for solver in opened:
        solver.close()


def dense(sampler, written, temperature, filters):
    """The probabilities of the next token after these tokens: one pass over the whole text, in float64."""
    ids = [*sampler.tokenizer(ROW["prompt"])["input_ids"], *written]
    with torch.no_grad():
        logits = sampler.model(input_ids=torch.tensor([ids])).logits[0, -1].double() / (temperature or 1.0)
    allowed = torch.ones(len(logits), dtype=torch.bool)
    if sampler.constraint is not None:
        state = sampler.constraint.start(ROW)
        for token in written:
            state.accept(token)
        allowed = torch.from_numpy(unpack(state.mask(), len(logits)))
    weights = torch.where(allowed, (logits - logits.max()).exp(), 0)
    order = weights.argsort(descending=True).tolist()
    if "top_k" in filters:
        weights[order[filters["top_k"] :]] = 0
    if "top_p" in filters:
        probs = weights / weights.sum()
        kept = next(n for n in range(1, len(order) + 1) if probs[order[:n]].sum() >= filters["top_p"])
        weights[order[kept:]] = 0
    return weights / weights.sum(), int(allowed.sum())


@pytest.mark.parametrize(
    ("constrain", "temperature", "filters"),
    [(False, 1.0, {}), (True, 0.6, {}), (True, 0, {}), (True, 1.3, {"top_k": 2}), (False, 0.8, {"top_p": 0.7})],
)
def test_every_step_has_the_distribution_of_a_dense_softmax(solver_with, constrain, temperature, filters):
    sampler = solver_with(constrain=constrain, temperature=temperature, **filters).sampler
    names = [sampler.tokenizer.decode([token]) for token in range(len(sampler.tokenizer))]
    assert len(set(names)) == len(names), "tokens can be told apart by their text"
    for seed in range(4):
        written = []
        for step in stream(sampler, ROW, seed):
            probs, allowed = dense(sampler, written, temperature, filters)
            token = names.index(step.token)
            assert step.allowed == allowed and step.kept == int((probs > 0).sum()) and step.outputs == len(probs)
            assert math.isclose(step.probability, probs[token], rel_tol=1e-4)
            expected = probs.sort(descending=True).values[: min(ALTERNATIVES, step.kept)]
            assert [p for _, p in step.alternatives] == pytest.approx(expected.tolist(), rel=1e-4)
            assert all(math.isclose(p, probs[names.index(name)], rel_tol=1e-4) for name, p in step.alternatives)
            assert temperature > 0 or token == int(probs.argmax())
            written.append(token)
            assert step.written == sampler.tokenizer.decode(written, skip_special_tokens=True)
        assert len(written) <= 5 and (len(written) == 5 or written[-1] == sampler.tokenizer.eos_token_id)


@pytest.mark.exhaustive
def test_the_solver_samples_completions_with_the_probabilities_of_streams(solver_with):
    """A stream gives the exact probability of its completion; the Solver's counts are compared by chi-squared."""
    solver = solver_with(temperature=0.8)
    exact = {}
    for seed in range(1500):
        steps = list(stream(solver.sampler, ROW, seed))
        exact[steps[-1].written] = math.prod(step.probability for step in steps)
    assert 0.95 < sum(exact.values()) <= 1.0001, "nearly all of the 84 completions were met"
    drawn = Counter(sample.completion for sample in solver.sample(ROW, 2000))
    cells = [(drawn[text], 2000 * p) for text, p in exact.items() if 2000 * p >= 5]
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    degrees = len(cells) - 1
    assert degrees > 20 and statistic < degrees + 4 * math.sqrt(2 * degrees), (statistic, degrees)


def test_a_stream_repeats_by_its_seed_and_leaves_the_global_random_state_alone(solver_with):
    sampler = solver_with().sampler
    before = torch.get_rng_state()
    texts = [list(stream(sampler, ROW, seed))[-1].written for seed in range(30)]
    assert texts == [list(stream(sampler, ROW, seed))[-1].written for seed in range(30)] and len(set(texts)) > 5
    assert torch.equal(before, torch.get_rng_state())


def test_forced_tokens_do_not_ask_the_model(solver_with):
    sampler = solver_with().sampler
    passes = []
    sampler.model.register_forward_hook(lambda *_: passes.append(1))
    found = 0
    for seed in range(50):
        passes.clear()
        steps = list(stream(sampler, ROW, seed))
        if len(steps) == 4:  # after three letters, only the end is allowed
            assert steps[-1].is_forced and steps[-1].probability == 1.0 and len(steps[-1].alternatives) == 1
            found += 1
        assert len(passes) == min(len(steps), 3)
    assert found


def test_turns_are_streamed_until_the_conversation_ends(solver_with):
    task = RepairTask(AdvisingToy(), 2, 0.9, None)
    solver = solver_with(task, max_completion_length=24)
    ends = {solver.sampler.tokenizer.eos_token}
    repaired = 0
    for seed in range(20):
        steps = list(stream(solver.sampler, ROW, seed))
        (sample,) = solver.score(ROW, [Completion(steps[-1].written, len(steps))])
        assert steps[-1].token in ends or len(steps) == 24
        assert sample.score["info"]["turns"] == 1 + steps[-1].written.count(MARK) // 2
        repaired += sample.score["info"]["turns"] == 2
    assert repaired, "some answer failed and was followed by another turn"


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}])
def test_masked_models_fill_with_the_distribution_of_a_dense_softmax(solver_with, bert_path, filters):
    solver = solver_with(FillTask(), bert_path, temperature=0.7, **filters)
    sampler, (row, *_) = solver.sampler, FillTask().dataset("train", 6, 0)[1:]
    tokenizer = sampler.tokenizer
    (prompt,) = tokenizer(text=[row["prompt"]])["input_ids"]
    places = [place for place, token in enumerate(prompt) if token == tokenizer.mask_token_id]
    with torch.no_grad():
        logits = sampler.model(input_ids=torch.tensor([prompt])).logits[0, places].double() / 0.7
    letters = tokenizer.convert_tokens_to_ids(list("abcde"))
    steps = list(stream(sampler, row, 4))
    assert len(steps) == row["gaps"] and steps[-1].written == "".join(step.token for step in steps)
    for step, logits_V in zip(steps, logits, strict=True):
        top = sorted(((float(logits_V[id]), id) for id in letters), reverse=True)[: filters.get("top_k", 5)]
        total = sum(math.exp(value) for value, _ in top)
        expected = {tokenizer.convert_ids_to_tokens(id): math.exp(value) / total for value, id in top}
        assert dict(step.alternatives) == pytest.approx(expected, rel=1e-4)
        assert step.probability == pytest.approx(expected[step.token], rel=1e-4)
        assert (step.allowed, step.kept) == (len(LETTERS) + 1, len(expected))
    assert solver.score(row, [Completion(steps[-1].written, len(steps))])[0].score["valid"]
