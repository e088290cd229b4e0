"""Known theories: the Standard Model and well-known extensions, each anomaly free with a realistic vacuum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import count

from .tensors import reps_of
from .terms import with_all_terms
from .theory import Fermion, GaugeGroup, MassTerm, Number, Scalar, Term, Theory, Vev, Yukawa
from .words import HIERARCHY

Fields = Mapping[str, tuple]
Couplings = Mapping[str, float | tuple[float, ...]]

SM_GROUPS = {"c": "SU(3)", "L": "SU(2)", "Y": "U(1)"}
SM_SCALARS: Fields = {"H": ("singlet fund 1/2", 125, (0, 2, 0), 246)}
SM_FERMIONS: Fields = {
    "Q": ("fund fund 1/6", 3),
    "uc": ("antifund singlet -2/3", 3),
    "dc": ("antifund singlet 1/3", 3),
    "L": ("singlet fund -1/2", 3),
    "ec": ("singlet singlet 1", 3),
}


def hierarchical(largest: float, generations: int = 3) -> tuple[float, ...]:
    """Return couplings that decrease by a factor of 100 from generation to generation."""
    return tuple(largest / HIERARCHY**below for below in range(generations - 1, -1, -1))


SM_COUPLINGS: Couplings = {
    "Q uc H": hierarchical(1.0),
    "Q dc H*": hierarchical(0.02),
    "L ec H*": hierarchical(0.01),
}


def make(groups: Mapping[str, str], scalars: Fields, fermions: Fields, couplings: Couplings) -> Theory:
    """Make a theory from a short notation.

    A fermion is (numbers, generations); a scalar is (numbers, mass) or (numbers, mass, components of its vev, vev).
    Numbers are words. Unnamed terms have coupling 0; one number stands for all generations.
    """
    declared = tuple(GaugeGroup(id, group) for id, group in groups.items())
    theory = Theory(
        declared,
        tuple(Fermion(name, numbers_of(declared, note[0]), note[1]) for name, note in fermions.items()),
        tuple(
            Scalar(name, numbers_of(declared, words), float(mass), Vev(tuple(vev[0]), float(vev[1])) if vev else None)
            for name, (words, mass, *vev) in scalars.items()
        ),
    )
    terms = tuple(_term(theory, fields.split(), value) for fields, value in couplings.items())
    return with_all_terms(Theory(theory.groups, theory.fermions, theory.scalars, terms))


def numbers_of(groups: Sequence[GaugeGroup], words: str) -> tuple[Number, ...]:
    """Return the representations and charges that the words name, one for each group."""
    return tuple(
        Fraction(word) if group.group == "U(1)" else reps_of(group.group)[word]
        for group, word in zip(groups, words.split(), strict=True)
    )


def _term(theory: Theory, fields: Sequence[str], value: float | tuple[float, ...]) -> Term:
    if len(fields) == 2:
        assert isinstance(value, int | float)
        return MassTerm(fields[0], fields[1], float(value))
    pairs = min(theory.fermion(name).generations for name in fields[:2])
    values = value if isinstance(value, tuple) else (float(value),) * pairs
    return Yukawa(fields[0], fields[1], fields[2].rstrip("*"), fields[2].endswith("*"), values)


def extend(
    scalars: Fields | None = None, fermions: Fields | None = None, couplings: Couplings | None = None
) -> Theory:
    """Return the Standard Model with additional fields."""
    return make(
        SM_GROUPS,
        {**SM_SCALARS, **(scalars or {})},
        {**SM_FERMIONS, **(fermions or {})},
        {**SM_COUPLINGS, **(couplings or {})},
    )


def _with_u1(charges: Mapping[str, str], fields: Fields) -> Fields:
    """Return the same fields with an additional U(1) charge, 0 by default."""
    return {
        name: (
            f"{words} {charges.get(name, '0')}",
            number,
            *((*part, 0) if isinstance(part, tuple) else part for part in vev),
        )
        for name, (words, number, *vev) in fields.items()
    }


def _standard_model() -> Theory:
    return extend()


def _seesaw_1() -> Theory:
    return extend(None, {"N": ("singlet singlet 0", 3)}, {"L N H": 1e-6, "N N": 1000})


def _seesaw_2() -> Theory:
    # Only the neutral component of the triplet has a vev; it couples to pairs of lepton doublets.
    return extend({"D": ("singlet adjoint 1", 1000, (0, 2, 0), 1)}, None, {"L L D": 1e-6})


def _seesaw_3() -> Theory:
    return extend(None, {"S": ("singlet adjoint 0", 3)}, {"S S": 1000, "L S H": 1e-6})


def _fourth_generation() -> Theory:
    fermions = {f"{name}4": (note[0], 1) for name, note in SM_FERMIONS.items()}
    return extend(None, fermions, {"Q4 uc4 H": 2, "Q4 dc4 H*": 2, "L4 ec4 H*": 1})


def _vectorlike_top() -> Theory:
    fermions: Fields = {"T": ("fund singlet 2/3", 1), "Tc": ("antifund singlet -2/3", 1)}
    return extend(None, fermions, {"T Tc": 1000, "Q Tc H": 0.5})


def _vectorlike_leptons() -> Theory:
    fermions: Fields = {"E": ("singlet fund -1/2", 1), "Ec": ("singlet fund 1/2", 1)}
    return extend(None, fermions, {"E Ec": 300})


def _vectorlike_family() -> Theory:
    """The 5 and 10 of SU(5) with their conjugates, decomposed under the Standard Model group."""
    fermions: dict[str, tuple] = {}
    for name, (words, _) in SM_FERMIONS.items():
        if name in ("Q", "dc", "L"):
            numbers = words.split()
            mirror = ["antifund" if numbers[0] == "fund" else "fund" if numbers[0] == "antifund" else "singlet"]
            mirrored = " ".join([*mirror, numbers[1], str(-Fraction(numbers[2]))])
            fermions |= {f"{name}4": (words, 1), f"{name}4c": (mirrored, 1)}
    return extend(None, fermions, {"Q4 Q4c": 1000, "dc4 dc4c": 1000, "L4 L4c": 1000})


def _two_higgs_doublets() -> Theory:
    scalars: Fields = {
        "H": ("singlet fund 1/2", 125, (0, 2, 0), 174),
        "K": ("singlet fund 1/2", 300, (0, 2, 0), 174),
    }
    couplings = {"Q uc H": hierarchical(1.0), "Q dc K*": hierarchical(0.02), "L ec K*": hierarchical(0.01)}
    return make(SM_GROUPS, scalars, SM_FERMIONS, couplings)


def _leptoquark() -> Theory:
    return extend({"S": ("antifund singlet 1/3", 3000)}, None, {"Q L S": 0.1})


def _gauginos_and_higgsinos() -> Theory:
    fermions: Fields = {
        "hu": ("singlet fund 1/2", 1),
        "hd": ("singlet fund -1/2", 1),
        "g": ("adjoint singlet 0", 1),
        "w": ("singlet adjoint 0", 1),
        "b": ("singlet singlet 0", 1),
    }
    couplings = {"hu hd": 300, "g g": 3000, "w w": 1000, "b b": 300, "hu b H*": 0.1, "hd b H": 0.1}
    return extend(None, fermions, {**couplings, "hu w H*": 0.1, "hd w H": 0.1})


_B_MINUS_L = {"Q": "1/3", "uc": "-1/3", "dc": "-1/3", "L": "-1", "ec": "1"}


def _b_minus_l() -> Theory:
    scalars = {**_with_u1({}, SM_SCALARS), "S": ("singlet singlet 0 -2", 1000, (0, 0, 0, 0), 3000)}
    fermions = {**_with_u1(_B_MINUS_L, SM_FERMIONS), "N": ("singlet singlet 0 1", 3)}
    couplings = {**SM_COUPLINGS, "L N H": 1e-6, "N N S": 0.5}
    return make({**SM_GROUPS, "X": "U(1)"}, scalars, fermions, couplings)


def _b_minus_l_exotic() -> Theory:
    scalars = {**_with_u1({}, SM_SCALARS), "S": ("singlet singlet 0 1", 1000, (0, 0, 0, 0), 3000)}
    fermions = {
        **_with_u1(_B_MINUS_L, SM_FERMIONS),
        "M": ("singlet singlet 0 4", 2),
        "N": ("singlet singlet 0 -5", 1),
    }
    return make({**SM_GROUPS, "X": "U(1)"}, scalars, fermions, {**SM_COUPLINGS, "M N S": 0.5})


def _mu_minus_tau() -> Theory:
    leptons: Fields = {
        f"{kind}{flavour}": (f"{SM_FERMIONS[kind][0]} {sign * charge}", 1)
        for flavour, charge in (("e", 0), ("m", 1), ("t", -1))
        for kind, sign in (("L", 1), ("ec", -1))
    }
    quarks = _with_u1({}, {name: SM_FERMIONS[name] for name in ("Q", "uc", "dc")})
    scalars = {**_with_u1({}, SM_SCALARS), "S": ("singlet singlet 0 1", 1000, (0, 0, 0, 0), 1000)}
    couplings = {name: SM_COUPLINGS[name] for name in ("Q uc H", "Q dc H*")}
    masses = {"Le ece H*": 1e-6, "Lm ecm H*": 1e-3, "Lt ect H*": 0.01}
    return make({**SM_GROUPS, "X": "U(1)"}, scalars, {**quarks, **leptons}, {**couplings, **masses})


def _e6_u1n() -> Theory:
    """Three 27s of E6 under SU(3) x SU(2) x U(1) x U(1)_N, with Higgs fields from their scalar partners."""
    charges = {"Q": "1", "uc": "1", "ec": "1", "dc": "2", "L": "2"}
    fermions = {
        **_with_u1(charges, SM_FERMIONS),
        "nc": ("singlet singlet 0 0", 3),
        "hu": ("singlet fund 1/2 -2", 3),
        "hd": ("singlet fund -1/2 -3", 3),
        "D": ("fund singlet -1/3 -2", 3),
        "Dc": ("antifund singlet 1/3 -3", 3),
        "s": ("singlet singlet 0 5", 3),
    }
    scalars: Fields = {
        "Hu": ("singlet fund 1/2 -2", 300, (0, 2, 0, 0), 174),
        "Hd": ("singlet fund -1/2 -3", 300, (0, 1, 0, 0), 174),
        "S": ("singlet singlet 0 5", 1000, (0, 0, 0, 0), 3000),
    }
    couplings: Couplings = {
        **{"Q uc Hu": hierarchical(1.0), "Q dc Hd": hierarchical(0.02), "L ec Hd": hierarchical(0.01)},
        **{"D Dc S": 0.5, "hu hd S": 0.1, "nc nc": 1000, "L nc Hu": 1e-6},
        **{"hu s Hd": 0.1, "hd s Hu": 0.1},
    }
    return make({**SM_GROUPS, "N": "U(1)"}, scalars, fermions, couplings)


def _left_right() -> Theory:
    groups = {"c": "SU(3)", "L": "SU(2)", "R": "SU(2)", "X": "U(1)"}
    fermions: Fields = {
        "q": ("fund fund singlet 1/3", 3),
        "qc": ("antifund singlet fund -1/3", 3),
        "l": ("singlet fund singlet -1", 3),
        "lc": ("singlet singlet fund 1", 3),
    }
    scalars: Fields = {
        "P": ("singlet fund fund 0", 1000, (0, 1, 2, 0), 246),
        "D": ("singlet singlet adjoint -2", 3000, (0, 0, 1, 0), 3000),
    }
    couplings: Couplings = {
        **{"q qc P*": hierarchical(1.0), "q qc P": hierarchical(0.02)},
        **{"l lc P": hierarchical(0.01), "l lc P*": 1e-6, "lc lc D": 0.5},
    }
    return make(groups, scalars, fermions, couplings)


def _pati_salam() -> Theory:
    groups = {"C": "SU(4)", "L": "SU(2)", "R": "SU(2)"}
    fermions: Fields = {"f": ("fund fund singlet", 3), "fc": ("antifund singlet fund", 3)}
    scalars: Fields = {
        "P": ("singlet fund fund", 1000, (0, 1, 2), 246),
        "X": ("fund singlet fund", 3000, (4, 0, 2), 10000),
    }
    return make(groups, scalars, fermions, {"f fc P": hierarchical(1.0), "f fc P*": hierarchical(0.02)})


def _su5() -> Theory:
    fermions: Fields = {"t": ("antisym", 3), "f": ("antifund", 3)}
    scalars: Fields = {"S": ("adjoint", 10000, (23,), 10000), "H": ("fund", 3000, (5,), 246)}
    return make({"G": "SU(5)"}, scalars, fermions, {"t t H": hierarchical(1.0), "t f H*": hierarchical(0.02)})


def _flipped_su5() -> Theory:
    fermions: Fields = {"t": ("antisym 1", 3), "f": ("antifund -3", 3), "e": ("singlet 5", 3)}
    scalars: Fields = {"T": ("antisym 1", 10000, (10, 0), 10000), "H": ("fund -2", 3000, (4, 0), 246)}
    couplings = {"t t H": hierarchical(0.02), "t f H*": hierarchical(1.0), "f e H": hierarchical(0.01)}
    return make({"G": "SU(5)", "X": "U(1)"}, scalars, fermions, couplings)


def _trinification() -> Theory:
    groups = {"C": "SU(3)", "L": "SU(3)", "R": "SU(3)"}
    fermions: Fields = {
        "q": ("fund antifund singlet", 3),
        "l": ("singlet fund antifund", 3),
        "qc": ("antifund singlet fund", 3),
    }
    number = count(1)
    scalars = {
        f"P{next(number)}": ("singlet fund antifund", mass, (0, *place), vev)
        for place, vev, mass in (
            ((3, 3), 10000, 10000),
            ((3, 2), 3000, 3000),
            ((1, 1), 174, 1000),
            ((2, 2), 174, 1000),
        )
    }
    couplings: Couplings = {
        **{"q qc P1": 0.5, "q qc P3": hierarchical(1.0), "q qc P4": hierarchical(0.02)},
        **{"l l P1": 0.5, "l l P4": hierarchical(0.01)},
    }
    return make(groups, scalars, fermions, couplings)


def _so10() -> Theory:
    """Three 16s. The 45 leaves SU(3) x SU(2) x SU(2) x U(1) unbroken, and the 16 the Standard Model group. The 10
    gives masses to up quarks, and its conjugate gives equal ones to down quarks and charged leptons."""
    scalars: Fields = {
        "S": ("adjoint", 10000, (43,), 10000),
        "X": ("spinor", 10000, (1,), 10000),
        "H": ("fund", 3000, (6,), 246),
    }
    couplings = {"f f H": hierarchical(1.0), "f f H*": hierarchical(0.02)}
    return make({"G": "SO(10)"}, scalars, {"f": ("spinor", 3)}, couplings)


def _e6() -> Theory:
    """Three 27s. The vev of P gives masses to their exotic quarks and leptons, N reduces the rank, and U and D give
    masses to up quarks, and to down quarks and charged leptons."""
    scalars: Fields = {
        "S": ("adjoint", 10000, (75,), 10000),
        "P": ("fund", 10000, (1,), 10000),
        "N": ("fund", 10000, (8,), 10000),
        "U": ("fund", 3000, (13,), 246),
        "D": ("fund", 3000, (27,), 174),
    }
    couplings: Couplings = {"f f P": 0.5, "f f U": hierarchical(1.0), "f f D": hierarchical(0.02)}
    return make({"G": "E6"}, scalars, {"f": ("fund", 3)}, couplings)


_MAKERS: dict[str, Callable[[], Theory]] = {
    "standard_model": _standard_model,
    "seesaw_1": _seesaw_1,
    "seesaw_2": _seesaw_2,
    "seesaw_3": _seesaw_3,
    "fourth_generation": _fourth_generation,
    "vectorlike_top": _vectorlike_top,
    "vectorlike_leptons": _vectorlike_leptons,
    "vectorlike_family": _vectorlike_family,
    "two_higgs_doublets": _two_higgs_doublets,
    "leptoquark": _leptoquark,
    "gauginos_and_higgsinos": _gauginos_and_higgsinos,
    "b_minus_l": _b_minus_l,
    "b_minus_l_exotic": _b_minus_l_exotic,
    "mu_minus_tau": _mu_minus_tau,
    "e6_u1n": _e6_u1n,
    "left_right": _left_right,
    "pati_salam": _pati_salam,
    "su5": _su5,
    "flipped_su5": _flipped_su5,
    "trinification": _trinification,
    "so10": _so10,
    "e6": _e6,
}
NAMES = tuple(_MAKERS)


@cache
def named(name: str) -> Theory:
    """Return the theory with this name."""
    if name not in _MAKERS:
        raise ValueError(f"unknown theory {name!r}; theories are: {', '.join(NAMES)}")
    return _MAKERS[name]()
