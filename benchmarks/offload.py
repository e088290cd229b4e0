"""What --offload_reference costs and saves: time per use, time per ema update, and GPU memory.

    python benchmarks/offload.py [--shape 1.5B 7B] [--dtypes bfloat16 float32]

A policy and a reference with random weights, without training. `use s` is the time until the weights of an offloaded
reference are on the GPU, which each use adds. `update s` is an ema update of the offloaded reference, and `update on
GPU s` that of one that stays on the GPU. `saved GB` (10^9 bytes) is how much less GPU memory is in use between uses,
with the float32 average of a bf16 reference. Median (smallest-largest) of --repeats. Needs a GPU to mean anything.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from harness import SHAPES, Report, config_of, now, random_model, run_table, table_parser

from trl_grpo_tasks.training.extras.moving_reference import MovingReference
from trl_grpo_tasks.training.reference import Offloaded

COLUMNS = {
    "shape": "shape",
    "dtype": "dtype",
    "use s": "use_s",
    "update s": "update_s",
    "update on GPU s": "update_on_gpu_s",
    "saved GB": "saved_gb",
}


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = table_parser(__doc__, __file__)
    parser.add_argument("--shape", nargs="+", default=["1.5B", "7B"] if on_gpu else ["tiny"], choices=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    cells = [{"shape": shape, "dtype": dtype} for shape, dtype in itertools.product(options.shape, options.dtypes)]
    run_table("offload", cells, options, COLUMNS)


def measure(report: Report, options: Any, shape: str, dtype: str) -> None:
    """Measure one row."""
    policy, reference = (random_model(config_of(shape, dtype)) for _ in range(2))
    moving = MovingReference("ema", policy, reference, 0.9, 1)
    update_on_gpu = [seconds(moving.update) for _ in range(options.repeats + 1)][1:]
    before = in_use()
    del moving
    offloaded = Offloaded(reference)
    moving = MovingReference("ema", policy, reference, 0.9, 1)
    updates = [seconds(moving.update) for _ in range(options.repeats + 1)][1:]
    saved = (before - in_use()) / 1e9

    def use() -> None:
        with offloaded.on_device():
            now()  # waits for the GPU

    uses = [seconds(use) for _ in range(options.repeats + 1)][1:]
    report({"use_s": uses, "update_s": updates, "update_on_gpu_s": update_on_gpu, "saved_gb": saved})


def seconds(call: Any) -> float:
    start = now()
    call()
    return now() - start


def in_use() -> int:
    """Bytes of GPU memory in use."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    main()
