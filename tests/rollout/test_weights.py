"""Cast weights, folded adapters and compiled parts compute the same results, and the model is restored."""

import copy

import pytest
import torch
from transformers import LlamaConfig

from tests.support.rollouts import EOS, MODELS, PROMPTS, TOKENIZER, dense_logps, tiny
from trl_grpo_tasks.constraints import Grammar, GrammarConstraint
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.rollout import Decoder, rollout
from trl_grpo_tasks.rollout import compiled as compiled_module
from trl_grpo_tasks.rollout.compiled import CompiledParts
from trl_grpo_tasks.rollout.support import without_adapter
from trl_grpo_tasks.rollout.weights import CastWeights


def adapted_model(seed=0):
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(tiny(LlamaConfig, seed), LoraConfig(r=3, lora_alpha=5, target_modules=targets)).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    return model


def test_compiled_parts_compute_the_same_and_restore_the_model(monkeypatch):
    monkeypatch.setattr(
        compiled_module.torch, "compile", lambda function, **_: function
    )  # torch.compile itself is not tested
    model = adapted_model()
    ids = torch.randint(1, 20, (3, 7))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        parts = CompiledParts(without_adapter(model))
        with parts.used():
            adapted = [part for part in model.modules() if "lora_A" in dict(part.named_children())]
            assert len(adapted) == 6 and all("forward" in vars(part) for part in adapted)
            torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert not any("forward" in vars(part) for part in model.modules())


def test_weights_are_cast_for_autocast_and_restored():
    model = adapted_model()
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    decoder = Decoder(model)
    for _ in range(2):  # in between, training changes weights
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = rollout(model, PROMPTS, max_new_tokens=6, eos_token_ids=[EOS], decoder=decoder)
        for prompt, ids, logps in zip(PROMPTS, out.completion_ids, out.logps, strict=True):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                wanted = dense_logps(model, prompt, ids, [0] * len(ids), None, 1.0)
            assert logps == pytest.approx(wanted, abs=0.15)  # bf16 rounding of logits of about 10
        for name, weight in model.named_parameters():
            assert weight.dtype == torch.float32 and torch.equal(weight, weights[name])
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(0.5)
                weights[name] = weight.clone()


@torch.no_grad()
def test_folded_adapters_compute_the_same_and_restore_the_model():
    model = adapted_model()
    layers = [part for part in model.modules() if "lora_A" in dict(part.named_children())]
    cast = CastWeights(without_adapter(model), torch.float64)  # a dtype without rounding
    for _ in range(2):
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        rows = [torch.randn(2, layer.in_features) for layer in layers]
        expected = [layer(x) for layer, x in zip(layers, rows, strict=True)]
        cast.refresh()
        with cast.used():
            assert len(layers) == 6 and all(layer.base_layer.weight.dtype == torch.float64 for layer in layers)
            for layer, x, wanted in zip(layers, rows, expected, strict=True):
                torch.testing.assert_close(layer(x.double()).float(), wanted, atol=1e-5, rtol=1e-5)
        assert not any("forward" in vars(part) for part in model.modules())
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
        for name, weight in model.named_parameters():
            if "lora" in name:
                weight.mul_(1.5)  # as a training step does


@torch.no_grad()
@pytest.mark.parametrize(("size", "folds"), [(0.0, False), (1e-5, False), (3e-3, True)])
def test_adapters_are_folded_only_if_rounding_preserves_them(size, folds):
    """Weights loaded from a bf16 file have bf16 values, so a small adapter would be rounded away when folded."""
    model = adapted_model()
    layers = [part for part in model.modules() if "lora_A" in dict(part.named_children())]
    for layer in layers:
        layer.base_layer.weight.copy_(torch.randn_like(layer.base_layer.weight).mul_(0.02).bfloat16())
        layer.lora_A["default"].weight.copy_(torch.randn_like(layer.lora_A["default"].weight))
        layer.lora_B["default"].weight.copy_(torch.randn_like(layer.lora_B["default"].weight) * size)
    cast = CastWeights(without_adapter(model), torch.bfloat16)
    assert cast.refresh() is folds and cast.refresh() is False
    rows = [torch.eye(layer.in_features) for layer in layers]
    deltas = [layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 5 / 3 for layer in layers]
    bases = [layer.base_layer.weight.clone() for layer in layers]
    with cast.used(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(("forward" in vars(layer)) == folds for layer in layers)
        for layer, x, delta, base in zip(layers, rows, deltas, bases, strict=True):
            left = (layer(x).float().T - base) * delta
            if size and not folds:
                # Not folded: only the output of the layer is rounded, as in training.
                left = (layer.lora_B["default"](layer.lora_A["default"](x)).float().T * 5 / 3) * delta
            assert left.sum().item() == pytest.approx((delta**2).sum().item(), rel=0.05, abs=1e-12)


def test_lm_head_stays_in_float32_with_cast_lm_head_to_fp32():
    """With cast_lm_head_to_fp32, neither the weights of the LM head nor its logits are rounded to bf16."""
    model = copy.deepcopy(MODELS["llama"])
    outs = {}
    for in_fp32 in (False, True):
        decoder = Decoder(model, head_in_fp32=in_fp32)
        with torch.autocast("cpu", dtype=torch.bfloat16), decoder.running(1, 8, 1.0), torch.no_grad():
            decoder.prefill([[5, 6, 7]], [0])
            outs[in_fp32] = decoder.logits[0].clone()
    assert torch.equal(outs[False], outs[False].bfloat16().float())
    assert not torch.equal(outs[True], outs[True].bfloat16().float())
    torch.testing.assert_close(outs[True], outs[False], atol=0.3, rtol=0.05)


def test_rollout_with_weights_already_in_the_autocast_dtype():
    model = copy.deepcopy(MODELS["llama"]).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = rollout(model, PROMPTS, max_new_tokens=3, eos_token_ids=[EOS], temperature=0)
        assert all(len(ids) == 3 or ids[-1] == EOS for ids in out.completion_ids)
    assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captured passes need a GPU")
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-3), (torch.bfloat16, 0.15)])
def test_captured_passes_match_plain_passes(dtype, near):
    model = copy.deepcopy(MODELS["llama"]).to("cuda", dtype)
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex(r"([a-e]cde){2}[0-9]ccddeccddeccddecc[a-e]{1,9}"))
    decoder = Decoder(model)
    for _ in range(3):
        table = MaskTable(model.config.vocab_size)
        out = rollout(model, PROMPTS, max_new_tokens=40, eos_token_ids=[EOS], constraint=constraint,
                      rows=[{}] * len(PROMPTS), table=table, decoder=decoder)  # fmt: skip
        for prompt, ids, logps, masks in zip(PROMPTS, out.completion_ids, out.logps, out.masks, strict=True):
            with torch.no_grad():
                wanted = dense_logps(copy.deepcopy(model).cpu().float(), prompt, ids, masks, table, 1.0)
            assert logps == pytest.approx(wanted, abs=near)


def test_decoder_disables_cudnn_attention():
    torch.backends.cuda.enable_cudnn_sdp(True)
    Decoder(MODELS["llama"])
    assert not torch.backends.cuda.cudnn_sdp_enabled()
