"""Model files for SARAH and PyR@TE, checked by parsers that share no code with the writers.

Neither program is available here (SARAH needs Mathematica, PyR@TE is not on PyPI), so these are checks of structure.
"""

import re
from collections import Counter
from fractions import Fraction

import pytest
import yaml

from trl_grpo_tasks.tasks.theory import examples
from trl_grpo_tasks.tasks.theory.pyrate import write_pyrate
from trl_grpo_tasks.tasks.theory.sarah import write_sarah

DIMENSIONS = {2: {1, 2, 3}, 3: {1, 3, -3, 8}, 4: {1, 4, -4, 6, 15}, 5: {1, 5, -5, 10, -10, 24}}


def check_numbers(numbers, groups):
    """One number per gauge group: a dimension that the group has, or a rational charge."""
    assert len(numbers) == len(groups)
    for number, group in zip(numbers, groups, strict=True):
        assert Fraction(str(number)) is not None if group == 1 else int(number) in DIMENSIONS[group], (number, group)


# ---- PyR@TE: YAML, and terms with indices


@pytest.mark.parametrize("name", examples.NAMES)
def test_pyrate_files(name):
    text = write_pyrate(examples.named(name), name)
    assert "not been validated" in text.splitlines()[1]
    found = yaml.safe_load(text)
    assert set(found) == {"Author", "Date", "Name", "Groups", "Fermions", "RealScalars", "ComplexScalars", "Potential"}
    groups = {group: int(re.fullmatch(r"S?U(\d)", kind)[1]) for group, kind in found["Groups"].items()}
    fields = {}
    for kind, keys in (
        ("Fermions", {"Gen", "Qnb"}),
        ("RealScalars", {"Qnb"}),
        ("ComplexScalars", {"RealFields", "Norm", "Qnb"}),
    ):
        for field, entry in found[kind].items():
            assert set(entry) == keys and list(entry["Qnb"]) == list(groups) and field not in fields
            check_numbers(entry["Qnb"].values(), groups.values())
            fields[field] = entry["Qnb"]
            if kind == "ComplexScalars":
                fields[f"{field}bar"] = {
                    group: -Fraction(str(n)) if groups[group] == 1 else -int(n) for group, n in entry["Qnb"].items()
                }
    names = [field for entry in found["ComplexScalars"].values() for field in entry["RealFields"]]
    assert len(set(names)) == len(names) and not set(names) & set(fields)
    potential = found["Potential"]
    assert set(potential) == {"Definitions", "Yukawas", "FermionMasses", "ScalarMasses"}
    tensors = {}
    for tensor, definition in potential["Definitions"].items():
        group, *members = re.fullmatch(r"cgc\((.*)\)", definition)[1].split(", ")
        assert groups[group] > 1 and set(members) <= set(fields) and tensor not in fields
        tensors[tensor] = [(group, member) for member in members]
    for block, sizes in (("Yukawas", (3,)), ("FermionMasses", (2,)), ("ScalarMasses", (2,))):
        for term in (potential[block] or {}).values():
            check_term(term, fields, tensors, groups, sizes)


def check_term(term, fields, tensors, groups, sizes):
    """Each index occurs twice, on a tensor and the field that the tensor was made for; charges add up to zero."""
    factors = re.findall(r"([A-Za-z]\w*)(?:\[([\w,]+)\])?", term)
    assert re.sub(r"[A-Za-z]\w*(\[[\w,]+\])?|1/2 \*|\s", "", term) == "", term
    members = [name for name, _ in factors if name in fields]
    assert len(members) in sizes and all(name in fields or name in tensors for name, _ in factors)
    uses = {}
    for name, indices in factors:
        if name in tensors:
            places = tensors[name]
        else:
            places = [(g, name) for g, n in fields[name].items() if groups[g] > 1 and abs(int(n)) > 1]
        given = indices.split(",") if indices else []
        assert len(given) == len(places), term
        for index, place in zip(given, places, strict=True):
            uses.setdefault(index, []).append(place)
    with_tensors = any(name in tensors for name, _ in factors)
    for places in uses.values():
        assert len(places) == 2 and places[0][0] == places[1][0]
        assert not with_tensors or places[0] == places[1]
    for group, size in groups.items():
        if size == 1:
            assert sum(Fraction(str(fields[name][group])) for name in members) == 0, term


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


@pytest.mark.parametrize("name", examples.NAMES)
def test_sarah_files(name):
    theory = examples.named(name)
    text = write_sarah(theory, name)
    assert "not been validated" in text.splitlines()[0]
    statements = Mathematica(text).statements()
    groups, fields, found = [], {}, {}
    for left, right in statements:
        if isinstance(left, tuple) and left[0] == "[[":
            (place,) = left[2]
            if left[1] == "Gauge":
                boson, (_, family, (size,)), label, coupling, expanded = right
                groups.append(int(size) if family == "SU" else 1)
                assert int(place) == len(groups) and expanded in ("True", "False") and (family, size) != ("U", "2")
                assert boson and label and coupling == f"g{place}"
            else:
                assert left[1] in ("FermionFields", "ScalarFields")
                symbol, copies, components, *numbers = right
                assert symbol not in fields and re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", symbol)
                check_numbers([number(one) for one in numbers], groups)
                fields[symbol] = (int(copies), [number(one) for one in numbers], symbols(components))
        else:
            found[str(left)] = right
    assert len(fields) == len(theory.fermions) + len(theory.scalars) and not set(fields) & set("CDEIKNO")
    assert Counter(g.group for g in theory.groups) == Counter("U(1)" if n == 1 else f"SU({n})" for n in groups)
    assert set(found["RealScalars"]) <= set(fields)
    couplings = set()
    for key in ("LagHC", "LagNoHC"):
        inner = found[key][1]
        for term in (inner[1::2] if inner[0] == "sum" else [inner]) if inner != "0" else ():
            coupling, members = fields_of(term)
            assert coupling not in couplings and {field for field, _ in members} <= set(fields)
            couplings.add(coupling)
            for place, size in enumerate(groups):
                if size == 1:
                    assert sum(sign * fields[field][1][place] for field, sign in members) == 0, term
    # A vev is that of a component of a field, which is declared if only expanded groups (SU(2)) have a component.
    (vevs,) = [right for left, right in statements if symbols(left) >= {"DEFINITION", "VEVs"}]
    assert len(vevs) == sum(scalar.vev is not None for scalar in theory.scalars)
    for component, vev, *_ in vevs:
        (owner,) = [field for field in fields if vev[0] == f"v{field}"]
        places = component.removeprefix(owner).split("x")
        assert component.startswith(owner) and len(places) == len(groups)
        if all(size == 2 or place == "0" for size, place in zip(groups, places, strict=True)):
            assert component in fields[owner][2]


@pytest.mark.parametrize(("good", "bad"), [("};", "}"), ("{V1,", "V1,"), ("-(", "-"), ("[[1]]", "[[1]")])
def test_the_parser_notices_mistakes(good, bad):
    text = write_sarah(examples.named("standard_model"))
    with pytest.raises(AssertionError):
        Mathematica(text.replace(good, bad, 1)).statements()
