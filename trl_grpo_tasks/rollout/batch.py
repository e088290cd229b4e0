"""Completions of a batch of prompts. Compared with transformers' `generate`:

- each distinct prompt is prefilled once and its cache copied to the group;
- tokens that a constraint forces are written without asking the model, several at a time, rows of different length in
  one ragged pass;
- rows that have finished leave the batch;
- the GPU does not wait: masks of the next tokens are filled while it computes their logits, and without a constraint
  it goes on with what was drawn before we have looked at it;
- an editor may take back what was written: the cache is cut there, and the row goes on from what was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..constraints.base import Constraint, State, accept_all
from ..constraints.filters import SamplingFilters, pack_on_device
from ..constraints.sampling import BatchMasks
from ..constraints.table import FREE, MaskTable
from .decoder import WIDTHS, Decoder

NO_FILTERS = SamplingFilters()
FEED_LIMIT = WIDTHS[-1]  # forced tokens fed in one forward pass; a longer run takes several


@dataclass
class Rollout:
    """Completions by row, without padding: tokens, the number of the mask of each, and its log-prob when sampled."""

    completion_ids: list[list[int]]
    masks: list[list[int]]
    logps: list[list[float]]
    forward_passes: int = 0


class Editor(Protocol):
    """Looks at what is written and takes back what must be written again."""

    def keep(self, i: int, ids: Sequence[int], ended: bool) -> int | None:
        """How many tokens of row i to keep; None: all. Asked whenever the row has been written to: a token, and those
        that a constraint forced after it. `ended`: the last is an end-of-sequence token, and the row is over if it is
        kept. An editor that always takes something back is never done."""

    def counts(self, i: int) -> dict[str, int]:
        """What was done to row i, by name, for people to read."""


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
    """Sample one completion of each prompt. Temperature 0 takes the likeliest token. Random numbers come from torch's
    default generator. A `decoder` of the model that is kept from call to call keeps its captured graphs. What an
    `editor` takes back leaves no trace in the result. Masks, of the constraint and of what filters kept, are numbered
    in `table`."""
    decoder = Decoder(model) if decoder is None else decoder
    batch = _Batch(decoder, prompt_ids, max_new_tokens, eos_token_ids, is_greedy=temperature == 0, editor=editor)
    if constraint is not None:
        assert rows is not None and table is not None, "a constraint needs the rows and a table for its masks"
        batch.constrain(constraint, rows, table)
    if filters and temperature > 0:
        assert table is not None, "filters need a table for the tokens they keep"
        batch.filter(filters, table)
    slots = max(map(len, prompt_ids)) + max_new_tokens
    with decoder.running(len(prompt_ids), slots, temperature or 1.0):
        batch.prefill()
        while batch.open:
            batch.sample()
            batch.feed()
    batch.result.forward_passes = decoder.passes
    return batch.result


class _Batch:
    """The rows of one rollout on their way: `open` are those still written, `_places` where they are in the cache."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        most: int,
        eos_ids: Sequence[int],
        is_greedy: bool,
        editor: Editor | None,
    ):
        self._decoder, self._editor = decoder, editor
        self._prompts = [tuple(prompt) for prompt in prompts]
        self._most, self._eos, self._greedy = most, frozenset(eos_ids), is_greedy
        count = len(self._prompts)
        self.open = list(range(count))
        self._places = list(range(count))
        self.result = Rollout([[] for _ in range(count)], [[] for _ in range(count)], [[] for _ in range(count)])
        self._unfed: list[list[int]] = [[] for _ in range(count)]
        self._lengths = [len(prompt) for prompt in self._prompts]
        self._start: Callable[[int], State | None] = lambda i: None
        self._states: dict[int, State] = {}
        self._masks: BatchMasks | None = None
        self._filters: tuple[SamplingFilters, MaskTable] | None = None

    def filter(self, filters: SamplingFilters, table: MaskTable) -> None:
        self._filters = (filters, table)

    def constrain(self, constraint: Constraint, rows: Sequence[Mapping[str, Any]], table: MaskTable) -> None:
        self._masks = BatchMasks(len(rows), table, self._decoder.device)
        self._start = lambda i: constraint.start(rows[i])
        self._states = {i: state for i in range(len(rows)) if (state := self._start(i)) is not None}
        for i in list(self._states):
            self._write_forced(i)

    def prefill(self) -> None:
        """One pass over the distinct prompts. What a constraint forces from the start differs by row and comes
        after it."""
        distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(self._prompts))}
        self._decoder.prefill(list(distinct), [distinct[prompt] for prompt in self._prompts])
        self.feed()

    def sample(self) -> None:
        """The next token of every open row."""
        logits = self._decoder.logits[: self._decoder.batch]
        numbers = [FREE] * len(logits)
        if self._masks is not None:
            numbers = self._masks.apply(logits)
        if self._filters is not None:
            filters, table = self._filters
            kept_B_V = filters.kept(logits)
            logits = logits.masked_fill(~kept_B_V, -torch.inf)
            words_B_W = _later(pack_on_device(kept_B_V))
        logps = logits.log_softmax(1)
        tokens_B = logps.argmax(1) if self._greedy else torch.multinomial(logps.exp(), 1)[:, 0]
        chosen_B = logps.gather(1, tokens_B[:, None])[:, 0]
        drawn = _later(torch.stack((tokens_B.double(), chosen_B.double())))
        goes_ahead = self._masks is None and self._editor is None and self._decoder.is_asynchronous
        if goes_ahead:
            self._feed_drawn(tokens_B)
        tokens, chosen = drawn().tolist()
        mask_numbers = [numbers[place] for place in self._places]
        if self._filters is not None:
            mask_numbers = table.numbers_of(words_B_W().numpy()[self._places])
        for i, place, number in zip(self.open, self._places, mask_numbers, strict=True):
            self._write(i, int(tokens[place]), chosen[place], number)
            if goes_ahead:
                self._unfed[i].clear()
        constrained = [i for i in self.open if i in self._states]
        accept_all([self._states[i] for i in constrained], [self.result.completion_ids[i][-1] for i in constrained])
        for i in constrained:
            self._write_forced(i)

    def feed(self) -> None:
        """Run what was written since the last pass through the model, for the rows that go on, and see meanwhile
        what may follow."""
        if self._editor is not None:
            self._edit(self._editor)
        self._close_finished()
        while any(self._unfed[i] for i in self.open):
            self._feed_some()
        if self._masks is not None and self.open:
            states: list[State | None] = [None] * self._decoder.batch
            for i, place in zip(self.open, self._places, strict=True):
                states[place] = self._states.get(i)
            self._masks.fill(states)

    def _feed_drawn(self, tokens_B: torch.Tensor) -> None:
        """Feed tokens that only the GPU knows yet. Rows that turn out to have ended were fed in vain."""
        for i in self.open:
            self._unfed[i] = [0]  # stands for the token
        self._feed_some(tokens_B)

    def _feed_some(self, tokens_B: torch.Tensor | None = None) -> None:
        """One pass over what has not been fed, as far as a pass goes."""
        feeds: list[list[int]] = [[] for _ in range(self._decoder.batch)]
        starts = [0] * self._decoder.batch
        for i, place in zip(self.open, self._places, strict=True):
            feeds[place], starts[place] = self._unfed[i][:FEED_LIMIT], self._lengths[i]
            del self._unfed[i][:FEED_LIMIT]
            self._lengths[i] += len(feeds[place])
        self._decoder.feed(feeds, starts, tokens_B)

    def _write(self, i: int, token: int, logp: float, mask_number: int) -> None:
        self.result.completion_ids[i].append(token)
        self.result.logps[i].append(logp)
        self.result.masks[i].append(mask_number)
        self._unfed[i].append(token)

    def _write_forced(self, i: int) -> None:
        """Tokens that must follow: certain, so that the model need not be asked."""
        state, ids = self._states[i], self.result.completion_ids[i]
        assert self._masks is not None
        while len(ids) < self._most and not state.finished and (forced := state.forced()):
            for token in forced[: self._most - len(ids)]:
                self._write(i, token, 0.0, self._masks.table.number_of_only(token))
                state.accept(token)

    def _edit(self, editor: Editor) -> None:
        for i in self.open:
            ids = self.result.completion_ids[i]
            while ids and (kept := editor.keep(i, ids, ids[-1] in self._eos)) is not None and kept < len(ids):
                self._rewind(i, kept)
                if len(ids) == kept:  # nothing was forced after it, so that there is nothing new to ask about
                    break

    def _rewind(self, i: int, kept: int) -> None:
        """Go back to the first `kept` tokens. The last of these (of the prompt, where none is kept) is fed once more:
        the logits after it are no longer known."""
        for written in (self.result.completion_ids[i], self.result.masks[i], self.result.logps[i]):
            del written[kept:]
        ids = self.result.completion_ids[i]
        self._lengths[i] = min(self._lengths[i], len(self._prompts[i]) + kept - 1)
        self._unfed[i] = [*self._prompts[i], *ids][self._lengths[i] :]
        state = self._start(i)
        if state is not None:
            for token in ids:
                state.accept(token)
            self._states[i] = state
            self._write_forced(i)

    def _close_finished(self) -> None:
        """Rows that ended, or are as long as allowed, leave the batch."""
        going = [k for k, i in enumerate(self.open) if not self._is_done(self.result.completion_ids[i])]
        if len(going) == len(self.open):
            return
        self.open = [self.open[k] for k in going]
        if self.open:
            longest = max(self._lengths[i] for i in self.open)
            self._places = self._decoder.keep([self._places[k] for k in going], longest)

    def _is_done(self, ids: list[int]) -> bool:
        return bool(ids) and (ids[-1] in self._eos or len(ids) >= self._most)


def _later(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Values on their way from the device: calling waits for them, and not for what was asked of it afterwards."""
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
