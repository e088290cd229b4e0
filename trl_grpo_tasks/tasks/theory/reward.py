"""What a theory is worth: anomalies, light exotics, Standard Model content, perturbativity, length, and success.

Success is strict: every anomaly exactly zero, SU(3) x U(1) left unbroken, three families of quarks and charged leptons
with masses and the top quark among the heavy ones, no other charged or coloured state below the threshold, every
coupling below sqrt(4 pi), not too long, and at least one fermion multiplet that the prompt did not give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from .anomalies import anomalies
from .breaking import Vacuum, vacuum
from .masses import PERTURBATIVE, Sector, fermion_sectors, scalar_sectors
from .theory import Theory, Yukawa

THRESHOLD_GEV = 100.0
TOO_LONG = -300.0
# Quarks and charged leptons in GeV, by colour and charge; of light states beyond these a theory has none.
STANDARD_MODEL: dict[tuple[int, Fraction], tuple[float, ...]] = {
    (3, Fraction(2, 3)): (0.002, 1.3, 173.0),
    (3, Fraction(-1, 3)): (0.005, 0.09, 4.2),
    (1, Fraction(1)): (0.0005, 0.106, 1.78),
}
_KNOWN = sum(map(len, STANDARD_MODEL.values()))
# The worst that each component can be; what is no theory gets all of them.
WORST = {"anomalies": -5.0, "exotics": -100.0, "standard_model": -1.0, "perturbativity": -10.0, "length": TOO_LONG}
# The curriculum: what counts at each level, easy to hard.
GOALS: dict[str, tuple[str, ...]] = {
    "length": ("length",),
    "exotics": ("length", "exotics", "standard_model", "perturbativity"),
    "anomalies": ("length", "exotics", "standard_model", "perturbativity", "anomalies"),
}
# A mass of zero has no logarithm; nothing is counted as lighter than this (GeV).
_LIGHTEST = 1e-3


def log_reward(value: Fraction | float) -> float:
    """0 at zero, and slowly less the further away.

    >>> log_reward(0), round(log_reward(-1), 3)
    (0.0, -0.693)
    """
    return 0.0 - math.log1p(abs(float(value)))


def square_threshold_reward(mass: float, threshold: float = THRESHOLD_GEV) -> float:
    """0 from the threshold on; below it minus the square of the distance in powers of ten.

    >>> square_threshold_reward(250.0), square_threshold_reward(1.0)
    (0.0, -4.0)
    """
    if mass >= threshold:
        return 0.0
    return -(math.log10(threshold / max(mass, _LIGHTEST)) ** 2)


@dataclass(frozen=True)
class Judgement:
    """What was found of a theory. `problems` says by component, in words, what stands in the way of success."""

    components: dict[str, float]
    problems: dict[str, str]
    anomalies: dict[str, Fraction]
    vacuum: Vacuum
    sectors: list[Sector] = field(default_factory=list)
    exotics: list[tuple[Sector, float]] = field(default_factory=list)


def judge(theory: Theory, words: int, max_words: int, threshold: float = THRESHOLD_GEV) -> Judgement:
    """Every component of a theory of so many words."""
    problems: dict[str, str] = {}
    coefficients = anomalies(theory)
    broken = {name: value for name, value in coefficients.items() if value}
    if broken:
        problems["anomalies"] = "anomalies: " + ", ".join(f"{name} = {value}" for name, value in broken.items())
    # A mean: with a sum, each further group would bring its own bonus.
    cancelled = [1.0 if not value else log_reward(value) for value in coefficients.values()]
    components = {"anomalies": _at_least("anomalies", sum(cancelled) / max(1, len(cancelled)))}

    too_strong = [
        y for term in theory.terms if isinstance(term, Yukawa) for y in term.values if abs(y) >= PERTURBATIVE
    ]
    if too_strong:
        problems["perturbativity"] = (
            f"{len(too_strong)} Yukawa couplings are not perturbative, up to {max(too_strong):g}"
        )
    components["perturbativity"] = _at_least("perturbativity", 0.0 - len(too_strong))

    if words > max_words:
        problems["length"] = f"too long: {words} words, at most {max_words}"
    components["length"] = TOO_LONG if words > max_words else 0.0

    left = vacuum(theory)
    if left.charge is None:
        problems["standard_model"] = f"SU(3) x U(1) is not what is left: {left.unbroken} generators are unbroken"
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
        problems["exotics"] = f"{len(light)} light charged or coloured states ({shown})"
    penalty = math.fsum(square_threshold_reward(mass, threshold) for _, mass in light)
    components["exotics"] = _at_least("exotics", penalty)
    return Judgement(components, problems, coefficients, left, fermions + scalars, exotics)


def find_exotics(
    fermions: list[Sector], scalars: list[Sector], threshold: float = THRESHOLD_GEV
) -> tuple[int, list[tuple[Sector, float]]]:
    """How many quarks and charged leptons are missing, and all other states that have colour or charge.

    Of the right colour and charge, as many light states as the Standard Model has below the threshold are its own, if
    they have a mass, and so is one heavy state for each that it has above: the top quark. Which triplets are quarks
    and which antiquarks is a convention, so the one that fits better is taken.
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
