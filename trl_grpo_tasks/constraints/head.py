"""The masked LM head: applies the masks of the scored completions inside the model's forward pass."""

from __future__ import annotations

import functools
import types
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from .base import attribute_set, unpack
from .scoring import Head, HeadScale, masked_logps_and_entropies, sampled_logits
from .sharding import whole
from .table import FREE, MaskTable

SAMPLED_POSITIONS = 256  # `allowed_mass` needs the full head, so it is measured on a sample of positions


class MaskedHead:
    """Computes masked log-probs and entropies inside a model's forward pass.

    TRL scores completions with `model(..., labels=..., fused_lm_head=True)`. Within the context `masks(...)`, that
    call returns masked log-probs and entropies for every model that this head was added to. All other calls are
    unchanged.
    """

    def __init__(self, temperature: float, cast_lm_head_to_fp32: bool = False):
        self._temperature = temperature
        self._cast_lm_head_to_fp32 = cast_lm_head_to_fp32
        self._active_masks: tuple[torch.Tensor, MaskTable] | None = None
        self._measures_mass = False
        self.allowed_mass = 1.0  # as measured in the last forward pass within `measuring()`

    def masks(self, masks_B_T: torch.Tensor, table: MaskTable) -> AbstractContextManager[None]:
        """Within this context, forward passes score under these masks (numbers in `table`)."""
        return attribute_set(self, "_active_masks", (masks_B_T, table))

    def measuring(self) -> AbstractContextManager[None]:
        """Within this context, forward passes also measure `allowed_mass`."""
        return attribute_set(self, "_measures_mass", True)

    def add_to(self, model: nn.Module) -> None:
        """Wrap the forward pass of a causal language model that already has TRL's fused head."""
        fused_forward = model.forward
        scale = HeadScale.of(model.config, self._temperature)
        head = self

        @functools.wraps(fused_forward)
        def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
            if not fused_lm_head or head._active_masks is None:
                return fused_forward(*args, fused_lm_head=fused_lm_head, labels=labels, **kwargs)
            return head._score(self, scale, labels, args, kwargs)

        model.forward = types.MethodType(forward, model)

    def _score(self, model: Any, scale: HeadScale, labels: torch.Tensor, args: Any, kwargs: Any) -> Any:
        assert self._active_masks is not None
        masks_B_T, table = self._active_masks
        length = masks_B_T.shape[1]
        kwargs["use_cache"] = False
        states = model.base_model(*args, **kwargs).last_hidden_state
        lm_head = model.get_output_embeddings()
        hidden = states[:, -length - 1 : -1].to(lm_head.weight.device)
        targets_B_T = labels[:, -length:].to(hidden.device)
        # Padding is not scored; its log-probs and entropies stay 0.
        scored = (labels[:, -length:] != -100).cpu().numpy()
        index = torch.from_numpy(np.flatnonzero(scored)).to(hidden.device)
        hidden_N_H = hidden.reshape(-1, hidden.shape[-1])[index]
        targets_N = targets_B_T.reshape(-1)[index]
        masks_N = masks_B_T.numpy()[scored]
        bias = None if lm_head.bias is None else whole(lm_head.bias)
        head = Head(whole(lm_head.weight), bias, scale)
        precision: Any = nullcontext()
        if self._cast_lm_head_to_fp32:
            hidden_N_H = hidden_N_H.float()
            precision = torch.autocast(hidden.device.type, enabled=False)
        with precision:
            logps_N, entropies_N = masked_logps_and_entropies(hidden_N_H, head, targets_N, masks_N, table)
        if self._measures_mass:
            self.allowed_mass = _allowed_mass(hidden_N_H, head, masks_N, table)
        empty = torch.zeros(scored.size, device=hidden.device, dtype=logps_N.dtype)
        logps_B_T = empty.index_put((index,), logps_N).view(targets_B_T.shape)
        entropies_B_T = empty.index_put((index,), entropies_N).view(targets_B_T.shape)
        from trl.trainer.utils import FusedCausalLMOutput  # slow to import, and only training needs it

        return FusedCausalLMOutput(loss=-logps_B_T.sum(), log_probs=logps_B_T, entropy=entropies_B_T)


@torch.no_grad()
def _allowed_mass(hidden_N_H: torch.Tensor, head: Head, masks_N: np.ndarray, table: MaskTable) -> float:
    """Return the mean probability that the unmasked model assigns to allowed tokens, over a sample of evenly spaced
    masked positions."""
    masked = np.flatnonzero(masks_N != FREE)
    if not len(masked):
        return 1.0
    chosen = masked[:: max(1, len(masked) // SAMPLED_POSITIONS)][:SAMPLED_POSITIONS]
    hidden = hidden_N_H[torch.from_numpy(chosen).to(hidden_N_H.device)]
    logits, _ = sampled_logits(hidden, head.weight_V_H, head.bias_V, head.scale, hidden.dtype)
    allowed = torch.from_numpy(unpack(table.words(masks_N[chosen]), logits.shape[1])).to(hidden.device)
    return (logits.softmax(1) * allowed).sum(1).mean().item()
