"""CUDA graphs of passes. A graph is captured when its size is used for the first time.

Graphs read weights in place and find the KV cache through its addresses, so that training between rollouts needs no
recapture and the cache can be freed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ..constraints.scoring import HeadScale
from .cache import OVERRUN
from .compiled import CompiledLayers

# The number of tokens of a pass is padded to one of these. Larger passes are not captured.
TOKEN_BUCKETS = [8, *(size for power in range(4, 12) for size in (2**power, 3 * 2 ** (power - 1)))]
PADDING = [[0], [-1], [0]]  # token, cache slot and position of a token that fills up a pass; it writes no cache
STEPS = OVERRUN // 2  # tokens that a row gets before the CPU looks at them; its end is noticed one round later
HEAD_ROWS = 256  # rows whose logits exist at a time within a captured step


class PassGraph(NamedTuple):
    """A pass over new tokens."""

    graph: torch.cuda.CUDAGraph
    hidden_T_H: torch.Tensor  # the result
    entry_3_T: torch.Tensor  # token, cache slot and position of each token


class StepGraph(NamedTuple):
    """A step of generation: a pass over one token per row, after which the sampled tokens are the next input."""

    graph: torch.cuda.CUDAGraph
    entry_3_B: torch.Tensor  # token, cache slot and position of each row
    step: torch.Tensor  # number of the next step
    seeds_S_B: torch.Tensor
    drawn_S_2_B: torch.Tensor  # tokens and log-probs of all steps


class Graphs:
    """The graphs of a model. `forward` maps an entry to hidden states, `head` hidden states to logits."""

    def __init__(
        self,
        forward: Callable[[torch.Tensor], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
        compiled: CompiledLayers | None,
        device: torch.device,
    ):
        self._forward, self._head, self._compiled, self._device = forward, head, compiled, device
        self._passes: dict[int, PassGraph] = {}
        self._steps: dict[tuple[int, HeadScale, bool], StepGraph] = {}
        self._pool: Any = None

    def of_pass(self, tokens: int) -> PassGraph:
        """Return the graph of a pass over this number of tokens."""
        if tokens not in self._passes:
            entry = self._padding(tokens)
            self._passes[tokens] = PassGraph(*self.capture(lambda: self._forward(entry)), entry)
        return self._passes[tokens]

    def of_step(self, rows: int, scale: HeadScale, is_greedy: bool) -> StepGraph:
        """Return the graph of a step of generation for this number of rows."""
        key = (rows, scale, is_greedy)
        if key not in self._steps:
            from .kernels import sample

            entry = self._padding(rows)
            step = torch.zeros(1, dtype=torch.int64, device=self._device)
            seeds_S_B = torch.zeros(STEPS, rows, dtype=torch.int64, device=self._device)
            drawn_S_2_B = torch.zeros(STEPS, 2, rows, dtype=torch.float64, device=self._device)

            def run() -> None:
                hidden, seeds_B = self._forward(entry), seeds_S_B.index_select(0, step % STEPS)[0]
                for begin in range(0, rows, HEAD_ROWS):
                    part = slice(begin, begin + HEAD_ROWS)
                    logits = self._head(hidden[part])
                    entry[0, part], drawn_2_B = sample(logits, None, *scale.factors, is_greedy, seeds_B[part])
                    drawn_S_2_B[:, :, part].index_copy_(0, step % STEPS, drawn_2_B[None])
                entry[2] += entry[1] >= 0
                step.add_(1)

            graph, _ = self.capture(run)
            self._steps[key] = StepGraph(graph, entry, step, seeds_S_B, drawn_S_2_B)
        return self._steps[key]

    def drop(self) -> None:
        """Forget all graphs."""
        self._passes, self._steps, self._pool = {}, {}, None

    def capture(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Run a function once, then capture it. Returns the graph and the result of the function."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with self._compiled.used() if self._compiled else nullcontext():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                result = function()
        return graph, result

    def _padding(self, tokens: int) -> torch.Tensor:
        return torch.tensor(PADDING, device=self._device).repeat(1, tokens)
