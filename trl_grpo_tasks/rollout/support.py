"""Support matrix of the fast rollouts: which models and trainers they support, and the reason if they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..constraints.filters import NAMES as FILTERS
from .rotary import length_limit

# Model types in which a token sees other tokens only through transformers' attention interface. Norms, rotary
# embeddings, feed-forward blocks and experts work on one token at a time.
PLAIN_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "granite", "phi3", "smollm3", "cohere")
SLIDING_FAMILIES = ("gemma2", "gemma3_text", "cohere2")  # most layers have a sliding window; Gemma 2 soft-caps scores
EXPERT_FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss")  # GPT-OSS: windows and attention sinks
KNOWN_FAMILIES = PLAIN_FAMILIES + SLIDING_FAMILIES + EXPERT_FAMILIES
LAYER_TYPES = ("full_attention", "sliding_attention")
SHARED_ATTENTION = "trl_grpo_tasks_shared"  # attention implementation of models that share prompts, instead of "sdpa"


def unsupported_reason(model: Any) -> str | None:
    """Return the reason why fast rollouts do not support this model, or None if they do."""
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        return "encoder-decoder models are not supported"
    if config is not model.config and model.config.model_type != "gemma3":
        return f"vision-language models of type {model.config.model_type!r} are not supported"
    if config.model_type not in KNOWN_FAMILIES:
        return f"models of type {config.model_type!r} are not supported"
    layers = getattr(config, "layer_types", None) or []
    unknown = sorted(set(layers) - set(LAYER_TYPES))
    if unknown:
        return f"layers of type {unknown[0]!r} are not supported"
    if "sliding_attention" in layers and not getattr(config, "use_sliding_window", True):
        return "layer_types has sliding-window layers, but use_sliding_window is off"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return "bidirectional attention is not supported"
    if config._attn_implementation not in ("sdpa", "eager", SHARED_ATTENTION):
        return f"attention implementation {config._attn_implementation!r} does not accept a custom mask"
    if config.model_type == "gemma2" and config.attn_logit_softcapping and config._attn_implementation == "sdpa":
        return "attention implementation 'sdpa' ignores attn_logit_softcapping"  # possible in transformers 5.17
    quantization = getattr(model.config, "quantization_config", None) or {"quant_method": "bitsandbytes"}
    method = quantization["quant_method"] if isinstance(quantization, dict) else quantization.quant_method
    if method != "bitsandbytes":
        return f"weights quantised with {getattr(method, 'value', method)!r} are not supported"
    return None


def unsupported_reason_for_sharing(model: Any) -> str | None:
    """Return the reason why scoring with shared prompts does not support this model, or None if it does."""
    config = model.config.get_text_config()
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if config.model_type in SLIDING_FAMILIES + EXPERT_FAMILIES or has_window:
        return "models with sliding windows, soft-capped attention scores or experts are not supported"
    return unsupported_reason(model)


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
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        return "weights sharded by the first version of FSDP are only supported by TRL's generation"
    model = without_adapter(trainer.accelerator.unwrap_model(trainer.model))
    reason = unsupported_reason(model)
    if reason is None and (limit := length_limit(model)) is not None and trainer.max_completion_length >= limit:
        reason = f"the rotary embeddings of this model depend on the length beyond {limit} tokens"
    return reason


def unsupported_length(model: Any, prompt_ids: Sequence[Sequence[int]], max_new_tokens: int) -> str | None:
    """Return the reason why fast rollouts do not support texts of this length, or None if they do."""
    limit, longest = length_limit(without_adapter(model)), max(map(len, prompt_ids))
    if limit is None or longest + max_new_tokens <= limit:
        return None
    return (
        f"the rotary embeddings of this model depend on the length beyond {limit} tokens, and a prompt of {longest} "
        f"tokens with a completion of up to {max_new_tokens} exceeds that"
    )


def without_adapter(model: Any) -> Any:
    """Return the base model of a PeftModel, whose layers still apply the adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def text_backbone(model: Any) -> Any:
    """Return the module with the layers of a causal language model, also that of a vision-language model."""
    return getattr(model.base_model, "language_model", model.base_model)
