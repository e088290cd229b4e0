"""Prefix scores of bricks equal the scores of the prefixes as answers of their own."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stepped import prefix_scores
from trl_grpo_tasks import get_task
from trl_grpo_tasks.rewards.worker import check_prefix_scores
from trl_grpo_tasks.tasks.brick import steps
from trl_grpo_tasks.tasks.brick.physics.stability import SolverError
from trl_grpo_tasks.tasks.brick.structure import parse

TASK = get_task("brick")
ROWS = TASK.dataset("train", 12, 3)
ROWS.append({**ROWS[0], "voxels": None, "gold": None})  # a caption of the user's, without a target


@pytest.fixture
def no_cache():
    steps._margin.cache_clear()
    yield
    steps._margin.cache_clear()


def by_scoring(row, text, task=TASK):
    """The mean of two components of the whole text."""
    components = task.score(row, text).components
    return (components["stability"] + components["shape"]) / 2


def assert_scores_are_those_of_prefixes(row, text, task=TASK):
    pairs = prefix_scores(task, row, text)
    for place, score in pairs:
        assert score == pytest.approx(by_scoring(row, text[:place], task), abs=1e-6), text[:place]
    ends = [n + 1 for n, letter in enumerate(text) if letter == "\n" and text[:n].rpartition("\n")[2].strip()]
    assert [place for place, _ in pairs] == [*ends, len(text)]


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_gold_and_bad(number):
    row = ROWS[number]
    for text in (TASK.gold(ROWS[0] if row["gold"] is None else row), TASK.bad(row)):
        assert_scores_are_those_of_prefixes(row, text)
        assert_scores_are_those_of_prefixes(row, text.rstrip("\n"))


def test_rows_with_weights_are_among_them():
    assert any(row["loads"] for row in ROWS) and any(not row["loads"] for row in ROWS)


def mutated(text, seed):
    """The text with a few lines and letters removed, repeated, swapped or replaced."""
    rng = random.Random(seed)
    lines = text.splitlines(keepends=True)
    for _ in range(rng.randint(0, 3)):
        n = rng.randrange(len(lines)) if lines else 0
        lines[n : n + 1] = rng.choice([[], lines[n : n + 1] * 2, ["\n"], ["so: \n"], lines[n : n + 1][::-1]])
    if rng.random() < 0.3:
        rng.shuffle(lines)
    text = "".join(lines)
    for _ in range(rng.randint(0, 2)):
        n = rng.randrange(len(text) + 1)
        text = text[:n] + rng.choice(["", "9", "-", " ", "\n", "é", "x", "\x85"]) + text[n + rng.randint(0, 2) :]
    return text


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(ROWS) - 2), st.integers(0, 1 << 30))
def test_mutated_golds(number, seed):
    row = ROWS[number]
    assert_scores_are_those_of_prefixes(row, mutated(TASK.gold(row), seed))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60) | st.from_regex(r"([1-8]x[1-8] \(-?[0-9]{1,3},[0-9]{1,2},[0-9]\)\n){0,4}", fullmatch=True))
def test_any_text(text):
    row = ROWS[0]
    pairs, reason = check_prefix_scores(TASK.prefix_scores(row, text), text)
    assert reason == "" and pairs[-1][1] == pytest.approx(by_scoring(row, text), abs=1e-6)


def test_limits_of_bricks_and_of_lines():
    row, text = ROWS[0], TASK.gold(ROWS[0])
    few = get_task("brick", {"max_bricks": 2})
    assert_scores_are_those_of_prefixes(row, text, few)
    long = text + "\n" * 2000 + "1x1 (0,0,0)\n" * 3
    pairs = TASK.prefix_scores(row, long)
    assert len(pairs) == text.count("\n") + 1 and pairs[-1][1] == pytest.approx(by_scoring(row, long))
    assert pairs[-1][1] < pairs[-2][1], "lines that are not read make the answer invalid"


def test_the_pivot_form():
    task = get_task("brick", {"text_form": "pivot"})
    row = task.dataset("train", 1, 5)[0]
    assert "@" in task.gold(row)
    assert_scores_are_those_of_prefixes(row, task.gold(row), task)


def test_without_a_solver_it_is_connection_that_counts(monkeypatch, no_cache):
    monkeypatch.setattr("trl_grpo_tasks.tasks.brick.physics.solvers.installed", lambda solver: False)
    row = ROWS[0]
    with pytest.warns(RuntimeWarning, match="no linear-programming solver"):
        assert_scores_are_those_of_prefixes(row, TASK.gold(row))


def test_a_solver_that_fails_gives_none(monkeypatch, no_cache):
    def fails(*_, **__):
        raise SolverError("gave up")

    monkeypatch.setattr(steps, "analyse", fails)
    row = ROWS[0]
    assert TASK.prefix_scores(row, TASK.gold(row)) is None


def test_every_line_is_known_to_be_a_brick_or_not():
    assert parse("2x4 (0,0,0)\n\nso\n 2x4 (0,0,1)").is_brick == [True, False, True]
