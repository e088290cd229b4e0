"""Our rollouts without a trainer: large and uneven batches, and how time and memory grow with their sizes.

    python benchmarks/workloads.py [--shape 1.5B] [--workloads rows long mixed short shared] [--scale 1]
    python benchmarks/workloads.py --sweep rows length vocabulary parameters

The workloads are 1,024 rows of 2,048 tokens; 64 rows of 16k tokens, of which 15k are distinct prompts; 256 prompts of
10 to 4,000 tokens (log-uniform); 4,096 prompts of 20 tokens with 32 new tokens each; one 16k-token prompt with 64
completions of 256 tokens. --scale multiplies their numbers of rows and tokens. A sweep starts from 64 rows of 256
tokens after prompts of 100 tokens and changes one number. Weights are random, and completions have full length.
The warm-up is the same rollout once; its time is the start-up. Prints a Markdown
table and writes benchmarks/results/workloads.json after each row.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from harness import (
    SHAPES,
    Report,
    add_lora,
    config_of,
    memory,
    now,
    random_model,
    random_prompts,
    run_table,
    table_parser,
)

from trl_grpo_tasks.rollout import Decoder, rollout

# Number of prompts, shortest and longest prompt, completions per prompt, new tokens per completion.
WORKLOADS = {
    "rows": (128, 100, 100, 8, 2048),
    "long": (64, 15360, 15360, 1, 1024),
    "mixed": (256, 10, 4000, 1, 256),
    "short": (4096, 20, 20, 1, 32),
    "shared": (1, 16384, 16384, 64, 256),
}
SWEEPS: dict[str, list[Any]] = {
    "rows": [16, 64, 256, 1024],
    "length": [128, 512, 2048],
    "vocabulary": [32_000, 64_000, 128_000, 256_000],
    "parameters": ["135M", "0.5B", "1.5B", "7B"],
}
COLUMNS = {
    "workload": "workload",
    "shape": "shape",
    "weights": "weights",
    "rows": "rows",
    "prompt tokens": "prompt_tokens",
    "new tokens": "new_tokens",
    "seconds": "seconds",
    "tokens/s": "tokens_per_s",
    "start-up s": "start_up_s",
    "peak GB": "peak_gb",
    "device GB": "device_gb",
    "passes": "passes",
    "batch size": "batch_size",
}


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = table_parser(__doc__, __file__)
    parser.add_argument("--shape", default="1.5B" if on_gpu else "tiny", choices=list(SHAPES))
    parser.add_argument("--weights", default="lora", choices=["lora", "full"])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--sweep", nargs="+", default=[], choices=list(SWEEPS), help="instead of the workloads")
    parser.add_argument("--scale", type=float, default=1.0 if on_gpu else 0.01, help="factor of rows and tokens")
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32", help="dtype of the weights")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    base = {"shape": options.shape, "weights": options.weights, "vocabulary": None}
    cells = [
        {**base, "workload": f"{sweep} {value}", **point(sweep, value)}
        for sweep in options.sweep
        for value in SWEEPS[sweep]
    ]
    cells = cells or [{**base, "workload": name, "sizes": WORKLOADS[name]} for name in options.workloads]
    run_table("workloads", cells, options, COLUMNS)


def point(sweep: str, value: Any) -> dict[str, Any]:
    """Return the cell of a sweep at `value`: 8 completions per prompt, and all other numbers at their base."""
    rows = value if sweep == "rows" else 64
    cell: dict[str, Any] = {"sizes": (rows // 8, 100, 100, 8, value if sweep == "length" else 256)}
    return cell | {"parameters": {"shape": value}, "vocabulary": {"vocabulary": value}}.get(sweep, {})


def measure(
    report: Report, options: Any, workload: str, sizes: tuple[int, ...], shape: str, weights: str,
    vocabulary: int | None,
) -> None:  # fmt: skip
    """Measure one row."""
    count, shortest, longest, group, length = (max(1, round(options.scale * size)) for size in sizes)
    rng = random.Random(0)
    lengths = [round(math.exp(rng.uniform(math.log(shortest), math.log(longest)))) for _ in range(count)]
    prompts = [ids for ids in random_prompts(lengths) for _ in range(group)]
    report({"rows": len(prompts), "prompt_tokens": sum(lengths), "new_tokens": length})
    model = random_model(config_of(shape, options.dtype, vocabulary)).eval()
    model = add_lora(model) if weights == "lora" else model
    decoder = Decoder(model)
    kind = model.device.type

    def seconds() -> tuple[float, Any]:
        start = now()
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):  # as the trainer does
            done = rollout(model, prompts, max_new_tokens=length, eos_token_ids=[], decoder=decoder)
        return now() - start, done

    report({"start_up_s": seconds()[0], **memory()})  # a whole rollout, because each new size records a CUDA graph
    taken = []
    for _ in range(options.repeats):
        took, done = seconds()
        taken.append(took)
        report(
            {
                "seconds": taken,
                "tokens_per_s": sum(map(len, done.completion_ids)) / took,
                "passes": done.forward_passes,
                "batch_size": getattr(done, "batch_size", None),
                **memory(),
            }
        )


if __name__ == "__main__":
    main()
