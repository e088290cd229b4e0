"""Where our rollouts are known to be right, and why not elsewhere, in words."""

from __future__ import annotations

from typing import Any

from ..constraints.filters import NAMES as FILTERS

# Families whose attention is plain and causal, so that a mask and positions of our own say all there is to say.
KNOWN_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "granite")
SHARED_ATTENTION = "trl_grpo_tasks_shared"  # what a model that shares prompts has instead of "sdpa"


def unsupported_reason(model: Any) -> str | None:
    """Why this model cannot be rolled out here; None if it can."""
    config = model.config.get_text_config()
    if config.model_type not in KNOWN_FAMILIES:
        return f"models of type {config.model_type!r} are not known to it"
    layers = getattr(config, "layer_types", None) or []
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if sliding or any(kind != "full_attention" for kind in layers):
        return "the model has sliding-window layers"
    if getattr(model.config, "quantization_config", None) is not None:
        return "quantised weights are left to transformers"
    if config._attn_implementation not in ("sdpa", "eager", SHARED_ATTENTION):
        return f"attention {config._attn_implementation!r} takes no mask of our own"
    return None


def unsupported_reason_in(trainer: Any) -> str | None:
    """Why this trainer's completions cannot be rolled out here; None if they can."""
    args = trainer.args
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(args, name):
            return f"{name} is on"
    if set(args.generation_kwargs or {}) - set(FILTERS) or args.cache_implementation:
        return "generation_kwargs and cache_implementation are transformers' own"
    if trainer.tools or trainer.rollout_func is not None or trainer._is_vlm:
        return "tools, rollout_func and vision-language models are TRL's own"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return "sharded weights are gathered by TRL"
    return unsupported_reason(without_adapter(trainer.accelerator.unwrap_model(trainer.model)))


def without_adapter(model: Any) -> Any:
    """The model inside a PeftModel; its layers still apply the adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
