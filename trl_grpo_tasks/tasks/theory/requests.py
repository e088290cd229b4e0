"""Requests in words: the beginning of a theory, or a sentence about fields that are added to the Standard Model."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from .constraint import check_prompt
from .data import cut
from .examples import SM_FERMIONS, extend
from .tensors import reps_of
from .theory import Fermion, Theory
from .words import CHARGES, MAX_GENERATIONS, MAX_MULTIPLETS, count_word

MOST_NEW = MAX_MULTIPLETS - len(SM_FERMIONS)
_COUNTS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7}
_SENTENCE = re.compile(
    r"(?:the )?standard model (?:with|plus|and) (?P<count>\w+) (?:(?:more|new|additional|extra|other) )?"
    r"(?:fermion |fermionic )?(?:fermion|field|multiplet)s?(?:: ?(?P<given>.+?))?\.?"
)
_FIELD = re.compile(r"(?:(?P<generations>\d+) x )?(?P<colour>\w+) (?P<weak>\w+) (?P<charge>-?\d+(?:/\d+)?)")
HELP = (
    "write the beginning of a theory (BOS GAUGE_GROUPS ...), or a sentence such as 'the Standard Model with two new "
    "fields', or '... with two new fields: 3 x fund singlet 2/3', which gives the first field by its generations, its "
    "SU(3) and SU(2) representations and its hypercharge"
)


def row_of(text: str, level: str) -> dict[str, Any]:
    """Return the row of a request whose success criterion is that of `level`; ValueError if it is not understood."""
    words = text.split()
    if words[:1] == ["BOS"]:
        prompt = " ".join(words)
        check_prompt(prompt)
        understood = f"a theory that begins with the {len(words)} given words"
    else:
        prompt, understood = _of_sentence(" ".join(words))
    return {"prompt": prompt, "level": level, "interpretation": f"{understood}; goal: {level}"}


def _of_sentence(text: str) -> tuple[str, str]:
    """Return the prompt that a sentence means, and what it means in other words."""
    match = _SENTENCE.fullmatch(text.lower())
    if match is None:
        raise ValueError(f"{text[:80]!r} is not understood; {HELP}")
    said = match["count"]
    count = int(said) if re.fullmatch(r"[0-9]{1,3}", said) else _COUNTS.get(said)
    if count is None or not 1 <= count <= MOST_NEW:
        raise ValueError(f"{said!r} new fields: the number must be from 1 to {MOST_NEW}; {HELP}")
    model = extend()
    given = [_field(part.strip(), n) for n, part in enumerate(match["given"].split(","))] if match["given"] else []
    if len(given) > count:
        raise ValueError(f"{len(given)} fields are given, but only {count} are new; {HELP}")
    theory = Theory(model.groups, (*model.fermions, *given), model.scalars, ())
    prompt, _ = cut(theory, len(theory.fermions))
    declared = f"NUM_MULTIPLETS {count_word(len(theory.fermions))} "
    prompt = prompt.replace(declared, f"NUM_MULTIPLETS {count_word(len(model.fermions) + count)} ")
    if len(given) == count:  # the model writes the interactions only, which would not count as an answer
        raise ValueError(f"all {count} new fields are given, which leaves none to find; ask for more fields")
    try:
        check_prompt(prompt)
    except ValueError as error:
        raise ValueError(f"these fields cannot be added to the Standard Model: {error}") from error
    told = f", {len(given)} of them given" if given else ""
    return prompt, f"the Standard Model and {count} new fermion multiplet{'s' * (count > 1)}{told}"


def _field(text: str, number: int) -> Fermion:
    match = _FIELD.fullmatch(text)
    if match is None:
        raise ValueError(f"the field {text[:60]!r} is not understood; {HELP}")
    generations = int(match["generations"] or 1)
    if not 1 <= generations <= MAX_GENERATIONS:
        raise ValueError(f"{generations} generations: the number must be from 1 to {MAX_GENERATIONS}")
    numbers: list[Any] = []
    for group, word in (("SU(3)", match["colour"]), ("SU(2)", match["weak"])):
        if word not in reps_of(group):
            raise ValueError(f"{group} has no representation {word!r}; choose from: {', '.join(reps_of(group))}")
        numbers.append(reps_of(group)[word])
    charge = Fraction(match["charge"]) if not re.search(r"/0+$", match["charge"]) else None
    if charge not in CHARGES:
        raise ValueError(f"there is no hypercharge {match['charge']}; choose from: {', '.join(map(str, CHARGES))}")
    return Fermion(f"given{number}", (*numbers, charge), generations)
