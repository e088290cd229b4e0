"""The machine constraint is compared with brute force: every block on every face."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tokenizer_makes import MAKES
from tests.support.walks import random_text, random_tokens
from tests.tasks.machine.test_tree import car, catapult, random_machine
from trl_grpo_tasks.constraints import Vocabulary
from trl_grpo_tasks.tasks.machine import ConstructionTree
from trl_grpo_tasks.tasks.machine import constraint as constraint_module
from trl_grpo_tasks.tasks.machine.blocks import BLOCKS, PROMPT_BLOCKS
from trl_grpo_tasks.tasks.machine.constraint import MachineTree, machine_constraint
from trl_grpo_tasks.tasks.machine.tree import ROOT, Block

KINDS = tuple(BLOCKS)
SIGNS = [sign.encode() for sign in '0123456789-abcdefghijklmnopqrstuvwxyz_[]{},:"']
VOCABULARY = Vocabulary(
    [*SIGNS, None, b',{"id":"', b'","order_id":', b'1"', b'5,"', b"}]", b"12", b'0,"bp_id":2},{"id":"1'],
    eos=len(SIGNS),
)


def legal_blocks(blocks, kinds):
    """Return every legal next block, found by building and validating it."""
    faces = [(p, f) for p, block in enumerate(blocks) for f in range(len(block.type.faces))]
    for kind in kinds:
        for ends in itertools.permutations(faces, 2) if BLOCKS[kind].two_ended else ((face,) for face in faces):
            block = Block(kind, *itertools.chain(*ends))
            if kind != "0" and not ConstructionTree((*blocks, block)).validate():
                yield block


@pytest.mark.parametrize("seed", range(4))
def test_choices_match_brute_force(seed):
    rng = random.Random(seed)
    machine = random_machine(rng, rng.randint(1, 7))
    if len(machine.blocks) == 1:
        machine = ConstructionTree((ROOT, Block("30", 0, 4)))
    kinds = [*rng.sample([kind for kind in KINDS if not BLOCKS[kind].two_ended and kind != "0"], 4), "9", "30"]
    tree = MachineTree(kinds, 20)
    node = (tree.root({})[0], machine.to_json()[:-1])
    found = set()

    def collect(node, text):
        for literal, after in tree.choices(node):
            if after is None:
                assert literal == "]"
            elif literal.endswith("}"):
                found.add(text + literal)
            else:
                collect(after, text + literal)

    collect(node, "")
    expected = {
        ConstructionTree((*machine.blocks, block)).to_json()[len(machine.to_json()) - 1 : -1]
        for block in legal_blocks(machine.blocks, dict.fromkeys(kinds))
    }
    assert found == expected and found


@settings(max_examples=30)
@given(st.randoms(use_true_random=False), st.integers(2, 18))
def test_everything_generated_is_valid(rng, max_blocks):
    tree = MachineTree(KINDS, max_blocks)
    text = random_text(tree.choices, tree.choices(tree.root({})), rng)
    machine = ConstructionTree.parse(text)
    assert machine.validate() == [] and machine.to_json() == text and 2 <= len(machine.blocks) <= max_blocks


@pytest.mark.parametrize("make", [name for name in MAKES if name not in ("metaspace", "word_level")])  # have no braces
def test_random_tokens_under_the_mask_make_valid_machines(make):
    tokenizer = MAKES[make]
    constraint = machine_constraint(tokenizer, PROMPT_BLOCKS, 4)
    rng = random.Random(1)
    for _ in range(3):
        text = tokenizer.decode(random_tokens(constraint, {}, rng)[:-1])
        assert ConstructionTree.parse(text).validate() == [], text


def spells(constraint, row, text):
    """Return whether the constraint accepts a text, character by character."""
    state = constraint.start(row)
    try:
        for sign in text:
            state.accept(SIGNS.index(sign.encode()))
        state.accept(len(SIGNS))
    except ValueError:
        return False
    return state.finished


def test_valid_machines_are_accepted_and_others_rejected():
    rng = random.Random(4)
    constraint = machine_constraint(VOCABULARY, KINDS, 20)
    for tree in (car(), catapult(), *(random_machine(rng, 12) for _ in range(10))):
        assert spells(constraint, {}, tree.to_json())
        assert not spells(constraint, {"max_blocks": len(tree.blocks) - 1}, tree.to_json())
        assert not spells(constraint, {"blocks": ["15"]}, tree.to_json())
    overlapping = ConstructionTree((ROOT, Block("2", 0, 2), Block("2", 0, 2)))
    assert overlapping.validate() and not spells(constraint, {}, overlapping.to_json())
    assert not spells(constraint, {}, ConstructionTree((ROOT,)).to_json())


def test_evicted_growths_are_recomputed(monkeypatch):
    monkeypatch.setattr(constraint_module, "_GROWTHS_KEPT", 2)
    tree = MachineTree(KINDS, 12)
    for seed in range(5):
        text = random_text(tree.choices, tree.choices(tree.root({})), random.Random(seed))
        assert ConstructionTree.parse(text).validate() == []


@pytest.mark.parametrize(
    ("kinds", "max_blocks", "message"),
    [
        (("15", "99"), 10, "blocks 15, 99: name some of 0, 15"),
        (("0", "9"), 10, "including a one-ended type other than 0"),
        (KINDS, 1, "max_blocks is 1; it must be from 2 to 200"),
    ],
)
def test_invalid_options_are_reported_immediately(kinds, max_blocks, message):
    with pytest.raises(ValueError, match=message):
        MachineTree(kinds, max_blocks)
