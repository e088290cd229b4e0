"""Prefix scores of machines: whether the blocks so far can be built, against a machine of just these blocks."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stepped import prefix_scores
from trl_grpo_tasks import get_task
from trl_grpo_tasks.tasks.machine.tree import ROOT, Block, ConstructionTree

TASK = get_task("machine")
ROWS = TASK.dataset("train", 12, 2)


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_gold_machines_can_be_built_at_every_block(number):
    row = ROWS[number]
    gold = TASK.gold(row)
    ends = [n + 1 for n, letter in enumerate(gold) if letter == "}"]
    for text in (gold, f"Here it is [1]:\n```json\n{gold}\n```"):
        pairs = prefix_scores(TASK, row, text)
        shift = text.index("[{")
        assert pairs == [*((shift + end, 1.0) for end in ends), (len(text), 1.0)]


def test_the_block_with_the_problem_has_the_credit():
    row = ROWS[0]
    blocks = [ROOT, Block("15", 0, 4), Block("15", 0, 4), Block("15", 1, 0)]  # the third is inside the second
    text = ConstructionTree(tuple(blocks)).to_json()
    assert [score for _, score in prefix_scores(TASK, row, text)] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [score for _, score in prefix_scores(TASK, {**row, "max_blocks": 2}, text)] == [1.0, 1.0, 0.0, 0.0, 0.0]
    alone = ConstructionTree((ROOT,)).to_json()
    assert [score for _, score in prefix_scores(TASK, row, alone)] == [1.0, 0.0], (
        "a start block is no machine, but a start"
    )
    assert [score for _, score in prefix_scores(TASK, row, alone.replace('"0"', '"15"', 1))] == [0.0, 0.0]
    other = f"{text} or\n```json\n{TASK.gold(row)}\n```"
    assert prefix_scores(TASK, row, other)[-1][1] == 1.0, "the whole answer is the fenced list"


def can_be_built(row, blocks):
    """The verdict on the list of these objects as a machine."""
    problems = ConstructionTree.parse(json.dumps(blocks)).validate()
    return not [p for p in problems if "only the start block" not in p] and len(blocks) <= row["max_blocks"]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(ROWS) - 1), st.integers(0, 1 << 30))
def test_mutated_golds(number, seed):
    row, rng = ROWS[number], random.Random(seed)
    blocks = json.loads(TASK.gold(row))
    for _ in range(rng.randint(0, 2)):
        block = rng.choice(blocks)
        key = rng.choice(list(block))
        block[key] = rng.choice([0, 1, 99, -1, "2", "x", None, [{}], {"a": 1}])
    if rng.random() < 0.2:
        del blocks[rng.randrange(len(blocks))]
    text = json.dumps(blocks)
    pairs = prefix_scores(TASK, row, text)
    assert [score for _, score in pairs[:-1]] == [
        float(can_be_built(row, blocks[:n])) for n in range(1, len(blocks) + 1)
    ]
    for _ in range(rng.randint(0, 2)):
        n = rng.randrange(len(text) + 1)
        text = text[:n] + rng.choice(["", "[", "}", '"', "\n", "```", "\\", "{"]) + text[n + rng.randint(0, 2) :]
    pairs, cut = prefix_scores(TASK, row, text), rng.randrange(len(text) + 1)
    assert [pair for pair in pairs[:-1] if pair[0] <= cut] == prefix_scores(TASK, row, text[:cut])[:-1]
    tree = ConstructionTree.parse(text)
    assert pairs[-1][1] == float(not tree.validate() and len(tree.blocks) <= row["max_blocks"])


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80) | st.text(alphabet='[]{}",:0a ', max_size=60))
def test_any_text(text):
    prefix_scores(TASK, ROWS[0], text)
