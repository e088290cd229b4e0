"""Scoring with shared prompts gives the same log-probs and gradients from fewer tokens."""

import copy
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config

from tests.support.families import FAMILIES
from tests.support.training import toy_trainer
from trl_grpo_tasks.models import shared_prompts
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.models.shared_prompts import SharedPrompts, _Packing
from trl_grpo_tasks.models.tiny import save_tiny
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.training.cold_start import cold_start

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


def plain_and_shared(model, ids, mask, length, prepare=lambda model: model, opened=None):
    """Return log-probs, gradients and the number of processed tokens, without and with shared prompts."""
    found = []
    for shares in (False, True):
        twin = copy.deepcopy(model)
        sharing, seen = SharedPrompts(), []
        if shares:
            assert sharing.add_to(twin) is None
        prepared = prepare(twin)
        twin.base_model.embed_tokens.register_forward_hook(lambda _, args, __, seen=seen: seen.append(args[0].numel()))
        with sharing.open(opened or length):
            values = logps(prepared, ids, mask, length)
        weights = torch.linspace(-1, 1, values.numel(), dtype=values.dtype, device=values.device)
        (values * weights.view(values.shape)).sum().backward()
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
    assert shared[2] == (3 + 7) + (3 + 2) + (3 + 8) + mask[:, -length:].sum(), "each prompt once, and no padding"


def test_rows_without_prompts_are_packed_too():
    """As in a cold start, where the whole row is trained on: hidden states and gradients of all real tokens."""
    ids, mask, _ = batch([1, 2, 3, 7], [1, 9, 4, 2])
    mask, order = mask.sort(dim=1, descending=True, stable=True)  # real tokens first
    ids = ids.gather(1, order)
    plain, shared = plain_and_shared(tiny("llama"), ids, mask, ids.shape[1] - 1, opened=sys.maxsize)
    assert_same(plain, shared)
    assert shared[2] == mask.sum()


def flash_attention_by_definition(query, key, value, query_ends, key_ends, longest_query, longest_key, dropout, scale):
    """What the operator computes on GPUs, sequence by sequence."""
    sizes, keys = query_ends.diff().tolist(), key_ends.diff().tolist()
    assert (max(sizes), max(keys), dropout) == (longest_query, longest_key, 0)
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], 1).split(keys) for part in (key, value))
    outs = []
    for q, k, v in zip(query.split(sizes), key, value, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[2] ** -0.5)
        later = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v))
    return torch.cat(outs)


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=9).filter(
        lambda rows: any(size for _, size in rows)
    ),
    st.integers(0, 99),
)
def test_any_mix_of_prompts_and_lengths(rows, seed):
    """Also as on GPUs, in sequences of flash attention. A masked truncated completion has no token."""
    ids, mask, length = batch([p for p, _ in rows], [size for _, size in rows], seed)
    model = tiny("llama")
    plain, shared = plain_and_shared(model, ids, mask, length)
    assert_same(plain, shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prompts, "supports_flash", lambda value: True)
        patch.setattr(shared_prompts, "flash_attention", flash_attention_by_definition)
        patch.setattr(shared_prompts, "MAX_TOKEN_FRACTION", 1.0)
        assert_same(plain, plain_and_shared(model, ids, mask, length)[1])


def test_the_operator_of_flash_attention_has_the_arguments_that_are_passed():
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    first = "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
    assert names[:10] == first.split()
    assert "scale" in names and schema.returns[0].name == "output"


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
    ids, mask, length = batch([8, 7, 6], [4, 4, 3])
    assert _Packing.of(ids, mask, length) is None  # no prompt is shared, and there is little padding
    ids, mask, length = batch([1, 1, 1], [60, 60, 60])
    assert _Packing.of(ids, mask, length) is None  # the prompt is too short
    assert _Packing.of(ids[:, -60:], mask[:, -60:], 60) is None  # no prompt


def test_unsupported_models_are_reported():
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20))
    assert "'gpt2'" in SharedPrompts().add_to(gpt2)
    eager = tiny("llama")
    eager.config._attn_implementation = "eager"
    assert "sdpa" in SharedPrompts().add_to(eager)


@pytest.mark.parametrize(("constrain", "peft"), [(True, False), (False, True)], ids=["constrained", "lora"])
def test_training_with_shared_prompts_equals_training_without(tiny_path, tmp_path, monkeypatch, constrain, peft):
    """Three training steps with a reference model end with the same losses and weights, up to rounding."""
    monkeypatch.setattr("trl_grpo_tasks.models.shared_prompts.MAX_TOKEN_FRACTION", 1.0)
    used = spied(monkeypatch)
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


def test_a_cold_start_without_padding_ends_with_the_same_weights(tmp_path, monkeypatch):
    task, weights = get_task("brick", {"brick_levels": ["carry"], "max_bricks": 16}), []
    save_tiny(task.tiny(), tmp_path / "untrained", seed=1)
    rows, tokenizer = task.dataset("train", 32, 0), load_tokenizer(str(tmp_path / "untrained"))
    packed = spied(monkeypatch)
    for fraction in (0.0, 1.0):
        monkeypatch.setattr("trl_grpo_tasks.models.shared_prompts.MAX_TOKEN_FRACTION", fraction)
        folder = cold_start(str(tmp_path / "untrained"), task, rows, tmp_path / str(fraction), tokenizer=tokenizer,
                            steps=3, learning_rate=1e-3, batch_size=8, seed=1, use_cpu=True, bf16=False)  # fmt: skip
        weights.append(load_file(f"{folder}/model.safetensors"))
    assert [packing is not None for packing in packed] == [False] * 3 + [True] * 3
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-5, rtol=1e-4, msg=name)


def spied(monkeypatch):
    """A list to which the packing of each forward pass is added, or None where rows are padded."""
    used, packing_of = [], _Packing.of
    monkeypatch.setattr(_Packing, "of", lambda *args: used.append(packing_of(*args)) or used[-1])
    return used


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
