"""The rows of a rollout in progress, and its result."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..constraints.base import FREE, Asked
from ..constraints.shared import Advanced, Forced, SharedStates
from ..constraints.workers import WorkerStates
from .decoder import Decoder

POLL_SECONDS = 0.0005


@dataclass
class Rollout:
    """The completions of a batch, without padding: token ids, mask numbers and sampling log-probs by row."""

    completion_ids: list[list[int]]
    masks: list[list[int]]
    logps: list[list[float]]
    forward_passes: int = 0
    batch_size: int = 0  # most rows that were generated at the same time


class Editor(Protocol):
    """Inspects completions during generation and deletes tokens that must be generated again."""

    def keep(self, i: int, ids: Sequence[int], ended: bool) -> int | None:
        """Return the number of tokens of row i to keep, or None to keep all.

        The method is called whenever tokens were appended to the row: one sampled token and the tokens that a
        constraint forces after it. `ended` is true if the last token is end-of-sequence; keeping it finishes the row.
        An editor that deletes tokens on every call never terminates.
        """

    def counts(self, i: int) -> dict[str, int]:
        """Return statistics of the edits to row i, by name, for display."""


class Batch:
    """The rows of a rollout: what they contain, and which of their tokens the model has not seen."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[tuple[int, ...]],
        rows: Sequence[Mapping[str, Any]] | None,
        max_new_tokens: int,
        eos_ids: frozenset[int],
        states: SharedStates | WorkerStates | None,
        editor: Editor | None,
    ):
        self.decoder, self.prompts, self.states, self._editor = decoder, prompts, states, editor
        self._rows, self.max_new_tokens, self._eos = rows, max_new_tokens, eos_ids
        count = len(prompts)
        self.waiting = deque(range(count))
        self._in_progress = 0
        self.result = Rollout([[] for _ in range(count)], [[] for _ in range(count)], [[] for _ in range(count)])
        self.pending: list[list[int]] = [[] for _ in range(count)]  # tokens that were not fed yet
        self.lengths = [0] * count  # tokens in the cache
        self.asked: dict[int, Asked] = {}  # rows whose next turn waits for an answer
        self.feeds_before_reading = states is None and editor is None and decoder.is_asynchronous

    def start_waiting(self, limit: int) -> list[int]:
        """Start up to `limit` waiting rows for which the cache has room, and return them.

        Their prompts are read, except for the last token, and what a constraint forces is appended.
        """
        rows: list[int] = []
        sources = []
        while self.waiting and len(rows) < limit and self.decoder.cache.fits(self.prompts[self.waiting[0]]):
            rows.append(self.waiting.popleft())
            sources.append(self.decoder.cache.add(rows[-1], self.prompts[rows[-1]]))
        self._in_progress += len(rows)
        self.result.batch_size = max(self.result.batch_size, self._in_progress)
        if rows:
            self.decoder.prefill(rows, [self.prompts[i] for i in rows], sources)
        for i in rows:
            self.lengths[i] = len(self.prompts[i]) - 1
            self.pending[i] = [self.prompts[i][-1]]
        if self.states is not None:
            assert self._rows is not None
            for i, forced in zip(rows, self.states.start(rows, [self._rows[i] for i in rows]), strict=True):
                self._append_forced(i, forced)
        return rows

    def append(
        self, rows: Sequence[int], tokens: Sequence[int], logps: Sequence[float], masks: Sequence[int]
    ) -> Callable[[], None]:
        """Append one sampled token to each row.

        Returns a function that appends what a constraint forces after them, which workers compute in the meantime.
        """
        result = self.result
        for i, token, logp, mask in zip(rows, tokens, logps, masks, strict=True):
            result.completion_ids[i].append(token)
            result.logps[i].append(logp)
            result.masks[i].append(mask)
            self.pending[i].append(token)
        if self.states is None:
            return lambda: None
        # An end token too: the constraint may continue after it, with feedback and another turn.
        open_rows = [i for i in rows if not self._is_full(i)]
        accepted = self.states.accept_async(open_rows, [result.completion_ids[i][-1] for i in open_rows])

        return lambda: self._append_advanced(open_rows, accepted())

    def answered(self, rows: Sequence[int], seconds: float | None) -> list[int]:
        """Continue those of these rows whose questions have answers, after waiting for answers up to so many seconds
        (None: until all have one), and return the rows that ask nothing more."""
        assert self.states is not None
        until = time.monotonic() + (seconds or 0)
        while open_rows := [i for i in rows if i in self.asked]:
            ready = open_rows if seconds is None else [i for i in open_rows if self.asked[i].is_answered()]
            if ready:
                answers = [self.asked.pop(i).answer() for i in ready]
                self._append_advanced(ready, self.states.resume(ready, answers))
            elif time.monotonic() >= until:
                break
            else:
                time.sleep(POLL_SECONDS)
        return [i for i in rows if i not in self.asked]

    def extend(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], logps: Sequence[Sequence[float]]) -> None:
        """Append several sampled tokens to each row, up to its end."""
        for i, row_tokens, row_logps in zip(rows, tokens, logps, strict=True):
            room = self.max_new_tokens - len(self.result.completion_ids[i])
            ends = [k + 1 for k, token in enumerate(row_tokens) if token in self._eos]
            count = min(room, *ends[:1], len(row_tokens))
            self.result.completion_ids[i].extend(row_tokens[:count])
            self.result.logps[i].extend(row_logps[:count])
            self.result.masks[i].extend([FREE] * count)

    def finished(self, rows: Sequence[int]) -> set[int]:
        """Return the rows that have ended or reached the maximum length, after the editor has seen all of them."""
        if self._editor is not None:
            for i in rows:
                self._edit(i, self._editor)
        return {i for i in rows if self._is_finished(i)}

    def release(self, row: int) -> None:
        self._in_progress -= 1
        self.decoder.cache.release(row)
        if self.states is not None:
            self.states.release(row)

    def _append_advanced(self, rows: Sequence[int], advanced: Advanced) -> None:
        for i, run in zip(rows, advanced.forced, strict=True):
            if run.tokens:
                self._append_forced(i, run)
        for place, question in advanced.questions.items():
            if not self._is_full(rows[place]):
                assert self.states is not None
                self.asked[rows[place]] = self.states.ask(question)

    def _append_forced(self, i: int, forced: Forced) -> None:
        """Append tokens that must follow. Their log-prob is 0, so the model is not needed."""
        room = self.max_new_tokens - len(self.result.completion_ids[i])
        tokens = forced.tokens[:room]
        self.result.completion_ids[i].extend(tokens)
        self.result.masks[i].extend(forced.numbers[:room])
        self.result.logps[i].extend([0.0] * len(tokens))
        self.pending[i].extend(tokens)

    def _edit(self, i: int, editor: Editor) -> None:
        ids = self.result.completion_ids[i]
        while ids and (kept := editor.keep(i, ids, ids[-1] in self._eos)) is not None and kept < len(ids):
            self._truncate(i, kept)
            if len(ids) == kept:  # no token was forced after the cut, so the editor has nothing new to inspect
                break

    def _truncate(self, i: int, kept: int) -> None:
        """Delete all but the first `kept` tokens of row i.

        The last kept token (or the last prompt token, if none is kept) is fed again to recompute the logits after it.
        """
        ids = self.result.completion_ids[i]
        for values in (ids, self.result.masks[i], self.result.logps[i]):
            del values[kept:]
        prompt = self.prompts[i]
        self.lengths[i] = min(self.lengths[i], len(prompt) + kept - 1)
        self.pending[i] = [*prompt[self.lengths[i] :], *ids[max(self.lengths[i] - len(prompt), 0) :]]
        if self.states is not None:
            self._append_forced(i, self.states.restart(i, ids))

    def _is_full(self, i: int) -> bool:
        return len(self.result.completion_ids[i]) >= self.max_new_tokens

    def _is_finished(self, i: int) -> bool:
        ids = self.result.completion_ids[i]
        if not ids or ids[-1] not in self._eos:
            return self._is_full(i)
        return self.states is None or self._is_full(i) or self.states.numbers([i]) == [FREE]
