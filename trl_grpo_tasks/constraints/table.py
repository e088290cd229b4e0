"""A table of the distinct masks of a rollout. Token positions store a mask number, never a row over the vocabulary."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128_digest

from .base import FREE, pack, pack_ids, unpack, words_for

__all__ = ["FREE", "MaskTable", "MaskTables", "pad_mask_numbers", "widen_mask_numbers"]


class MaskTable:
    """Distinct masks, addressed by number.

    A mask that allows few tokens is stored as token ids, any other as packed bits. This keeps memory low with sampling
    filters, whose kept sets are small and nearly all different.
    """

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._width = words_for(vocab_size)
        everything = pack(np.ones(vocab_size, dtype=bool))
        self._masks = [everything]  # uint32 token ids in ascending order, or int32 packed words
        self._counts = array("q", [vocab_size])
        self._numbers = {xxh3_128_digest(everything.data): FREE}
        self._numbers_of_single_tokens: dict[int, int] = {}
        self.cache: dict[str, Any] = {}  # prepared masks of this table; owned by scoring.py

    def __len__(self) -> int:
        return len(self._masks)

    def number_of(self, words: np.ndarray | None) -> int:
        """Return the number of a packed mask, adding it to the table if it is new; None stands for FREE."""
        if words is None:
            return FREE
        if len(words) < self._width:  # the model has more outputs than the tokenizer has tokens
            words = np.concatenate([words, np.zeros(self._width - len(words), dtype=np.int32)])
        words = words[: self._width]  # or fewer, where special tokens that are never allowed have no output
        number = self._numbers.get(xxh3_128_digest(words.data))
        return self.numbers_of(words[None])[0] if number is None else number

    def numbers_of(self, words_B_W: np.ndarray) -> list[int]:
        """Return the numbers of many packed masks, adding new ones. The masks must cover all outputs of the model."""
        keys = [xxh3_128_digest(words.data) for words in words_B_W]
        new = {key: row for row, key in enumerate(keys) if key not in self._numbers}
        if new:
            words_N_W = words_B_W[list(new.values())]
            counts_N = np.bitwise_count(words_N_W.view(np.uint32)).sum(1)
            is_narrow_N = counts_N < self._width
            narrow = iter(_ids_of(words_N_W[is_narrow_N], counts_N[is_narrow_N]))
            for key, words, count in zip(new, words_N_W, counts_N.tolist(), strict=True):
                self._numbers[key] = len(self._masks)
                self._masks.append(next(narrow) if count < self._width else words.copy())
                self._counts.append(count)
        return [self._numbers[key] for key in keys]

    def number_of_single_token(self, token: int) -> int:
        """Return the number of the mask that allows only `token`."""
        number = self._numbers_of_single_tokens.get(token)
        if number is None:
            number = self._numbers_of_single_tokens[token] = self.number_of(pack_ids([token], self.vocab_size))
        return number

    def words(self, numbers: Iterable[int]) -> np.ndarray:
        """Return the packed masks with these numbers, one per row."""
        masks = [self._masks[number] for number in numbers]
        if not masks:
            return np.empty((0, self._width), dtype=np.int32)
        return np.stack([pack_ids(m, self.vocab_size) if m.dtype == np.uint32 else m for m in masks])

    def ids(self, number: int) -> np.ndarray:
        """Return the ids of the tokens that a mask allows, in ascending order."""
        mask = self._masks[number]
        return mask if mask.dtype == np.uint32 else np.flatnonzero(unpack(mask, self.vocab_size)).astype(np.uint32)

    def counts(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of tokens that each of these masks allows."""
        return np.frombuffer(self._counts, dtype=np.int64)[numbers]

    def state_dict(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size, "masks": self.export(range(1, len(self)))}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> MaskTable:
        table = cls(state["vocab_size"])
        table.add(state["masks"])
        return table

    def export(self, numbers: Iterable[int]) -> list[torch.Tensor]:
        """Return copies of the masks with these numbers, which `add` of this or another table accepts."""
        return [torch.from_numpy(self._masks[number].view(np.int32).copy()) for number in numbers]

    def add(self, masks: Iterable[torch.Tensor]) -> list[int]:
        """Add masks that `export` returned, and return their numbers in this table."""
        arrays = [mask.cpu().numpy() for mask in masks]
        return [self.number_of(m if len(m) == self._width else pack_ids(m, self.vocab_size)) for m in arrays]


def _ids_of(words_N_W: np.ndarray, counts_N: np.ndarray) -> list[np.ndarray]:
    """Return the token ids of packed masks, given the number of tokens that each allows."""
    row, column = np.nonzero(words_N_W)  # only the few nonzero words are unpacked
    which, bit = np.nonzero(unpack(words_N_W[row, column, None], 32))
    flat = (column[which] * 32 + bit).astype(np.uint32)
    return [ids.copy() for ids in np.split(flat, np.cumsum(counts_N)[:-1])] if len(counts_N) else []


class MaskTables(dict[str, MaskTable]):
    """The mask tables of the current training rollout and of the current evaluation rollout, by mode."""

    def start(self, mode: str, vocab_size: int) -> MaskTable:
        """Replace the table of `mode` by a new, empty one and return it."""
        self[mode] = MaskTable(vocab_size)
        return self[mode]


def pad_mask_numbers(numbers: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the mask numbers of completions of different lengths as one CPU tensor, padded with FREE."""
    width = max((len(row) for row in numbers), default=0)
    return torch.tensor([[*row, *[FREE] * (width - len(row))] for row in numbers], dtype=torch.int32)


def widen_mask_numbers(numbers_B_T: torch.Tensor, width: int) -> torch.Tensor:
    """Pad mask numbers with FREE to `width` positions."""
    return torch.nn.functional.pad(numbers_B_T, (0, width - numbers_B_T.shape[1]), value=FREE)
