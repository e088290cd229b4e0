"""A check that SARAH model files are complete, by a reader that shares no code with the writer."""

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

TOKEN = re.compile(
    r'\s*(?:(\(\*.*?\*\))|("[^"]*")|([A-Za-z][\w`]*)|(\d+(?:\.\d+)?)|(\[\[|\]\]|->|::|[-+*/=;,.{}()\[\]]))', re.DOTALL
)


class Mathematica:
    """A parser of assignments: nested lists, calls, parts, products (also by a space), dots, sums, rules."""

    def __init__(self, text):
        self.tokens, place = [], 0
        text = text.rstrip()
        while place < len(text):
            match = TOKEN.match(text, place)
            assert match, text[place : place + 40]
            place = match.end()
            if match[1] is None:
                self.tokens.append(match[0].strip())
        # Two closing brackets are one token after a part, two tokens after nested calls; no file nests calls.
        self.at = 0

    def peek(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, expected=None):
        token = self.peek()
        assert token is not None and expected in (None, token), (token, expected)
        self.at += 1
        return token

    def statements(self):
        found = []
        while self.peek() is not None:
            left = self.sum()
            if self.peek() == "=":
                self.take()
                found.append((left, self.sum()))
                self.take(";")
        return found

    def sum(self):
        parts = [self.product()]
        while self.peek() in ("+", "-", "->"):
            parts += [self.take(), self.product()]
        return parts[0] if len(parts) == 1 else ("sum", *parts)

    def product(self):
        parts = [self.factor()]
        while (token := self.peek()) and (token in ("/", "*", ".") or token in "({" or token[0].isalnum()):
            if token in ("/", "*", "."):
                parts.append(self.take())
            parts.append(self.factor())
        return parts[0] if len(parts) == 1 else ("product", *parts)

    def factor(self):
        token = self.take()
        if token == "-":
            return ("minus", self.factor())
        if token == "(":
            inner = self.sum()
            self.take(")")
            return inner
        if token == "{":
            return self.items("}")
        assert token[0].isalnum() or token[0] == '"', token
        value = token
        while self.peek() in ("[", "[[", "::"):
            kind = self.take()
            value = (kind, value, self.take() if kind == "::" else self.items("]" if kind == "[" else "]]"))
        return value

    def items(self, end):
        found = []
        while self.peek() != end:
            found.append(self.sum())
            if self.peek() != end:
                self.take(",")
        self.take(end)
        return found


def number(value):
    if isinstance(value, tuple) and value[0] == "minus":
        return -number(value[1])
    if isinstance(value, tuple) and value[0] == "product":
        top, slash, bottom = value[1:]
        assert slash == "/"
        return number(top) / number(bottom)
    return Fraction(value)


def symbols(value):
    if isinstance(value, str):
        return {value}
    return set().union(*map(symbols, value)) if value else set()


def fields_of(term):
    """The fields of `Y1 conj[H].Q.uc` with the sign of their charges, and the name of the coupling."""
    parts = [part for part in term[1:] if part != "."]
    if parts[:3] == ["1", "/", "2"]:
        parts = parts[3:]
    coupling, *members = parts
    return coupling, [(part[2][0], -1) if isinstance(part, tuple) else (part, 1) for part in members]


def read_model(text):
    """The gauge groups (N, and whether they are expanded), the fields, and the other statements of a model file."""
    groups, fields, found, labels = [], {}, {}, []
    for left, right in Mathematica(text).statements():
        if not (isinstance(left, tuple) and left[0] == "[["):
            found["VEVs" if "VEVs" in symbols(left) else str(left)] = right
            continue
        (place,) = left[2]
        if left[1] == "Gauge":
            boson, (_, family, (size,)), label, coupling, expanded = right
            assert boson and coupling == f"g{place}" and expanded in ("True", "False") and (family, size) != ("U", "2")
            groups.append((int(size), expanded == "True"))
            labels.append(label)
            assert int(place) == len(groups)
        else:
            assert left[1] in ("FermionFields", "ScalarFields")
            symbol, copies, components, *numbers = right
            assert symbol not in fields and re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", symbol)
            own = [number(one) for one in numbers]
            assert all(n == 1 or d in DIMENSIONS[n] for (n, _), d in zip(groups, own, strict=True)), own
            fields[symbol] = (int(copies), own, components)
    assert len({label[:3] for label in labels}) == len(labels)  # SARAH names indices by three letters
    return groups, fields, found


def read_theory(text):
    """The theory of a model file, with the names of the file."""
    sizes, fields, found = read_model(text)
    groups = tuple(GaugeGroup(str(n), "U(1)" if size == 1 else f"SU({size})") for n, (size, _) in enumerate(sizes))
    values = dict(re.findall(r"\(\* (\w+) = (.+?) \*\)", text))
    places = {vev.removeprefix("v"): component.split("x") for component, (vev, _), *_ in found["VEVs"]}
    fermions, scalars, terms = [], [], []
    for name, (copies, numbers, _) in fields.items():
        own = tuple(rep_of(group.group, number) for group, number in zip(groups, numbers, strict=True))
        if f"m{name}" not in values:
            fermions.append(Fermion(name, own, copies))
            continue
        components = tuple(map(int, places[name][-len(groups) :])) if name in places else None
        vev = None if components is None else Vev(components, float(values[f"v{name}"]))
        scalars.append(Scalar(name, own, float(values[f"m{name}"]), vev))
    inner = found["LagHC"][1]
    for term in (inner[1::2] if inner[0] == "sum" else [inner]) if inner != "0" else ():
        coupling, (*scalar, (first, _), (second, _)) = fields_of(term)
        numbers = [float(value) for value in values[coupling].strip("{}").split(", ")]
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


def names_in(components):
    return {name for name in symbols(components) - {"Sqrt", "conj", "minus", "product", "sum"} if name[0].isalpha()}


def value(expression, values):
    """The number that a component's expression has, for the values of components."""
    if isinstance(expression, str):
        return values[expression] if expression in values else complex(Fraction(expression))
    kind, *parts = expression
    if kind == "minus":
        return -value(parts[0], values)
    if kind == "[":
        argument = value(parts[1][0], values)
        return {"Sqrt": np.sqrt, "conj": np.conj}[parts[0]](argument)
    result = value(parts[0], values)
    if kind == "sum":
        for sign, part in zip(parts[1::2], parts[2::2], strict=True):
            result += value(part, values) * (1 if sign == "+" else -1)
        return result
    divide = False
    for part in parts[1:]:
        if part == "/":
            divide = True
        else:
            result, divide = (result / value(part, values) if divide else result * value(part, values)), False
    return result


def tensor_of(components, values):
    if isinstance(components, list):
        return np.array([tensor_of(one, values) for one in components])
    return np.asarray(value(components, values), complex)


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
    for component, (vev, _), *_ in vevs:
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
        is_real_field = "conj" in symbols(components) or bool(real & set(names)) or symbol in real
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
    assert Counter(g.group for g in theory.groups) == Counter("U(1)" if n == 1 else f"SU({n})" for n, _ in groups)
    declared = [*fields, *(name for _, _, components in fields.values() for name in names_in(components))]
    couplings = []
    for key in ("LagHC", "LagNoHC"):
        inner = found[key][1]
        for term in (inner[1::2] if inner[0] == "sum" else [inner]) if inner != "0" else ():
            coupling, members = fields_of(term)
            assert {field for field, _ in members} <= set(fields)
            couplings.append(coupling)
            for place, (size, _) in enumerate(groups):
                if size == 1:
                    assert sum(sign * fields[field][1][place] for field, sign in members) == 0, term
    real = set(found["RealScalars"])
    assert real <= set(declared)
    check_components(groups, fields, real)
    vevs = found["VEVs"]
    assert len(vevs) == sum(scalar.vev is not None for scalar in theory.scalars)
    for component, (vev, _), *_ in vevs:
        assert component in names_in(fields[vev.removeprefix("v")][2])
    parts = [part for _, *states in vevs for part, _ in states if part != "0"]
    names = [*declared, *couplings, *parts]
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
