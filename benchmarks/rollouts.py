"""Rollouts and complete GRPO steps: TRL's generation, vLLM alone, TRL with colocated vLLM, and our rollouts.

    python benchmarks/rollouts.py [--shape tiny] [--ways trl ours] [--weights lora full] [--quantize 4bit]
                                  [--prompt_lengths 100] [--lengths 256] [--groups 8] [--texts free bricks JSON]

Shapes have random weights: tiny is a Llama like the embedded tiny models, 135M is SmolLM2's configuration, the others
are Qwen2.5's. --model FOLDER measures a real model instead. The ways are

    trl         TRL's GRPOTrainer with transformers' generate
    trl+vllm    TRL's GRPOTrainer with vLLM in the same process (colocate); under a constraint, our trainer with it
    vllm        vLLM's LLM.generate without a trainer, full weights
    ours alone  our rollouts without a trainer
    ours        our trainer

Without a constraint every completion has its full length. Each row is a process of its own, with one warm-up and
--repeats measured rollouts or steps: median (smallest-largest). Start-up is what the constructor of the trainer or of
the engine and the warm-up take longer than a measured step; vLLM reads no weights from disk, and compilation caches
of earlier runs are used. Peak GB is the process's peak of allocated memory, device GB is what is in use on the GPU at
the end, with vLLM's pool. Ratios above 1 mean faster: rollouts against vllm, steps against trl+vllm, each against trl
where that is not measured. Texts under a constraint: brick lines under a choice tree, with about half of the tokens
forced; a long JSON object under its schema, with most tokens forced. Rows are printed and written as JSON at once; the
output of the processes is in a .log file next to it.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import tempfile
from typing import Any

from harness import SHAPES, run_table, table_parser

TEXTS = ("free", "bricks", "JSON")
WAYS = ("vllm", "trl+vllm", "trl", "ours alone", "ours")  # in this order, so that ratios are known at once
KEYS = ("shape", "weights", "text", "prompt", "group", "length")
COLUMNS = {key: key for key in (*KEYS, "way")} | {
    "rollout s": "rollout_s",
    "rollout ratio": "rollout_ratio",
    "step s": "step_s",
    "step ratio": "step_ratio",
    "tokens/s": "tokens_per_s",
    "start-up s": "start_up_s",
    "peak GB": "peak_gb",
    "device GB": "device_gb",
}


def main() -> None:
    parser = table_parser(__doc__, __file__)
    parser.add_argument("--shape", nargs="+", default=["tiny"], choices=list(SHAPES))
    parser.add_argument("--model", help="model folder, instead of a shape")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="dtype of the weights (default: bfloat16 for shapes on a GPU, else float32)")  # fmt: skip
    parser.add_argument("--quantize", choices=["4bit", "8bit"], help="bitsandbytes weights, with LoRA")
    parser.add_argument("--weights", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--ways", nargs="+", default=["trl", "ours"], choices=WAYS)
    parser.add_argument("--prompt_lengths", nargs="+", type=int, default=[100])
    parser.add_argument("--texts", nargs="+", choices=TEXTS, help="default: free for large shapes, else all")
    parser.add_argument("--groups", nargs="+", type=int, default=[8], help="completions per prompt")
    parser.add_argument("--lengths", nargs="+", type=int, default=[256], help="maximum tokens per completion")
    parser.add_argument("--prompts", type=int, default=8, help="distinct prompts per step")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps after one warm-up step")
    parser.add_argument("--vllm_memory", type=float, default=0.3, help="fraction of the GPU that vLLM may use")
    options = parser.parse_args()
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

    ways = [way for way in WAYS if way in options.ways]
    for way in [way for way in ways if "vllm" in way]:
        reason = importlib.util.find_spec("vllm") is None and "vLLM is not installed"
        if reason := reason or (options.quantize and "it is not measured with quantised weights"):
            print(f"skipped: {way}, because {reason}")
            ways.remove(way)
    shapes = ["model"] if options.model else options.shape
    weights = ["lora"] if options.quantize else options.weights
    texts = options.texts or (TEXTS if shapes in (["model"], ["tiny"]) else ["free"])
    cells = [
        dict(zip(KEYS, values, strict=True)) | {"way": way}
        for *values, way in itertools.product(
            shapes, weights, texts, options.prompt_lengths, options.groups, options.lengths, ways
        )
        if way not in ("vllm", "ours alone") or values[2] == "free"  # trainers sample under our constraints
        if way != "vllm" or values[1] == weights[-1]  # once per shape
    ]
    cells.sort(key=lambda cell: (shapes.index(cell["shape"]), WAYS.index(cell["way"]) > 0))  # vLLM before all ratios
    with tempfile.TemporaryDirectory() as folder:
        run_table("rollout_ways", cells, options, COLUMNS, derived, folder=folder)


def derived(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios of a row. vLLM alone has full weights, whatever the others have."""
    weights = {"weights": "full"} if row["way"] == "vllm" else {}
    return weights | ratios(row | weights, rows)


def ratios(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return how many times as fast as the baseline the rollouts and the steps of a row are."""
    found: dict[str, float] = {}
    for kind, baselines in (("rollout_s", ("vllm", "trl")), ("step_s", ("trl+vllm", "trl"))):
        for baseline in (one for way in baselines for one in rows if one["way"] == way):
            same = all(baseline[key] == row[key] or (baseline["way"], key) == ("vllm", "weights") for key in KEYS)
            if same and row.get(kind) and baseline.get(kind):
                ratio = statistics.median(baseline[kind]) / statistics.median(row[kind])
                found.setdefault(kind.replace("_s", "_ratio"), ratio)
    return found


if __name__ == "__main__":
    main()
