"""Scoring that computes each prompt once instead of once per completion.

TRL scores every completion after its own copy of the prompt. Here, all completions of a prompt follow a single copy
in one packed sequence: each completion attends to the prompt and to itself, at the positions it would have alone.
Log-probs and gradients are the same. For 64 completions of 256 tokens to 8 prompts of 2,000 tokens, the model
processes 32,000 tokens instead of 144,000.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..rollout.attention import disable_cudnn_attention
from ..rollout.support import SHARED_ATTENTION, unsupported_reason_for_sharing

MAX_TOKEN_FRACTION = 0.8  # prompts are shared only if this reduces the tokens to at most this fraction


def shared_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    shared: _Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention like `sdpa`; in passes over packed sequences, each completion attends to its prompt and to itself."""
    if shared is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return shared.attend(query, key, value, scale=kwargs.get("scaling"), dropout_p=kwargs.get("dropout", 0.0)), None


# A model keeps this attention implementation permanently, not only within `open()`: gradient checkpointing recomputes
# activations in the backward pass, after that context has ended.
AttentionInterface.register(SHARED_ATTENTION, shared_attention)
AttentionMaskInterface.register(SHARED_ATTENTION, sdpa_mask)


class SharedPrompts:
    """Makes the backbone of a model share prompts within the context `open(length)`; other passes are unchanged."""

    def __init__(self) -> None:
        self._length: int | None = None

    @contextmanager
    def open(self, length: int) -> Iterator[None]:
        """Within this context, the inputs of forward passes are prompts followed by completions of `length` tokens."""
        self._length = length
        try:
            yield
        finally:
            self._length = None

    def add_to(self, model: Any) -> str | None:
        """Wrap the backbone of a causal language model. Returns None, or the reason why the model is not supported."""
        config, reason = model.config.get_text_config(), unsupported_reason_for_sharing(model)
        if reason is None and config._attn_implementation not in ("sdpa", SHARED_ATTENTION):
            reason = f"attention implementation {config._attn_implementation!r} is not supported, use 'sdpa'"
        if reason is not None:
            return reason
        disable_cudnn_attention()
        config._attn_implementation = SHARED_ATTENTION
        backbone = model.base_model
        plain_forward = backbone.forward
        sharing = self

        @functools.wraps(plain_forward)
        def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
            if sharing._length is not None and input_ids is not None and attention_mask is not None:
                packing = _Packing.of(input_ids, attention_mask, sharing._length)
                if packing is not None:
                    states = plain_forward(**kwargs | packing.inputs).last_hidden_state
                    return BaseModelOutputWithPast(last_hidden_state=packing.unpack(states))
            return plain_forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

        backbone.forward = types.MethodType(forward, backbone)
        return None


class _Packing:
    """Rows of (prompt, completion), packed into sequences of one prompt and several completions.

    Sequence s holds the prompt and the completions of the rows `sequences[s]`. Sequences with fewer completions than
    the largest are padded with empty ones.
    """

    def __init__(self, ids: torch.Tensor, mask: torch.Tensor, length: int, sequences: list[list[int]]):
        self._shape, self._length = ids.shape, length
        prompt, device = ids.shape[1] - length, ids.device
        width = max(map(len, sequences))
        rows_S_G = torch.tensor([rows + [-1] * (width - len(rows)) for rows in sequences], device=device)
        first_S = rows_S_G[:, 0]
        is_used = (rows_S_G >= 0)[:, :, None]
        completions = torch.where(is_used, ids[rows_S_G, prompt:], 0).flatten(1)
        packed = torch.cat([ids[first_S, :prompt], completions], dim=1)
        place = torch.arange(packed.shape[1], device=device)
        position = torch.where(place < prompt, place, prompt + (place - prompt) % length)
        self.inputs = {
            "input_ids": packed,
            "attention_mask": torch.empty(1, 1, 1, 1, device=device),  # 4D: transformers creates no mask of its own
            "position_ids": position.expand(len(packed), -1),
            "shared": self,
        }
        self._prompt_mask, self._completion_mask = self._masks(mask[first_S, :prompt].bool())
        # The sequence that holds the completion of each row, and the position where it begins.
        where = {row: (s, g) for s, rows in enumerate(sequences) for g, row in enumerate(rows)}
        order = torch.tensor([where[row] for row in range(len(ids))], device=device)
        self._sequence, self._begin = order[:, :1], prompt + order[:, 1:] * length

    @classmethod
    def of(cls, ids: torch.Tensor, mask: torch.Tensor, length: int) -> _Packing | None:
        """Pack the rows by prompt. Returns None if sharing would save too few tokens."""
        rows, total = ids.shape
        prompt = total - length
        if prompt < 1:
            return None
        keys = torch.where(mask[:, :prompt].bool(), ids[:, :prompt], -1)
        _, same = torch.unique(keys, dim=0, return_inverse=True)
        groups: dict[int, list[int]] = {}
        for row, number in enumerate(same.tolist()):
            groups.setdefault(number, []).append(row)
        sequences = list(groups.values())
        tokens = len(sequences) * (prompt + length * max(map(len, sequences)))
        return cls(ids, mask, length, sequences) if tokens <= MAX_TOKEN_FRACTION * rows * total else None

    def _masks(self, is_real_S_P: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the attention mask within prompts (None: causal) and that of completions over prompt and completion.

        Padding after a completion attends to it, but no token attends to the padding.
        """
        count, prompt = is_real_S_P.shape
        own = is_real_S_P.new_ones(self._length, self._length).tril()
        attends_prompt = is_real_S_P[:, None].expand(-1, self._length, -1)
        completion_mask = torch.cat((attends_prompt, own.expand(count, -1, -1)), dim=2)[:, None]
        if is_real_S_P.all():
            return None, completion_mask
        # Padding attends to itself, so that no row of the softmax is empty.
        itself = torch.eye(prompt, dtype=torch.bool, device=is_real_S_P.device)
        return (is_real_S_P[:, None] & itself.new_ones(prompt, prompt).tril() | itself)[:, None], completion_mask

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """Compute attention over (S, H, T, D) without the part between different completions, which is masked anyway.

        `options` are passed to torch's scaled_dot_product_attention.
        """
        prompt, length = self._shape[1] - self._length, self._length
        heads, group_size = key.shape[1], query.shape[1] // key.shape[1]  # GQA group size: query heads per KV head
        in_prompt = scaled_dot_product_attention(
            query[:, :, :prompt],
            repeat_kv(key[:, :, :prompt], group_size),
            repeat_kv(value[:, :, :prompt], group_size),
            attn_mask=self._prompt_mask,
            is_causal=self._prompt_mask is None,
            **options,
        )
        # Each completion becomes a head of its own; the query heads of a GQA group are folded into extra queries.
        queries = query[:, :, prompt:].unflatten(2, (-1, length)).transpose(1, 2)  # (S, G, H, L, D)
        count = queries.shape[1]
        queries = queries.unflatten(2, (heads, group_size)).flatten(3, 4).flatten(1, 2)

        def after_prompt(part: torch.Tensor) -> torch.Tensor:
            first = part[:, None, :, :prompt].expand(-1, count, -1, -1, -1)
            own = part[:, :, prompt:].unflatten(2, (count, length)).transpose(1, 2)
            return torch.cat((first, own), dim=3).flatten(1, 2)

        if self._completion_mask.shape[2] != queries.shape[2]:  # first layer: repeat the mask for the folded queries
            self._completion_mask = self._completion_mask.repeat(1, 1, group_size, 1)
        attended = scaled_dot_product_attention(
            queries, after_prompt(key), after_prompt(value), attn_mask=self._completion_mask, **options
        )
        attended = attended.unflatten(1, (count, heads)).unflatten(3, (group_size, length)).flatten(2, 3)
        out = torch.cat((in_prompt, attended.transpose(1, 2).flatten(2, 3)), dim=2)  # from (S, G, H, L, D)
        return out.transpose(1, 2).contiguous()

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """Return hidden states by row: zeros for the prompt except for its last position, then the completion."""
        prompt = self._shape[1] - self._length
        steps = torch.arange(self._length, device=states.device)
        last_of_prompt = states[self._sequence[:, 0], prompt - 1][:, None]
        completion = states[self._sequence, self._begin + steps]
        before = states.new_zeros(self._shape[0], prompt - 1, states.shape[-1])
        return torch.cat([before, last_of_prompt, completion], dim=1)
