"""What the literals at a position of a choice tree determine without the nodes after them, computed once."""

from __future__ import annotations

from collections.abc import Callable
from os.path import commonprefix
from typing import NamedTuple

from .base import Bounded
from .vocabulary import Vocabulary

_REMEMBERED = 1024  # entries of one Literals object


class Move(NamedTuple):
    """The effect of a token on literals.

    If all matching literals are longer than the token: their rests (`rest`) and indices (`kept`; None means all). If
    only one literal matches, and it ends with the token: its index (`ended`). In all other cases neither is set, and
    the nodes after the literals are needed.
    """

    spelling: bytes
    rest: Literals | None = None
    kept: tuple[int, ...] | None = None
    ended: int | None = None


class Literals:
    """The unread rests of the literals at a position, shared by all positions at which they are equal.

    `may_end`: the text may end here. `is_first`: no token has been accepted yet. `extending`: the indices of the
    literals past whose end some token extends. `forced_text`: the common prefix of the literals. Results are kept in
    `moves` (by token), `allowed` (the allowed tokens by the literals that may follow the extending ones) and `tokens`
    (the allowed tokens if there is no extending literal).
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        intern: Callable[[tuple[bytes, ...], bool, bool], Literals],
        texts: tuple[bytes, ...],
        may_end: bool,
        is_first: bool,
    ):
        self._vocabulary, self._intern = vocabulary, intern
        self.texts, self.may_end, self.is_first = texts, may_end, is_first
        self.extending = tuple(i for i, text in enumerate(texts) if vocabulary.along(b"", text)[1])
        self.forced_text = b"" if may_end else commonprefix(texts) or b""  # noqa: RUF071 - these are no paths
        self.tokens: frozenset[int] | None = None
        self.moves: dict[int, Move] = {}
        self.allowed: dict[tuple[Literals | None, ...], frozenset[int]] = Bounded(_REMEMBERED)

    def finish(self, tokens: set[int]) -> frozenset[int]:
        """Return the allowed tokens, given those that match the literals."""
        if self.is_first:
            tokens -= self._vocabulary.not_first
        return frozenset(tokens | {self._vocabulary.eos} if self.may_end else tokens)

    def remember(self, following: tuple[Literals | None, ...], tokens: frozenset[int]) -> None:
        """Store the allowed tokens for the case that `following` may come after the extending literals."""
        if not self.extending:
            self.tokens = tokens
        self.allowed[following] = tokens

    def move(self, token: int) -> Move:
        """Return the effect of a token and store it in `moves`. Raises ValueError if the token is not text."""
        vocabulary = self._vocabulary
        spelling = vocabulary.bytes_of[token] if 0 <= token < vocabulary.size else None
        if not spelling or (self.is_first and token in vocabulary.not_first):
            raise ValueError(f"token {token} is not allowed here: {self.expected()}")
        reached = [i for i, text in enumerate(self.texts) if spelling.startswith(text)]
        longer = tuple(i for i, text in enumerate(self.texts) if text != spelling and text.startswith(spelling))
        rests = tuple(self.texts[i][len(spelling) :] for i in longer)
        move = Move(spelling)
        if longer and not reached and len(set(rests)) == len(rests):  # equal rests may be equal threads
            rest = self._intern(rests, False, False)
            move = Move(spelling, rest, None if len(longer) == len(self.texts) else longer)
        elif len(reached) == 1 and not longer and self.texts[reached[0]] == spelling:
            move = Move(spelling, ended=reached[0])
        if longer or reached:  # else the token is not allowed
            self.moves[token] = move
        return move

    def expected(self) -> str:
        texts = sorted({text.decode(errors="replace") for text in self.texts})
        shown = ", ".join(map(repr, texts[:8])) + (", ..." if len(texts) > 8 else "")
        return f"expected {shown or 'the end of the text'}"
