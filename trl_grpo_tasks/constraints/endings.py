"""The shortest text that completes a text of a grammar, read from the grammar as xgrammar prints it.

xgrammar's matcher says which tokens may follow, but not how far the end is. So this is a second, small parser over
characters. A position is a set of stacks; a stack holds the symbols that must still be read. Symbols, stacks and
positions are kept once each, so that a step is mostly a look-up. It is used near the token limit only.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from .patterns import pattern_to_ebnf

_PART = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\])|\{(?P<low>\d+), (?P<high>-?\d+)\}|(?P<rule>[\w.-]+)'
    r"|(?P<other>\(=|[()|*])|\s+"
)
_CHARACTER = re.compile(r"\\x(..)|\\u(....)|\\U(.{8})|\\(.)|(.)", re.DOTALL)
_FREE_TEXT = re.compile(
    r"(\S+?)(\[max_tokens=\d+\])? ::= TagDispatch\(\n  loop_after_dispatch=false,\n  excludes=(.+)\n\)(?: \(=.*)?\n"
)
_PATTERN = re.compile(r'Regex\("((?:[^"\\]|\\.)*)", json_string=true\)')
_ESCAPED = dict(zip("0abtnvfre", (0, 7, 8, 9, 10, 11, 12, 13, 27), strict=True))
_MOST_STACKS = 4096  # at one position
_STEPS_KEPT = 1 << 16
_LAST = 0x10FFFF
_SURROGATES = 0xDC00  # plus a byte that is no UTF-8: the character that "surrogateescape" decodes it to

# A symbol is the name of a rule, a _Set of characters, a _Repeat, or a tuple of alternatives, which are tuples of
# symbols.
Symbol = Any
Position = tuple[frozenset[int], bytes]  # numbers of stacks that begin with a set or are empty; begun character


class UnknownGrammarError(ValueError):
    """The grammar has a construct whose texts cannot be completed here: tags with triggers, or left recursion."""


class _Set(tuple[tuple[int, int], ...]):
    """A set of characters, as ranges of code points."""


class _Repeat(tuple[Symbol, int, int]):
    """A symbol, and the least and most times that it follows; -1: any number."""


class Endings:
    """The shortest endings of the texts of a grammar, in the bytes of these tokens.

    `start` is the position before the first character. `longest` bounds the bytes of the shortest ending at any
    position; it is infinite if nesting is unbounded.

    >>> endings = Endings('root ::= (("[" root "]") | ([xy]))', [b"[", b"]]", b"y"])
    >>> endings.ending(endings.after(endings.start, b"[["))
    b'y]]'
    """

    def __init__(self, grammar: str, tokens: Iterable[bytes | None]):
        spellings = {token for token in tokens if token}
        inside = set(b"".join(spellings))
        # Bytes that are tokens come first, of these the visible ones; bytes in no token cannot be written.
        ranked = sorted(range(256), key=lambda byte: (byte not in inside, bytes([byte]) not in spellings, byte < 32))
        self._ranks = bytes(ranked.index(byte) for byte in range(256))
        self._unknown = bytes(byte for byte in range(256) if byte not in inside)
        self._rules = _rules(grammar)
        self._has_free_text = "TagDispatch(" in grammar  # which may hold bytes that are no UTF-8
        # Names of free texts with a token limit: what may follow there depends on the tokens, not only on the text.
        self._limited = tuple(f"{found[1]}/" for found in _FREE_TEXT.finditer(grammar) if found[2])
        self.limits_tokens = bool(self._limited)
        self._shortest = self._shortest_texts()
        self.longest = self._longest_ending()
        self._stacks: list[tuple[Symbol, int]] = [((), 0)]  # first symbol and the number of the rest; 0: empty
        self._texts: list[bytes | None] = [b""]  # the shortest text of each stack
        self._numbers: dict[tuple[Symbol, int], int] = {}
        self._step = lru_cache(_STEPS_KEPT)(self._step_new)
        self.ending = lru_cache(_STEPS_KEPT)(self._ending)
        self.start: Position = (self._opened([self._pushed("root", 0)]), b"")
        self._places: dict[bytes, Position | None] = {b"": self.start}  # positions after texts

    def at(self, text: bytes) -> Position | None:
        """Return the position after a text from the start. Texts are best asked for in the order they grow."""
        known = len(text)
        while known and text[:known] not in self._places:
            known -= 1
        position = self.after(self._places[text[:known]], text[known:])
        if len(self._places) >= _STEPS_KEPT:
            self._places = {b"": self.start}
        self._places[text] = position
        return position

    def after(self, position: Position | None, spelling: bytes) -> Position | None:
        """Return the position after these bytes, or None if no text has them here."""
        if position is None:
            return None
        stacks, begun = position
        try:
            errors = "surrogateescape" if self._has_free_text else "surrogatepass"
            text, used = codecs.utf_8_decode(begun + spelling, errors, False)
        except UnicodeDecodeError:
            return None
        for character in text:
            stacks = self._step(stacks, ord(character))
            if not stacks:
                return None
        return stacks, (begun + spelling)[used:]

    def counts_tokens(self, position: Position | None) -> bool:
        """Whether a text whose tokens are counted may be going on here."""
        rests = (self._stacks[self._stacks[number][1]][0] for number in position[0]) if position else ()
        return any(isinstance(symbol, str) and symbol.startswith(self._limited) for symbol in rests)

    def _ending(self, position: Position | None) -> bytes | None:
        if position is None:
            return None
        stacks, begun = position
        if not begun:
            return self._first(self._texts[number] for number in stacks)
        escaped = stacks if self._has_free_text else frozenset()
        for byte in begun:
            escaped = self._step(escaped, _SURROGATES + byte)
        found = [self._first(self._texts[number] for number in escaped)]
        for number in stacks - {0}:
            characters, rest = self._stacks[number]
            if (after := self._texts[rest]) is not None and (least := _least_with(characters, begun)) is not None:
                found.append(least[len(begun) :] + after)
        return self._first(found)

    def _first(self, texts: Iterable[bytes | None]) -> bytes | None:
        known = (text for text in texts if text is not None)
        return min(known, key=lambda text: (len(text), text.translate(self._ranks)), default=None)

    def _step_new(self, stacks: frozenset[int], code: int) -> frozenset[int]:
        reached = []
        for number in stacks - {0}:
            characters, rest = self._stacks[number]
            if any(low <= code <= high for low, high in characters):
                reached.append(rest)
        return self._opened(reached)

    def _opened(self, stacks: Iterable[int]) -> frozenset[int]:
        """Replace rules at the beginning of stacks by what they stand for."""
        found, todo, done = set(), list(stacks), set()
        while todo:
            number = todo.pop()
            if number in done or self._texts[number] is None:
                continue
            done.add(number)
            if len(done) > _MOST_STACKS:
                raise UnknownGrammarError("a rule begins with itself")
            symbol, rest = self._stacks[number]
            if number == 0 or isinstance(symbol, _Set):
                found.add(number)
            elif isinstance(symbol, _Repeat):
                inner, low, high = symbol
                if low == 0:
                    todo.append(rest)
                if high != 0:
                    left = _Repeat((inner, max(low - 1, 0), high - 1 if high > 0 else high))
                    todo.append(self._pushed(inner, self._pushed(left, rest)))
            else:
                for symbols in self._alternatives(symbol):
                    number = rest
                    for part in reversed(symbols):
                        number = self._pushed(part, number)
                    todo.append(number)
        return frozenset(found)

    def _pushed(self, symbol: Symbol, rest: int) -> int:
        number = self._numbers.get((symbol, rest))
        if number is None:
            number = self._numbers[symbol, rest] = len(self._stacks)
            self._stacks.append((symbol, rest))
            self._texts.append(_joined([self._text_of(symbol), self._texts[rest]]))
        return number

    def _alternatives(self, symbol: Symbol) -> tuple[tuple[Symbol, ...], ...]:
        return self._rules[symbol] if isinstance(symbol, str) else symbol

    def _text_of(self, symbol: Symbol) -> bytes | None:
        """Return the shortest text of a symbol; None if it has none, or none is known yet."""
        if isinstance(symbol, str):
            return self._shortest.get(symbol)
        if isinstance(symbol, _Set):
            lows = [_encoded(low) for low, _ in symbol]
            plain = [bytes([code]) for low, high in symbol for code in range(low, min(high, 127) + 1)]
            return self._first(text for text in lows + plain if text == text.translate(None, self._unknown))
        if isinstance(symbol, _Repeat):
            inner = b"" if symbol[1] == 0 else self._text_of(symbol[0])
            return None if inner is None else inner * symbol[1]
        return self._first(_joined([self._text_of(part) for part in parts]) for parts in symbol)

    def _shortest_texts(self) -> dict[str, bytes]:
        self._shortest, before = {}, None
        while before != self._shortest:
            before = dict(self._shortest)
            for name, alternatives in self._rules.items():
                text = self._text_of(alternatives)
                if text is not None:
                    self._shortest[name] = text
        return self._shortest

    def _longest_ending(self) -> float:
        used = ["root"]
        for name in used:
            used += [other for other in dict.fromkeys(_names(self._rules[name])) if other not in used]
        longest = dict.fromkeys(used, 0.0)  # after the beginning of each rule, without what follows the rule

        def within(symbol: Symbol) -> float:
            if isinstance(symbol, str):
                return longest[symbol]
            if isinstance(symbol, _Set):
                return max((len(_encoded(high)) - 1 for _, high in symbol), default=0)
            if isinstance(symbol, _Repeat):
                inner, low, high = symbol
                return within(inner) + len(self._text_of(inner) or b"") * max(low - 1, 0) if high else 0
            lengths = [0.0]
            for parts in symbol:
                texts = [self._text_of(part) for part in parts]
                if None not in texts:
                    left = sum(len(text) for text in texts if text is not None)
                    for part, text in zip(parts, texts, strict=True):
                        left -= len(text or b"")
                        lengths.append(within(part) + left)
            return max(lengths)

        for _ in range(len(longest) + 1):
            before, longest = longest, {name: within(self._rules[name]) for name in longest}
            if before == longest:
                return max(longest["root"], len(self._shortest.get("root", b"")))
        return math.inf  # a rule contains itself, with something after it


class _Parser:
    """Reads the body of a rule."""

    def __init__(self, body: str):
        self._parts, at = [], 0
        while at < len(body) and (found := _PART.match(body, at)) is not None:
            if found["other"] == "(=":  # a look-ahead, which xgrammar only uses to compile masks
                break
            if found.lastgroup is not None:
                self._parts.append(found)
            at = found.end()
        else:
            if at < len(body):
                raise UnknownGrammarError(f"unknown construct {body[at : at + 40]!r}")
        self._at = 0

    def alternatives(self) -> tuple[tuple[Symbol, ...], ...]:
        found: list[list[Symbol]] = [[]]
        while self._at < len(self._parts) and self._parts[self._at]["other"] != ")":
            part = self._parts[self._at]
            self._at += 1
            if part["other"] == "|":
                found.append([])
            elif part["other"] == "(":
                found[-1].append(self.alternatives())
                self._at += 1
            elif part["text"]:
                found[-1] += [_Set([(code, code)]) for code in _codes(part["text"][1:-1])]
            elif part["set"]:
                found[-1].append(_set_of(part["set"]))
            elif part["rule"]:
                found[-1].append(part["rule"])
            else:
                low, high = (0, -1) if part["other"] == "*" else (int(part["low"]), int(part["high"]))
                found[-1].append(_Repeat((found[-1].pop(), low, high)))
        return tuple(map(tuple, found))


def _rules(grammar: str) -> dict[str, tuple[tuple[Symbol, ...], ...]]:
    """Return the alternatives of each rule."""
    rules: dict[str, tuple[tuple[Symbol, ...], ...]] = {}
    for name, _, excluded in _FREE_TEXT.findall(grammar):
        texts = [part["text"][1:-1] for part in _PART.finditer(excluded) if part["text"]]
        rules |= _text_without(name, ["".join(map(chr, _codes(text))) for text in texts])
    for line in filter(None, _FREE_TEXT.sub("", grammar).splitlines()):
        name, found, body = line.partition(" ::= ")
        if not found or "TagDispatch(" in body:
            raise UnknownGrammarError(f"unknown construct {line[:40]!r}")
        if (pattern := _PATTERN.match(body)) is None:
            rules[name] = _Parser(body).alternatives()
        else:
            import xgrammar

            written = "".join(map(chr, _codes(pattern[1])))
            parsed = xgrammar.Grammar.from_ebnf(pattern_to_ebnf(f"(?a){written}"))  # its classes are those of ASCII
            rules |= {f"{name}/{inner}": _in_json(symbol, name) for inner, symbol in _rules(str(parsed)).items()}
            rules[name] = ((f"{name}/root",),)
    return rules


def _text_without(name: str, excluded: list[str]) -> dict[str, tuple[tuple[Symbol, ...], ...]]:
    """Return rules for any text that contains none of these: one for each beginning of these with which it can end."""
    beginnings = {text[:length] for text in excluded for length in range(len(text))}
    used = sorted(set(map(ord, "".join(excluded))))
    gaps = zip([-1, *used], [*used, _LAST + 1], strict=True)
    others = _Set((before + 1, after - 1) for before, after in gaps if before + 1 < after)
    rules = {}
    for end in beginnings:
        parts: list[tuple[Symbol, ...]] = [(), (others, f"{name}/")]
        for code in used:
            text = end + chr(code)
            if not text.endswith(tuple(excluded)):
                after = next(text[at:] for at in range(len(text) + 1) if text[at:] in beginnings)
                parts.append((_Set([(code, code)]), f"{name}/{after}"))
        rules[f"{name}/{end}"] = tuple(parts)
    return rules | {name: ((f"{name}/",),)}


def _in_json(symbol: Symbol, name: str) -> Any:
    """Return a symbol of a pattern within a JSON string, whose rules are named after the rule of the pattern."""
    if isinstance(symbol, str):
        return f"{name}/{symbol}"
    if isinstance(symbol, _Set):
        cuts = ((0x20, 0x21), (0x23, 0x5B), (0x5D, _LAST))  # without control characters, quotes and backslashes
        parts = ((max(low, first), min(high, last)) for low, high in symbol for first, last in cuts)
        return _Set((low, high) for low, high in parts if low <= high)
    if isinstance(symbol, _Repeat):
        return _Repeat((_in_json(symbol[0], name), *symbol[1:]))
    return tuple(_in_json(part, name) for part in symbol)


def _names(symbol: Symbol) -> Iterator[str]:
    """Return the names of rules in a symbol."""
    if isinstance(symbol, str):
        yield symbol
    elif not isinstance(symbol, _Set):
        for part in symbol[:1] if isinstance(symbol, _Repeat) else symbol:
            yield from _names(part)


def _codes(written: str) -> list[int]:
    found = []
    for x, u, long, escaped, plain in _CHARACTER.findall(written):
        number = x or u or long
        found.append(int(number, 16) if number else _ESCAPED.get(escaped, ord(escaped or plain)))
    return found


def _set_of(written: str) -> _Set:
    inside = written[1:-1]
    is_negated = inside.startswith("^")
    units = [found[0] for found in _CHARACTER.finditer(inside[is_negated:])]
    ranges, at = [], 0
    while at < len(units):
        is_range = units[at + 1 : at + 2] == ["-"] and at + 2 < len(units)
        low, high = _codes(units[at])[0], _codes(units[at + 2 if is_range else at])[0]
        ranges.append((low, high))
        at += 3 if is_range else 1
    if is_negated:
        excluded, ranges, low = sorted(ranges), [], 0
        for first, last in excluded:
            ranges.append((low, first - 1))
            low = max(low, last + 1)
        ranges.append((low, _LAST))
    return _Set((low, high) for low, high in ranges if low <= high)


def _least_with(characters: _Set, begun: bytes) -> bytes | None:
    """Return the first character of a set whose bytes begin so."""
    size = 2 if begun[0] < 0xE0 else 3 if begun[0] < 0xF0 else 4
    bits = 6 * (size - len(begun))
    value = begun[0] & (0x7F >> size)
    for byte in begun[1:]:
        value = value << 6 | byte & 0x3F
    least = max(value << bits, (0, 0, 0x80, 0x800, 0x10000)[size])
    codes = [max(low, least) for low, high in characters if max(low, least) <= min(high, (value + 1 << bits) - 1)]
    return _encoded(min(codes)) if codes else None


def _encoded(code: int) -> bytes:
    return chr(code).encode("utf-8", "surrogatepass")  # xgrammar's negated sets contain surrogates


def _joined(texts: Iterable[bytes | None]) -> bytes | None:
    found = list(texts)
    return None if None in found else b"".join(found)  # type: ignore[arg-type]
