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
        self._words: torch.Tensor | None = None
        self.masks: list[list[int]] = [[] for _ in rows]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[0] != len(self.masks):
            raise RuntimeError(f"{input_ids.shape[0]} sequences for {len(self.masks)} rows: beams are not supported")
        if self._words is None:
            self._words = mask_buffer(len(self.masks), self._table, scores.device)
        else:
            written = zip(self._states, input_ids[:, -1].tolist(), strict=True)
            moves = [(state, token) for state, token in written if state is not None]
            accept_all([state for state, _ in moves], [token for _, token in moves])
            # generate() pads what has finished
            self._states = [None if state is None or state.finished else state for state in self._states]
        for numbers, number in zip(
            self.masks, mask_scores(self._states, scores, self._table, self._words), strict=True
        ):
            numbers.append(number)
        return scores


def mask_buffer(batch: int, table: MaskTable, device: torch.device) -> torch.Tensor:
    """Room for the packed masks of a batch, from where they reach `device` fast."""
    return torch.empty((batch, words_for(table.vocab_size)), dtype=torch.int32, pin_memory=device.type == "cuda")


def mask_scores(
    states: Sequence[State | None], scores: torch.Tensor, table: MaskTable, words_B_W: torch.Tensor
) -> list[int]:
    """Write -inf into `scores` where the state of a row does not allow a token (None: it allows all), and return the
    number of each row's mask. `words_B_W` is scratch space."""
    words = words_B_W.numpy()
    constrained = [i for i, state in enumerate(states) if state is not None]
    if len(constrained) < len(states):
        words.fill(-1)
    fill_all([state for state in states if state is not None], words, constrained)
    numbers = [FREE] * len(states)
    for i in constrained:
        numbers[i] = table.number_of(words[i])
    _apply(scores, words_B_W)
    return numbers


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
