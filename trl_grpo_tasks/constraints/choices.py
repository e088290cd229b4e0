"""Choice trees: constraints that depend on the meaning of the text and therefore cannot be written as a grammar.

A task describes its texts as a tree that is expanded while the text is generated: each node lists the literals that
may follow and the node that each of them leads to. The engine tracks every parse of the text so far (a *thread* is the
unread rest of a literal and the node after it) and looks up which vocabulary tokens match the threads. A token may end
inside a literal or span several, so every tokenizer works.

    A tree of `1x2 (0,3)` lines might have nodes ("size", bricks), ("x", bricks, size), ... with
    choices(("x", bricks, size)) == [("0,", ("y", bricks, size, 0)), ("1,", ("y", bricks, size, 1)), ...]

Performance: what depends only on the texts of the threads, and not on the nodes after them, is computed once per tuple
of texts (`literals.py`). Nodes that were never visited before are therefore cheap. Append delimiters to the literal
("0," instead of "0" followed by ","): the engine then rarely has to look past the end of the literal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from .base import pack_ids, read_only
from .literals import Literals
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

    `longest_ending`: however a text begins, one literal of each of these sets, or fewer, finish it if the first choice
    is taken at each node. Large trees need it to end in time (see budget.py); small ones are searched. None: the tree
    is large, and texts may be cut off.

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
        longest_ending: Sequence[Collection[str]] | None = (),
    ):
        self.vocabulary = Vocabulary.of(tokenizer)
        self.vocab_size = self.vocabulary.size
        self._root, self._user_choices = root, choices
        self._look_ahead, self._longest_ending = look_ahead, longest_ending
        self.is_endless = longest_ending is None
        self.ending = lru_cache(_NODE_CACHE)(self._ending)
        # Without look_ahead every node is expanded once, so that caching its choices as well would not pay.
        self._choices = lru_cache(_NODE_CACHE)(choices) if look_ahead else choices
        self.expand = lru_cache(_NODE_CACHE)(self._expand_new)
        self.literals = lru_cache(_MASK_CACHE)(lambda *parts: Literals(self.vocabulary, self.literals, *parts))
        self._literals_of_choices = lru_cache(_MASK_CACHE)(
            lambda texts, ends: self.literals(tuple([text.encode() for text in texts]), ends, False)
        )
        # A mask is shared by all states that allow these tokens.
        self.packed = lru_cache(_MASK_CACHE)(lambda tokens: read_only(pack_ids(sorted(tokens), self.vocab_size)))

    def __reduce__(self) -> Any:  # without the caches
        make = partial(ChoiceTreeConstraint, look_ahead=self._look_ahead, longest_ending=self._longest_ending)
        return make, (self.vocabulary, self._root, self._user_choices)

    def start(self, row: Mapping[str, Any]) -> ChoiceState | None:
        node = self._root(row)
        if node is None:
            return None
        position = self.expand(node)
        if position.is_dead_end:
            raise _dead_end_error([node])
        texts, nodes = position.literals.texts, position.nodes
        if self.vocabulary.strips_leading_space:
            # Decoding drops one leading space. So a space may precede any text, and must precede a text that itself
            # begins with a space.
            threads = [thread for thread in zip(texts, nodes, strict=True) if not thread[0].startswith(b" ")]
            texts, nodes = (b" ", *(text for text, _ in threads)), (node, *(after for _, after in threads))
        literals = self.literals(texts, position.literals.may_end, True)
        return ChoiceState(self, _Position(self, literals, nodes), node)

    def start_after(self, row: Mapping[str, Any], remainder: bytes) -> ChoiceState | None:
        node = self._root(row)
        if node is None:
            return None
        position, dead_ends = self.expand(node), [node]
        if remainder:
            position, dead_ends = self.advance(position.threads(), remainder)
        if position.is_dead_end and dead_ends:
            raise _dead_end_error(dead_ends)
        return None if position.is_dead_end else ChoiceState(self, position, node)

    @cached_property
    def room(self) -> float | None:
        """A bound on the tokens that finish any text; None if `longest_ending` is not given.

        The longest possible token first, a literal takes so many tokens from any byte on. Twice as many make up for
        other spellings, and there are never more than bytes.
        """
        tokens, along = 0, self.vocabulary.along
        for texts in self._longest_ending or ():
            most = 0
            for text in texts:
                spelling = text.encode()
                counts = {len(spelling): 0}
                for at in reversed(range(len(spelling))):
                    lengths = {len(self.vocabulary.bytes_of[id] or b"") for id in along(b"", spelling[at:])[0]}
                    ends = [at + length for length in sorted(lengths) if at + length in counts]
                    if ends:
                        counts[at] = 1 + counts[ends[-1]]
                most = max(most, min(2 * max(counts.values()), len(spelling)))
            tokens += most
        return tokens + 1 if self._longest_ending else None

    def _ending(self, node: Node | None) -> bytes:
        """Return the text from a node to the end if it may not end there and the first choice is taken at each."""
        texts = []
        while node is not None:
            position = self.expand(node)
            if position.literals.may_end:
                break
            texts.append(position.literals.texts[0])
            node = position.nodes[0]
        return b"".join(texts)

    def advance(self, threads: Iterable[Thread], spelling: bytes) -> tuple[_Position, list[Node]]:
        """Return the position after `spelling`, and the dead-end nodes reached."""
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
                            todo.append((reached.threads(), rest[len(text) :]))
                        elif reached.is_dead_end:
                            dead_ends.append(node)
                        else:
                            after += reached.threads()
                            may_end = may_end or reached.literals.may_end
        # Only threads with equal texts can be equal; comparing texts first avoids slow node comparisons.
        if len({text for text, _ in after}) < len(after):
            after = list(dict.fromkeys(after))
        literals = self.literals(tuple([text for text, _ in after]), may_end, False)
        return _Position(self, literals, tuple([node for _, node in after])), dead_ends

    def _expand_new(self, node: Node) -> _Position:
        """Return the position at a node; choices with empty text are followed until a choice has text."""
        threads = list(self._choices(node))
        ends = ("", None) in threads[-1:]
        if ends:
            del threads[-1]
        texts = tuple([text for text, _ in threads])
        if self._look_ahead or "" in texts:
            ends, threads = self._follow_empty_texts(node)
            texts = tuple([text for text, _ in threads])
        return _Position(self, self._literals_of_choices(texts, ends), tuple([after for _, after in threads]))

    def _follow_empty_texts(self, node: Node) -> tuple[bool, list[tuple[str, Node | None]]]:
        """Return whether the text may end at a node, and the texts that may follow with the nodes after them."""
        ends = False
        threads: list[tuple[str, Node | None]] = []
        done: set[Node] = set()

        def visit(node: Node, path: tuple[Node, ...]) -> None:
            nonlocal ends
            if len(path) > _EMPTY_STEPS:
                raise ValueError(
                    f"more than {_EMPTY_STEPS} consecutive choices after node {path[0]!r} have empty text, perhaps "
                    "because they lead back to it; give some of them a text"
                )
            if node in done:
                return
            for text, after in self._choices(node):
                if after is not None and self._look_ahead and not self._choices(after):
                    continue
                if text:
                    threads.append((text, after))
                elif after is None:
                    ends = True
                else:
                    visit(after, (*path, node))
            done.add(node)

        visit(node, ())
        return ends, threads


class _Position:
    """A position in the tree: the unread rests of the literals that may follow, and the node after each."""

    __slots__ = ("_constraint", "literals", "nodes")

    def __init__(self, constraint: ChoiceTreeConstraint, literals: Literals, nodes: tuple[Node | None, ...]):
        self._constraint = constraint
        self.literals = literals
        self.nodes = nodes

    @property
    def is_dead_end(self) -> bool:
        return not self.nodes and not self.literals.may_end

    def threads(self) -> Iterable[Thread]:
        return zip(self.literals.texts, self.nodes, strict=True)

    def key(self) -> Hashable:
        """Return what the allowed continuations depend on."""
        return self.literals.texts, self.literals.may_end, self.literals.is_first, self.nodes

    def tokens(self) -> frozenset[int]:
        """Return the tokens that may follow, including tokens that continue through the nodes after the literals."""
        literals, nodes, expand = self.literals, self.nodes, self._constraint.expand
        if literals.tokens is not None:
            return literals.tokens
        following = [None if (node := nodes[i]) is None else expand(node) for i in literals.extending]
        key = tuple([None if position is None else position.literals for position in following])
        tokens = literals.allowed.get(key)
        if tokens is None:
            found, is_determined = self._find_tokens()
            tokens = literals.finish(found)
            if not tokens:
                raise RuntimeError(f"the tokenizer has no token for the text that must follow: {literals.expected()}")
            if is_determined:
                literals.remember(key, tokens)
        return tokens

    def _find_tokens(self) -> tuple[set[int], bool]:
        """Return the tokens that match the threads, and whether no token extends past the nodes after them.

        If none does, the tokens depend only on the literals here and on those that may follow them.
        """
        constraint = self._constraint
        found: set[int] = set()
        is_determined = True
        expanded: set[tuple[bytes, Node]] = set()
        todo = [(b"", text, node) for text, node in self.threads()]
        while todo:
            prefix, text, node = todo.pop()
            ids, extends = constraint.vocabulary.along(prefix, text)
            found.update(ids)
            if extends and node is not None:
                is_determined = is_determined and not prefix
                reached = (prefix + text, node)
                if reached not in expanded:
                    expanded.add(reached)
                    todo += [(reached[0], *thread) for thread in constraint.expand(node).threads()]
        return found, is_determined

    def move(self, token: int) -> _Position:
        """Return the position after a token other than end-of-sequence. Raises ValueError if it may not follow."""
        literals, nodes = self.literals, self.nodes
        move = literals.moves.get(token) or literals.move(token)
        if move.rest is not None:
            kept = nodes if move.kept is None else tuple([nodes[i] for i in move.kept])
            return _Position(self._constraint, move.rest, kept)
        if move.ended is not None and (node := nodes[move.ended]) is not None:
            reached = self._constraint.expand(node)
            if not reached.is_dead_end:
                return reached
        reached, dead_ends = self._constraint.advance(self.threads(), move.spelling)
        if reached.is_dead_end:
            if dead_ends:
                raise _dead_end_error(dead_ends)
            raise ValueError(f"token {token} ({move.spelling!r}) is not allowed here: {literals.expected()}")
        return reached


class ChoiceState:
    """The position of one completion in a choice tree. States with equal `origin` start at the same node."""

    __slots__ = ("_constraint", "_position", "finished", "origin")

    def __init__(self, constraint: ChoiceTreeConstraint, position: _Position, origin: Node, finished: bool = False):
        self._constraint, self._position, self.origin, self.finished = constraint, position, origin, finished

    def fork(self) -> ChoiceState:
        return ChoiceState(self._constraint, self._position, self.origin, self.finished)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._constraint.vocabulary

    @property
    def room(self) -> float | None:
        return self._constraint.room

    @property
    def is_searched(self) -> bool:
        return self.room is None

    @property
    def position(self) -> Hashable | None:
        return None if self._constraint.is_endless else self.finished or self._position.key()

    def alike(self, tokens: Sequence[int]) -> Iterable[Sequence[int]]:
        groups: dict[Hashable, list[int]] = {}
        for token in tokens:
            groups.setdefault(self._position.move(token).key(), []).append(token)
        return groups.values()

    def endings(self) -> Iterable[bytes]:
        if self._position.literals.may_end:
            return [b""]
        return {text + self._constraint.ending(node) for text, node in self._position.threads()}

    def mask(self) -> np.ndarray:
        return self._constraint.packed(frozenset() if self.finished else self._position.tokens())

    def accept(self, token: int) -> None:
        if self.finished:
            raise ValueError(f"token {token} is not allowed after the end of the text")
        if token != self._constraint.vocabulary.eos:
            self._position = self._position.move(token)
        elif self._position.literals.may_end:
            self.finished = True
        else:
            raise ValueError(f"the text may not end here: {self._position.literals.expected()}")

    def forced_text(self) -> bytes:
        """Return the longest prefix of all allowed continuations; empty if the text may end here."""
        return b"" if self.finished else self._position.literals.forced_text


def _dead_end_error(nodes: Sequence[Node]) -> RuntimeError:
    return RuntimeError(
        "the choice tree has a dead end: no choice is left at "
        + ", ".join(f"node {node!r}" for node in nodes[:3])
        + "; every node must have a choice that leads to a node with choices, or that ends the text"
    )
