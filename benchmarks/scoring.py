"""Time and memory of masked log-probs, entropies and gradients, compared with TRL's fused LM head.

    python benchmarks/scoring.py [--tokens 16384] [--hidden 576] [--vocabulary 49152 151936] [--device cuda]

Both score the same targets, forward and backward, in the same run. TRL's head computes the full vocabulary, ours only
the tokens that masks allow. `ratio` is TRL's time divided by ours, so above 1 ours is faster. There are 64 distinct
masks; each allows the given number of tokens, sampled from a shared pool of twice as many. Prints a table and writes
benchmarks/results/scoring.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trl.kernels import ChunkedLogProbFunction

from trl_grpo_tasks.constraints.base import pack
from trl_grpo_tasks.constraints.scoring import VOCAB_TILE, Head, HeadScale, masked_logps_and_entropies
from trl_grpo_tasks.constraints.table import FREE, MaskTable

DISTINCT_MASKS = 64


def make_masks(
    rng: np.random.Generator, tokens: int, vocabulary: int, allowed: int
) -> tuple[MaskTable, np.ndarray, np.ndarray]:
    """Return a mask table, and the mask number and an allowed target for every position."""
    table = MaskTable(vocabulary)
    if allowed >= vocabulary:
        return table, np.full(tokens, FREE), rng.integers(vocabulary, size=tokens)
    pool = rng.choice(vocabulary, min(2 * allowed, vocabulary), replace=False)
    members = [rng.choice(pool, allowed, replace=False) for _ in range(DISTINCT_MASKS)]
    numbers = []
    for ids in members:
        mask = np.zeros(vocabulary, dtype=bool)
        mask[ids] = True
        numbers.append(table.number_of(pack(mask)))
    chosen = rng.integers(DISTINCT_MASKS, size=tokens)
    targets = np.array([members[c][rng.integers(allowed)] for c in chosen])
    return table, np.array(numbers)[chosen], targets


def timed(function: Any, device: torch.device, repeats: int) -> tuple[float, float]:
    """Return the best time in milliseconds of `repeats` calls, and the additional peak memory in MB."""
    function()
    best = float("inf")
    peak = 0.0
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        best = min(best, time.perf_counter() - start)
    return best * 1e3, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=16384 if on_gpu else 256)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument(
        "--allowed", type=int, nargs="+", default=[16, 256, 1024, 4096, 40000, 0], help="0: all tokens"
    )
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--repeats", type=int, default=10 if on_gpu else 2)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    results = []
    print(f"{options.tokens} tokens, hidden size {options.hidden}, {dtype} on {device}, forward and backward")
    print(f"{'vocabulary':>10} {'allowed':>8} {'TRL ms':>9} {'ours ms':>9} {'ratio':>7} {'TRL MB':>8} {'ours MB':>8}")
    for vocabulary in options.vocabulary:
        hidden = torch.randn(options.tokens, options.hidden, device=device, dtype=dtype, requires_grad=True)
        weight = (torch.randn(vocabulary, options.hidden, device=device, dtype=dtype) / 24).requires_grad_()
        for allowed in options.allowed:
            allowed = allowed or vocabulary
            table, numbers, target_ids = make_masks(np.random.default_rng(0), options.tokens, vocabulary, allowed)
            targets = torch.from_numpy(target_ids).to(device)
            upstream = torch.randn(options.tokens, device=device)

            def trl_head(
                targets: Any = targets, weight: Any = weight, hidden: Any = hidden, upstream: Any = upstream
            ) -> None:
                out = ChunkedLogProbFunction.apply(
                    hidden, weight, None, targets, 1.0, VOCAB_TILE, None, 1.0, ("entropy",)
                )
                torch.autograd.grad((out[0] * upstream).sum(), [hidden, weight])

            def ours(
                targets: Any = targets,
                weight: Any = weight,
                hidden: Any = hidden,
                upstream: Any = upstream,
                numbers: Any = numbers,
                table: Any = table,
            ) -> None:
                logps, _ = masked_logps_and_entropies(hidden, Head(weight, None, HeadScale()), targets, numbers, table)
                torch.autograd.grad((logps * upstream).sum(), [hidden, weight])

            trl_ms, trl_mb = timed(trl_head, device, options.repeats)
            our_ms, our_mb = timed(ours, device, options.repeats)
            ratio = trl_ms / our_ms
            results.append({"vocabulary": vocabulary, "allowed": allowed, "trl_ms": trl_ms, "ours_ms": our_ms,
                            "ratio": ratio, "trl_mb": trl_mb, "ours_mb": our_mb})  # fmt: skip
            times = f"{trl_ms:>9.2f} {our_ms:>9.2f} {ratio:>7.2f}"
            print(f"{vocabulary:>10} {allowed:>8} {times} {trl_mb:>8.0f} {our_mb:>8.0f}")
    path = Path(__file__).parent / "results" / "scoring.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"device": str(device), "tokens": options.tokens, "results": results}, indent=1))


if __name__ == "__main__":
    main()
