"""KV caches: pages shared between rows on a GPU, and contiguous rows where Triton is not available.

Both hold the keys and values of rows that are added and released one by one. A row that starts with the prompt of a
row in the cache takes the keys and values of that prompt from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

PAGE = 64  # tokens per page
OVERRUN = 8  # tokens that a row may get beyond its end, because the end is noticed later


class CacheShape(NamedTuple):
    """The size of one token in the cache of a model, and where the cache is kept."""

    layers: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, device: torch.device) -> CacheShape:
        """Read the shape from the configuration of a transformers model."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or heads, width, dtype, device)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.width * self.dtype.itemsize

    def buffers(self, *sizes: int, make: Callable[..., torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return a pair of buffers for keys and values per layer; `make` is torch.empty or torch.zeros."""
        size = (*sizes, self.kv_heads, self.width)
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        return [(make(size, **options), make(size, **options)) for _ in range(self.layers)]


def free_memory(device: torch.device) -> int:
    """Return the number of bytes that can be allocated, including what torch has reserved but does not use."""
    if device.type != "cuda":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class _Rows:
    """The rows of a cache, with the prompts they started with."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._rows_of_prompt: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def holder(self, prompt: tuple[int, ...]) -> int | None:
        """Return a row that starts with this prompt, or None."""
        return self._rows_of_prompt.get(prompt, [None])[0]

    def add(self, row: int, prompt: tuple[int, ...]) -> None:
        self._prompts[row] = prompt
        self._rows_of_prompt.setdefault(prompt, []).append(row)

    def remove(self, row: int) -> None:
        prompt = self._prompts.pop(row)
        others = self._rows_of_prompt[prompt]
        others.remove(row)
        if not others:
            del self._rows_of_prompt[prompt]


class PagedCache:
    """A cache of pages on a GPU. Rows with the same prompt share the pages that the prompt fills.

    A row reserves the pages of its longest possible completion when it is added, so that no row runs out of memory
    later. `table` holds the page numbers of each slot of the cache; `addresses` the memory address of the keys and
    values of each layer. Both belong to the caller, and are written in place.
    """

    def __init__(
        self,
        shape: CacheShape,
        rows: int,
        pages: int,
        max_new_tokens: int,
        table: torch.Tensor,
        addresses: torch.Tensor,
    ):
        self._buffers = shape.buffers(pages, PAGE, make=torch.empty)
        addresses.copy_(torch.tensor([[buffer.data_ptr() for buffer in pair] for pair in self._buffers]))
        self._table, self._max_new_tokens = table, max_new_tokens
        self._host_table = np.zeros(table.shape, dtype=np.int32)
        self._free_pages = list(range(pages))
        self._users = [0] * pages
        self._free_slots = list(range(rows))[::-1]
        self._slots: dict[int, int] = {}
        self._pages: dict[int, list[int]] = {}
        self._rows = _Rows()

    def fits(self, prompt: tuple[int, ...]) -> bool:
        """Whether there is room for another row with this prompt."""
        shared = 0 if self._rows.holder(prompt) is None else (len(prompt) - 1) // PAGE
        return bool(self._free_slots) and self._pages_of(prompt) - shared <= len(self._free_pages)

    def add(self, row: int, prompt: tuple[int, ...]) -> int | None:
        """Reserve the pages of a row. Returns the row whose keys and values it starts with, or None."""
        source = self._rows.holder(prompt)
        shared = [] if source is None else self._pages[source][: (len(prompt) - 1) // PAGE]
        own = [self._free_pages.pop() for _ in range(self._pages_of(prompt) - len(shared))]
        self._pages[row] = [*shared, *own]
        for page in self._pages[row]:
            self._users[page] += 1
        self._slots[row] = self._free_slots.pop()
        self._host_table[self._slots[row], : len(self._pages[row])] = self._pages[row]
        self._rows.add(row, prompt)
        return source

    def publish(self) -> None:
        """Copy the page numbers of added rows to the device."""
        self._table.copy_(torch.from_numpy(self._host_table))

    def copy_prompts(self, pairs: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """For each pair (source, row), copy the page that the first `length` tokens fill only in part."""
        partly = [(pair, length // PAGE) for pair, length in zip(pairs, lengths, strict=True) if length % PAGE]
        if partly:
            device = self._table.device
            source = torch.tensor([self._pages[source][page] for (source, _), page in partly], device=device)
            target = torch.tensor([self._pages[row][page] for (_, row), page in partly], device=device)
            for pair in self._buffers:
                for buffer in pair:
                    buffer[target] = buffer[source]

    def release(self, row: int) -> None:
        for page in self._pages.pop(row):
            self._users[page] -= 1
            if not self._users[page]:
                self._free_pages.append(page)
        self._free_slots.append(self._slots.pop(row))
        self._rows.remove(row)

    def slots(self, rows: Sequence[int]) -> list[int]:
        return [self._slots[row] for row in rows]

    def _pages_of(self, prompt: tuple[int, ...]) -> int:
        return pages_for(len(prompt), self._max_new_tokens)


def pages_for(prompt_length: int, max_new_tokens: int) -> int:
    """Return the number of pages of a row, including tokens that are fed before its end is noticed."""
    return -(-(prompt_length + max_new_tokens + OVERRUN) // PAGE)


def pages_of_largest(prompts: Sequence[tuple[int, ...]], max_new_tokens: int, count: int) -> int:
    """Return the number of pages of the `count` largest rows, if rows with the same prompt share its full pages."""
    seen: set[tuple[int, ...]] = set()
    pages = []
    for prompt in prompts:
        shared = (len(prompt) - 1) // PAGE if prompt in seen else 0
        pages.append(pages_for(len(prompt), max_new_tokens) - shared)
        seen.add(prompt)
    return sum(sorted(pages, reverse=True)[:count])


class RowCache:
    """A cache with one contiguous buffer per row, which SDPA reads. The rows in use are always the first ones."""

    def __init__(self, shape: CacheShape, rows: int, length: int):
        # SDPA multiplies unused values by zero, so they must be finite.
        self._buffers = shape.buffers(rows, length, make=torch.zeros)
        self._capacity = rows
        self._slots: dict[int, int] = {}
        self._row_of_slot: list[int] = []
        self._rows = _Rows()
        self._pass: _RowPass | None = None

    def fits(self, prompt: tuple[int, ...]) -> bool:
        """Whether there is room for another row with this prompt."""
        return len(self._rows) < self._capacity

    def add(self, row: int, prompt: tuple[int, ...]) -> int | None:
        """Reserve a slot for a row. Returns the row whose keys and values it starts with, or None."""
        source = self._rows.holder(prompt)
        self._rows.add(row, prompt)
        self._slots[row] = len(self._row_of_slot)
        self._row_of_slot.append(row)
        return source

    def publish(self) -> None:
        """Do nothing: the slots of rows are not used on a device."""

    def copy_prompts(self, pairs: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """For each pair (source, row), copy the keys and values of the first `length` tokens."""
        if not pairs:
            return
        source, target = (torch.tensor(self.slots(rows)) for rows in zip(*pairs, strict=True))
        longest = max(lengths)
        for pair in self._buffers:
            for buffer in pair:
                buffer[target, :longest] = buffer[source, :longest]

    def release(self, row: int) -> None:
        """Free the slot of a row; the row in the last slot moves there."""
        slot, last = self._slots.pop(row), self._row_of_slot.pop()
        self._rows.remove(row)
        if last != row:
            for pair in self._buffers:
                for buffer in pair:
                    buffer[slot] = buffer[len(self._row_of_slot)]
            self._slots[last], self._row_of_slot[slot] = slot, last

    def slots(self, rows: Sequence[int]) -> list[int]:
        return [self._slots[row] for row in rows]

    def start_pass(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Prepare `attend` for a pass over tokens in these slots, which are contiguous for each row."""
        self._pass = _RowPass(slots, positions, self._buffers[0][0].device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None,
        window: int, softcap: float | None, sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Store keys and values (T, K, D) of new tokens, and return what the queries (T, H, D) attend to."""
        current = self._pass
        assert current is not None
        first, last, length = current.first, current.last, current.length
        stored = []
        for buffer, new in zip(self._buffers[layer], (key, value), strict=True):
            buffer[current.slots_T, current.positions_T] = new
            stored.append(buffer[first:last, :length].transpose(1, 2))
        # The query heads of a GQA group become extra queries of one head, so that keys are read once per group.
        kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
        grid = query[current.token_R_W].unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4)
        rows, _, _, width, channels = grid.shape
        mask = current.mask(window).repeat(1, group, 1)[:, None]
        folded = grid.reshape(rows, kv_heads, group * width, channels)
        if softcap is None and sinks is None:
            out = nn.functional.scaled_dot_product_attention(folded, *stored, attn_mask=mask, scale=scale)
        else:
            out = _explicit_attention(folded, stored[0], stored[1], mask, scale, softcap, sinks)
        out = out.reshape(rows, kv_heads, group, width, channels).permute(0, 3, 1, 2, 4).flatten(2, 3)
        return out[current.row_T, current.step_T]


class _RowPass:
    """Where the tokens of one pass are: token t is number `step_T[t]` of the new tokens of row `row_T[t]`."""

    def __init__(self, slots: Sequence[int], positions: Sequence[int], device: torch.device):
        slots_T, positions_T = np.array(slots), np.array(positions)
        self.first, self.last, self.length = int(slots_T.min()), int(slots_T.max()) + 1, int(positions_T.max()) + 1
        row_T = slots_T - self.first
        begins = np.flatnonzero(np.diff(slots_T, prepend=-1))
        step_T = np.arange(len(slots_T)) - np.repeat(begins, np.diff(begins, append=len(slots_T)))
        token_R_W = np.zeros((self.last - self.first, int(step_T.max()) + 1), dtype=np.int64)
        token_R_W[row_T, step_T] = np.arange(len(slots_T))
        position_R_W = np.zeros_like(token_R_W)
        position_R_W[row_T, step_T] = positions_T
        arrays = (slots_T, positions_T, row_T, step_T, token_R_W, position_R_W)
        (self.slots_T, self.positions_T, self.row_T, self.step_T, self.token_R_W, self._position_R_W) = (
            torch.from_numpy(array).to(device) for array in arrays
        )
        self._masks: dict[int, torch.Tensor] = {}

    def mask(self, window: int) -> torch.Tensor:
        """Return which positions each token attends to: (rows, steps, positions); window 0 means no limit."""
        if window not in self._masks:
            key = torch.arange(self.length, device=self.slots_T.device)
            query = self._position_R_W[:, :, None]
            attends = key <= query
            self._masks[window] = attends & (key > query - window) if window else attends
        return self._masks[window]


def _explicit_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None,
    softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention with soft-capped scores and attention sinks, which SDPA does not offer."""
    scores = query.float() @ key.float().transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        kv_heads = query.shape[1]
        sink = sinks.float().view(kv_heads, -1).repeat_interleave(scores.shape[2] * kv_heads // len(sinks), 1)
        scores = torch.cat([scores, sink[None, :, :, None].expand(len(scores), -1, -1, -1)], dim=3)
    weights = scores.softmax(3)[..., : key.shape[2]]
    return (weights @ value.float()).to(query.dtype)
