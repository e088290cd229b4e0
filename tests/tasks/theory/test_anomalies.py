"""Anomalies: all reference cases, transformation properties, and sums over single states."""

import copy
import json
import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paths import DATA
from tests.support.theory_oracle import is_anomaly_free
from tests.tasks.theory.test_language import random_walk
from trl_grpo_tasks.tasks.theory import anomalies, groups, tensors
from trl_grpo_tasks.tasks.theory.language import parse
from trl_grpo_tasks.tasks.theory.reward import anomaly_reward
from trl_grpo_tasks.tasks.theory.theory import Fermion, GaugeGroup, Theory

REFERENCE = json.loads((DATA / "theory_anomalies.json").read_text())["cases"]
BY_ID = {case["id"]: case for case in REFERENCE}


@pytest.mark.parametrize("case", REFERENCE, ids=BY_ID)
def test_reference(case):
    found = anomalies(case)
    assert found == {name: Fraction(value) for name, value in case["expected"].items()}
    assert all(isinstance(value, Fraction) for value in found.values())
    assert (not any(found.values())) == case["anomaly_free"]


# ---- transformation properties

CASES = st.sampled_from(REFERENCE).map(copy.deepcopy)


def group_of(case, id):
    return next(group["group"] for group in case["groups"] if group["id"] == id)


def conjugated(case, fermion):
    """The same field with conjugate representations and opposite charges."""
    other = copy.deepcopy(fermion)
    for id, rep in other["reps"].items():
        rep["dynkin"] = list(groups.conjugate(group_of(case, id), tuple(rep["dynkin"])))
    other["charges"] = {id: str(-Fraction(charge)) for id, charge in other["charges"].items()}
    return other


@settings(max_examples=30)
@given(case=CASES)
def test_conjugating_a_theory_flips_every_odd_coefficient(case):
    before = anomalies(case)
    case["fermions"] = [conjugated(case, fermion) for fermion in case["fermions"]]
    after = anomalies(case)
    for name, value in before.items():
        assert after[name] == (value if name.startswith("witten") else -value)


@settings(max_examples=30)
@given(case=CASES, data=st.data())
def test_a_vectorlike_pair_changes_nothing(case, data):
    before = anomalies(case)
    like = copy.deepcopy(data.draw(st.sampled_from(case["fermions"])))
    for id in like["charges"]:
        like["charges"][id] = str(data.draw(st.fractions(-5, 5, max_denominator=12)))
    like["multiplicity"] = data.draw(st.integers(1, 5))
    new = [{**like, "name": "new"}, {**conjugated(case, like), "name": "mirror"}]
    case["fermions"] += new
    assert anomalies(case) == before


@settings(max_examples=30)
@given(case=CASES, data=st.data())
def test_rescaling_a_charge_scales_by_how_often_it_enters(case, data):
    abelian = [group["id"] for group in case["groups"] if group["group"] == "U(1)"]
    if not abelian:
        return
    scaled, factor = data.draw(st.sampled_from(abelian)), data.draw(st.fractions(-3, 3, max_denominator=7))
    before = anomalies(case)
    for fermion in case["fermions"]:
        fermion["charges"][scaled] = str(factor * Fraction(fermion["charges"][scaled]))
    for name, value in anomalies(case).items():
        times = 0 if name.startswith("witten") else name.split("*").count(scaled)
        assert value == before[name] * factor**times


def test_a_left_out_group_means_a_singlet():
    case = copy.deepcopy(BY_ID["sm_1gen"])
    for fermion in case["fermions"]:
        fermion["reps"] = {id: rep for id, rep in fermion["reps"].items() if any(rep["dynkin"])}
    assert anomalies(case) == anomalies(BY_ID["sm_1gen"])


# ---- sums over single states; for SU(N), see the anomalies of SARAH files in test_model_files.py


@pytest.mark.parametrize("group", ["SO_10", "E_6"])
def test_random_theories_of_large_groups_state_by_state(group):
    """Both computations agree on random theories, most of which are anomalous."""
    prompt = f"BOS GAUGE_GROUPS NUM_GAUGE num_2 GROUP group_1 {group} GROUP group_2 U_1"
    rng, agreed = random.Random(3), Counter()
    for _ in range(15):
        theory = parse(prompt + random_walk(prompt, rng))
        for fermions in (theory.fermions[:1], theory.fermions[:3]):
            free = is_anomaly_free(Theory(theory.groups, fermions))
            assert free == (not any(anomalies(Theory(theory.groups, fermions)).values()))
            agreed[free] += 1
    assert agreed[False] > 10


@pytest.mark.parametrize("group", ["SO(10)", "E6"])
def test_so10_and_e6_alone_have_no_condition(group):
    """Neither has a cubic invariant or a global anomaly; the component is at its best."""
    reps = [rep for rep in tensors.reps_of(group).values() if any(rep)]
    theory = Theory((GaugeGroup("G", group),), tuple(Fermion(f"f{n}", (rep,)) for n, rep in enumerate(reps)))
    assert anomalies(theory) == {} and is_anomaly_free(theory) and anomaly_reward({}) == 1


# ---- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: case["fermions"][0]["charges"].update(Y=0.1667), "charge 0.1667 under 'Y' is not exact"),
        (lambda case: case["fermions"][0]["charges"].update(Y="a sixth"), "'a sixth' is not a charge"),
        (lambda case: case["fermions"][0]["charges"].update(Z="1"), "refers to group 'Z'; groups are: c, L, Y"),
        (lambda case: case["fermions"][0].update(multiplicity=0), "multiplicity 0 must be"),
        (lambda case: case["groups"][0].update(group="SU(x)"), r"unknown group 'SU\(x\)'"),
        (lambda case: case["fermions"][0]["reps"]["c"].update(dynkin=[1]), "2 non-negative Dynkin labels"),
        (lambda case: case["fermions"][1].update(name="Q"), "field 'Q' is declared twice"),
    ],
)
def test_invalid_input_is_reported(change, message):
    case = copy.deepcopy(BY_ID["sm_1gen"])
    change(case)
    with pytest.raises(ValueError, match=message):
        anomalies(case)
