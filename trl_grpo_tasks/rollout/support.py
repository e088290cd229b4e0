"""Support matrix of the fast rollouts: which models and trainers they support, and the reason if they do not."""

from __future__ import annotations

from typing import Any

from ..constraints.filters import NAMES as FILTERS

# Model families with plain causal attention, which is fully determined by an attention mask and position ids.
KNOWN_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "granite")
SHARED_ATTENTION = "trl_grpo_tasks_shared"  # attention implementation of models that share prompts, instead of "sdpa"


def unsupported_reason(model: Any) -> str | None:
    """Return the reason why fast rollouts do not support this model, or None if they do."""
    config = model.config.get_text_config()
    if config.model_type not in KNOWN_FAMILIES:
        return f"models of type {config.model_type!r} are not supported"
    layers = getattr(config, "layer_types", None) or []
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if sliding or any(kind != "full_attention" for kind in layers):
        return "models with sliding-window layers are not supported"
    if (reason := unsupported_quantization(model)) is not None:
        return reason
    if config._attn_implementation not in ("sdpa", "eager", SHARED_ATTENTION):
        return f"attention implementation {config._attn_implementation!r} does not accept a custom mask"
    return None


def unsupported_quantization(model: Any) -> str | None:
    """Return the reason why the quantisation of a model is not supported, or None. bitsandbytes is supported."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return None
    method = config["quant_method"] if isinstance(config, dict) else config.quant_method
    return None if method == "bitsandbytes" else f"weights quantised with {method!s} are not supported"


def unsupported_reason_in(trainer: Any) -> str | None:
    """Return the reason why fast rollouts do not support this trainer, or None if they do."""
    args = trainer.args
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(args, name):
            return f"{name} is enabled"
    if set(args.generation_kwargs or {}) - set(FILTERS) or args.cache_implementation:
        return "generation_kwargs and cache_implementation are options of transformers' generate"
    if trainer.tools or trainer.rollout_func is not None or trainer._is_vlm:
        return "tools, rollout_func and vision-language models are only supported by TRL's generation"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return "sharded weights (FSDP, DeepSpeed) are only supported by TRL's generation"
    return unsupported_reason(without_adapter(trainer.accelerator.unwrap_model(trainer.model)))


def without_adapter(model: Any) -> Any:
    """Return the base model of a PeftModel, whose layers still apply the adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
