"""Conversations of several turns as one completion: after a turn, an observation is forced and the next turn begins.

An observation is what the model is told: the answer of an environment, or why its last turn failed (repair). A turn is
text under a constraint, or free text, that ends with the end-of-sequence token. The tokens of observations are forced:
they have log-prob 0 and no gradient, so sampling, replay and scoring are exact without further code. Where turns of
several rows end together, they are answered together (see `AskingState` in base.py).

In the tokens of a completion, turns are found by the end-of-sequence token, which no turn contains before its end, and
by the fixed tokens around the observation. In its text, observations stand between MARKs, which are replaced in what
the model wrote. So no turn can be forged.
"""

from __future__ import annotations

import copy
import json
import string
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError

from .base import Asked, Bounded, Constraint, FreeText, State, pack_ids, read_only
from .vocabulary import special_ids

MARK = "\u241e"  # the visible symbol of the record separator
REPLACEMENT = "\ufffd"  # for a MARK that the model wrote
_CACHE = 1 << 14  # observations

Row = Mapping[str, Any]
Question = tuple[str, str]  # a row as JSON and the text of its conversation so far
Reply = tuple[int, ...] | None  # the tokens between a turn and the next one; None: the conversation ends


def join_turns(turns: Sequence[str], observations: Sequence[str]) -> str:
    """Return the text of a conversation; observation i follows turn i. MARKs in the parts are replaced."""
    parts = [turns[0].replace(MARK, REPLACEMENT)]
    for observation, turn in zip(observations, turns[1:], strict=True):
        parts += [f"\n{MARK} {observation.replace(MARK, REPLACEMENT)} {MARK}\n", turn.replace(MARK, REPLACEMENT)]
    return "".join(parts)


def split_turns(text: str) -> tuple[list[str], list[str]]:
    """Return the turns and the observations of a conversation, the inverse of `join_turns`."""
    parts = text.split(f"\n{MARK} ")
    turns, observations = parts[:1], []
    for part in parts[1:]:
        observation, _, turn = part.partition(f" {MARK}\n")
        turns.append(turn)
        observations.append(observation)
    return turns, observations


class TurnsForm(NamedTuple):
    """How a task shows observations in a chat: as a message of `role`, with `before` and `after` around it."""

    role: str = "user"
    before: str = ""
    after: str = ""
    is_prompt_repeated: bool = False  # after an observation, if the prompt is plain text that an answer continues


class ObservationForm(NamedTuple):
    """The text around an observation for a row, and its tokens."""

    head: str
    tail: str
    head_ids: tuple[int, ...]
    tail_ids: tuple[int, ...]
    is_quoted: bool = False  # the template writes an observation as a JSON string


class TurnsConstraint:
    """Up to `turns` turns, each under `inner`; without `inner`, free text without special tokens. If `inner` has a
    method `start_turn(row, turns)`, it is called with the texts of the earlier turns instead of `start(row)`.

    `reply(row, conversation)` returns the observation that follows, given the text of the conversation so far (see
    `join_turns`), or None if the conversation has ended. It must be a pure function. If `asks` is set, it is called
    instead, and may return before the reply is known.
    """

    def __init__(
        self,
        tokenizer: Any,
        inner: Constraint | None,
        reply: Callable[[Row, str], str | None],
        turns: int,
        shown: TurnsForm = TurnsForm(),  # noqa: B008 - immutable
    ):
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token, so no turn could end; set tokenizer.eos_token")
        self.tokenizer, self.inner, self.turns = tokenizer, inner, turns
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1 if inner is None else inner.vocab_size
        self._reply, self._shown = reply, shown
        self.budget: Any = None  # a Budget, if the tokens of all turns are limited
        self.asks: Callable[[Row, str], Asked] | None = None
        self._special = special_ids(tokenizer)
        self._chat_form: ObservationForm | None = None
        self._known: dict[Question, Reply] = Bounded(_CACHE)
        self.only = lru_cache(_CACHE)(lambda token: read_only(pack_ids([token], self.vocab_size)))
        # Special tokens could imitate the chat template.
        banned = self._special - {tokenizer.eos_token_id}
        allowed = [id for id in range(self.vocab_size) if id not in banned]
        self.free_mask = read_only(pack_ids(allowed, self.vocab_size))

    def __reduce__(self) -> Any:  # without the caches and `asks`, which may use processes of this one
        made = (self.tokenizer, self.inner, self._reply, self.turns, self._shown)
        return TurnsConstraint, made, {"budget": self.budget}

    def start(self, row: Row) -> TurnsState:
        return TurnsState(self, row, json.dumps(row, ensure_ascii=False))

    def start_turn(self, row: Row, turns: Sequence[str], left: int | None = None) -> State:
        """Return the state of the turn that follows these, of so many tokens at most. ValueError if none fits."""
        state = self._unlimited_turn(row, turns)
        return state if self.budget is None or left is None else self.budget.limited(state, left)

    def has_room(self, row: Row, turns: Sequence[str], left: int | None) -> bool:
        """Whether a turn fits that follows these, of so many tokens at most."""
        plan = None if self.budget is None else self.budget.plan(self._unlimited_turn(row, turns))
        return plan is None or left is None or plan.least <= left

    def _unlimited_turn(self, row: Row, turns: Sequence[str]) -> State:
        start = getattr(self.inner, "start_turn", None)
        state = start(row, turns) if start is not None else None if self.inner is None else self.inner.start(row)
        return FreeText(self.free_mask, self.tokenizer.eos_token_id) if state is None else state

    def form(self, row: Row) -> ObservationForm:
        """Return the form of an observation: a message of the chat, or lines of text for a plain prompt."""
        if isinstance(row["prompt"], str):
            return self._make_form("\n", f"\n{row['prompt']}" if self._shown.is_prompt_repeated else "\n")
        if self._chat_form is None:
            form = self._make_form(*chat_observation(self.tokenizer, self._shown))
            if self.tokenizer.unk_token_id in form.head_ids + form.tail_ids:  # it has few words of its own
                form = self._make_form(*chat_observation(self.tokenizer, self._shown._replace(before="", after="")))
            self._chat_form = form
        return self._chat_form

    def spelled(self, row: Row, observation: str) -> list[int]:
        """Return the tokens of an observation, without special tokens. Words that cannot be spelled are left out."""
        form = self.form(row)
        if isinstance(row["prompt"], str):
            observation = " ".join(observation.split())  # a line of the text
        if form.is_quoted:
            observation = json.dumps(observation, ensure_ascii=False)[1:-1]
        return [id for id in self._spelled(observation) if id != form.tail_ids[0]]

    def _spelled(self, text: str) -> list[int]:
        ids = self._ids_of(text, split_special_tokens=True)
        if not self._special.intersection(ids):  # the unknown token is special too
            return ids
        ids = []
        for word in text.split():
            bare = word.strip(string.punctuation)
            for text in (f" {word}", word, f" {bare}", bare):
                spelled = self._ids_of(text, split_special_tokens=True)
                if spelled and not self._special.intersection(spelled):
                    ids += spelled
                    break
        return ids

    def turns_of(self, row: Row, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return the first token of each turn in a completion, and the one after its end, which is end-of-sequence
        unless the completion was cut off. A turn of which nothing was written is left out."""
        eos, form, found, start = self.tokenizer.eos_token_id, self.form(row), [], 0
        while start < len(ids):
            end = next((at + 1 for at in range(start, len(ids)) if ids[at] == eos), len(ids))
            found.append((start, end))
            observed = end + len(form.head_ids)
            tail = next((at for at in range(observed, len(ids)) if ids[at] == form.tail_ids[0]), len(ids))
            start = tail + len(form.tail_ids)
        return found

    def text_of(self, row: Row, ids: Sequence[int]) -> str:
        """Return the text of a completion, with the observations between its turns."""
        form, turns = self.form(row), self.turns_of(row, ids)
        between = [
            ids[end + len(form.head_ids) : start - len(form.tail_ids)] for (_, end), (start, _) in pairwise(turns)
        ]
        return join_turns([self.turn_text(ids[start:end]) for start, end in turns] or [""],
                          [self.observed_text(observed) for observed in between])  # fmt: skip

    def turn_text(self, ids: Sequence[int]) -> str:
        """Return the text of one turn as it is scored."""
        return self._decode(ids).replace(MARK, REPLACEMENT)

    def observed_text(self, ids: Sequence[int]) -> str:
        """Return the text of an observation as conversations hold it."""
        return self._decode(ids).strip()

    def answers(self, questions: Sequence[Question]) -> list[Reply]:
        """Return the tokens between each of these conversations and its next turn, or None where it ends."""
        return [asked.answer() for asked in [self.ask(question) for question in questions]]

    def ask(self, question: Question) -> Asked:
        """Like `answers`, without waiting."""
        row, text = json.loads(question[0]), question[1]
        if question in self._known or self.asks is None:
            return Asked(lambda: True, lambda: self._answer(question, row, lambda: self._reply(row, text)))
        asked = self.asks(row, text)
        return Asked(asked.is_answered, lambda: self._answer(question, row, asked.answer))

    def _answer(self, question: Question, row: Row, observe: Callable[[], str | None]) -> Reply:
        if question not in self._known:
            observation, form = observe(), self.form(row)
            self._known[question] = (
                None if observation is None else (*form.head_ids, *self.spelled(row, observation), *form.tail_ids)
            )
        return self._known[question]

    def _make_form(self, head: str, tail: str, is_quoted: bool = False) -> ObservationForm:
        return ObservationForm(head, tail, tuple(self._ids_of(head)), tuple(self._ids_of(tail)), is_quoted)

    def _ids_of(self, text: str, **options: Any) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


class TurnsState:
    """The position of one completion in a conversation. Rows differ in what they are told, so only equal rows share.

    After a turn, `question` is its row and the conversation so far, which must be answered before the state continues.
    The caller may have it answered by `TurnsConstraint.answers` and pass the answer to `resume`; otherwise the state
    does so when needed.
    """

    __slots__ = ("_constraint", "_forced", "_inner", "_is_finished", "_key", "_left", "_observations", "_row",
                 "_turns", "_written", "question")  # fmt: skip

    def __init__(self, constraint: TurnsConstraint, row: Row, key: str):
        self._constraint, self._row, self._key = constraint, row, key
        self._left = None if constraint.budget is None else constraint.budget.most_tokens  # of all turns
        self._inner = constraint.start_turn(row, (), self._left)
        self._turns: tuple[str, ...] = ()  # those that have ended
        self._observations: tuple[str, ...] = ()
        self._written: list[int] = []  # the tokens of this turn
        self._forced: tuple[int, ...] = ()  # the rest of an observation, which must follow
        self._is_finished = False
        self.question: Question | None = None

    @property
    def origin(self) -> Hashable:
        return None if getattr(self._inner, "origin", None) is None else self._key

    @property
    def finished(self) -> bool:
        self._settle()
        return self._is_finished

    @property
    def told(self) -> tuple[int, ...]:
        """The tokens that must follow before the next turn: what is left of an observation."""
        self._settle()
        return self._forced

    def fork(self) -> TurnsState:
        forked = copy.copy(self)
        forked._inner, forked._written = self._inner.fork(), self._written.copy()  # type: ignore[attr-defined]
        return forked

    def mask(self) -> np.ndarray:
        self._settle()
        return self._constraint.only(self._forced[0]) if self._forced else self._inner.mask()

    def accept(self, token: int) -> None:
        self._settle()
        if not self._forced:
            self._inner.accept(token)
            self._left = None if self._left is None else self._left - 1
            self._written.append(token)
            if self._inner.finished:
                self._end_turn()
            return
        if token != self._forced[0]:
            raise ValueError(f"token {token} is not allowed here: only {self._forced[0]} is")
        self._forced = self._forced[1:]
        self._left = None if self._left is None else self._left - 1
        if not self._forced:
            self._written = []
            self._inner = self._constraint.start_turn(self._row, self._turns, self._left)

    def resume(self, answer: Reply) -> None:
        self.question = None
        if answer is not None:
            left = None if self._left is None else self._left - len(answer)
            answer = answer if self._constraint.has_room(self._row, self._turns, left) else None
        self._forced, self._is_finished = answer or (), answer is None
        if answer is not None:
            form = self._constraint.form(self._row)
            observed = answer[len(form.head_ids) : len(answer) - len(form.tail_ids)]
            self._observations = (*self._observations, self._constraint.observed_text(observed))

    def _end_turn(self) -> None:
        self._turns = (*self._turns, self._constraint.turn_text(self._written))
        if len(self._turns) < self._constraint.turns:
            self.question = (self._key, join_turns(self._turns, self._observations))
        else:
            self._is_finished = True

    def _settle(self) -> None:
        if self.question is not None:
            self.resume(self._constraint.answers([self.question])[0])


def chat_observation(tokenizer: Any, shown: TurnsForm) -> tuple[str, str, bool]:
    """Return what the chat template writes between the end of an answer and an observation, and from there to the next
    answer, and whether it writes the observation as a JSON string. ValueError if it takes no second message."""
    answer, observation = "4217", 'z3519"'  # no JSON value, which templates would write as it is
    messages = [("user", "?"), ("assistant", answer), (shown.role, f"{shown.before}{observation}{shown.after}")]
    try:
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
    except (TemplateError, ValueError) as error:
        raise ValueError(
            f"the chat template of this model takes no second message of the {shown.role} ({error}), so that there is "
            "no second turn; give one turn (--repair_turns 1), or another --model"
        ) from error
    after = text.rpartition(answer)[2]
    is_quoted = json.dumps(observation)[1:-1] in after
    between, _, tail = after.partition(json.dumps(observation)[1:-1] if is_quoted else observation)
    _, end, head = between.partition(tokenizer.eos_token)
    return head if end else between, tail or "\n", is_quoted
