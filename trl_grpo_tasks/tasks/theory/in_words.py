"""Requests in plain words ("SU(5) with three families"), translated to prompts: the beginning of a theory.

A request names a theory or its gauge groups, and what to add. Without additions, groups and scalars are given, and all
fermions are to be found. With additions, the fermions of the theory are given too. Something always remains to be
found: if every addition is specified, it is the last number (representation or charge) of the last one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from ...task import nearest
from .examples import named, numbers_of
from .groups import U1
from .language import write
from .render import rep_name
from .theory import Fermion, Theory
from .words import GROUPS, MAX_GROUPS, MAX_MULTIPLETS, count_word, group_name, group_word

# Theories by their gauge groups, largest first, and by other names.
_BY_GROUPS = {
    ("SU_3", "SU_2", "U_1"): "standard_model",
    ("SU_3", "SU_2", "U_1", "U_1"): "b_minus_l",
    ("SU_3", "SU_2", "SU_2", "U_1"): "left_right",
    ("SU_4", "SU_2", "SU_2"): "pati_salam",
    ("SU_5",): "su5",
    ("SU_5", "U_1"): "flipped_su5",
    ("SU_3", "SU_3", "SU_3"): "trinification",
    ("SO_10",): "so10",
    ("E_6",): "e6",
}
_BY_NAME = {
    "Standard Model": "standard_model",
    "SM": "standard_model",
    "two Higgs doublets": "two_higgs_doublets",
    "left-right": "left_right",
    "Pati-Salam": "pati_salam",
    "Georgi-Glashow": "su5",
    "flipped": "flipped_su5",
    "trinification": "trinification",
    "B-L": "b_minus_l",
}
# New fermions of the Standard Model in the notation of examples.py; the right-handed neutrino fits every theory.
_NEUTRINO = "right handed neutrino"
_NEW: dict[str, tuple[str, ...]] = {
    "vectorlike top": ("fund singlet 2/3", "antifund singlet -2/3"),
    "vectorlike bottom": ("fund singlet -1/3", "antifund singlet 1/3"),
    "vectorlike quark doublet": ("fund fund 1/6", "antifund fund -1/6"),
    "vectorlike lepton doublet": ("singlet fund -1/2", "singlet fund 1/2"),
    "vectorlike electron": ("singlet singlet -1", "singlet singlet 1"),
    "triplet": ("singlet adjoint 0",),
    "octet": ("adjoint singlet 0",),
}
_FAMILY, _FIELD = "family", "field"
_NOUNS = (_NEUTRINO, *_NEW, _FAMILY, _FIELD)
_SAME = {"sterile neutrino": _NEUTRINO, "generation": _FAMILY, "multiplet": _FIELD, "fermion": _FIELD,
         "particle": _FIELD, "gluino": "octet", "wino": "triplet"}  # fmt: skip
_COUNTS = {word: n for n, words in enumerate(("a an one another fourth 4th", "two", "three", "four"), 1)
           for word in (*words.split(), str(n))}  # fmt: skip
_FILLERS = {"the", "with", "and", "plus", "of", "in", "by", "for", "that", "has", "have", "having", "its", "theory",
            "theories", "model", "gauge", "group", "groups", "symmetry", "symmetric", "extension", "extended", "add",
            "adding", "new", "extra", "additional", "more", "charged", "unknown", "find", "build", "make", "give",
            "me", "please", "fermionic", "minimal"}  # fmt: skip
UNDERSTOOD = (
    f"theories ({', '.join(_BY_NAME)}), gauge groups (SU(3) x SU(2) x U(1); up to {MAX_GROUPS} of "
    f"{', '.join(map(group_name, GROUPS))}), and numbers from one to four of: {', '.join(_NOUNS)}"
)


@dataclass
class _Request:
    """What a sentence says: groups or the name of a theory, families, and additions as (count, noun)."""

    groups: list[str] = field(default_factory=list)
    name: str | None = None
    families: int | None = None
    additions: list[tuple[int, str]] = field(default_factory=list)


def prompt_of(text: str) -> tuple[str, str]:
    """Return the prompt of a request, and how the request was understood, in one line. ValueError if it was not."""
    request = _read(text)
    name = request.name or _BY_GROUPS.get(tuple(request.groups))
    if name is None:
        if not request.groups:
            raise ValueError(f"{text[:80]!r} names no theory and no gauge group; understood are: {UNDERSTOOD}")
        return _groups_only(request)
    base = replace(named(name), terms=())
    if other := [group for group in request.groups if group not in {group_word(g.group) for g in base.groups}]:
        raise ValueError(f"{name} has no gauge group {group_name(other[0])}; name the theory or the groups, not both")
    new, unknown, notes = _new_fermions(request, name, base)
    scalars = [
        " ".join(rep_name(group.group, number) for group, number in zip(base.groups, scalar.numbers, strict=True))
        for scalar in base.scalars
    ]
    groups = " x ".join(group.group for group in base.groups)
    shown = f"{name}: {groups}, broken by scalars ({'), ('.join(scalars)})"
    if not notes:
        words = _words(base, len(base.fermions))
        cut = words.index("FERMION")
        found = f"{len(base.fermions)} fermion multiplets are to be found"
        if request.families:
            cut += 4  # FERMION, its id, GENERATIONS, num_3
            found += ", the first with 3 generations"
        return " ".join(words[:cut]), f"{shown}; {found}"
    theory = replace(base, fermions=(*base.fermions, *new))
    total = len(theory.fermions) + unknown
    if total > MAX_MULTIPLETS:
        raise ValueError(f"{text[:80]!r} needs {total} fermion multiplets; at most {MAX_MULTIPLETS} can be written")
    words = _words(theory, total)
    end = words.index("INTERACTIONS")
    # A new multiplet must be left to the model, at least in part: a completion that adds no fermion does not succeed.
    prompt = words[:end] if unknown else words[: end - 1]
    left = "the rest" if unknown else "the last number of the last one"
    shown += f"; its {len(base.fermions)} fermion multiplets are given; new: {', '.join(notes)}; to be found: {left}"
    return " ".join(prompt), shown


# ---- reading


def _read(text: str) -> _Request:
    rest = re.sub(r"(?<=\))_\{?[a-z]\}?", "", text.lower())  # the index of SU(2)_L
    rest = re.sub(r"(?<=[\d)])\s*[x×*]\s*(?=(?:s?[uop]|e) ?\(? ?\d)", " ", rest)  # the x of SU(3) x SU(2)
    rest = " ".join(re.sub(r"[-_,.;:!?+&]", " ", rest).replace("families", "family").split())
    rest = rest.replace("vector like", "vectorlike")
    names = {name.lower().replace("-", " ").removesuffix("s"): theory for name, theory in _BY_NAME.items()}
    request = _Request()
    count: int | None = None
    while rest := rest.strip():
        if group := re.match(r"(su|so|sp|u|e) ?\(? ?(\d+)(?: ?\)|\b)", rest):
            word = f"{group[1]}_{group[2]}".upper()
            if word not in GROUPS:
                shown = ", ".join(map(group_name, GROUPS))
                raise ValueError(f"the gauge group {group_name(word)} cannot be written; groups are: {shown}")
            request.groups.append(word)
            rest = rest[group.end() :]
        elif noun := _starting(rest, (*_NOUNS, *_SAME)):
            _add(request, count, _SAME.get(noun, noun))
            count, rest = None, rest[len(noun) :].removeprefix("s")
        elif name := _starting(rest, tuple(names)):
            request.name, rest = names[name], rest[len(name) :].removeprefix("s")
        else:
            word, _, rest = rest.partition(" ")
            if word in _COUNTS:
                count = _COUNTS[word]
            elif word not in _FILLERS:
                known = {part for phrase in (*_NOUNS, *_SAME, *names) for part in phrase.split()} | set(_COUNTS)
                raise ValueError(
                    f"{word[:40]!r} is not understood{nearest(word, known)}; understood are: {UNDERSTOOD}"
                )
    if count is not None and count > 1:
        raise ValueError(f"{text[:80]!r} ends without saying what there are {count} of; understood are: {UNDERSTOOD}")
    request.groups.sort(key=GROUPS.index)
    return request


def _starting(rest: str, phrases: tuple[str, ...]) -> str | None:
    """Return the longest phrase with which the text begins, also in the plural."""
    found = [phrase for phrase in phrases if re.match(rf"{re.escape(phrase)}s?\b", rest)]
    return max(found, key=len, default=None)


def _add(request: _Request, count: int | None, noun: str) -> None:
    if noun != _FAMILY:
        request.additions.append((count or 1, noun))
    elif count == 3:
        request.families = 3
    elif count in (1, 4):  # "a fourth family", "four families"
        request.additions.append((1, _FAMILY))
    else:
        raise ValueError(
            f"{count or 'an unknown number of'} families: success needs the three families of quarks and leptons; ask "
            "for three families, or for a fourth one"
        )


# ---- writing


def _new_fermions(request: _Request, name: str, base: Theory) -> tuple[list[Fermion], int, list[str]]:
    """Return the specified new fermions, the number of unspecified ones, and all of them in words."""
    new: list[Fermion] = []
    unknown, notes = 0, []
    for count, noun in request.additions:
        notes.append(f"{count} {noun}{'s' if count > 1 else ''}{' of any kind' if noun == _FIELD else ''}")
        if noun == _FIELD:
            unknown += count
            continue
        if noun != _NEUTRINO and name not in ("standard_model", "two_higgs_doublets"):
            raise ValueError(f"{noun}: this can only be added to the standard model, not to {name}")
        if noun == _FAMILY:
            numbers = [fermion.numbers for fermion in base.fermions]
        else:
            singlets = " ".join("0" if group.group == U1 else "singlet" for group in base.groups)
            numbers = [numbers_of(base.groups, words) for words in _NEW.get(noun, (singlets,))]
        new += [Fermion(f"new{len(new) + n}", one, count) for n, one in enumerate(numbers)]
    if len({(f.numbers, f.generations) for f in (*base.fermions, *new)}) < len(base.fermions) + len(new):
        raise ValueError(f"{', '.join(notes)}: a multiplet would occur twice; name each kind once, with its number")
    return new, unknown, notes


def _words(theory: Theory, multiplets: int) -> list[str]:
    """Return the words of a theory with another number of multiplets; it has no interactions."""
    words = write(theory).split()
    words[words.index("NUM_MULTIPLETS") + 1] = count_word(multiplets)
    return words


def _groups_only(request: _Request) -> tuple[str, str]:
    if len(request.groups) > MAX_GROUPS:
        raise ValueError(f"{len(request.groups)} gauge groups are too many; at most {MAX_GROUPS} can be written")
    shown = " x ".join(map(group_name, request.groups))
    if request.additions or request.families:
        raise ValueError(f"no fields are known for {shown}, so nothing can be added; ask for {shown} alone")
    listed = " ".join(f"GROUP group_{n} {group}" for n, group in enumerate(request.groups, 1))
    prompt = f"BOS GAUGE_GROUPS NUM_GAUGE {count_word(len(request.groups))} {listed}"
    return prompt, f"{shown}; scalars and fermions are to be found"
