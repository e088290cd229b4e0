"""Hindsight: a failed theory without the multiplets that spoil it may be the answer to another request.

Requests extend the Standard Model by a number of multiplets. A theory that answers one fails as a whole, for instance
because two of its four new fermions have uncancelled anomalies. The others may succeed without them: then they answer
the request for two multiplets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from .anomalies import anomalies
from .data import cut
from .examples import named
from .language import LanguageError, parse, write
from .reward import judge
from .terms import with_all_terms
from .theory import Fermion, Scalar, Theory


def smaller_requests(
    prompt: str, completion: str, most_new: int, max_words: int, threshold: float
) -> Iterator[tuple[str, str]]:
    """Generate prompts with fewer new multiplets and the part of the theory that answers each with success, largest
    first. What is given stays the same kind: nothing, the Standard Model, or also one new multiplet."""
    try:
        theory = parse(f"{prompt} {completion}")
    except LanguageError:
        return
    model = named("standard_model")
    family = {_content(fermion) for fermion in model.fermions}
    new = [fermion for fermion in theory.fermions if _content(fermion) not in family]
    given, known = prompt.split().count("FERMION"), len(model.fermions)
    if (
        [group.group for group in theory.groups] != [group.group for group in model.groups]
        or [_content(scalar) for scalar in theory.scalars] != [_content(scalar) for scalar in model.scalars]
        or len(theory.fermions) - len(new) != known
        or given not in (0, known, known + 1)
        or any(fermion in new for fermion in theory.fermions[: min(given, known)])
        or cut(theory, given)[0] != prompt  # the prompt ends within a multiplet
    ):
        return
    for size in range(min(len(new) - 1, most_new), max(0, given - known), -1):
        for left_out in combinations(new[::-1], len(new) - size):
            fermions = tuple(fermion for fermion in theory.fermions if fermion not in left_out)
            if any(anomalies(Theory(theory.groups, fermions)).values()):
                continue  # most parts fail here, which is much faster to see than masses
            names = {fermion.name for fermion in left_out}
            terms = tuple(term for term in theory.terms if not {term.first, term.second} & names)
            part = with_all_terms(Theory(theory.groups, fermions, theory.scalars, terms))
            if not judge(part, len(write(part).split()), max_words, threshold).problems:
                yield cut(part, given)


def _content(field: Fermion | Scalar) -> Fermion | Scalar:
    return replace(field, name="")
