"""Sampling under a constraint: the logits processor that transformers' `generate` calls before each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .base import Constraint, accept_all, fill_all, words_for
from .table import FREE, MaskTable


class ConstraintProcessor:
    """Masks the logits of a batch, one row of data a sequence, and records the number of every mask it used."""

    def __init__(self, constraint: Constraint, rows: Sequence[Mapping[str, Any]], table: MaskTable):
        states = [constraint.start(row) for row in rows]
        self._open = {i: state for i, state in enumerate(states) if state is not None}
        self._table = table
        self._words: torch.Tensor | None = None
        self.masks: list[list[int]] = [[] for _ in rows]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[0] != len(self.masks):
            raise RuntimeError(f"{input_ids.shape[0]} sequences for {len(self.masks)} rows: beams are not supported")
        if self._words is None:
            pinned = scores.device.type == "cuda"
            shape = (len(self.masks), words_for(self._table.vocab_size))
            self._words = torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned)
        else:
            tokens = input_ids[:, -1].tolist()
            accept_all(list(self._open.values()), [tokens[i] for i in self._open])
            for i in [i for i, state in self._open.items() if state.finished]:
                self._words[i] = -1  # generate() pads what has finished
                del self._open[i]
        words_B_W = self._words.numpy()
        fill_all(list(self._open.values()), words_B_W, list(self._open))
        for i, numbers in enumerate(self.masks):
            numbers.append(self._table.number_of(words_B_W[i]) if i in self._open else FREE)
        return _apply(scores, self._words)


def _apply(scores: torch.Tensor, words_B_W: torch.Tensor) -> torch.Tensor:
    """Scores with -inf where a bit of the packed masks is not set; written in place."""
    if scores.device.type == "cuda":
        from xgrammar import apply_token_bitmask_inplace

        apply_token_bitmask_inplace(scores, words_B_W.to(scores.device, non_blocking=True))
        return scores
    shut = np.unpackbits(~words_B_W.numpy().view(np.uint8), axis=1, count=scores.shape[1], bitorder="little")
    return scores.masked_fill_(torch.from_numpy(shut.view(bool)).to(scores.device), -torch.inf)


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
