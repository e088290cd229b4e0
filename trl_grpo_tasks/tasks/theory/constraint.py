"""Constraint for theories: a choice tree over the words of the language.

Everything it allows parses as a theory: ids are declared in order, counts match, no multiplet occurs twice, and the
interactions are exactly those that gauge symmetry allows, each with a value (0 for none). Groups have a fixed order,
and scalars precede fermions, which reduces the number of texts with the same meaning.

Fields are stored as codes: the indices of the options chosen at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

from ...constraints.choices import Choices, ChoiceTreeConstraint
from .groups import U1
from .tensors import components, reps_of
from .terms import allowed_shapes
from .theory import Fermion, GaugeGroup, Number, Scalar, Theory, Vev
from .words import (
    CHARGE_WORDS,
    CHARGES,
    GROUPS,
    MASS_WORDS,
    MASSES,
    MAX_GENERATIONS,
    MAX_GROUPS,
    MAX_MULTIPLETS,
    MAX_VEVS,
    VEV_WORDS,
    VEVS,
    component_word,
    count_word,
    group_name,
    multiplet_word,
    yukawa_words,
)

Code = tuple[int, ...]
_SCALAR_MASS_WORDS = list(MASS_WORDS)[1:]  # a scalar's mass cannot be zero; a mass term can


class Content:
    """The groups and fields so far. Equal contents allow the same continuations."""

    __slots__ = ("_hash", "fermions", "groups", "scalars", "terms", "vevs")

    def __init__(
        self,
        groups: tuple[str, ...],
        vevs: tuple[Code, ...] = (),
        scalars: tuple[Code, ...] = (),
        fermions: tuple[Code, ...] = (),
    ):
        self.groups, self.vevs, self.scalars, self.fermions = groups, vevs, scalars, fermions
        self.terms: list[tuple[str, int]] | None = None  # computed when the content is complete
        self._hash = hash((groups, vevs, scalars, fermions))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Content) and self._key() == other._key())

    def _key(self) -> tuple:
        return self.groups, self.vevs, self.scalars, self.fermions

    @property
    def multiplets(self) -> int:
        return len(self.vevs) + len(self.scalars) + len(self.fermions)


def theory_constraint(tokenizer: Any) -> ChoiceTreeConstraint:
    """Make the constraint for rows whose `prompt` is the beginning of a theory."""
    return ChoiceTreeConstraint(tokenizer, lambda row: (after_prompt, row["prompt"]), choices, look_ahead=False)


def choices(node: tuple) -> Choices:
    """Return the options at a node. A node is a function for one step of the grammar, followed by its arguments."""
    return node[0](*node[1:])


def check_prompt(prompt: str) -> None:
    """Raise ValueError, naming the word, unless `prompt` is the proper beginning of a theory."""
    words = prompt.split()
    if prompt != " ".join(words) or not words:
        raise ValueError("a prompt must be words of the language, separated by single spaces, without outer spaces")
    if not after_prompt(prompt):
        if words[-1] == "END" and after_prompt(" ".join(words[:-1])):
            raise ValueError("the prompt is a complete theory, which leaves nothing to generate")
        known = next(n for n in range(len(words) - 1, -1, -1) if n == 0 or after_prompt(" ".join(words[:n])))
        following = {"BOS"} if known == 0 else set()
        for text, node in after_prompt(" ".join(words[:known])):
            texts = [text] if text.strip() else [text for text, _ in choices(node)]
            following |= {text.split()[0] for text in texts}
        shown = ", ".join(sorted(following)[:8]) + (", ..." if len(following) > 8 else "")
        raise ValueError(f"word {known + 1} of the prompt is {words[known]!r}; allowed here: {shown}")


@lru_cache(4096)
def after_prompt(prompt: str) -> list[tuple[str, Any]]:
    """Return what may follow a prompt, beginning with the rest of the literal in which the prompt ends."""
    found: list[tuple[str, Any]] = []
    todo: list[tuple[str, Any]] = [(prompt, START)]
    while todo:
        rest, node = todo.pop()
        for text, after in choices(node):
            if text.startswith(rest):
                if (left := text[len(rest) :]).startswith(" "):
                    found.append((left, after))
            elif rest.startswith(text) and after is not None:
                todo.append((rest[len(text) :], after))
    return found


# ---- steps: gauge groups


def _group_count() -> Choices:
    return [
        (f"BOS GAUGE_GROUPS NUM_GAUGE {count_word(n)} GROUP group_1 ", (_group, n, ()))
        for n in range(1, MAX_GROUPS + 1)
    ]


START = (_group_count,)


def _group(count: int, chosen: tuple[str, ...]) -> Choices:
    options = GROUPS[GROUPS.index(chosen[-1]) if chosen else 0 :]
    number = len(chosen) + 2
    if number <= count:
        return [(f"{word} GROUP group_{number} ", (_group, count, (*chosen, word))) for word in options]
    return [(f"{word} SYMMETRY_BREAKING NUM_VEVS ", (_vev_count, Content((*chosen, word)))) for word in options]


# ---- steps: fields


def _vev_count(content: Content) -> Choices:
    return [(f"{count_word(n)} ", (_next_vev, content, n)) for n in range(MAX_VEVS + 1)]


def _next_vev(content: Content, left: int) -> Choices:
    if not left:
        return [("MULTIPLETS NUM_MULTIPLETS ", (_multiplet_count, content))]
    text = f"SCALAR {multiplet_word(content.multiplets + 1)} {_opening(content.groups, 0)}"
    return [(text, (_scalar_number, content, left, True, ()))]


def _multiplet_count(content: Content) -> Choices:
    return [(f"{count_word(n)} ", (_next_multiplet, content, n)) for n in range(1, MAX_MULTIPLETS + 1)]


def _next_multiplet(content: Content, left: int) -> Choices:
    if not left:
        return [("INTERACTIONS ", (_next_term, content, 0))]
    id = multiplet_word(content.multiplets + 1)
    options: list[tuple[str, Any]] = [(f"FERMION {id} GENERATIONS ", (_generations, content, left))]
    if not content.fermions:
        text = f"SCALAR {id} {_opening(content.groups, 0)}"
        options.append((text, (_scalar_number, content, left, False, ())))
    return options


def _generations(content: Content, left: int) -> Choices:
    free = _untaken((), range(MAX_GENERATIONS), content.fermions, prod(_sizes(content.groups)))
    opening = _opening(content.groups, 0)
    return [(f"{count_word(n + 1)} {opening}", (_fermion_number, content, left, (n,))) for n in free]


def _fermion_number(content: Content, left: int, code: Code) -> Choices:
    """Choose the representation or charge under the next group; a fermion's code begins with its generations."""
    groups, place = content.groups, len(code) - 1
    words = _options(groups[place])
    free = _untaken(code, range(len(words)), content.fermions, prod(_sizes(groups)[place + 1 :]))
    if place + 1 < len(groups):
        opening = _opening(groups, place + 1)
        return [(f"{words[n]} {opening}", (_fermion_number, content, left, (*code, n))) for n in free]
    return [(f"{words[n]} ", (_fermion_done, content, left, (*code, n))) for n in free]


def _fermion_done(content: Content, left: int, code: Code) -> Choices:
    grown = Content(content.groups, content.vevs, content.scalars, (*content.fermions, code))
    return _next_multiplet(grown, left - 1)


def _scalar_number(content: Content, left: int, vev: bool, code: Code) -> Choices:
    groups, place = content.groups, len(code)
    words = _options(groups[place])
    # A scalar with a vev still has many choices left (component, vev and mass), so it can always differ.
    taken = () if vev else content.scalars
    free = _untaken(code, range(len(words)), taken, prod(_sizes(groups)[place + 1 :]) * len(_SCALAR_MASS_WORDS))
    if place + 1 < len(groups):
        opening = _opening(groups, place + 1)
        return [(f"{words[n]} {opening}", (_scalar_number, content, left, vev, (*code, n))) for n in free]
    if vev:
        return [(f"{words[n]} VEV ", (_component, content, left, (*code, n), 0)) for n in free]
    return [(f"{words[n]} MASS ", (_scalar_mass, content, left, False, (*code, n))) for n in free]


def _component(content: Content, left: int, code: Code, place: int) -> Choices:
    """Choose the vev's component under the next group in which the field is not a singlet; 0 for singlets."""
    groups = content.groups
    while place < len(groups) and (groups[place] == "U_1" or code[place] == 0):
        code, place = (*code, 0), place + 1
    if place == len(groups):
        return [(f"{word} MASS ", (_scalar_mass, content, left, True, (*code, n))) for n, word in enumerate(VEV_WORDS)]
    name = group_name(groups[place])
    count = len(components(name, list(reps_of(name).values())[code[place]]))
    return [
        (f"group_{place + 1} {component_word(n)} ", (_component, content, left, (*code, n), place + 1))
        for n in range(1, count + 1)
    ]


def _scalar_mass(content: Content, left: int, vev: bool, code: Code) -> Choices:
    free = _untaken(code, range(len(_SCALAR_MASS_WORDS)), content.vevs if vev else content.scalars, 1)
    return [(f"{_SCALAR_MASS_WORDS[n]} ", (_scalar_done, content, left, vev, (*code, n))) for n in free]


def _scalar_done(content: Content, left: int, vev: bool, code: Code) -> Choices:
    if vev:
        return _next_vev(Content(content.groups, (*content.vevs, code)), left - 1)
    return _next_multiplet(Content(content.groups, content.vevs, (*content.scalars, code)), left - 1)


# ---- steps: interactions


def _next_term(content: Content, place: int) -> Choices:
    if content.terms is None:
        content.terms = _terms(content)
    if place == len(content.terms):
        return [("END", None)]
    text, pairs = content.terms[place]
    return [(text, (_term_value, content, place, pairs))]


def _term_value(content: Content, place: int, pairs: int) -> Choices:
    return [(text, (_next_term, content, place + 1)) for text in _value_texts(pairs)]


@lru_cache(16)
def _value_texts(pairs: int) -> list[str]:
    """Return the value words of a Yukawa coupling with `pairs` pairs of generations, or of a mass term (0 pairs)."""
    return [f"{word} " for word in (yukawa_words(pairs) if pairs else MASS_WORDS)]


def _terms(content: Content) -> list[tuple[str, int]]:
    """Return, for each allowed term, the text before its value and its pairs of generations (0: a mass term)."""
    theory = theory_of(content)
    result = []
    for shape in allowed_shapes(theory):
        first, second = theory.fermions[shape.first], theory.fermions[shape.second]
        if shape.scalar < 0:
            result.append((f"BARE_MASS {first.name} {second.name} ", 0))
        else:
            form = "CONJUGATE" if shape.conjugate else "SCALAR"
            text = f"YUKAWA {first.name} {second.name} {form} {theory.scalars[shape.scalar].name} "
            result.append((text, min(first.generations, second.generations)))
    return result


def theory_of(content: Content) -> Theory:
    """Return the theory that the codes describe."""
    groups = tuple(GaugeGroup(f"group_{n}", group_name(word)) for n, word in enumerate(content.groups, 1))
    count = len(groups)
    scalars, fermions = [], []
    for number, code in enumerate((*content.vevs, *content.scalars), 1):
        vev = Vev(code[count : 2 * count], VEVS[code[2 * count]]) if number <= len(content.vevs) else None
        scalars.append(Scalar(multiplet_word(number), _numbers(content.groups, code), MASSES[code[-1] + 1], vev))
    for number, code in enumerate(content.fermions, len(scalars) + 1):
        fermions.append(Fermion(multiplet_word(number), _numbers(content.groups, code[1:]), code[0] + 1))
    return Theory(groups, tuple(fermions), tuple(scalars))


def _numbers(groups: Sequence[str], code: Code) -> tuple[Number, ...]:
    return tuple([_values(group)[n] for group, n in zip(groups, code, strict=False)])


@lru_cache(16)
def _values(group: str) -> tuple[Number, ...]:
    return CHARGES if group_name(group) == U1 else tuple(reps_of(group_name(group)).values())


@lru_cache(16)
def _options(group: str) -> list[str]:
    """Return the words for a field's representation or charge under a group."""
    return list(CHARGE_WORDS) if group_name(group) == U1 else list(reps_of(group_name(group)))


@lru_cache(256)
def _sizes(groups: tuple[str, ...]) -> list[int]:
    return [len(_options(group)) for group in groups]


@lru_cache(256)
def _opening(groups: tuple[str, ...], place: int) -> str:
    return f"{'CHARGE' if groups[place] == 'U_1' else 'REP'} group_{place + 1} "


def _untaken(code: Code, options: Sequence[int], taken: Sequence[Code], leaves: int) -> Sequence[int]:
    """Return the options after which a new field can still differ from existing ones in one of `leaves` ways."""
    length = len(code)
    alike = [one[length] for one in taken if one[:length] == code]
    if not alike:
        return options
    return [n for n in options if alike.count(n) < leaves]
