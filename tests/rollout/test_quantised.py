"""Dense weights and rounded activations against bitsandbytes' own layers."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import linear

from tests.support.quantised import needs_bitsandbytes, quantization, save_sharp
from trl_grpo_tasks.models.loading import load_model
from trl_grpo_tasks.rollout import rollout
from trl_grpo_tasks.rollout.quantised import activation_threshold, dense_weight, is_quantised, round_activations

pytestmark = needs_bitsandbytes
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Largest relative error of one product in a dtype, and of bitsandbytes' own scale of int8 products on the CPU.
ROUNDING = {torch.float32: 3e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
IN, OUT = 128, 96


def layer_8bit(threshold=6.0):
    from bitsandbytes.nn import Linear8bitLt

    torch.manual_seed(0)
    return Linear8bitLt(IN, OUT, has_fp16_weights=False, threshold=threshold).to("cpu").eval()


def activations(dtype, outliers):
    """Tokens of unit variance; with `outliers`, a whole large column, a single large value and a token of zeros."""
    x = torch.randn(3, 5, IN, generator=torch.Generator().manual_seed(1))
    if outliers:
        x[..., 7] *= 10
        x[1, 2, 30] = -40
        x[0, 0] = 0
    return x.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "nested", "kind", "storage"),
    [(torch.float32, True, "nf4", torch.uint8), (torch.bfloat16, False, "fp4", torch.bfloat16),
     (torch.float16, True, "fp4", torch.uint8), (torch.float32, False, "nf4", torch.bfloat16)],
)  # fmt: skip
@torch.no_grad()
def test_dense_4bit_weight_gives_the_output_of_the_layer_bit_for_bit(kind, nested, dtype, storage):
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer = Linear4bit(
        IN, OUT, compute_dtype=dtype, compress_statistics=nested, quant_type=kind, quant_storage=storage
    ).to("cpu")
    layer.support_avx512bf16_for_cpu = False
    original, x = layer.weight.data.view(torch.uint8).clone(), activations(torch.float32, outliers=False)
    weight = dense_weight(layer, dtype)
    assert weight.shape == (OUT, IN) and weight.dtype == dtype
    torch.testing.assert_close(linear(x.to(dtype), weight, layer.bias.to(dtype)).float(), layer(x), rtol=0, atol=0)
    assert layer.weight.data.view(torch.uint8).equal(original), "the layer is unchanged"
    assert dense_weight(layer, dtype).equal(weight)
    assert is_quantised(layer) and activation_threshold(layer) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_8bit_layer_in_training_on_a_cpu_is_a_dense_product(dtype):
    layer, x = layer_8bit().train(), activations(dtype, outliers=True)
    weight = dense_weight(layer, dtype)
    assert activation_threshold(layer) is None
    torch.testing.assert_close(linear(x, weight, layer.bias.to(dtype)), layer(x), rtol=0, atol=0)
    assert dense_weight(layer, dtype).equal(weight), "the first pass moves the scales elsewhere"


@pytest.mark.parametrize(("threshold", "outliers"), [(0.0, True), (6.0, False), (6.0, True)])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_8bit_layer_is_a_product_of_rounded_activations(threshold, outliers, dtype):
    layer, x = layer_8bit(threshold), activations(dtype, outliers)
    weight, bias = dense_weight(layer, dtype), layer.bias.to(dtype)
    assert activation_threshold(layer) == threshold
    rounded = round_activations(x, threshold)
    expected = layer(x)
    assert rounded.dtype == dtype and expected.dtype == dtype
    near = {"rtol": ROUNDING[dtype], "atol": ROUNDING[dtype] * expected.abs().max().item()}
    torch.testing.assert_close(linear(rounded, weight, bias), expected, **near)
    if dtype != torch.bfloat16:  # whose rounding is nearly as large as that to 8 bits
        plain = (linear(x, weight, bias) - expected).abs().max()
        assert plain > 5 * (linear(rounded, weight, bias) - expected).abs().max(), "the rounding is what matters"


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_rounded_activations_are_the_int8_values_of_bitsandbytes(threshold):
    from bitsandbytes.functional import int8_vectorwise_quant

    generator = torch.Generator().manual_seed(2)
    for scale in (0.01, 1.0, 3.0):
        x = (torch.randn(64, 256, generator=generator) * scale).half()
        x[5] = 0
        integers, largest, columns = int8_vectorwise_quant(x.clone(), threshold=threshold)
        expected = integers.float() * (largest[:, None] / 127)
        if threshold:
            expected[:, columns] = x[:, columns].float()
        torch.testing.assert_close(round_activations(x.float(), threshold), expected, rtol=1e-6, atol=1e-9)


def test_rounding_has_no_graph_break_and_no_step_that_depends_on_values():
    compiled = torch.compile(round_activations, fullgraph=True, backend="aot_eager")
    for outliers in (False, True):
        x = activations(torch.bfloat16, outliers)
        assert compiled(x, 6.0).equal(round_activations(x, 6.0))


def test_values_beyond_float16_are_outliers_and_stay():
    x = torch.tensor([[1e6, 1.0, -0.5], [0.25, 2.0, 0.0]])
    rounded = round_activations(x, 6.0)
    assert rounded[:, 0].equal(x[:, 0]) and rounded[:, 1].equal(x[:, 1])
    assert rounded[0, 2] == pytest.approx(round(-0.5 * 127) / 127)


@pytest.mark.parametrize(
    ("bits", "dtype", "compute_dtype", "autocast", "adapted", "training"),
    [
        (4, "float32", torch.float32, None, True, True), (4, "float32", torch.bfloat16, None, False, False),
        (4, "float32", torch.bfloat16, torch.bfloat16, True, False), (4, "bfloat16", torch.float32, None, True, True),
        (4, "float32", torch.float32, torch.bfloat16, False, True), (8, "float32", torch.float32, None, True, True),
        (8, "float32", torch.float32, None, False, False), (8, "bfloat16", torch.bfloat16, None, True, False),
        (8, "float32", torch.bfloat16, torch.bfloat16, True, True),
    ],
)  # fmt: skip
@torch.no_grad()
def test_rollouts_of_a_quantised_model_have_the_log_probs_of_its_forward_pass(
    tiny_path, tmp_path, bits, training, adapted, dtype, compute_dtype, autocast
):
    path = save_sharp(tiny_path, tmp_path)
    options = {"bnb_4bit_compute_dtype": compute_dtype} if bits == 4 else {}
    model = load_model(path, quantization_config=quantization(bits, **options), dtype=dtype)
    if adapted:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))
        generator = torch.Generator().manual_seed(0)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
    model.train(training)
    prompts = [[3, 4, 5], [6, 7], [3, 4, 5]]
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        done = rollout(model, prompts, max_new_tokens=6, eos_token_ids=[0], temperature=0.8)
        for prompt, ids, logps in zip(prompts, done.completion_ids, done.logps, strict=True):
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
            expected = (logits / 0.8).log_softmax(1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            is_half = autocast or torch.bfloat16 in (getattr(torch, dtype), compute_dtype)
            near = 0.1 if is_half or (bits == 8 and not training) else 1e-4  # a pass chooses its own outlier columns
            assert logps == pytest.approx(expected.tolist(), abs=near)
