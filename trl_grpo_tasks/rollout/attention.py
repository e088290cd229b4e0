"""Selection of attention kernels."""

from __future__ import annotations

import torch


def disable_cudnn_attention() -> None:
    """Disable cuDNN attention in this process, so that torch uses one of its other attention kernels.

    From torch 2.11 on, cuDNN attention is the first choice on an H100 or H200. With a mask and a sequence length of 64
    modulo 128, its backward pass may return NaN (pytorch issue 196678), and one such batch destroys the weights. Two
    of six test runs on an H200 failed this way, after 10 and 20 steps.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
