"""Scoring without computing a prompt once for each of its completions.

TRL scores every completion behind a copy of its prompt. Here completions of one prompt stand behind one copy, in one
sequence: each sees the prompt and itself, at the positions it would have alone. The same log-probs and gradients; of
64 completions of 8 prompts of 2,000 tokens, 256 tokens each, the model then sees 32,000 tokens instead of 144,000.
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
from ..rollout.support import SHARED_ATTENTION, unsupported_reason

WORTH = 0.8  # sharing must leave at most this share of the tokens


def shared_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    shared: _Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as `sdpa` has it; in passes over shared prompts, of each completion to its prompt and itself."""
    if shared is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return shared.attend(query, key, value, scale=kwargs.get("scaling"), dropout_p=kwargs.get("dropout", 0.0)), None


# A model has this attention from the time it shares prompts, also while it does not: backward passes that compute
# activations again come after the forward pass has ended.
AttentionInterface.register(SHARED_ATTENTION, shared_attention)
AttentionMaskInterface.register(SHARED_ATTENTION, sdpa_mask)


class SharedPrompts:
    """Makes a model's backbone share prompts while `open(length)` is on; otherwise nothing changes."""

    def __init__(self) -> None:
        self._length: int | None = None

    @contextmanager
    def open(self, length: int) -> Iterator[None]:
        """Forward passes until the end of this are over prompts followed by completions `length` long."""
        self._length = length
        try:
            yield
        finally:
            self._length = None

    def add_to(self, model: Any) -> str | None:
        """Wrap the backbone of a causal language model; why not, in words, where that is not known to be right."""
        config, reason = model.config.get_text_config(), unsupported_reason(model)
        if reason is None and config._attn_implementation not in ("sdpa", SHARED_ATTENTION):
            reason = "attention is not 'sdpa'"
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
    """Rows of (prompt, completion) laid out as sequences of a prompt and several completions.

    Sequence s holds the completions `sequences[s]`, behind the prompt of the first. Where others hold more, its last
    places are empty.
    """

    def __init__(self, ids: torch.Tensor, mask: torch.Tensor, length: int, sequences: list[list[int]]):
        self._shape, self._length = ids.shape, length
        prompt, device = ids.shape[1] - length, ids.device
        width = max(map(len, sequences))
        rows_S_G = torch.tensor([rows + [-1] * (width - len(rows)) for rows in sequences], device=device)
        first_S = rows_S_G[:, 0]
        is_filled = (rows_S_G >= 0)[:, :, None]
        completions = torch.where(is_filled, ids[rows_S_G, prompt:], 0).flatten(1)
        packed = torch.cat([ids[first_S, :prompt], completions], dim=1)
        place = torch.arange(packed.shape[1], device=device)
        position = torch.where(place < prompt, place, prompt + (place - prompt) % length)
        self.inputs = {
            "input_ids": packed,
            "attention_mask": torch.empty(1, 1, 1, 1, device=device),  # of four dimensions, so that none is made
            "position_ids": position.expand(len(packed), -1),
            "shared": self,
        }
        self._is_seen, self._sees = self._masks(mask[first_S, :prompt].bool())
        # Where each row's completion begins, and which sequence it is in.
        where = {row: (s, g) for s, rows in enumerate(sequences) for g, row in enumerate(rows)}
        order = torch.tensor([where[row] for row in range(len(ids))], device=device)
        self._sequence, self._begin = order[:, :1], prompt + order[:, 1:] * length

    @classmethod
    def of(cls, ids: torch.Tensor, mask: torch.Tensor, length: int) -> _Packing | None:
        """None where sharing would not pay."""
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
        return cls(ids, mask, length, sequences) if tokens <= WORTH * rows * total else None

    def _masks(self, is_real_S_P: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What tokens of a prompt see of it (None: everything before them), and what those of completions see of their
        prompt and of themselves. What follows the last token of a completion sees it and is seen by nobody."""
        count, prompt = is_real_S_P.shape
        own = is_real_S_P.new_ones(self._length, self._length).tril()
        of_prompt = is_real_S_P[:, None].expand(-1, self._length, -1)
        sees = torch.cat((of_prompt, own.expand(count, -1, -1)), dim=2)[:, None]
        if is_real_S_P.all():
            return None, sees
        # What is padding sees itself, so that no row of the softmax is empty.
        itself = torch.eye(prompt, dtype=torch.bool, device=is_real_S_P.device)
        return (is_real_S_P[:, None] & itself.new_ones(prompt, prompt).tril() | itself)[:, None], sees

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """Attention of (S, H, T, D) without what nobody sees, completions of each other; `options` are those of
        torch's attention."""
        prompt, length = self._shape[1] - self._length, self._length
        heads, shares = key.shape[1], query.shape[1] // key.shape[1]  # so many query heads have their keys in common
        in_prompt = scaled_dot_product_attention(
            query[:, :, :prompt], repeat_kv(key[:, :, :prompt], shares), repeat_kv(value[:, :, :prompt], shares),
            attn_mask=self._is_seen, is_causal=self._is_seen is None, **options,
        )  # fmt: skip
        # A head for each completion, in which heads that have their keys in common are further queries.
        queries = query[:, :, prompt:].unflatten(2, (-1, length)).transpose(1, 2)  # (S, G, H, L, D)
        count = queries.shape[1]
        queries = queries.unflatten(2, (heads, shares)).flatten(3, 4).flatten(1, 2)

        def behind_prompt(part: torch.Tensor) -> torch.Tensor:
            first = part[:, None, :, :prompt].expand(-1, count, -1, -1, -1)
            own = part[:, :, prompt:].unflatten(2, (count, length)).transpose(1, 2)
            return torch.cat((first, own), dim=3).flatten(1, 2)

        if self._sees.shape[2] != queries.shape[2]:  # the first layer
            self._sees = self._sees.repeat(1, 1, shares, 1)
        seen = scaled_dot_product_attention(
            queries, behind_prompt(key), behind_prompt(value), attn_mask=self._sees, **options
        )
        seen = seen.unflatten(1, (count, heads)).unflatten(3, (shares, length)).flatten(2, 3)  # (S, G, H, L, D)
        out = torch.cat((in_prompt, seen.transpose(1, 2).flatten(2, 3)), dim=2)
        return out.transpose(1, 2).contiguous()

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states by row again: of the last place of the prompt and of the completion, zeros before them."""
        prompt = self._shape[1] - self._length
        steps = torch.arange(self._length, device=states.device)
        last_of_prompt = states[self._sequence[:, 0], prompt - 1][:, None]
        completion = states[self._sequence, self._begin + steps]
        before = states.new_zeros(self._shape[0], prompt - 1, states.shape[-1])
        return torch.cat([before, last_of_prompt, completion], dim=1)
