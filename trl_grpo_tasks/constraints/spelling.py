"""Canonical tokenization of forced text.

Where a constraint forces the text, it still allows many tokenizations: `", "parent": ` can be five tokens or thirteen.
`OneSpelling` allows only the tokenization that the tokenizer itself produces. The set of allowed texts stays the same,
the model sees the tokens it was trained on, and most tokens of a long JSON object are forced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from .base import State, accept_all, fill_all, only_token, words_for
from .vocabulary import Vocabulary

_SPELLING_CACHE = 4096


class TextState(State, Protocol):
    """A state that also reports the text that must follow."""

    def forced_text(self) -> bytes:
        """Return a prefix that all allowed continuations share; empty if the text may end here.

        The prefix is not necessarily the longest one. The state does not advance.
        """


class TextConstraint(Protocol):
    """A constraint whose states report the text that must follow."""

    vocab_size: int
    vocabulary: Vocabulary

    def start(self, row: Mapping[str, Any]) -> TextState | None: ...


class OneSpelling:
    """A grammar or choice tree in which forced text must be tokenized as the tokenizer does it.

    The last token of a forced text may be replaced by a longer one, because the tokenizer might merge it with the text
    that follows, but not by a shorter one.
    """

    def __init__(self, tokenizer: Any, constraint: TextConstraint):
        self.constraint = constraint
        self.vocabulary = constraint.vocabulary
        self.vocab_size = constraint.vocab_size
        self._tokenizer = tokenizer
        self.spell = lru_cache(_SPELLING_CACHE)(self._spell_new)

    def start(self, row: Mapping[str, Any]) -> SpelledState | None:
        state = self.constraint.start(row)
        return None if state is None else SpelledState(self, state)

    def _spell_new(self, text: bytes) -> Spelling:
        """Return the tokenization of a forced text, or no restriction if the text cannot be tokenized by itself."""
        vocabulary = self.vocabulary
        try:
            ids = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        except UnicodeDecodeError:  # the text ends within a multi-byte character
            return _UNRESTRICTED
        spellings = [vocabulary.bytes_of[id] or b"" for id in ids]
        if not ids or b"".join(spellings) != text or not all(spellings):
            return _UNRESTRICTED
        return Spelling(tuple(ids[:-1]), frozenset(vocabulary.along(b"", spellings[-1][:-1])[0]))


class Spelling(NamedTuple):
    """The tokenization of a forced text: all tokens but the last, and the tokens that are too short to be the last."""

    fixed: tuple[int, ...]
    too_short: frozenset[int]


_UNRESTRICTED = Spelling((), frozenset())


class SpelledState:
    """The position of one completion: the inner state and the remaining tokenization of the forced text."""

    def __init__(self, constraint: OneSpelling, state: TextState):
        self._constraint = constraint
        self._state = state
        # If decoding drops a leading space, the tokenizer's output for the first text differs from what is generated.
        is_unrestricted = constraint.vocabulary.strips_leading_space
        self._spelling = _UNRESTRICTED if is_unrestricted else constraint.spell(state.forced_text())

    @property
    def finished(self) -> bool:
        return self._state.finished

    def mask(self) -> np.ndarray:
        words = np.zeros(words_for(self._constraint.vocab_size), dtype=np.int32)
        if not self._spelling.fixed:
            words[:] = self._state.mask()
        self._restrict(words)
        return words

    def accept(self, token: int) -> None:
        self._check_token(token)
        self._state.accept(token)
        self._finish_accept()

    def forced(self) -> list[int]:
        if self._spelling.fixed:
            return list(self._spelling.fixed)
        only = only_token(self.mask())  # the forced text after this token is tokenized once the token is accepted
        return [] if only is None else [only]

    @staticmethod
    def accept_many(states: Sequence[SpelledState], tokens: Sequence[int]) -> None:
        """Call `accept` for many states in one batch."""
        for state, token in zip(states, tokens, strict=True):
            state._check_token(token)
        accept_all([state._state for state in states], tokens)
        for state in states:
            state._finish_accept()

    @staticmethod
    def fill_many(states: Sequence[SpelledState], words_B_W: np.ndarray, rows: Sequence[int]) -> None:
        """Write the masks of many states into the given rows of a matrix, which may be wider than a mask."""
        pairs = list(zip(states, rows, strict=True))
        unfixed = [(state._state, row) for state, row in pairs if not state._spelling.fixed]
        fill_all([state for state, _ in unfixed], words_B_W, [row for _, row in unfixed])
        for state, row in pairs:
            state._restrict(words_B_W[row])

    def _restrict(self, words: np.ndarray) -> None:
        """Remove from a mask the tokens that contradict the tokenization of the forced text."""
        fixed, too_short = self._spelling
        if fixed:
            words[:] = 0
            words[fixed[0] // 32] = _BITS[fixed[0] % 32]
        for token in too_short if not fixed else ():
            words[token // 32] &= ~_BITS[token % 32]

    def _check_token(self, token: int) -> None:
        fixed, too_short = self._spelling
        if (fixed and token != fixed[0]) or (not fixed and token in too_short):
            raise ValueError(
                f"token {token} is not allowed here: the tokenizer encodes this text with a different token"
            )

    def _finish_accept(self) -> None:
        fixed, too_short = self._spelling
        if fixed:
            self._spelling = Spelling(fixed[1:], too_short)
        elif not self.finished:
            self._spelling = self._constraint.spell(self._state.forced_text())


_BITS = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
