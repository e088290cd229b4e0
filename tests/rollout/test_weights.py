"""Layers as rollouts run them compute the same as the originals, follow training, and leave the model as it was."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.rollouts import EOS, PROMPTS, Paged, dense_logps, reference_linear, tiny
from trl_grpo_tasks.rollout import Decoder, rollout
from trl_grpo_tasks.rollout import compiled as compiled_module
from trl_grpo_tasks.rollout.compiled import CompiledLayers
from trl_grpo_tasks.rollout.support import text_backbone, without_adapter
from trl_grpo_tasks.rollout.weights import RolloutWeights

PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
BIASES = {"attention_bias": True, "mlp_bias": True}
ADAPTERS = {
    "full": None,
    "lora": {"target_modules": "all-linear"},
    "some": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "ranks": {"target_modules": "all-linear", "rank_pattern": {"k_proj": 5, "up_proj": 1}},
}
NEAR = {torch.float32: 2e-5, torch.bfloat16: 0.02}


@pytest.fixture(autouse=True)
def linear_on_the_cpu():
    kernels = pytest.importorskip("trl_grpo_tasks.rollout.kernels", reason="needs Triton")
    kernels.adapted_linear.register_kernel("cpu", reference_linear)


def adapted(model, **options):
    return get_peft_model(model, LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **options)).eval()


def make_model(adapter="some", dtype=torch.float32, **special):
    model = tiny(LlamaConfig, **special).to(dtype)
    return model if ADAPTERS[adapter] is None else adapted(model, **ADAPTERS[adapter])


@torch.no_grad()
def outputs(model, dtype):
    """The outputs of all projections of all layers for the same inputs."""
    out = {}
    generator = torch.Generator().manual_seed(0)
    for number, layer in enumerate(text_backbone(without_adapter(model)).layers):
        parts = dict(layer.self_attn.named_children()) | dict(layer.mlp.named_children())
        for names in PROJECTIONS:
            width = 24 if names == ("down_proj",) else 16
            x = torch.randn(1, 7, width, generator=generator).to(dtype)
            for name in names:
                out[number, name] = parts[name](x)
    return out


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(model, before):
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(value.dtype == before[name].dtype and torch.equal(value, before[name]) for name, value in after.items())


def train_one_step(model):
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.05)
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.float().logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "autocast", "special", "adapter", "uses_kernels"),
    [
        (F32, None, BIASES, "full", True), (F32, None, BIASES, "lora", True), (F32, None, {}, "some", False),
        (F32, None, BIASES, "ranks", True), (BF16, None, BIASES, "some", True), (BF16, None, {}, "lora", False),
        (F32, BF16, BIASES, "full", False), (F32, BF16, BIASES, "lora", True), (F32, BF16, BIASES, "ranks", False),
        (F32, BF16, {}, "some", True), (BF16, BF16, BIASES, "ranks", True), (BF16, BF16, {}, "full", False),
    ],
)  # fmt: skip
def test_layers_compute_the_same_and_follow_training(dtype, autocast, special, adapter, uses_kernels):
    model = make_model(adapter, dtype, **special)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    weights = RolloutWeights(without_adapter(model), autocast, uses_kernels)
    for step in range(2):
        before = snapshot(model)
        assert weights.load() is (step == 0 and bool(weights._layers))
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            expected = outputs(model, dtype)
            with weights.used():
                got = outputs(model, dtype)
        for name, value in expected.items():
            assert got[name].dtype == value.dtype, name
            scale = value.abs().max().item()
            torch.testing.assert_close(got[name], value, rtol=0, atol=NEAR[autocast or dtype] * scale)
        assert_same_state(model, before)
        assert dict(model.named_modules()) == modules
        assert all(parameters[name] is weight for name, weight in model.named_parameters())
        train_one_step(model)
        assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_projections_are_fused_and_adapters_go_through_the_kernel():
    model, calls = make_model("lora"), []
    weights = RolloutWeights(without_adapter(model), None, True)
    weights.load()
    kernels = pytest.importorskip("trl_grpo_tasks.rollout.kernels")
    kernels.adapted_linear.register_kernel("cpu", lambda *args: calls.append(args) or reference_linear(*args))
    with weights.used():
        outputs(model, torch.float32)
    assert [args[5] for args in calls[:4]] == [[16, 24, 32], [16], [24, 48], [16]] and len(calls) == 8


def test_joined_weights_stay_those_of_the_model(tmp_path):
    """Weights that lie side by side in memory are trained, saved, loaded and copied like others."""
    model = make_model("full")
    before = snapshot(model)
    weights = RolloutWeights(model, None, True)
    weights.load()
    assert weights.copied_bytes == 0
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.data_ptr() == attention.q_proj.weight.data_ptr() + 16 * 16 * 4
    assert_same_state(model, before)
    again = RolloutWeights(model, None, True)
    again.load()
    places, before_places = ([layer.weight.data_ptr() for layer in each._layers] for each in (again, weights))
    assert places == before_places
    assert weights.load() is False
    train_one_step(model)
    with weights.used():  # a captured pass reads the new weights, although they were not loaded again
        got = outputs(model, torch.float32)
    for name, value in outputs(model, torch.float32).items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    trained = snapshot(model)
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), trained)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())
    duplicate = copy.deepcopy(model)
    train_one_step(duplicate)
    assert_same_state(model, trained)
    model.load_state_dict(before)
    assert weights.load() is False
    with weights.used():
        got = outputs(model, torch.float32)
    torch.testing.assert_close(got, outputs(model, torch.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("special", [{}, BIASES], ids=["side by side", "apart"])
def test_weights_in_a_flat_buffer_stay_there(special):
    """DeepSpeed's optimizers update weights within one large tensor."""
    model = make_model("full", **special)
    parameters = list(model.parameters())
    flat = torch.cat([weight.data.flatten() for weight in parameters])
    begin = 0
    for weight in parameters:
        weight.data = flat[begin : begin + weight.numel()].view(weight.shape)
        begin += weight.numel()
    places = [weight.data_ptr() for weight in parameters]
    weights = RolloutWeights(model, None, True)
    for _ in range(2):
        weights.load()
        with weights.used():
            got = outputs(model, torch.float32)
        torch.testing.assert_close(got, outputs(model, torch.float32), rtol=1e-5, atol=1e-5)
        assert [weight.data_ptr() for weight in parameters] == places
        flat.mul_(1.5)
    assert (weights.copied_bytes > 0) == bool(special)


def test_copies_are_freed():
    model = make_model("full")
    weights = RolloutWeights(model, torch.bfloat16, False)
    assert weights.load() is True and weights.load() is False
    numbers = sum(part.weight.numel() for part in model.modules() if type(part) is nn.Linear)
    assert weights.copied_bytes == 2 * numbers
    weights.release()
    assert all(layer.weight is None for layer in weights._layers)
    assert weights.load() is True and all(layer.weight is not None for layer in weights._layers)


def test_excluded_and_unknown_layers_are_not_replaced():
    """Layers whose adapter has a bias are left to PEFT."""
    model = adapted(tiny(LlamaConfig), target_modules=["q_proj"], lora_bias=True)
    base = without_adapter(model)
    assert not RolloutWeights(base, None, False)._layers
    weights = RolloutWeights(base, torch.bfloat16, False, [base.get_output_embeddings()])
    replaced = {original for _, _, original, _ in weights._replacements}
    layer = base.model.layers[0].self_attn
    assert {base.lm_head, layer.q_proj, layer.q_proj.base_layer}.isdisjoint(replaced) and layer.k_proj in replaced


@torch.no_grad()
@pytest.mark.parametrize("kind", [Decoder, Paged])
def test_dropout_does_not_act_in_rollouts(kind):
    """The model is in training mode before and after a rollout, and in evaluation mode during it."""
    model = adapted(tiny(LlamaConfig), target_modules=["q_proj", "down_proj"], lora_dropout=0.5).train()
    out = rollout(model, PROMPTS, max_new_tokens=6, eos_token_ids=[EOS], decoder=kind(model))
    assert all(part.training for part in model.modules())
    model.eval()
    for prompt, ids, logps in zip(PROMPTS, out.completion_ids, out.logps, strict=True):
        assert logps == pytest.approx(dense_logps(model, prompt, ids, [0] * len(ids), None, 1.0), abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "uses_kernels"), [(torch.float32, True), (torch.bfloat16, False)])
def test_small_adapters_are_not_lost(dtype, uses_kernels):
    """An adapter of 1e-5 beside bf16 weights of 0.02 would be rounded away if it were merged into them."""
    model = make_model("some", dtype)
    layers = {name: part for name, part in model.named_modules() if hasattr(part, "lora_A")}
    generator = torch.Generator().manual_seed(0)
    for layer in layers.values():
        shape = layer.base_layer.weight.shape
        layer.base_layer.weight.copy_((torch.randn(shape, generator=generator) * 0.02).bfloat16())
        for weight, scale in ((layer.lora_A["default"].weight, 1.0), (layer.lora_B["default"].weight, 1e-5)):
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    weights = RolloutWeights(without_adapter(model), torch.bfloat16, uses_kernels)
    weights.load()
    inputs = torch.randn(1, 2000, 24, generator=generator).bfloat16()

    def shares():
        """For each adapted layer, the part of its adapter that is left in its output."""
        for name, layer in layers.items():
            x = inputs[..., : layer.in_features]
            a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
            delta = x[0].double() @ a.T @ b.T * 5 / 3
            left = model.get_submodule(name)(x)[0].double() - x[0].double() @ layer.base_layer.weight.double().T
            yield ((left * delta).sum() / (delta**2).sum()).item()

    with torch.autocast("cpu", torch.bfloat16):
        in_training = list(shares())
        with weights.used():
            in_rollouts = list(shares())
    # The output of a layer is rounded in training, too: first without the adapter, and then with it.
    assert len(in_rollouts) == 6 and min(in_training) > 0.5
    assert all(0.95 * one < other < 1.1 for one, other in zip(in_training, in_rollouts, strict=True))


@pytest.mark.parametrize("adapter", ["full", "some"])
def test_paged_rollouts_in_float32_follow_training(adapter):
    model = make_model(adapter)
    decoder = Paged(model)
    for _ in range(3):
        out = rollout(model, PROMPTS, max_new_tokens=6, eos_token_ids=[EOS], decoder=decoder)
        for prompt, ids, logps in zip(PROMPTS, out.completion_ids, out.logps, strict=True):
            with torch.no_grad():
                wanted = dense_logps(model, prompt, ids, [0] * len(ids), None, 1.0)
            assert logps == pytest.approx(wanted, abs=1e-4)
        train_one_step(model)


def test_compiled_layers_compute_the_same_and_restore_the_model(monkeypatch):
    monkeypatch.setattr(compiled_module.torch, "compile", lambda function, **_: function)  # which is not tested here
    model = make_model()
    ids = torch.randint(1, 20, (3, 7))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        backbone = text_backbone(without_adapter(model))
        layers = CompiledLayers(backbone)
        with layers.used():
            assert all("forward" in vars(part) for part in (*backbone.layers, backbone.norm))
            torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert not any("forward" in vars(part) for part in model.modules())
