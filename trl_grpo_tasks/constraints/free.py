"""Free text as the state of a constraint: every position has the same mask, up to the end-of-sequence token."""

from __future__ import annotations

import numpy as np


class FreeText:
    """Text of the tokens of `mask`, which include end-of-sequence."""

    __slots__ = ("_eos", "_mask", "finished")

    origin = "free"

    def __init__(self, mask: np.ndarray, eos: int, finished: bool = False):
        self._mask, self._eos, self.finished = mask, eos, finished

    def fork(self) -> FreeText:
        return FreeText(self._mask, self._eos, self.finished)

    def mask(self) -> np.ndarray:
        return np.zeros_like(self._mask) if self.finished else self._mask

    def accept(self, token: int) -> None:
        if self.finished:
            raise ValueError(f"token {token} is not allowed after the end of the text")
        if not (0 <= token < 32 * len(self._mask) and self._mask[token // 32] >> token % 32 & 1):
            raise ValueError(f"token {token} is not allowed here")
        self.finished = token == self._eos

    def forced(self) -> list[int]:
        return []
