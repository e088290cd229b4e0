"""Conversations of several turns as one completion: after a failed turn, feedback is forced and the next turn begins.

A turn is text under a constraint, or free text, that ends with the end-of-sequence token. The tokens of the feedback
are forced: they have log-prob 0 and no gradient, so sampling, replay and scoring are exact without further code.
Where turns of several rows end together, they are scored together (see `AskingState` in base.py).

In the tokens of a completion, turns are found by the end-of-sequence token, which no turn contains before its end, and
by the fixed tokens around the reason. In its text, feedback stands between MARKs, which are replaced in what the model
wrote. So no turn can be forged.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError

from .base import Constraint, FreeText, State, pack_ids, read_only
from .vocabulary import special_ids

MARK = "\u241e"  # the visible symbol of the record separator
REPLACEMENT = "\ufffd"  # for a MARK that the model wrote
BEFORE, AFTER = "This answer is not accepted: ", "\nAnswer again, in the same form."  # around the reason in a chat
_FEEDBACK_CACHE = 1 << 14

Row = Mapping[str, Any]
Question = tuple[str, str]  # a row as JSON and the text of a turn
Feedback = tuple[int, ...] | None  # the tokens between a turn and the next one; None: the conversation ends


def join_turns(turns: Sequence[str], reasons: Sequence[str]) -> str:
    """Return the text of a conversation; reason i follows turn i. MARKs in the parts are replaced."""
    parts = [turns[0].replace(MARK, REPLACEMENT)]
    for reason, turn in zip(reasons, turns[1:], strict=True):
        parts += [f"\n{MARK} {reason.replace(MARK, REPLACEMENT)} {MARK}\n", turn.replace(MARK, REPLACEMENT)]
    return "".join(parts)


def split_turns(text: str) -> tuple[list[str], list[str]]:
    """Return the turns and the reasons of a conversation, the inverse of `join_turns`."""
    parts = text.split(f"\n{MARK} ")
    turns, reasons = parts[:1], []
    for part in parts[1:]:
        reason, _, turn = part.partition(f" {MARK}\n")
        turns.append(turn)
        reasons.append(reason)
    return turns, reasons


class FeedbackForm(NamedTuple):
    """The text around the reason in the feedback to a row, and its tokens."""

    head: str
    tail: str
    head_ids: tuple[int, ...]
    tail_ids: tuple[int, ...]


class TurnsConstraint:
    """Up to `turns` turns, each under `inner`; without `inner`, free text without special tokens.

    `reason(row, text)` returns why the text of a turn fails, in one line, or None if the conversation ends with it.
    It must be a pure function. If `reasons` is set, it is called instead, with many rows and texts at once.
    """

    def __init__(self, tokenizer: Any, inner: Constraint | None, reason: Callable[[Row, str], str | None], turns: int):
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token, so no turn could end; set tokenizer.eos_token")
        self.tokenizer, self.inner, self.turns = tokenizer, inner, turns
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1 if inner is None else inner.vocab_size
        self._reason = reason
        self.reasons: Callable[[Sequence[Row], Sequence[str]], Sequence[str | None]] | None = None
        self._special = special_ids(tokenizer)
        self._chat_form: FeedbackForm | None = None
        self._feedback: dict[Question, Feedback] = {}
        self.only = lru_cache(_FEEDBACK_CACHE)(lambda token: read_only(pack_ids([token], self.vocab_size)))
        # Special tokens could imitate the chat template.
        banned = self._special - {tokenizer.eos_token_id}
        allowed = [id for id in range(self.vocab_size) if id not in banned]
        self.free_mask = read_only(pack_ids(allowed, self.vocab_size))

    def __reduce__(self) -> Any:  # without the caches and `reasons`, which may use processes of this one
        return TurnsConstraint, (self.tokenizer, self.inner, self._reason, self.turns)

    def start(self, row: Row) -> TurnsState:
        return TurnsState(self, row, json.dumps(row, ensure_ascii=False), self.start_turn(row))

    def start_turn(self, row: Row) -> State:
        state = None if self.inner is None else self.inner.start(row)
        return FreeText(self.free_mask, self.tokenizer.eos_token_id) if state is None else state

    def form(self, row: Row) -> FeedbackForm:
        """Return the form of feedback: a message of the chat, or for a plain prompt lines after which it is repeated,
        because the answer continues it."""
        if isinstance(row["prompt"], str):
            return self._make_form("\n", f"\n{row['prompt']}")
        if self._chat_form is None:
            form = self._make_form(*chat_feedback(self.tokenizer, BEFORE, AFTER))
            if self.tokenizer.unk_token_id in form.head_ids + form.tail_ids:  # it has few words of its own
                form = self._make_form(*chat_feedback(self.tokenizer))
            self._chat_form = form
        return self._chat_form

    def spelled_reason(self, reason: str) -> list[int]:
        """Return the tokens of a reason, without special tokens. Words that cannot be spelled are left out."""
        ids = self._ids_of(reason, split_special_tokens=True)
        if not self._special.intersection(ids):  # the unknown token is special too
            return ids
        ids = []
        for word in reason.split():
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
            reason = end + len(form.head_ids)
            tail = next((at for at in range(reason, len(ids)) if ids[at] == form.tail_ids[0]), len(ids))
            start = tail + len(form.tail_ids)
        return found

    def text_of(self, row: Row, ids: Sequence[int]) -> str:
        """Return the text of a completion, with the reasons between its turns."""
        form, turns = self.form(row), self.turns_of(row, ids)
        between = [
            ids[end + len(form.head_ids) : start - len(form.tail_ids)] for (_, end), (start, _) in pairwise(turns)
        ]
        return join_turns([self.turn_text(ids[start:end]) for start, end in turns] or [""],
                          [self._decode(reason).strip() for reason in between])  # fmt: skip

    def turn_text(self, ids: Sequence[int]) -> str:
        """Return the text of one turn as it is scored."""
        return self._decode(ids).replace(MARK, REPLACEMENT)

    def answers(self, questions: Sequence[Question]) -> list[Feedback]:
        """Return the tokens between each of these turns and the next one, or None where the conversation ends."""
        known = {question: self._feedback[question] for question in questions if question in self._feedback}
        new = [question for question in dict.fromkeys(questions) if question not in known]
        rows, texts = [json.loads(key) for key, _ in new], [text for _, text in new]
        if self.reasons is not None and new:
            reasons = self.reasons(rows, texts)
        else:
            reasons = [self._reason(row, text) for row, text in zip(rows, texts, strict=True)]
        for question, row, reason in zip(new, rows, reasons, strict=True):
            known[question] = None if reason is None else self._spelled_feedback(row, reason)
        if len(self._feedback) + len(new) > _FEEDBACK_CACHE:
            self._feedback.clear()
        self._feedback |= known
        return [known[question] for question in questions]

    def _spelled_feedback(self, row: Row, reason: str) -> tuple[int, ...]:
        form = self.form(row)
        spelled = [id for id in self.spelled_reason(reason) if id != form.tail_ids[0]]
        return (*form.head_ids, *spelled, *form.tail_ids)

    def _make_form(self, head: str, tail: str) -> FeedbackForm:
        return FeedbackForm(head, tail, tuple(self._ids_of(head)), tuple(self._ids_of(tail)))

    def _ids_of(self, text: str, **options: Any) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


class TurnsState:
    """The position of one completion in a conversation. Rows differ in their feedback, so only equal rows share.

    After a turn, `question` is its row and text, which must be scored before the state continues. The caller may have
    it answered by `TurnsConstraint.answers` and pass the answer to `resume`; otherwise the state does so when needed.
    """

    __slots__ = ("_constraint", "_feedback", "_inner", "_is_finished", "_key", "_row", "_turn", "_written", "question")

    def __init__(self, constraint: TurnsConstraint, row: Row, key: str, inner: State):
        self._constraint, self._row, self._key, self._inner = constraint, row, key, inner
        self._turn = 1
        self._written: list[int] = []  # the tokens of this turn
        self._feedback: tuple[int, ...] = ()  # the rest of the feedback, which must follow
        self._is_finished = False
        self.question: Question | None = None

    @property
    def origin(self) -> Hashable:
        return None if getattr(self._inner, "origin", None) is None else self._key

    @property
    def finished(self) -> bool:
        self._settle()
        return self._is_finished

    def fork(self) -> TurnsState:
        forked = TurnsState(self._constraint, self._row, self._key, self._inner.fork())  # type: ignore[attr-defined]
        forked._turn, forked._written, forked._feedback = self._turn, self._written.copy(), self._feedback
        forked._is_finished, forked.question = self._is_finished, self.question
        return forked

    def mask(self) -> np.ndarray:
        self._settle()
        return self._constraint.only(self._feedback[0]) if self._feedback else self._inner.mask()

    def accept(self, token: int) -> None:
        self._settle()
        if not self._feedback:
            self._inner.accept(token)
            self._written.append(token)
            if self._inner.finished:
                self._end_turn()
            return
        if token != self._feedback[0]:
            raise ValueError(f"token {token} is not allowed here: only {self._feedback[0]} is")
        self._feedback = self._feedback[1:]
        if not self._feedback:
            self._turn += 1
            self._written = []
            self._inner = self._constraint.start_turn(self._row)

    def resume(self, answer: Feedback) -> None:
        self.question = None
        self._feedback, self._is_finished = answer or (), answer is None

    def _end_turn(self) -> None:
        if self._turn < self._constraint.turns:
            self.question = (self._key, self._constraint.turn_text(self._written))
        else:
            self._is_finished = True

    def _settle(self) -> None:
        if self.question is not None:
            self.resume(self._constraint.answers([self.question])[0])


def chat_feedback(tokenizer: Any, before: str = "", after: str = "") -> tuple[str, str]:
    """Return what the chat template writes between the end of an answer and the reason, and from there to the next
    answer. In the message, `before` and `after` surround the reason. ValueError if it takes no second question."""
    answer, reason = "4217", "3519"
    messages = [("user", "?"), ("assistant", answer), ("user", f"{before}{reason}{after}")]
    try:
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
    except (TemplateError, ValueError) as error:
        raise ValueError(
            f"the chat template of this model takes no second question ({error}), so that there is no second turn; "
            "leave --repair_turns out, or choose another --model"
        ) from error
    between, _, tail = text.rpartition(answer)[2].partition(reason)
    _, end, head = between.partition(tokenizer.eos_token)
    return head if end else between, tail or "\n"
