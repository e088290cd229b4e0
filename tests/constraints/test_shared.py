"""Shared states: they give the masks and forced tokens of independent states, for random sequences of operations."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_tasks.constraints import (
    ChoiceTreeConstraint,
    Grammar,
    GrammarConstraint,
    OneSpelling,
    ThinkThen,
    pack_ids,
)
from trl_grpo_tasks.constraints import shared as shared_module
from trl_grpo_tasks.constraints.base import unpack
from trl_grpo_tasks.constraints.budget import within
from trl_grpo_tasks.constraints.shared import FORCED_LIMIT, SharedStates
from trl_grpo_tasks.constraints.table import FREE, MaskTable
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.tasks.brick.constraint import brick_constraint

TOKENIZER = make_tokenizer([*"0123456789-x,(): @\n", "10", "12", "x1", ", ", ": ", "1x", ",0", ")\n"], 96)
PATTERNS = (r"(1[02]?x){3}", r"-?[0-9]{1,3}", r"12: 1+", None)
WIDE_MODEL = len(TOKENIZER) + 45  # models often have more outputs than their tokenizer has tokens


def tree_root(row):
    return None if row["pattern"] is None else (PATTERNS.index(row["pattern"]), 0)


def tree_choices(node):
    kind, depth = node
    if depth == 3:
        return [("", None)] if kind else [("x", None), ("", None)]
    if kind == 1 and depth == 1:
        return [("12: 10", (kind, 2))]  # forced text with several tokenizations
    return [(f"{n}x", (kind, depth + 1)) for n in (1, 10, 12)] + [("1x1", (kind, depth + 1))]


class CountingState:
    """A state of another author: one to four zeros. It cannot be shared, and its mask is overwritten by `accept`."""

    def __init__(self):
        self.finished, self._count, self._words = False, 0, pack_ids([], len(TOKENIZER))

    def mask(self):
        zero, end = TOKENIZER.convert_tokens_to_ids("0"), TOKENIZER.eos_token_id
        allowed = [] if self.finished else [zero] * (self._count < 4) + [end] * (self._count > 0)
        self._words[:] = pack_ids(allowed, len(TOKENIZER))
        return self._words

    def accept(self, token):
        if not unpack(self.mask(), len(TOKENIZER))[token]:
            raise ValueError(f"token {token} is not allowed here")
        self.finished, self._count = token == TOKENIZER.eos_token_id, self._count + 1


class CountingConstraint:
    vocab_size = len(TOKENIZER)

    def start(self, row):
        return None if row["pattern"] is None else CountingState()


GRAMMARS = GrammarConstraint(TOKENIZER, lambda row: None if row["pattern"] is None else Grammar.regex(row["pattern"]))
TREE = ChoiceTreeConstraint(TOKENIZER, tree_root, tree_choices)
CONSTRAINTS = {
    "grammars": GRAMMARS,
    "spelled grammars": OneSpelling(TOKENIZER, GRAMMARS),
    "tree": TREE,
    "spelled tree": OneSpelling(TOKENIZER, TREE),
    "bricks": brick_constraint(TOKENIZER, world=3, max_bricks=3, canonical=True),
    "spelled bricks": OneSpelling(TOKENIZER, brick_constraint(TOKENIZER, world=2, max_bricks=4, form="pivot")),
    "thought, spelled grammars": ThinkThen(TOKENIZER, OneSpelling(TOKENIZER, GRAMMARS), [": ", "))"], most_tokens=4),
    "thought, tree": ThinkThen(TOKENIZER, TREE, "@@", least_tokens=1),
    "tree in time": within(TREE, 6),
    "spelled grammars in time": within(OneSpelling(TOKENIZER, GRAMMARS), 12),
    "thought in time": within(ThinkThen(TOKENIZER, TREE, "@@"), 9),
    "another author's": CountingConstraint(),
}


def tokens_of(mask):
    return np.flatnonzero(unpack(mask, len(TOKENIZER))).tolist()


class Oracle:
    """The completion of one row. Its masks come from a new state that accepts all tokens one by one."""

    def __init__(self, constraint, row):
        self.constraint, self.row, self.tokens, self.numbers = constraint, row, [], []

    def state(self):
        state = self.constraint.start(self.row)
        for token in self.tokens if state is not None else ():
            state.accept(token)
        return state

    def append(self, token, number):
        self.tokens.append(token)
        self.numbers.append(number)

    def forced(self):
        """Return the tokens that must follow: as long as a mask has one token, this token."""
        assert self.constraint.start(self.row) is not None
        state, found = self.state(), []
        while not state.finished and len(allowed := tokens_of(state.mask())) == 1:
            found += allowed
            state.accept(allowed[0])
        return found


def check_forced(oracle, forced, table):
    expected = oracle.forced() if oracle.constraint.start(oracle.row) is not None else []
    assert list(forced.tokens) == expected
    for token, number in zip(*forced, strict=True):
        assert table.ids(number).tolist() == [token]
        oracle.append(token, number)


@pytest.mark.parametrize("kept", [3, 4096])
@pytest.mark.parametrize("kind", CONSTRAINTS)
@given(data=st.data())
@settings(max_examples=8)
def test_shared_states_agree_with_independent_ones(kind, kept, data):
    constraint, table = CONSTRAINTS[kind], MaskTable(WIDE_MODEL)
    oracles: dict[int, Oracle] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_module, "_MASK_CACHE", kept)
        states = SharedStates(constraint, table)
        for _ in range(data.draw(st.integers(3, 25))):
            kinds = ["start", "accept", "accept", "accept", *(["restart", "release"] if oracles else [])]
            operation = data.draw(st.sampled_from(kinds))
            if operation == "start":
                slots = data.draw(st.lists(st.integers(0, 5), unique=True, max_size=4))
                rows = [{"pattern": data.draw(st.sampled_from(PATTERNS))} for _ in slots]
                started = states.start(slots, rows)
                for slot, row, forced in zip(slots, rows, started, strict=True):
                    oracles[slot] = Oracle(constraint, row)
                    check_forced(oracles[slot], forced, table)
            elif operation == "accept":
                open_slots = [slot for slot, oracle in oracles.items() if (s := oracle.state()) and not s.finished]
                slots = [slot for slot in open_slots if data.draw(st.booleans())]
                tokens = [data.draw(st.sampled_from(tokens_of(oracles[slot].state().mask()))) for slot in slots]
                numbers = states.numbers(slots)
                accepted = states.accept(slots, tokens)
                for slot, token, number, forced in zip(slots, tokens, numbers, accepted, strict=True):
                    oracles[slot].append(token, number)
                    check_forced(oracles[slot], forced, table)
            else:
                slot = data.draw(st.sampled_from(sorted(oracles)))
                if operation == "release":
                    states.release(slot)
                    del oracles[slot]
                else:
                    oracle = oracles[slot]
                    length = data.draw(st.integers(0, len(oracle.tokens)))
                    del oracle.tokens[length:], oracle.numbers[length:]
                    if not (state := oracle.state()) or not state.finished:
                        check_forced(oracle, states.restart(slot, oracle.tokens), table)
                    else:
                        assert states.restart(slot, oracle.tokens).tokens == ()
            check_numbers(states, oracles, table)
    for oracle in oracles.values():
        if oracle.constraint.start(oracle.row) is not None:
            state = constraint.start(oracle.row)
            for token, number in zip(oracle.tokens, oracle.numbers, strict=True):
                assert table.ids(number).tolist() == tokens_of(state.mask())
                state.accept(token)


def check_numbers(states, oracles, table):
    """Compare the next masks of all slots with those of independent states; slot 9 is never used."""
    for slot, number in zip(range(10), states.numbers(range(10)), strict=True):
        state = oracles[slot].state() if slot in oracles else None
        if state is None or state.finished:
            assert number == FREE
        else:
            assert table.ids(number).tolist() == tokens_of(state.mask())


def test_equal_beginnings_are_computed_once(monkeypatch):
    counter, kind = Counter(), type(TREE.start({"pattern": PATTERNS[0]}))
    for name in ("accept", "fork"):
        method = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *a, _name=name, _of=method: counter.update([_name]) or _of(*a))
    states = SharedStates(TREE, MaskTable(len(TOKENIZER)))
    slots = list(range(8))
    rows = [{"pattern": PATTERNS[0]} for _ in slots]  # equal, but not the same object
    ten, twelve, x = TOKENIZER.convert_tokens_to_ids(["10", "12", "x"])
    states.start(slots, rows)
    states.accept(slots, [twelve] * 8)
    states.accept(slots, [x] * 8)
    assert (counter["accept"], counter["fork"]) == (2, 2)
    states.accept(slots, [ten] * 4 + [twelve] * 4)
    assert (counter["accept"], counter["fork"]) == (4, 4)
    states.accept(slots, [x] * 8)
    assert (counter["accept"], counter["fork"]) == (6, 6)


def test_disallowed_tokens_are_errors_and_long_forced_texts_are_cut():
    states = SharedStates(TREE, MaskTable(len(TOKENIZER)))
    states.start([0], [{"pattern": PATTERNS[0]}])
    with pytest.raises(ValueError, match="not allowed"):
        states.accept([0], [TOKENIZER.convert_tokens_to_ids("-")])
    with pytest.raises(ValueError, match="not allowed"):
        states.restart(0, TOKENIZER.convert_tokens_to_ids(["1", "-"]))
    endless = ChoiceTreeConstraint(TOKENIZER, lambda row: 0, lambda node: [("1", 0)])
    table = MaskTable(len(TOKENIZER))
    states = SharedStates(endless, table)
    (forced,) = states.start([0], [{}])
    one = TOKENIZER.convert_tokens_to_ids("1")
    assert forced.tokens == (one,) * FORCED_LIMIT and table.ids(states.numbers([0])[0]).tolist() == [one]
    (forced,) = states.accept([0], [one])
    assert forced.tokens == (one,) * FORCED_LIMIT
