"""The words of the language of theories and their values.

No word is a prefix of another, so tokenization into whole words is unambiguous.

A Yukawa coupling has one word for all generations: y_5e-1 is 0.5 for each; h_1e0 is hierarchical: 1 for the last
generation and a hundredth of the next one's value for each earlier one, similar to the masses of quarks and leptons.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from .tensors import KINDS

MAX_GROUPS, MAX_VEVS, MAX_MULTIPLETS, MAX_GENERATIONS = 4, 5, 12, 4
GROUPS = ("E_6", "SO_10", "SU_5", "SU_4", "SU_3", "SU_2", "U_1")
CHARGES = tuple(
    sorted({Fraction(n, 6) for n in range(-12, 13)} | {Fraction(sign * n) for n in (3, 4, 5) for sign in (-1, 1)})
)
VEVS = (1.0, 174.0, 246.0, 1000.0, 3000.0, 10000.0)
MASSES = (0.0, 10.0, 50.0, 125.0, 300.0, 1000.0, 3000.0, 10000.0, 50000.0)
YUKAWAS = (0.0, 1e-6, 1e-3, 0.01, 0.02, 0.1, 0.5, 1.0, 2.0, 3.0, 5.0)
HIERARCHICAL = (0.01, 0.02, 0.1, 1.0)
HIERARCHY = 100.0
STRUCTURE = (
    *("BOS", "GAUGE_GROUPS", "NUM_GAUGE", "GROUP", "SYMMETRY_BREAKING", "NUM_VEVS", "SCALAR", "REP", "CHARGE", "VEV"),
    *("MASS", "MULTIPLETS", "NUM_MULTIPLETS", "FERMION", "GENERATIONS", "INTERACTIONS", "BARE_MASS", "YUKAWA"),
    *("CONJUGATE", "END"),
)


def count_word(number: int) -> str:
    return f"num_{number}" if number < 10 else ("num_ten", "num_eleven", "num_twelve")[number - 10]


def multiplet_word(number: int) -> str:
    return f"multiplet_{number:02d}"


def component_word(number: int) -> str:
    return f"component_{number:02d}"


def group_word(group: str) -> str:
    return "E_6" if group == "E6" else group.replace("(", "_").rstrip(")")


def group_name(word: str) -> str:
    return "E6" if word == "E_6" else word.replace("_", "(") + ")"


def charge_word(charge: Fraction) -> str:
    return f"q_{charge.numerator}/{charge.denominator}"


def gev_word(prefix: str, value: float) -> str:
    return f"{prefix}_{value:.0f}GeV"


def _coupling_word(prefix: str, value: float) -> str:
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{prefix}_{mantissa}e{int(exponent)}"


COUNT_WORDS = {count_word(n): n for n in range(MAX_MULTIPLETS + 1)}
COMPONENT_WORDS = {component_word(n): n for n in range(1, 79)}
CHARGE_WORDS = {charge_word(charge): charge for charge in CHARGES}
VEV_WORDS = {gev_word("v", value): value for value in VEVS}
MASS_WORDS = {gev_word("m", value): value for value in MASSES}
YUKAWA_WORDS = {_coupling_word("y", value): value for value in YUKAWAS}
HIERARCHY_WORDS = {_coupling_word("h", value): value for value in HIERARCHICAL}

VOCABULARY: tuple[str, ...] = (
    *STRUCTURE,
    *COUNT_WORDS,
    *GROUPS,
    *(f"group_{n}" for n in range(1, MAX_GROUPS + 1)),
    *(multiplet_word(n) for n in range(1, MAX_VEVS + MAX_MULTIPLETS + 1)),
    *KINDS,
    *COMPONENT_WORDS,
    *CHARGE_WORDS,
    *VEV_WORDS,
    *MASS_WORDS,
    *YUKAWA_WORDS,
    *HIERARCHY_WORDS,
)


def yukawa_word(values: Sequence[float]) -> str:
    """Return the word for the couplings of all generations."""
    for word in yukawa_words(len(values)):
        if yukawa_values(word, len(values)) == tuple(values):
            return word
    raise ValueError(
        f"there is no word for the Yukawa couplings {list(values)}: either all must be equal to one of "
        f"{list(YUKAWAS)}, or the last must be one of {list(HIERARCHICAL)} and each other 1/{HIERARCHY:g} of the next"
    )


def yukawa_words(pairs: int) -> list[str]:
    """Return the words allowed for a coupling with this many pairs of generations."""
    return [*YUKAWA_WORDS, *(HIERARCHY_WORDS if pairs > 1 else ())]


def yukawa_values(word: str, pairs: int) -> tuple[float, ...]:
    """Return the couplings of a word, one for each pair of generations."""
    if word in YUKAWA_WORDS:
        return (YUKAWA_WORDS[word],) * pairs
    return tuple(HIERARCHY_WORDS[word] / HIERARCHY**below for below in range(pairs - 1, -1, -1))
