"""The brick constraint is compared with brute force: every brick at every position, and every token."""

import itertools
import random
from bisect import bisect_left
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.brick_structures import cells, random_structure
from tests.support.tokenizer_makes import MAKES
from tests.support.walks import allowed_tokens, allows
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Vocabulary, replay
from trl_grpo_tasks.tasks.brick import constraint as constraint_module
from trl_grpo_tasks.tasks.brick.constraint import BrickTree, brick_constraint
from trl_grpo_tasks.tasks.brick.kit import KIT, PARTS, Kit
from trl_grpo_tasks.tasks.brick.placements import Placements, Rules
from trl_grpo_tasks.tasks.brick.structure import SIZES, Brick, Structure, parse

CHARACTERS = [character.encode() for character in "0123456789x(),-@ \n"]
VOCABULARIES = {
    "characters": Vocabulary([*CHARACTERS, None], eos=len(CHARACTERS)),
    "merged": Vocabulary([*CHARACTERS, None, *(f"{n}".encode() for n in range(-9, 30))], eos=len(CHARACTERS)),
    "spanning": Vocabulary(
        [None, *CHARACTERS, b"x2 (", b"x2 @1 (", b")\n2x", b"1 (", b",0", b"0,1", b"(0,", b"(0,0,0)\n", b"1)\n1x1",
         b",-", b"1x1 (0,0,0)\n1x1 (", b"1x1 (0,0,0)\n1x1 (0,0,1)\n", b"12", b"10,", b"1)", b"\n1", b"\n\n", b"@0 (0",
         b"x", b"11,1", b"2x1 @2 (-1,0,"], eos=0,
    ),
}  # fmt: skip
flags = st.booleans()
FEW_PARTS = Kit(parts=tuple(part for part in PARTS if part[:2] in ((1, 4), (2, 2), (2, 6))))


def legal_bricks(bricks, world, attach, canonical, sizes=SIZES):
    """Return every legal next brick, by a direct implementation of the rules."""
    taken = {cell for brick in bricks for cell in cells(brick)}
    studs = {(x, y, z + step) for x, y, z in taken for step in (1, -1)}
    places = itertools.product(sizes, range(world), range(world), range(world))
    for (h, w), x, y, z in places:
        if x + h > world or y + w > world:
            continue
        if canonical and bricks and (z, -x, -y) <= (bricks[-1].z, -bricks[-1].x, -bricks[-1].y):
            continue
        brick = Brick(h, w, x, y, z)
        own = cells(brick)
        if own.isdisjoint(taken) and not (attach and z > 0 and own.isdisjoint(studs)):
            yield brick


class Oracle:
    """Decides which texts are allowed by enumerating all legal lines."""

    def __init__(self, world, max_bricks, form, attach, canonical, max_offset, sizes=SIZES):
        self.max_bricks = max_bricks

        @lru_cache(None)
        def lines(bricks):
            """Return the legal next lines with their bricks."""
            found = {}
            for brick in legal_bricks(bricks, world, attach, canonical, sizes) if len(bricks) < max_bricks else ():
                if form == "absolute":
                    found[f"{brick.h}x{brick.w} ({brick.x},{brick.y},{brick.z})\n"] = brick
                    continue
                found[f"{brick.h}x{brick.w} @0 ({brick.x},{brick.y},{brick.z})\n"] = brick
                for number, pivot in enumerate(bricks, 1):
                    offset = (brick.x - pivot.x, brick.y - pivot.y, brick.z - pivot.z)
                    if max(map(abs, offset)) <= max_offset:
                        found["{}x{} @{} ({},{},{})\n".format(brick.h, brick.w, number, *offset)] = brick
            return found

        self._lines = lines
        self._sorted = lru_cache(None)(lambda bricks: sorted(lines(bricks)))

    def allows(self, text, to_end=False):
        """Return whether the text is a prefix of a complete text or, with `to_end`, complete."""
        bricks = ()
        *whole, rest = text.split("\n")
        for line in whole:
            brick = self._lines(bricks).get(line + "\n")
            if brick is None:
                return False
            bricks = (*bricks, brick)
        if to_end:
            return not rest and bool(bricks)
        begun = self._sorted(bricks)
        at = bisect_left(begun, rest)
        return not rest or (at < len(begun) and begun[at].startswith(rest))


def walk(constraint, choose, oracle=None, row=None):
    """Generate a text token by token, comparing every mask with the oracle."""
    vocabulary, state, written = constraint.vocabulary, constraint.start(row or {}), ""
    while not state.finished:
        allowed = allowed_tokens(state, vocabulary.size)
        if oracle:
            expected = [
                token
                for token, spelling in enumerate(vocabulary.bytes_of)
                if (token == vocabulary.eos and oracle.allows(written, to_end=True))
                or (spelling and oracle.allows(written + spelling.decode()))
            ]
            assert allowed == expected, written
        token = choose(allowed)
        state.accept(token)
        written += (vocabulary.bytes_of[token] or b"").decode()
    return written


def chooser(seed, end, patience=0.1):
    """Return a random chooser that seldom ends the text."""
    chance = random.Random(seed)

    def choose(allowed):
        going_on = [token for token in allowed if token != end]
        return end if not going_on or (end in allowed and chance.random() < patience) else chance.choice(going_on)

    return choose


# Masks


@pytest.mark.parametrize("canonical", [False, True], ids=["any_order", "canonical"])
@pytest.mark.parametrize("attach", [True, False], ids=["attached", "loose"])
@pytest.mark.parametrize("form", ["absolute", "pivot"])
def test_masks_equal_brute_force(form, attach, canonical):
    # Every vocabulary with every world and every rule, though not with all rules at once.
    turn = 2 * attach + canonical + (form == "pivot")
    worlds = [(3, 5, 5, KIT), (4, 3, 1, KIT), (2, 40, 1, KIT), (5, 3, 2, FEW_PARTS)]
    for n, (world, max_bricks, max_offset, kit) in enumerate(worlds):
        vocabulary = list(VOCABULARIES.values())[(turn + n) % 3]
        rules = {"world": world, "max_bricks": max_bricks, "form": form, "attach": attach, "canonical": canonical}
        constraint = brick_constraint(vocabulary, **rules, max_offset=max_offset, kit=kit)
        oracle = Oracle(**rules, max_offset=max_offset, sizes=kit.sizes)
        lengths = [walk(constraint, chooser(n, vocabulary.eos, 0.05), oracle).count("\n") for n in range(3)]
        assert max(lengths) > 1 and max(lengths) <= max_bricks


@pytest.mark.parametrize("form", ["absolute", "pivot"])
def test_masks_equal_brute_force_where_numbers_have_two_digits(form):
    rules = {"world": 12, "max_bricks": 3, "form": form, "attach": False, "canonical": False, "max_offset": 11}
    oracle = Oracle(**rules)
    for vocabulary in (VOCABULARIES["merged"], VOCABULARIES["spanning"]):
        walk(brick_constraint(vocabulary, **rules), chooser(1, vocabulary.eos, 0.0), oracle)


@pytest.mark.parametrize("canonical", [False, True], ids=["any_order", "canonical"])
@pytest.mark.parametrize("attach", [True, False], ids=["attached", "loose"])
@pytest.mark.parametrize(("world", "count", "every"), [(1, 1, 1), (5, 40, 1), (9, 60, 8), (20, 60, 60)])
def test_placements_equal_brute_force(world, count, every, attach, canonical):
    chance = random.Random(world)
    rules = Rules(world, max_bricks=1000, attach=attach, canonical=canonical)
    box = rules.everywhere
    placed = Placements.empty(rules)
    for step in range(1, count + 1):
        size = chance.choice(placed.sizes())
        lowest = next(z for z in range(world) if placed.legal[z][size])
        # In canonical order a late brick leaves few choices: take one of the next.
        near = box._replace(low=lowest, high=lowest + 1) if canonical else box
        x = chance.choice(placed.xs(size, near)[-2 if canonical else 0 :])
        y = chance.choice(placed.ys(size, near, x)[-2 if canonical else 0 :])
        z = chance.choice(placed.zs(size, near, x, y))
        placed = placed.place(Brick(*SIZES[size], x, y, z))
        if step % every == 0 or not placed.sizes():
            found = {Brick(*SIZES[size], x, y, z) for size in placed.sizes() for x in placed.xs(size, box)
                     for y in placed.ys(size, box, x) for z in placed.zs(size, box, x, y)}  # fmt: skip
            assert found == set(legal_bricks(placed.bricks, world, attach, canonical))
        if not placed.sizes():
            break
    assert len(placed.bricks) == count or world < 20


# Soundness and completeness


@settings(max_examples=40)
@given(
    st.integers(1, 13), st.integers(1, 12), st.sampled_from(["absolute", "pivot"]), flags, flags, st.integers(0, 6),
    st.sampled_from(sorted(VOCABULARIES)), st.integers(0, 1 << 30),
)  # fmt: skip
def test_every_generated_text_is_buildable(world, max_bricks, form, attach, canonical, max_offset, vocabulary, seed):
    vocabulary = VOCABULARIES[vocabulary]
    constraint = brick_constraint(
        vocabulary, world=world, max_bricks=max_bricks, form=form, attach=attach, canonical=canonical,
        max_offset=max_offset,
    )  # fmt: skip
    text = walk(constraint, chooser(seed, vocabulary.eos))
    reading = parse(text, world, max_offset)
    structure = reading.structure
    assert reading.problems == [] and reading.lines == len(structure) >= 1
    assert structure.problems(max_bricks) == []
    assert not attach or structure.floating == []
    assert not canonical or structure == structure.canonical()
    assert ("@" in text) == (form == "pivot")


@pytest.mark.parametrize("make", MAKES)
def test_every_structure_is_accepted_in_the_tokenizers_own_tokenization(make):
    tokenizer = MAKES[make]
    constraint = brick_constraint(tokenizer)
    for seed in range(3):
        structure = random_structure(30, seed)
        tokens = [*tokenizer.encode(structure.text, add_special_tokens=False), tokenizer.eos_token_id]
        assert allows(constraint, {}, tokens)


# Options, rows and memory


def test_a_row_may_have_a_world_and_a_limit_of_its_own():
    vocabulary = VOCABULARIES["characters"]
    constraint = brick_constraint(vocabulary, max_bricks=2)
    assert {walk(constraint, choose, row={"world": 1}) for choose in (min, max)} == {"1x1 (0,0,0)\n"}
    assert walk(constraint, max, row={"world": 1, "max_bricks": 9}) == "1x1 (0,0,0)\n"
    longest = chooser(0, vocabulary.eos, 0.0)
    assert walk(constraint, longest, row={"world": None, "max_bricks": 5}).count("\n") == 5
    assert walk(constraint, longest, row={"max_bricks": None}).count("\n") == 2
    structure = parse(walk(constraint, longest, row={"world": 3, "max_bricks": 8}), 3).structure
    assert structure.problems(8) == []
    with pytest.raises(ValueError, match="world is 0; it must be between 1 and 1000"):
        constraint.start({"world": 0})
    with pytest.raises(ValueError, match="max_bricks is 2001; it must be between 1 and 2000, the number of lines"):
        brick_constraint(vocabulary, max_bricks=2001)  # at once, not at the first row


def test_placements_are_cached_evicted_and_recomputed(monkeypatch):
    vocabulary = VOCABULARIES["characters"]
    structure = random_structure(12, 0, world=8)
    tokens = [*(CHARACTERS.index(character.encode()) for character in structure.text), vocabulary.eos]

    def masks_and_tree():
        tree = BrickTree(8, 100, "absolute", attach=True)
        constraint = ChoiceTreeConstraint(vocabulary, tree.root, tree.choices, look_ahead=False)
        return [replay(constraint, {}, tokens) for _ in range(2)], tree, constraint

    (first, again), tree, _ = masks_and_tree()
    assert np.array_equal(first, again) and len(tree.placements) == 13
    monkeypatch.setattr(constraint_module, "_PLACEMENTS_KEPT", 2)
    (forgetful, _), tree, constraint = masks_and_tree()
    assert np.array_equal(first, forgetful) and len(tree.placements) == 2
    middle = (*tree.root({})[0][:2], Structure(structure.bricks[:6]).text)
    constraint.expand.cache_clear()
    found = tree.choices((middle,))
    assert tree.placements[middle].bricks == structure.bricks[:6] and len(tree.placements) == 2
    expected = {f"{b.h}x{b.w} (" for b in legal_bricks(structure.bricks[:6], 8, True, False)}
    assert {text for text, _ in found} == expected | {""}
