"""Forward passes without padding that compute each prompt once instead of once per completion.

TRL scores every completion after its own copy of the prompt, in rows that are padded to equal length. Here, the real
tokens of a batch form one sequence: each distinct prompt once, then all completions, at the positions they would have
alone. Each completion attends to its prompt and to itself. Log-probs and gradients are the same. For 64 completions of
256 tokens to 8 prompts of 2,000 tokens, the model processes 32,000 tokens instead of 144,000.

On GPUs, attention is one FlashAttention call per layer over sequences of different lengths. Elsewhere, and in float32,
it is computed on padded grids.
"""

from __future__ import annotations

import functools
import types
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..constraints.base import attribute_set
from ..rollout.attention import disable_cudnn_attention
from ..rollout.support import SHARED_ATTENTION, unsupported_reason_for_sharing

MAX_TOKEN_FRACTION = 0.8  # rows are packed only if this reduces the tokens to at most this fraction
# Tokens x weights of a layer below which a GPU waits for kernels to be launched, of which packing needs more.
LEAST_WORK_ON_GPU = 1.2e11
FLASH_DTYPES = (torch.bfloat16, torch.float16)


def shared_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    shared: _Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention like `sdpa`; in passes over packed rows, each completion attends to its prompt and to itself."""
    if shared is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return shared.attend(query, key, value, kwargs.get("scaling"), kwargs.get("dropout", 0.0)), None


# A model keeps this attention implementation permanently, not only within `open()`: gradient checkpointing recomputes
# activations in the backward pass, after that context has ended.
AttentionInterface.register(SHARED_ATTENTION, shared_attention)
AttentionMaskInterface.register(SHARED_ATTENTION, sdpa_mask)


class SharedPrompts:
    """Makes the backbone of a model pack its rows within the context `open(length)`; other passes are unchanged."""

    def __init__(self) -> None:
        self._length: int | None = None

    def open(self, length: int) -> AbstractContextManager[None]:
        """Within this context, the inputs of forward passes are prompts followed by completions of `length` tokens.

        Rows of at most `length` tokens have no prompt to share, and are packed all the same.
        """
        return attribute_set(self, "_length", length)

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
        weights_per_layer = config.hidden_size * (4 * config.hidden_size + 3 * config.intermediate_size)
        sharing = self

        @functools.wraps(plain_forward)
        def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
            length = None if input_ids is None or attention_mask is None else sharing._length
            if length is not None and (
                not input_ids.is_cuda or input_ids.numel() * weights_per_layer >= LEAST_WORK_ON_GPU
            ):
                packing = _Packing.of(input_ids, attention_mask, length)
                if packing is not None:
                    states = plain_forward(**kwargs | packing.inputs).last_hidden_state
                    return BaseModelOutputWithPast(last_hidden_state=packing.unpack(states))
            return plain_forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

        backbone.forward = types.MethodType(forward, backbone)
        return None


class _Packing:
    """The rows of a batch as one sequence of real tokens: each distinct prompt, then the completion of each row."""

    def __init__(
        self, ids: torch.Tensor, is_real: torch.Tensor, prompt: int, sources: list[int], prompt_of: list[int]
    ):
        """`sources` are rows that begin with each distinct prompt, and `prompt_of` is the number of each row's prompt;
        without prompts, both are empty."""
        self._shape, self._prompt = ids.shape, prompt
        source_S = torch.tensor(sources, dtype=torch.int64, device=ids.device)
        self._prompt_of_B = torch.tensor(prompt_of, dtype=torch.int64, device=ids.device)
        self._is_prompt_S_P, self._is_own_B_L = is_real[source_S, :prompt], is_real[:, prompt:]

        def on_grids(values_B_T: torch.Tensor) -> torch.Tensor:
            return torch.cat([values_B_T[source_S, :prompt].flatten(), values_B_T[:, prompt:].flatten()])

        self._places_N = on_grids(is_real).nonzero()[:, 0]  # of the real tokens
        columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        self.inputs = {
            "input_ids": on_grids(ids)[self._places_N][None],
            # 4D, so that transformers creates no mask of its own.
            "attention_mask": torch.empty(1, 1, 1, 1, device=ids.device),
            "position_ids": on_grids(columns)[self._places_N][None],
            "shared": self,
        }
        # The token of the sequence at each place; padding stands for the first token, and is masked.
        token = torch.zeros_like(on_grids(ids))
        token[self._places_N] = torch.arange(len(self._places_N), device=ids.device)
        in_prompts = len(sources) * prompt
        self._token_S_P = token[:in_prompts].view(len(sources), prompt)
        self._own_B_L = token[in_prompts:].view(len(ids), -1)

    @classmethod
    def of(cls, ids: torch.Tensor, mask: torch.Tensor, length: int) -> _Packing | None:
        """Pack rows whose last `length` columns are completions. Returns None if that would save too few tokens."""
        prompt, is_real = max(0, ids.shape[1] - length), mask.bool()
        sources: dict[int, int] = {}
        prompt_of: list[int] = []
        if prompt:
            keys = torch.where(is_real[:, :prompt], ids[:, :prompt], -1)
            prompt_of = torch.unique(keys, dim=0, return_inverse=True)[1].tolist()
            sources = {number: row for row, number in enumerate(prompt_of)}
        if len(sources) == len(ids):  # no two rows have the same prompt
            prompt, prompt_of, sources = 0, [], {}
        rows = [sources[number] for number in range(len(sources))]
        packing = cls(ids, is_real, prompt, rows, prompt_of)
        return packing if len(packing._places_N) <= MAX_TOKEN_FRACTION * ids.numel() else None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, dropout: float
    ) -> torch.Tensor:
        """Compute attention over the packed sequence (1, H, N, D), completion by completion and prompt by prompt."""
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))  # (N, H, D)
        attend = self._attend_sequences if supports_flash(value) else self._attend_grids
        return attend(query, key, value, scale, dropout)[None]

    # ---- on GPUs: FlashAttention over sequences of different lengths

    def _attend_sequences(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, dropout: float
    ) -> torch.Tensor:
        query_ends, key_ends, longest, key_N = self._sequences
        query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast, rotary embeddings return float32
        if key_N is not None:
            key, value = _Repeated.apply(key, key_N), _Repeated.apply(value, key_N)
        return flash_attention(query, key, value, query_ends, key_ends, *longest, dropout, scale)

    @cached_property
    def _sequences(self) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int], torch.Tensor | None]:
        """The ends of each sequence's queries and keys, the longest of both, and the token of each key.

        Sequences are the prompts, and the completions, whose keys begin with a prompt. Without shared prompts, the
        keys are the tokens in their order, and None is returned for them.
        """
        device, count = self._places_N.device, len(self._is_prompt_S_P)
        sizes = torch.cat([self._is_prompt_S_P.sum(1), self._is_own_B_L.sum(1)]).cpu()
        begins, keys, key_N = sizes.cumsum(0) - sizes, sizes, None
        if self._prompt:
            of = self._prompt_of_B.cpu()
            keys = torch.cat([sizes[:count], sizes[of] + sizes[count:]])

            def parts(values: torch.Tensor) -> torch.Tensor:
                """Values of the parts that keys consist of: each prompt, then prompt and completion of each row."""
                return torch.cat([values[:count], torch.stack([values[of], values[count:]], 1).flatten()])

            lengths = parts(sizes)
            shifts = (parts(begins) - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
            key_N = (shifts + torch.arange(len(shifts))).to(device)
        query_ends, key_ends = (pad(x.cumsum(0), (1, 0)).int().to(device) for x in (sizes, keys))
        return query_ends, key_ends, (int(sizes.max()), int(keys.max())), key_N

    # ---- elsewhere: attention on grids, one of the S prompts and one of the B completions

    def _attend_grids(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, dropout: float
    ) -> torch.Tensor:
        channels = query.shape[2]
        query, key, value = (part.flatten(1) for part in (query, key, value))
        own, context = self._own_B_L, self._own_B_L
        prompt_mask, completion_mask = self._grid_masks
        parts = []
        if self._prompt:
            parts.append((self._token_S_P, self._token_S_P, prompt_mask))
            context = torch.cat([self._token_S_P[self._prompt_of_B], own], dim=1)
        parts.append((own, context, completion_mask))
        options = {"scale": scale, "dropout_p": dropout}
        attended = torch.cat([_on_grid(query, key, value, channels, *part, **options).flatten(0, 1) for part in parts])
        return embedding(self._places_N, attended).unflatten(1, (-1, channels))

    @cached_property
    def _grid_masks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention masks within prompts, and of completions over prompt and completion.

        Padding attends to itself, so that no row of the softmax is empty; no other token attends to it.
        """

        def causal(is_real: torch.Tensor) -> torch.Tensor:
            itself = torch.eye(is_real.shape[1], dtype=torch.bool, device=is_real.device)
            return is_real[:, None] & torch.ones_like(itself).tril() | itself

        own = causal(self._is_own_B_L)
        if not self._prompt:
            return own[:, None], own[:, None]
        before = self._is_prompt_S_P[self._prompt_of_B][:, None].expand(-1, own.shape[1], -1)
        return causal(self._is_prompt_S_P)[:, None], torch.cat([before, own], dim=2)[:, None]

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """Return hidden states by row: of the last position of the prompt, and of the completion; zeros elsewhere."""
        wanted, is_real = self._own_B_L, self._is_own_B_L
        if self._prompt:
            wanted = torch.cat([self._token_S_P[self._prompt_of_B, -1:], wanted], dim=1)
            is_real = pad(is_real, (1, 0), value=True)
        kept = embedding(wanted, states[0]) * is_real[:, :, None]
        return pad(kept, (0, 0, self._shape[1] - wanted.shape[1], 0))


def _on_grid(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, channels: int,
    queries_B_L: torch.Tensor, keys_B_T: torch.Tensor, mask: torch.Tensor, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention between tokens (N, H * D) of a sequence, which are laid out by row: (B, L, H * D).

    The query heads of a GQA group become extra queries of one head, so that keys are not repeated.
    """
    # `embedding` reads rows like an index, and its backward pass is fast on CPUs and the same in every run on GPUs.
    heads = key.shape[1] // channels
    queries = embedding(queries_B_L, query).unflatten(2, (heads, -1, channels)).permute(0, 2, 3, 1, 4)
    keys, values = (embedding(keys_B_T, part).unflatten(2, (heads, channels)).transpose(1, 2) for part in (key, value))
    group = queries.shape[2]
    mask = mask.repeat(1, 1, group, 1) if group > 1 else mask
    out = scaled_dot_product_attention(queries.flatten(2, 3), keys, values, attn_mask=mask, **options)
    return out.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4).flatten(2)


def supports_flash(value: torch.Tensor) -> bool:
    """Whether torch's FlashAttention takes tensors (N, H, D) of this device, precision and size."""
    if not value.is_cuda or value.dtype not in FLASH_DTYPES or value.shape[2] > 256 or value.shape[2] % 8:
        return False
    capability = torch.cuda.get_device_capability(value.device)
    return torch.backends.cuda.is_flash_attention_available() and capability >= (8, 0)


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_ends: torch.Tensor, key_ends: torch.Tensor,
    longest_query: int, longest_key: int, dropout: float, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention (N, H, D) within sequences; the last query of each stands at its last key.

    torch.nn.attention.varlen.varlen_attn is the same operator, but has no dropout, and in torch 2.11 no GQA.
    """
    operator = torch.ops.aten._flash_attention_forward
    is_causal, return_debug_mask = True, False
    return operator(query, key, value, query_ends, key_ends, longest_query, longest_key, dropout, is_causal,
                    return_debug_mask, scale=scale)[0]  # fmt: skip


class _Repeated(torch.autograd.Function):
    """Rows of a tensor by index. Gradients of a row that is taken several times are added in float32."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        total = grad.new_zeros((ctx.count, *grad.shape[1:]), dtype=torch.float32)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None
