"""Group theory is compared with explicit matrices, textbook tables and sum rules."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_tasks.tasks.theory import groups, tensors

# ---- an oracle of explicit matrices: a diagonal generator on tensors of SU(N), built index by index


def diagonal_on(n, shape, x):
    """The values of diag(x) on the components of a tensor: 'u' upper, 'l' lower, 's' symmetric pair, 'a' antisymmetric
    pair, 'S' symmetric triple, 'A' antisymmetric triple; 'ul' is an adjoint and a singlet."""
    parts = []
    for letter in shape:
        count = {"u": 1, "l": 1, "s": 2, "a": 2, "S": 3, "A": 3}[letter]
        pick = itertools.combinations_with_replacement if letter in "sS" else itertools.combinations
        sign = -1 if letter == "l" else 1
        parts.append([sign * sum(x[i] for i in chosen) for chosen in pick(range(n), count)])
    return [sum(values) for values in itertools.product(*parts)]


def matrix_invariants(n, shape, singlets=0):
    """Dimension, 2T and A from traces of one diagonal generator, in units of the fundamental's."""
    x = [Fraction(3 * i * i + i + 1) for i in range(n)]
    x = [value - sum(x) / n for value in x]
    values = diagonal_on(n, shape, x)
    square = sum(v**2 for v in values) / sum(v**2 for v in x)
    cubes = sum(v**3 for v in x)
    cubic = sum(v**3 for v in values) / cubes if n > 2 else 0
    return len(values) - singlets, square, cubic


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_su_n_against_traces_of_matrices(n):
    def labels(**marks):
        row = [0] * (n - 1)
        for place, count in marks.items():
            row[int(place[1:])] += count
        return tuple(row)

    last = f"n{n - 2}"
    cases = [("u", labels(n0=1), 0), ("l", labels(**{last: 1}), 0), ("s", labels(n0=2), 0), ("S", labels(n0=3), 0)]
    adjoint = [0] * (n - 1)
    adjoint[0] += 1
    adjoint[-1] += 1
    cases.append(("ul", tuple(adjoint), 1))
    if n > 3:
        cases += [("a", labels(n1=1), 0), ("A", labels(n2=1), 0)]
    for shape, rep, singlets in cases:
        assert tuple(groups.irrep(f"SU({n})", rep)) == matrix_invariants(n, shape, singlets), (n, shape)


@pytest.mark.parametrize(
    ("group", "rep", "dimension", "index"),
    [
        ("SO(10)", (1, 0, 0, 0, 0), 10, 1), ("SO(10)", (0, 0, 0, 0, 1), 16, 2), ("SO(10)", (0, 1, 0, 0, 0), 45, 8),
        ("SO(10)", (2, 0, 0, 0, 0), 54, 12), ("SO(10)", (0, 0, 0, 0, 2), 126, 35), ("SO(7)", (0, 0, 1), 8, 1),
        ("SO(5)", (1, 0), 5, 1), ("SO(5)", (0, 1), 4, Fraction(1, 2)), ("SO(8)", (0, 0, 1, 0), 8, 1),
        ("Sp(4)", (1, 0), 4, Fraction(1, 2)), ("Sp(4)", (0, 1), 5, 1), ("Sp(6)", (0, 1, 0), 14, 2),
        ("Sp(6)", (0, 0, 1), 14, Fraction(5, 2)), ("E6", (1, 0, 0, 0, 0, 0), 27, 3),
        ("E6", (0, 1, 0, 0, 0, 0), 78, 12), ("E6", (0, 0, 1, 0, 0, 0), 351, 75), ("SU(2)", (5,), 6, Fraction(35, 2)),
    ],
)  # fmt: skip
def test_textbook_dimensions_and_indices(group, rep, dimension, index):
    found = groups.irrep(group, rep)
    assert (found.dimension, Fraction(found.dynkin_index, 2)) == (dimension, index)


def test_so6_is_su4():
    pairs = [((1, 0, 0), (0, 1, 0)), ((0, 1, 0), (1, 0, 0)), ((0, 0, 1), (0, 0, 1)), ((1, 1, 0), (1, 1, 0))]
    for so, su in pairs:
        assert groups.irrep("SO(6)", so) == groups.irrep("SU(4)", su)
    assert groups.has_cubic("SO(6)") and not groups.has_cubic("SO(10)") and not groups.has_cubic("SU(2)")


@pytest.mark.parametrize(
    ("group", "rep", "kind"),
    [
        ("SU(2)", (1,), -1), ("SU(2)", (2,), 1), ("SU(3)", (1, 0), 0), ("SU(3)", (1, 1), 1), ("SU(4)", (0, 1, 0), 1),
        ("SU(6)", (0, 0, 1, 0, 0), -1), ("Sp(4)", (1, 0), -1), ("SO(5)", (0, 1), -1), ("SO(7)", (0, 0, 1), 1),
        ("SO(10)", (0, 0, 0, 0, 1), 0), ("E6", (1, 0, 0, 0, 0, 0), 0), ("E6", (0, 1, 0, 0, 0, 0), 1),
    ],
)  # fmt: skip
def test_reality(group, rep, kind):
    assert groups.reality(group, rep) == kind


def test_known_products():
    assert groups.product("SU(3)", (1, 0), (1, 0)) == {(2, 0): 1, (0, 1): 1}
    assert groups.product("SU(3)", (1, 1), (1, 1))[1, 1] == 2
    assert groups.product("SU(5)", (0, 1, 0, 0), (0, 0, 0, 1)) == {(0, 1, 0, 1): 1, (1, 0, 0, 0): 1}
    spinors = groups.product("SO(10)", (0, 0, 0, 0, 1), (0, 0, 0, 0, 1))
    assert sorted(groups.irrep("SO(10)", rep).dimension for rep in spinors) == [10, 120, 126]
    assert groups.singlets_in("E6", ((1, 0, 0, 0, 0, 0),) * 3) == 1
    assert groups.singlets_in("SU(3)", ((1, 0), (1, 0))) == 0


SMALL = st.sampled_from(["SU(2)", "SU(3)", "SU(4)", "SO(5)", "Sp(6)", "SO(7)", "SO(8)"])


@st.composite
def small_rep(draw, group):
    rank = groups.algebra(group).rank
    rep = [0] * rank
    for _ in range(draw(st.integers(0, 2))):
        rep[draw(st.integers(0, rank - 1))] += 1
    return tuple(rep)


@settings(max_examples=25)
@given(data=st.data(), group=SMALL)
def test_products_keep_dimension_index_and_cubic_coefficient(data, group):
    first, second = data.draw(small_rep(group)), data.draw(small_rep(group))
    a, b = groups.irrep(group, first), groups.irrep(group, second)
    content = [(groups.irrep(group, rep), count) for rep, count in groups.product(group, first, second).items()]
    assert sum(rep.dimension * count for rep, count in content) == a.dimension * b.dimension
    for name in ("dynkin_index", "cubic"):
        expected = getattr(a, name) * b.dimension + getattr(b, name) * a.dimension
        assert sum(getattr(rep, name) * count for rep, count in content) == expected


@settings(max_examples=25)
@given(data=st.data(), group=SMALL)
def test_weights_and_conjugation(data, group):
    rep = data.draw(small_rep(group))
    found = groups.irrep(group, rep)
    weights = groups.weights(group, rep)
    assert sum(weights.values()) == found.dimension
    # The square of one Cartan generator, in units of what the adjoint gives, is the index.
    lie = groups.algebra(group)
    roots = [tuple(np.array(root) @ np.array(lie.simple_roots)) for root in lie.positive_roots]
    adjoint = 2 * sum(int(root[0]) ** 2 for root in roots)
    highest = max(roots, key=lambda root: groups.inner(group, root, (1,) * lie.rank))
    of_adjoint = groups.irrep(group, tuple(int(x) for x in highest)).dynkin_index
    square = sum(weight[0] ** 2 * count for weight, count in weights.items())
    assert Fraction(square, adjoint) == Fraction(found.dynkin_index, of_adjoint)
    opposite = groups.irrep(group, groups.conjugate(group, rep))
    assert opposite == (found.dimension, found.dynkin_index, -found.cubic)
    negative = {tuple(-x for x in weight): count for weight, count in weights.items()}
    assert groups.weights(group, groups.conjugate(group, rep)) == negative


@pytest.mark.parametrize("name", ["SU(1)", "SO(3)", "SO(4)", "Sp(3)", "G2", "su(3)", "U(2)", "", "SU(3) ", "SU(-3)"])
def test_unknown_groups_are_named_with_the_known_ones(name):
    with pytest.raises(ValueError, match=r"unknown group .*groups are: SU\(N\)"):
        groups.algebra(name)


@pytest.mark.parametrize("rep", [(1,), (1, 0, 0), (-1, 0)])
def test_invalid_labels_are_reported(rep):
    with pytest.raises(ValueError, match=r"a representation of SU\(3\) has 2 non-negative Dynkin labels"):
        groups.irrep("SU(3)", rep)


# ---- components and contractions


def all_roots(group):
    positive = tensors.positive_roots(group)
    return [*positive, *map(tensors.opposite, positive)]


@pytest.mark.parametrize("group", ["SU(2)", "SU(3)", "SU(4)", "SU(5)", "SO(10)", "E6"])
def test_generators_obey_one_algebra(group):
    """[E_a, E_b] = N E_{a+b} with the same N = -1, 0 or 1 in every representation, and [E_a, E_-a] is diagonal with
    the weights as entries."""
    roots = all_roots(group)
    assert len(roots) + groups.algebra(group).rank == groups.algebra(group).dimension
    rng = random.Random(0)
    pairs = [rng.sample(roots, 2) for _ in range(40)] if len(roots) > 20 else itertools.permutations(roots, 2)
    for first, second in pairs:
        total = tuple(a + b for a, b in zip(first, second, strict=True))
        found = set()
        for rep in tensors.reps_of(group).values():
            if not any(rep):
                continue
            x, y = tensors.generator(group, rep, first), tensors.generator(group, rep, second)
            commutator = x @ y - y @ x
            if total in roots:
                wanted = tensors.generator(group, rep, total)
                sign = round((commutator * wanted).sum() / (wanted**2).sum())
                assert abs(sign) == 1 and np.allclose(commutator, sign * wanted)
                found.add(sign)
            elif any(total):
                assert np.allclose(commutator, 0)
            else:
                labels = [tensors.colour_label(group, w, first) for w in tensors.components(group, rep)]
                assert np.allclose(np.diag(commutator), np.array(labels, float))
        assert len(found) == (total in roots)


def is_invariant(group, reps, dual=False):
    tensor = tensors.contraction(group, reps, dual)
    for root in all_roots(group):
        x, y, z = (tensors.generator(group, rep, root, dual and n == 2) for n, rep in enumerate(reps))
        moved = np.einsum("ia,ajk->ijk", x, tensor) + np.einsum("ja,iak->ijk", y, tensor) + tensor @ z.T
        if np.abs(moved).max() > 1e-9:
            return False
    return True


@pytest.mark.parametrize(
    ("group", "kinds", "sign"),
    [
        ("SO(10)", "spinor spinor fund", 1), ("SO(10)", "spinor conj_spinor adjoint", None),
        ("SO(10)", "fund fund adjoint", -1), ("SO(10)", "conj_spinor spinor singlet", None),
        ("E6", "fund fund fund", 1), ("E6", "antifund fund adjoint", None),
    ],
)  # fmt: skip
def test_contractions_of_large_groups_are_invariant_and_have_the_known_symmetry(group, kinds, sign):
    reps = tuple(tensors.reps_of(group)[kind] for kind in kinds.split())
    assert is_invariant(group, reps)
    if sign is not None:
        tensor = tensors.contraction(group, reps)
        assert groups.exchange_sign(group, reps[0], reps[2]) == sign
        assert np.allclose(tensor, sign * tensor.swapaxes(0, 1))


def test_what_large_groups_do_not_couple():
    """A 16 and a 27 have no mass term with themselves, and there is no 27 27 78."""
    assert groups.exchange_sign("SO(10)", (0, 0, 0, 0, 1)) == groups.exchange_sign("E6", (1, 0, 0, 0, 0, 0)) == 0
    assert groups.exchange_sign("E6", (1, 0, 0, 0, 0, 0), (0, 1, 0, 0, 0, 0)) == 0


@pytest.mark.parametrize("group", ["SU(2)", "SU(3)", "SU(4)"])
def test_contractions_of_su_n_are_invariant(group):
    kinds = itertools.product(tensors.reps_of(group).values(), repeat=3)
    cases = [
        (reps, dual) for reps in kinds for dual in (False, True) if tensors.contraction(group, reps, dual) is not None
    ]
    assert len(cases) > 15 and all(is_invariant(group, *case) for case in cases)


@pytest.mark.parametrize("group", ["SU(2)", "SU(3)", "SU(4)", "SU(5)"])
def test_exchange_signs_are_those_of_explicit_tensors(group):
    reps = tensors.reps_of(group).values()
    for rep, third, dual in itertools.product(reps, reps, (False, True)):
        tensor = tensors.contraction(group, (rep, rep, third), dual)
        sign = 0 if tensor is None else 1 if np.allclose(tensor, tensor.swapaxes(0, 1)) else -1
        assert groups.exchange_sign(group, rep, third, dual) == sign


def test_contractions_are_the_familiar_ones():
    assert np.array_equal(tensors.contraction("SU(2)", ((1,), (1,))), [[0, 1], [-1, 0]])
    assert np.array_equal(tensors.contraction("SU(2)", ((1,), (1,)), True), np.eye(2))
    assert np.array_equal(tensors.contraction("SU(3)", ((1, 0), (0, 1))), np.eye(3))
    epsilon = np.zeros((3, 3, 3))
    for i, j, k in itertools.permutations(range(3)):
        epsilon[i, j, k] = np.linalg.det(np.eye(3)[[i, j, k]])
    assert np.allclose(tensors.contraction("SU(3)", ((1, 0),) * 3), epsilon)
    assert tensors.contraction("SU(3)", ((1, 1),) * 3) is None  # two ways: f and d
    assert tensors.contraction("SU(3)", ((1, 0), (1, 0))) is None


def test_unsupported_representations_and_components_are_reported():
    with pytest.raises(ValueError, match=r"representation \[2, 0\] of SU\(3\); supported: singlet"):
        tensors.components("SU(3)", (2, 0))
    with pytest.raises(ValueError, match=r"SO\(10\), E6, but not for SO\(12\); anomalies can be computed"):
        tensors.reps_of("SO(12)")
    with pytest.raises(ValueError, match="has components 1 to 3, not 4"):
        tensors.direction("SU(3)", (1, 0), 4)
