"""Configurations of small models, one or more for each supported family.

Windows are shorter than the texts of tests, so that sliding and full layers differ. Scales and soft-caps are far from
neutral. Input and output embeddings are not tied where models would otherwise repeat their last token forever.
"""

from transformers import (
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from tests.support.exhaustive import exhaustive_but

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SLIDING_AND_FULL = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
UNTIED = {"tie_word_embeddings": False}


def _rope(kind, **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **options}}


# The class of the configuration and its options; a name is the model type, followed by the variant.
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "llama-biased": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-dynamic": (LlamaConfig, {"max_position_embeddings": 40, **_rope("dynamic", factor=4.0)}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-sliding": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-sliding": (MistralConfig, {"sliding_window": 4}),
    "gemma": (GemmaConfig, UNTIED),
    "gemma2": (
        Gemma2Config,
        UNTIED
        | SLIDING_AND_FULL
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 3}
        | {"attn_implementation": "eager"},  # SDPA ignores the soft-cap in older versions of transformers
    ),
    "gemma3_text": (Gemma3TextConfig, UNTIED | SLIDING_AND_FULL | {"query_pre_attn_scalar": 3}),
    "granite": (
        GraniteConfig,
        {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.7, "attention_multiplier": 0.6},
    ),
    "phi3": (Phi3Config, {"sliding_window": None, **_rope("default", partial_rotary_factor=0.5)}),
    "phi3-sliding": (Phi3Config, {"sliding_window": 4}),
    "phi3-longrope": (
        Phi3Config,
        {
            "max_position_embeddings": 160,
            "original_max_position_embeddings": 40,
            **_rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.0, 4.0, 8.0, 16.0]),
        },
    ),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0]}),
    "cohere": (CohereConfig, {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": (Cohere2Config, {"logit_scale": 0.5} | SLIDING_AND_FULL),
    "mixtral": (MixtralConfig, LOCAL_EXPERTS),
    "mixtral-sliding": (MixtralConfig, LOCAL_EXPERTS | {"sliding_window": 4}),
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS | {"moe_intermediate_size": 12, "mlp_only_layers": [0]}),
    "olmoe": (OlmoeConfig, EXPERTS | {"clip_qkv": 1.5}),
    "granitemoe": (GraniteMoeConfig, LOCAL_EXPERTS | {"logits_scaling": 0.5}),
    "gpt_oss": (GptOssConfig, LOCAL_EXPERTS | SLIDING_AND_FULL | _rope("default")),
}
# Parameters of tests over all families. `make test` has one with each kind of attention, rotary embedding and experts.
SOME_FAMILIES = exhaustive_but(["llama", "gemma2", "phi3-longrope", "cohere2", "qwen3_moe", "gpt_oss"], list(FAMILIES))
