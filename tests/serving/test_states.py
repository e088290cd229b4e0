"""The states of vLLM's requests against a replay of each completion, under the events of a real engine."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint, OneSpelling, ThinkThen
from trl_grpo_tasks.constraints.base import unpack
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.serving import states as states_module
from trl_grpo_tasks.serving.states import RequestStates

TOKENIZER = make_tokenizer([*"abcde0123456789,", "ab", "cde", "12"], 64)
EOS = TOKENIZER.eos_token_id
OUTPUTS = len(TOKENIZER) + 5  # a padded vocabulary


def grammar_of(row):
    if row["kind"] == "free":
        return None
    if row["kind"] == "bad":
        raise KeyError("no such row")
    return Grammar.regex(row["kind"])


CONSTRAINTS = {
    "grammar": GrammarConstraint(TOKENIZER, grammar_of),
    "one spelling": OneSpelling(TOKENIZER, GrammarConstraint(TOKENIZER, grammar_of)),
    "choices": ChoiceTreeConstraint(
        TOKENIZER, lambda row: 0, lambda n: [("", None)] if n == 4 else [("ab", n + 1), ("cdecde", n + 1), ("1", 4)]
    ),
    "thought": ThinkThen(TOKENIZER, GrammarConstraint(TOKENIZER, grammar_of), "1,", most_tokens=6),
}
KINDS = ["[ab]{1,3}cdecde[0-9]{1,2}", "(ab){2}|a[0-9]*,", "free"]


def allowed(constraint, row, tokens):
    """What a fresh state allows after these tokens; every output for a free row."""
    state = constraint.start(row)
    if state is None:
        return np.ones(OUTPUTS, dtype=bool)
    for token in tokens:
        state.accept(token)
    return np.pad(unpack(state.mask(), constraint.vocab_size), (0, OUTPUTS - constraint.vocab_size))


class Engine:
    """Samples uniformly under the masks of RequestStates, as an engine that runs a changing set of requests."""

    def __init__(self, constraint, seed):
        self.states = RequestStates(constraint, EOS, OUTPUTS, most_requests=64)
        self.constraint, self.rng = constraint, np.random.default_rng(seed)
        self.live = []  # (request, tokens, tokens that were accepted)
        self.done = []

    def add(self, row, tokens=()):
        self.live.append([self.states.start(row), list(tokens), 0])

    def interrupt(self, index, parked=False):
        """The request is dropped and comes back later with its completion so far: all at once, or as new tokens."""
        request, tokens, accepted = self.live.pop(index)
        self.states.release(request)
        if parked:
            self.live.append([self.states.start(request.row, tokens[:accepted]), tokens, accepted])
        else:
            self.add(request.row, tokens)

    def step(self):
        new = []
        for each in self.live:
            new.append((each[0], each[1][each[2] :]))
            each[2] = len(each[1])
        self.states.advance(new)
        logits = torch.zeros(len(self.live) + 1, OUTPUTS)  # the last row is of a request without a constraint
        self.states.mask(logits, {row: each[0] for row, each in enumerate(self.live)})
        assert not logits[-1].any()
        for row, (request, tokens, _) in enumerate(self.live):
            mask = (logits[row] == 0).numpy()
            assert np.array_equal(mask, allowed(self.constraint, request.row, tokens))
            tokens.append(int(self.rng.choice(np.flatnonzero(mask))))
        for each in [each for each in self.live if each[1][-1] == EOS or len(each[1]) > 40]:
            self.live.remove(each)
            self.states.release(each[0])
            self.done.append(each[1])


@pytest.mark.parametrize("kind", CONSTRAINTS)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    events=st.lists(st.sampled_from(["add", "twice", "interrupt", "park", "step"]), max_size=30),
)
def test_masks_are_those_of_a_fresh_state(kind, seed, events):
    engine = Engine(CONSTRAINTS[kind], seed)
    engine.add({"kind": KINDS[0]})
    for event in events:
        if event in ("interrupt", "park") and engine.live:
            engine.interrupt(int(engine.rng.integers(len(engine.live))), event == "park")
        elif event in ("add", "twice"):
            row = {"kind": KINDS[int(engine.rng.integers(len(KINDS)))]}
            for _ in range(1 + (event == "twice")):
                engine.add(row)
        if engine.live:
            engine.step()
    while engine.live:
        engine.step()
    assert engine.done


def masks(states, *requests):
    logits = torch.zeros(len(requests), OUTPUTS)
    states.mask(logits, dict(enumerate(requests)))
    return [set(np.flatnonzero((row == 0).numpy()).tolist()) for row in logits]


def test_a_row_that_fails_ends_alone():
    constraint = CONSTRAINTS["grammar"]
    states = RequestStates(constraint, EOS, OUTPUTS, 4)
    good = states.start({"kind": KINDS[0]})
    states.advance([])
    before = masks(states, good)
    bad = states.start({"kind": "bad"})
    states.advance([])
    assert "no such row" in bad.failure and good.failure is None
    assert masks(states, good, bad) == [*before, {EOS}]
    a = TOKENIZER.convert_tokens_to_ids("a")
    states.advance([(good, [a]), (bad, [EOS])])
    assert masks(states, good)[0] == set(np.flatnonzero(allowed(constraint, good.row, [a])).tolist())
    other = states.start({"kind": KINDS[1]})  # states that are made again keep what was sampled
    states.advance([])
    assert masks(states, good, other)[0] == set(np.flatnonzero(allowed(constraint, good.row, [a])).tolist())


@pytest.mark.parametrize("text", ["e", "a,"])
def test_a_token_that_is_not_allowed_ends_its_request_only(text):
    """It cannot happen unless another processor changes the logits after ours."""
    states = RequestStates(CONSTRAINTS["grammar"], EOS, OUTPUTS, 4)
    wrong, good = states.start({"kind": KINDS[0]}), states.start({"kind": KINDS[0]})
    a = TOKENIZER.convert_tokens_to_ids("a")
    states.advance([(wrong, TOKENIZER.convert_tokens_to_ids(list(text))), (good, [a])])
    assert wrong.failure and masks(states, wrong) == [{EOS}]
    assert masks(states, good)[0] == set(np.flatnonzero(allowed(CONSTRAINTS["grammar"], good.row, [a])).tolist())


def test_a_pass_after_the_end_changes_nothing():
    """Asynchronous scheduling runs a request once more before it learns that the request has ended."""
    states = RequestStates(CONSTRAINTS["grammar"], EOS, OUTPUTS, 4)
    request = states.start({"kind": "a"})
    a = TOKENIZER.convert_tokens_to_ids("a")
    states.advance([(request, [a, EOS])])
    assert len(masks(states, request)[0]) == OUTPUTS
    states.advance([(request, [a])])
    assert request.failure is None and request.tokens == [a, EOS]


def test_masks_do_not_accumulate(monkeypatch):
    monkeypatch.setattr(states_module, "_MOST_MASKS", 6)
    engine = Engine(CONSTRAINTS["grammar"], 0)
    for _ in range(60):  # never idle
        engine.add({"kind": KINDS[int(engine.rng.integers(3))]})
        engine.step()
        assert len(engine.states._table) < 40
