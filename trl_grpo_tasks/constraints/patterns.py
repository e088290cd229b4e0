"""Regular expressions as EBNF: exactly the texts that `regex.fullmatch` accepts, or an error that names the construct.

Each set of characters is computed by the `regex` package itself, so that classes, properties and flags mean the same
in a constraint as in a reward.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

_START, _END = ("^", r"\A"), ("$", r"\Z", r"\z")
_FLAGS = "ismau"
_GLOBAL_FLAGS = re.compile(r"\(\?([a-zA-Z0-9]+)\)")
_GROUP = re.compile(r"\((?:\?P?<[A-Za-z_]\w*>|\?(?P<on>[a-zA-Z0-9]*)(?:-(?P<off>[a-zA-Z]+))?:|(?![?*]))")
_REPEAT = re.compile(r"[*+?]|\{(?=[0-9,])(?P<low>[0-9]*)(?P<comma>,?)(?P<high>[0-9]*)\}")
_ONE_CHARACTER = re.compile(
    r"\[\^?\]?(?:\[:\^?[\w=]+:\]|\\.|[^\]\\])*\]|\\(?:[dDsSwWafnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}"
    r"|0[0-7]{0,2}|N\{[^}]+\}|[pP](?:\{[^}]+\}|[A-Z])|[^0-9A-Za-z])",
    re.DOTALL,
)
_UNSUPPORTED = {
    "(?=": "a lookahead", "(?!": "a lookahead", "(?<=": "a lookbehind", "(?<!": "a lookbehind",
    "(?>": "an atomic group", "(?(": "a conditional group", "(?P=": "a backreference", "(?|": "a branch reset",
    "(?#": "a comment", "(?R": "recursion", "(?P>": "recursion", "(?&": "recursion", "(*": "a backtracking verb",
    r"\b": "a word boundary", r"\B": "a word boundary", r"\m": "a word boundary", r"\M": "a word boundary",
    r"\g": "a backreference", **{rf"\{digit}": "a backreference" for digit in range(1, 10)},
}  # fmt: skip


def pattern_to_ebnf(pattern: str) -> str:
    """Return xgrammar's EBNF for the texts that `regex.fullmatch(pattern, text)` accepts.

    Classes such as `\\d` and `\\w` contain all of Unicode, unless the pattern begins with `(?a)`. ValueError, with a
    way out, for an invalid pattern and for constructs that are not regular, such as a lookahead or a backreference.
    """
    import regex

    try:
        regex.compile(pattern)
        return f"root ::= {_Parser(pattern).ebnf()}"
    except regex.error as error:
        raise ValueError(f"invalid regex: {error}: {pattern!r:.200}") from error
    except RecursionError as error:
        raise ValueError(f"invalid regex: nested too deeply: {pattern!r:.200}") from error


class _Anchor(NamedTuple):
    text: str


class _Repeat(NamedTuple):
    node: Any
    low: int
    high: int | None


class _Parser:
    """A recursive-descent parser of a pattern that `regex` can compile.

    A node is an _Anchor, a _Repeat, a set of characters as EBNF text, or a list of alternatives, which are lists of
    nodes.
    """

    def __init__(self, pattern: str):
        self._pattern, self._at, self._flags = pattern, 0, frozenset[str]()

    def ebnf(self) -> str:
        while found := _GLOBAL_FLAGS.match(self._pattern, self._at):
            self._flags |= self._checked_flags(found[1])
            self._at = found.end()
        return self._alternatives_ebnf(self._alternatives(), is_first=True, is_last=True)

    def _alternatives(self) -> list[list[Any]]:
        alternatives: list[list[Any]] = [[]]
        while self._at < len(self._pattern) and self._pattern[self._at] != ")":
            if self._pattern[self._at] == "|":
                self._at += 1
                alternatives.append([])
            else:
                alternatives[-1].append(self._repeated(self._atom()))
        return alternatives

    def _atom(self) -> Any:
        character = self._pattern[self._at]
        for anchor in (*_START, *_END):
            if self._pattern.startswith(anchor, self._at):
                self._at += len(anchor)
                return _Anchor(anchor)
        if character == "(":
            return self._group()
        if character in "[\\":
            found = _ONE_CHARACTER.match(self._pattern, self._at)
            if found is None:
                self._refuse_construct()
            written = found[0]
        elif re.match(r"\{\s*[0-9,eids<]", self._pattern[self._at :]):
            self._refuse("a '{' that may begin a fuzzy match", r"write \{ for the character")
        else:
            written = character
        if {"a", "i"} <= self._flags:  # in `regex`, a search finds other characters than a match then
            self._refuse("the flags a and i together", "write out the letters of both cases")
        self._at += len(written)
        ranges = character_ranges(written if character in "[\\." else re.escape(written), self._flags)
        if not ranges:
            self._refuse(f"the set {written}, which contains no character")
        return _set_ebnf(ranges)

    def _group(self) -> list[list[Any]]:
        found = _GROUP.match(self._pattern, self._at)
        if found is None:
            self._refuse_construct()
        outer = self._flags
        self._flags = (outer | self._checked_flags(found["on"] or "")) - self._checked_flags(found["off"] or "")
        self._at = found.end()
        alternatives = self._alternatives()
        self._at += 1  # the closing parenthesis
        self._flags = outer
        return alternatives

    def _repeated(self, node: Any) -> Any:
        found = _REPEAT.match(self._pattern, self._at)
        if found is None:
            return node
        self._at = found.end()
        following = self._pattern[self._at : self._at + 1]
        if following == "+":
            self._refuse(f"the possessive quantifier {found[0]}+", f"write {found[0]}")
        if following == "?":  # lazy, which matches the same texts
            self._at += 1
        if isinstance(node, _Anchor):
            self._refuse(f"a repeated {node.text}")
        if found[0] in "*+?":
            return _Repeat(node, int(found[0] == "+"), 1 if found[0] == "?" else None)
        low = int(found["low"] or 0)
        high = low if not found["comma"] else int(found["high"]) if found["high"] else None
        return _Repeat(node, low, high)

    def _alternatives_ebnf(self, alternatives: list[list[Any]], is_first: bool, is_last: bool) -> str:
        """Return EBNF; `is_first` and `is_last`: nothing can stand before or after, so that anchors hold there."""
        return " | ".join(self._sequence_ebnf(nodes, is_first, is_last) for nodes in alternatives)

    def _sequence_ebnf(self, nodes: list[Any], is_first: bool, is_last: bool) -> str:
        parts = []
        for index, node in enumerate(nodes):
            first = is_first and all(isinstance(before, _Anchor) for before in nodes[:index])
            last = is_last and all(isinstance(after, _Anchor) for after in nodes[index + 1 :])
            if not isinstance(node, _Anchor):
                parts.append(self._node_ebnf(node, first, last))
            elif not (first if node.text in _START else last):
                self._refuse(f"{node.text} inside the pattern", "remove it, because the whole text must match anyway")
        return " ".join(parts) or '""'

    def _node_ebnf(self, node: Any, is_first: bool, is_last: bool) -> str:
        if isinstance(node, _Repeat):
            once = node.high is not None and node.high <= 1
            inner = self._node_ebnf(node.node, is_first and once, is_last and once)
            brief = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.low, node.high))
            return inner + (brief or f"{{{node.low},{'' if node.high is None else node.high}}}")
        return node if isinstance(node, str) else f"({self._alternatives_ebnf(node, is_first, is_last)})"

    def _checked_flags(self, letters: str) -> frozenset[str]:
        if unknown := set(letters) - set(_FLAGS):
            self._refuse(f"the flag {min(unknown)!r}", f"use only the flags {', '.join(_FLAGS)}")
        return frozenset(letters)

    def _refuse_construct(self) -> NoReturn:
        rest = self._pattern[self._at : self._at + 4]
        names = [f"{name} ({rest})" for start, name in _UNSUPPORTED.items() if rest.startswith(start)]
        self._refuse(names[0] if names else f"{rest!r}")

    def _refuse(self, construct: str, hint: str = "rewrite the pattern without it") -> NoReturn:
        raise ValueError(
            f"a constraint cannot enforce {construct} in the regular expression {self._pattern!r:.200}; "
            f"{hint}, or do without the constraint (--constrain false), so that only the reward checks the pattern"
        )


@lru_cache(maxsize=1024)
def character_ranges(written: str, flags: frozenset[str]) -> tuple[tuple[int, int], ...]:
    """Return the code points, as (first, last), that an expression for one character matches; without surrogates."""
    import regex

    prefix = f"(?{''.join(sorted(flags))})" if flags else ""
    found = []
    for run in regex.finditer(f"{prefix}(?:{written})+", _every_character()):
        first, last = run.start(), run.end() - 1  # positions are code points
        found += [(first, min(last, 0xD7FF)), (max(first, 0xE000), last)]
    return tuple((first, last) for first, last in found if first <= last)


@lru_cache(maxsize=1)
def _every_character() -> str:
    return "".join(map(chr, range(0x110000)))


def _set_ebnf(ranges: tuple[tuple[int, int], ...]) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return f'"\\U{ranges[0][0]:08x}"'
    return "[" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges) + "]"
