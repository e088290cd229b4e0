"""One spelling of what must be written: the tokenizer's own.

Where a constraint leaves the text no choice it still leaves the tokens many: `", "parent": ` may be spelt with five
tokens or with thirteen. `OneSpelling` allows only the way in which the tokenizer itself would write it. The texts that
can be written stay the same; the model meets the tokens it was trained on, and most of a long JSON object is forced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from .base import State, accept_all, fill_all, only_token, words_for
from .vocabulary import Vocabulary

_SPELLINGS_KEPT = 4096


class TextState(State, Protocol):
    """A state that also knows the text that must follow."""

    def forced_text(self) -> bytes:
        """What every text that can be written from here on begins with; not always all of it, empty where the text
        may end. Moves nothing."""


class TextConstraint(Protocol):
    vocab_size: int
    vocabulary: Vocabulary

    def start(self, row: Mapping[str, Any]) -> TextState | None: ...


class OneSpelling:
    """A grammar or a choice tree, with forced text in the tokenizer's own spelling.

    The last token of such a spelling may be a longer one: the tokenizer might have joined it with what follows. It may
    not be a shorter one.
    """

    def __init__(self, tokenizer: Any, constraint: TextConstraint):
        self.constraint = constraint
        self.vocabulary = constraint.vocabulary
        self.vocab_size = constraint.vocab_size
        self._tokenizer = tokenizer
        self.spell = lru_cache(_SPELLINGS_KEPT)(self._spell_new)

    def start(self, row: Mapping[str, Any]) -> SpelledState | None:
        state = self.constraint.start(row)
        return None if state is None else SpelledState(self, state)

    def _spell_new(self, text: bytes) -> Spelling:
        """Nothing is asked for where the text cannot be spelt by itself."""
        vocabulary = self.vocabulary
        try:
            ids = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        except UnicodeDecodeError:  # it ends within a character
            return _ANY
        spellings = [vocabulary.bytes_of[id] or b"" for id in ids]
        if not ids or b"".join(spellings) != text or not all(spellings):
            return _ANY
        return Spelling(tuple(ids[:-1]), frozenset(vocabulary.along(b"", spellings[-1][:-1])[0]))


class Spelling(NamedTuple):
    """The tokens of a text but for the last, and those that are too short to stand in its place."""

    planned: tuple[int, ...]
    too_short: frozenset[int]


_ANY = Spelling((), frozenset())


class SpelledState:
    """Where one completion stands: what is left of the spelling of the text that must follow."""

    def __init__(self, constraint: OneSpelling, state: TextState):
        self._constraint = constraint
        self._state = state
        # Where decoding drops a space in front, the tokenizer's spelling is not that of an opening.
        opens_freely = constraint.vocabulary.strips_leading_space
        self._spelling = _ANY if opens_freely else constraint.spell(state.forced_text())

    @property
    def finished(self) -> bool:
        return self._state.finished

    def mask(self) -> np.ndarray:
        words = np.zeros(words_for(self._constraint.vocab_size), dtype=np.int32)
        if not self._spelling.planned:
            words[:] = self._state.mask()
        self._narrow(words)
        return words

    def accept(self, token: int) -> None:
        self._check(token)
        self._state.accept(token)
        self._moved()

    def forced(self) -> list[int]:
        if self._spelling.planned:
            return list(self._spelling.planned)
        only = only_token(self.mask())  # after it, the text that must follow may be planned
        return [] if only is None else [only]

    @staticmethod
    def accept_many(states: Sequence[SpelledState], tokens: Sequence[int]) -> None:
        """`accept` for many states at once."""
        for state, token in zip(states, tokens, strict=True):
            state._check(token)
        accept_all([state._state for state in states], tokens)
        for state in states:
            state._moved()

    @staticmethod
    def fill_many(states: Sequence[SpelledState], words_B_W: np.ndarray, rows: Sequence[int]) -> None:
        """The masks of many states at once, written into rows of a matrix that may be wider."""
        pairs = list(zip(states, rows, strict=True))
        open_ones = [(state._state, row) for state, row in pairs if not state._spelling.planned]
        fill_all([state for state, _ in open_ones], words_B_W, [row for _, row in open_ones])
        for state, row in pairs:
            state._narrow(words_B_W[row])

    def _narrow(self, words: np.ndarray) -> None:
        """Leave in a mask only what spells the text that must follow."""
        planned, too_short = self._spelling
        if planned:
            words[:] = 0
            words[planned[0] // 32] = _BITS[planned[0] % 32]
        for token in too_short if not planned else ():
            words[token // 32] &= ~_BITS[token % 32]

    def _check(self, token: int) -> None:
        planned, too_short = self._spelling
        if (planned and token != planned[0]) or (not planned and token in too_short):
            raise ValueError(f"token {token} is not allowed here: the tokenizer would write this text with another")

    def _moved(self) -> None:
        planned, too_short = self._spelling
        if planned:
            self._spelling = Spelling(planned[1:], too_short)
        elif not self.finished:
            self._spelling = self._constraint.spell(self._state.forced_text())


_BITS = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
