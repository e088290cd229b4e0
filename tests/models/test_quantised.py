"""Options of quantised bases, as the command line reads them."""

from types import SimpleNamespace

import pytest
import torch
from trl import ModelConfig

from tests.support.quantised import needs_bitsandbytes, quantization
from trl_grpo_tasks.models.loading import load_model
from trl_grpo_tasks.models.quantised import (
    check_output_head,
    is_quantised_model,
    keep_weights_unpacked,
    quantization_config,
)

pytestmark = needs_bitsandbytes


@pytest.mark.parametrize(
    ("dtype", "half", "expected"),
    [
        ("float32", None, torch.float32), ("float32", "bf16", torch.bfloat16), ("float32", "fp16", torch.float16),
        ("bfloat16", None, torch.bfloat16), ("auto", None, torch.float32), ("auto", "bf16", torch.bfloat16),
        (None, "fp16", torch.float16),
    ],
)  # fmt: skip
def test_4bit_products_are_in_the_precision_of_the_run(dtype, half, expected):
    args = SimpleNamespace(bf16=half == "bf16", fp16=half == "fp16")
    options = ModelConfig(load_in_4bit=True, dtype=dtype, use_bnb_nested_quant=True, bnb_4bit_quant_type="fp4")
    made = quantization_config(options, args)
    assert (made.load_in_4bit, made.bnb_4bit_compute_dtype) == (True, expected)
    assert (made.bnb_4bit_use_double_quant, made.bnb_4bit_quant_type) == (True, "fp4")
    assert options.dtype == dtype, "the dtype of the other weights is not changed"
    assert quantization_config(ModelConfig(load_in_8bit=True, dtype=dtype), args).load_in_8bit
    assert quantization_config(ModelConfig(dtype=dtype), args) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_the_lm_head_is_not_quantised_by_default(tiny_path, bits):
    model = load_model(tiny_path, quantization_config=quantization(bits))
    assert is_quantised_model(model) and type(model.lm_head) is torch.nn.Linear
    check_output_head(model)
    assert not is_quantised_model(load_model(tiny_path))


def test_weights_are_not_repacked_in_evaluations(tiny_path):
    """On CPUs with AVX512-BF16, bitsandbytes would repack them in a layout that is trained without a gradient."""
    model = load_model(tiny_path, quantization_config=quantization(4))
    flags = [part.support_avx512bf16_for_cpu for part in model.modules() if hasattr(part, "quant_state")]
    assert len(flags) == 7 and not any(flags)
    model.model.layers[0].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match=r"repacked the weights of this model for this CPU.*load it again"):
        keep_weights_unpacked(model)
