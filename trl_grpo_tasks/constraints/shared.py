"""The constraint states of the rows of a rollout. Rows with equal beginnings share their states.

The states form trees: a node is a position at which several tokens are allowed, and an edge is a sampled token with
the tokens that the constraint forces after it. An edge is computed by the first row that follows it, which forks the
state of the node, or takes it along if no other row is there. A node that the last row has left is closed: its state
and edges are dropped. Rows that generate the same tokens in the same passes therefore share all work, and a row that
is alone costs no more than without sharing.

A state that asks a question (see `AskingState`) is a node too, and the answer is its edge.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .base import FREE, Asked, Bounded, Constraint, only_token

# Upper limit on the tokens that are forced at a time: a constraint may force text without end.
FORCED_LIMIT = 512
_MASK_CACHE = 4096


class Forced(NamedTuple):
    """Tokens that a constraint forces, and the table number of the mask at each of them."""

    tokens: tuple[int, ...]
    numbers: tuple[int, ...]

    def followed_by(self, more: Forced) -> Forced:
        return Forced(self.tokens + more.tokens, self.numbers + more.numbers)


NOTHING = Forced((), ())


class _Mask(NamedTuple):
    words: np.ndarray
    number: int
    only: int | None  # the only allowed token


class _Node:
    """A position at which several tokens are allowed, a question is asked, or the text has ended."""

    __slots__ = ("edges", "number", "rows", "state")

    def __init__(self, state: Any, number: int):
        self.state, self.number = state, number  # the state is None once the node is closed
        self.edges: dict[Hashable, _Edge] = {}  # by sampled token or answer
        self.rows = 0  # rows at this node

    @property
    def question(self) -> Hashable:
        return getattr(self.state, "question", None)

    def close(self) -> None:
        self.state = None
        self.edges.clear()


class _Edge(NamedTuple):
    forced: Forced
    node: _Node


class Advanced(NamedTuple):
    """The tokens that are forced after a step, by place in the slots, and the questions that states then ask."""

    forced: list[Forced]
    questions: dict[int, Any]


class AcceptingStates:
    """What SharedStates and WorkerStates have in common. `ask` is that of the constraint, if its states ask."""

    ask: Callable[[Any], Asked]

    def accept_async(self, slots: Sequence[int], tokens: Sequence[int]) -> Callable[[], Advanced]:
        """Accept a sampled token for each slot, possibly in other processes, and return a function that waits for it.

        The states advance past the tokens that are forced, up to a question. Their number is limited by FORCED_LIMIT;
        the mask after the last one may then allow a single token. Raises ValueError if a token is not allowed.

        Until the function is called, `numbers` of these slots are undefined. Several calls may be outstanding.
        """
        raise NotImplementedError

    def resume(self, slots: Sequence[int], answers: Sequence[Any]) -> Advanced:
        """Continue with the answers to the questions of these slots."""
        raise NotImplementedError

    def accept(self, slots: Sequence[int], tokens: Sequence[int]) -> list[Forced]:
        """Accept tokens, wait until all questions are answered, and return the tokens that are forced."""
        forced, questions = self.accept_async(slots, tokens)()
        while questions:  # a turn after an answer may be forced up to its end, where the next question is asked
            places, asked = list(questions), [self.ask(question) for question in questions.values()]
            after = self.resume([slots[place] for place in places], [each.answer() for each in asked])
            for place, more in zip(places, after.forced, strict=True):
                forced[place] = forced[place].followed_by(more)
            questions = {places[at]: question for at, question in after.questions.items()}
        return forced


class SharedStates(AcceptingStates):
    """The states of the rows of a rollout, by slot. Slots are arbitrary numbers."""

    def __init__(self, constraint: Constraint, table: Any):  # a MaskTable, or in a worker process a _Numbering
        self._constraint, self._table = constraint, table
        self._asks = hasattr(constraint, "ask")
        if self._asks:
            self.ask = constraint.ask  # type: ignore[attr-defined]
        self._rows: dict[int, Mapping[str, Any]] = {}
        self._nodes: dict[int, _Node] = {}  # of the constrained rows
        self._roots: dict[Hashable, _Edge] = {}
        self._masks: dict[int, _Mask] = Bounded(_MASK_CACHE)  # of read-only arrays, by id
        self._only: dict[int, int | None] = {}  # the only token of each mask number

    def start(self, slots: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> list[Forced]:
        """Start rows and return the tokens that are forced at their beginnings; the states advance past them."""
        self._rows |= zip(slots, rows, strict=True)
        return [self.restart(slot, ()) for slot in slots]

    def restart(self, slot: int, tokens: Sequence[int]) -> Forced:
        """Replace the completion of a slot by these tokens and return the tokens that are forced after them.

        The state advances past the forced tokens. Raises ValueError if a token is not allowed.
        """
        row = self._rows[slot]
        self.release(slot)
        self._rows[slot] = row
        edge = self._root(row)
        if edge is None:
            return NOTHING
        at = 0  # number of forced tokens of the edge that are among `tokens`
        for token in tokens:
            if at == len(edge.forced.tokens):
                edge, at = self._answered(self._follow(edge.node, token, leaving=0)), 0
            elif token == edge.forced.tokens[at]:
                at += 1
            else:
                raise ValueError(f"token {token} is not allowed here: only {edge.forced.tokens[at]} is")
        self._nodes[slot] = edge.node
        edge.node.rows += 1
        return Forced(edge.forced.tokens[at:], edge.forced.numbers[at:])

    def accept_async(self, slots: Sequence[int], tokens: Sequence[int]) -> Callable[[], Advanced]:
        return lambda: self.resume(slots, tokens)

    def resume(self, slots: Sequence[int], answers: Sequence[Any]) -> Advanced:
        return Advanced(self.advance(slots, answers), self.questions(slots))

    def advance(self, slots: Sequence[int], steps: Sequence[Any]) -> list[Forced]:
        """Continue with a step for each slot, a token or an answer, and return the tokens that are forced after it."""
        nodes, advanced = self._nodes, []
        for slot, step in zip(slots, steps, strict=True):
            node = nodes.get(slot)
            if node is None:
                advanced.append(NOTHING)
            else:
                forced, after = self._follow(node, step, leaving=1)
                node.rows -= 1
                after.rows += 1
                nodes[slot] = after
                advanced.append(forced)
        return advanced

    def questions(self, slots: Sequence[int]) -> dict[int, Hashable]:
        """Return the questions that states of these slots ask, by place in `slots`."""
        if not self._asks:
            return {}
        nodes = [self._nodes.get(slot) for slot in slots]
        return {at: node.question for at, node in enumerate(nodes) if node is not None and node.question is not None}

    def numbers(self, slots: Sequence[int]) -> list[int]:
        """Return the table number of each slot's next mask, or FREE for slots without a constrained row."""
        nodes = self._nodes
        return [FREE if (node := nodes.get(slot)) is None else node.number for slot in slots]

    def release(self, slot: int) -> None:
        """Forget the row of a slot."""
        self._rows.pop(slot, None)
        node = self._nodes.pop(slot, None)
        if node is not None:
            node.rows -= 1
            if not node.rows:
                node.close()

    def _root(self, row: Mapping[str, Any]) -> _Edge | None:
        """Return the edge to the first node of a row, or None if the row is unconstrained."""
        state = self._constraint.start(row)
        if state is None:
            return None
        origin = getattr(state, "origin", None)
        if origin is None:
            return self._answered(self._advance_forced(state))
        edge = self._roots.get(origin)
        if edge is None or edge.node.state is None:
            edge = self._roots[origin] = self._answered(self._advance_forced(state))
        return edge

    def _follow(self, node: _Node, step: Any, leaving: int) -> _Edge:
        """Return the edge of a token or an answer. `leaving` rows (0 or 1) leave the node; the last one closes it."""
        is_last = node.rows == leaving
        edge = node.edges.get(step)
        if edge is None or edge.node.state is None:
            state = node.state if is_last else node.state.fork()
            if node.question is None:
                state.accept(step)
            else:
                state.resume(step)
            edge = node.edges[step] = self._advance_forced(state)
        if is_last:
            node.close()
        return edge

    def _answered(self, edge: _Edge) -> _Edge:
        """Return the edge past the questions at its end."""
        while (question := edge.node.question) is not None:
            after = self._follow(edge.node, self.ask(question).answer(), leaving=0)
            edge = _Edge(edge.forced.followed_by(after.forced), after.node)
        return edge

    def _advance_forced(self, state: Any) -> _Edge:
        """Advance a state past the tokens that are forced, up to a question; return them with the node after them."""
        tokens: list[int] = []
        numbers: list[int] = []
        number = FREE  # of the position after the end of the text
        while getattr(state, "question", None) is None and not state.finished:
            _, number, only = self._mask(state.mask())
            if only is None or len(tokens) == FORCED_LIMIT:
                break
            tokens.append(only)
            numbers.append(number)
            state.accept(only)
            number = FREE
        return _Edge(Forced(tuple(tokens), tuple(numbers)) if tokens else NOTHING, _Node(state, number))

    def _mask(self, words: np.ndarray) -> _Mask:
        known = self._masks.get(id(words))
        if known is not None:
            return known
        number = self._table.number_of(words)
        if number not in self._only:
            self._only[number] = only_token(words)
        mask = _Mask(words, number, self._only[number])
        if not words.flags.writeable:  # it never changes, and while it is stored no other array has its id
            self._masks[id(words)] = mask
        return mask
