"""A check that SARAH model files are complete, by a reader that shares no code with the writer."""

import ast
import itertools
import math
import re
from collections import Counter
from fractions import Fraction

import numpy as np

from trl_grpo_tasks.tasks.theory.breaking import vacuum
from trl_grpo_tasks.tasks.theory.groups import irrep, is_barred
from trl_grpo_tasks.tasks.theory.tensors import reps_of
from trl_grpo_tasks.tasks.theory.theory import Fermion, GaugeGroup, Scalar, Term, Theory, Vev

# Dimensions of representations of SU(N); U(1) has charges instead.
DIMENSIONS = {2: {1, 2, 3}, 3: {1, 3, -3, 8}, 4: {1, 4, -4, 6, 15}, 5: {1, 5, -5, 10, -10, 24}}


# ---- SARAH: statements of a subset of Mathematica


def statements(text):
    """Both sides of each assignment in Python's syntax: {1/2, a b, c[d]} is [Fraction(1)/Fraction(2), a*b, c(d)], and
    a product of fields a.b is an attribute."""
    code = re.sub(r"\(\*.*?\*\)", "", text).replace("Off[General::spell]", "")
    code = code.translate(str.maketrans("{}[]`", "[]()_")).replace("->", "==")
    code = re.sub(r"(?<=[\w)]) (?=[A-Za-z])", "*", code)
    code = re.sub(r"(?<![\w.])(\d+)(?![\w.])", r"Fraction(\1)", code)
    *parts, rest = code.split(";")
    assert not rest.strip(), rest
    for part in parts:
        yield [ast.parse(side.strip(), mode="eval").body for side in part.split(" = ", 1)]


def names_in(node):
    """The names in an expression, without those of functions."""
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return found - {"Fraction", "Sqrt", "conj"}


def value(node, values=None):
    """What an expression is, for the values of its names: a number, or nested lists of numbers."""
    known = {"Fraction": Fraction, "Sqrt": math.sqrt, "conj": np.conj, **(values or {})}
    return eval(compile(ast.Expression(node), "model file", "eval"), known)


def terms_of(lagrangian):
    """The couplings in a sum, such as `Y1 conj[H].Q.uc`, each with its fields and the signs of their charges."""
    found, sums = [], [one for one in ast.walk(lagrangian) if isinstance(one, ast.BinOp)]
    products = [one for one in sums if isinstance(one.right, ast.Attribute)]
    for product in sorted(products, key=lambda one: one.end_col_offset):
        field, members = product.right, []
        while isinstance(field, ast.Attribute):
            members.insert(0, (field.attr, 1))
            field = field.value
        (name,) = names_in(field)
        coupling = product.left if isinstance(product.left, ast.Name) else product.left.right
        found.append((coupling.id, [(name, -1 if isinstance(field, ast.Call) else 1), *members]))
    return found


def read_model(text):
    """The gauge groups (N, and whether they are expanded), the fields, and the other statements of a model file."""
    groups, fields, found, labels = [], {}, {}, []
    for left, right in statements(text):
        kind = ast.unparse(left.func) if isinstance(left, ast.Call) else ast.unparse(left)
        if kind == "Gauge":
            boson, group, label, coupling, expanded = map(ast.unparse, right.elts)
            family, size = re.fullmatch(r"(\w+)\(Fraction\((\d+)\)\)", group).groups()
            groups.append((int(size), expanded == "True"))
            labels.append(label)
            assert value(left.args[0]) == len(groups) and coupling == f"g{len(groups)}" and boson
            assert expanded in ("True", "False") and (family, size) != ("U", "2")
        elif kind in ("FermionFields", "ScalarFields"):
            symbol, copies, components, *numbers = right.elts
            assert symbol.id not in fields and re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", symbol.id)
            own = [value(one) for one in numbers]
            assert all(n == 1 or d in DIMENSIONS[n] for (n, _), d in zip(groups, own, strict=True)), own
            fields[symbol.id] = (int(value(copies)), own, components)
        else:
            found["VEVs" if kind == "DEFINITION(EWSB)" else kind] = right
    assert len({label[:3] for label in labels}) == len(labels)  # SARAH names indices by three letters
    # Of each vev: its component, and the names of its value and of the states in this component.
    found["VEVs"] = [
        [ast.unparse(part.elts[0] if isinstance(part, ast.List) else part) for part in vev.elts]
        for vev in found["VEVs"].elts
    ]
    found["RealScalars"] = [name.id for name in found["RealScalars"].elts]
    return groups, fields, found


def read_theory(text):
    """The theory of a model file, with the names of the file."""
    sizes, fields, found = read_model(text)
    groups = tuple(GaugeGroup(str(n), "U(1)" if size == 1 else f"SU({size})") for n, (size, _) in enumerate(sizes))
    values = dict(re.findall(r"\(\* (\w+) = (.+?) \*\)", text))
    places = {vev.removeprefix("v"): component.split("x") for component, vev, *_ in found["VEVs"]}
    fermions, scalars, terms = [], [], []
    for name, (copies, numbers, _) in fields.items():
        own = tuple(rep_of(group.group, number) for group, number in zip(groups, numbers, strict=True))
        if f"m{name}" not in values:
            fermions.append(Fermion(name, own, copies))
            continue
        components = tuple(map(int, places[name][-len(groups) :])) if name in places else None
        vev = None if components is None else Vev(components, float(values[f"v{name}"]))
        scalars.append(Scalar(name, own, float(values[f"m{name}"]), vev))
    for coupling, (*scalar, (first, _), (second, _)) in terms_of(found["LagHC"]):
        numbers = [float(one) for one in values[coupling].strip("{}").split(", ")]
        if not scalar:  # a file has one mass for all generations
            numbers *= min(fields[first][0], fields[second][0])
        name, sign = scalar[0] if scalar else (None, 1)
        terms.append(Term(first, second, tuple(numbers), name, sign < 0))
    return Theory(groups, tuple(fermions), tuple(scalars), tuple(terms))


def rep_of(group, number):
    """The representation of this dimension, negative for the conjugate one; a charge is unchanged."""
    if group == "U(1)":
        return Fraction(number)
    dimensions = {(-1 if is_barred(group, r) else 1) * irrep(group, r).dimension: r for r in reps_of(group).values()}
    return dimensions[int(number)]


def tensor_of(components, values):
    return np.array(value(components, values), complex)


def indices_of(size, dimension):
    """How each index of a tensor transforms: 1 as the fundamental, -1 as its conjugate."""
    known = {1: (), -size: (-1,), size: (1,), size**2 - 1: (1, -1)}
    return known.get(
        dimension, (1, 1) if size == 5 and dimension > 0 else (-1, -1)
    )  # a pair; a file has 6 with lower ones


def generators(size):
    """A basis of hermitian traceless matrices."""
    found = []
    for i, j in itertools.combinations(range(size), 2):
        for x in (1, 1j):
            found.append(np.zeros((size, size), complex))
            found[-1][i, j], found[-1][j, i] = x, np.conj(x)
    for i in range(size - 1):
        found.append(np.diag([0j] * i + [1, -1] + [0] * (size - i - 2)))
    return found


def changed(tensor, groups, numbers, place, generator):
    """What a generator of the group at this place makes of a tensor with one or more axes per expanded group."""
    if generator is None:
        return float(numbers[place]) * tensor
    kinds = [
        indices_of(n, int(d)) if n > 1 and expanded else () for (n, expanded), d in zip(groups, numbers, strict=True)
    ]
    result = np.zeros_like(tensor)
    for axis, kind in enumerate(kinds[place], sum(map(len, kinds[:place]))):
        matrix = generator if kind == 1 else -generator.T
        result += np.moveaxis(np.tensordot(matrix, tensor, (1, axis)), 0, axis)
    return result


def unbroken_dimension(groups, fields, vevs):
    """The dimension of the gauge group that the file's vevs leave unbroken."""
    tensors = []
    for component, vev, *_ in vevs:
        _, numbers, components = fields[vev.removeprefix("v")]
        values = dict.fromkeys(names_in(components), 0) | {component: 1}
        tensors.append((numbers, tensor_of(components, values)))
    moved = []
    for place, (size, _) in enumerate(groups):
        for generator in generators(size) if size > 1 else [None]:
            parts = [1j * changed(tensor, groups, numbers, place, generator).ravel() for numbers, tensor in tensors]
            moved.append(np.concatenate([np.zeros(1), *parts]))
    real = np.concatenate([np.real(moved), np.imag(moved)], axis=1)
    return len(moved) - np.linalg.matrix_rank(real, tol=1e-9)


def check_components(groups, fields, real):
    """Fields have as many components as their representations, and tensors their norm and symmetry."""
    rng = np.random.default_rng(0)
    for symbol, (_, numbers, components) in fields.items():
        names = sorted(names_in(components))
        values = {n: rng.normal() + (0 if n in real else 1j * rng.normal()) for n in names}
        tensor = tensor_of(components, values)
        wide = [(n, int(d)) for (n, expanded), d in zip(groups, numbers, strict=True) if expanded and n > 1]
        count = np.prod([abs(d) for _, d in wide], initial=1)
        is_real_field = "conj(" in ast.unparse(components) or bool(real & set(names)) or symbol in real
        if is_real_field and symbol not in real:
            assert 2 * len(names) - len(real & set(names)) == count
            weights = [1 if name in real else 2 for name in names]
        else:
            assert len(names) == count
            weights = [1] * len(names)
        assert np.isclose(
            (abs(tensor) ** 2).sum(), sum(w * abs(values[n]) ** 2 for w, n in zip(weights, names, strict=True))
        )
        axis = 0
        for size, dimension in wide:
            kinds = indices_of(size, dimension)
            assert np.shape(tensor)[axis : axis + len(kinds)] == (size,) * len(kinds)
            if kinds == (1, -1):
                assert np.allclose(np.trace(tensor, axis1=axis, axis2=axis + 1), 0)
            elif len(kinds) == 2:
                assert np.allclose(tensor, -np.swapaxes(tensor, axis, axis + 1))
            axis += len(kinds)
        assert axis == np.ndim(tensor)


def check_sarah(theory, text):
    """Every name of a model file is declared once, and its vevs break what those of the theory do."""
    groups, fields, found = read_model(text)
    assert len(fields) == len(theory.fermions) + len(theory.scalars) and not set(fields) & set("CDEIKNO")
    declared = [*fields, *(name for _, _, components in fields.values() for name in names_in(components))]
    terms = [term for key in ("LagHC", "LagNoHC") for term in terms_of(found[key])]
    assert {field for _, members in terms for field, _ in members} <= set(fields)
    real = set(found["RealScalars"])
    assert real <= set(declared)
    check_components(groups, fields, real)
    vevs = found["VEVs"]
    assert len(vevs) == sum(scalar.vev is not None for scalar in theory.scalars)
    for component, vev, *_ in vevs:
        assert component in names_in(fields[vev.removeprefix("v")][2])
    parts = [name for _, *names in vevs for name in names if name != "Fraction(0)"]
    names = [*declared, *(coupling for coupling, _ in terms), *parts]
    assert len(set(names)) == len(names)
    assert unbroken_dimension(groups, fields, vevs) == vacuum(theory).unbroken


# ---- anomalies from the file alone


def weights_of(size, dimension):
    """The values of diag(1, ..., 1, 1 - N) on the components of a representation of SU(N), from its tensor indices."""
    entries = [Fraction(1)] * (size - 1) + [Fraction(1 - size)]
    kinds = indices_of(size, dimension)
    if len(kinds) == 2 and kinds[0] == kinds[1]:  # antisymmetric
        return [kinds[0] * (a + b) for a, b in itertools.combinations(entries, 2)]
    sums = [
        sum(k * x for k, x in zip(kinds, one, strict=True)) for one in itertools.product(entries, repeat=len(kinds))
    ]
    if len(kinds) == 2:
        sums.remove(0)  # the trace
    return sums


def anomalies_of(text):
    """All anomaly coefficients of a model file, by the places of the groups: traces over single states.

    (i, i, i) is the cubic one, (i, i, u) the mixed one, (u,) the gravitational one, ("witten", i) the global one.
    """
    groups, fields, _ = read_model(text)
    fermions = re.findall(r"^FermionFields\[\[\d+\]\] = \{(\w+),", text, re.MULTILINE)
    sizes = [size for size, _ in groups]
    simple = [i for i, size in enumerate(sizes) if size > 1]
    abelian = [i for i, size in enumerate(sizes) if size == 1]
    found = Counter()
    for name in fermions:
        copies, numbers, _ = fields[name]
        dimension = copies * math.prod(abs(int(numbers[i])) for i in simple)
        for i in simple:
            power = {n: sum(w**n for w in weights_of(sizes[i], int(numbers[i]))) for n in (2, 3)}
            unit = {n: sum(w**n for w in weights_of(sizes[i], sizes[i])) for n in (2, 3)}
            others = dimension // abs(int(numbers[i]))
            index = others * power[2] / unit[2]  # 2 T, as a multiple of the fundamental
            if sizes[i] > 2:
                found[i, i, i] += others * power[3] / unit[3]
            else:
                found["witten", i] = (found["witten", i] + index) % 2
            for u in abelian:
                found[i, i, u] += index / 2 * numbers[u]
        for u in abelian:
            found[(u,)] += dimension * numbers[u]
        for u, v, w in itertools.combinations_with_replacement(abelian, 3):
            found[u, v, w] += dimension * numbers[u] * numbers[v] * numbers[w]
    return found
