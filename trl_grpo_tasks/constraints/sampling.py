"""Sampling under a constraint: the logits processor that transformers' `generate` calls before each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .base import Constraint, words_for
from .table import FREE, MaskTable


class ConstraintProcessor:
    """Masks the logits of a batch, one row of data a sequence, and records the number of every mask it used."""

    def __init__(self, constraint: Constraint, rows: Sequence[Mapping[str, Any]], table: MaskTable):
        self._states = [constraint.start(row) for row in rows]
        self._table = table
        self._words = np.zeros((len(rows), words_for(table.vocab_size)), dtype=np.int32)
        self._bits = torch.arange(32, dtype=torch.int32)
        self._length: int | None = None
        self.masks: list[list[int]] = [[] for _ in rows]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[0] != len(self._states):
            raise RuntimeError(f"{input_ids.shape[0]} sequences for {len(self._states)} rows: beams are not supported")
        if self._length is not None:
            for state, token in zip(self._states, input_ids[:, -1].tolist(), strict=True):
                if state is not None and not state.finished:
                    state.accept(token)
        self._length = input_ids.shape[1]
        for state, words, numbers in zip(self._states, self._words, self.masks, strict=True):
            if state is None or state.finished:  # generate() pads what has finished
                words.fill(-1)
                numbers.append(FREE)
            else:
                mask = state.mask()
                words.fill(0)
                words[: len(mask)] = mask
                numbers.append(self._table.number_of(mask))
        words_B_W = torch.from_numpy(self._words).to(scores.device)
        bits = self._bits.to(scores.device)
        allowed = ((words_B_W[:, :, None] >> bits) & 1).flatten(1)[:, : scores.shape[1]].bool()
        return scores.masked_fill(~allowed, -torch.inf)


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
