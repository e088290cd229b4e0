"""Rotary embeddings that depend on the length: the limit is right, and frequencies can be kept constant."""

import copy

import pytest
import torch

from tests.support.families import FAMILIES, SIZES
from tests.support.rollouts import tiny
from trl_grpo_tasks.rollout.rotary import constant_frequencies, length_limit

LIMITED = ["llama-dynamic", "phi3-longrope"]


def model_of(family):
    config_class, options = FAMILIES[family]
    return tiny(config_class, **SIZES | options)


@torch.no_grad()
def first_logits(model, length):
    """Logits at the first 20 positions of a text of this length."""
    return model(input_ids=torch.arange(length)[None] % 20 + 5).logits[0, :20]


def test_length_limits():
    limits = {family: limit for family in FAMILIES if (limit := length_limit(model_of(family))) is not None}
    assert limits == {"llama-dynamic": 40, "phi3-longrope": 40}


@pytest.mark.parametrize("family", LIMITED)
def test_limit_is_that_of_the_model(family):
    """Up to the limit, logits do not change when the text continues; one token later they do."""
    model = model_of(family)
    short = first_logits(model, 20)
    torch.testing.assert_close(first_logits(model, 40), short, atol=1e-5, rtol=0)
    assert (first_logits(model, 41) - short).abs().max() > 1e-2


@pytest.mark.parametrize("family", [*LIMITED, "gemma3_text", "llama"])
def test_constant_frequencies(family):
    """Frequencies are those of a short text, whatever came before, and afterwards the model is as it was."""
    model = model_of(family)
    untouched = copy.deepcopy(model)
    short = first_logits(model, 20)
    long = first_logits(model, 60)
    with constant_frequencies(model.base_model):
        torch.testing.assert_close(first_logits(model, 60), short, atol=1e-5, rtol=0)
        torch.testing.assert_close(first_logits(model, 20), short, atol=1e-5, rtol=0)
    for length in (60, 50, 20, 40):
        first_logits(untouched, 60)
        torch.testing.assert_close(first_logits(model, length), first_logits(untouched, length), atol=1e-6, rtol=0)
        first_logits(model, 60)
    assert torch.equal(first_logits(model, 60), long)
