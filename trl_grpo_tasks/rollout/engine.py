"""Generation of completions for a batch of prompts. Differences from transformers' `generate`:

- Each distinct prompt is read once, and rows with the same prompt share its part of the KV cache.
- Rows have no padding. A finished row leaves its place to a waiting one, so that a cache of bounded size serves any
  number of rows.
- Tokens that a constraint forces are appended without sampling and are fed to the model several at a time.
- CPU and GPU work overlap: the masks of the next tokens are computed while the GPU computes their logits; large
  constrained batches are split into two groups, and the CPU works on one while the GPU runs the other, or into three,
  if worker processes compute states; without a constraint, the next pass starts before the CPU has read the sampled
  tokens.
- An editor may delete generated tokens: generation resumes after the last kept token.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from ..constraints.base import Constraint
from ..constraints.filters import SamplingFilters
from ..constraints.recording import DeviceMasks
from ..constraints.shared import SharedStates
from ..constraints.table import MaskTable
from ..constraints.workers import WorkerStates, states_for
from .batch import Batch, Editor, Rollout
from .decoder import Decoder
from .graphs import TOKEN_BUCKETS
from .groups import FreeGroup, SteppedGroup
from .next_token import TokenSampler

NO_FILTERS = SamplingFilters()
SPLIT_ROWS = 256  # constrained batches of at least this many rows are split into two groups
# Three groups where two leave the GPU idle because the CPU, which waits for workers, needs longer per pass: with at
# least this many rows, and fewer than this many parameters. Elsewhere, a third group would only add passes, each of
# which reads all weights. Measured with 1,024 rows of a 135M model; the bounds are estimates.
PIPELINED_ROWS = 768
PIPELINED_PARAMETERS = 10**9


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
    batch = Batch(decoder, prompts, rows, max_new_tokens, frozenset(eos_token_ids), states, editor)
    limit = min(len(prompts), batch_size or len(prompts), TOKEN_BUCKETS[-1])
    groups: Sequence[FreeGroup | SteppedGroup]
    if decoder.is_asynchronous and states is None and editor is None and not filters:
        groups = [FreeGroup(batch, limit, temperature == 0)]
    else:
        masks = None if table is None else DeviceMasks(table, decoder.device)
        sampler = TokenSampler(decoder.uses_kernels, temperature == 0, filters, table)
        count = group_count(decoder, states, limit)
        ends = [limit * k // count for k in range(count + 1)]
        groups = [SteppedGroup(batch, end - begin, sampler, masks) for begin, end in pairwise(ends)]
    with decoder.running(prompts, max_new_tokens, temperature or 1.0, batch_size), _without_garbage_collection():
        while batch.waiting or any(group.is_busy for group in groups):
            for group, next_group in zip(groups, [*groups[1:], groups[0]], strict=True):
                # While the GPU runs a third group, workers compute states of the next one. Without a third, reading
                # the next group would wait for the GPU and leave it idle.
                if sum(bool(each.active) for each in groups) > 2:
                    next_group.read()
                group.advance()
    batch.result.forward_passes = decoder.passes
    return batch.result


def group_count(decoder: Decoder, states: SharedStates | WorkerStates | None, rows: int) -> int:
    """Return the number of groups that take turns: one, two, or three."""
    if states is None or not decoder.is_asynchronous or rows < SPLIT_ROWS:
        return 1
    is_pipelined = (
        isinstance(states, WorkerStates) and rows >= PIPELINED_ROWS and decoder.parameters < PIPELINED_PARAMETERS
    )
    return 3 if is_pipelined else 2


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
