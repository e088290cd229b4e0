"""Which kernels compute attention."""

from __future__ import annotations

import torch


def disable_cudnn_attention() -> None:
    """Let torch choose among its other attention kernels, in this process.

    From torch 2.11 on cuDNN's come first on an H100 or H200. Given a mask, and a sequence that is 64 longer than a
    multiple of 128, their backward pass may give NaN (pytorch issue 196678), and one such batch spoils the weights: of
    six runs of ours on an H200 two ended so, after 10 and 20 steps.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
