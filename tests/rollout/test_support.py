"""The support matrix of rollouts: what is refused, and with which reason."""

import re
from types import SimpleNamespace

import pytest
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTQConfig,
    Mistral3Config,
    Qwen3Config,
    Qwen3NextConfig,
    SmolLM3Config,
    T5Config,
)

from tests.support.families import FAMILIES, SIZES
from tests.support.paths import ROOT
from tests.support.rollouts import MODELS, tiny
from tests.support.training import toy_trainer
from trl_grpo_tasks.rollout import unsupported_reason, unsupported_reason_in
from trl_grpo_tasks.rollout.support import unsupported_reason_for_sharing

FIRST_FSDP = "weights sharded by the first version of FSDP are only supported by TRL's generation"


def model_with(config, attention="sdpa", quantization=None):
    """A stand-in for a model, of which only the configuration is looked at."""
    config.get_text_config()._attn_implementation = attention
    if quantization is not None:
        config.quantization_config = quantization
    return SimpleNamespace(config=config)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (model_with(T5Config()), "encoder-decoder models are not supported"),
        (model_with(Mistral3Config()), "vision-language models of type 'mistral3' are not supported"),
        (model_with(Qwen3NextConfig()), "models of type 'qwen3_next' are not supported"),
        (
            model_with(Qwen3Config(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])),
            "layers of type 'linear_attention' are not supported",
        ),
        (
            model_with(SmolLM3Config(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=4)),
            "layer_types has sliding-window layers, but use_sliding_window is off",
        ),
        (model_with(Gemma3TextConfig(use_bidirectional_attention=True)), "bidirectional attention is not supported"),
        (model_with(Qwen3Config(is_causal=False)), "bidirectional attention is not supported"),
        (
            model_with(Qwen3Config(), attention="flash_attention_2"),
            "attention implementation 'flash_attention_2' does not accept a custom mask",
        ),
        (model_with(Gemma2Config()), "attention implementation 'sdpa' ignores attn_logit_softcapping"),
        (model_with(Gemma2Config(attn_logit_softcapping=None)), None),
        (
            model_with(Qwen3Config(), quantization=GPTQConfig(bits=4)),
            "weights quantised with 'gptq' are not supported",
        ),
        (
            model_with(Qwen3Config(), quantization={"quant_method": "awq"}),
            "weights quantised with 'awq' are not supported",
        ),
        (model_with(Qwen3Config(), quantization=BitsAndBytesConfig(load_in_4bit=True)), None),
        (model_with(Qwen3Config(), quantization={"quant_method": "bitsandbytes"}), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons_of_models(model, reason):
    assert unsupported_reason(model) == reason


def trainer_with(model=None, fsdp=None, max_completion_length=16):
    options = {"use_vllm": False, "use_transformers_continuous_batching": False, "generation_kwargs": None,
               "cache_implementation": None}  # fmt: skip
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, is_fsdp2=fsdp == 2)
    return SimpleNamespace(
        args=SimpleNamespace(**options), tools=None, rollout_func=None, _is_vlm=False,
        is_fsdp_enabled=fsdp is not None, accelerator=accelerator,
        model=model or MODELS["llama"], max_completion_length=max_completion_length,
    )  # fmt: skip


QUANTISED_MODEL = model_with(Qwen3Config(), quantization=BitsAndBytesConfig(load_in_4bit=True))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"fsdp": 2}, None),
        ({"fsdp": 1}, FIRST_FSDP),
        ({"model": QUANTISED_MODEL}, None),
    ],
    ids=str,
)
def test_weights_that_can_be_gathered(options, reason):
    assert unsupported_reason_in(trainer_with(**options)) == reason


@pytest.mark.parametrize("options", [{"cache_implementation": "dynamic"}, {"generation_kwargs": {"num_beams": 1}}])
def test_unsupported_options_fall_back_to_trl_with_a_printed_reason(tiny_path, tmp_path, capsys, options):
    trainer = toy_trainer(tiny_path, tmp_path, rollout="fast", max_steps=1, **options)
    output = capsys.readouterr().out
    assert output.count("TRL generates the completions, because ") == 1 and next(iter(options)) in output
    trainer.train()


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"])
def test_completions_beyond_the_length_limit(family):
    config_class, options = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(config_class(vocab_size=30, pad_token_id=0, **SIZES | options))
    assert unsupported_reason_in(trainer_with(model, max_completion_length=39)) is None
    reason = unsupported_reason_in(trainer_with(model, max_completion_length=40))
    assert reason == "the rotary embeddings of this model depend on the length beyond 40 tokens"


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_shared_only_with_plain_attention(family):
    config_class, options = FAMILIES[family]
    model = tiny(config_class, **SIZES | options)
    is_plain = family.partition("-")[0] in (
        "llama", "qwen2", "qwen3", "mistral", "gemma", "granite", "phi3", "smollm3", "cohere"
    ) and not family.endswith("-sliding")  # fmt: skip
    assert (unsupported_reason_for_sharing(model) is None) == is_plain


def test_guide_quotes_the_reasons_of_the_code():
    """The guide quotes all reasons word for word, with `...` for what varies, and no others."""
    guide = " ".join((ROOT / "docs/guides/rollouts.md").read_text().split())
    code = (ROOT / "trl_grpo_tasks/rollout/support.py").read_text()
    found = re.findall(r'(?:return|reason =) f?"(.*?)"(?:  #.*)?$', code, re.MULTILINE)
    reasons = {re.sub(r"\{[^}]*\}", "...", reason) for reason in found}
    assert len(reasons) == 15
    assert [reason for reason in reasons if f"`{reason}`" not in guide] == []
    table = guide.partition("| reason | what to do | |---|---| ")[2].partition("LongRoPE and dynamic")[0]
    assert set(re.findall(r"\| `([^|]*)` \|", table)) < reasons
