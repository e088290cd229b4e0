"""Choice trees: constraints that depend on the meaning of the text and therefore cannot be written as a grammar.

A task describes its texts as a tree that is expanded while the text is generated: each node lists the literals that
may follow and the node that each of them leads to. The engine tracks every parse of the text so far (a *thread* is the
unread rest of a literal and the node after it) and looks up which vocabulary tokens match the threads. A token may end
inside a literal or span several, so every tokenizer works.

    A tree of `1x2 (0,3)` lines might have nodes ("size", bricks), ("x", bricks, size), ... with
    choices(("x", bricks, size)) == [("0,", ("y", bricks, size, 0)), ("1,", ("y", bricks, size, 1)), ...]

Performance: the tokens that match a literal do not depend on the node, so they are cached by text, and packed masks
are cached by token set. Nodes that were never visited before are therefore cheap. Append delimiters to the literal
("0," instead of "0" followed by ","): the engine then rarely has to look past the end of the literal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from .base import FORCED_LIMIT, pack_ids
from .vocabulary import Vocabulary

Node = Hashable
Choices = Sequence[tuple[str, Node | None]]
Thread = tuple[bytes, Node | None]  # rest of a literal (never empty), node after it (None: end)

_NODE_CACHE = 4096
_MASK_CACHE = 2048
_EMPTY_STEPS = 100


class ChoiceTreeConstraint:
    """A constraint that allows the completions described by a tree of literals.

    `root(row)` returns the first node of a row, or None if the row is unconstrained. `choices(node)` returns
    (text, next node) pairs. A next node of None ends the completion after the text. The text may be empty, so
    `("", None)` means that the completion may end at this node. Both functions must be pure; nodes must be hashable,
    and equal nodes must have equal choices.

    Every node should have at least one choice. With `look_ahead=True` the engine drops choices that lead to a node
    without choices, at the cost of calling `choices` for every possible next node (twenty calls instead of one for
    twenty coordinates). Set `look_ahead=False` for a tree without such dead ends. In both cases a RuntimeError names
    the node if no choice is left.
    """

    def __init__(
        self,
        tokenizer: Any,
        root: Callable[[Mapping[str, Any]], Node | None],
        choices: Callable[[Any], Choices],
        *,
        look_ahead: bool = True,
    ):
        self.vocabulary = Vocabulary.of(tokenizer)
        self.vocab_size = self.vocabulary.size
        self._root = root
        self._look_ahead = look_ahead
        self._choices = lru_cache(_NODE_CACHE)(lambda node: tuple(choices(node)))
        self.expand = lru_cache(_NODE_CACHE)(self._expand_new)
        self._match_texts = lru_cache(_MASK_CACHE)(self._match_texts_new)
        self.packed = lru_cache(_MASK_CACHE)(self._pack_new)

    def start(self, row: Mapping[str, Any]) -> ChoiceState | None:
        node = self._root(row)
        if node is None:
            return None
        ends, threads = self.expand(node)
        if not ends and not threads:
            raise _dead_end_error([node])
        if self.vocabulary.strips_leading_space:
            # Decoding drops one leading space. So a space may precede any text, and must precede a text that itself
            # begins with a space.
            threads = ((b" ", node), *(thread for thread in threads if not thread[0].startswith(b" ")))
        return ChoiceState(self, threads, ends)

    def allowed(self, threads: Sequence[Thread]) -> frozenset[int]:
        """Return the tokens that match these threads, including tokens that continue through the nodes after them."""
        texts = tuple(text for text, _ in threads)
        tokens, none_extend = self._match_texts(texts)
        if none_extend:
            return tokens
        matches = self.vocabulary.along
        found = set(tokens)
        expanded: set[tuple[bytes, Node]] = set()
        todo = [(b"", text, node) for text, node in threads]
        while todo:
            prefix, text, node = todo.pop()
            ids, extends = matches(prefix, text)
            found.update(ids)
            if extends and node is not None:
                reached = (prefix + text, node)
                if reached not in expanded:
                    expanded.add(reached)
                    todo += [(reached[0], *thread) for thread in self.expand(node).threads]
        return frozenset(found)

    def _match_texts_new(self, texts: tuple[bytes, ...]) -> tuple[frozenset[int], bool]:
        """Return the tokens that end within these texts, and whether no token extends past any of them.

        If none does, the allowed tokens do not depend on the nodes after the texts.
        """
        runs = [self.vocabulary.along(b"", text) for text in texts]
        return frozenset(id for ids, _ in runs for id in ids), not any(extends for _, extends in runs)

    def advance(self, threads: Iterable[Thread], spelling: bytes) -> tuple[tuple[Thread, ...], bool, list[Node]]:
        """Return the threads after `spelling`, whether the text may end there, and the dead-end nodes reached."""
        after: list[Thread] = []
        may_end = False
        dead_ends: list[Node] = []
        visited: set[tuple[int, Node]] = set()
        todo: list[tuple[Iterable[Thread], bytes]] = [(threads, spelling)]
        while todo:
            threads, rest = todo.pop()
            length = len(rest)
            for text, node in threads:
                if len(text) > length:
                    if text.startswith(rest):
                        after.append((text[length:], node))
                elif rest.startswith(text):
                    left = length - len(text)
                    if node is None:
                        may_end = may_end or not left
                    elif (left, node) not in visited:
                        visited.add((left, node))
                        reached = self.expand(node)
                        if left:
                            todo.append((reached.threads, rest[len(text) :]))
                        elif reached.threads or reached.ends:
                            after += reached.threads
                            may_end = may_end or reached.ends
                        else:
                            dead_ends.append(node)
        # Only threads with equal texts can be equal; comparing texts first avoids slow node comparisons.
        if len({text for text, _ in after}) < len(after):
            after = list(dict.fromkeys(after))
        return tuple(after), may_end, dead_ends

    def _expand_new(self, node: Node) -> _Expansion:
        """Return what may follow at a node; choices with empty text are followed until a choice has text."""
        ends = False
        threads: list[Thread] = []
        done: set[Node] = set()

        def visit(node: Node, path: tuple[Node, ...]) -> None:
            nonlocal ends
            if node in path:
                raise ValueError(
                    f"choices with empty text lead from node {node!r} back to it; give one of them a text"
                )
            if len(path) > _EMPTY_STEPS:
                raise ValueError(
                    f"more than {_EMPTY_STEPS} consecutive choices after node {path[0]!r} have empty text; "
                    "give some of them a text"
                )
            if node in done:
                return
            for text, after in self._choices(node):
                if after is not None and self._look_ahead and not self._choices(after):
                    continue
                if text:
                    threads.append((text.encode(), after))
                elif after is None:
                    ends = True
                else:
                    visit(after, (*path, node))
            done.add(node)

        visit(node, ())
        return _Expansion(ends, tuple(threads))

    def _pack_new(self, tokens: frozenset[int]) -> np.ndarray:
        words = pack_ids(sorted(tokens), self.vocab_size)
        words.flags.writeable = False  # the array is shared by all states that allow these tokens
        return words


class _Expansion(NamedTuple):
    """What may follow at a node: whether the text may end, and the literals with the nodes after them."""

    ends: bool
    threads: tuple[Thread, ...]


class _Position:
    """A position in the tree with cached results: `accept` reuses the positions that `forced` has computed."""

    __slots__ = ("_constraint", "_is_first", "_last_move", "_tokens", "may_end", "threads")

    def __init__(self, constraint: ChoiceTreeConstraint, threads: tuple[Thread, ...], may_end: bool, is_first: bool):
        self._constraint = constraint
        self.threads = threads
        self.may_end = may_end
        self._is_first = is_first
        self._tokens: frozenset[int] | None = None
        self._last_move: tuple[int, _Position] | None = None  # the last token passed to `move` and its result

    def tokens(self) -> frozenset[int]:
        """Return the tokens that may follow."""
        if self._tokens is None:
            vocabulary = self._constraint.vocabulary
            tokens = self._constraint.allowed(self.threads)
            if self._is_first:
                tokens -= vocabulary.not_first
            if self.may_end:
                tokens |= {vocabulary.eos}
            elif not tokens:
                raise RuntimeError(f"the tokenizer has no token for the text that must follow: {self.expected()}")
            self._tokens = tokens
        return self._tokens

    def move(self, token: int) -> _Position:
        """Return the position after a token other than end-of-sequence. Raises ValueError if it may not follow."""
        if self._last_move is None or self._last_move[0] != token:
            vocabulary = self._constraint.vocabulary
            spelling = vocabulary.bytes_of[token] if 0 <= token < vocabulary.size else None
            if not spelling or (self._is_first and token in vocabulary.not_first):
                raise ValueError(f"token {token} is not allowed here: {self.expected()}")
            threads, may_end, dead_ends = self._constraint.advance(self.threads, spelling)
            if not threads and not may_end:
                if dead_ends:
                    raise _dead_end_error(dead_ends)
                raise ValueError(f"token {token} ({spelling!r}) is not allowed here: {self.expected()}")
            self._last_move = (token, _Position(self._constraint, threads, may_end, is_first=False))
        return self._last_move[1]

    def expected(self) -> str:
        texts = sorted({text.decode(errors="replace") for text, _ in self.threads})
        shown = ", ".join(map(repr, texts[:8])) + (", ..." if len(texts) > 8 else "")
        return f"expected {shown or 'the end of the text'}"


class ChoiceState:
    """The position of one completion in a choice tree."""

    def __init__(self, constraint: ChoiceTreeConstraint, threads: tuple[Thread, ...], may_end: bool):
        self.finished = False
        self._constraint = constraint
        self._position = _Position(constraint, threads, may_end, is_first=True)

    def mask(self) -> np.ndarray:
        return self._constraint.packed(frozenset() if self.finished else self._position.tokens())

    def accept(self, token: int) -> None:
        if self.finished:
            raise ValueError(f"token {token} is not allowed after the end of the text")
        if token != self._constraint.vocabulary.eos:
            self._position = self._position.move(token)
        elif self._position.may_end:
            self.finished = True
        else:
            raise ValueError(f"the text may not end here: {self._position.expected()}")

    def forced_text(self) -> bytes:
        if self.finished or self._position.may_end:
            return b""
        texts = [text for text, _ in self._position.threads]
        first, last = min(texts), max(texts)  # the common prefix of these two is common to all
        return bytes(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))

    def forced(self) -> list[int]:
        tokens: list[int] = []
        position, eos = self._position, self._constraint.vocabulary.eos
        while not self.finished and len(tokens) < FORCED_LIMIT and len(position.tokens()) == 1:
            tokens += position.tokens()
            if tokens[-1] == eos:
                break
            position = position.move(tokens[-1])
        return tokens


def _dead_end_error(nodes: Sequence[Node]) -> RuntimeError:
    return RuntimeError(
        "the choice tree has a dead end: no choice is left at "
        + ", ".join(f"node {node!r}" for node in nodes[:3])
        + "; every node must have a choice that leads to a node with choices, or that ends the text"
    )
