"""Log-probs and entropies of the sampling distribution: masked, renormalised and scaled by the temperature.

The number of tokens that a position's mask allows decides how the position is scored:
- one token: log-prob and entropy are 0 without any computation, and there is no gradient;
- `narrow`: only the rows of the LM head that some mask of the batch allows are multiplied;
- `wide`: the full LM head is multiplied, in chunks of positions;
- `free`, for positions without a mask: the full LM head is multiplied by TRL's fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from trl.kernels import ChunkedLogProbFunction

from .table import FREE, MaskTable

WIDE = 0.25  # a mask is wide if it allows more than this fraction of the vocabulary
WIDE_TOKENS = 4096  # and more than this many tokens
CHUNK_ELEMENTS = 2**24  # number of logits computed at a time
VOCAB_TILE = 32768  # tile size of TRL's fused kernel
CACHED_TABLE_SIZE = 4096  # for a table of at most this many masks, all narrow masks are prepared once and cached
DENSE_MASK_ELEMENTS = 2**26  # narrow masks are stored as a dense boolean matrix if it has at most this many elements

# Which columns of a head are disallowed at each position of a slice of the batch, as a boolean matrix.
Disallowed = Callable[[slice], torch.Tensor]


@dataclass(frozen=True)
class HeadScale:
    """The transformation from the output of the LM head to the logits that are sampled from.

    It consists of the model's logit scale and softcap, and the sampling temperature.
    """

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any, temperature: float) -> HeadScale:
        """Read the scale and softcap from the configuration of a transformers model."""
        text = config.get_text_config()
        scale = 1.0
        for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
            if getattr(text, name, None) is not None:
                scale = getattr(text, name)
                break
        else:
            if getattr(text, "logits_scaling", None) is not None:
                scale = text.logits_scaling if text.model_type == "hyperclovax" else 1 / text.logits_scaling
        return cls(temperature, scale, getattr(text, "final_logit_softcapping", None))

    @property
    def factors(self) -> tuple[float, float | None]:
        """Factors f and g such that the logits are g * tanh(f * x), or f * x if g is None."""
        if self.softcap is not None:
            return self.logit_scale / self.softcap, self.softcap / self.temperature
        return self.logit_scale / self.temperature, None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits that are sampled from, given the output of the LM head."""
        inner, outer = self.factors
        return logits * inner if outer is None else torch.tanh(logits * inner) * outer


@dataclass(frozen=True)
class Head:
    """The weight and bias of an LM head, and the transformation of its logits."""

    weight_V_H: torch.Tensor
    bias_V: torch.Tensor | None
    scale: HeadScale


def masked_logps_and_entropies(
    hidden_N_H: torch.Tensor, head: Head, targets_N: torch.Tensor, masks_N: np.ndarray, table: MaskTable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of each target and the entropy at its position, under the mask of the position.

    `masks_N` holds mask numbers of `table`. Both results are differentiable.
    """
    counts_N = table.counts(masks_N)
    is_free = masks_N == FREE
    is_wide = ~is_free & _is_wide(counts_N, table)
    is_narrow = ~is_free & ~is_wide & (counts_N > 1)
    logps_N = torch.zeros(len(masks_N), device=hidden_N_H.device, dtype=_at_least_float32(hidden_N_H))
    entropies_N = torch.zeros_like(logps_N)
    for route, which in ((free, is_free), (narrow, is_narrow), (wide, is_wide)):
        positions = np.flatnonzero(which)
        if len(positions) == len(masks_N) > 0:  # one route takes all positions: no gather or scatter is needed
            return route(hidden_N_H, head, targets_N, masks_N, table)
        if len(positions):
            index = torch.from_numpy(positions).to(hidden_N_H.device)
            logps, entropies = route(hidden_N_H[index], head, targets_N[index], masks_N[positions], table)
            logps_N = logps_N.index_put((index,), logps.to(logps_N.dtype))
            entropies_N = entropies_N.index_put((index,), entropies.to(logps_N.dtype))
    if not (is_free | is_narrow | is_wide).any():
        # Every token is forced, so the model's output was not used above. The result must still depend on all
        # parameters of the head, because DDP waits for a gradient of each parameter on every process.
        parameters = [head.weight_V_H] if head.bias_V is None else [head.weight_V_H, head.bias_V]
        logps_N = logps_N + 0.0 * sum(tensor[:1].sum() for tensor in (hidden_N_H, *parameters))
    return logps_N, entropies_N


def _is_wide(counts: np.ndarray, table: MaskTable) -> np.ndarray:
    return counts > max(WIDE * table.vocab_size, WIDE_TOKENS)


def free(
    hidden_N_H: torch.Tensor, head: Head, targets_N: torch.Tensor, masks_N: np.ndarray, table: MaskTable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score positions at which every token is allowed, with TRL's fused kernel."""
    scale = head.scale
    arguments = (scale.temperature, VOCAB_TILE, scale.softcap, scale.logit_scale, ("entropy",))
    return ChunkedLogProbFunction.apply(hidden_N_H, head.weight_V_H, head.bias_V, targets_N, *arguments)[:2]


def narrow(
    hidden_N_H: torch.Tensor, head: Head, targets_N: torch.Tensor, masks_N: np.ndarray, table: MaskTable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score positions with the rows of the LM head that at least one of their masks allows."""
    masks = _narrow_masks(masks_N, table, hidden_N_H.device)
    weight = head.weight_V_H.index_select(0, masks.token_ids)
    bias = None if head.bias_V is None else head.bias_V.index_select(0, masks.token_ids)
    return _MaskedLogProbs.apply(
        hidden_N_H, weight, bias, masks.column_of[targets_N], masks.disallowed_at(masks_N), head.scale
    )


def wide(
    hidden_N_H: torch.Tensor, head: Head, targets_N: torch.Tensor, masks_N: np.ndarray, table: MaskTable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score positions with the full LM head; disallowed tokens get a logit of -inf."""
    used, rows = np.unique(masks_N, return_inverse=True)
    rows_N, words_M_W = (torch.from_numpy(array).to(hidden_N_H.device) for array in (rows, table.words(used)))
    bits, vocab_size = torch.arange(32, device=hidden_N_H.device, dtype=torch.int32), table.vocab_size

    def disallowed(part: slice) -> torch.Tensor:  # unpacks the masks of one chunk of positions at a time
        words_n_W = words_M_W[rows_N[part]]
        return ((words_n_W[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size] == 0

    return _MaskedLogProbs.apply(hidden_N_H, head.weight_V_H, head.bias_V, targets_N, disallowed, head.scale)


class _NarrowMasks:
    """Masks over the union of the tokens that they allow (the columns).

    A small set of masks is stored as a dense boolean matrix, a large one as lists of columns.
    """

    def __init__(self, numbers: np.ndarray, table: MaskTable, device: torch.device):
        ids = [table.ids(number) for number in numbers]
        flat_ids = np.concatenate(ids)
        is_used_V = np.zeros(table.vocab_size, dtype=bool)
        is_used_V[flat_ids] = True
        column_of_V = np.cumsum(is_used_V) - 1
        self.numbers = numbers  # ascending
        self.counts = np.array([len(one) for one in ids])
        starts = np.cumsum(self.counts) - self.counts
        arrays = (np.flatnonzero(is_used_V), column_of_V, column_of_V[flat_ids], self.counts, starts)
        on_device = [torch.from_numpy(array).to(device) for array in arrays]
        self.token_ids, self.column_of, self._columns, self._counts_M, self._starts_M = on_device
        self._disallowed_M_K: torch.Tensor | None = None
        if len(numbers) * len(self.token_ids) <= DENSE_MASK_ELEMENTS:
            self._disallowed_M_K = self._disallowed(torch.arange(len(numbers), device=device), len(flat_ids))

    def disallowed_at(self, masks_N: np.ndarray) -> Disallowed:
        """Return which columns positions with these mask numbers disallow."""
        places_N = np.searchsorted(self.numbers, masks_N)
        counts_N, rows_N = self.counts[places_N], torch.from_numpy(places_N).to(self.token_ids.device)
        return lambda part: self._disallowed(rows_N[part], int(counts_N[part].sum()))

    def _disallowed(self, rows: torch.Tensor, total: int) -> torch.Tensor:
        """Return the columns that each of these masks disallows.

        `total` is the number of columns that they allow in total. It is passed in because the CPU knows it; computing
        it here would wait for the GPU.
        """
        if self._disallowed_M_K is not None:
            return self._disallowed_M_K[rows]
        counts, width = self._counts_M[rows], len(self.token_ids)
        position = torch.arange(len(rows), device=rows.device).repeat_interleave(counts, output_size=total)
        first = self._starts_M[rows] - (counts.cumsum(0) - counts)
        columns = self._columns[torch.arange(total, device=rows.device) + first[position]]
        disallowed = torch.ones(len(rows), width, dtype=torch.bool, device=rows.device)
        disallowed.view(-1)[position * width + columns] = False
        return disallowed


def _narrow_masks(masks_N: np.ndarray, table: MaskTable, device: torch.device) -> _NarrowMasks:
    """Return all narrow masks of a small table, cached, or only those of the batch if the table is large.

    Sampling filters create about one mask per position, so their tables are large.
    """
    if len(table) > CACHED_TABLE_SIZE:
        return _NarrowMasks(np.unique(masks_N), table, device)
    key = (len(table), device, WIDE, WIDE_TOKENS)
    if table.cache.get("key") != key:
        numbers = np.arange(len(table))
        counts = table.counts(numbers)
        chosen = numbers[(counts > 1) & (numbers != FREE) & ~_is_wide(counts, table)]
        table.cache = {"key": key, "masks": _NarrowMasks(chosen, table, device)}
    return table.cache["masks"]


class _MaskedLogProbs(torch.autograd.Function):
    """Masked log-softmax of hidden @ weight.T in chunks of positions; the backward pass recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_N_H: torch.Tensor,
        weight_K_H: torch.Tensor,
        bias_K: torch.Tensor | None,
        targets_N: torch.Tensor,
        disallowed: Disallowed,
        scale: HeadScale,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        device_type = hidden_N_H.device.type
        ctx.compute_dtype = (
            torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden_N_H.dtype
        )
        ctx.scale, ctx.disallowed = scale, disallowed
        logps_N = torch.empty(len(targets_N), device=hidden_N_H.device, dtype=_at_least_float32(hidden_N_H))
        entropies_N = torch.empty_like(logps_N)
        for part in _chunks(len(targets_N), weight_K_H.shape[0]):
            logps, _ = _masked_log_softmax(ctx, hidden_N_H[part], weight_K_H, bias_K, part)
            logps_N[part] = logps.gather(1, targets_N[part, None])[:, 0]
            entropies_N[part] = torch.special.entr(logps.exp_()).sum(1)
        ctx.save_for_backward(hidden_N_H, weight_K_H, bias_K, targets_N, entropies_N)
        return logps_N, entropies_N

    @staticmethod
    def backward(ctx: Any, grad_logps_N: Any, grad_entropies_N: Any) -> Any:
        hidden_N_H, weight_K_H, bias_K, targets_N, entropies_N = ctx.saved_tensors
        dtype = ctx.compute_dtype
        grad_hidden = torch.zeros_like(hidden_N_H) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_K_H, dtype=entropies_N.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias_K, dtype=entropies_N.dtype) if ctx.needs_input_grad[2] else None
        for part in _chunks(len(targets_N), weight_K_H.shape[0]):
            logps, slope = _masked_log_softmax(ctx, hidden_N_H[part], weight_K_H, bias_K, part)
            if grad_entropies_N is None:
                grad = logps.exp_().mul_(-grad_logps_N[part, None])
            else:
                # dH / dlogit = -p (log p + H), and 0 for disallowed tokens
                probs = logps.exp()
                centered_logps = logps.masked_fill_(probs == 0, 0).add_(entropies_N[part, None])
                grad = centered_logps.mul_(-grad_entropies_N[part, None])
                if grad_logps_N is not None:
                    grad -= grad_logps_N[part, None]
                grad *= probs
            if grad_logps_N is not None:
                grad.scatter_add_(1, targets_N[part, None], grad_logps_N[part, None].to(grad.dtype))
            if isinstance(slope, torch.Tensor) or slope != 1.0:
                grad *= slope
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(dtype)
            if grad_hidden is not None:
                grad_hidden[part] = (grad @ weight_K_H.to(dtype)).to(grad_hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad.T @ hidden_N_H[part].to(dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_K_H.dtype),
            None if grad_bias is None else grad_bias.to(bias_K.dtype),
            *[None] * 3,
        )


def _masked_log_softmax(
    ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, part: slice
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return masked log-probs, -inf for disallowed tokens, and the derivative of the logits with respect to the LM
    head's output."""
    logits, slope = sampled_logits(hidden, weight, bias, ctx.scale, ctx.compute_dtype)
    return logits.masked_fill_(ctx.disallowed(part), -torch.inf).log_softmax(1), slope


def sampled_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: HeadScale, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the logits that are sampled from, and their derivative with respect to the output of the LM head.

    The product with the head is computed in `dtype`. The results are float32, or float64 if `dtype` is.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        logits = hidden.to(dtype) @ weight.to(dtype).T
    logits = logits.to(_at_least_float32(logits))
    if bias is not None:
        logits += bias
    slope: torch.Tensor | float = scale.logit_scale / scale.temperature
    if scale.softcap is not None:
        squashed = logits.mul_(scale.logit_scale / scale.softcap).tanh_()
        slope = (1 - squashed * squashed) * slope
        logits = squashed * (scale.softcap / scale.temperature)
    elif slope != 1.0:
        logits *= slope
    return logits, slope


def _at_least_float32(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(positions: int, columns: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // columns)
    return [slice(start, start + size) for start in range(0, positions, size)]
