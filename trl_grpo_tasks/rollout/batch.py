"""Generation of completions for a batch of prompts. Differences from transformers' `generate`:

- Each distinct prompt is prefilled once, and its KV cache is copied to all rows of the group.
- Tokens that a constraint forces are appended without sampling and are fed to the model several at a time; one ragged
  pass serves rows with different numbers of new tokens.
- Finished rows leave the batch.
- CPU and GPU work overlap: the masks of the next tokens are computed while the GPU computes their logits, and without
  a constraint the next pass starts before the CPU has read the sampled tokens.
- An editor may delete generated tokens: the KV cache is truncated, and generation resumes after the last kept token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..constraints.base import Constraint
from ..constraints.filters import SamplingFilters, pack_on_device
from ..constraints.sampling import DeviceMasks, PassMasks
from ..constraints.shared import Forced, SharedStates
from ..constraints.table import FREE, MaskTable
from .decoder import NEW_TOKEN_BUCKETS, Decoder

NO_FILTERS = SamplingFilters()
FEED_LIMIT = NEW_TOKEN_BUCKETS[-1]  # maximum number of forced tokens per row and forward pass


@dataclass
class Rollout:
    """The completions of a batch, without padding: token ids, mask numbers and sampling log-probs by row."""

    completion_ids: list[list[int]]
    masks: list[list[int]]
    logps: list[list[float]]
    forward_passes: int = 0


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
) -> Rollout:
    """Sample one completion for each prompt.

    Temperature 0 selects the most likely token. Random numbers come from torch's default generator. A `constraint`
    needs `rows` and `table`, and `filters` need `table`: it stores the masks of the constraint and the sets of tokens
    that the filters keep. Pass the same `decoder` to every call to reuse its CUDA graphs. Tokens that an `editor`
    deletes do not appear in the result.
    """
    decoder = Decoder(model) if decoder is None else decoder
    batch = _Batch(decoder, prompt_ids, max_new_tokens, eos_token_ids, is_greedy=temperature == 0, editor=editor)
    if constraint is not None:
        assert rows is not None and table is not None, "rollout() with a constraint needs rows and a table"
        batch.constrain(constraint, rows, table)
    if filters and temperature > 0:
        assert table is not None, "rollout() with filters needs a table"
        batch.filter(filters, table)
    slots = max(map(len, prompt_ids)) + max_new_tokens
    with decoder.running(len(prompt_ids), slots, temperature or 1.0):
        batch.prefill()
        while batch.active:
            batch.sample()
            batch.feed()
    batch.result.forward_passes = decoder.passes
    return batch.result


class _Batch:
    """The rows of a rollout in progress. `active` lists the unfinished rows, `_cache_rows` their rows in the cache."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        eos_ids: Sequence[int],
        is_greedy: bool,
        editor: Editor | None,
    ):
        self._decoder, self._editor = decoder, editor
        self._prompts = [tuple(prompt) for prompt in prompts]
        self._max_new_tokens, self._eos, self._greedy = max_new_tokens, frozenset(eos_ids), is_greedy
        count = len(self._prompts)
        self.active = list(range(count))
        self._cache_rows = list(range(count))
        self.result = Rollout([[] for _ in range(count)], [[] for _ in range(count)], [[] for _ in range(count)])
        self._pending: list[list[int]] = [[] for _ in range(count)]
        self._lengths = [len(prompt) for prompt in self._prompts]
        self._states: SharedStates | None = None
        self._device_masks: DeviceMasks | None = None
        self._masks: PassMasks | None = None
        self._filters: tuple[SamplingFilters, MaskTable] | None = None

    def filter(self, filters: SamplingFilters, table: MaskTable) -> None:
        self._filters = (filters, table)

    def constrain(self, constraint: Constraint, rows: Sequence[Mapping[str, Any]], table: MaskTable) -> None:
        self._device_masks = DeviceMasks(table, self._decoder.device)
        self._states = SharedStates(constraint, table)
        for i, forced in enumerate(self._states.start(range(len(rows)), rows)):
            self._append_forced(i, forced)

    def prefill(self) -> None:
        """Run the distinct prompts in one pass, then the tokens that a constraint forces at the start of each row."""
        distinct = {prompt: cache_row for cache_row, prompt in enumerate(dict.fromkeys(self._prompts))}
        self._decoder.prefill(list(distinct), [distinct[prompt] for prompt in self._prompts])
        self.feed()

    def sample(self) -> None:
        """Sample the next token of every active row."""
        logits = self._decoder.logits[: self._decoder.batch]
        numbers = [FREE] * len(logits)
        if self._masks is not None:
            numbers = self._masks.numbers
            self._masks.apply(logits)
        if self._filters is not None:
            filters, table = self._filters
            kept_B_V = filters.kept(logits)
            logits = logits.masked_fill(~kept_B_V, -torch.inf)
            words_B_W = _copy_to_cpu_async(pack_on_device(kept_B_V))
        logps = logits.log_softmax(1)
        tokens_B = logps.argmax(1) if self._greedy else torch.multinomial(logps.exp(), 1)[:, 0]
        chosen_B = logps.gather(1, tokens_B[:, None])[:, 0]
        sampled = _copy_to_cpu_async(torch.stack((tokens_B.double(), chosen_B.double())))
        feeds_before_reading = self._states is None and self._editor is None and self._decoder.is_asynchronous
        if feeds_before_reading:
            self._feed_unread(tokens_B)
        tokens, chosen = sampled().tolist()
        mask_numbers = [numbers[cache_row] for cache_row in self._cache_rows]
        if self._filters is not None:
            mask_numbers = table.numbers_of(words_B_W().numpy()[self._cache_rows])
        for i, cache_row, number in zip(self.active, self._cache_rows, mask_numbers, strict=True):
            self._append(i, int(tokens[cache_row]), chosen[cache_row], number)
            if feeds_before_reading:
                self._pending[i].clear()
        if self._states is not None:
            tokens = [self.result.completion_ids[i][-1] for i in self.active]
            for i, forced in zip(self.active, self._states.accept(self.active, tokens), strict=True):
                self._append_forced(i, forced)

    def feed(self) -> None:
        """Feed all pending tokens of the unfinished rows to the model, and compute the next masks meanwhile."""
        if self._editor is not None:
            self._edit(self._editor)
        self._remove_finished()
        while any(self._pending[i] for i in self.active):
            self._feed_once()
        if self._states is not None and self._device_masks is not None and self.active:
            numbers = [FREE] * self._decoder.batch
            for number, cache_row in zip(self._states.numbers(self.active), self._cache_rows, strict=True):
                numbers[cache_row] = number
            self._masks = self._device_masks.fill(numbers)

    def _feed_unread(self, tokens_B: torch.Tensor) -> None:
        """Feed sampled tokens before they are copied to the CPU. For rows that have ended, the pass is wasted."""
        for i in self.active:
            self._pending[i] = [0]  # placeholder for the token on the device
        self._feed_once(tokens_B)

    def _feed_once(self, tokens_B: torch.Tensor | None = None) -> None:
        """Run one pass over pending tokens, at most FEED_LIMIT per row."""
        feeds: list[list[int]] = [[] for _ in range(self._decoder.batch)]
        starts = [0] * self._decoder.batch
        for i, cache_row in zip(self.active, self._cache_rows, strict=True):
            feeds[cache_row], starts[cache_row] = self._pending[i][:FEED_LIMIT], self._lengths[i]
            del self._pending[i][:FEED_LIMIT]
            self._lengths[i] += len(feeds[cache_row])
        self._decoder.feed(feeds, starts, tokens_B)

    def _append(self, i: int, token: int, logp: float, mask_number: int) -> None:
        self.result.completion_ids[i].append(token)
        self.result.logps[i].append(logp)
        self.result.masks[i].append(mask_number)
        self._pending[i].append(token)

    def _append_forced(self, i: int, forced: Forced) -> None:
        """Append the tokens that must follow. Their log-prob is 0, so the model is not needed."""
        free = self._max_new_tokens - len(self.result.completion_ids[i])
        for token, number in list(zip(*forced, strict=True))[:free]:
            self._append(i, token, 0.0, number)

    def _edit(self, editor: Editor) -> None:
        for i in self.active:
            ids = self.result.completion_ids[i]
            while ids and (kept := editor.keep(i, ids, ids[-1] in self._eos)) is not None and kept < len(ids):
                self._truncate(i, kept)
                if len(ids) == kept:  # no token was forced after the cut, so the editor has nothing new to inspect
                    break

    def _truncate(self, i: int, kept: int) -> None:
        """Delete all but the first `kept` tokens of row i.

        The last kept token (or the last prompt token, if none is kept) is fed again to recompute the logits after it.
        """
        for values in (self.result.completion_ids[i], self.result.masks[i], self.result.logps[i]):
            del values[kept:]
        ids = self.result.completion_ids[i]
        self._lengths[i] = min(self._lengths[i], len(self._prompts[i]) + kept - 1)
        self._pending[i] = [*self._prompts[i], *ids][self._lengths[i] :]
        if self._states is not None:
            self._append_forced(i, self._states.restart(i, ids))

    def _remove_finished(self) -> None:
        """Remove rows that have ended or reached the maximum length from the batch."""
        remaining = [k for k, i in enumerate(self.active) if not self._is_finished(self.result.completion_ids[i])]
        if len(remaining) == len(self.active):
            return
        self.active = [self.active[k] for k in remaining]
        if self.active:
            longest = max(self._lengths[i] for i in self.active)
            self._cache_rows = self._decoder.keep([self._cache_rows[k] for k in remaining], longest)

    def _is_finished(self, ids: list[int]) -> bool:
        return bool(ids) and (ids[-1] in self._eos or len(ids) >= self._max_new_tokens)


def _copy_to_cpu_async(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start a copy to the CPU and return a function that waits for it, but not for GPU work queued afterwards."""
    if values.device.type != "cuda":
        return lambda: values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> torch.Tensor:
        arrived.synchronize()
        return host

    return wait
