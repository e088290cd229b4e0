"""The embedded tiny model of a task: a small Llama or ModernBERT with a tokenizer over the task's own tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..task import MASK_TOKEN, TinySpec

# For models without a chat template: one line per message, and the end-of-sequence token after an answer.
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def save_tiny(spec: TinySpec, folder: str | Path, seed: int = 0) -> None:
    """Create and save an untrained model and its tokenizer over `spec.tokens`.

    The model is a Llama, or a ModernBERT if the policy fills masks.
    """
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, ModernBertForMaskedLM, set_seed

    tokenizer = make_tokenizer(spec.tokens, spec.context, fills=spec.policy == "masked")
    set_seed(seed)
    if spec.policy == "masked":
        model = ModernBertForMaskedLM(encoder_config(spec, tokenizer))
    else:
        config = LlamaConfig(
            intermediate_size=3 * spec.hidden_size,
            num_key_value_heads=spec.heads,
            tie_word_embeddings=False,
            **_shape(spec, tokenizer),
        )
        model = LlamaForCausalLM(config)
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def encoder_config(spec: TinySpec, tokenizer: Any, **more: Any) -> Any:
    """Return the configuration of a small ModernBERT with global attention in every layer."""
    from transformers import ModernBertConfig

    return ModernBertConfig(
        intermediate_size=2 * spec.hidden_size,
        global_attn_every_n_layers=1,
        cls_token_id=None,
        sep_token_id=None,
        **_shape(spec, tokenizer),
        **more,
    )


def _shape(spec: TinySpec, tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "max_position_embeddings": spec.context,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def make_tokenizer(tokens: Any, context: int, fills: bool = False) -> Any:
    """Create a tokenizer that splits text into the longest matching `tokens` and decodes without loss.

    `context` is the maximum length. `fills` adds a mask token, for models that fill masks.
    """
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>", *([MASK_TOKEN] if fills else [])]
    # The chat template ends each message with a newline.
    ordered = list(dict.fromkeys([*special, "\n", *tokens]))
    clash = set(special) & set(tokens)
    if clash or "" in ordered:
        raise ValueError(f"the tokens of a tiny model must not be empty or one of {special}; change TinySpec.tokens")
    backend = Tokenizer(WordLevel({token: i for i, token in enumerate(ordered)}, unk_token="<unk>"))
    longest_first = sorted(ordered[len(special) :], key=len, reverse=True)
    pattern = "|".join(re.escape(token) for token in longest_first)
    backend.pre_tokenizer = Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        **({"mask_token": MASK_TOKEN} if fills else {}),
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    return tokenizer
