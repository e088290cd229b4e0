"""Hindsight: a part of a failed theory is the right answer to a training request for fewer multiplets."""

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import pytest

from tests.tasks.theory.test_language import random_walk
from tests.tasks.theory.test_task import make
from trl_grpo_tasks.commands.check import GARBAGE
from trl_grpo_tasks.tasks.theory import examples
from trl_grpo_tasks.tasks.theory.constraint import check_prompt
from trl_grpo_tasks.tasks.theory.data import STARTS, cut, extension, is_test
from trl_grpo_tasks.tasks.theory.language import parse
from trl_grpo_tasks.tasks.theory.relabel import smaller_requests
from trl_grpo_tasks.tasks.theory.terms import with_all_terms
from trl_grpo_tasks.tasks.theory.theory import Fermion

SPOILER = Fermion("spoiler", ((1, 0), (0,), Fraction(5, 6)), 2)  # one coloured field without a partner


def spoiled(seed, new, given):
    """A successful extension of the Standard Model with one more field that spoils it, cut after so many fermions."""
    rng = random.Random(seed)
    theory, _ = extension(rng, new)
    fermions = list(theory.fermions)
    fermions.insert(rng.randint(5, len(fermions)), SPOILER)
    return theory, *cut(with_all_terms(replace(theory, fermions=tuple(fermions))), given)


@pytest.mark.parametrize(("start", "given"), [("standard_model", 5), ("groups", 0)])
def test_what_is_left_without_the_spoiling_field_answers_another_training_prompt(start, given):
    task = make(start=start)
    train = {row["prompt"] for row in task.dataset("train", 200, 0)}
    found = known = 0
    for seed in range(16):
        theory, prompt, completion = spoiled(seed, 3, given)
        row = {"prompt": prompt, "level": "anomalies"}
        score = task.score(row, completion)
        assert score.valid and not score.success
        # Without the spoiling field, the theory is the one that was made.
        wanted, rest = cut(theory, given)
        parts = dict(smaller_requests(prompt, completion, 4, 400, 100.0))
        assert next(iter(parts.items())) == (wanted, rest)
        made = task.relabel(row, completion)
        if made is None:
            assert all(map(is_test, parts)), "held-out prompts are never used"
            continue
        new, answer = made
        assert new == {"prompt": new["prompt"], "gold": answer, "level": "anomalies"}
        assert task.score(new, answer).success and not is_test(new["prompt"]) and new["prompt"] != prompt
        assert new["prompt"] == wanted or is_test(wanted)
        check_prompt(new["prompt"])
        found, known = found + 1, known + (new["prompt"] in train)
    assert found >= 10
    assert start != "groups" or known == found, "the generator makes all of these prompts"


def test_another_new_field_may_be_the_given_one():
    """The given field has no partner; two others have. The request gives one of these two instead."""
    task = make(start="one_given")
    tried = 0
    for seed in range(30):
        theory, _ = extension(random.Random(seed), 2, least_new=2)
        fermions = (*theory.fermions[:5], SPOILER, *theory.fermions[5:])
        prompt, completion = cut(with_all_terms(replace(theory, fermions=fermions)), 6)
        made = task.relabel({"prompt": prompt}, completion)
        if made is not None:
            assert (made[0]["prompt"], made[1]) == cut(theory, 6) and task.score(*made).success
            tried += 1
        else:
            assert is_test(cut(theory, 6)[0])
    assert tried >= 20


def test_every_part_that_succeeds_is_found():
    """Against all subsets of the new fields, each scored as a whole text."""
    task = make(new_multiplets=4)
    for seed in range(6):
        _, prompt, completion = spoiled(seed, 4, 5)
        theory = parse(f"{prompt} {completion}")
        new = theory.fermions[5:]
        expected = set()
        for size in range(1, min(len(new), 5)):
            for kept in itertools.combinations(new, size):
                names = {f.name for f in (*theory.fermions[:5], *kept)}
                terms = tuple(t for t in theory.terms if {t.first, t.second} <= names)
                part = with_all_terms(replace(theory, fermions=(*theory.fermions[:5], *kept), terms=terms))
                if task.score(*({"prompt": text} if n == 0 else text for n, text in enumerate(cut(part, 5)))).success:
                    expected.add(cut(part, 5))
        assert set(smaller_requests(prompt, completion, 4, 400, 100.0)) == expected


def test_only_prompts_of_a_file_are_used(tmp_path):
    _, prompt, completion = spoiled(0, 3, 5)
    wanted = next(smaller_requests(prompt, completion, 4, 400, 100.0))[0]
    other = examples.named("su5")
    for lines, found in (([prompt, wanted], True), ([prompt, cut(other, 0)[0]], False)):
        file = tmp_path / "prompts.txt"
        file.write_text("\n".join(lines))
        assert (make(prompts_file=str(file)).relabel({"prompt": prompt}, completion) is not None) == found


@pytest.mark.parametrize("start", STARTS)
def test_other_texts_are_not_relabelled(start):
    task, rng = make(start=start), random.Random(0)
    for row in task.dataset("train", 4, 0):
        for text in (*GARBAGE, *(random_walk(row["prompt"], rng) for _ in range(3))):
            made = task.relabel(row, text)
            assert made is None or task.score(*made).success
    prompt = " ".join(cut(examples.named("seesaw_1"), 6)[0].split()[:-1])  # ends within a multiplet
    assert task.relabel({"prompt": prompt}, " q_0/1 INTERACTIONS END") is None
