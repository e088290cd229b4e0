"""The distinct masks of a batch of completions. Positions hold a mask's number, never a row over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128_digest

from .base import pack, pack_ids, words_for

# Number 0 stands for "everything is allowed": padding, and rows that are not constrained.
FREE = 0


class MaskTable:
    """Masks by number, each stored once, packed and as wide as the model's output."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._width = words_for(vocab_size)
        everything = pack(np.ones(vocab_size, dtype=bool))
        self._masks = [everything]
        self._counts = [vocab_size]
        self._numbers = {xxh3_128_digest(everything.data): FREE}
        self._numbers_of_only: dict[int, int] = {}
        self.plan: Any = None  # scoring's view of this table, made when it is first needed

    def __len__(self) -> int:
        return len(self._masks)

    def number_of(self, mask: np.ndarray | None) -> int:
        """The number of `mask` (None: nothing is constrained), which is added to the table if it is new."""
        if mask is None:
            return FREE
        if len(mask) < self._width:  # the model has more outputs than the tokenizer has tokens
            mask = np.concatenate([mask, np.zeros(self._width - len(mask), dtype=np.int32)])
        key = xxh3_128_digest(mask.data)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._masks)
            self._masks.append(mask.copy())
            self._counts.append(int(np.bitwise_count(self._masks[-1].view(np.uint32)).sum()))
        return number

    def number_of_only(self, token: int) -> int:
        """The number of the mask that allows nothing but `token`."""
        number = self._numbers_of_only.get(token)
        if number is None:
            number = self._numbers_of_only[token] = self.number_of(pack_ids([token], self.vocab_size))
        return number

    def words(self, numbers: Iterable[int]) -> np.ndarray:
        """The packed masks with these numbers, one a row."""
        return np.stack([self._masks[number] for number in numbers])

    def counts(self, numbers: np.ndarray) -> np.ndarray:
        """How many tokens each of these masks allows."""
        return np.asarray(self._counts)[numbers]

    def state_dict(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size, "masks": torch.from_numpy(np.stack(self._masks))}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> MaskTable:
        table = cls(state["vocab_size"])
        for mask in state["masks"].cpu().numpy()[1:]:
            table.number_of(mask)
        return table


class MaskTables:
    """The table of the rollout in use for training, and the one for evaluation."""

    def __init__(self) -> None:
        self._tables: dict[str, MaskTable] = {}

    def __getitem__(self, mode: str) -> MaskTable:
        return self._tables[mode]

    def start(self, mode: str, vocab_size: int) -> MaskTable:
        """A new, empty table for `mode`."""
        self._tables[mode] = MaskTable(vocab_size)
        return self._tables[mode]

    def state_dict(self) -> dict[str, Any]:
        return {mode: table.state_dict() for mode, table in self._tables.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tables = {mode: MaskTable.from_state_dict(table) for mode, table in state.items()}


def padded(numbers: Sequence[Sequence[int]]) -> torch.Tensor:
    """Mask numbers of completions of different length as one tensor on the CPU; padding is free."""
    width = max((len(row) for row in numbers), default=0)
    return torch.tensor([[*row, *[FREE] * (width - len(row))] for row in numbers], dtype=torch.int32)


def widened(numbers_B_T: torch.Tensor, width: int) -> torch.Tensor:
    """The same, `width` wide."""
    return torch.nn.functional.pad(numbers_B_T, (0, width - numbers_B_T.shape[1]), value=FREE)
