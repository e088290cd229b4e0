"""A model's forward pass over rows of a preallocated cache; on a GPU as captured graphs that are kept for a run.

Rows have no padding: each writes its keys and values at its own place. A captured graph is for one number of rows,
of new tokens a row and of slots attended to; a few sizes of each do for every rollout. Weights that change in place
change what the graphs compute, so that training goes on between rollouts without anything being captured again.
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

ATTENTION = "trl_grpo_tasks_rollout"  # the name of `folded_attention` among transformers' attentions
LENGTH_STEP = 256  # graphs attend to a multiple of so many slots,
WIDTHS = (1, 4, 16)  # and are fed one of these numbers of tokens a row


def folded_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor,
    scaling: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention in which query heads that share keys become further queries of one head: the cache is read once
    instead of being repeated. The mask comes folded in the same way."""
    batch, heads, length, width = query.shape
    folded = query.reshape(batch, key.shape[1], -1, width)
    out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, heads, length, width).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, folded_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class Decoder:
    """Feeds tokens to a model and keeps the logits after the last token of each row. Use it inside `running()`."""

    def __init__(self, model: Any, captures: bool | None = None, head_in_fp32: bool = False):
        disable_cudnn_attention()
        self._model = without_adapter(model)
        self._head = self._model.get_output_embeddings()
        self._head_in_fp32 = head_in_fp32
        self.device = self._head.weight.device
        config = self._model.config.get_text_config()
        self._folds = config.num_attention_heads // (config.num_key_value_heads or config.num_attention_heads)
        self._captures = self.device.type == "cuda" if captures is None else captures
        self._scale = HeadScale()
        self._rows = self._slots = 0  # room in the cache, beside one slot for padding
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._graphs: dict[tuple[int, int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None
        self._cast: CastWeights | None = None
        self._compiled = CompiledParts(self._model) if self._captures and can_compile(self.device) else None
        self._addresses = 0  # a hash of where the weights are that the graphs read
        self.batch = 0  # rows of the cache in use
        self.logits = torch.empty(0)  # (rows, vocabulary), scaled, of the rows as they were last fed
        self.passes = 0

    @contextmanager
    def running(self, rows: int, slots: int, temperature: float) -> Iterator[None]:
        """Room for `rows` rows of up to `slots` tokens, and the model as rollouts need it."""
        scale = HeadScale.of(self._model.config, temperature)
        self.passes = 0
        if self._captures:
            rows, slots = max(rows, self._rows), max(_up(slots, LENGTH_STEP), self._slots)
        addresses = hash(tuple(weight.data_ptr() for weight in self._model.parameters()))
        if addresses != self._addresses:
            self._graphs, self._cast, self._addresses = {}, None, addresses
        if (rows, slots, scale) != (self._rows, self._slots, self._scale) or not self._captures:
            self._graphs, self._cache, self._pool = {}, {}, None
            self._rows, self._slots, self._scale = rows, slots, scale
            self.logits = torch.zeros(rows, self._head.weight.shape[0], device=self.device)
        config = self._model.config.get_text_config()
        usual_attention = config._attn_implementation
        config._attn_implementation = ATTENTION
        try:
            with self._cast_weights():
                yield
        finally:
            config._attn_implementation = usual_attention
            if not self._captures:
                self._cache = {}

    @property
    def is_asynchronous(self) -> bool:
        """Whether `feed` comes back before the pass is done."""
        return self._captures

    def feed(
        self, feeds: Sequence[Sequence[int]], starts: Sequence[int], tokens_B: torch.Tensor | None = None
    ) -> None:
        """Run these tokens of each row in use (none: the row sits out), the first of which is number `start`. With
        `tokens_B` the feeds only say which rows go on, by the one token that is on the device."""
        count = len(feeds)
        length = max(start + len(feed) for start, feed in zip(starts, feeds, strict=True))
        width = max(map(len, feeds))
        if self._captures:
            count, width = self.size_for(count), next(size for size in WIDTHS if size >= width)
        given = _packed(feeds, starts, count, width)
        if self.device.type == "cuda":
            given = given.pin_memory()  # so that it is sent without waiting for what the GPU is doing
        self.passes += 1
        if not self._captures:
            self._forward(given.to(self.device), length)
            return
        graph, entry = self._captured(count, width, min(_up(length, LENGTH_STEP), self._slots))
        entry.copy_(given, non_blocking=True)
        if tokens_B is not None:
            entry[: len(tokens_B), 2] = tokens_B
        graph.replay()

    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """Run distinct prompts, then give row i of the cache what prompt `copies[i]` left there."""
        width = max(map(len, prompts))
        packed = _packed(prompts, [0] * len(prompts), len(prompts), width)
        self.passes += 1
        self.batch = len(prompts)
        self._forward(packed.to(self.device), width)
        self._move(copies, width)

    def keep(self, places: Sequence[int], length: int) -> list[int]:
        """Only these rows go on, none of which is longer than `length`. Where they are from now on."""
        if self._captures and self.size_for(len(places)) == self.size_for(self.batch):
            return list(places)
        self._move(places, length)
        return list(range(len(places)))

    def size_for(self, rows: int) -> int:
        """How many rows a pass has that is to serve `rows` of them."""
        return min(1 << (rows - 1).bit_length(), self._rows) if self._captures else rows

    def _move(self, places: Sequence[int], length: int) -> None:
        index = torch.tensor(places, device=self.device)
        for pair in self._cache.values():
            for buffer in pair:
                buffer[: len(places), :length] = buffer[index, :length]
        self.logits[: len(places)] = self.logits[index]
        self.batch = len(places)

    def _forward(self, packed: torch.Tensor, length: int) -> None:
        """A pass over rows of (start, count, token, token, ...) that attends to the first `length` slots."""
        starts, counts, ids = packed[:, :1], packed[:, 1:2], packed[:, 2:]
        steps = torch.arange(ids.shape[1], device=self.device)
        is_real = steps < counts
        positions = torch.where(is_real, starts + steps, 0)
        seen = torch.arange(length, device=self.device) <= positions[:, :, None]
        dtype = self._compute_dtype()
        mask = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, -torch.inf)
        mask = mask[:, None].expand(-1, self._folds, -1, -1).reshape(len(packed), 1, -1, length)
        slots = torch.where(is_real, starts + steps, self._slots)
        hidden = self._model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=_Slots(self, slots, length, dtype),
            use_cache=True,
        ).last_hidden_state
        rows = torch.arange(len(packed), device=self.device)
        last = hidden[rows, (counts[:, 0] - 1).clamp(min=0)]
        logits = self._scale.apply(self._head_logits(last))
        kept = self.logits[: len(packed)]
        kept.copy_(torch.where(counts > 0, logits, kept))

    def _head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's logits as float32; also computed in float32 where TRL's cast_lm_head_to_fp32 asks for it."""
        if not self._head_in_fp32:
            return self._head(hidden).float()
        with torch.autocast(self.device.type, enabled=False):
            bias = None if self._head.bias is None else self._head.bias.float()
            return nn.functional.linear(hidden.float(), self._head.weight.float(), bias)

    def _captured(self, count: int, width: int, length: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        key = (count, width, length)
        if key not in self._graphs:
            # Rows that are fed nothing write to the padding slot only: warming up disturbs nobody.
            entry = torch.zeros(count, 2 + width, dtype=torch.int64, device=self.device)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with self._autocast_uncached(), self._compiled.used() if self._compiled else nullcontext():
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._forward(entry, length)
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    self._forward(entry, length)
            self._graphs[key] = (graph, entry)
        return self._graphs[key]

    def _compute_dtype(self) -> torch.dtype:
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self._model.dtype

    def _autocast_uncached(self) -> Any:
        """Autocast as it is around us, without its cache of cast weights: a graph would keep using a stale one."""
        kind = self.device.type
        return torch.autocast(
            kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
        )

    def _cast_weights(self) -> Any:
        """Under autocast: weights that are cast once a rollout."""
        if not torch.is_autocast_enabled(self.device.type):
            return nullcontext()
        if self._cast is None:
            kept = [self._head] if self._head_in_fp32 else []
            self._cast = CastWeights(self._model, torch.get_autocast_dtype(self.device.type), kept)
        if self._cast.refresh():
            self._graphs = {}  # they were captured with adapters as they no longer are
        return self._cast.used()


class _Slots:
    """What transformers' attention layers see of the cache during one pass."""

    def __init__(self, decoder: Decoder, slots_B_L: torch.Tensor, length: int, dtype: torch.dtype):
        self._decoder = decoder
        self._slots = slots_B_L
        self._rows = torch.arange(len(slots_B_L), device=slots_B_L.device)[:, None]
        self._length, self._dtype = length, dtype

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """Keys and values (B, H, L, D) of new tokens in, those of all that may be attended to out."""
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
    """Rows of (start, count, token, token, ...), and empty ones up to `rows`."""
    packed = np.zeros((rows, 2 + width), dtype=np.int64)
    for row, (feed, start) in enumerate(zip(feeds, starts, strict=True)):
        packed[row, : 2 + len(feed)] = (start, len(feed), *feed)
    return torch.from_numpy(packed)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
