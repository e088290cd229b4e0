"""Requests of the theory task: sentences, beginnings of theories, and what is not understood."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.tasks.theory.examples import SM_FERMIONS, extend
from trl_grpo_tasks.tasks.theory.language import parse, write
from trl_grpo_tasks.tasks.theory.requests import MOST_NEW

TASK = get_task("theory")


@pytest.mark.parametrize("number", range(1, MOST_NEW + 1))
def test_a_number_of_new_fields_is_declared_after_the_standard_model(number):
    words = ["one", "two", "three", "four", "five", "six", "seven"][number - 1]
    row = TASK.row_of(f"The Standard Model with {words} new fields.")
    assert row == TASK.row_of(f"standard model plus {number} additional fermions")
    said = row["prompt"].split()
    assert said.count("FERMION") == len(SM_FERMIONS) and "INTERACTIONS" not in said
    declared = said[said.index("NUM_MULTIPLETS") + 1]
    names = {10: "num_ten", 11: "num_eleven", 12: "num_twelve"}
    total = len(SM_FERMIONS) + number
    assert declared == names.get(total, f"num_{total}")
    assert f"{number} new fermion multiplet" in row["interpretation"] and row["level"] == TASK.levels[-1]


@pytest.mark.parametrize(("charge", "success"), [("-2/3", True), ("1/3", False)])
def test_an_answer_to_a_sentence_is_judged(charge, success):
    """A vector-like pair cancels its own anomalies, and only the conjugate field makes one: known physics."""
    row = TASK.row_of("the Standard Model with 2 new fields: fund singlet 2/3")
    new = {"T": ("fund singlet 2/3", 1), "Tc": (f"antifund singlet {charge}", 1)}
    whole = write(extend(None, new, {"T Tc": 1000.0} if success else {}))
    assert whole.startswith(row["prompt"] + " FERMION multiplet_08")
    assert TASK.score(row, whole.removeprefix(row["prompt"])).success == success


def test_the_beginning_of_a_theory_is_a_request():
    (row,) = TASK.dataset("test", 1, 0)
    made = TASK.row_of(f"  {row['prompt']}  ")
    assert (made["prompt"], made["level"]) == (row["prompt"], row["level"]) and "words" in made["interpretation"]
    assert TASK.score(made, row["gold"]).success and parse(f"{made['prompt']} {row['gold']}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not understood; write the beginning"),
        ("a poem", "is not understood"),
        ("the standard model with eight new fields", "from 1 to 7"),
        ("the standard model with 0 new fields", "from 1 to 7"),
        ("the standard model with one new field: fund singlet 2/3", "leaves none to find"),
        ("the standard model with one new field: fund singlet 2/3, fund singlet 1/3", "only 1 are new"),
        ("the standard model with two new fields: fund", "the field 'fund' is not understood"),
        ("the standard model with two new fields: fund quintet 1", "SU(2) has no representation 'quintet'"),
        ("the standard model with two new fields: fund singlet 7/9", "there is no hypercharge 7/9"),
        ("the standard model with two new fields: fund singlet 1/0", "there is no hypercharge 1/0"),
        ("the standard model with two new fields: 9 x fund singlet 1", "from 1 to 4"),
        ("the standard model with two new fields: 3 x fund fund 1/6", "cannot be added"),  # it is there already
        ("BOS GAUGE_GROUPS NUM_GAUGE five", "allowed here"),
    ],
)
def test_what_is_not_understood_is_an_error_with_a_way_out(text, message):
    with pytest.raises(ValueError) as error:
        TASK.row_of(text)
    assert message in str(error.value)


@given(
    st.one_of(st.text(), st.text().map(lambda t: f"BOS {t}"), st.text().map(lambda t: f"the standard model with {t}"))
)
def test_any_text_is_a_row_or_an_error(text):
    try:
        assert TASK.row_of(text)["prompt"].startswith("BOS")
    except ValueError as error:
        assert str(error)
