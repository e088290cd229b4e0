"""Rollouts of every supported model family: greedy decoding matches `generate`, log-probs match a forward pass."""

import copy
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from tests.support.families import FAMILIES, SIZES, SOME_FAMILIES
from tests.support.rollouts import EOS, TOKENIZER, dense_logps, tiny
from trl_grpo_tasks.rollout import rollout, unsupported_reason
from trl_grpo_tasks.rollout.support import KNOWN_FAMILIES

# Repeated prompts, one of a single token, and one that is longer than the sliding windows.
PROMPTS = [[5, 6, 7], [9], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [9], [5, 6, 7], [16, 17, 18, 19, 20, 21]]


@functools.cache
def model_of(family):
    config_class, options = FAMILIES[family]
    return tiny(config_class, **SIZES | options)


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_greedy_equals_generate(family):
    assert_greedy_equals_generate(model_of(family))


def assert_greedy_equals_generate(model):
    ours = rollout(model, PROMPTS, max_new_tokens=20, eos_token_ids=[EOS], temperature=0, batch_size=4)
    theirs = {}
    for prompt in {tuple(prompt) for prompt in PROMPTS}:
        given = torch.tensor([prompt])
        out = model.generate(input_ids=given, attention_mask=torch.ones_like(given), do_sample=False,
                             max_new_tokens=20, eos_token_id=EOS, pad_token_id=0)  # fmt: skip
        theirs[prompt] = out[0, len(prompt) :].tolist()
    assert ours.completion_ids == [theirs[tuple(prompt)] for prompt in PROMPTS]


@pytest.mark.parametrize("adapter", [None, "all-linear"], ids=["full", "lora"])
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_log_probs_equal_a_forward_pass(family, adapter):
    model = model_of(family)
    if adapter is not None:
        lora = LoraConfig(r=2, target_modules=adapter, init_lora_weights=False)
        torch.manual_seed(0)
        model = get_peft_model(copy.deepcopy(model), lora).eval()
        for name, weights in model.named_parameters():
            if "lora_B" in name:  # otherwise logits are so large that float32 rounds by more than the tolerance on x86
                weights.data *= 0.1
    assert_log_probs_equal_a_forward_pass(model)


def assert_log_probs_equal_a_forward_pass(model):
    torch.manual_seed(0)
    out = rollout(model, PROMPTS, max_new_tokens=20, eos_token_ids=[EOS], temperature=0.9, batch_size=4)
    for prompt, ids, masks, logps in zip(PROMPTS, out.completion_ids, out.masks, out.logps, strict=True):
        with torch.no_grad():
            assert logps == pytest.approx(dense_logps(model, prompt, ids, masks, None, 0.9), abs=1e-4)


def test_text_model_of_a_vision_language_model():
    text = model_of("gemma3_text")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 8, "patch_size": 4}  # fmt: skip
    config = Gemma3Config(text_config=text.config.to_dict(), vision_config=vision, mm_tokens_per_image=4,
                          image_token_index=len(TOKENIZER) + 2, tie_word_embeddings=False)  # fmt: skip
    model = Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    assert unsupported_reason(model) is None
    assert_greedy_equals_generate(model)
    assert_log_probs_equal_a_forward_pass(model)


def test_every_known_family_is_tested():
    assert {family.partition("-")[0] for family in FAMILIES} == set(KNOWN_FAMILIES)
    for family in FAMILIES:
        assert unsupported_reason(model_of(family)) is None, family
        assert model_of(family).config.model_type == family.partition("-")[0]
