"""Masses over thirty and more powers of ten: against mpmath, and against formulas of seesaw models."""

import math

import matplotlib.figure
import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trl_grpo_tasks.tasks.theory.breaking import vacuum
from trl_grpo_tasks.tasks.theory.examples import make
from trl_grpo_tasks.tasks.theory.masses import fermion_sectors, scalar_sectors
from trl_grpo_tasks.tasks.theory.render import draw_spectrum
from trl_grpo_tasks.tasks.theory.spectrum import restricted_singular_values, singular_values

SM = {"c": "SU(3)", "L": "SU(2)", "Y": "U(1)"}
LEPTONS = {"L": ("singlet fund -1/2", 1), "ec": ("singlet singlet 1", 1), "N": ("singlet singlet 0", 1)}
DIGITS = 120

# Sizes over thirty powers of ten, and matrices of small integers whose rows and columns have such sizes.
sizes = st.builds(lambda mantissa, power: mantissa * 10.0**power, st.floats(1, 9.99), st.integers(-15, 14))


@st.composite
def graded(draw, most=5):
    rows, columns = draw(st.integers(1, most)), draw(st.integers(1, most))
    entries = draw(st.lists(st.integers(-9, 9), min_size=rows * columns, max_size=rows * columns))
    scales = [np.array(draw(st.lists(sizes, min_size=n, max_size=n))) for n in (rows, columns)]
    return np.array(entries, float).reshape(rows, columns) * np.outer(*scales)


def exactly(matrix, excluded=None):
    """Singular values by mpmath, smallest first, with an orthonormal basis of the vectors that are left."""
    with mpmath.workdps(DIGITS):
        whole = mpmath.matrix(matrix.tolist())
        if excluded is not None:
            rows = [mpmath.matrix([row.tolist()]) for row in excluded]
            basis = []
            for vector in (*rows, *(mpmath.eye(matrix.shape[1])[i, :] for i in range(matrix.shape[1]))):
                rest = vector / mpmath.norm(vector)
                for _ in range(2):
                    for known in basis:
                        rest -= (rest * known.T)[0] * known
                if mpmath.norm(rest) > mpmath.mpf(10) ** -70:
                    basis.append(rest / mpmath.norm(rest))
            physical = basis[np.linalg.matrix_rank(excluded) if len(excluded) == 1 else len(excluded) :]
            if not physical:
                return []
            whole = whole * mpmath.matrix([list(vector) for vector in physical]).T
        if whole.rows < whole.cols:
            whole = whole.T
        values = sorted(mpmath.svd_r(whole, compute_uv=False))
        return [0.0 if value < values[-1] * mpmath.mpf(10) ** -80 else float(value) for value in values]


@settings(max_examples=60)
@given(graded())
def test_singular_values_have_small_relative_errors(matrix):
    found, expected = sorted(singular_values(matrix)), exactly(matrix)
    # Scaling a singular matrix rounds its entries, after which mpmath sees a tiny value where the rank says zero.
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9) or (mine == 0 and _is_rounding(matrix, theirs))


def _is_rounding(matrix, value):
    """Whether rounding errors of the entries explain a singular value: if they change, it does."""
    rng = np.random.default_rng(0)
    changed = [exactly(matrix * (1 + 1e-15 * rng.uniform(-1, 1, matrix.shape))) for _ in range(3)]
    return any(min(abs(math.log(one / value)) if one else 99 for one in values) > 1e-3 for values in changed)


@settings(max_examples=25)
@given(st.lists(st.tuples(sizes, sizes), min_size=2, max_size=4))
def test_restricted_singular_values_have_small_relative_errors(pairs):
    masses, vevs = (np.array(part) for part in zip(*pairs, strict=True))
    found = sorted(restricted_singular_values(np.diag(masses), vevs[None]))
    assert found == pytest.approx(exactly(np.diag(masses), vevs[None]), rel=1e-9)


def test_restricted_singular_values_of_several_rows_and_none():
    matrix = np.diag([1e-10, 3.0, 2e12, 5.0])
    excluded = np.array([[1e10, 1e-3, 0.0, 2.0], [0.0, 4e-8, 1e9, 1.0]])
    found = sorted(restricted_singular_values(matrix, np.vstack([excluded, excluded[0] + 3e5 * excluded[1]])))
    assert found == pytest.approx(exactly(matrix, excluded), rel=1e-9)
    assert sorted(restricted_singular_values(matrix, np.zeros((0, 4)))) == [1e-10, 3.0, 5.0, 2e12]
    assert len(restricted_singular_values(np.diag([3.0]), np.array([[7.0]]))) == 0
    assert restricted_singular_values(np.zeros((2, 2)), np.array([[1.0, 1.0]])).tolist() == [0.0]


@settings(max_examples=30)
@given(yukawa=sizes, vev=sizes, heavy=sizes)
@example(yukawa=1e-12, vev=246.0, heavy=1e16)
def test_seesaw_1_over_thirty_orders(yukawa, vev, heavy):
    """The eigenvalues of ((0, m), (m, M)) are (sqrt(M^2 + 4 m^2) -+ M) / 2."""
    theory = make(SM, {"H": ("singlet fund 1/2", 125, (0, 2, 0), vev)}, LEPTONS, {"L N H": yukawa, "N N": heavy})
    (sector,) = [s for s in fermion_sectors(theory, vacuum(theory)) if s.kind == "majorana"]
    with mpmath.workdps(DIGITS):
        dirac = mpmath.mpf(yukawa) * mpmath.mpf(vev) / mpmath.sqrt(2)
        root = mpmath.sqrt(mpmath.mpf(heavy) ** 2 + 4 * dirac**2)
        exact = [float((root - heavy) / 2), float((root + heavy) / 2)]
    assert sector.masses == pytest.approx(exact, rel=1e-11)


@settings(max_examples=20)
@given(vevs=st.tuples(sizes, sizes), masses=st.tuples(sizes, sizes))
@example(vevs=(246.0, 1e16), masses=(125.0, 1e16))
def test_charged_scalar_of_two_doublets(vevs, masses):
    """The charged Higgs is orthogonal to the eaten one: m^2 = (m1^2 v2^2 + m2^2 v1^2) / (v1^2 + v2^2)."""
    scalars = {
        name: ("singlet fund 1/2", mass, (0, 2, 0), vev)
        for name, mass, vev in zip(("H", "K"), masses, vevs, strict=True)
    }
    theory = make(SM, scalars, LEPTONS, {})
    (sector,) = scalar_sectors(theory, vacuum(theory))
    with mpmath.workdps(DIGITS):
        (v1, v2), (m1, m2) = ([mpmath.mpf(x) for x in pair] for pair in (vevs, masses))
        exact = mpmath.sqrt((m1**2 * v2**2 + m2**2 * v1**2) / (v1**2 + v2**2))
    assert sector.masses == pytest.approx([float(exact)], rel=1e-11)


def test_a_grand_unified_scale_eats_as_many_scalars_as_a_low_one():
    """The number of eaten scalars does not depend on how far apart the vevs are."""
    for scale in (1e3, 1e16, 1e25):
        scalars = {"A": ("adjoint", scale, (23,), scale), "H": ("fund", 125, (5,), 246)}
        theory = make({"G": "SU(5)"}, scalars, {"F": ("antifund", 3), "T": ("antisym", 3)}, {})
        found = [(s.colour, str(s.charge), len(s.masses)) for s in scalar_sectors(theory, vacuum(theory))]
        assert found == [(8, "0", 1), (3, "-1/3", 1), (1, "1", 1)], scale


def test_the_spectrum_shows_every_mass_and_massless_states_apart():
    theory = make(
        SM,
        {"H": ("singlet fund 1/2", 125, (0, 2, 0), 246)},
        {"L": ("singlet fund -1/2", 3), "ec": ("singlet singlet 1", 3), "N": ("singlet singlet 0", 2)},
        {"L N H": (1e-6, 0.01), "N N": 1e16, "L ec H*": (1e-6, 1e-3, 0.01)},
    )
    sectors = fermion_sectors(theory, vacuum(theory))
    axes = matplotlib.figure.Figure().subplots()
    draw_spectrum(axes, sectors)
    heights = {line.get_ydata()[0] for line in axes.lines}
    masses = {float(f"{mass:.3g}") for sector in sectors for mass in sector.masses if mass}
    assert masses <= heights and min(masses) < 1e-20 and axes.get_yscale() == "log"
    low, high = axes.get_ylim()
    assert all(low < height < high for height in heights)
    (massless,) = heights - masses - {100.0}
    assert massless < min(masses) and "massless" in [label.get_text() for label in axes.get_yticklabels()]
    texts = [text.get_text() for text in axes.texts]
    assert any(text.startswith("3.03e-24") for text in texts) and "1e+16 x2" in texts


def test_a_spectrum_of_massless_states_only():
    theory = make(SM, {"H": ("singlet fund 1/2", 125, (0, 2, 0), 246)}, LEPTONS, {})
    axes = matplotlib.figure.Figure().subplots()
    draw_spectrum(axes, fermion_sectors(theory, vacuum(theory)))
    assert "massless" in [label.get_text() for label in axes.get_yticklabels()]
