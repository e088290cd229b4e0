"""Think, then answer: free text up to a marker, then an answer under any constraint.

The first marker *end* in the bytes of a completion ends the thought, however it is tokenized. So a token may end the
marker and begin the answer; it is allowed if some answer begins with what it holds after the marker (the *remainder*).
A partial marker that is not continued is ordinary text, which an Aho-Corasick automaton over bytes finds out.

For each state of the automaton, a table holds what every token of the vocabulary does, and a mask is a look-up in it.
A mask depends only on the state, on the remainders that begin an answer of the row, and near a length limit on the
tokens left. So there are few masks, and rows share them.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from .base import AnswerConstraint, Bounded, FreeText, State, pack, pack_ids, read_only
from .vocabulary import Vocabulary, special_ids

THINK_END = "</think>"
_ROW_CACHE = 1024
_MASK_CACHE = 4096
_HIT = -1  # instead of the next state of the automaton: a marker ends

Marker = str | int


class ThinkThen:
    """A constraint of two parts: a thought of free text that ends with a marker, then an answer under `constraint`.

    A thought contains no end-of-sequence, special or empty token. Rows that `constraint` leaves unconstrained have a
    free answer, as have all rows if it is None.

    Args:
        markers: One marker or several, of which the first that occurs ends the thought. A marker is a text. A special
            token, given as its text or id, is recognised by its id, because decoding leaves it out.
        least_tokens: The marker does not end within so many first tokens.
        most_tokens: The marker ends within so many first tokens. None means any number.

    >>> vocabulary = Vocabulary([b"a", b"#", b"1", b"#1", b"#2", None], eos=5)
    >>> from trl_grpo_tasks.constraints import ChoiceTreeConstraint, unpack
    >>> answer = ChoiceTreeConstraint(vocabulary, lambda row: 0, lambda node: [("1", None)])
    >>> state = ThinkThen(vocabulary, answer, "##").start({})
    >>> state.accept(1)
    >>> [vocabulary.bytes_of[id] for id in np.flatnonzero(unpack(state.mask(), 6))]
    [b'a', b'#', b'1', b'#1']
    """

    def __init__(
        self,
        tokenizer: Any,
        constraint: AnswerConstraint | None,
        markers: Marker | Sequence[Marker] = THINK_END,
        *,
        least_tokens: int = 0,
        most_tokens: int | None = None,
    ):
        if constraint is not None and not hasattr(constraint, "start_after"):
            raise TypeError(
                f"{type(constraint).__name__} cannot follow a thought, because it has no start_after(row, remainder); "
                "use a GrammarConstraint, a ChoiceTreeConstraint or OneSpelling of one of them"
            )
        if least_tokens < 0 or (most_tokens is not None and most_tokens <= least_tokens):
            raise ValueError(
                f"least_tokens={least_tokens}, most_tokens={most_tokens}: a thought needs 0 <= least_tokens < "
                "most_tokens; the token that ends the marker counts"
            )
        self.vocabulary = Vocabulary.of(tokenizer)
        self.vocab_size = self.vocabulary.size
        self.constraint = constraint
        self.markers = _checked_markers(tokenizer, [markers] if isinstance(markers, Marker) else markers)
        self.least_tokens, self.most_tokens = least_tokens, most_tokens
        self.moves = _Moves(self.vocabulary, self.markers)
        self._thoughts: dict[Hashable, Thoughts] = Bounded(_ROW_CACHE)  # by the origin of the answer
        self._thoughts_of = lru_cache(_ROW_CACHE)(self._thoughts_new)
        text = [id for id, spelling in enumerate(self.vocabulary.bytes_of) if spelling]
        self._free_mask = read_only(pack_ids([*text, self.vocabulary.eos], self.vocab_size))

    def __reduce__(self) -> Any:  # without the tables and caches
        make = partial(ThinkThen, least_tokens=self.least_tokens, most_tokens=self.most_tokens)
        return make, (self.vocabulary, self.constraint, self.markers)

    def start(self, row: Mapping[str, Any]) -> ThinkState:
        """Return the state at the beginning of the thought. ValueError if no thought of the row can end."""
        answer = self.answer(row, b"")
        origin = getattr(answer, "origin", None)
        thoughts = None if origin is None else self._thoughts.get(origin)
        if thoughts is None:
            thoughts = self._thoughts_of(self._viable(row))
            if origin is not None:
                self._thoughts[origin] = thoughts
        limits = (self.markers, self.least_tokens, self.most_tokens)
        return ThinkState(self, thoughts, row, None if origin is None else (origin, *limits))

    def answer(self, row: Mapping[str, Any], remainder: bytes | None) -> State | None:
        """Return the state of an answer that begins with `remainder`, or None if no answer does.

        A remainder of None means that the answer is a text of its own: a special token precedes it.
        """
        inner = self.constraint
        if inner is not None:
            state = inner.start(row) if remainder is None else inner.start_after(row, remainder)
            if state is not None or inner.start(row) is not None:
                return state
        return FreeText(self._free_mask, self.vocabulary.eos)

    def thought_length(self, token_ids: Sequence[int]) -> int | None:
        """Return the number of tokens of a completion up to the one in which the marker ends, or None without one."""
        at = self.moves.start
        for count, token in enumerate(token_ids, 1):
            at = self.moves.code(at, token)
            if at >= self.moves.no_text:
                return count if at > self.moves.no_text else None
        return None

    def _viable(self, row: Mapping[str, Any]) -> frozenset[int]:
        """Return the codes of the remainders with which an answer of the row begins."""
        begins: dict[bytes, bool] = {}  # by first byte, because most remainders fail there
        viable = []
        for code, remainder in self.moves.remainders.items():
            if remainder:
                first = remainder[:1]
                if first not in begins:
                    begins[first] = self.answer(row, first) is not None
                if not begins[first]:
                    continue
            if self.answer(row, remainder) is not None:
                viable.append(code)
        return frozenset(viable)

    def _thoughts_new(self, viable: frozenset[int]) -> Thoughts:
        thoughts = Thoughts(self.moves, viable, self.least_tokens, self.most_tokens)
        if not thoughts.can_end:
            limit = "" if self.most_tokens is None else f" within {self.most_tokens} tokens"
            raise ValueError(
                f"no thought can end with {' or '.join(map(repr, self.markers))}{limit}: the tokenizer cannot write "
                "it so; choose another marker or a larger most_tokens"
            )
        return thoughts


class ThinkState:
    """The position of one completion: the state of the marker automaton, or the state of the answer after it."""

    __slots__ = ("_answer", "_at", "_constraint", "_count", "_row", "_thoughts", "origin")

    def __init__(self, constraint: ThinkThen, thoughts: Thoughts, row: Mapping[str, Any], origin: Hashable):
        self._constraint, self._thoughts, self._row, self.origin = constraint, thoughts, row, origin
        self._at = constraint.moves.start
        self._count = 0  # tokens of the thought so far
        self._answer: Any = None  # the state of the answer; None while thinking

    @property
    def finished(self) -> bool:
        return self._answer is not None and self._answer.finished

    @property
    def is_thinking(self) -> bool:
        """Whether the marker has not ended yet."""
        return self._answer is None

    @property
    def position(self) -> Hashable | None:
        return (self.origin, self._at, self._count) if self._answer is None else self._answer.position

    @property
    def vocabulary(self) -> Vocabulary:
        return self._constraint.vocabulary

    @property
    def room(self) -> int:
        """The most tokens that the shortest rest of a thought can take, without the answer."""
        return self._thoughts.furthest

    def answers(self) -> dict[int, Any]:
        """Return the states of answers by the code of the marker end before them."""
        moves, answer = self._constraint.moves, self._constraint.answer
        return {code: answer(self._row, moves.remainders[code]) for code in self._thoughts.viable}

    def fewest(self, answers: Mapping[int, float]) -> float:
        """Return the tokens of the shortest rest of the thought and its answer, whose tokens are given by code."""
        best, states, taken = math.inf, {self._at}, 0
        while taken + 1 < best and taken <= self._thoughts.furthest:
            codes = set().union(*(self._constraint.moves.reached[at] for at in states))
            codes &= self._thoughts.allowed(self._count + taken)
            taken += 1
            best = min([best, *(taken + answers[code] for code in codes if code in answers)])
            states = {code for code in codes if code < self._constraint.moves.no_text}
        return best

    def alike(self, tokens: Sequence[int]) -> Iterable[Sequence[int]]:
        if self._answer is not None:
            return self._answer.alike(tokens)
        codes, ids = self._constraint.moves.codes_R_V[self._at, tokens], np.array(tokens)
        return [ids[codes == code] for code in np.unique(codes)]

    def endings(self) -> Iterable[bytes]:
        return self._answer.endings()

    def fork(self) -> ThinkState:
        forked = copy.copy(self)
        forked._answer = None if self._answer is None else self._answer.fork()
        return forked

    def mask(self) -> np.ndarray:
        return self._thoughts.mask(self._at, self._count) if self._answer is None else self._answer.mask()

    def accept(self, token: int) -> None:
        if self._answer is not None:
            self._answer.accept(token)
            return
        code = self._thoughts.move(self._at, self._count, token)
        self._count += 1
        if code < self._constraint.moves.no_text:
            self._at = code
        else:
            self._answer = self._constraint.answer(self._row, self._constraint.moves.remainders[code])


class Thoughts:
    """The masks of thoughts after which an answer may begin with the remainders `viable` (codes of `_Moves`)."""

    def __init__(self, moves: _Moves, viable: frozenset[int], least_tokens: int, most_tokens: int | None):
        self._moves, self._least, self._most = moves, least_tokens, most_tokens
        # Entry n: the states from which a thought can end within n tokens; below, with the ends themselves.
        self._within = [frozenset[int]()]
        while not self._within[1:] or self._within[-1] != self._within[-2]:
            ends = viable | self._within[-1]
            self._within.append(frozenset(at for at, codes in enumerate(moves.reached) if codes & ends))
        self._within_or_end = [states | viable for states in self._within]
        # The states in which the thought may be too short to end: one token before `least_tokens`, two before, ...
        self._early: list[frozenset[int]] = []
        after = self._within[self._slack(least_tokens)]
        while len(self._early) < least_tokens:
            before = frozenset(at for at, codes in enumerate(moves.reached) if codes & after)
            self._early.append(before)
            if before == after:  # so are all those before
                break
            after = before
        self._masks: dict[tuple[int, frozenset[int]], np.ndarray] = Bounded(_MASK_CACHE)
        self.viable, self.furthest = viable, least_tokens + len(self._within)
        self.can_end = moves.start in self._open(0)

    def mask(self, at: int, count: int) -> np.ndarray:
        """Return the read-only packed mask in a state of the automaton after `count` tokens."""
        key = (at, self.allowed(count))
        words = self._masks.get(key)
        if words is None:
            words = self._masks[key] = self._moves.mask(*key)
        return words

    def move(self, at: int, count: int, token: int) -> int:
        """Return the code of a token after `count` tokens. Raises ValueError if the token is not allowed."""
        code = self._moves.code(at, token)
        if code not in self.allowed(count):
            raise ValueError(
                f"token {token} is not allowed here: the thought may not end so, or could not end within its length"
            )
        return code

    def allowed(self, count: int) -> frozenset[int]:
        """Return the codes of tokens that may follow after `count` tokens."""
        if count < self._least:
            return self._open(count + 1)
        return self._within_or_end[self._slack(count + 1)]

    def _open(self, count: int) -> frozenset[int]:
        """Return the states after `count` tokens from which the thought can still end as it should."""
        if count < self._least:
            return self._early[min(self._least - count, len(self._early)) - 1]
        return self._within[self._slack(count)]

    def _slack(self, count: int) -> int:
        """Return the number of tokens within which a thought of `count` tokens must end, or one that changes nothing
        if it is larger."""
        furthest = len(self._within) - 1
        return furthest if self._most is None else min(self._most - count, furthest)


class _Moves:
    """What each token does in each state of the marker automaton.

    `codes_R_V[at, token]` is a code: the next state if it is below `no_text`; `no_text` for a token that no thought
    contains; above it a marker end, after which the token holds `remainders[code]` (None: the token is the marker, and
    has no text). `start` is the state at the beginning of a text. `reached` holds the codes of each state, as sets.
    """

    def __init__(self, vocabulary: Vocabulary, markers: Sequence[Marker]):
        delta = _automaton([marker.encode() for marker in markers if isinstance(marker, str)])
        states = len(delta)
        is_stripped = vocabulary.strips_leading_space
        self.start = states if is_stripped else 0
        self.no_text = states + is_stripped
        codes: dict[bytes | None, int] = {}  # by remainder

        def walk(at: int, spelling: bytes) -> int:
            for place, byte in enumerate(spelling, 1):
                at = delta[at][byte]
                if at == _HIT:
                    return codes.setdefault(spelling[place:], self.no_text + 1 + len(codes))
            return at

        text = [(id, spelling) for id, spelling in enumerate(vocabulary.bytes_of) if spelling]
        by_first: dict[int, list[tuple[int, bytes]]] = {}
        for id, spelling in text:
            by_first.setdefault(spelling[0], []).append((id, spelling))
        self.codes_R_V = np.full((self.no_text, vocabulary.size), self.no_text, dtype=np.int32)
        for id, spelling in text:
            self.codes_R_V[0, id] = walk(0, spelling)
        for at in range(1, self.no_text):
            self.codes_R_V[at] = self.codes_R_V[0]
        for at in range(1, states):
            # A token does the same as in state 0 unless its first byte leads elsewhere.
            for byte in (byte for byte in by_first if delta[at][byte] != delta[0][byte]):
                for id, spelling in by_first[byte]:
                    self.codes_R_V[at, id] = walk(at, spelling)
        if is_stripped:  # decoding drops the first space of the text
            for id, spelling in by_first.get(ord(" "), ()):
                self.codes_R_V[self.start, id] = walk(0, spelling[1:])
            self.codes_R_V[self.start, sorted(vocabulary.not_first)] = self.no_text
        special = [marker for marker in markers if isinstance(marker, int)]
        if special:
            self.codes_R_V[:, special] = codes.setdefault(None, self.no_text + 1 + len(codes))
        self.remainders = {code: remainder for remainder, code in codes.items()}
        self.reached = [frozenset(np.unique(codes_V).tolist()) for codes_V in self.codes_R_V]

    def code(self, at: int, token: int) -> int:
        """Return the code of a token, which may be any number."""
        return int(self.codes_R_V[at, token]) if 0 <= token < self.codes_R_V.shape[1] else self.no_text

    def mask(self, at: int, allowed: Iterable[int]) -> np.ndarray:
        """Return the read-only packed mask of the tokens with these codes."""
        is_allowed = np.zeros(self.no_text + 1 + len(self.remainders), dtype=bool)
        is_allowed[list(allowed)] = True
        return read_only(pack(is_allowed[self.codes_R_V[at]]))


def split_thought(text: str, markers: Sequence[str]) -> tuple[str, str | None]:
    """Return the thought, without the marker that ends it, and the answer; the answer is None without a marker.

    >>> split_thought("6 * 7 is 42. #### 42", ["####"])
    ('6 * 7 is 42. ', ' 42')
    """
    found = [(at + len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return text, None
    end, marker = min(found)
    return text[: end - len(marker)], text[end:]


def _checked_markers(tokenizer: Any, markers: Sequence[Marker]) -> tuple[Marker, ...]:
    """Return the markers, special tokens as ids. Raises ValueError for markers that cannot be recognised."""
    if not markers:
        raise ValueError("a thought needs a marker that ends it, such as '</think>' or '####'")
    vocabulary = Vocabulary.of(tokenizer)
    special: dict[str, int] = {}
    if tokenizer is not vocabulary:
        special = {tokenizer.convert_ids_to_tokens(id): id for id in special_ids(tokenizer)}
    checked = tuple(dict.fromkeys(special.get(m, m) if isinstance(m, str) else m for m in markers))
    for marker in checked:
        if isinstance(marker, int):
            if not 0 <= marker < vocabulary.size or vocabulary.bytes_of[marker] is not None:
                raise ValueError(
                    f"marker {marker} is not the id of a special token; give a marker that is text as text"
                )
            if marker == vocabulary.eos:
                raise ValueError("the end-of-sequence token cannot end a thought, because generation stops there")
        elif not marker:
            raise ValueError("a marker must not be empty; give a text such as '</think>' or '####'")
    texts = [marker for marker in checked if isinstance(marker, str)]
    for marker in texts:
        if inner := [other for other in texts if other != marker and other in marker]:
            raise ValueError(
                f"marker {marker!r} contains marker {inner[0]!r}, so that it could never end a thought; leave one out"
            )
    return checked


def _automaton(markers: Sequence[bytes]) -> list[list[int]]:
    """Return the next state of the Aho-Corasick automaton by state and byte; _HIT where a marker ends.

    No marker may contain another one.
    """
    children: list[dict[int, int]] = [{}]
    for marker in markers:
        at = 0
        for byte in marker[:-1]:
            if byte not in children[at]:
                children[at][byte] = len(children)
                children.append({})
            at = children[at][byte]
        children[at][marker[-1]] = _HIT
    delta: list[list[int]] = [[]] * len(children)
    todo = deque([(0, 0)])  # states by depth, each with the state of its longest proper suffix, which is less deep
    while todo:
        at, suffix = todo.popleft()
        before = delta[suffix] if at else [0] * 256
        delta[at] = [children[at].get(byte, before[byte]) for byte in range(256)]
        todo += [(child, before[byte]) for byte, child in children[at].items() if child != _HIT]
    return delta
