"""Masks that leave room to finish: near the token limit, only tokens from which a complete answer still fits.

With R tokens left, this one and end-of-sequence included, token w is allowed in state s if 1 + D(s·w) <= R, where D is
the number of tokens that finish the answer. So no completion is cut off. D is exact where a search can visit all
positions of an answer: choice trees without `longest_ending`, and regular grammars with small vocabularies. Elsewhere
it is the number of tokens that spell a known ending, the longest possible token first. The first of them always lowers
D by one, so that a mask is never empty.

For this, states have beside the methods in base.py: `position`, what the allowed continuations depend on (None: it is
unknown how a text ends); `room`, a bound on the tokens that finish from any position (None: only a search can tell);
`is_searched`, whether positions may be few enough for a search; `alike(tokens)`, which groups tokens after which the
position is the same; and `endings()`, texts with which the text so far may end.

Far from the limit, a mask costs one comparison more. Below `room`, the most tokens that any answer of the row needs to
finish, what each token needs is computed once per position.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from .base import Bounded, State, pack_ids, read_only, unpack
from .choices import ChoiceTreeConstraint
from .grammar import GrammarConstraint
from .spelling import OneSpelling
from .think import ThinkState, ThinkThen
from .turns import TurnsConstraint

LIMIT = "max_completion_length"  # the key of a row with its own limit, in vLLM's server
_CHECKED_ROWS = 512
_MOST_MOVES = 5_000  # of a search
_LONGEST_TOKEN = 256  # bytes; longer ones are not tried
_CACHE = 1 << 14

Positioned = tuple[Hashable, bool]  # a position, and whether D is exact there


class Plan(NamedTuple):
    """How the answers of a row are finished in time."""

    room: float  # tokens with which any text of the row can be finished
    is_exact: bool
    least: float  # tokens of the shortest completion
    answers: Mapping[int, float]  # tokens that finish an answer, by the code of the marker end before it


def within(constraint: Any, most_tokens: int | None, rows: Iterable[Mapping[str, Any]] = ()) -> Any:
    """Return the constraint with completions of at most `most_tokens` tokens; None: a row's LIMIT says how many.

    A constraint of another author is returned as it is. ValueError if no answer fits for one of the first `rows`.
    """
    limit = constraint if isinstance(constraint, Budget) else getattr(constraint, "budget", None)
    if limit is None or limit.most_tokens != most_tokens:
        constraint = getattr(constraint, "unlimited", constraint)
        if isinstance(constraint, TurnsConstraint):
            budget, constraint = Budget(constraint, most_tokens), copy.copy(constraint)
            constraint.budget = budget
        elif isinstance(constraint, ChoiceTreeConstraint | GrammarConstraint | OneSpelling | ThinkThen):
            constraint = Budget(constraint, most_tokens)
    if isinstance(constraint, Budget):
        for row in islice(rows, _CHECKED_ROWS):
            constraint.start(row)
    return constraint


class Budget:
    """A constraint whose completions have at most `most_tokens` tokens, end-of-sequence included; None: as many as a
    row's LIMIT, and any number without one.

    Rows of which it is not known how their texts end are only under the inner constraint: large choice trees without
    `longest_ending`, and grammars with left recursion.

    >>> from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Vocabulary, unpack
    >>> tree = ChoiceTreeConstraint(Vocabulary([b"a", b"b", b"aa", None], 3), lambda row: 0,
    ...                             lambda node: [("b", None), ("aaaa", None)])
    >>> [np.flatnonzero(unpack(Budget(tree, most).start({}).mask(), 4)).tolist() for most in (2, 3, 4)]
    [[1], [1, 2], [0, 1, 2]]
    """

    def __init__(self, unlimited: Any, most_tokens: int | None):
        self.unlimited, self.most_tokens, self.vocab_size = unlimited, most_tokens, unlimited.vocab_size
        is_turns = isinstance(unlimited, TurnsConstraint)
        self._eos: int = unlimited.tokenizer.eos_token_id if is_turns else unlimited.vocabulary.eos
        self._plans: dict[Hashable, Plan | None] = Bounded(_CACHE)
        self._distances: dict[Hashable, float] = {}  # of searched positions
        self._lengths: dict[Positioned, float] = Bounded(_CACHE)
        self._needs: dict[Positioned, list[tuple[np.ndarray, float]]] = Bounded(_CACHE)
        self._masks: dict[tuple[Positioned, int], np.ndarray] = Bounded(_CACHE)

    def __reduce__(self) -> Any:  # without the caches
        return Budget, (self.unlimited, self.most_tokens)

    def start(self, row: Mapping[str, Any]) -> State | None:
        """Return the state before the first token. ValueError if no answer fits."""
        state = self.unlimited.start(row)
        most = self.most_tokens or row.get(LIMIT)
        return state if state is None or most is None else self.limited(state, most)

    def limited(self, state: Any, left: int) -> State:
        """Return a state that ends within `left` tokens. ValueError if no answer fits."""
        plan = self.plan(state)
        if plan is None:
            return state
        if plan.least > left:
            raise ValueError(
                f"max_completion_length={left} is too short: the shortest answer takes {plan.least} tokens, its end "
                "included; set a larger one"
            )
        return BudgetState(self, state, plan, left, None if state.origin is None else (state.origin, left))

    def plan(self, state: Any) -> Plan | None:
        """Return the plan of a state before its first token; None if it is not known how its texts end."""
        origin = getattr(state, "origin", None)
        if origin is None:
            return None
        if origin not in self._plans:
            self._plans[origin] = self._plan_new(state)
        return self._plans[origin]

    def _plan_new(self, state: Any) -> Plan | None:
        is_thinking = isinstance(state, ThinkState)
        answers = state.answers() if is_thinking else {0: state}
        if any(getattr(answer, "position", None) is None for answer in answers.values()):
            return None
        rooms = [answer.room for answer in answers.values()]
        is_exact = any(answer.is_searched for answer in answers.values())
        searched = [self._search(answer) or math.inf for answer in answers.values()] if is_exact else []
        is_exact = is_exact and math.inf not in searched
        if is_exact:
            room = max(searched)
        elif None in rooms:
            return None
        else:
            room = max(rooms)
        least = {code: self._fewest(answer, Plan(0, is_exact, 0, {})) for code, answer in answers.items()}
        if is_thinking:
            plan = Plan(room + state.room, is_exact, 0, least)
            return plan._replace(least=self._fewest(state, plan))
        return Plan(room, is_exact, least[0], {})

    # ---- distances

    def _fewest(self, state: Any, plan: Plan) -> float:
        """Return the tokens that finish from a state, end-of-sequence included."""
        if state.finished:
            return 0
        key = (state.position, plan.is_exact)
        if key not in self._lengths:
            self._lengths[key] = self._fewest_new(state, plan)
        return self._lengths[key]

    def _fewest_new(self, state: Any, plan: Plan) -> float:
        if isinstance(state, ThinkState) and state.is_thinking:
            return state.fewest(plan.answers)
        if plan.is_exact:
            if state.position not in self._distances:
                self._search(state)
            return self._distances[state.position]
        return min((self._spelled(state, text) for text in state.endings()), default=math.inf)

    def _spelled(self, state: Any, text: bytes) -> float:
        """Return the tokens of an ending, the longest possible token first, or infinity if it cannot be spelled."""
        words = state.mask()
        if not text:
            return 1 if _has(words, self._eos) else math.inf
        vocabulary = state.vocabulary
        for token in reversed(vocabulary.along(b"", text[:_LONGEST_TOKEN])[0]):
            if _has(words, token):
                after = state.fork()
                after.accept(token)
                rest = self._spelled(after, text[len(vocabulary.bytes_of[token]) :])
                if rest < math.inf:
                    return 1 + rest
        return math.inf

    def _search(self, start: Any) -> float | None:
        """Find the distances of all positions after a state and return the largest; None if there are too many."""
        reached: dict[Hashable, set[Hashable]] = {}
        before: dict[Hashable, list[Hashable]] = {}
        ends, todo, moves = [], [start], 0
        try:
            for state in todo:
                if state.position in reached:
                    continue
                reached[state.position] = set()
                tokens, may_end = self._tokens(state)
                moves += len(tokens)
                if moves > _MOST_MOVES:
                    return None
                if may_end:
                    ends.append(state.position)
                for group in state.alike(tokens):
                    after = state.fork()
                    after.accept(group[0])
                    before.setdefault(after.position, []).append(state.position)
                    todo.append(after)
        except RuntimeError:  # a dead end, which sampling may never meet
            return None
        found = dict.fromkeys(ends, 1)
        for position in ends:
            for earlier in before.get(position, ()):
                if earlier not in found:
                    found[earlier] = found[position] + 1
                    ends.append(earlier)
        self._distances |= dict.fromkeys(reached, math.inf) | found
        return max(found.values(), default=None)

    def _tokens(self, state: Any) -> tuple[list[int], bool]:
        """Return the allowed tokens without end-of-sequence, and whether that is allowed."""
        tokens = np.flatnonzero(unpack(state.mask(), self.vocab_size)).tolist()
        return [token for token in tokens if token != self._eos], _has(state.mask(), self._eos)

    # ---- masks

    def mask(self, state: Any, plan: Plan, left: int) -> np.ndarray:
        """Return the tokens after which the answer still fits, if `left` tokens are left."""
        words, position = state.mask(), (state.position, plan.is_exact)
        if position not in self._needs:
            self._needs[position] = self._needs_new(state, plan)
        needs = self._needs[position]
        # If no ending is known that fits, because xgrammar allowed bytes that are no UTF-8: the nearest.
        most = max(left, min(need for _, need in needs))
        if all(need <= most for _, need in needs):
            return words
        if (position, left) not in self._masks:
            fitting = [tokens for tokens, need in needs if need <= most]
            self._masks[position, left] = read_only(pack_ids(np.concatenate(fitting), self.vocab_size))
        return self._masks[position, left]

    def _needs_new(self, state: Any, plan: Plan) -> list[tuple[np.ndarray, float]]:
        """Return the allowed tokens in groups, with the tokens that finish after one of a group, this one included."""
        tokens, may_end = self._tokens(state)
        needs = [(np.array([self._eos]), 1.0)] if may_end else []
        for group in state.alike(tokens):
            after = state.fork()
            after.accept(int(group[0]))
            needs.append((np.asarray(group), 1 + self._fewest(after, plan)))
        return needs


class BudgetState:
    """The position of one completion, and the tokens left."""

    __slots__ = ("_budget", "_left", "_plan", "_state", "_words", "origin")

    def __init__(self, budget: Budget, state: Any, plan: Plan, left: int, origin: Hashable):
        self._budget, self._state, self._plan, self._left, self.origin = budget, state, plan, left, origin
        self._words: np.ndarray | None = None  # the current mask near the limit, once it has been computed

    @property
    def finished(self) -> bool:
        return self._state.finished

    def fork(self) -> BudgetState:
        return BudgetState(self._budget, self._state.fork(), self._plan, self._left, self.origin)

    def mask(self) -> np.ndarray:
        if self._left > self._plan.room or self._state.finished:
            return self._state.mask()
        if self._words is None:
            self._words = self._budget.mask(self._state, self._plan, self._left)
        return self._words

    def accept(self, token: int) -> None:
        if self._left <= self._plan.room and not self._state.finished:
            words = self.mask()
            if 0 <= token < 32 * len(words) and not _has(words, token) and _has(self._state.mask(), token):
                raise ValueError(f"token {token} is not allowed here: {self._left} tokens are too few for it")
        self._state.accept(token)
        self._left -= 1
        self._words = None


def _has(words: np.ndarray, token: int) -> bool:
    return bool(words[token // 32] >> token % 32 & 1)
