"""The dtypes in which the decoder computes, and what it changes in torch."""

import copy

import pytest
import torch

from tests.support.rollouts import MODELS, Paged
from trl_grpo_tasks.rollout import Decoder


@pytest.mark.parametrize("kind", [Decoder, Paged])
def test_lm_head_stays_in_float32_with_cast_lm_head_to_fp32(kind):
    """With cast_lm_head_to_fp32, neither the weights of the LM head nor its logits are rounded to bf16."""
    outs, prompt = {}, (5, 6, 7)
    for in_fp32 in (False, True):
        decoder = kind(copy.deepcopy(MODELS["llama"]), head_in_fp32=in_fp32)
        with torch.autocast("cpu", dtype=torch.bfloat16), decoder.running([prompt], 8, 1.0), torch.no_grad():
            decoder.prefill([0], [prompt], [decoder.cache.add(0, prompt)])
            outs[in_fp32] = decoder.feed([0], [[7]], [2])[0].float()
    assert torch.equal(outs[False], outs[False].bfloat16().float())
    assert not torch.equal(outs[True], outs[True].bfloat16().float())
    torch.testing.assert_close(outs[True], outs[False], atol=0.3, rtol=0.05)


def test_decoder_disables_cudnn_attention():
    torch.backends.cuda.enable_cudnn_sdp(True)
    Decoder(MODELS["llama"])
    assert not torch.backends.cuda.cudnn_sdp_enabled()
