"""Model files for SARAH, checked by a reader that shares no code with the writer.

SARAH is not available here (it needs Mathematica), so these are checks of structure.
"""

import itertools
import json
import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paths import DATA
from tests.support.sarah_files import anomalies_of, check_sarah, names_in, read_model, read_theory, tensor_of
from tests.tasks.theory.test_language import IN_SARAH, theories_in_sarah
from trl_grpo_tasks.tasks.theory import anomalies, examples
from trl_grpo_tasks.tasks.theory.breaking import vacuum
from trl_grpo_tasks.tasks.theory.language import parse, relabelled
from trl_grpo_tasks.tasks.theory.sarah import write_sarah
from trl_grpo_tasks.tasks.theory.tensors import components, reps_of
from trl_grpo_tasks.tasks.theory.theory import GaugeGroup, Scalar, Theory, Vev, from_dict


@pytest.mark.parametrize("name", IN_SARAH)
def test_sarah_files(name):
    theory = examples.named(name)
    text = write_sarah(theory, "Named")
    assert "not been validated" in text.splitlines()[0]
    assert not re.search(r"[A-Za-z]_", text)  # a pattern to Mathematica
    check_sarah(theory, text)
    assert relabelled(read_theory(text)) == relabelled(theory)
    assert not any(anomalies_of(text).values())


def by_place(theory, coefficients):
    """Coefficients by the places of their groups, as the reader of files has them, instead of by name."""
    place = {group.id: i for i, group in enumerate(theory.groups)}
    found = {}
    for name, value in coefficients.items():
        if name.startswith("witten:"):
            key = ("witten", place[name.removeprefix("witten:")])
        else:
            parts = [(part.partition("^")[0], int(part.partition("^")[2] or 1)) for part in name.split("*")]
            key = tuple(place[id] for id, power in parts if id != "grav" for _ in range(power))
        found[key] = Fraction(value)
    return found


REFERENCE = json.loads((DATA / "theory_anomalies.json").read_text())["cases"]
WRITTEN = [
    case["id"]
    for case in REFERENCE
    if all(
        group["group"] == "U(1)"
        or (group["group"] in ("SU(2)", "SU(3)", "SU(4)", "SU(5)")
            and all(tuple(rep["dynkin"]) in reps_of(group["group"]).values()
                    for fermion in case["fermions"] for id, rep in fermion["reps"].items() if id == group["id"]))
        for group in case["groups"]
    )
]  # fmt: skip
assert len(WRITTEN) >= 25


@pytest.mark.parametrize("name", WRITTEN)
def test_anomalies_that_a_sarah_file_has_by_itself_are_those_of_the_reference(name):
    case = next(case for case in REFERENCE if case["id"] == name)
    theory = from_dict(case)
    assert anomalies_of(write_sarah(theory)) == Counter(by_place(theory, case["expected"]))


@settings(max_examples=25)
@given(text=theories_in_sarah)
def test_sarah_files_of_random_theories_are_complete(text):
    theory = parse(text)
    file = write_sarah(theory)
    check_sarah(theory, file)
    assert relabelled(read_theory(file)) == theory
    assert anomalies_of(file) == Counter(by_place(theory, anomalies(theory)))


@st.composite
def broken_theories(draw):
    """Theories whose scalars have vevs under groups of all sizes, in any representation and component."""
    kinds = draw(st.lists(st.sampled_from(["SU(2)", "SU(3)", "SU(4)", "SU(5)", "U(1)"]), min_size=1, max_size=2))
    groups = tuple(GaugeGroup(f"group_{n}", kind) for n, kind in enumerate(kinds, 1))
    scalars = []
    for place in range(draw(st.integers(1, 3))):
        numbers, chosen = [], []
        for kind in kinds:
            if kind == "U(1)":
                numbers.append(draw(st.sampled_from([Fraction(0), Fraction(1, 2)])))
                chosen.append(0)
            else:
                rep = draw(st.sampled_from(list(reps_of(kind).values())))
                numbers.append(rep)
                chosen.append(draw(st.integers(1, len(components(kind, rep)))) if any(rep) else 0)
        vev = Vev(tuple(chosen), 246.0) if draw(st.booleans()) else None
        scalars.append(Scalar(f"s_{place}", tuple(numbers), 125.0, vev))
    return Theory(groups, scalars=tuple(scalars))


@settings(max_examples=50)
@given(theory=broken_theories())
def test_sarah_files_of_theories_with_any_vevs_are_complete(theory):
    text = write_sarah(theory)
    check_sarah(theory, text)
    assert relabelled(read_theory(text)) == relabelled(theory)


@pytest.mark.parametrize(("pair", "ends"), enumerate(itertools.combinations(range(1, 5), 2), 1))
def test_a_pair_of_su4_has_the_weights_of_its_two_vectors_in_a_sarah_file(pair, ends):
    """Vectors of charge 1/2 and their pair of charge 1 leave more unbroken than vectors and the conjugate pair."""
    reps, half = reps_of("SU(4)"), Fraction(1, 2)
    vectors = [Scalar(f"F_{n}", (reps["fund"], half), 125.0, Vev((n, 0), 246.0)) for n in ends]
    scalars = (*vectors, Scalar("A", (reps["antisym"], Fraction(1)), 125.0, Vev((pair, 0), 246.0)))
    theory = Theory((GaugeGroup("C", "SU(4)"), GaugeGroup("X", "U(1)")), scalars=scalars)
    assert vacuum(theory).unbroken == 4
    check_sarah(theory, write_sarah(theory))


def test_real_scalars_of_a_sarah_file_are_real_tensors():
    reps = reps_of("SU(4)")
    scalars = (
        Scalar("F", (reps["fund"],), 125.0, Vev((1,), 246.0)),
        Scalar("A", (reps["adjoint"],), 125.0),
        Scalar("P", (reps["antisym"],), 125.0),
    )
    _, fields, found = read_model(write_sarah(Theory((GaugeGroup("C", "SU(4)"),), scalars=scalars)))
    assert found["RealScalars"] == ["Ax13", "Ax14", "Ax15"]
    rng = np.random.default_rng(1)
    matrices = []
    for field in "AP":
        names = sorted(names_in(fields[field][2]))
        values = {n: rng.normal() + (0 if n in found["RealScalars"] else 1j * rng.normal()) for n in names}
        matrices.append(tensor_of(fields[field][2], values))
    adjoint, pair = matrices
    assert np.allclose(adjoint, adjoint.conj().T)
    dual = np.zeros((4, 4), complex)  # P^ij = eps^ijkl P_kl / 2, and P^ij is the conjugate of P_ij
    for order in itertools.permutations(range(4)):
        dual[order[0], order[1]] += np.linalg.det(np.eye(4)[list(order)]) * pair[order[2], order[3]] / 2
    assert np.allclose(pair.conj(), dual)
