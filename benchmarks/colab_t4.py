"""Peak memory and duration of all colab_t4 recipes under the memory of a T4.

    python benchmarks/colab_t4.py [--recipes brick/colab_t4 ...] [--steps 3] [--model 135M=FOLDER_OR_GGUF ...]

Each recipe runs in its own process with its own precision (fp16, where the model is a language model), and torch may
reserve at most --cap GB (1e9 bytes) of GPU memory. It runs a few steps of its cold start and --steps GRPO steps after
one warm-up step, without evaluations. Models are replaced by random weights of the same shape; --model gives real ones
by shape, and --hub loads what the recipes name. Columns: peak of reserved GB, seconds per GRPO step (median,
smallest-largest), seconds of preparation (rows, judges), seconds of the whole cold start and minutes of the whole
recipe, both extrapolated from the measured steps. The speed is that of the GPU it runs on, not of a T4. Without a GPU,
small models in float32 and smaller batches only test this script. Writes benchmarks/results/colab_t4.json.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from typing import Any

from harness import run_table, table_parser

from trl_grpo_tasks.commands.recipes import recipe_names

COLUMNS = {
    "recipe": "recipe",
    "precision": "precision",
    "peak GB": "reserved_gb",
    "step s": "step_s",
    "preparation s": "preparation_s",
    "cold start s": "cold_start_s",
    "steps": "steps",
    "minutes": "minutes",
}


def main() -> None:
    names = [name for name in recipe_names() if name.endswith("/colab_t4")]
    parser = table_parser(__doc__, __file__)
    parser.add_argument("--recipes", nargs="+", default=names, choices=names)
    parser.add_argument("--steps", type=int, default=3, help="measured GRPO steps")
    parser.add_argument("--cold_start_steps", type=int, default=10, help="measured steps of the cold start")
    parser.add_argument("--cap", type=float, default=15.0, help="GB of GPU memory")
    parser.add_argument("--model", nargs="+", default=[], metavar="SHAPE=PATH", help="real models, by shape")
    parser.add_argument("--hub", action="store_true", help="load the models that the recipes name")
    options = parser.parse_args()
    if not options.hub:
        os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        cells = [{"recipe": name} for name in options.recipes]
        run_table("colab_t4_cell", cells, options, COLUMNS, lambda row, _: extrapolated(row), folder=folder)


def extrapolated(row: dict[str, Any]) -> dict[str, float]:
    """Return the minutes of the whole recipe, if its steps were measured."""
    if "step_s" not in row:
        return {}
    seconds = row["preparation_s"] + row["steps"] * statistics.median(row["step_s"])
    return {"minutes": (seconds + row.get("cold_start_s", 0.0)) / 60}


if __name__ == "__main__":
    main()
