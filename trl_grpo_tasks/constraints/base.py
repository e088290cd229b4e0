"""The interface shared by grammars and choice trees, and helpers for packed token masks.

A constraint is compiled once per tokenizer. `start(row)` returns a state, which reports the tokens allowed next and
advances by the token that was chosen. A mask depends only on the row and the tokens so far, so masks can be rebuilt
at any time by replaying a completion.

Masks are packed into int32 words, one bit per token: token t is bit t % 32 of word t // 32.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

# Mask number 0 allows every token. It is used for padding and for positions without a constraint or filter.
FREE = 0


class State(Protocol):
    """The position of one completion within its constraint."""

    @property
    def finished(self) -> bool:
        """Whether the end-of-sequence token has been accepted, so that no token may follow."""

    def mask(self) -> np.ndarray:
        """Return the allowed tokens as packed int32 words.

        A token is allowed if and only if the text so far followed by this token can be extended to an allowed text.
        The tokenizer's end-of-sequence token is allowed where the text may end. At least one bit is set until the
        state is finished; afterwards all bits are zero. The caller must not write to the array, and must copy it to
        keep it: the next `accept` may overwrite it, unless the array is read-only. A read-only array never changes,
        so that what is computed from it can be stored; states that return the same array again are faster.
        """

    def accept(self, token: int) -> None:
        """Advance by one token. Raises ValueError if the token is not allowed here."""


class SharedState(State, Protocol):
    """A state that rows with equal beginnings share (see shared.py). Other states are not shared.

    `origin` identifies the start of the state: states with equal origins allow the same completions. An origin of None
    means that the state cannot be shared.
    """

    @property
    def origin(self) -> Hashable: ...

    def fork(self) -> Self:
        """Return a state at the same position that advances independently of this one."""


class AskingState(SharedState, Protocol):
    """A state whose next mask can depend on an answer that is expensive to compute, such as the score of a turn.

    The questions of many rows are answered at the same time, by `ask` of the constraint (see shared.py).
    """

    @property
    def question(self) -> Hashable | None:
        """What must be answered before the state continues, or None. Other methods then compute the answer."""

    def resume(self, answer: Hashable) -> None:
        """Continue with the answer to `question`."""


class Asked(NamedTuple):
    """A question whose answer may still be computed elsewhere."""

    is_answered: Callable[[], bool]
    answer: Callable[[], Any]  # waits for it


class Constraint(Protocol):
    """The allowed completions of any row, compiled for one tokenizer."""

    vocab_size: int

    def start(self, row: Mapping[str, Any]) -> State | None:
        """Return the state before the first token, or None if the row is unconstrained."""


class AnswerConstraint(Constraint, Protocol):
    """A constraint on an answer that other text precedes, such as a thought (see think.py)."""

    def start_after(self, row: Mapping[str, Any], remainder: bytes) -> State | None:
        """Return the state of an answer whose first bytes are `remainder`, or None if no answer begins with them.

        The answer is not the beginning of the decoded text, so that its leading space is kept. The result is also
        None if the row is unconstrained.
        """


@contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within this context, an attribute of an object or module has this value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Bounded(dict[Any, Any]):
    """A cache that is emptied when it would have more than `most` entries.

    >>> cache = Bounded(2)
    >>> cache[1] = cache[2] = cache[3] = "known"
    >>> list(cache)
    [3]
    """

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)


def words_for(vocab_size: int) -> int:
    """Return the number of int32 words in a mask over `vocab_size` tokens."""
    return (vocab_size + 31) // 32


def pack(allowed_V: np.ndarray) -> np.ndarray:
    """Pack a boolean vector over the vocabulary into int32 words."""
    padded = np.zeros(words_for(len(allowed_V)) * 32, dtype=bool)
    padded[: len(allowed_V)] = allowed_V
    return np.packbits(padded, bitorder="little").view(np.int32)


def read_only(words: np.ndarray) -> np.ndarray:
    """Return a packed mask after making it read-only, so that it can be shared."""
    words.flags.writeable = False
    return words


def pack_ids(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the packed mask that allows exactly these token ids."""
    allowed_V = np.zeros(vocab_size, dtype=bool)
    allowed_V[np.asarray(token_ids, dtype=np.int64)] = True
    return pack(allowed_V)


def unpack(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """Unpack the last axis of packed masks into booleans over the vocabulary."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=vocab_size, bitorder="little").view(bool)


def only_token(words: np.ndarray) -> int | None:
    """Return the only token that a packed mask allows, or None if it does not allow exactly one."""
    (filled,) = np.nonzero(words)
    if len(filled) != 1:
        return None
    word = int(words[filled[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else int(filled[0]) * 32 + word.bit_length() - 1


class FreeText:
    """The state of text without a constraint: every token of `words`, which include end-of-sequence, may follow."""

    __slots__ = ("_eos", "_words", "finished")

    origin = position = "free"
    room, is_searched = 1, False

    def __init__(self, words: np.ndarray, eos: int, finished: bool = False):
        self._words, self._eos, self.finished = words, eos, finished

    def fork(self) -> FreeText:
        return FreeText(self._words, self._eos, self.finished)

    def alike(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        return [tokens]

    def endings(self) -> list[bytes]:
        return [b""]

    def mask(self) -> np.ndarray:
        return np.zeros_like(self._words) if self.finished else self._words

    def accept(self, token: int) -> None:
        if self.finished:
            raise ValueError(f"token {token} is not allowed after the end of the text")
        if not (0 <= token < 32 * len(self._words) and self._words[token // 32] >> token % 32 & 1):
            raise ValueError(f"token {token} is not allowed here")
        self.finished = token == self._eos


def replay(constraint: Constraint, row: Mapping[str, Any], token_ids: Sequence[int]) -> list[np.ndarray | None]:
    """Return the mask that applied to each token of a completion; the masks of an unconstrained row are None."""
    state = constraint.start(row)
    if state is None:
        return [None] * len(token_ids)
    masks: list[np.ndarray | None] = []
    for token in token_ids:
        masks.append(state.mask().copy())
        state.accept(token)
    return masks
