"""Sampling of the next token of each row, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..constraints.filters import SamplingFilters, pack_on_device
from ..constraints.recording import PassMasks
from ..constraints.scoring import HeadScale
from ..constraints.table import FREE, MaskTable


@dataclass
class Sampled:
    """Sampled tokens on the device. `read` waits for them and returns tokens, log-probs and mask numbers by row."""

    tokens_B: torch.Tensor
    read: Callable[[], tuple[list[int], list[float], list[int]]]


class TokenSampler:
    """Samples tokens under masks and filters; the sets of tokens that filters keep are stored in `table`."""

    def __init__(self, uses_kernels: bool, is_greedy: bool, filters: SamplingFilters, table: MaskTable | None):
        self._uses_kernels, self._greedy, self._filters, self._table = uses_kernels, is_greedy, filters, table

    def sample(self, logits_B_V: torch.Tensor, scale: HeadScale, masks: PassMasks | None) -> Sampled:
        """Sample a token from each row of unscaled logits."""
        numbers = [FREE] * len(logits_B_V) if masks is None else masks.numbers
        read_kept = None
        if self._uses_kernels and not self._filters:
            from .kernels import sample

            packed = None if masks is None else (masks.words_N_W, masks.index_B)
            tokens_B, drawn_2_B = sample(logits_B_V, packed, *scale.factors, self._greedy)
        else:
            logits_B_V = scale.apply(logits_B_V.float())
            if masks is not None:
                masks.apply(logits_B_V)
            if self._filters:
                kept_B_V = self._filters.kept(logits_B_V)
                logits_B_V = logits_B_V.masked_fill(~kept_B_V, -torch.inf)
                read_kept = copy_to_cpu_async(pack_on_device(kept_B_V))
            logps_B_V = logits_B_V.log_softmax(1)
            tokens_B = logps_B_V.argmax(1) if self._greedy else torch.multinomial(logps_B_V.exp(), 1)[:, 0]
            logps_B = logps_B_V.gather(1, tokens_B[:, None])[:, 0]
            drawn_2_B = torch.stack((tokens_B.double(), logps_B.double()))
        read_drawn = copy_to_cpu_async(drawn_2_B)

        def read() -> tuple[list[int], list[float], list[int]]:
            tokens, logps = read_drawn().tolist()
            if read_kept is None:
                return list(map(int, tokens)), logps, numbers
            assert self._table is not None
            return list(map(int, tokens)), logps, self._table.numbers_of(read_kept().numpy())

        return Sampled(tokens_B, read)


def copy_to_cpu_async(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start a copy to the CPU and return a function that waits for it, but not for GPU work queued afterwards."""
    if values.device.type != "cuda":
        return values.cpu
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> torch.Tensor:
        arrived.synchronize()
        return host

    return wait
