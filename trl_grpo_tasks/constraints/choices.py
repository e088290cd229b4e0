"""Choice trees: what may be written next where that depends on meaning and no grammar could say it.

A pack describes its texts as a tree that is unfolded while it is written: at each node, the literals that may follow
and the node each leads to. The engine follows every way of reading the text so far (a *thread* is the rest of a
literal and the node after it) and asks the vocabulary which tokens run along them; tokens may end inside a literal or
span several, so any tokenizer will do.

    A tree of `1x2 (0,3)` lines might have nodes ("size", bricks), ("x", bricks, size), ... with
    choices(("x", bricks, size)) == [("0,", ("y", bricks, size, 0)), ("1,", ("y", bricks, size, 1)), ...]

What makes it fast. Which tokens run along a literal does not depend on the node, so that is remembered by text, and
packed masks are remembered by the set of tokens: structures that were never seen before cost little. Put what must
follow into the literal ("0," rather than "0" and then ","): then the engine seldom needs to look beyond its end.
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
Thread = tuple[bytes, Node | None]  # what is left of a literal (never empty), and the node after it; None: the end

_NODE_CACHE = 4096
_MASK_CACHE = 2048
_EMPTY_STEPS = 100


class ChoiceTreeConstraint:
    """Completions that a tree of literals allows.

    `root(row)` gives the first node of a row, or None for a row that is not constrained. `choices(node)` gives
    (text, next node) pairs; the next node None means that the completion ends after that text; the text may be empty,
    so `("", None)` says that it may end here. Both are pure functions; nodes are hashable, and equal nodes have equal
    choices.

    Every node should have a choice. The engine looks one literal ahead and leaves out choices that lead to a node
    without any; if that leaves nothing, a RuntimeError names the node. This asks for the choices of every node that
    could come next (for twenty coordinates, twenty calls where one is needed): in a tree that is known to have no such
    nodes, `look_ahead=False` spares them, and a RuntimeError names the node should there be one after all.
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
        self._along_texts = lru_cache(_MASK_CACHE)(self._along_texts_new)
        self.packed = lru_cache(_MASK_CACHE)(self._pack_new)

    def start(self, row: Mapping[str, Any]) -> ChoiceState | None:
        node = self._root(row)
        if node is None:
            return None
        ends, threads = self.expand(node)
        if not ends and not threads:
            raise _no_choices([node])
        if self.vocabulary.strips_leading_space:
            # Decoding drops one space in front: it may be written before any text, and must be before one that itself
            # begins with a space.
            threads = ((b" ", node), *(thread for thread in threads if not thread[0].startswith(b" ")))
        return ChoiceState(self, threads, ends)

    def allowed(self, threads: Sequence[Thread]) -> frozenset[int]:
        """The tokens that run along these threads, and on through the nodes after them."""
        texts = tuple(text for text, _ in threads)
        tokens, ends_inside = self._along_texts(texts)
        if ends_inside:
            return tokens
        along = self.vocabulary.along
        found = set(tokens)
        beyond: set[tuple[bytes, Node]] = set()
        todo = [(b"", text, node) for text, node in threads]
        while todo:
            prefix, text, node = todo.pop()
            ids, goes_on = along(prefix, text)
            found.update(ids)
            if goes_on and node is not None:
                reached = (prefix + text, node)
                if reached not in beyond:
                    beyond.add(reached)
                    todo += [(reached[0], *thread) for thread in self.expand(node).threads]
        return frozenset(found)

    def _along_texts_new(self, texts: tuple[bytes, ...]) -> tuple[frozenset[int], bool]:
        """The tokens that end within these texts, and whether none goes on beyond them: then no node matters."""
        runs = [self.vocabulary.along(b"", text) for text in texts]
        return frozenset(id for ids, _ in runs for id in ids), not any(goes_on for _, goes_on in runs)

    def advance(self, threads: Iterable[Thread], spelling: bytes) -> tuple[tuple[Thread, ...], bool, list[Node]]:
        """The threads after `spelling`, whether the text may end there, and the nodes reached that have no choices."""
        after: list[Thread] = []
        may_end = False
        stuck: list[Node] = []
        arrived: set[tuple[int, Node]] = set()
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
                    elif (left, node) not in arrived:
                        arrived.add((left, node))
                        reached = self.expand(node)
                        if left:
                            todo.append((reached.threads, rest[len(text) :]))
                        elif reached.threads or reached.ends:
                            after += reached.threads
                            may_end = may_end or reached.ends
                        else:
                            stuck.append(node)
        # Threads can only be equal where their texts are; nodes are slow to compare, texts are not.
        if len({text for text, _ in after}) < len(after):
            after = list(dict.fromkeys(after))
        return tuple(after), may_end, stuck

    def _expand_new(self, node: Node) -> _Expansion:
        """What may be written at a node: steps that write nothing are followed until something is written."""
        ends = False
        threads: list[Thread] = []
        done: set[Node] = set()

        def visit(node: Node, path: tuple[Node, ...]) -> None:
            nonlocal ends
            if node in path:
                raise ValueError(f"choices that write nothing lead from node {node!r} back to it")
            if len(path) > _EMPTY_STEPS:
                raise ValueError(f"more than {_EMPTY_STEPS} choices in a row write nothing, from node {path[0]!r} on")
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
        words.flags.writeable = False  # shared by all states that allow these tokens
        return words


class _Expansion(NamedTuple):
    """What may be written at a node: whether the text may end, and the literals with the nodes after them."""

    ends: bool
    threads: tuple[Thread, ...]


class _Point:
    """A place in the tree, with what was found out about it: `forced` looks ahead along points that `accept` then
    walks again."""

    __slots__ = ("_constraint", "_is_first", "_tokens", "after", "may_end", "threads")

    def __init__(self, constraint: ChoiceTreeConstraint, threads: tuple[Thread, ...], may_end: bool, is_first: bool):
        self._constraint = constraint
        self.threads = threads
        self.may_end = may_end
        self._is_first = is_first
        self._tokens: frozenset[int] | None = None
        self.after: tuple[int, _Point] | None = None  # the token last moved on by, and where it led

    def tokens(self) -> frozenset[int]:
        """The tokens that may follow."""
        if self._tokens is None:
            vocabulary = self._constraint.vocabulary
            tokens = self._constraint.allowed(self.threads)
            if self._is_first:
                tokens -= vocabulary.not_first
            if self.may_end:
                tokens |= {vocabulary.eos}
            elif not tokens:
                raise RuntimeError(f"the tokenizer has no token for what may follow: {self.expected()}")
            self._tokens = tokens
        return self._tokens

    def move(self, token: int) -> _Point:
        """The point after a token that does not end the text; ValueError if it may not follow."""
        if self.after is None or self.after[0] != token:
            vocabulary = self._constraint.vocabulary
            spelling = vocabulary.bytes_of[token] if 0 <= token < vocabulary.size else None
            if not spelling or (self._is_first and token in vocabulary.not_first):
                raise ValueError(f"token {token} is not allowed here: {self.expected()}")
            threads, may_end, stuck = self._constraint.advance(self.threads, spelling)
            if not threads and not may_end:
                if stuck:
                    raise _no_choices(stuck)
                raise ValueError(f"token {token} ({spelling!r}) is not allowed here: {self.expected()}")
            self.after = (token, _Point(self._constraint, threads, may_end, is_first=False))
        return self.after[1]

    def expected(self) -> str:
        texts = sorted({text.decode(errors="replace") for text, _ in self.threads})
        shown = ", ".join(map(repr, texts[:8])) + (", ..." if len(texts) > 8 else "")
        return f"expected {shown or 'the end of the text'}"


class ChoiceState:
    """Where one completion stands in a choice tree."""

    def __init__(self, constraint: ChoiceTreeConstraint, threads: tuple[Thread, ...], may_end: bool):
        self.finished = False
        self._constraint = constraint
        self._point = _Point(constraint, threads, may_end, is_first=True)

    def mask(self) -> np.ndarray:
        return self._constraint.packed(frozenset() if self.finished else self._point.tokens())

    def accept(self, token: int) -> None:
        if self.finished:
            raise ValueError(f"token {token} after the end of the text")
        if token != self._constraint.vocabulary.eos:
            self._point = self._point.move(token)
        elif self._point.may_end:
            self.finished = True
        else:
            raise ValueError(f"the text may not end here: {self._point.expected()}")

    def forced_text(self) -> bytes:
        if self.finished or self._point.may_end:
            return b""
        texts = [text for text, _ in self._point.threads]
        first, last = min(texts), max(texts)  # what these two share, all do
        return bytes(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))

    def forced(self) -> list[int]:
        tokens: list[int] = []
        point, eos = self._point, self._constraint.vocabulary.eos
        while not self.finished and len(tokens) < FORCED_LIMIT and len(point.tokens()) == 1:
            tokens += point.tokens()
            if tokens[-1] == eos:
                break
            point = point.move(tokens[-1])
        return tokens


def _no_choices(nodes: Sequence[Node]) -> RuntimeError:
    return RuntimeError(
        "no choice is left at "
        + ", ".join(f"node {node!r}" for node in nodes[:3])
        + ": every node of a choice tree must have a choice whose next node has one"
    )
