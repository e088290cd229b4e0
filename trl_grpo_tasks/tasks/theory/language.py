"""The language of theories: parsing and writing them as a sequence of words.

    BOS GAUGE_GROUPS NUM_GAUGE num_3 GROUP group_1 SU_3 GROUP group_2 SU_2 GROUP group_3 U_1
    SYMMETRY_BREAKING NUM_VEVS num_1 SCALAR multiplet_01 REP group_1 singlet REP group_2 fund CHARGE group_3 q_1/2
    VEV group_2 component_02 v_246GeV MASS m_125GeV
    MULTIPLETS NUM_MULTIPLETS num_5 FERMION multiplet_02 GENERATIONS num_3 REP group_1 fund REP group_2 fund ...
    INTERACTIONS BARE_MASS multiplet_07 multiplet_08 m_1000GeV
    YUKAWA multiplet_02 multiplet_03 SCALAR multiplet_01 h_1e0 ... END

Words are separated by single spaces; a prompt is a prefix, and a completion begins with the space that follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from .groups import U1
from .tensors import components, kind_of, reps_of
from .terms import allowed_terms, shape_of
from .theory import Fermion, GaugeGroup, Number, Scalar, Term, Theory, Vev
from .words import (
    CHARGE_WORDS,
    COMPONENT_WORDS,
    COUNT_WORDS,
    GROUPS,
    MASS_WORDS,
    MAX_GENERATIONS,
    MAX_GROUPS,
    MAX_MULTIPLETS,
    MAX_VEVS,
    VEV_WORDS,
    charge_word,
    component_word,
    count_word,
    gev_word,
    group_name,
    group_word,
    multiplet_word,
    yukawa_values,
    yukawa_word,
    yukawa_words,
)


class LanguageError(ValueError):
    """Raised for a text that is not a theory; the message gives the position and the expected words."""


def parse(text: str) -> Theory:
    """Parse the theory that a text describes. Groups are named group_1, ..., and fields multiplet_01, ..."""
    return _Parser(text).theory()


def write(theory: Theory) -> str:
    """Write a theory in words: scalars with a vev first, then other scalars, then fermions."""
    theory = relabelled(theory)
    vevs = sum(scalar.vev is not None for scalar in theory.scalars)
    scalars = [_scalar_words(theory, scalar) for scalar in theory.scalars]
    words = ["BOS", "GAUGE_GROUPS", "NUM_GAUGE", count_word(len(theory.groups))]
    for group in theory.groups:
        words += ["GROUP", group.id, _known(group_word(group.group), GROUPS, "group")]
    words += ["SYMMETRY_BREAKING", "NUM_VEVS", count_word(vevs), *chain(*scalars[:vevs])]
    words += ["MULTIPLETS", "NUM_MULTIPLETS", count_word(len(scalars) - vevs + len(theory.fermions))]
    words += chain(*scalars[vevs:])
    for fermion in theory.fermions:
        words += ["FERMION", fermion.name, "GENERATIONS", count_word(fermion.generations)]
        words += _number_words(theory, fermion.numbers)
    words.append("INTERACTIONS")
    for term in theory.terms:
        if term.scalar is None:
            mass = _known(gev_word("m", term.values[0]), MASS_WORDS, "mass")
            words += ["BARE_MASS", term.first, term.second, mass]
        else:
            form = "CONJUGATE" if term.conjugate else "SCALAR"
            words += ["YUKAWA", term.first, term.second, form, term.scalar, yukawa_word(term.values)]
    return " ".join([*words, "END"])


def relabelled(theory: Theory) -> Theory:
    """Return the theory with the names and the order of fields that `parse(write(theory))` gives."""
    scalars = sorted(theory.scalars, key=lambda scalar: scalar.vev is None)
    fields: list[Scalar | Fermion] = [*scalars, *theory.fermions]
    names = {field.name: multiplet_word(n) for n, field in enumerate(fields, 1)}
    return Theory(
        tuple(GaugeGroup(f"group_{n}", group.group) for n, group in enumerate(theory.groups, 1)),
        tuple(replace(fermion, name=names[fermion.name]) for fermion in theory.fermions),
        tuple(replace(scalar, name=names[scalar.name]) for scalar in scalars),
        tuple(
            replace(t, first=names[t.first], second=names[t.second], scalar=t.scalar and names[t.scalar])
            for t in theory.terms
        ),
    )


def _scalar_words(theory: Theory, scalar: Scalar) -> list[str]:
    words = ["SCALAR", scalar.name, *_number_words(theory, scalar.numbers)]
    if scalar.vev is not None:
        words.append("VEV")
        for group, component in zip(theory.groups, scalar.vev.components, strict=True):
            if component:
                words += [group.id, component_word(component)]
        words.append(_known(gev_word("v", scalar.vev.value), VEV_WORDS, "vev"))
    return [*words, "MASS", _known(gev_word("m", scalar.mass), MASS_WORDS, "mass")]


def _number_words(theory: Theory, numbers: Sequence[Number]) -> list[str]:
    words = []
    for group, number in zip(theory.groups, numbers, strict=True):
        if isinstance(number, tuple):
            words += ["REP", group.id, kind_of(group.group, number)]
        else:
            words += ["CHARGE", group.id, _known(charge_word(number), CHARGE_WORDS, "charge")]
    return words


def _known(word: str, known: Any, what: str) -> str:
    if word not in known:
        raise ValueError(f"the language has no word {word!r} for this {what}; words are: {', '.join(known)}")
    return word


# ---- parsing


class _Parser:
    def __init__(self, text: str):
        self._words = text.split()
        self._place = 0

    def theory(self) -> Theory:
        self._expect("BOS", "GAUGE_GROUPS")
        groups = tuple(self._group(n) for n in self._counted("NUM_GAUGE", 1, MAX_GROUPS))
        self._groups = groups
        self._expect("SYMMETRY_BREAKING")
        scalars = [self._scalar(n, True) for n in self._counted("NUM_VEVS", 0, MAX_VEVS)]
        fermions: list[Fermion] = []
        self._expect("MULTIPLETS")
        for n in self._counted("NUM_MULTIPLETS", 1, MAX_MULTIPLETS):
            id = n + sum(scalar.vev is not None for scalar in scalars)
            if self._peek() == "SCALAR" and not fermions:
                scalars.append(self._scalar(id, False))
            else:
                fermions.append(self._fermion(id))
        _check_no_duplicates([*scalars, *fermions])
        self._expect("INTERACTIONS")
        terms: list[Term] = []
        content = Theory(groups, tuple(fermions), tuple(scalars))
        while self._peek() in ("BARE_MASS", "YUKAWA"):
            terms.append(self._term(content))
        theory = Theory(groups, tuple(fermions), tuple(scalars), tuple(terms))
        self._expect("END")
        if self._place < len(self._words):
            raise self._error("nothing after END")
        _check_terms(theory)
        return theory

    def _group(self, number: int) -> GaugeGroup:
        self._expect("GROUP", f"group_{number}")
        return GaugeGroup(f"group_{number}", group_name(self._one_of(GROUPS)))

    def _scalar(self, number: int, with_vev: bool) -> Scalar:
        self._expect("SCALAR", multiplet_word(number))
        numbers = self._numbers()
        vev = self._vev(numbers) if with_vev else None
        self._expect("MASS")
        return Scalar(multiplet_word(number), numbers, MASS_WORDS[self._one_of(list(MASS_WORDS)[1:])], vev)

    def _vev(self, numbers: tuple[Number, ...]) -> Vev:
        self._expect("VEV")
        chosen = [0] * len(numbers)
        for i, (group, rep) in enumerate(zip(self._groups, numbers, strict=True)):
            if isinstance(rep, tuple) and any(rep):
                self._expect(group.id)
                known = list(COMPONENT_WORDS)[: len(components(group.group, rep))]
                chosen[i] = COMPONENT_WORDS[self._one_of(known)]
        return Vev(tuple(chosen), VEV_WORDS[self._one_of(VEV_WORDS)])

    def _fermion(self, number: int) -> Fermion:
        self._expect("FERMION", multiplet_word(number), "GENERATIONS")
        generations = COUNT_WORDS[self._one_of(list(COUNT_WORDS)[1 : MAX_GENERATIONS + 1])]
        return Fermion(multiplet_word(number), self._numbers(), generations)

    def _numbers(self) -> tuple[Number, ...]:
        numbers: list[Number] = []
        for group in self._groups:
            self._expect("CHARGE" if group.group == U1 else "REP", group.id)
            known: Mapping[str, Number] = CHARGE_WORDS if group.group == U1 else reps_of(group.group)
            numbers.append(known[self._one_of(known)])
        return tuple(numbers)

    def _term(self, content: Theory) -> Term:
        fermions = [fermion.name for fermion in content.fermions]
        kind = self._one_of(("BARE_MASS", "YUKAWA"))
        first = self._one_of(fermions)
        second = self._one_of(fermions[fermions.index(first) :])
        pairs = min(content.fermion(first).generations, content.fermion(second).generations)
        if kind == "BARE_MASS":
            return Term(first, second, (MASS_WORDS[self._one_of(MASS_WORDS)],) * pairs)
        conjugate = self._one_of(("SCALAR", "CONJUGATE")) == "CONJUGATE"
        scalar = self._one_of([scalar.name for scalar in content.scalars])
        return Term(first, second, yukawa_values(self._one_of(yukawa_words(pairs)), pairs), scalar, conjugate)

    def _counted(self, word: str, least: int, most: int) -> range:
        self._expect(word)
        return range(1, COUNT_WORDS[self._one_of(list(COUNT_WORDS)[least : most + 1])] + 1)

    def _expect(self, *words: str) -> None:
        for word in words:
            self._one_of((word,))

    def _one_of(self, words: Any) -> str:
        word = self._peek()
        if word not in words:
            raise self._error(", ".join(list(words)[:8]) + (", ..." if len(words) > 8 else ""))
        self._place += 1
        return word

    def _peek(self) -> str:
        return self._words[self._place] if self._place < len(self._words) else ""

    def _error(self, expected: str) -> LanguageError:
        found = repr(self._peek()[:40]) if self._peek() else "the end of the text"
        return LanguageError(f"word {self._place + 1}: expected {expected}; found {found}")


def _check_no_duplicates(fields: Sequence[Fermion | Scalar]) -> None:
    seen: dict[Fermion | Scalar, str] = {}
    for field in fields:
        twin = seen.setdefault(replace(field, name=""), field.name)
        if twin != field.name:
            raise LanguageError(f"{field.name} repeats {twin}; give {twin} more generations instead")


def _check_terms(theory: Theory) -> None:
    allowed = set(map(shape_of, allowed_terms(theory)))
    seen = set()
    for term in theory.terms:
        shape = shape_of(term)
        kind = "Yukawa coupling" if term.scalar else "mass term"
        if shape not in allowed:
            raise LanguageError(f"the {kind} of {term.first} and {term.second} is not gauge invariant")
        if shape in seen:
            raise LanguageError(f"the {kind} of {term.first} and {term.second} occurs twice")
        seen.add(shape)
