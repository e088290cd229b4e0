"""Time of a training pass without padding and with shared prompts, compared with one over padded rows.

    python benchmarks/packing.py [--shapes tiny 135M] [--layers 4] [--device cuda] [--lora]

Both run the same model over the same rows, forward and backward, in turns in the same run. Columns: padded tokens
divided by packed ones; time of the padded pass divided by that of the packed one, so that above 1 packing is faster;
on a GPU, the peak memory of both. Prints a table and writes benchmarks/results/packing.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from harness import add_lora, config_of, random_model, shown, table_line, write_results

from trl_grpo_tasks.models import shared_prompts

# Prompts, completions of each, and the mean length of prompts and completions; lengths vary by a third.
WORKLOADS = {
    "brick demo": (32, 4, 24, 28),
    "GSM8K": (2, 8, 100, 200),
    "GSM8K, 64 rows": (8, 8, 100, 200),
    "long prompts": (1, 8, 900, 256),
}


def make_batch(workload: str, device: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return token ids and mask of left-padded prompts and right-padded completions, and the length of the latter."""
    groups, size, prompt, completion = WORKLOADS[workload]
    generator = torch.Generator().manual_seed(0)

    def lengths(mean: int, count: int) -> list[int]:
        return (mean * (2 / 3 + 2 / 3 * torch.rand(count, generator=generator))).int().tolist()

    prompts, completions = lengths(prompt, groups), lengths(completion, groups * size)
    width, length = max(prompts), max(completions)
    ids, mask = torch.zeros(2, groups * size, width + length, dtype=torch.int64)
    for row, own in enumerate(completions):
        before = prompts[row // size]
        ids[row, width - before : width] = torch.arange(before) % 90 + row // size % 9 + 1
        ids[row, width : width + own] = torch.randint(1, 99, (own,), generator=generator)
        mask[row, width - before : width + own] = 1
    return ids.to(device), mask.to(device), length


def measure(shape: str, layers: int, workload: str, device: str, repeats: int, lora: bool) -> dict[str, Any]:
    config = config_of(shape, "bfloat16" if device == "cuda" else "float32")
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    model: Any = random_model(config).to(device)
    packing = shared_prompts.SharedPrompts()
    assert packing.add_to(model) is None
    if lora:
        add_lora(model)
    shared_prompts.LEAST_WORK_ON_GPU = 0  # measure what would not be packed, too
    shared_prompts.MAX_TOKEN_FRACTION = 1.0
    peaks = {}
    ids, mask, length = make_batch(workload, device)
    packed = shared_prompts._Packing.of(ids, mask, length)
    assert packed is not None

    def seconds(fraction: float) -> float:
        shared_prompts.MAX_TOKEN_FRACTION = fraction
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        with packing.open(length):
            states = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        (states[:, -length - 1 :] * mask[:, -length - 1 :, None]).float().square().sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
            peaks[fraction] = torch.cuda.max_memory_allocated() / 1e9
        return time.perf_counter() - start

    turns = [(seconds(0.0), seconds(1.0)) for _ in range(repeats + 1)][1:]
    padded, without = (statistics.median(times) for times in zip(*turns, strict=True))
    tokens = ids.numel() / packed.inputs["input_ids"].numel()
    return {"shape": shape, "layers": config.num_hidden_layers, "workload": workload, "tokens": tokens,
            "device": device, "threads": torch.get_num_threads(),
            "padded_s": padded, "packed_s": without, "ratio": padded / without,
            "padded_gb": peaks.get(0.0), "packed_gb": peaks.get(1.0)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["tiny", "135M"])
    parser.add_argument("--layers", type=int, default=4, help="at most this many layers of the model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16 instead of all weights")
    given = parser.parse_args()
    print("| model | layers | rows | padded / packed tokens | padded / packed time | padded GB | packed GB |")
    print("|---" * 7 + "|")
    rows = []
    for shape in given.shapes:
        for workload in WORKLOADS:
            try:
                rows.append(measure(shape, given.layers, workload, given.device, given.repeats, given.lora))
            except torch.OutOfMemoryError:
                print(table_line([shape, "", workload, "", "out of memory", "", ""]), flush=True)
                continue
            cells = (
                rows[-1][name] for name in ("shape", "layers", "workload", "tokens", "ratio", "padded_gb", "packed_gb")
            )
            print(table_line([shown(cell) for cell in cells]), flush=True)
    write_results(Path(__file__).parent / "results" / "packing.json", rows)


if __name__ == "__main__":
    main()
