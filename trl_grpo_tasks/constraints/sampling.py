"""Sampling under a constraint: the logits processor that transformers' `generate` calls before each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .base import Constraint, State, accept_all, fill_all, unpack, words_for
from .table import FREE, MaskTable


class ConstraintProcessor:
    """Masks the logits of a batch, one row of data a sequence, and records the number of every mask it used."""

    def __init__(self, constraint: Constraint, rows: Sequence[Mapping[str, Any]], table: MaskTable):
        self._states = [constraint.start(row) for row in rows]
        self._table = table
        self._next: BatchMasks | None = None
        self.masks: list[list[int]] = [[] for _ in rows]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[0] != len(self.masks):
            raise RuntimeError(f"{input_ids.shape[0]} sequences for {len(self.masks)} rows: beams are not supported")
        if self._next is None:
            self._next = BatchMasks(len(self.masks), self._table, scores.device)
        else:
            written = zip(self._states, input_ids[:, -1].tolist(), strict=True)
            moves = [(state, token) for state, token in written if state is not None]
            accept_all([state for state, _ in moves], [token for _, token in moves])
            # generate() pads what has finished
            self._states = [None if state is None or state.finished else state for state in self._states]
        self._next.fill(self._states)
        for numbers, number in zip(self.masks, self._next.apply(scores), strict=True):
            numbers.append(number)
        return scores


class BatchMasks:
    """The masks of the tokens that come next in a batch: `fill` them on the CPU, then `apply` them to logits."""

    def __init__(self, rows: int, table: MaskTable, device: torch.device):
        self.table = table
        # From pinned memory they reach a GPU fast.
        self._words = torch.empty(
            (rows, words_for(table.vocab_size)), dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._numbers: list[int] = []

    def fill(self, states: Sequence[State | None]) -> None:
        """What each state allows next; None allows everything."""
        words = self._words[: len(states)].numpy()
        constrained = [i for i, state in enumerate(states) if state is not None]
        if len(constrained) < len(states):
            words.fill(-1)
        fill_all([state for state in states if state is not None], words, constrained)
        self._numbers = [FREE] * len(states)
        for i in constrained:
            self._numbers[i] = self.table.number_of(words[i])

    def apply(self, scores: torch.Tensor) -> list[int]:
        """Write -inf where a row's mask does not allow a token; the number of each row's mask."""
        _apply(scores, self._words[: len(self._numbers)])
        return self._numbers


def _apply(scores: torch.Tensor, words_B_W: torch.Tensor) -> None:
    """-inf where a bit of the packed masks is not set, in place."""
    if scores.device.type == "cuda":
        from xgrammar import apply_token_bitmask_inplace

        apply_token_bitmask_inplace(scores, words_B_W.to(scores.device, non_blocking=True))
        return
    shut = unpack(~words_B_W.numpy(), scores.shape[1])
    scores.masked_fill_(torch.from_numpy(shut).to(scores.device), -torch.inf)


@contextmanager
def logits_processor_in(model: Any, processor: ConstraintProcessor) -> Any:
    """While open, `model.generate` uses `processor`. TRL has no argument for one, so `generate` is shadowed on this
    instance, and put back afterwards."""
    shadowed = vars(model).get("generate")
    generate = model.generate

    def generate_with_processor(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, logits_processor=[processor], **kwargs)

    object.__setattr__(model, "generate", generate_with_processor)
    try:
        yield
    finally:
        if shadowed is None:
            del model.generate
        else:
            object.__setattr__(model, "generate", shadowed)
