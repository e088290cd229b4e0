"""Quantised weights on a GPU: bitsandbytes chooses other kernels there, by the number of tokens."""

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch.nn.functional import linear

from tests.support.quantised import needs_bitsandbytes, quantization, save_sharp
from tests.support.toy import ToyTask
from tests.support.training import config
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.rollout.quantised import activation_threshold, dense_weight, round_activations

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), needs_bitsandbytes]
HALVES = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-9}  # of the largest output
WIDTH = 1024


@pytest.fixture(scope="module")
def sharp_path(tiny_path, tmp_path_factory):
    return save_sharp(tiny_path, tmp_path_factory.mktemp("sharp"))


def activations(tokens, dtype, outliers=False):
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1))
    if outliers:
        x[:, 7] *= 10
        x[tokens // 2, 30] = -40
    return x.to("cuda", dtype)


@pytest.mark.parametrize("tokens", [1, 5, 64, 2048])
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@torch.no_grad()
def test_a_4bit_layer_is_the_product_of_its_dense_weight(dtype, kind, nested, tokens):
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer = Linear4bit(WIDTH, 512, bias=False, compute_dtype=dtype, compress_statistics=nested, quant_type=kind)
    layer = layer.to(dtype).to("cuda")
    weight, x = dense_weight(layer, dtype), activations(tokens, dtype)
    assert weight.equal(dequantize_4bit(layer.weight.data, layer.weight.quant_state))
    expected = layer(x)
    error = (linear(x, weight) - expected).abs().max() / expected.abs().max()
    assert error < ROUNDING[dtype]


@pytest.mark.parametrize("outliers", [False, True], ids=["", "outliers"])
@pytest.mark.parametrize("tokens", [1, 64, 2048])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@torch.no_grad()
def test_an_8bit_layer_is_the_product_of_rounded_activations(dtype, tokens, outliers):
    from bitsandbytes.nn import Linear8bitLt

    torch.manual_seed(0)
    layer = Linear8bitLt(WIDTH, 512, bias=False, has_fp16_weights=False, threshold=6.0).to("cuda")
    x = activations(tokens, dtype, outliers)
    # The kernel moves a few activations that lie between two integers (next test). Each changes an output by about
    # 0.001, which counts beside the rounding of fp16: twice that rounding is allowed.
    near = {torch.bfloat16: ROUNDING[torch.bfloat16], torch.float16: 2 * ROUNDING[torch.float16]}[dtype]
    for training in (True, False):  # unlike on a CPU, the mode makes no difference
        layer.train(training)
        assert activation_threshold(layer) == 6.0
        expected = layer(x)
        error = (linear(round_activations(x, 6.0), dense_weight(layer, dtype)) - expected).abs().max()
        assert error / expected.abs().max() < near


def test_rounded_activations_are_the_int8_values_of_bitsandbytes():
    """Its kernel divides with an approximate instruction, which moves a few values that lie between two integers."""
    from bitsandbytes.functional import int8_vectorwise_quant

    x = activations(512, torch.float16, outliers=True)
    integers, largest, columns = int8_vectorwise_quant(x, threshold=6.0)
    expected = integers.float() * (largest[:, None] / 127)
    expected[:, columns] = x[:, columns].float()
    steps = (round_activations(x.float(), 6.0) - expected).abs() / (largest[:, None] / 127)
    assert steps.max() < 1.01 and (steps > 0.01).float().mean() < 1e-3


def test_rounding_is_captured_in_a_cuda_graph():
    x = activations(64, torch.bfloat16)
    round_activations(x, 6.0)  # a first call outside, which loads kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rounded = round_activations(x, 6.0)
    x.copy_(activations(64, torch.bfloat16, outliers=True))
    graph.replay()
    assert rounded.equal(round_activations(x, 6.0))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("engine", ["fast", "trl"])
@pytest.mark.parametrize("options", [{}, {"constrain": True, "share_prompts": True}], ids=str)
def test_rollouts_are_scored_as_they_were_sampled(sharp_path, tmp_path, capsys, options, engine, precision, bits):
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    quantized = quantization(bits, bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True)
    args = config(
        tmp_path, use_cpu=False, rollout=engine, temperature=0.8, max_steps={"bf16": 4, "fp16": 12}[precision],
        model_init_kwargs={"dtype": "float32"}, **{precision: True}, **options,
    )  # fmt: skip
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
    trainer = TaskGRPOTrainer(
        sharp_path, args=args, task=ToyTask(), peft_config=adapter, quantization_config=quantized
    )
    assert "because" not in capsys.readouterr().out, "nothing falls back"
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    near = {"bf16": 0.05, "fp16": 0.01}[precision]
    assert all(line["sampling/logp_difference_mean"] < near for line in logs)
    # In fp16, the gradient scaler starts at 65,536 and halves its scale whenever it skips a step that overflows. In
    # float32, gradients of this model's activations reach 16, so that about five steps are skipped.
    finite = [np.isfinite(line["grad_norm"]) for line in logs]
    assert all(finite) if precision == "bf16" else sum(finite) >= 6
    weights = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert any(weight.any() for name, weight in weights.items() if "lora_B" in name)
