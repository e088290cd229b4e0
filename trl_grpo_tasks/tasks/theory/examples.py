"""Known theories: the Standard Model and well-known extensions, each anomaly free with a realistic vacuum.

They are in `examples.yaml`, in a short notation that `make` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from ...files import read_table
from .groups import U1
from .tensors import reps_of
from .terms import with_all_terms
from .theory import Fermion, GaugeGroup, Number, Scalar, Term, Theory, Vev
from .words import yukawa_values

Fields = Mapping[str, Sequence[Any]]
Couplings = Mapping[str, float | str | tuple[float, ...]]

_NOTES: dict[str, Any] = read_table(Path(__file__).with_suffix(".yaml"))
_PARTS = ("scalars", "fermions", "couplings")
_MODEL = _NOTES["standard_model"]
NAMES = tuple(_NOTES)
SM_GROUPS: Mapping[str, str] = _MODEL["groups"]
SM_FERMIONS: Fields = _MODEL["fermions"]


@cache
def named(name: str) -> Theory:
    """Return the theory with this name."""
    if name not in NAMES:
        raise ValueError(f"unknown theory {name!r}; theories are: {', '.join(NAMES)}")
    note = _NOTES[name]
    parts = [note.get(part, {}) for part in _PARTS]
    return make(note["groups"], *parts) if "groups" in note else extend(*parts)


def extend(scalars: Fields, fermions: Fields, couplings: Couplings) -> Theory:
    """Return the Standard Model with additional fields and couplings."""
    added = zip(_PARTS, (scalars, fermions, couplings), strict=True)
    return make(SM_GROUPS, *({**_MODEL[part], **more} for part, more in added))


def make(groups: Mapping[str, str], scalars: Fields, fermions: Fields, couplings: Couplings) -> Theory:
    """Make a theory from a short notation.

    A fermion is (numbers, generations); a scalar is (numbers, mass) or (numbers, mass, components of its vev, vev).
    Numbers are words. Unnamed terms have coupling 0; one number, or one word of the language, stands for all
    generations.
    """
    declared = tuple(GaugeGroup(id, group) for id, group in groups.items())
    theory = Theory(
        declared,
        tuple(Fermion(name, numbers_of(declared, words), copies) for name, (words, copies) in fermions.items()),
        tuple(
            Scalar(name, numbers_of(declared, words), float(mass), Vev(tuple(vev[0]), float(vev[1])) if vev else None)
            for name, (words, mass, *vev) in scalars.items()
        ),
    )
    terms = []
    for fields, value in couplings.items():
        first, second, *scalar = fields.split()
        pairs = min(theory.fermion(first).generations, theory.fermion(second).generations)
        if isinstance(value, str):
            value = yukawa_values(value, pairs)
        values = value if isinstance(value, tuple) else (float(value),) * pairs
        terms.append(Term(first, second, values, scalar[0].rstrip("*") if scalar else None, fields.endswith("*")))
    return with_all_terms(replace(theory, terms=tuple(terms)))


def numbers_of(groups: Sequence[GaugeGroup], words: str) -> tuple[Number, ...]:
    """Return the representations and charges that the words name, one for each group."""
    return tuple(
        Fraction(word) if group.group == U1 else reps_of(group.group)[word]
        for group, word in zip(groups, words.split(), strict=True)
    )
