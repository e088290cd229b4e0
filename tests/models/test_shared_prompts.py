"""Scoring with shared prompts gives the same log-probs and gradients from fewer tokens."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, MistralConfig

from tests.support.families import FAMILIES
from tests.support.training import toy_trainer
from trl_grpo_tasks.models.shared_prompts import SharedPrompts, _Packing

SHARING = ("llama", "qwen2", "qwen3", "mistral", "gemma", "granite", "phi3", "phi3-longrope", "smollm3", "cohere")
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "pad_token_id": 0,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip


def tiny(family, dtype=torch.float64):
    torch.manual_seed(0)
    config_class, options = FAMILIES[family]
    return AutoModelForCausalLM.from_config(config_class(**SIZES | options)).to(dtype)


def batch(prompts, completions, seed=0):
    """Left-padded prompts and right-padded completions; `prompts` holds a number for the prompt of each row."""
    generator = torch.Generator().manual_seed(seed)
    width, length = 11, max(completions)
    ids = torch.zeros(len(prompts), width + length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, size) in enumerate(zip(prompts, completions, strict=True)):
        own = 3 + prompt % 9
        ids[row, width - own : width] = (torch.arange(own) * (prompt + 3)) % 37 + 1
        ids[row, width : width + size] = torch.randint(1, 40, (size,), generator=generator)
        mask[row, width - own : width + size] = 1
    return ids, mask, length


def logps(model, ids, mask, length):
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1].log_softmax(-1)
    chosen = logits.gather(2, ids[:, -length:, None])[:, :, 0]
    return chosen * mask[:, -length:]


def plain_and_shared(model, ids, mask, length, prepare=lambda model: model):
    """Return log-probs, gradients and the number of processed tokens, without and with shared prompts."""
    found = []
    for shares in (False, True):
        twin = copy.deepcopy(model)
        sharing, seen = SharedPrompts(), []
        if shares:
            assert sharing.add_to(twin) is None
        prepared = prepare(twin)
        twin.base_model.embed_tokens.register_forward_hook(lambda _, args, __, seen=seen: seen.append(args[0].numel()))
        with sharing.open(length):
            values = logps(prepared, ids, mask, length)
        (values * torch.linspace(-1, 1, values.numel(), dtype=values.dtype).view(values.shape)).sum().backward()
        grads = {n: p.grad.clone() for n, p in prepared.named_parameters() if p.grad is not None}
        found.append((values.detach(), grads, seen[0]))
    return found


def assert_same(plain, shared):
    # norms are computed in float32 for any weight dtype
    torch.testing.assert_close(shared[0], plain[0], atol=1e-6, rtol=1e-6)
    assert plain[1].keys() == shared[1].keys() and plain[1]
    for name, grad in plain[1].items():
        torch.testing.assert_close(shared[1][name], grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", SHARING)
def test_log_probs_and_gradients_equal_those_of_separate_prompts(family):
    ids, mask, length = batch([7, 7, 2, 7, 2, 2, 8, 7], [4, 2, 3, 4, 1, 4, 3, 2])
    plain, shared = plain_and_shared(tiny(family), ids, mask, length)
    assert_same(plain, shared)
    assert shared[2] < 0.8 * plain[2]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=9), st.integers(0, 99))
def test_any_mix_of_prompts_and_lengths(rows, seed):
    ids, mask, length = batch([p for p, _ in rows], [size for _, size in rows], seed)
    plain, shared = plain_and_shared(tiny("llama"), ids, mask, length)
    assert_same(plain, shared)


def test_adapter_with_gradient_checkpointing():
    ids, mask, length = batch([7, 7, 7, 2, 2, 2], [4, 2, 3, 4, 1, 4])

    def prepare(model):
        torch.manual_seed(1)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight)
        return adapted.double().train()

    assert_same(*plain_and_shared(tiny("llama"), ids, mask, length, prepare))


def test_prompts_are_not_shared_if_that_saves_too_little():
    ids, mask, length = batch([1, 2, 3], [4, 4, 4])
    assert _Packing.of(ids, mask, length) is None  # no prompt is shared
    ids, mask, length = batch([1, 1, 1], [60, 60, 60])
    assert _Packing.of(ids, mask, length) is None  # the prompt is too short
    assert _Packing.of(ids[:, -60:], mask[:, -60:], 60) is None  # no prompt


def test_unsupported_models_are_reported():
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20))
    assert "'gpt2'" in SharedPrompts().add_to(gpt2)
    eager = tiny("llama")
    eager.config._attn_implementation = "eager"
    assert "sdpa" in SharedPrompts().add_to(eager)
    for config in (MistralConfig(sliding_window=4, **SIZES), Gemma2Config(**SIZES)):
        assert "sliding windows" in SharedPrompts().add_to(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("constrain", [True, False])
@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_training_with_shared_prompts_equals_training_without(tiny_path, tmp_path, monkeypatch, constrain, peft):
    """Three training steps with a reference model end with the same losses and weights, up to rounding."""
    monkeypatch.setattr("trl_grpo_tasks.models.shared_prompts.MAX_TOKEN_FRACTION", 1.0)
    used = []
    packing_of = _Packing.of
    monkeypatch.setattr(_Packing, "of", lambda *args: used.append(packing_of(*args)) or used[-1])
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if peft else None
    ends = []
    for share in (False, True):
        trainer = toy_trainer(tiny_path, tmp_path / str(share), peft_config=adapter, max_steps=3, beta=0.1,
                              share_prompts=share, constrain=constrain)  # fmt: skip
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        ends.append((losses, {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}))
    assert used and all(packing is not None for packing in used)
    assert ends[0][0] == pytest.approx(ends[1][0], abs=1e-5)
    for name, weight in ends[0][1].items():
        torch.testing.assert_close(ends[1][1][name], weight, atol=1e-5, rtol=1e-4, msg=name)


def test_sharing_prompts_disables_cudnn_attention():
    """With a mask, gradients of cuDNN attention may be NaN. For unsupported models, the kernel choice is unchanged."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert SharedPrompts().add_to(AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=1)))
        assert torch.backends.cuda.cudnn_sdp_enabled()
        assert SharedPrompts().add_to(tiny("llama")) is None
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
