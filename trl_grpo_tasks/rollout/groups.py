"""Groups of rows that share passes, and the order in which their CPU and GPU work is done."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..constraints.recording import DeviceMasks
from .batch import Batch
from .graphs import STEPS
from .next_token import Sampled, TokenSampler

REFILL_SHARE = 1 / 8  # waiting rows start when this part of a group's places is free
PATIENCE = 0.01  # seconds that the rows of a GPU wait for the answers to others, about those of a pass


class Group:
    """Rows of a batch that share passes. The subclasses' `advance` makes one round of work for them."""

    def __init__(self, batch: Batch, limit: int):
        self._batch, self._limit = batch, limit
        self.active: list[int] = []
        self._asking: list[int] = []  # rows that wait for answers, and have no part in passes

    @property
    def is_busy(self) -> bool:
        return bool(self.active or self._asking)

    def read(self) -> None:
        """Do what can be done ahead of `advance`."""

    def _start_waiting(self) -> list[int]:
        """Start waiting rows once enough places are free: a pass that reads prompts delays the others."""
        waiting, free = self._batch.waiting, self._limit - len(self.active) - len(self._asking)
        if not waiting or (self.is_busy and free < min(len(waiting), self._limit * REFILL_SHARE)):
            return []
        started = self._batch.start_waiting(free)
        self.active += started
        return started

    def _remove_finished(self, rows: Sequence[int]) -> None:
        finished = self._batch.finished(rows)
        if finished:
            self.active = [i for i in self.active if i not in finished]
            for i in finished:
                self._batch.release(i)


class FreeGroup(Group):
    """Rows without constraint, filters and editor. A few tokens per row are sampled before the CPU looks at them, and
    it looks at them while the GPU samples the next ones. What is sampled after the end of a row is dropped."""

    def __init__(self, batch: Batch, limit: int, is_greedy: bool):
        super().__init__(batch, limit)
        self._greedy = is_greedy
        self._unread: deque[tuple[list[int], Callable[[], np.ndarray]]] = deque()
        self._sampled: Counter[int] = Counter()  # tokens sampled by row, including unread ones

    def advance(self) -> None:
        batch = self._batch
        started = self._start_waiting()
        new = {i: (batch.pending[i].pop(), batch.lengths[i]) for i in started}
        rows = [i for i in self.active if self._sampled[i] < batch.max_new_tokens]
        if rows:
            self._unread.append((rows, batch.decoder.generate(rows, new, self._greedy)))
            self._sampled.update(dict.fromkeys(rows, STEPS))
        if len(self._unread) > 1 or not rows:
            self._read()

    def _read(self) -> None:
        rows, read = self._unread.popleft()
        drawn_S_2_B = read()
        active = set(self.active)
        kept = [k for k, i in enumerate(rows) if i in active]
        self._batch.extend(
            [rows[k] for k in kept], drawn_S_2_B[:, 0, kept].T.astype(int).tolist(), drawn_S_2_B[:, 1, kept].T.tolist()
        )
        self._remove_finished([rows[k] for k in kept])
        if not self.active:
            self._unread.clear()  # all rows have ended


class SteppedGroup(Group):
    """Rows of which one token is sampled per round: read sampled tokens, feed them, sample again.

    After the end of a turn, the others go on without a row until it is answered. On a CPU they wait for it, so that
    random numbers, and with them the completions, do not depend on how long an answer takes.

    `read` may be called ahead of `advance`, so that workers compute constraint states between the two.
    """

    def __init__(self, batch: Batch, limit: int, sampler: TokenSampler, masks: DeviceMasks | None):
        super().__init__(batch, limit)
        self._sampler, self._masks = sampler, masks
        self._sampled: Sampled | None = None
        self._append_forced: Callable[[], None] | None = None  # completes what `read` has begun
        self._logits: list[tuple[list[int], torch.Tensor]] = []  # rows, and the logits of their next tokens

    def read(self) -> None:
        """Wait for sampled tokens, append them to their rows, and send them to the constraint's workers."""
        if self._sampled is not None:
            self._append_forced = self._batch.append(self.active, *self._sampled.read())
            self._sampled = None

    def advance(self) -> None:
        self.read()
        if self._append_forced is not None:
            self._append_forced()
            self._append_forced = None
            if self._batch.feeds_before_reading:
                for i in self.active:
                    self._batch.pending[i].clear()
        if self._batch.asked:
            self._wait_for_answers()
        self._remove_finished(self.active)
        self._remove_finished(self._start_waiting())
        self._feed([i for i in self.active if self._batch.pending[i]])
        if self.active:
            self._sample()

    def _wait_for_answers(self) -> None:
        """Let rows that ask leave the active ones, and those that are answered return."""
        batch = self._batch
        if not batch.decoder.is_asynchronous:
            batch.answered(self.active, None)
            return
        asking = [i for i in self.active if i in batch.asked]
        self.active = [i for i in self.active if i not in batch.asked]
        waits = asking or not self.active
        answered = batch.answered(self._asking + asking, PATIENCE if waits else 0.0)
        self._asking = [i for i in self._asking + asking if i in batch.asked]
        self.active += answered

    def _feed(self, rows: list[int], tokens_B: torch.Tensor | None = None) -> None:
        """Run the model over the pending tokens of these rows."""
        if not rows:
            return
        batch = self._batch
        new_tokens = [batch.pending[i] for i in rows]
        logits = batch.decoder.feed(rows, new_tokens, [batch.lengths[i] for i in rows], tokens_B)
        self._logits.append((rows, logits))
        for i in rows:
            batch.lengths[i] += len(batch.pending[i])
            batch.pending[i] = []

    def _sample(self) -> None:
        """Sample the next token of every active row, without waiting for the result."""
        batch = self._batch
        logits = self._gather_logits()
        masks = None
        if batch.states is not None:
            assert self._masks is not None
            masks = self._masks.fill(batch.states.numbers(self.active))
        self._sampled = self._sampler.sample(logits, batch.decoder.scale, masks)
        if batch.feeds_before_reading:
            for i in self.active:
                batch.pending[i] = [0]  # placeholder for the token on the device
            self._feed(list(self.active), self._sampled.tokens_B)

    def _gather_logits(self) -> torch.Tensor:
        """Return the logits of the active rows, which become ordered as the logits are."""
        active = set(self.active)
        self.active = [i for rows, _ in self._logits for i in rows if i in active]
        parts = []
        for rows, logits in self._logits:
            kept = [k for k, i in enumerate(rows) if i in active]
            if len(kept) < len(rows):
                logits = logits[torch.tensor(kept, dtype=torch.int64, device=logits.device)]
            parts.append(logits)
        self._logits = []
        return parts[0] if len(parts) == 1 else torch.cat(parts)
