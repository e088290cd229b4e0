"""Prefix scores of theories: the anomalies of the fields so far, whatever follows."""

import random
import re
from math import log1p

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stepped import prefix_scores
from trl_grpo_tasks import get_task
from trl_grpo_tasks.tasks.theory.words import VOCABULARY

TASK = get_task("theory", {"start": "mixed"})
ROWS = TASK.dataset("train", 20, 1)
GARBAGE = ["FERMION", "END", "x", "BOS", "q_1/2"]


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_the_last_score_is_the_component_of_the_whole_theory(number):
    row = ROWS[number]
    gold = TASK.gold(row)
    pairs = prefix_scores(TASK, row, gold)
    assert pairs[-1] == (len(gold), 1.0), "the anomalies of a gold answer cancel"
    assert prefix_scores(TASK, row, gold + " END")[-1][1] == 0.0, "not a theory"
    starts = [n for n in range(len(gold)) if gold.startswith((" FERMION ", " SCALAR multiplet", " INTERACTIONS"), n)]
    in_terms = gold.index("INTERACTIONS")
    fields = [n + 1 for n in starts if n + 1 <= in_terms]  # a field ends where the next word group begins
    listed = [place for place, _ in pairs[:-1]]
    assert set(listed) <= set(fields)
    if gold.startswith((" FERMION", " SCALAR")) and "MULTIPLETS" in row["prompt"]:
        assert listed == [place for place in fields if place > 1]


def test_a_charge_and_its_mirror():
    """A new charged field breaks what its mirror restores: the second step has the credit."""
    prompt = get_task("theory").dataset("train", 1, 0)[0]["prompt"]  # the Standard Model
    count, number = prompt.count("FERMION"), prompt.count("FERMION") + prompt.count("SCALAR")
    row = {"prompt": re.sub("NUM_MULTIPLETS num_[0-9]+", f"NUM_MULTIPLETS num_{count + 2}", prompt)}

    def fermion(n, colour, charge):
        return (
            f" FERMION multiplet_{n:02d} GENERATIONS num_1 REP group_1 {colour} REP group_2 singlet "
            f"CHARGE group_3 {charge}"
        )

    text = fermion(number + 1, "fund", "q_1/3") + fermion(number + 2, "antifund", "q_-1/3") + " INTERACTIONS"
    assert all(word in VOCABULARY for word in text.split()), text
    (_, broken), (_, restored), (_, end) = prefix_scores(TASK, row, text)
    assert restored == 1.0 and 0 < broken < 0.9 and end == 0.0
    # By hand, for d = 3 colours and charge 1/3: SU(3)^3: 1; SU(3)^2 Y: 1/2 * 1/3; gravity: 1; Y^3: 3/27; the others 0.
    rewards = [-log1p(1), -log1p(1 / 6), 1.0, 1.0, -log1p(1), -log1p(1 / 9)]  # L^2 Y and Witten stay 0
    assert broken == pytest.approx((sum(rewards) / 6 + 5) / 6)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(ROWS) - 1), st.integers(0, 1 << 30))
def test_mutated_golds_do_not_depend_on_what_follows(number, seed):
    row, rng = ROWS[number], random.Random(seed)
    words = TASK.gold(row).split(" ")
    for _ in range(rng.randint(0, 3)):
        n = rng.randrange(len(words))
        words[n : n + 1] = rng.choice(
            [[], words[n : n + 1] * 2, [rng.choice(GARBAGE)], [rng.choice(list(VOCABULARY))]]
        )
    text = " ".join(words)
    if rng.random() < 0.3:
        text = text[: rng.randrange(len(text) + 1)]
    pairs = prefix_scores(TASK, row, text)
    score = TASK.score(row, text)
    wanted = (score.components["anomalies"] + 5) / 6 if score.valid else 0.0
    assert pairs[-1][1] == pytest.approx(wanted)
    cut = rng.randrange(len(text) + 1)
    assert [pair for pair in pairs[:-1] if pair[0] <= cut] == prefix_scores(TASK, row, text[:cut])[:-1]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80))
def test_any_text(text):
    for row in ROWS[:3]:
        prefix_scores(TASK, row, text)
