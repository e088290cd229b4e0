"""Reward of the theory task: anomalies, light exotics, Standard Model content, perturbativity, length, and success.

Success is strict: every anomaly is exactly zero; SU(3) x U(1) remains unbroken; there are three families of massive
quarks and charged leptons, with the top quark among the heavy states; no other charged or coloured state is below the
threshold; every coupling is below sqrt(4 pi); the text is not too long; and the completion adds at least one fermion
multiplet to the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from .anomalies import anomalies
from .breaking import Vacuum, vacuum
from .masses import PERTURBATIVE, Sector, fermion_sectors, scalar_sectors
from .theory import Theory

THRESHOLD_GEV = 100.0
TOO_LONG = -300.0  # the component "length" of a text that is too long
# Quark and charged-lepton masses in GeV, by colour and charge. Other light charged or coloured states are exotics.
STANDARD_MODEL: dict[tuple[int, Fraction], tuple[float, ...]] = {
    (3, Fraction(2, 3)): (0.002, 1.3, 173.0),
    (3, Fraction(-1, 3)): (0.005, 0.09, 4.2),
    (1, Fraction(1)): (0.0005, 0.106, 1.78),
}
_KNOWN = sum(map(len, STANDARD_MODEL.values()))
# The minimum of each component, which a text that is not a theory gets.
WORST = {"anomalies": -5.0, "exotics": -100.0, "standard_model": -1.0, "perturbativity": -10.0, "length": TOO_LONG}
# The weights of each kind of total. "document" is the plain sum of the requirement document.
_FULL = {"anomalies": 1.0, "exotics": 0.02, "standard_model": 1.0, "perturbativity": 0.2, "length": 0.01,
         "solved": 2.0, "distinct": 1.0}  # fmt: skip
SCORINGS: dict[str, dict[str, float]] = {
    "full": _FULL,
    "document": {name: float(name in ("anomalies", "exotics", "length")) for name in _FULL},
}
LOWEST_SUM = -100.0  # the minimum of "anomalies" where it is a sum
# The curriculum: the components that count at each level, from easy to hard.
GOALS: dict[str, tuple[str, ...]] = {
    "length": ("length",),
    "exotics": ("length", "exotics", "standard_model", "perturbativity"),
    "anomalies": ("length", "exotics", "standard_model", "perturbativity", "anomalies"),
}
# Masses below this (GeV) count as this, because zero has no logarithm.
_LIGHTEST = 1e-3


def log_reward(value: Fraction | float) -> float:
    """Return minus log(1 + |value|): 0 at zero, slowly decreasing with the distance from it.

    >>> log_reward(0), round(log_reward(-1), 3)
    (0.0, -0.693)
    """
    return 0.0 - math.log1p(abs(float(value)))


def square_threshold_reward(mass: float, threshold: float = THRESHOLD_GEV) -> float:
    """Return 0 from the threshold on; below it, minus the squared distance in powers of ten.

    >>> square_threshold_reward(250.0), square_threshold_reward(1.0)
    (0.0, -4.0)
    """
    if mass >= threshold:
        return 0.0
    return -(math.log10(threshold / max(mass, _LIGHTEST)) ** 2)


def anomaly_reward(coefficients: Mapping[str, Fraction]) -> float:
    """Return the component "anomalies": 1 if every coefficient is zero, at least WORST["anomalies"] otherwise."""
    # The mean, not the sum: otherwise every additional group would earn a bonus. SO(10) alone has no condition.
    return _at_least("anomalies", math.fsum(_cancelled(coefficients)) / len(coefficients) if coefficients else 1.0)


def anomaly_sum(coefficients: Mapping[str, Fraction]) -> float:
    """Return the sum over conditions of 1 for an exact zero, otherwise `log_reward`; at least LOWEST_SUM.

    >>> anomaly_sum({"c^3": Fraction(0), "grav^2*Y": Fraction(1)}) == 1 + log_reward(1)
    True
    """
    return max(LOWEST_SUM, math.fsum(_cancelled(coefficients)))


def _cancelled(coefficients: Mapping[str, Fraction]) -> list[float]:
    return [1.0 if not value else log_reward(value) for value in coefficients.values()]


@dataclass(frozen=True)
class Judgement:
    """The result of judging a theory; `problems` has a message for each component that prevents success."""

    components: dict[str, float]
    problems: dict[str, str]
    anomalies: dict[str, Fraction]
    vacuum: Vacuum
    sectors: list[Sector] = field(default_factory=list)
    exotics: list[tuple[Sector, float]] = field(default_factory=list)


def judge(theory: Theory, words: int, max_words: int, threshold: float = THRESHOLD_GEV) -> Judgement:
    """Compute every component of a theory with this many words."""
    problems: dict[str, str] = {}
    coefficients = anomalies(theory)
    broken = {name: value for name, value in coefficients.items() if value}
    if broken:
        problems["anomalies"] = "anomalies: " + ", ".join(f"{name} = {value}" for name, value in broken.items())
    components = {"anomalies": anomaly_reward(coefficients)}

    yukawas = [y for term in theory.terms if term.scalar is not None for y in term.values]
    too_strong = [y for y in yukawas if abs(y) >= PERTURBATIVE]
    if too_strong:
        problems["perturbativity"] = (
            f"{len(too_strong)} Yukawa couplings, up to {max(too_strong):g}, are not perturbative; the limit is "
            f"{PERTURBATIVE:.3g}"
        )
    components["perturbativity"] = _at_least("perturbativity", 0.0 - len(too_strong))

    if words > max_words:
        problems["length"] = f"the theory has {words} words; at most {max_words} are allowed"
    components["length"] = TOO_LONG if words > max_words else 0.0

    left = vacuum(theory)
    if left.charge is None:
        problems["standard_model"] = (
            f"the unbroken group is not SU(3) x U(1), which has 9 generators; {left.unbroken} generators are unbroken"
        )
        components |= {name: WORST[name] for name in ("exotics", "standard_model")}
        return Judgement(components, problems, coefficients, left)
    fermions, scalars = fermion_sectors(theory, left), scalar_sectors(theory, left)
    missing, exotics = find_exotics(fermions, scalars, threshold)
    if missing:
        problems["standard_model"] = f"{missing} of {_KNOWN} quarks and charged leptons are missing"
    components["standard_model"] = -missing / _KNOWN
    light = [(sector, mass) for sector, mass in exotics if mass < threshold]
    if light:
        shown = ", ".join(f"colour {s.colour}, charge {s.charge}: {mass:.3g} GeV" for s, mass in light[:4])
        problems["exotics"] = f"{len(light)} charged or coloured states are below {threshold:g} GeV ({shown})"
    penalty = math.fsum(square_threshold_reward(mass, threshold) for _, mass in light)
    components["exotics"] = _at_least("exotics", penalty)
    return Judgement(components, problems, coefficients, left, fermions + scalars, exotics)


def find_exotics(
    fermions: list[Sector], scalars: list[Sector], threshold: float = THRESHOLD_GEV
) -> tuple[int, list[tuple[Sector, float]]]:
    """Return the number of missing quarks and charged leptons, and all other states with colour or charge.

    Among massive states of the right colour and charge, as many light ones as the Standard Model has below the
    threshold are attributed to it, and one heavy one for each that it has above, i.e. the top quark. Whether triplets
    are called quarks or antiquarks is a convention, so the assignment that fits better is used.
    """
    options = []
    for sign in (1, -1):
        missing = _KNOWN
        exotics: list[tuple[Sector, float]] = []
        for sector in fermions:
            key = (sector.colour, sector.charge * (sign if sector.colour == 3 else 1))
            known = STANDARD_MODEL.get(key, ()) if sector.kind == "dirac" else ()
            missing -= min(len(known), len(sector.masses))
            light = sum(mass < threshold for mass in known)
            heavy = len(known) - light
            for mass in sector.masses if sector.visible else ():
                if 0 < mass < threshold and light:
                    light -= 1
                elif mass >= threshold and heavy:
                    heavy -= 1
                else:
                    exotics.append((sector, mass))
        exotics += [(sector, mass) for sector in scalars for mass in sector.masses]
        options.append((missing, exotics))
    return min(options, key=lambda option: option[0])


def _at_least(name: str, value: float) -> float:
    return max(WORST[name], value)
