"""Estimated time of a GRPO step with full weights on many GPUs. Nothing is measured: the numbers are computed.

    python benchmarks/step_time.py [--completions 64] [--prompt 512] [--length 1024] [--gpus 8 64 512]

Every GPU generates and trains `--completions` completions per step, so that a step grows with the number of GPUs. The
GPUs are H200 in nodes of eight, weights and optimizer are sharded over all of them, and each GPU gathers a bf16 copy
of the weights for its rollout. A copy that does not fit is split over two or more GPUs of a node (tensor parallelism
of vLLM). The assumptions are the constants below. MEASURED compares the formulas with steps on one GPU.
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

GB, TERA = 1e9, 1e12

# One H200.
MEMORY = 141 * GB
BANDWIDTH = 4.8 * TERA * 0.7  # bytes per second that kernels reach when they read weights and caches
FLOPS = 989 * TERA * 0.4  # bf16 operations per second that training reaches
NODE = 8
WITHIN_NODE = 450 * GB * 0.7  # bytes per second and GPU over NVLink
BETWEEN_NODES = 50 * GB * 0.7  # 400 Gbit/s per GPU
COLLECTIVE = 30e-6  # seconds per collective and GPU-to-GPU hop in a tree

# Work per token and parameter: 2 operations in the forward pass, 4 in the backward pass, 2 for recomputation.
TRAINING_OPERATIONS = 8
LAYER_OVERHEAD = 45e-6  # seconds per layer and decode pass for small kernels
STATE_BYTES = 16  # per parameter: float32 weights, gradient, two moments of Adam
MICRO_BATCH = 8  # completions per forward and backward pass
COPY_SHARE = 0.75  # of the free memory that a bf16 copy may take; the KV cache needs the rest


class Shape(NamedTuple):
    """Sizes of a model; those of Qwen2.5."""

    parameters: float
    layers: int
    kv_heads: int
    head_size: int

    @property
    def cache_bytes(self) -> int:
        """Bytes per token in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2


SHAPES = {
    "1.5B": Shape(1.54e9, 28, 2, 128),
    "7B": Shape(7.62e9, 28, 4, 128),
    "32B": Shape(32.8e9, 64, 8, 128),
}

# Median seconds on one H200, 64 completions of 256 tokens, 8 prompts of 100 (docs/results/speed.md): rollout with full
# weights; the rest of a step with LoRA.
MEASURED = {"1.5B": (0.62, 0.80), "7B": (1.41, 2.15)}


class Estimate(NamedTuple):
    """Seconds of the parts of a step, and over how many GPUs a copy of the weights is split for the rollout."""

    gather: float
    rollout: float
    training: float
    split: int

    @property
    def step(self) -> float:
        return self.gather + self.rollout + self.training


def estimate(shape: Shape, gpus: int, completions: int, prompt: int, length: int) -> Estimate:
    """Estimate a step in which every GPU has `completions` completions."""
    return Estimate(
        gather=gather_seconds(2 * shape.parameters, gpus, collectives=shape.layers),
        rollout=rollout_seconds(shape, split := split_of(shape, gpus), completions, prompt, length),
        training=training_seconds(shape, gpus, completions, completions * (prompt + length)),
        split=split,
    )


def split_of(shape: Shape, gpus: int) -> int:
    """Return over how many GPUs of a node a bf16 copy must be split, so that it fits beside the training state."""
    free = MEMORY * 0.9 - STATE_BYTES * shape.parameters / gpus
    return next(n for n in (1, 2, 4, NODE) if 2 * shape.parameters / n <= COPY_SHARE * free)


def gather_seconds(size: float, gpus: int, collectives: int) -> float:
    """Return the time until every GPU has received all `size` bytes, of which it holds 1/gpus."""
    link = WITHIN_NODE if gpus <= NODE else BETWEEN_NODES
    hops = math.ceil(math.log2(gpus)) if gpus > 1 else 0
    return size * (gpus - 1) / gpus / link + collectives * hops * COLLECTIVE


def rollout_seconds(shape: Shape, split: int, completions: int, prompt: int, length: int) -> float:
    """Return the time to generate. Prompts are read once per group of 8."""
    weights = 2 * shape.parameters / split / BANDWIDTH
    together = completions * split  # the GPUs of a copy share their completions
    products = 2 * shape.parameters * together / split / FLOPS
    cache = together * (prompt + length / 2) * shape.cache_bytes / split / BANDWIDTH
    between = 2 * shape.layers * math.log2(split) * COLLECTIVE
    prefill = 2 * shape.parameters * together / 8 * prompt / split / FLOPS
    return length * (max(weights, products) + cache + between + shape.layers * LAYER_OVERHEAD) + prefill


def training_seconds(shape: Shape, gpus: int, completions: int, tokens: int) -> float:
    """Return the time of forward and backward passes. Communication overlaps with them and counts if it is longer."""
    compute = TRAINING_OPERATIONS * shape.parameters * tokens / FLOPS
    if gpus == 1:
        return compute
    passes = math.ceil(completions / MICRO_BATCH)
    weights = gather_seconds(2 * shape.parameters, gpus, shape.layers)
    gradient = gather_seconds(4 * shape.parameters, gpus, shape.layers)  # reduce-scatter of float32
    return max(compute, passes * (2 * weights + gradient))


def table(gpus: list[int], completions: int, prompt: int, length: int) -> str:
    """Return the estimates as a Markdown table."""
    lines = ["| model | GPUs | completions per step | gather s | rollout s | training s | step s | completions/s |"]
    lines.append("|---" * 8 + "|")
    for name, shape in SHAPES.items():
        for count in gpus:
            parts = estimate(shape, count, completions, prompt, length)
            split = f", copy over {parts.split} GPUs" if parts.split > 1 else ""
            total = count * completions
            lines.append(
                f"| {name} | {count} | {total:,} | {parts.gather:.2f} | {parts.rollout:.1f}{split} | "
                f"{parts.training:.1f} | {parts.step:.1f} | {total / parts.step:,.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--completions", type=int, default=64, help="per GPU and step")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--length", type=int, default=1024, help="tokens per completion")
    options = parser.parse_args()
    print(table(options.gpus, options.completions, options.prompt, options.length))


if __name__ == "__main__":
    main()
