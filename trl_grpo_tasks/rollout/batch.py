"""Generation of completions for a batch of prompts. Differences from transformers' `generate`:

- Each distinct prompt is read once, and rows with the same prompt share its part of the KV cache.
- Rows have no padding. A finished row leaves its place to a waiting one, so that a cache of bounded size serves any
  number of rows.
- Tokens that a constraint forces are appended without sampling and are fed to the model several at a time.
- CPU and GPU work overlap: the masks of the next tokens are computed while the GPU computes their logits; large
  constrained batches are split into two groups, and the CPU works on one while the GPU runs the other; without a
  constraint, the next pass starts before the CPU has read the sampled tokens.
- An editor may delete generated tokens: generation resumes after the last kept token.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..constraints.base import FREE, Constraint
from ..constraints.filters import SamplingFilters
from ..constraints.sampling import DeviceMasks
from ..constraints.shared import Forced, SharedStates
from ..constraints.table import MaskTable
from ..constraints.workers import WorkerStates, states_for
from .decoder import STEPS, TOKEN_BUCKETS, Decoder
from .sampling import Sampled, TokenSampler

NO_FILTERS = SamplingFilters()
SPLIT_ROWS = 256  # constrained batches of at least this many rows are split into two groups
REFILL_SHARE = 1 / 8  # waiting rows start when this part of a group's places is free


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


@torch.no_grad()
def rollout(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    temperature: float = 1.0,
    filters: SamplingFilters = NO_FILTERS,
    constraint: Constraint | None = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
    table: MaskTable | None = None,
    decoder: Decoder | None = None,
    editor: Editor | None = None,
    batch_size: int | None = None,
) -> Rollout:
    """Sample one completion for each prompt.

    Temperature 0 selects the most likely token. Random numbers come from torch's default generator. A `constraint`
    needs `rows` and `table`, and `filters` need `table`: it stores the masks of the constraint and the sets of tokens
    that the filters keep. Pass the same `decoder` to every call to reuse its CUDA graphs. Tokens that an `editor`
    deletes do not appear in the result. At most `batch_size` rows are generated at a time; without it, as many as fit
    into free memory.
    """
    decoder = Decoder(model) if decoder is None else decoder
    filters = NO_FILTERS if temperature == 0 else filters
    prompts = [tuple(prompt) for prompt in prompt_ids]
    states: SharedStates | WorkerStates | None = None
    if constraint is not None or filters:
        assert table is not None, "rollout() with a constraint or filters needs a table"
    if constraint is not None:
        assert rows is not None and table is not None, "rollout() with a constraint needs rows and a table"
        states = states_for(constraint, table, len(rows) if decoder.is_asynchronous else 0)
    batch = _Batch(decoder, prompts, rows, max_new_tokens, frozenset(eos_token_ids), states, editor)
    limit = min(len(prompts), batch_size or len(prompts), TOKEN_BUCKETS[-1])
    groups: Sequence[_Group]
    if decoder.is_asynchronous and states is None and editor is None and not filters:
        groups = [_FreeGroup(batch, limit, temperature == 0)]
    else:
        masks = None if table is None else DeviceMasks(table, decoder.device)
        sampler = TokenSampler(decoder.uses_kernels, temperature == 0, filters, table)
        is_split = states is not None and decoder.is_asynchronous and limit >= SPLIT_ROWS
        limits = (limit // 2, limit - limit // 2) if is_split else (limit,)
        groups = [_SteppedGroup(batch, part, sampler, masks) for part in limits]
    with decoder.running(prompts, max_new_tokens, temperature or 1.0, batch_size), _without_garbage_collection():
        while batch.waiting or any(group.is_busy for group in groups):
            for group in groups:
                group.advance()
    batch.result.forward_passes = decoder.passes
    return batch.result


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Within this context, Python does not search for cycles, which would stall passes; rollouts make none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Batch:
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
        self.feeds_before_reading = states is None and editor is None and decoder.is_asynchronous

    def start_waiting(self, limit: int) -> list[int]:
        """Start up to `limit` waiting rows for which the cache has room, and return them.

        Their prompts are read, except for the last token, and what a constraint forces is appended.
        """
        rows: list[int] = []
        sources = []
        while self.waiting and len(rows) < limit and self.decoder.fits(self.prompts[self.waiting[0]]):
            rows.append(self.waiting.popleft())
            sources.append(self.decoder.reserve(rows[-1], self.prompts[rows[-1]]))
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

    def append(self, rows: Sequence[int], tokens: Sequence[int], logps: Sequence[float], masks: Sequence[int]) -> None:
        """Append one sampled token to each row, and then what a constraint forces."""
        result = self.result
        for i, token, logp, mask in zip(rows, tokens, logps, masks, strict=True):
            result.completion_ids[i].append(token)
            result.logps[i].append(logp)
            result.masks[i].append(mask)
            self.pending[i].append(token)
        if self.states is not None:
            open_rows = [i for i in rows if not self._is_finished(i)]
            forced = self.states.accept(open_rows, [result.completion_ids[i][-1] for i in open_rows])
            for i, run in zip(open_rows, forced, strict=True):
                if run.tokens:
                    self._append_forced(i, run)

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
        self.decoder.release(row)
        if self.states is not None:
            self.states.release(row)

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

    def _is_finished(self, i: int) -> bool:
        ids = self.result.completion_ids[i]
        return bool(ids) and (ids[-1] in self._eos or len(ids) >= self.max_new_tokens)


class _Group:
    """Rows of a batch that share passes. `advance` makes one round of work for them."""

    def __init__(self, batch: _Batch, limit: int):
        self._batch, self._limit = batch, limit
        self.active: list[int] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.active)

    def advance(self) -> None:
        raise NotImplementedError

    def _start_waiting(self) -> list[int]:
        """Start waiting rows once enough places are free: a pass that reads prompts delays the others."""
        waiting, free = self._batch.waiting, self._limit - len(self.active)
        if not waiting or (self.active and free < min(len(waiting), self._limit * REFILL_SHARE)):
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


class _FreeGroup(_Group):
    """Rows without constraint, filters and editor. A few tokens per row are sampled before the CPU looks at them, and
    it looks at them while the GPU samples the next ones. What is sampled after the end of a row is dropped."""

    def __init__(self, batch: _Batch, limit: int, is_greedy: bool):
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


class _SteppedGroup(_Group):
    """Rows of which one token is sampled per round: read sampled tokens, feed them, sample again."""

    def __init__(self, batch: _Batch, limit: int, sampler: TokenSampler, masks: DeviceMasks | None):
        super().__init__(batch, limit)
        self._sampler, self._masks = sampler, masks
        self._sampled: Sampled | None = None
        self._logits: list[tuple[list[int], torch.Tensor]] = []  # rows, and the logits of their next tokens

    def advance(self) -> None:
        if self._sampled is not None:
            self._read()
        self._remove_finished(self._start_waiting())
        self._feed([i for i in self.active if self._batch.pending[i]])
        if self.active:
            self._sample()

    def _read(self) -> None:
        """Append the sampled tokens to their rows, and remove finished rows."""
        assert self._sampled is not None
        self._batch.append(self.active, *self._sampled.read())
        self._sampled = None
        if self._batch.feeds_before_reading:
            for i in self.active:
                self._batch.pending[i].clear()
        self._remove_finished(self.active)

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
            index = torch.tensor(kept, dtype=torch.int64, device=logits.device)
            parts.append(logits if len(kept) == len(rows) else logits[index])
        self._logits = []
        return parts[0] if len(parts) == 1 else torch.cat(parts)
