"""The model's forward pass over a preallocated KV cache; on a GPU, passes are captured as CUDA graphs and reused.

Rows have no padding: each row writes its keys and values at its own position. A CUDA graph is captured for each
combination of batch size, new tokens per row and KV length. All three are rounded up to a few bucket sizes, so that a
few graphs serve every rollout. Graphs read the weights in place, so training between rollouts needs no recapture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ..constraints.scoring import HeadScale
from .attention import disable_cudnn_attention
from .compiled import CompiledParts, can_compile
from .support import without_adapter
from .weights import CastWeights

ATTENTION = "trl_grpo_tasks_rollout"  # the name under which `folded_attention` is registered in transformers
# CUDA-graph buckets
KV_LENGTH_STEP = 256  # the KV length is rounded up to a multiple of this
NEW_TOKEN_BUCKETS = (1, 4, 16)  # the number of new tokens per row is padded to one of these


def folded_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor,
    scaling: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention that folds the query heads of each GQA group into extra queries of one head.

    The keys and values of the group are then read once instead of being repeated. The mask must be folded likewise.
    """
    batch, heads, length, width = query.shape
    folded = query.reshape(batch, key.shape[1], -1, width)
    out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, heads, length, width).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, folded_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class Decoder:
    """Feeds tokens to a model and holds the logits after the last token of each row. Use it within `running()`.

    `captures`: whether to use CUDA graphs; None enables them on a GPU. `head_in_fp32`: whether to compute the LM head
    in float32, like TRL's cast_lm_head_to_fp32.
    """

    def __init__(self, model: Any, captures: bool | None = None, head_in_fp32: bool = False):
        disable_cudnn_attention()
        self._model = without_adapter(model)
        self._head = self._model.get_output_embeddings()
        self._head_in_fp32 = head_in_fp32
        self.device = self._head.weight.device
        config = self._model.config.get_text_config()
        self._gqa_group_size = config.num_attention_heads // (config.num_key_value_heads or config.num_attention_heads)
        self._captures = self.device.type == "cuda" if captures is None else captures
        self._scale = HeadScale()
        self._rows = self._slots = 0  # size of the KV cache, without its extra slot for padding
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._graphs: dict[tuple[int, int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None
        self._cast: CastWeights | None = None
        self._compiled = CompiledParts(self._model) if self._captures and can_compile(self.device) else None
        self._addresses = 0  # hash of the memory addresses of the weights, which captured graphs read
        self.batch = 0  # number of cache rows in use
        self.logits = torch.empty(0)  # (rows, vocabulary), scaled; the logits after the last token fed to each row
        self.passes = 0  # forward passes since the start of `running`

    @contextmanager
    def running(self, rows: int, slots: int, temperature: float) -> Iterator[None]:
        """Allocate a KV cache of `rows` rows with up to `slots` tokens, and prepare the model within this context."""
        scale = HeadScale.of(self._model.config, temperature)
        self.passes = 0
        if self._captures:
            rows, slots = max(rows, self._rows), max(_round_up(slots, KV_LENGTH_STEP), self._slots)
        addresses = hash(tuple(weight.data_ptr() for weight in self._model.parameters()))
        if addresses != self._addresses:
            self._graphs, self._cast, self._addresses = {}, None, addresses
        if (rows, slots, scale) != (self._rows, self._slots, self._scale) or not self._captures:
            self._graphs, self._cache, self._pool = {}, {}, None
            self._rows, self._slots, self._scale = rows, slots, scale
            self.logits = torch.zeros(rows, self._head.weight.shape[0], device=self.device)
        config = self._model.config.get_text_config()
        original_attention = config._attn_implementation
        config._attn_implementation = ATTENTION
        try:
            with self._cast_weights():
                yield
        finally:
            config._attn_implementation = original_attention
            if not self._captures:
                self._cache = {}

    @property
    def is_asynchronous(self) -> bool:
        """Whether `feed` returns before the pass has finished."""
        return self._captures

    def feed(
        self, feeds: Sequence[Sequence[int]], starts: Sequence[int], tokens_B: torch.Tensor | None = None
    ) -> None:
        """Run one forward pass over new tokens of the rows in use.

        `feeds` holds the new tokens of each row; a row with none is skipped. `starts` holds the position of the first
        new token of each row. If `tokens_B` is given, its tokens on the device are fed instead, one per row, and
        `feeds` holds a placeholder for each row that is fed.
        """
        count = len(feeds)
        length = max(start + len(feed) for start, feed in zip(starts, feeds, strict=True))
        width = max(map(len, feeds))
        if self._captures:
            count, width = self._batch_bucket(count), next(size for size in NEW_TOKEN_BUCKETS if size >= width)
        packed = _packed(feeds, starts, count, width)
        if self.device.type == "cuda":
            packed = packed.pin_memory()  # for a copy that does not wait for queued GPU work
        self.passes += 1
        if not self._captures:
            self._forward(packed.to(self.device), length)
            return
        graph, graph_input = self._captured(count, width, min(_round_up(length, KV_LENGTH_STEP), self._slots))
        graph_input.copy_(packed, non_blocking=True)
        if tokens_B is not None:
            graph_input[: len(tokens_B), 2] = tokens_B
        graph.replay()

    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """Run the distinct prompts, then copy the keys and values of prompt `copies[i]` to cache row i."""
        width = max(map(len, prompts))
        packed = _packed(prompts, [0] * len(prompts), len(prompts), width)
        self.passes += 1
        self.batch = len(prompts)
        self._forward(packed.to(self.device), width)
        self._copy_rows(copies, width)

    def keep(self, cache_rows: Sequence[int], length: int) -> list[int]:
        """Keep only these cache rows, none of which is longer than `length`, and return their new row indices."""
        if self._captures and self._batch_bucket(len(cache_rows)) == self._batch_bucket(self.batch):
            return list(cache_rows)
        self._copy_rows(cache_rows, length)
        return list(range(len(cache_rows)))

    def _batch_bucket(self, rows: int) -> int:
        """Return the batch size of a pass over `rows` rows: with captured passes, the next power of two."""
        return min(1 << (rows - 1).bit_length(), self._rows) if self._captures else rows

    def _copy_rows(self, cache_rows: Sequence[int], length: int) -> None:
        index = torch.tensor(cache_rows, device=self.device)
        for pair in self._cache.values():
            for buffer in pair:
                buffer[: len(cache_rows), :length] = buffer[index, :length]
        self.logits[: len(cache_rows)] = self.logits[index]
        self.batch = len(cache_rows)

    def _forward(self, packed: torch.Tensor, length: int) -> None:
        """Run a pass over rows of (start, count, token, token, ...) that attends to the first `length` cache slots."""
        starts, counts, ids = packed[:, :1], packed[:, 1:2], packed[:, 2:]
        steps = torch.arange(ids.shape[1], device=self.device)
        is_real = steps < counts
        positions = torch.where(is_real, starts + steps, 0)
        is_attended = torch.arange(length, device=self.device) <= positions[:, :, None]
        dtype = self._compute_dtype()
        mask = torch.zeros(is_attended.shape, dtype=dtype, device=self.device).masked_fill_(~is_attended, -torch.inf)
        mask = mask[:, None].expand(-1, self._gqa_group_size, -1, -1).reshape(len(packed), 1, -1, length)
        slots = torch.where(is_real, starts + steps, self._slots)
        hidden = self._model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=_CacheView(self, slots, length, dtype),
            use_cache=True,
        ).last_hidden_state
        rows = torch.arange(len(packed), device=self.device)
        last = hidden[rows, (counts[:, 0] - 1).clamp(min=0)]
        logits = self._scale.apply(self._head_logits(last))
        stored = self.logits[: len(packed)]
        stored.copy_(torch.where(counts > 0, logits, stored))  # skipped rows keep their logits

    def _head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the LM head as float32, computed in float32 if `head_in_fp32` is set."""
        if not self._head_in_fp32:
            return self._head(hidden).float()
        with torch.autocast(self.device.type, enabled=False):
            bias = None if self._head.bias is None else self._head.bias.float()
            return nn.functional.linear(hidden.float(), self._head.weight.float(), bias)

    def _captured(self, count: int, width: int, length: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Return the CUDA graph for these bucket sizes and its input tensor; new sizes are captured first."""
        key = (count, width, length)
        if key not in self._graphs:
            # An empty row writes only to the padding slot, so the warm-up pass does not change the cache.
            graph_input = torch.zeros(count, 2 + width, dtype=torch.int64, device=self.device)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with self._autocast_uncached(), self._compiled.used() if self._compiled else nullcontext():
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._forward(graph_input, length)
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    self._forward(graph_input, length)
            self._graphs[key] = (graph, graph_input)
        return self._graphs[key]

    def _compute_dtype(self) -> torch.dtype:
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self._model.dtype

    def _autocast_uncached(self) -> Any:
        """Return the current autocast context without its weight cache: a graph would keep reading stale weights."""
        kind = self.device.type
        return torch.autocast(
            kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
        )

    def _cast_weights(self) -> Any:
        """Return a context in which weights are cast once per rollout; without autocast it does nothing."""
        if not torch.is_autocast_enabled(self.device.type):
            return nullcontext()
        if self._cast is None:
            excluded = [self._head] if self._head_in_fp32 else []
            self._cast = CastWeights(self._model, torch.get_autocast_dtype(self.device.type), excluded)
        if self._cast.refresh():
            self._graphs = {}  # the graphs were captured with unfolded adapters
        return self._cast.used()


class _CacheView:
    """The KV cache interface that transformers' attention layers use during one pass."""

    def __init__(self, decoder: Decoder, slots_B_L: torch.Tensor, length: int, dtype: torch.dtype):
        self._decoder = decoder
        self._slots = slots_B_L
        self._rows = torch.arange(len(slots_B_L), device=slots_B_L.device)[:, None]
        self._length, self._dtype = length, dtype

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """Store keys and values (B, H, L, D) of new tokens, and return those of all slots that may be attended to."""
        cache, decoder = self._decoder._cache, self._decoder
        if layer not in cache:
            shape = (decoder._rows, decoder._slots + 1, keys.shape[1])
            cache[layer] = (
                torch.zeros((*shape, keys.shape[3]), dtype=self._dtype, device=keys.device),
                torch.zeros((*shape, values.shape[3]), dtype=self._dtype, device=keys.device),
            )
        out = []
        for buffer, new in zip(cache[layer], (keys, values), strict=True):
            buffer[self._rows, self._slots] = new.transpose(1, 2).to(self._dtype)
            out.append(buffer[: len(self._slots), : self._length].transpose(1, 2))
        return tuple(out)

    def get_seq_length(self, layer: int = 0) -> int:
        return self._length


def _packed(feeds: Sequence[Sequence[int]], starts: Sequence[int], rows: int, width: int) -> torch.Tensor:
    """Return a tensor of rows (start, count, token, token, ...), padded with empty rows up to `rows`."""
    packed = np.zeros((rows, 2 + width), dtype=np.int64)
    for row, (feed, start) in enumerate(zip(feeds, starts, strict=True)):
        packed[row, : 2 + len(feed)] = (start, len(feed), *feed)
    return torch.from_numpy(packed)


def _round_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step
