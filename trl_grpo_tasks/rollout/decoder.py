"""The model's forward pass over new tokens of many rows, with a KV cache.

A pass runs over a flat list of tokens. Each token has a cache row and a position, so that rows of any length and any
number of new tokens share a pass without padding. On a GPU, passes are captured as CUDA graphs by their number of
tokens, rounded up to a few sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from ..constraints.base import attribute_set
from ..constraints.scoring import HeadScale
from .attention import PAGED, PAGED_PREFILL, ROWS, disable_cudnn_attention
from .cache import OVERRUN, PAGE, CacheShape, PagedCache, RowCache, free_memory, pages_of_largest
from .compiled import CompiledLayers, can_compile, has_kernels, kernels_fit
from .graphs import PADDING, STEPS, TOKEN_BUCKETS, Graphs
from .next_token import copy_to_cpu_async
from .rotary import constant_frequencies
from .support import EXPERT_FAMILIES, text_backbone, without_adapter
from .weights import RolloutWeights, is_freed_between_rollouts

MAX_PREFILL_TOKENS = 8192  # tokens per pass that reads prompts
MAX_MASKED_PREFILL_TOKENS = 2048  # the same without our kernels, where a pass needs a mask over all positions
CACHE_SHARE = 0.8  # of the free memory, the part that the KV cache may take


class Decoder:
    """Runs a model over new tokens of rows in a KV cache. Use it within `running()`.

    `kernels`: whether to use the Triton kernels and a paged cache; None uses them where they can run. `head_in_fp32`:
    whether to compute the LM head in float32, like TRL's cast_lm_head_to_fp32.
    """

    def __init__(self, model: Any, head_in_fp32: bool = False, kernels: bool | None = None):
        disable_cudnn_attention()
        self._model = without_adapter(model)
        self._backbone = text_backbone(self._model)
        self._head_in_fp32 = head_in_fp32
        self.parameters = self._model.num_parameters()
        self.device = self._model.get_output_embeddings().weight.device
        self._autocast_dtype = self._current_autocast()
        if kernels is None:
            heads = self._model.config.get_text_config().num_attention_heads
            kernels = has_kernels(self.device) and kernels_fit(self._cache_shape(), heads)
        self.uses_kernels = kernels
        if self.uses_kernels:
            from . import kernels as _  # noqa: F401 (defines the operators that layers call)
        # Passes are captured and end after `feed` has returned.
        self.is_asynchronous = self.uses_kernels and self.device.type == "cuda" and self._can_capture()
        compiles = self.is_asynchronous and can_compile(self.device)
        self._compiled = CompiledLayers(self._backbone) if compiles else None
        self._attention_layers = [part for part in self._backbone.modules() if hasattr(part, "num_key_value_groups")]
        self._weights: RolloutWeights | None = None
        self._weight_addresses = 0  # hash of the addresses of the weights, which captured graphs read
        self._table = torch.zeros(0, 0, dtype=torch.int32, device=self.device)
        self._addresses = torch.zeros(len(self._attention_layers), 2, dtype=torch.int64, device=self.device)
        self._graphs = Graphs(self._forward, self._head_logits, self._compiled, self.device)
        self._stepping: tuple[list[int], torch.Tensor] | None = None  # rows of the latest steps, and their input
        self.cache: Any = None  # within `running`, a PagedCache or RowCache, whose rows the caller adds and releases
        self.scale = HeadScale()
        self.passes = 0  # forward passes since the start of `running`

    @contextmanager
    def running(
        self,
        prompts: Sequence[tuple[int, ...]],
        max_new_tokens: int,
        temperature: float,
        batch_size: int | None = None,
    ) -> Iterator[None]:
        """Allocate a KV cache for rows with these prompts, and prepare the model within this context.

        At most `batch_size` rows are in the cache at a time; without it, as many as fit into free memory.
        """
        self.scale = HeadScale.of(self._model.config, temperature)
        self.passes, self._stepping = 0, None
        attention = self._attention(PAGED if self.uses_kernels else ROWS)
        with self._prepared_weights(), _evaluating(self._model), attention, constant_frequencies(self._backbone):
            self._allocate(prompts, max_new_tokens, batch_size)
            try:
                yield
            finally:
                self.cache = None
                for layer in self._attention_layers:
                    layer.row_cache = layer.cache_table = layer.cache_addresses = None

    # ---- rows

    def prefill(self, rows: Sequence[int], prompts: Sequence[tuple[int, ...]], sources: Sequence[int | None]) -> None:
        """Read all but the last token of the prompts of rows that were added to the cache, or copy them from the
        `sources`, rows with the same prompt."""
        self.cache.publish()
        new = [(row, prompt) for row, prompt, source in zip(rows, prompts, sources, strict=True) if source is None]
        self._extend([row for row, _ in new], [prompt[:-1] for _, prompt in new], [0] * len(new))
        pairs = [(source, row) for row, source in zip(rows, sources, strict=True) if source is not None]
        lengths = [len(prompt) - 1 for prompt, source in zip(prompts, sources, strict=True) if source is not None]
        self.cache.copy_prompts(pairs, lengths)

    # ---- passes

    def feed(
        self,
        rows: Sequence[int],
        new_tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        tokens_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run new tokens of rows, at least one each, and return the unscaled logits after the last one of each row.

        `starts` holds the position of the first new token of each row. If `tokens_B` is given, its tokens on the
        device are fed instead, and `new_tokens` holds a placeholder for each row.
        """
        limit = TOKEN_BUCKETS[-1]
        if sum(map(len, new_tokens)) > limit:
            self._extend(rows, [tokens[:-1] for tokens in new_tokens], starts)
            starts = [start + len(tokens) - 1 for start, tokens in zip(starts, new_tokens, strict=True)]
            new_tokens = [tokens[-1:] for tokens in new_tokens]
        logits = []
        for begin in range(0, len(rows), limit):
            part = slice(begin, begin + limit)
            packed = self._packed(rows[part], new_tokens[part], starts[part])
            hidden = self._run(packed, None if tokens_B is None else tokens_B[part])
            ends = np.cumsum([len(tokens) for tokens in new_tokens[part]]) - 1
            if len(ends) == packed.shape[1]:
                hidden = hidden[: len(ends)]
            else:
                hidden = hidden[self._upload(ends)]
            logits.append(self._head_logits(hidden))
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def generate(
        self, rows: Sequence[int], new: Mapping[int, tuple[int, int]], is_greedy: bool
    ) -> Callable[[], np.ndarray]:
        """Sample STEPS tokens for each row without waiting, and return a function that reads them.

        `new` holds the next token to feed and its position, for the rows that were not in the previous call. The
        result has shape (STEPS, 2, rows): tokens and their log-probs. A step is one CUDA graph: the sampled token of a
        row is fed in the next step without leaving the GPU.
        """
        from .kernels import new_seeds

        bucket = next(size for size in TOKEN_BUCKETS if size >= len(rows))
        captured = self._graphs.of_step(bucket, self.scale, is_greedy)
        if self._stepping is None or self._stepping[0] != rows:
            self._set_rows(captured.entry_3_B, list(rows), new)
        elif self._stepping[1] is not captured.entry_3_B:
            captured.entry_3_B.copy_(self._stepping[1])
        self._stepping = (list(rows), captured.entry_3_B)
        captured.step.zero_()
        captured.seeds_S_B.copy_(new_seeds(*captured.seeds_S_B.shape, device=self.device))
        for _ in range(STEPS):
            captured.graph.replay()
        self.passes += STEPS
        read = copy_to_cpu_async(captured.drawn_S_2_B[:, :, : len(rows)])
        return lambda: read().numpy()

    def _set_rows(self, entry: torch.Tensor, rows: list[int], new: Mapping[int, tuple[int, int]]) -> None:
        """Write tokens, slots and positions of rows; those of rows in the latest steps are on the device."""
        packed = np.tile(PADDING, entry.shape[1])
        packed[1, : len(rows)] = self.cache.slots(rows)
        source = np.full(entry.shape[1], -1)
        before, latest = self._stepping or ([], entry)
        column = {row: k for k, row in enumerate(before)}
        for k, row in enumerate(rows):
            if row in new:
                packed[0, k], packed[2, k] = new[row]
            else:
                source[k] = column[row]
        given = self._upload(np.concatenate([packed, source[None]]))
        kept = latest[:, given[3].clamp(min=0)]
        kept[1] = given[1]
        entry.copy_(torch.where(given[3] >= 0, kept, given[:3]))

    def _extend(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        """Add tokens to the cache without computing logits, in passes of bounded size."""
        limit = MAX_PREFILL_TOKENS if self.uses_kernels else MAX_MASKED_PREFILL_TOKENS
        chunk: list[tuple[int, Sequence[int], int]] = []
        for row, tokens, start in zip(rows, new_tokens, starts, strict=True):
            while tokens:
                part = tokens[:limit]
                if chunk and self._padded_size([*(len(other) for _, other, _ in chunk), len(part)]) > limit:
                    self._run_prefill(chunk)
                    chunk = []
                chunk.append((row, part, start))
                tokens, start = tokens[limit:], start + limit
        if chunk:
            self._run_prefill(chunk)

    def _padded_size(self, counts: Sequence[int]) -> int:
        """Return how many tokens a prefill pass over rows with these numbers of new tokens computes."""
        if self.uses_kernels:
            return sum(_round_up(count, _prefill_tile()) for count in counts)
        return len(counts) * max(counts)

    def _run_prefill(self, chunk: Sequence[tuple[int, Sequence[int], int]]) -> None:
        rows, tokens, starts = zip(*chunk, strict=True)
        if not self.uses_kernels:
            self._run(self._packed(rows, tokens, starts))
            return
        with self._attention(PAGED_PREFILL):
            self._run(self._packed(rows, tokens, starts, tile=_prefill_tile()), captures=False)

    def _packed(
        self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]], starts: Sequence[int], tile: int = 1
    ) -> np.ndarray:
        """Return the token, cache slot and position of each new token; rows are padded to multiples of `tile`."""
        counts = np.array([len(tokens) for tokens in new_tokens])
        padded = -(-counts // tile) * tile
        begins = np.cumsum(padded) - padded
        packed = np.zeros((3, padded.sum()), dtype=np.int64)
        packed[1] = -1
        step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        index = np.repeat(begins, counts) + step
        packed[0, index] = np.fromiter(chain.from_iterable(new_tokens), np.int64, len(index))
        packed[1, index] = np.repeat(self.cache.slots(rows), counts)
        packed[2, index] = np.repeat(starts, counts) + step
        return packed

    def _run(self, packed: np.ndarray, tokens_B: torch.Tensor | None = None, captures: bool = True) -> torch.Tensor:
        """Run a pass and return the hidden state of each token."""
        self.passes += 1
        if not self.uses_kernels:
            self.cache.start_pass(packed[1], packed[2])
            return self._forward(self._upload(packed))
        count = packed.shape[1]
        bucket = next((size for size in TOKEN_BUCKETS if size >= count), None) if captures else None
        if bucket is not None and bucket > count:
            packed = np.concatenate([packed, np.tile(PADDING, bucket - count)], axis=1)
        entry = self._upload(packed)
        if tokens_B is not None:
            entry[0, : len(tokens_B)] = tokens_B
        if bucket is None or not self.is_asynchronous:
            with self._compiled.used() if self._compiled else nullcontext():
                return self._forward(entry)
        captured = self._graphs.of_pass(bucket)
        captured.entry_3_T.copy_(entry)
        captured.graph.replay()
        return captured.hidden_T_H

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        """Copy an array to the device; on a GPU, without waiting for queued work."""
        tensor = torch.from_numpy(array)
        tensor = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return tensor.to(self.device, non_blocking=True)

    def _forward(self, packed_3_T: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (T, H) after the last norm."""
        # A mask of four dimensions reaches the attention function unchanged; it carries cache slots and positions.
        where = packed_3_T[None, None, 1:].contiguous()
        positions = packed_3_T[2:]
        return self._backbone(
            input_ids=packed_3_T[:1], attention_mask=where, position_ids=positions, use_cache=False
        ).last_hidden_state[0]

    def _head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the LM head, computed in float32 if `head_in_fp32` is set."""
        head = self._model.get_output_embeddings()
        if not self._head_in_fp32:
            return head(hidden)
        with torch.autocast(self.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.float()
            return nn.functional.linear(hidden.float(), head.weight.float(), bias)

    # ---- preparation

    def _can_capture(self) -> bool:
        """Whether passes can be captured: except for bf16 on recent GPUs, experts are chosen on the CPU."""
        if self._model.config.get_text_config().model_type not in EXPERT_FAMILIES:
            return True
        is_recent = torch.cuda.get_device_capability(self.device) >= (9, 0)
        return is_recent and all(weight.dtype == torch.bfloat16 for weight in self._backbone.parameters())

    def _allocate(self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, batch_size: int | None) -> None:
        """Create the KV cache: for all rows if they fit, else for as many as fit into free memory."""
        rows = min(len(prompts), batch_size or len(prompts))
        shape = self._cache_shape()
        budget = int(self._free_memory() * CACHE_SHARE) // shape.bytes_per_token
        longest = max(map(len, prompts)) + max_new_tokens + OVERRUN
        longest = _round_up(longest, PAGE) if self.uses_kernels else longest
        if longest > budget:
            gigabytes = shape.bytes_per_token / 2**30
            raise RuntimeError(
                f"a row of {longest} tokens needs {longest * gigabytes:.1f} GB of KV cache, but only "
                f"{budget * gigabytes:.1f} GB can be used; lower max_completion_length or the length of prompts"
            )
        if not self.uses_kernels:
            self.cache = RowCache(shape, min(rows, budget // longest), longest)
            for layer in self._attention_layers:
                layer.row_cache = self.cache
            return
        size = (max(_power_of_2(rows), len(self._table)), max(_power_of_2(longest // PAGE), self._table.shape[1]))
        if size != self._table.shape:
            self._table = torch.zeros(size, dtype=torch.int32, device=self.device)
            self._graphs.drop()  # they read the old table
        for layer, addresses in zip(self._attention_layers, self._addresses, strict=True):
            layer.cache_table, layer.cache_addresses = self._table, addresses
        pages = min(budget // PAGE, pages_of_largest(prompts, max_new_tokens, rows))
        self.cache = PagedCache(shape, rows, pages, max_new_tokens, self._table, self._addresses)

    def _cache_shape(self) -> CacheShape:
        return CacheShape.of(self._model.config, self._autocast_dtype or self._model.dtype, self.device)

    def _free_memory(self) -> int:
        return free_memory(self.device)

    def _current_autocast(self) -> torch.dtype | None:
        """Return the dtype of autocast, or None where it is off."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _frees_copies(self, weights: RolloutWeights) -> bool:
        return is_freed_between_rollouts(weights.copied_bytes, self.device)

    @contextmanager
    def _prepared_weights(self) -> Iterator[None]:
        """Within this context, the model has the weights of rollouts and computes in autocast's dtype."""
        dtype = self._current_autocast()
        if self._weights is None or dtype != self._autocast_dtype:
            excluded = [self._model.get_output_embeddings()] if self._head_in_fp32 else []
            self._autocast_dtype = dtype
            self._weights = RolloutWeights(self._model, dtype, self.uses_kernels, excluded)
        is_new = self._weights.load()
        addresses = hash(tuple(weight.data_ptr() for weight in self._model.parameters()))
        if is_new or addresses != self._weight_addresses:
            self._graphs.drop()
            self._weight_addresses = addresses
        # Autocast's cache of cast weights would outlive them.
        autocast = nullcontext() if dtype is None else torch.autocast(self.device.type, dtype, cache_enabled=False)
        try:
            with self._weights.used(), autocast:
                yield
        finally:
            if self._frees_copies(self._weights):
                self._weights.release()
                self._graphs.drop()

    def _attention(self, name: str) -> AbstractContextManager[None]:
        """Within this context, attention layers call the attention function of this name."""
        return attribute_set(self._model.config.get_text_config(), "_attn_implementation", name)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context, all modules are in evaluation mode, so that dropout does not act."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _prefill_tile() -> int:
    from .kernels import PREFILL_TILE

    return PREFILL_TILE


def _round_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


def _power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
