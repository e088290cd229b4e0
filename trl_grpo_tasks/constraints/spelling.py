"""Canonical tokenization of forced text.

Where a constraint forces the text, it still allows many tokenizations: `", "parent": ` can be five tokens or thirteen.
`OneSpelling` allows only the tokenization that the tokenizer itself produces. The set of allowed texts stays the same,
the model sees the tokens it was trained on, and most tokens of a long JSON object are forced.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .base import Bounded, pack_ids, read_only
from .choices import ChoiceState, ChoiceTreeConstraint
from .grammar import GrammarConstraint, GrammarState

_SPELLING_CACHE = 4096
_MASK_CACHE = 2048


class OneSpelling:
    """A grammar or choice tree in which forced text must be tokenized as the tokenizer does it.

    The last token of a forced text may be replaced by a longer one, because the tokenizer might merge it with the text
    that follows, but not by a shorter one.
    """

    def __init__(self, tokenizer: Any, constraint: GrammarConstraint | ChoiceTreeConstraint):
        self.constraint = constraint
        self.vocabulary = constraint.vocabulary
        self.vocab_size = constraint.vocab_size
        self._tokenizer = tokenizer
        self.spell = lru_cache(_SPELLING_CACHE)(self._spell_new)
        self.single = lru_cache(_MASK_CACHE)(lambda token: read_only(pack_ids([token], self.vocab_size)))
        self._restricted: dict[tuple[int, frozenset[int]], tuple[np.ndarray, np.ndarray]] = Bounded(_MASK_CACHE)

    def __reduce__(self) -> Any:  # without the caches
        return OneSpelling, (self._tokenizer, self.constraint)

    def start(self, row: Mapping[str, Any]) -> SpelledState | None:
        state = self.constraint.start(row)
        if state is None:
            return None
        # If decoding drops a leading space, the tokenizer's output for the first text differs from what is generated.
        is_unrestricted = self.vocabulary.strips_leading_space
        return SpelledState(self, state, _UNRESTRICTED if is_unrestricted else self.spell(state.forced_text()))

    def start_after(self, row: Mapping[str, Any], remainder: bytes) -> SpelledState | None:
        state = self.constraint.start_after(row, remainder)
        return None if state is None else SpelledState(self, state, self.spell(state.forced_text()))

    def without(self, words: np.ndarray, too_short: frozenset[int]) -> np.ndarray:
        """Return a mask without the tokens that are too short."""
        if not too_short:
            return words
        if words.flags.writeable:  # the mask may be overwritten, so its result cannot be stored
            return self._without_new(words, too_short)
        key = (id(words), too_short)
        known = self._restricted.get(key)
        if known is None:
            # `words` is stored as well: while it exists, no other array has its id
            known = self._restricted[key] = (words, read_only(self._without_new(words, too_short)))
        return known[1]

    def _without_new(self, words: np.ndarray, too_short: frozenset[int]) -> np.ndarray:
        return words & ~pack_ids(sorted(too_short), self.vocab_size)

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
        last = Spelling(None, frozenset(vocabulary.along(b"", spellings[-1][:-1])[0]), None)
        for token in reversed(ids[:-1]):
            last = Spelling(token, frozenset(), last)
        return last


class Spelling(NamedTuple):
    """The tokenization of a forced text.

    Before its last token: the next token (`fixed`) and the spelling `after` it. At its last token `fixed` is None, and
    `too_short` holds the tokens that are shorter than the last one.
    """

    fixed: int | None
    too_short: frozenset[int]
    after: Spelling | None


_UNRESTRICTED = Spelling(None, frozenset(), None)


class SpelledState:
    """The position of one completion: the inner state and the remaining tokenization of the forced text."""

    __slots__ = ("_constraint", "_spelling", "_state")

    def __init__(self, constraint: OneSpelling, state: GrammarState | ChoiceState, spelling: Spelling):
        self._constraint, self._state, self._spelling = constraint, state, spelling

    def __getattr__(self, name: str) -> Any:  # `finished`, `origin`, and how a text ends
        # Where several tokens are allowed, the spelling after them depends on the inner position alone.
        return getattr(self._state, name)

    @property
    def position(self) -> Hashable | None:
        inner = self._state.position
        return None if inner is None else (inner, self._spelling)

    def fork(self) -> SpelledState:
        return SpelledState(self._constraint, self._state.fork(), self._spelling)

    def mask(self) -> np.ndarray:
        fixed, too_short, _ = self._spelling
        if fixed is not None:
            return self._constraint.single(fixed)
        return self._constraint.without(self._state.mask(), too_short)

    def accept(self, token: int) -> None:
        fixed, too_short, after = self._spelling
        if (fixed is not None and token != fixed) or token in too_short:
            raise ValueError(
                f"token {token} is not allowed here: the tokenizer encodes this text with a different token"
            )
        state = self._state
        state.accept(token)
        if after is not None:
            self._spelling = after
        else:
            self._spelling = _UNRESTRICTED if state.finished else self._constraint.spell(state.forced_text())
