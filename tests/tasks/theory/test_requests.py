"""Requests in plain words: the prompts that they give, what solves them, and errors."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tasks.theory.test_task import make, prompt_of
from trl_grpo_tasks.tasks.theory.constraint import check_prompt
from trl_grpo_tasks.tasks.theory.in_words import _BY_NAME, _COUNTS, _FILLERS, _NOUNS

# A request, the theory that solves it, how many of its fermions the prompt gives, and words of the next one.
SOLVED = [
    ("SU(5) with three families", "su5", 0, 4),
    ("SU(5)", "su5", 0, 0),
    ("Georgi-Glashow", "su5", 0, 0),
    ("the Standard Model with three right-handed neutrinos", "seesaw_1", 5, 12),
    ("SU(3) x SU(2) x U(1) plus three sterile neutrinos.", "seesaw_1", 5, 12),
    ("SU(3)xSU(2)_LxU(1)_{Y} with three new triplets", "seesaw_3", 5, 12),
    ("SM with one vector-like lepton doublet", "vectorlike_leptons", 6, 12),
    ("The Standard Model with a vectorlike top", "vectorlike_top", 6, 12),
    ("the standard model and a fourth generation", "fourth_generation", 9, 12),
    ("the Standard Model with four families", "fourth_generation", 9, 12),
    ("SU(3) x SU(2) x U(1) plus one charged field", "seesaw_1", 5, 0),
    ("U(1) x SU(2) x SU(3)", "standard_model", 0, 0),
    ("Find a left-right symmetric model", "left_right", 0, 0),
    ("Pati-Salam with 3 families", "pati_salam", 0, 4),
    ("SU(4) x SU(2) x SU(2)", "pati_salam", 0, 0),
    ("flipped SU(5)", "flipped_su5", 0, 0),
    ("trinification", "trinification", 0, 0),
    ("B-L", "b_minus_l", 0, 0),
    ("two Higgs doublets", "two_higgs_doublets", 0, 0),
]


@pytest.mark.parametrize(("text", "name", "given_fermions", "more"), SOLVED, ids=[case[0] for case in SOLVED])
def test_requests_are_the_beginning_of_a_theory_that_succeeds(text, name, given_fermions, more):
    task = make()
    row = task.row_of(text)
    prompt, rest = prompt_of(name, given_fermions)
    words = rest.split()
    assert row["prompt"] == " ".join([prompt, *words[:more]])
    score = task.score(row, " " + " ".join(words[more:]))
    assert score.success and row["level"] == "anomalies", score.reason
    assert "\n" not in row["interpretation"] and len(row["interpretation"]) < 300


def test_what_a_request_is_understood_as():
    row = make().row_of("the Standard Model with three right-handed neutrinos and two fields")
    assert row["interpretation"] == (
        "standard_model: SU(3) x SU(2) x U(1), broken by scalars (1 2 1/2); its 5 fermion multiplets are given; new: "
        "3 right handed neutrinos, 2 fields of any kind; to be found: the rest"
    )
    assert "NUM_MULTIPLETS num_8" in row["prompt"] and row["prompt"].endswith("q_0/1")
    assert make().row_of("SU(4) x U(1)") == {
        "prompt": "BOS GAUGE_GROUPS NUM_GAUGE num_2 GROUP group_1 SU_4 GROUP group_2 U_1",
        "level": "anomalies",
        "interpretation": "SU(4) x U(1); scalars and fermions are to be found",
    }


def test_a_prompt_is_a_request_too():
    prompt, _ = prompt_of("su5", 1)
    assert make().row_of(f" {prompt}\n") == {"prompt": prompt, "level": "anomalies"}
    with pytest.raises(ValueError, match="word 2 of the prompt is 'GAUGE'; allowed here: GAUGE_GROUPS"):
        make().row_of("BOS GAUGE")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no theory and no gauge group; understood are: theories"),
        ("the Standrad Model", r"'standrad' is not understood \(did you mean 'standard'\?\); understood are"),
        ("SU(5) with a dragon", "'dragon' is not understood.*right handed neutrino, vectorlike top"),
        ("SO(12)", r"the gauge group SO\(12\) cannot be written; groups are: E6, SO\(10\), SU\(5\), SU\(4\)"),
        ("SU(5) with two families", "2 families: success needs the three families"),
        ("SU(5) with families", "an unknown number of families"),
        ("SU(5) with three", "ends without saying what there are 3 of"),
        ("Standard Model SU(5)", r"standard_model has no gauge group SU\(5\)"),
        ("SU(5) with an octet", "octet: this can only be added to the standard model, not to su5"),
        ("SM with an octet and an octet", "a multiplet would occur twice"),
        ("SM with four families and four fields", "needs 14 fermion multiplets; at most 12"),
        ("SU(2) with two fields", r"no fields are known for SU\(2\)"),
        ("U(1) U(1) U(1) U(1) U(1)", "5 gauge groups are too many"),
    ],
)
def test_requests_that_are_not_understood(text, message):
    with pytest.raises(ValueError, match=message):
        make().row_of(text)


PHRASES = [*_BY_NAME, *_COUNTS, *_NOUNS, *sorted(_FILLERS), "SU(5)", "E6", "SO(10) x U(1)", "SU(3) x SU(2) x U(1)",
           "U(1)", "x", "(", "7", "é"]  # fmt: skip


@settings(max_examples=60)
@given(st.lists(st.sampled_from(PHRASES), max_size=7).map(" ".join) | st.text(max_size=30))
def test_any_text_is_a_prompt_or_a_clear_error(text):
    try:
        row = make().row_of(text)
    except ValueError as error:
        assert str(error)
    else:
        check_prompt(row["prompt"])
        assert row == make().row_of(text)
