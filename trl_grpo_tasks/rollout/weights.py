"""Linear layers as rollouts run them: weights in the computation dtype, projections fused, adapters beside them.

Under autocast, float32 weights are cast once per rollout instead of once per pass, and quantised weights are
dequantised once. On a GPU, the projections that read the same input (query, key and value; gate and up) become one
matrix product; models call them in this order. LoRA adapters are not merged into the weights: merging rounds their sum
to 16 bits, and a small adapter would be lost. They are applied beside the weights, as in training; on a GPU, by the
kernel that multiplies by the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from .quantised import activation_threshold, dense_weight, is_quantised, round_activations

FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
KEPT_COPIES_SHARE = 1 / 16  # copies of weights above this share of a GPU's memory are freed between rollouts


class RolloutWeights:
    """Within `used()`, linear layers of `model` are replaced by faster ones. Outside, the model is unchanged.

    Call `load()` before `used()` whenever weights may have changed. `autocast_dtype` is None without autocast. With
    `uses_kernels`, projections that read the same input are fused, and adapters are applied by our own kernel. Layers
    in `excluded` are not replaced.
    """

    def __init__(
        self, model: Any, autocast_dtype: torch.dtype | None, uses_kernels: bool, excluded: Collection[nn.Module] = ()
    ):
        self._replacements: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        self._layers: list[_FusedLinear] = []
        for parent in model.modules():
            if _is_adapted(parent):
                continue
            children = {
                name: child
                for name, child in parent.named_children()
                if child not in excluded and (is_plain_lora(child) or type(child) is nn.Linear or is_quantised(child))
            }
            groups = [
                names
                for names in FUSED_PROJECTIONS
                if uses_kernels and _can_fuse([children.get(name) for name in names])
            ]
            single = [(name,) for name in children if not any(name in names for names in groups)]
            for names in (*groups, *single):
                layer = _FusedLinear([children[name] for name in names], autocast_dtype, uses_kernels, model.dtype)
                if len(names) > 1 or layer.is_needed:
                    self._layers.append(layer)
                    outputs = layer.outputs() if len(names) > 1 else [layer]
                    for name, output in zip(names, outputs, strict=True):
                        self._replacements.append((parent, name, children[name], output))

    @property
    def copied_bytes(self) -> int:
        """The memory that copies of weights take while they are loaded."""
        return sum(layer.copied_bytes for layer in self._layers)

    @torch.no_grad()
    def load(self) -> bool:
        """Read the current weights. Returns True if tensors that passes read were allocated, so addresses are new."""
        is_new = sum(layer.allocate() for layer in self._layers) > 0
        copies = [copy for layer in self._layers for copy in layer.copies()]
        if copies:
            torch._foreach_copy_([target for target, _, _ in copies], [source for _, source, _ in copies])
        scaled = [(target, scale) for target, _, scale in copies if scale != 1]
        if scaled:
            torch._foreach_mul_([target for target, _ in scaled], [scale for _, scale in scaled])
        return is_new

    def release(self) -> None:
        """Free the copies of weights."""
        for layer in self._layers:
            layer.free()

    @contextmanager
    def used(self) -> Iterator[None]:
        for parent, name, _, replacement in self._replacements:
            parent._modules[name] = replacement
        try:
            yield
        finally:
            for parent, name, original, _ in self._replacements:
                parent._modules[name] = original


class _FusedLinear(nn.Module):
    """One or more linear layers that read the same input, with their adapters, as one layer."""

    def __init__(
        self,
        layers: Sequence[Any],
        autocast_dtype: torch.dtype | None,
        uses_kernels: bool,
        model_dtype: torch.dtype,
    ):
        super().__init__()
        # Tuples and plain attributes keep the original layers out of this module's own parameters.
        self._bases = tuple(_base(layer) for layer in layers)
        self._adapters = tuple(layer if _is_adapted(layer) else None for layer in layers)
        first = self._bases[0]
        self._quantised = is_quantised(first)
        # 8-bit layers, and 4-bit layers without a compute dtype, compute in the dtype of their input.
        own_dtype = getattr(first, "compute_dtype", None) or model_dtype if self._quantised else first.weight.dtype
        casts = autocast_dtype is not None and (self._quantised or own_dtype == torch.float32)
        self._dtype = autocast_dtype if casts and autocast_dtype is not None else own_dtype
        self._copies_weight = self._quantised or self._dtype != own_dtype
        self._keeps_dtype = autocast_dtype is None  # 4-bit layers may compute in another dtype than those around them
        self._device = first.weight.device
        self._sizes = [base.out_features for base in self._bases]
        self.ends = list(accumulate(self._sizes))
        self.weight: Any = None
        self.bias: Any = None
        self.down: Any = None
        self.up: Any = None
        self.threshold: float | None = None
        ranks = {0 if adapter is None else adapter.r[_name(adapter)] for adapter in self._adapters}
        dtypes = [adapter.lora_A[_name(adapter)].weight.dtype for adapter in self._adapters if adapter is not None]
        self._adapter_dtype = autocast_dtype or next(iter(dtypes), None)
        self.uses_kernel = uses_kernels and len(ranks) == 1 and self._adapter_dtype == self._dtype
        self.latest: Any = None  # the output, until all parts of it were used

    @property
    def is_needed(self) -> bool:
        """Whether this layer computes something else than the original one."""
        return self._copies_weight or any(adapter is not None for adapter in self._adapters)

    @property
    def copied_bytes(self) -> int:
        if not self._copies_weight:
            return 0
        return self.ends[-1] * self._bases[0].in_features * self._dtype.itemsize

    def outputs(self) -> list[_Output]:
        """Return one module per original layer, each of which returns its part of the output."""
        return [_Output(self, begin, end) for begin, end in zip([0, *self.ends], self.ends, strict=False)]

    def allocate(self) -> bool:
        """Create the tensors that passes read, where they do not exist yet. Returns True if any was created."""
        before = self.weight
        if not self._copies_weight:
            self.weight = joined([base.weight for base in self._bases])
            self._copies_weight = self.weight is None
        if self.weight is None:
            size = (self.ends[-1], self._bases[0].in_features)
            self.weight = torch.empty(size, dtype=self._dtype, device=self._device)
            if self._quantised:
                for base, part in zip(self._bases, self.weight.split(self._sizes), strict=True):
                    part.copy_(dense_weight(base, self._dtype))
        if self.bias is None and any(base.bias is not None for base in self._bases):
            self.bias = torch.zeros(self.ends[-1], dtype=self._dtype, device=self._device)
        rank = sum(adapter.r[_name(adapter)] for adapter in self._adapters if adapter is not None)
        if self.down is None and rank:
            options: dict[str, Any] = {"dtype": self._adapter_dtype, "device": self._device}
            self.down = torch.zeros(rank, self._bases[0].in_features, **options)
            self.up = torch.zeros(self.ends[-1], rank, **options)
        return before is None or before.data_ptr() != self.weight.data_ptr()

    def free(self) -> None:
        if self._copies_weight:
            self.weight = None

    def copies(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        """Yield (target, source, scale) for everything that brings this layer up to date."""
        self.threshold = activation_threshold(self._bases[0]) if self._quantised else None
        begin = rank = 0
        for base, adapter, end in zip(self._bases, self._adapters, self.ends, strict=True):
            if self._copies_weight and not self._quantised:
                yield self.weight[begin:end], base.weight, 1
            if base.bias is not None:
                yield self.bias[begin:end], base.bias, 1
            if adapter is not None:
                name = _name(adapter)
                size = adapter.r[name]
                yield self.down[rank : rank + size], adapter.lora_A[name].weight, 1
                yield self.up[begin:end, rank : rank + size], adapter.lora_B[name].weight, adapter.scaling[name]
                rank += size
            begin = end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.uses_kernel and self.down is not None and self.threshold is None:
            flat = x.to(self.weight.dtype).flatten(0, -2)
            out = torch.ops.trl_grpo_tasks.adapted_linear(flat, self.weight, self.bias, self.down, self.up, self.ends)
            return out.unflatten(0, x.shape[:-1])
        base_input = x if self.threshold is None else round_activations(x, self.threshold)
        out = nn.functional.linear(base_input.to(self.weight.dtype), self.weight, self.bias)
        if self.down is not None:
            hidden = nn.functional.linear(x.to(self.down.dtype), self.down)
            out = (out + nn.functional.linear(hidden, self.up)).to(out.dtype)
        return out.to(x.dtype) if self._keeps_dtype else out


class _Output(nn.Module):
    """A part of the output of a fused layer. The part that is called first computes the output for all of them."""

    def __init__(self, fused: _FusedLinear, begin: int, end: int):
        super().__init__()
        self.fused, self.begin, self.end = fused, begin, end
        self.is_first, self.is_last = begin == 0, end == fused.ends[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            self.fused.latest = self.fused(x)
        out = self.fused.latest[..., self.begin : self.end]
        if self.is_last:
            self.fused.latest = None
        return out


def is_freed_between_rollouts(size: int, device: torch.device) -> bool:
    """Whether copies of weights of this size in bytes are freed after a rollout."""
    if device.type != "cuda":
        return True
    return size > KEPT_COPIES_SHARE * torch.cuda.get_device_properties(device).total_memory


def is_plain_lora(part: nn.Module) -> bool:
    """Whether a module is a linear layer with exactly one active LoRA adapter, without variants or bias.

    Its dropout does not act in rollouts.
    """
    return (
        _is_adapted(part)
        and (type(part.base_layer) is nn.Linear or is_quantised(part.base_layer))
        and len(part.active_adapters) == 1
        and part.active_adapters[0] in part.lora_A
        and not (part.merged or part.disable_adapters or part.lora_variant or part.lora_bias[part.active_adapters[0]])
    )


def _is_adapted(part: nn.Module) -> bool:
    # Not imported here, because that takes seconds: a module of PEFT exists only where PEFT has been imported.
    lora = sys.modules.get("peft.tuners.lora")
    return lora is not None and isinstance(part, lora.LoraLayer) and hasattr(part, "base_layer")


def _base(layer: Any) -> Any:
    return layer.base_layer if _is_adapted(layer) else layer


def _name(adapter: Any) -> str:
    return adapter.active_adapters[0]


def _can_fuse(layers: Sequence[Any]) -> bool:
    """Whether all layers exist and have weights of one kind and dtype."""
    if None in layers:
        return False
    return len({(type(base), base.in_features, base.weight.dtype) for base in map(_base, layers)}) == 1


def joined(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one tensor of weights stacked along their outputs, which shares its memory with them.

    Weights that do not lie side by side are moved to a new place together; training goes on with them there. Returns
    None if that is impossible, because a weight is part of a larger tensor, such as a flat buffer of DeepSpeed, which
    updates weights there.
    """
    first = weights[0]
    if len(weights) == 1:
        return first.data
    offsets = accumulate([weight.numel() for weight in weights], initial=first.storage_offset())
    if all(
        weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and weight.storage_offset() == offset
        and weight.is_contiguous()
        for weight, offset in zip(weights, offsets, strict=False)
    ):
        size = (sum(map(len, weights)), first.shape[1])
        return first.data.new_empty(0).set_(first.untyped_storage(), first.storage_offset(), size)
    if any(weight.untyped_storage().nbytes() != weight.numel() * weight.element_size() for weight in weights):
        return None
    together = torch.cat([weight.data for weight in weights])
    for weight, part in zip(weights, together.split([len(weight) for weight in weights]), strict=True):
        weight.data = part
    return together
