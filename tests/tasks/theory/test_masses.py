"""Breaking and masses: all reference cases, dimensions of unbroken groups, and full mass matrices."""

import itertools
import json
import math
import random
from collections import Counter
from fractions import Fraction
from math import prod

import numpy as np
import pytest

from tests.support.paths import DATA
from trl_grpo_tasks.tasks.theory import examples
from trl_grpo_tasks.tasks.theory.breaking import vacuum
from trl_grpo_tasks.tasks.theory.data import extension
from trl_grpo_tasks.tasks.theory.examples import make
from trl_grpo_tasks.tasks.theory.groups import algebra
from trl_grpo_tasks.tasks.theory.masses import PERTURBATIVE, fermion_sectors, scalar_sectors
from trl_grpo_tasks.tasks.theory.reward import judge
from trl_grpo_tasks.tasks.theory.spectrum import singular_values
from trl_grpo_tasks.tasks.theory.states import states_of
from trl_grpo_tasks.tasks.theory.tensors import colour_label, components, positive_roots, reps_of
from trl_grpo_tasks.tasks.theory.theory import GaugeGroup, Scalar, Theory, Vev, is_real
from trl_grpo_tasks.tasks.theory.words import yukawa_values

REFERENCE = json.loads((DATA / "theory_masses.json").read_text())
SM = {"c": "SU(3)", "L": "SU(2)", "Y": "U(1)"}
HIGGS = {"H": ("singlet fund 1/2", 125, (0, 2, 0), 246)}


def is_perturbative(theory):
    return "perturbativity" not in judge(theory, 0, 1).problems


FAMILY = {
    "Q": ("fund fund 1/6", 1), "uc": ("antifund singlet -2/3", 1), "dc": ("antifund singlet 1/3", 1),
    "L": ("singlet fund -1/2", 1), "ec": ("singlet singlet 1", 1),
}  # fmt: skip
TOP = {"T": ("fund singlet 2/3", 1), "Tc": ("antifund singlet -2/3", 1)}
LEPTONS = {"E": ("singlet fund -1/2", 1), "Ec": ("singlet fund 1/2", 1)}


def yukawas(up, down, lepton):
    return {"Q uc H": up, "Q dc H*": down, "L ec H*": lepton}


# The theory of each reference case; sectors that it does not list are not checked.
MASS_CASES = {
    "sm_1gen": (FAMILY, yukawas(1.0, 0.02, 0.01)),
    "vl_top": ({**FAMILY, **TOP}, {**yukawas(1.0, 0.02, 0.01), "Q Tc H": 0.5, "T Tc": 1000.0}),
    "vl_lepton_doublet": (LEPTONS, {"E Ec": 300.0}),
    "vl_no_mass_term": (TOP, {}),
    "fourth_gen_y2": (FAMILY, yukawas(2.0, 2.0, 2.0)),
    "fourth_gen_5e4": (FAMILY, yukawas(math.sqrt(2) * 50_000 / 246, 0.02, 0.01)),
    "fourth_gen_no_yukawa": (FAMILY, {}),
}


@pytest.mark.parametrize("case", REFERENCE["masses"], ids=lambda case: case["id"])
def test_reference_masses(case):
    theory = make(SM, HIGGS, *MASS_CASES[case["id"]])
    sectors = fermion_sectors(theory, vacuum(theory))
    for expected in case["sectors"]:
        (sector,) = [
            s for s in sectors if (s.colour, abs(s.charge)) == (expected["colour"], Fraction(expected["abs_Q"]))
        ]
        assert sector.kind == expected["kind"]
        assert np.allclose(np.abs(sector.matrix), expected["matrix"])  # signs are a matter of phases
        assert np.allclose(sector.masses, expected["values"], rtol=1e-9)
    assert sum(s.massless for s in sectors if s.visible and s.kind == "dirac") == case["massless_charged_dirac"]
    assert sum(s.massless for s in sectors if s.visible) == case["massless_charged_dirac"]
    if "max_yukawa" in case:
        assert max(abs(y) for term in theory.terms if term.scalar for y in term.values) == pytest.approx(
            case["max_yukawa"]
        )
        assert is_perturbative(theory) == case["perturbative_sqrt4pi"]


BREAKING_CASES = {
    "sm_doublet": (SM, HIGGS),
    "sm_doublet_up": (SM, {"H": ("singlet fund 1/2", 125, (0, 1, 0), 246)}),
    "two_doublets_aligned": (SM, {**HIGGS, "K": ("singlet fund 1/2", 300, (0, 2, 0), 174)}),
    "two_doublets_misaligned": (SM, {**HIGGS, "K": ("singlet fund 1/2", 300, (0, 1, 0), 174)}),
    "doublet_triplet_y1": (SM, {**HIGGS, "D": ("singlet adjoint 1", 300, (0, 2, 0), 1)}),
    "triplet_y0_only": (SM, {"D": ("singlet adjoint 0", 300, (0, 3, 0), 246)}),
    "singlet_vev": (SM, {"S": ("singlet singlet 0", 300, (0, 0, 0), 246)}),
    "colour_vev": (SM, {"S": ("fund singlet -1/3", 300, (2, 0, 0), 246)}),
    "doublet_y16": (SM, {"H": ("singlet fund 1/6", 125, (0, 2, 0), 246)}),
    "su5_24": ({"G": "SU(5)"}, {"S": ("adjoint", 300, (23,), 10000)}),
}
# Q as (factor of T3, factor of Y), where the reference gives it.
CHARGES = {"sm_doublet": 1, "sm_doublet_up": -1, "two_doublets_aligned": 1, "doublet_triplet_y1": 1, "doublet_y16": 3}


@pytest.mark.parametrize("case", REFERENCE["breaking"], ids=lambda case: case["id"])
def test_reference_breaking(case):
    theory = make(*BREAKING_CASES[case["id"]], {}, {})
    found = vacuum(theory)
    assert (found.dimension, found.unbroken) == (case["dim_G"], case["dim_unbroken"])
    assert found.dimension - found.unbroken == case["broken"]
    if case["id"] in CHARGES:
        half = Fraction(1, 2)
        assert found.charge == ((0, 0, 0), (half, -half), (CHARGES[case["id"]],))
    else:
        assert found.charge is None


@pytest.mark.parametrize("name", examples.NAMES)
def test_named_theories_keep_colour_and_charge(name):
    found = vacuum(examples.named(name))
    assert found.unbroken == 9 and found.charge is not None


# ---- an oracle for masses: all components of all fields in one matrix


def whole_mass_matrix(theory):
    """The symmetric mass matrix over every component and generation of SU(3) x SU(2) fields, with contractions spelled
    out: deltas of colour (and of octets), epsilon or delta of doublets, deltas of triplets."""
    eps = np.array([[0.0, 1.0], [-1.0, 0.0]])
    colour = {((1, 0), (0, 1)): np.eye(3), ((0, 0), (0, 0)): np.eye(1), ((1, 1), (1, 1)): octet_metric()}
    colour[(0, 1), (1, 0)] = np.eye(3)
    triplet = np.array([[0.0, 1, 0], [1, 0, 0], [0, 0, 1]])  # T+ T- + T- T+ + T0 T0
    size = {(0, 0): 1, (1, 0): 3, (0, 1): 3, (1, 1): 8}
    starts, total = {}, 0
    for f in theory.fermions:
        starts[f.name] = total
        total += f.generations * size[f.numbers[0]] * (f.numbers[1][0] + 1)
    matrix = np.zeros((total, total))
    for term in theory.terms:
        first, second = theory.fermion(term.first), theory.fermion(term.second)
        weak, unit = {0: np.eye(1), 1: eps, 2: triplet}[first.numbers[1][0]], 1.0
        if term.scalar:
            weak = doublet_vev(first.numbers[1][0], second.numbers[1][0], term.conjugate)
            unit = 246 / math.sqrt(2)
        block = np.kron(colour[first.numbers[0], second.numbers[0]], weak)
        rows, columns = block.shape
        for g, strength in enumerate(unit * np.array(term.values)):
            r, c = starts[first.name] + g * rows, starts[second.name] + g * columns
            matrix[r : r + rows, c : c + columns] += strength * block
            if first.name != second.name:
                matrix[c : c + columns, r : r + rows] += strength * block.T
    return matrix


def octet_metric():
    places = [(i, j) for i in range(3) for j in range(3) if i != j]
    metric = np.zeros((8, 8))
    for n, (i, j) in enumerate(places):
        metric[n, places.index((j, i))] = 1
    metric[6:, 6:] = np.eye(2)
    return metric


def doublet_vev(first, second, conjugate):
    """The weak part of f f' H with H = (0, v): entries by component, largest 1."""
    vev = np.array([0.0, 1.0])
    one = vev if conjugate else np.array([[0.0, 1.0], [-1.0, 0.0]]) @ vev  # what a doublet is contracted with
    if (first, second) == (1, 0):
        return one.reshape(2, 1)
    if (first, second) == (0, 1):
        return one.reshape(1, 2)
    # doublet times triplet: L_i (T)_ij h_j with T = ((T0/sqrt2, T+), (T-, -T0/sqrt2)), lowered with epsilon
    eps = np.array([[0.0, 1.0], [-1.0, 0.0]])
    basis = [np.array([[0, 1.0], [0, 0]]), np.array([[0, 0], [1.0, 0]]), np.diag([1.0, -1.0]) / math.sqrt(2)]
    higgs = -eps @ vev if conjugate else vev  # H*, made into a doublet
    part = np.array([[(eps @ t @ higgs)[i] for t in basis] for i in range(2)])
    return part if (first, second) == (1, 2) else part.T


def test_masses_against_the_whole_matrix():
    """Singular values of all components at once are those of the sectors: each state as often as it has colours, a
    Dirac state twice."""
    rng = random.Random(11)
    for _ in range(15):
        theory, _ = extension(rng, 4)
        values = np.linalg.svd(whole_mass_matrix(theory), compute_uv=False)
        expected = []
        for sector in fermion_sectors(theory, vacuum(theory)):
            times = sector.colour * (2 if sector.kind == "dirac" else 1)
            assert sector.kind == "majorana" or sector.matrix.shape[0] == sector.matrix.shape[1]
            expected += list(sector.masses) * times
        assert len(expected) == len(values)
        # Equal up to rounding of the largest entries; the lightest quarks are far above that.
        assert np.allclose(np.sort(values), np.sort(expected), rtol=1e-6, atol=1e-9)


# ---- masses that lie many powers of ten apart


def test_a_seesaw_with_more_doublets_than_singlets_leaves_massless_neutrinos():
    """Three neutrinos and two heavy singlets: one neutrino stays massless, exactly, and two are light."""
    fermions = {**FAMILY, "L": ("singlet fund -1/2", 3), "N": ("singlet singlet 0", 2)}
    theory = make(SM, HIGGS, fermions, {"L N H": (1e-6, 0.01), "N N": 1e12})
    (sector,) = [s for s in fermion_sectors(theory, vacuum(theory)) if s.kind == "majorana"]
    assert sector.massless == 1
    light = [(y * 246 / math.sqrt(2)) ** 2 / 1e12 for y in (1e-6, 0.01)]
    assert sector.masses[1:] == pytest.approx([*light, 1e12, 1e12], rel=1e-12)


def test_the_rank_of_graded_matrices_is_exact():
    """Products of two factors of integers have a known rank; rounding makes every entry wrong in its last digits."""
    rng = np.random.default_rng(6)
    for _ in range(60):
        rank = int(rng.integers(1, 4))
        left, right = rng.integers(-9, 10, (5, rank)), rng.integers(-9, 10, (rank, 4))
        product = left @ right
        scale = np.sqrt(2) * 10.0 ** np.outer(rng.integers(-9, 9, 5), np.ones(4))
        matrix = product * scale * 10.0 ** rng.integers(-9, 9, 4) / 3
        expected = np.linalg.matrix_rank(product)
        assert np.count_nonzero(singular_values(matrix)) == expected
    assert not singular_values(np.zeros((3, 2))).any() and len(singular_values(np.zeros((3, 0)))) == 0


def test_unpaired_states_are_massless():
    fermions = {**FAMILY, "X": ("fund singlet 5/3", 2), "Xc": ("antifund singlet -5/3", 1)}
    theory = make(SM, HIGGS, fermions, {**yukawas(1.0, 0.02, 0.01), "X Xc": 1000.0})
    (sector,) = [s for s in fermion_sectors(theory, vacuum(theory)) if s.charge == Fraction(5, 3)]
    assert sector.masses == (0.0, 1000.0)
    assert sector.massless == 1 and sector.visible


def test_goldstones_are_eaten_and_the_rest_is_physical():
    alone = make(SM, HIGGS, FAMILY, {})
    assert scalar_sectors(alone, vacuum(alone)) == []
    inert = make(SM, {**HIGGS, "K": ("singlet fund 1/2", 400)}, FAMILY, {})
    assert scalar_sectors(inert, vacuum(inert))[0].masses == (400.0,)


@pytest.mark.parametrize("name", examples.NAMES)
def test_charged_scalars_and_broken_generators_add_up(name):
    """Complex components with colour or charge, less those in the spectrum, are one for each pair of charged or
    coloured broken generators."""
    theory = examples.named(name)
    left = vacuum(theory)
    physical = 0.0
    for sector in scalar_sectors(theory, left):
        physical += sector.colour * len(sector.masses) * (1 if sector.charge or sector.colour == 3 else 0.5)
    eaten = charged_components(theory, left) - physical
    assert eaten == (left.dimension - left.unbroken - neutral_broken(theory, left)) / 2


def is_coloured(theory, left, weight):
    """Whether a weight of the factor that contains colour is not neutral under it."""
    factor, simple = left.colour
    return any(colour_label(theory.groups[factor].group, weight, root) for root in simple)


def charged_components(theory, left):
    """Complex scalar components that have colour or charge, each real one half."""
    factor, _ = left.colour
    total = 0
    for scalar in theory.scalars:
        parts = [
            [(number,)] if g.group == "U(1)" else components(g.group, number)
            for g, number in zip(theory.groups, scalar.numbers, strict=True)
        ]
        unit = 0.5 if is_real(theory, scalar) else 1
        for weights in itertools.product(*parts):
            total += unit * (is_coloured(theory, left, weights[factor]) or left.charge_of(weights) != 0)
        if len(parts[factor]) > 1 and not all(map(any, parts[factor])):
            total += 2 * unit  # the two diagonal components of an octet have colour but no weight
    return total


def neutral_broken(theory, left):
    """Broken generators without colour and charge: diagonal ones, and those of roots without charge."""
    simple = [(i, g.group) for i, g in enumerate(theory.groups) if g.group != "U(1)"]
    rank = len(theory.groups) - len(simple) + sum(algebra(group).rank for _, group in simple)
    pairs = 0
    for i, group in simple:
        for root in positive_roots(group):
            inside = i == left.colour[0] and is_coloured(theory, left, root)
            pairs += 2 * (not inside and not sum(map(prod, zip(left.charge[i], root, strict=True))))
    return rank - 3 + pairs


def test_grand_unified_relations():
    """SU(5) makes down quarks and leptons equal, flipped SU(5) does not; Pati-Salam gives neutrinos the up mass;
    SO(10) with a 10 does both; E6 has exotic quarks and leptons of equal mass."""
    masses = {}
    for name in ("su5", "flipped_su5", "pati_salam", "so10", "e6"):
        theory = examples.named(name)
        sectors = fermion_sectors(theory, vacuum(theory))
        masses[name] = {(s.colour, abs(s.charge)): s.masses for s in sectors}
    third, two_thirds = Fraction(1, 3), Fraction(2, 3)
    assert np.allclose(masses["su5"][3, third], masses["su5"][1, 1])
    assert not np.allclose(masses["flipped_su5"][3, third], masses["flipped_su5"][1, 1])
    for name in ("pati_salam", "so10"):
        assert np.allclose(np.repeat(masses[name][3, two_thirds], 2), masses[name][1, 0])
    for name in ("so10", "e6"):
        assert np.allclose(masses[name][3, third], masses[name][1, 1])
    assert np.allclose(masses["e6"][3, third][3:], 0.5 * 10000 / np.sqrt(2)) and len(masses["e6"][3, third]) == 6
    assert np.allclose(masses["so10"][3, two_thirds], 246 / np.sqrt(2) * np.array(yukawa_values("h_1e0", 3)))


FAMILY_CONTENT = {  # of one family of the Standard Model with a right-handed neutrino, by colour and electric charge
    (3, Fraction(2, 3)): 1, (3, Fraction(-1, 3)): 1, (-3, Fraction(-2, 3)): 1, (-3, Fraction(1, 3)): 1,
    (1, Fraction(-1)): 1, (1, Fraction(1)): 1, (1, Fraction(0)): 2,
}  # fmt: skip
EXOTIC_CONTENT = {  # of the 10 and the singlet of SO(10) in a 27: a quark D with its partner, two doublets, a singlet
    (3, Fraction(-1, 3)): 1, (-3, Fraction(1, 3)): 1, (1, Fraction(-1)): 1, (1, Fraction(1)): 1, (1, Fraction(0)): 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"), [("so10", FAMILY_CONTENT), ("e6", Counter(FAMILY_CONTENT) + Counter(EXOTIC_CONTENT))]
)
def test_a_16_is_a_family_and_a_27_has_one_more_quark_and_two_doublets(name, content):
    theory = examples.named(name)
    found = Counter()
    for state in states_of(theory, theory.fermions[0], vacuum(theory)):
        colour = {(0, 0): 1, (1, 0): 3, (0, 1): -3}[state.colour]
        found[colour, state.charge] += 1
    # Which of 3 and 3bar is called the triplet is a convention.
    assert found in (Counter(content), Counter({(c if c == 1 else -c, q): n for (c, q), n in content.items()}))


@pytest.mark.parametrize(
    ("group", "rep", "component", "dimension"),
    [
        ("SO(10)", "fund", 1, 28),  # SO(8): a complex component has two real directions
        ("SO(10)", "spinor", 1, 24),  # SU(5)
        ("SO(10)", "conj_spinor", 16, 24),
        ("SO(10)", "adjoint", 41, 29),  # SO(8) x U(1)
        ("SO(10)", "adjoint", 42, 4 + 15),  # SU(2) x U(1) x SU(4)
        ("SO(10)", "adjoint", 43, 9 + 6),  # U(3) x SO(4)
        ("SO(10)", "adjoint", 45, 25),  # U(5)
        ("E6", "fund", 1, 45),  # SO(10)
        ("E6", "antifund", 27, 45),
        ("E6", "adjoint", 73, 46),  # SO(10) x U(1)
        ("E6", "adjoint", 74, 36),  # SU(6) x U(1)
        ("E6", "adjoint", 75, 28),  # SU(5) x SU(2) x U(1)
        ("E6", "adjoint", 76, 20),  # SU(3) x SU(3) x SU(2) x U(1)
    ],
)
def test_breaking_of_large_groups(group, rep, component, dimension):
    scalar = Scalar("S", (reps_of(group)[rep],), 1.0, Vev((component,), 1.0))
    assert vacuum(Theory((GaugeGroup("G", group),), scalars=(scalar,))).unbroken == dimension


def test_perturbativity_is_sqrt_four_pi():
    assert pytest.approx(3.5449077) == PERTURBATIVE
    assert is_perturbative(make(SM, HIGGS, FAMILY, yukawas(PERTURBATIVE - 1e-9, 0.02, 0.01)))
    assert not is_perturbative(make(SM, HIGGS, FAMILY, yukawas(PERTURBATIVE + 1e-9, 0.02, 0.01)))
