"""Log-probs and entropies of the distribution that was really sampled from: masked, renormalised, at temperature.

Three cases, by how many tokens a position allows:
- one: log-prob 0, entropy 0, no gradient, no work;
- few: hidden states meet only the rows of the LM head that are allowed somewhere in the batch;
- most or all: the whole head, through TRL's fused kernel (a mask becomes a bias of -1e30, which has probability and
  gradient exactly 0), or in dense chunks where that does not apply.
"""

from __future__ import annotations

import functools
import types
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import FusedCausalLMOutput

from .base import unpack
from .table import FREE, MaskTable

WIDE = 0.25  # masks that allow more than this share of the vocabulary go through the whole head,
WIDE_TOKENS = 4096  # if they allow more than this many tokens
CHUNK_ELEMENTS = 2**24  # logits held at a time
VOCAB_TILE = 32768
FEW_WIDE_MASKS = 8  # up to so many distinct wide masks are worth a pass of the fused kernel each
SAMPLED_POSITIONS = 256  # the mass on allowed tokens needs the whole head, so it is measured on a sample


@dataclass(frozen=True)
class HeadScale:
    """What the model does to its logits after the head, and the sampling temperature."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any, temperature: float) -> HeadScale:
        """Read from a model's configuration; the names are those that transformers' models use."""
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

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits that are sampled from, given those of the head."""
        if self.softcap is not None:
            return torch.tanh(logits * (self.logit_scale / self.softcap)) * (self.softcap / self.temperature)
        return logits * (self.logit_scale / self.temperature)


def masked_logps_and_entropies(
    hidden_N_H: torch.Tensor,
    weight_V_H: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    masks_N: np.ndarray,
    table: MaskTable,
    scale: HeadScale,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target, and entropy, under the mask of its position (numbers in `table`). Differentiable."""
    device = hidden_N_H.device
    vocab_size = weight_V_H.shape[0]
    counts = table.counts(masks_N)
    logps_N = torch.zeros(len(masks_N), device=device, dtype=_out_dtype(hidden_N_H))
    entropies_N = torch.zeros_like(logps_N)

    def score(which: np.ndarray, function: Any) -> None:
        """Score the positions that `which` is true for."""
        nonlocal logps_N, entropies_N
        if which.all():
            logps_N, entropies_N = function(hidden_N_H, targets_N, masks_N)
        elif which.any():
            positions = np.flatnonzero(which)
            index = torch.from_numpy(positions).to(device)
            logps, entropies = function(hidden_N_H[index], targets_N[index], masks_N[positions])
            logps_N = logps_N.index_put((index,), logps.to(logps_N.dtype))
            entropies_N = entropies_N.index_put((index,), entropies.to(logps_N.dtype))

    def fused(hidden: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None) -> tuple[Any, Any]:
        arguments = (scale.temperature, VOCAB_TILE, scale.softcap, scale.logit_scale, ("entropy",))
        return ChunkedLogProbFunction.apply(hidden, weight_V_H, bias, targets, *arguments)[:2]

    def narrow(hidden: torch.Tensor, targets: torch.Tensor, masks: np.ndarray) -> tuple[Any, Any]:
        plan = _narrow_plan(table, device)
        weight = weight_V_H.index_select(0, plan.token_ids)
        bias = None if bias_V is None else bias_V.index_select(0, plan.token_ids)
        rows = torch.from_numpy(plan.row_of_mask[masks]).to(device)
        return _MaskedLogProbs.apply(hidden, weight, bias, plan.column_of[targets], rows, plan.shut_M_K, None, scale)

    def wide(hidden: torch.Tensor, targets: torch.Tensor, masks: np.ndarray) -> tuple[Any, Any]:
        used, local = np.unique(masks, return_inverse=True)
        rows = torch.from_numpy(local.reshape(-1)).to(device)
        words_M_W = torch.from_numpy(table.words(used)).to(device)
        return _MaskedLogProbs.apply(hidden, weight_V_H, bias_V, targets, rows, None, words_M_W, scale)

    is_free = masks_N == FREE
    is_wide = ~is_free & _is_wide(counts, vocab_size)
    score(is_free, lambda h, t, _: fused(h, t, bias_V))
    score(~is_free & ~is_wide & (counts > 1), narrow)
    wide_masks = np.unique(masks_N[is_wide])
    if len(wide_masks) > FEW_WIDE_MASKS or scale.softcap is not None:
        score(is_wide, wide)
    else:
        for number in wide_masks:
            allowed = torch.from_numpy(unpack(table.words([number])[0], vocab_size)).to(device)
            bias = torch.zeros(vocab_size, device=device).masked_fill_(~allowed, -1e30)
            bias = bias if bias_V is None else bias + bias_V
            score(masks_N == number, lambda h, t, _, bias=bias: fused(h, t, bias))
    # Connects the outputs to the model where every position was forced, so that backward() has somewhere to go.
    return logps_N + 0.0 * hidden_N_H[:1].sum(), entropies_N


@dataclass(frozen=True)
class _NarrowPlan:
    """The narrow masks of a table over the tokens that any of them allows."""

    token_ids: torch.Tensor  # (K,) these tokens
    column_of: torch.Tensor  # (V,) where a token is among them
    row_of_mask: np.ndarray  # the row of a mask by its number in the table
    shut_M_K: torch.Tensor  # what each mask does not allow


def _narrow_plan(table: MaskTable, device: torch.device) -> _NarrowPlan:
    """Made once for a rollout's table, and again when the table has grown."""
    key = (len(table), device, WIDE, WIDE_TOKENS)
    if table.plan is None or table.plan[0] != key:
        numbers = np.arange(len(table))
        counts = table.counts(numbers)
        chosen = numbers[(counts > 1) & (numbers != FREE) & ~_is_wide(counts, table.vocab_size)]
        words_M_W = table.words(chosen)
        union = np.flatnonzero(unpack(np.bitwise_or.reduce(words_M_W, axis=0), table.vocab_size))
        shut_M_K = np.stack([~unpack(words, table.vocab_size)[union] for words in words_M_W])
        column_of = np.zeros(table.vocab_size, dtype=np.int64)
        column_of[union] = np.arange(len(union))
        row_of_mask = np.zeros(len(table), dtype=np.int64)
        row_of_mask[chosen] = np.arange(len(chosen))
        on_device = [torch.from_numpy(array).to(device) for array in (union, column_of, shut_M_K)]
        table.plan = (key, _NarrowPlan(on_device[0], on_device[1], row_of_mask, on_device[2]))
    return table.plan[1]


def _is_wide(counts: np.ndarray, vocab_size: int) -> np.ndarray:
    return counts > max(WIDE * vocab_size, WIDE_TOKENS)


class _MaskedLogProbs(torch.autograd.Function):
    """Masked log-softmax of hidden @ weight.T in chunks of positions; the backward pass computes the logits again.

    What is not allowed comes as `shut_M_K`, a row a mask, or packed as `words_M_W`; `rows_N` is the row of a position.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_N_H: torch.Tensor,
        weight_K_H: torch.Tensor,
        bias_K: torch.Tensor | None,
        targets_N: torch.Tensor,
        rows_N: torch.Tensor,
        shut_M_K: torch.Tensor | None,
        words_M_W: torch.Tensor | None,
        scale: HeadScale,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        device_type = hidden_N_H.device.type
        ctx.compute_dtype = (
            torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden_N_H.dtype
        )
        ctx.scale, ctx.masks = scale, (shut_M_K, words_M_W)
        logps_N = torch.empty(len(targets_N), device=hidden_N_H.device, dtype=_out_dtype(hidden_N_H))
        entropies_N = torch.empty_like(logps_N)
        for part in _chunks(len(targets_N), weight_K_H.shape[0]):
            logps, _ = _log_softmax(ctx, hidden_N_H[part], weight_K_H, bias_K, rows_N[part])
            logps_N[part] = logps.gather(1, targets_N[part, None])[:, 0]
            entropies_N[part] = torch.special.entr(logps.exp_()).sum(1)
        ctx.save_for_backward(hidden_N_H, weight_K_H, bias_K, targets_N, rows_N, entropies_N)
        return logps_N, entropies_N

    @staticmethod
    def backward(ctx: Any, grad_logps_N: Any, grad_entropies_N: Any) -> Any:
        hidden_N_H, weight_K_H, bias_K, targets_N, rows_N, entropies_N = ctx.saved_tensors
        dtype = ctx.compute_dtype
        grad_hidden = torch.zeros_like(hidden_N_H) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_K_H, dtype=entropies_N.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias_K, dtype=entropies_N.dtype) if ctx.needs_input_grad[2] else None
        for part in _chunks(len(targets_N), weight_K_H.shape[0]):
            logps, slope = _log_softmax(ctx, hidden_N_H[part], weight_K_H, bias_K, rows_N[part])
            if grad_entropies_N is None:
                grad = logps.exp_().mul_(-grad_logps_N[part, None])
            else:
                # dH / dlogit = -p (log p + H), and 0 for what is not allowed
                probs = logps.exp()
                surprise = logps.masked_fill_(probs == 0, 0).add_(entropies_N[part, None])
                grad = surprise.mul_(-grad_entropies_N[part, None])
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
            *[None] * 5,
        )


def _log_softmax(
    ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Log-probs in float32 (float64 stays), -inf for what is not allowed, and the slope of logits in the head's."""
    scale: HeadScale = ctx.scale
    with torch.autocast(hidden.device.type, enabled=False):
        logits = hidden.to(ctx.compute_dtype) @ weight.to(ctx.compute_dtype).T
    logits = logits.to(_out_dtype(logits))
    if bias is not None:
        logits += bias
    slope: torch.Tensor | float = scale.logit_scale / scale.temperature
    if scale.softcap is not None:
        bent = logits.mul_(scale.logit_scale / scale.softcap).tanh_()
        slope = (1 - bent * bent) * slope
        logits = bent * (scale.softcap / scale.temperature)
    elif slope != 1.0:
        logits *= slope
    shut_M_K, words_M_W = ctx.masks
    if shut_M_K is not None:
        shut = shut_M_K[rows]
    else:
        bits = torch.arange(32, device=hidden.device, dtype=torch.int32)
        shut = ((words_M_W[rows][:, :, None] >> bits) & 1).flatten(1)[:, : weight.shape[0]] == 0
    return logits.masked_fill_(shut, -torch.inf).log_softmax(1), slope


def _out_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(positions: int, columns: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // columns)
    return [slice(start, start + size) for start in range(0, positions, size)]


class MaskedHead:
    """Puts the masks of the rows being scored into the model's forward pass.

    TRL scores with `model(..., labels=..., fused_lm_head=True)`. While `masks(...)` is open, that call on a model this
    head was added to returns masked log-probs and entropies instead. Nothing else changes.
    """

    def __init__(self, temperature: float, cast_lm_head_to_fp32: bool = False):
        self._temperature = temperature
        self._cast_lm_head_to_fp32 = cast_lm_head_to_fp32
        self._open: tuple[torch.Tensor, MaskTable] | None = None
        self._measure = False
        self.allowed_mass = 1.0  # of the last forward pass that measured it

    @contextmanager
    def masks(self, masks_B_T: torch.Tensor, table: MaskTable) -> Any:
        self._open = (masks_B_T, table)
        try:
            yield
        finally:
            self._open = None

    @contextmanager
    def measuring(self) -> Any:
        """While open, forward passes also measure `allowed_mass`."""
        self._measure = True
        try:
            yield
        finally:
            self._measure = False

    def add_to(self, model: nn.Module) -> None:
        """Wrap the forward pass of a causal language model that TRL gave its fused head."""
        fused_forward = model.forward
        scale = HeadScale.of(model.config, self._temperature)
        head = self

        @functools.wraps(fused_forward)
        def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
            if not fused_lm_head or head._open is None:
                return fused_forward(*args, fused_lm_head=fused_lm_head, labels=labels, **kwargs)
            return head._score(self, scale, labels, args, kwargs)

        model.forward = types.MethodType(forward, model)

    def _score(self, model: Any, scale: HeadScale, labels: torch.Tensor, args: Any, kwargs: Any) -> Any:
        assert self._open is not None
        masks_B_T, table = self._open
        length = masks_B_T.shape[1]
        kwargs["use_cache"] = False
        states = model.base_model(*args, **kwargs).last_hidden_state
        lm_head = model.get_output_embeddings()
        hidden = states[:, -length - 1 : -1].to(lm_head.weight.device)
        targets_B_T = labels[:, -length:].to(hidden.device)
        # Padding is scored by nobody: its positions stay 0.
        scored = (labels[:, -length:] != -100).cpu().numpy()
        index = torch.from_numpy(np.flatnonzero(scored)).to(hidden.device)
        hidden_N_H = hidden.reshape(-1, hidden.shape[-1])[index]
        targets_N = targets_B_T.reshape(-1)[index]
        masks_N = masks_B_T.numpy()[scored]
        precision: Any = nullcontext()
        if self._cast_lm_head_to_fp32:
            hidden_N_H = hidden_N_H.float()
            precision = torch.autocast(hidden.device.type, enabled=False)
        with precision:
            logps_N, entropies_N = masked_logps_and_entropies(
                hidden_N_H, lm_head.weight, lm_head.bias, targets_N, masks_N, table, scale
            )
        if self._measure:
            self.allowed_mass = _allowed_mass(hidden_N_H, lm_head, masks_N, table, scale)
        empty = torch.zeros(scored.size, device=hidden.device, dtype=logps_N.dtype)
        logps_B_T = empty.index_put((index,), logps_N).view(targets_B_T.shape)
        entropies_B_T = empty.index_put((index,), entropies_N).view(targets_B_T.shape)
        return FusedCausalLMOutput(loss=-logps_B_T.sum(), log_probs=logps_B_T, entropy=entropies_B_T)


@torch.no_grad()
def _allowed_mass(
    hidden_N_H: torch.Tensor, lm_head: Any, masks_N: np.ndarray, table: MaskTable, scale: HeadScale
) -> float:
    """The mean probability that the unmasked model gives to allowed tokens, on evenly spread constrained positions."""
    constrained = np.flatnonzero(masks_N != FREE)
    if not len(constrained):
        return 1.0
    chosen = constrained[:: max(1, len(constrained) // SAMPLED_POSITIONS)][:SAMPLED_POSITIONS]
    index = torch.from_numpy(chosen).to(hidden_N_H.device)
    nothing_shut = torch.zeros(1, lm_head.weight.shape[0], dtype=torch.bool, device=index.device)
    whole = types.SimpleNamespace(scale=scale, compute_dtype=hidden_N_H.dtype, masks=(nothing_shut, None))
    logps, _ = _log_softmax(whole, hidden_N_H[index], lm_head.weight, lm_head.bias, torch.zeros_like(index))
    allowed = torch.from_numpy(unpack(table.words(masks_N[chosen]), logps.shape[1])).to(index.device)
    return (logps.exp() * allowed).sum(1).mean().item()
