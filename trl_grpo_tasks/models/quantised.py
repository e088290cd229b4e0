"""Base models that bitsandbytes quantises to 4 or 8 bits, with adapters trained on them (QLoRA)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ..rollout.quantised import is_quantised


def quantization_config(model_args: Any, args: Any) -> Any:
    """Return TRL's options --load_in_4bit and --load_in_8bit as a BitsAndBytesConfig, or None if neither is set.

    4-bit weights are multiplied in the precision of the run. TRL would choose the dtype of the other weights, which is
    float32 in mixed precision, and cannot be `auto`.
    """
    from trl import get_quantization_config

    stored = None if model_args.dtype == "auto" else model_args.dtype
    dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else stored
    return get_quantization_config(dataclasses.replace(model_args, dtype=dtype))


def is_quantised_model(model: Any) -> bool:
    """Whether a loaded model, or the base model of an adapter, has quantised weights."""
    return bool(getattr(model, "is_quantized", False))


def check_output_head(model: Any) -> None:
    """Raise ValueError if the LM head is quantised: TRL and this package read its weights as numbers."""
    if is_quantised(model.get_output_embeddings()):
        raise ValueError(
            "the LM head of this model is quantised, and log-probs are computed from its weights; add 'lm_head' to "
            "llm_int8_skip_modules of the BitsAndBytesConfig"
        )


def keep_weights_unpacked(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights on CPUs with AVX512-BF16.

    It would do so in the first evaluation. Repacked layers round differently, and pass no gradient to their inputs.
    ValueError if it has done so already.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
                raise ValueError(
                    "bitsandbytes has repacked the weights of this model for this CPU, so that it cannot be trained; "
                    "load it again, and pass it to the trainer before it is used"
                )


def adapter_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the adapter's weights of a model with quantised weights; {} for anything else."""
    if not is_quantised_model(model):
        return {}
    return {name: weight.data for name, weight in model.named_parameters() if weight.requires_grad}


def restore_adapter(model: nn.Module, given: dict[str, torch.Tensor]) -> None:
    """Undo TRL's rounding of adapters on quantised models to bfloat16; `given` holds weights from before it.

    Most optimizer steps are smaller than the rounding of bfloat16 and would be lost. Adapters on other models are in
    float32 as well.
    """
    for name, weight in model.named_parameters() if is_quantised_model(model) else ():
        if weight.requires_grad and weight.dtype == torch.bfloat16:
            weight.data = given.get(name, weight.data).to(weight.device, torch.float32)
