"""What may be written next: the interface that grammars and choice trees share.

A constraint is compiled once for a tokenizer. `start(row)` gives a state; the state says which tokens may come next
and is moved on by the token that was chosen. Masks depend on the row and the tokens so far and on nothing else, so
they can be rebuilt at any time by replaying a completion.

Masks are packed: one bit a token, 32 tokens an int32 word, token t is bit t % 32 of word t // 32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

# Where a text is forced for ever, `forced` has to stop somewhere.
FORCED_LIMIT = 512


class State(Protocol):
    """Where one completion stands."""

    @property
    def finished(self) -> bool:
        """The end-of-sequence token has been accepted: nothing more may follow."""

    def mask(self) -> np.ndarray:
        """The allowed tokens as packed int32 words. At least one bit is set until the state is finished. A token is
        allowed if and only if the text so far followed by it can still become an allowed text; the tokenizer's
        end-of-sequence token is allowed where the text may end. All zero once finished. Do not write into the array,
        and copy it to keep it: it may be filled anew after the next `accept`."""

    def accept(self, token: int) -> None:
        """Move on by one token; ValueError if it is not allowed here."""

    def forced(self) -> list[int]:
        """Tokens that must follow from here: at each of them it is the only one allowed (up to and including the
        end-of-sequence token, and at most FORCED_LIMIT of them). None where several may. Moves nothing."""


class Constraint(Protocol):
    """What may be written for any row, compiled for one tokenizer."""

    vocab_size: int

    def start(self, row: Mapping[str, Any]) -> State | None:
        """The state before the first token; None for a row that is not constrained."""


def accept_all(states: Sequence[State], tokens: Sequence[int]) -> None:
    """Move many states on by one token each; in one go where their kind knows how to."""
    together = getattr(type(states[0]), "accept_many", None) if states else None
    if together is not None and all(type(state) is type(states[0]) for state in states):
        together(states, tokens)
        return
    for state, token in zip(states, tokens, strict=True):
        state.accept(token)


def fill_all(states: Sequence[State], words_B_W: np.ndarray, rows: Sequence[int]) -> None:
    """Write the masks of many states into rows of a matrix, which may be wider, or narrower by tokens that are never
    allowed; in one go where their kind can."""
    together = getattr(type(states[0]), "fill_many", None) if states else None
    if together is not None and all(type(state) is type(states[0]) for state in states):
        together(states, words_B_W, rows)
        return
    for state, row in zip(states, rows, strict=True):
        mask = state.mask()[: words_B_W.shape[1]]
        words_B_W[row, : len(mask)] = mask
        words_B_W[row, len(mask) :] = 0


def words_for(vocab_size: int) -> int:
    """How many int32 words a mask over `vocab_size` tokens takes."""
    return (vocab_size + 31) // 32


def pack(allowed_V: np.ndarray) -> np.ndarray:
    """A boolean vector over the vocabulary as packed int32 words."""
    padded = np.zeros(words_for(len(allowed_V)) * 32, dtype=bool)
    padded[: len(allowed_V)] = allowed_V
    return np.packbits(padded, bitorder="little").view(np.int32)


def pack_ids(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Token ids as packed int32 words."""
    allowed_V = np.zeros(vocab_size, dtype=bool)
    allowed_V[np.asarray(token_ids, dtype=np.int64)] = True
    return pack(allowed_V)


def unpack(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """Packed words as booleans over the vocabulary, along the last axis."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=vocab_size, bitorder="little").view(bool)


def only_token(words: np.ndarray) -> int | None:
    """The token of a mask that allows exactly one."""
    (filled,) = np.nonzero(words)
    if len(filled) != 1:
        return None
    word = int(words[filled[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else int(filled[0]) * 32 + word.bit_length() - 1


def replay(constraint: Constraint, row: Mapping[str, Any], token_ids: Sequence[int]) -> list[np.ndarray | None]:
    """The mask in front of each token of a completion; None for every token of a row that is not constrained."""
    state = constraint.start(row)
    if state is None:
        return [None] * len(token_ids)
    masks: list[np.ndarray | None] = []
    for token in token_ids:
        masks.append(state.mask().copy())
        state.accept(token)
    return masks
