"""Conversations of several turns from vLLM, which ends a request with the first turn: each turn is a request of its
own, whose prompt goes on with the turns before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..constraints.base import Constraint, State
from ..constraints.budget import LIMIT, within
from ..constraints.turns import Row, TurnsConstraint, split_turns

EARLIER_TURNS = "earlier_turns"  # an entry of a row, for OneTurn


class Sampled(NamedTuple):
    """Completions of vLLM, their log-probs, and the tokens that could be sampled at each position (None: unknown)."""

    completion_ids: list[list[int]]
    logps: list[list[float]]
    kept: list[list[list[int]]] | None


class Turn(NamedTuple):
    """What a request samples: its row as JSON text, the tokens after the prompt so far, and how many may follow."""

    row: str
    ids: list[int]
    most: int


def converse(
    constraint: TurnsConstraint,
    rows: Sequence[Row],
    most: int,
    send: Callable[[list[Turn | None]], Sampled],
    is_open_anywhere: Callable[[bool], bool] = bool,
) -> Sampled:
    """Return conversations of up to `most` tokens. `send` samples the next turn of each row, or nothing where the
    conversation has ended (None). With several processes, all call it equally often: `is_open_anywhere` tells whether
    a conversation is open in any of them, given whether one is in this process."""

    def turn_after(row: Row, texts: list[str], ids: list[int]) -> Turn:
        row = {**row, EARLIER_TURNS: None if constraint.inner is None else texts}
        return Turn(row_text(row), ids, most - len(ids))

    turns: list[Turn | None] = [turn_after(row, [], []) for row in rows]
    ids_B, logps_B, kept_B = ([[] for _ in rows] for _ in range(3))  # type: tuple[list, list, list]
    has_kept = False
    while is_open_anywhere(any(turns)):
        sampled = send(turns)
        has_kept = sampled.kept is not None
        asking, questions = [], []
        for place, turn in enumerate(turns):
            ids_B[place] += sampled.completion_ids[place]
            logps_B[place] += sampled.logps[place]
            kept_B[place] += sampled.kept[place] if sampled.kept is not None else []
            row, ids = rows[place], ids_B[place]
            has_ended = turn is None or len(ids) >= most or ids[-1:] != [constraint.tokenizer.eos_token_id]
            if not has_ended and len(constraint.turns_of(row, ids)) < constraint.turns:
                asking.append(place)
                questions.append((json.dumps(row, ensure_ascii=False), constraint.text_of(row, ids)))
        turns = [None] * len(rows)
        for place, (_, text), answer in zip(asking, questions, constraint.answers(questions), strict=True):
            texts, left = split_turns(text)[0], most - len(ids_B[place])
            if answer is None or not constraint.has_room(rows[place], texts, left - len(answer)):
                continue
            told = answer[:left]
            ids_B[place] += told
            logps_B[place] += [0.0] * len(told)  # they are forced
            kept_B[place] += [[token] for token in told]
            if len(ids_B[place]) < most:
                turns[place] = turn_after(rows[place], texts, ids_B[place])
    return Sampled(ids_B, logps_B, kept_B if has_kept else None)


class OneTurn:
    """The constraint of requests. A row has the texts of earlier turns under EARLIER_TURNS, or None for a turn of free
    text; rows without that entry are under `constraint` as it is. A row's LIMIT is the most tokens of the request."""

    def __init__(self, tokenizer: Any, constraint: Constraint | None):
        self._constraint = within(constraint, None)
        turns = [TurnsConstraint(tokenizer, each, lambda row, conversation: None, 1) for each in (constraint, None)]
        self._turns, self._free = (within(each, None) for each in turns)
        self.vocab_size = self._turns.vocab_size

    def start(self, row: Row) -> State | None:
        if EARLIER_TURNS not in row:
            return None if self._constraint is None else self._constraint.start(row)
        row = dict(row)
        turns, left = row.pop(EARLIER_TURNS), row.pop(LIMIT, None)
        if turns is None:
            return self._free.start_turn(row, (), left)
        if not (isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)):
            raise ValueError(f"{EARLIER_TURNS!r} must be a list of texts, but it is {turns!r:.60}")
        return self._turns.start_turn(row, tuple(turns), left)


def row_text(row: Mapping[str, Any]) -> str:
    """Return a row as JSON text. Raises ValueError if it has values that JSON does not have."""
    try:
        return json.dumps(dict(row), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a row cannot be sent to vLLM: {error}; constraints get rows of JSON values with use_vllm"
        ) from error
