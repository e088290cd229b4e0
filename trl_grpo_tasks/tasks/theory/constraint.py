"""Constraint for theories: a choice tree over the words of the language.

Everything it allows parses as a theory: ids are declared in order, counts match, no multiplet occurs twice, and the
interactions are exactly those that gauge symmetry allows, each with a value (0 for none). Groups have a fixed order,
and scalars precede fermions, which reduces the number of texts with the same meaning.

Fields are stored as codes: the indices of the options chosen at each step. A fermion's code begins with its
generations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from ...constraints.choices import Choices, ChoiceTreeConstraint
from .groups import U1
from .tensors import components, reps_of
from .terms import allowed_terms
from .theory import Fermion, GaugeGroup, Number, Scalar, Theory, Vev
from .words import (
    CHARGE_WORDS,
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


class Content(NamedTuple):
    """The groups and fields so far. Equal contents allow the same continuations."""

    groups: tuple[str, ...]
    vevs: tuple[Code, ...] = ()
    scalars: tuple[Code, ...] = ()
    fermions: tuple[Code, ...] = ()

    @property
    def next_id(self) -> str:
        return multiplet_word(len(self.vevs) + len(self.scalars) + len(self.fermions) + 1)


def theory_constraint(tokenizer: Any) -> ChoiceTreeConstraint:
    """Make the constraint for rows whose `prompt` is the beginning of a theory."""
    # Each charge decides how many interactions must follow, so that no short ending is known.
    return ChoiceTreeConstraint(
        tokenizer, lambda row: (after_prompt, row["prompt"]), choices, look_ahead=False, longest_ending=None
    )


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


# ---- steps: fields; `kind` is the entry of the content to which the field will be added


def _vev_count(content: Content) -> Choices:
    return [(f"{count_word(n)} ", (_next_vev, content, n)) for n in range(MAX_VEVS + 1)]


def _next_vev(content: Content, left: int) -> Choices:
    if not left:
        return [("MULTIPLETS NUM_MULTIPLETS ", (_multiplet_count, content))]
    return [(f"SCALAR {content.next_id} {_opening(content, 0)}", (_number, content, left, "vevs", ()))]


def _multiplet_count(content: Content) -> Choices:
    return [(f"{count_word(n)} ", (_next_multiplet, content, n)) for n in range(1, MAX_MULTIPLETS + 1)]


def _next_multiplet(content: Content, left: int) -> Choices:
    if not left:
        return [("INTERACTIONS ", (_next_term, content, 0))]
    options: list[tuple[str, Any]] = [(f"FERMION {content.next_id} GENERATIONS ", (_generations, content, left))]
    if not content.fermions:
        text = f"SCALAR {content.next_id} {_opening(content, 0)}"
        options.append((text, (_number, content, left, "scalars", ())))
    return options


def _generations(content: Content, left: int) -> Choices:
    free = _untaken((), MAX_GENERATIONS, content.fermions, _ways(content, 0))
    opening = _opening(content, 0)
    return [(f"{count_word(n + 1)} {opening}", (_number, content, left, "fermions", (n,))) for n in free]


def _number(content: Content, left: int, kind: str, code: Code) -> Choices:
    """Choose the representation or charge under the next group."""
    place = len(code) - (kind == "fermions") + 1
    words = _options(content.groups[place - 1])
    # A scalar with a vev still has many choices left (component, vev and mass), so it can always differ.
    taken = () if kind == "vevs" else getattr(content, kind)
    masses = 1 if kind == "fermions" else len(_SCALAR_MASS_WORDS)
    free = _untaken(code, len(words), taken, _ways(content, place) * masses)
    text, step = {"vevs": ("VEV ", _component), "scalars": ("MASS ", _mass), "fermions": ("", _done)}[kind]
    if place < len(content.groups):
        text, step = _opening(content, place), _number
    return [(f"{words[n][0]} {text}", (step, content, left, kind, (*code, n))) for n in free]


def _component(content: Content, left: int, kind: str, code: Code) -> Choices:
    """Choose the vev's component under the next group in which the field is not a singlet; 0 for singlets."""
    groups = content.groups
    while (place := len(code) - len(groups)) < len(groups) and (groups[place] == "U_1" or code[place] == 0):
        code = (*code, 0)
    if place == len(groups):
        return [(f"{word} MASS ", (_mass, content, left, kind, (*code, n))) for n, word in enumerate(VEV_WORDS)]
    name = group_name(groups[place])
    count = len(components(name, _options(groups[place])[code[place]][1]))
    return [
        (f"group_{place + 1} {component_word(n)} ", (_component, content, left, kind, (*code, n)))
        for n in range(1, count + 1)
    ]


def _mass(content: Content, left: int, kind: str, code: Code) -> Choices:
    free = _untaken(code, len(_SCALAR_MASS_WORDS), getattr(content, kind), 1)
    return [(f"{_SCALAR_MASS_WORDS[n]} ", (_done, content, left, kind, (*code, n))) for n in free]


def _done(content: Content, left: int, kind: str, code: Code) -> Choices:
    content = content._replace(**{kind: (*getattr(content, kind), code)})
    return _next_vev(content, left - 1) if kind == "vevs" else _next_multiplet(content, left - 1)


# ---- steps: interactions


def _next_term(content: Content, place: int) -> Choices:
    terms = _terms(content)
    if place == len(terms):
        return [("END", None)]
    text, pairs = terms[place]
    return [(text, (_term_value, content, place, pairs))]


def _term_value(content: Content, place: int, pairs: int) -> Choices:
    words = yukawa_words(pairs) if pairs else MASS_WORDS
    return [(f"{word} ", (_next_term, content, place + 1)) for word in words]


@lru_cache(4096)
def _terms(content: Content) -> list[tuple[str, int]]:
    """Return, for each allowed term, the text before its value and its pairs of generations (0: a mass term)."""
    result = []
    for term in allowed_terms(theory_of(content)):
        pair = f"{term.first} {term.second}"
        if term.scalar is None:
            result.append((f"BARE_MASS {pair} ", 0))
        else:
            form = "CONJUGATE" if term.conjugate else "SCALAR"
            result.append((f"YUKAWA {pair} {form} {term.scalar} ", len(term.values)))
    return result


def theory_of(content: Content) -> Theory:
    """Return the theory that the codes describe."""

    def numbers(code: Code) -> tuple[Number, ...]:
        return tuple([_options(group)[n][1] for group, n in zip(content.groups, code, strict=False)])

    groups = tuple(GaugeGroup(f"group_{n}", group_name(word)) for n, word in enumerate(content.groups, 1))
    count, scalars = len(groups), []
    for number, code in enumerate((*content.vevs, *content.scalars), 1):
        vev = Vev(code[count : 2 * count], VEVS[code[2 * count]]) if number <= len(content.vevs) else None
        scalars.append(Scalar(multiplet_word(number), numbers(code), MASSES[code[-1] + 1], vev))
    fermions = tuple(
        Fermion(multiplet_word(number), numbers(code[1:]), code[0] + 1)
        for number, code in enumerate(content.fermions, len(scalars) + 1)
    )
    return Theory(groups, fermions, tuple(scalars))


@lru_cache(16)
def _options(group: str) -> list[tuple[str, Any]]:
    """Return the words for a field's representation or charge under a group, with their values."""
    name = group_name(group)
    return list((CHARGE_WORDS if name == U1 else reps_of(name)).items())


def _ways(content: Content, place: int) -> int:
    """Return how many representations and charges a field can have under the groups from this one on."""
    return prod([len(_options(group)) for group in content.groups[place:]])


def _opening(content: Content, place: int) -> str:
    return f"{'CHARGE' if content.groups[place] == 'U_1' else 'REP'} group_{place + 1} "


def _untaken(code: Code, count: int, taken: Sequence[Code], leaves: int) -> Sequence[int]:
    """Return the options after which a new field can still differ from existing ones in one of `leaves` ways."""
    length = len(code)
    alike = [one[length] for one in taken if one[:length] == code]
    return [n for n in range(count) if alike.count(n) < leaves] if alike else range(count)
