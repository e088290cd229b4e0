"""Real models at equal wall-clock time: TRL, TRL with vLLM and this package on the same rows, rewards and seeds.

    python benchmarks/real/prepare.py gsm8k --out data              # once (see prepare.py)
    python benchmarks/real/compare.py benchmarks/real/gsm8k.yaml --models 0.5B=Qwen/Qwen2.5-0.5B-Instruct \
        --data data --out outputs/real [--ways TRL ours] [--seeds 1] [--minutes 10] [--rows choose] [--parallel 3]

A table is a YAML file: the task with its options, the options that differ for the held-out rows, ways, seeds, minutes,
and settings of training. A way names its trainer, `trl`, `trl+vllm` or `ours`, with further settings, and `control:
random` replaces its rewards by random numbers. All trainers train the same LoRA on the same rows in the same order,
with rewards from the same workers, until `minutes` of training have passed. The clock runs from the first step on and
stands still during evaluations, which take place at `marks` (minutes) and at the end, with the same sampler for all
ways. The untrained model is evaluated once. Starting vLLM is not counted; it is listed.

A cell is a model, a way and a seed, in a process of its own; with --parallel, so many at a time, which share the GPU
and so make fewer steps in their minutes. Finished cells are kept in --out, so that the same command resumes a table.
Settings are chosen on half of the held-out requests (--rows choose) and reported on the others, or, if none was
chosen, on all (--rows all).

Writes to --out/TABLE: logs/CELL.jsonl, a line per step; CELL.json; table.md with 95% intervals from a bootstrap over
seeds and requests; curves.png, held-out success over minutes and over generated tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

import learning
from harness import PROJECTIONS, Report, memory, now, run_cells, table_line

TRAINERS = ("trl", "trl+vllm", "ours")
KEYS = {"task", "options", "evaluation", "constrain", "rows", "samples", "train_rows", "minutes", "marks", "seeds",
        "ways", "lora", "settings", "max_completion_length"}  # fmt: skip
OPTIONAL = {"options": {}, "evaluation": {}, "constrain": False, "lora": {"r": 32, "lora_alpha": 64}, "marks": []}
EVALUATION_SEED = 4242
EVALUATION_ROWS = 512  # completions at a time: other cells may share the GPU
START = "start"
COMMAND_LINE = {"rollout": "auto", "share_prompts": True}  # as `train` sets them for our trainer


def read_table(path: Path) -> dict[str, Any]:
    """Read a table; ValueError for what is missing or unknown."""
    table = OPTIONAL | yaml.safe_load(path.read_text())
    if wrong := set(table) ^ KEYS:
        raise ValueError(f"{path}: {', '.join(sorted(wrong))} unknown or missing; the keys are {sorted(KEYS)}")
    for name, way in table["ways"].items():
        if way.get("trainer") not in TRAINERS:
            raise ValueError(
                f"{path}: way {name!r} has trainer {way.get('trainer')!r}; trainers are {', '.join(TRAINERS)}"
            )
    return table


def made_task(table: dict[str, Any], data: str, is_evaluation: bool) -> Any:
    """The task of the table; a file among its options lies in the folder of the data."""
    from trl_grpo_tasks.registry import get_task

    options = table["options"] | (table["evaluation"] if is_evaluation else {})
    if "prompts_file" in options:
        options = options | {"prompts_file": str(Path(data) / options["prompts_file"])}
    return get_task(table["task"], options)


def held_out(table: dict[str, Any], data: str) -> tuple[Any, list[dict[str, Any]]]:
    """The task and the rows of evaluations. A table with `evaluation` options has a data set of held-out rows."""
    task = made_task(table, data, is_evaluation=True)
    split = "train" if table["evaluation"] else "test"
    return task, task.dataset(split, 2 * table["rows"], EVALUATION_SEED)


# ---- a cell, in a process of its own


def measure(
    report: Report, table: dict[str, Any], data: str, path: str, way: str, seed: int, log: str, **_: Any
) -> None:
    """Train one way with one seed, evaluate it at its marks and report {minutes, tokens, samples} of each."""
    import torch
    from peft import LoraConfig

    from trl_grpo_tasks.evaluation.evaluate import evaluate
    from trl_grpo_tasks.models.loading import load_model, load_tokenizer
    from trl_grpo_tasks.rewards.executor import RewardExecutor

    on_gpu = torch.cuda.is_available()
    model: Any = load_model(path, dtype="bfloat16" if on_gpu else "float32").to("cuda" if on_gpu else "cpu")
    model.name_or_path = path
    tokenizer = load_tokenizer(path)
    task, rows = held_out(table, data)
    constraint = task.constraint(tokenizer) if table["constrain"] else None
    marks: list[dict[str, Any]] = []

    def evaluated(current: Any, minutes: float, tokens: float) -> None:
        with RewardExecutor(task) as executor, torch.autocast(model.device.type, torch.bfloat16, enabled=on_gpu):
            samples = evaluate(
                way, current, tokenizer, task, rows, executor=executor, num_samples=table["samples"],
                max_completion_length=table["max_completion_length"], constraint=constraint, seed=EVALUATION_SEED,
                rollout_batch_size=EVALUATION_ROWS,
            ).samples  # fmt: skip
        kept = [{"row": 0, "completion": s.completion, "tokens": s.tokens, "score": s.score, "form": s.form,
                 "request": s.request, "cut_off": s.cut_off} for s in samples]  # fmt: skip
        marks.append({"minutes": minutes, "tokens": tokens, "samples": kept})
        report({"marks": marks, **memory()})
        # The rates are logged too, because a cell that is killed keeps its log only.
        write_line(log, {"way": way, "seed": seed, "minutes": minutes, "held_out": rates(samples, table["samples"])})

    Path(log).parent.mkdir(parents=True, exist_ok=True)
    Path(log).write_text("")
    if way == START:
        evaluated(model, 0.0, 0.0)
        return
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    begin = now()
    trainer = made_trainer(table, data, model, tokenizer, way, seed, LoraConfig(
        task_type="CAUSAL_LM", target_modules=PROJECTIONS, **table["lora"]))  # fmt: skip
    clock = Clock(trainer, table, log, {"way": way, "seed": seed}, evaluated)
    report({"start_up_s": now() - begin})
    trainer.add_callback(clock.callback())
    trainer.train()
    evaluated(trainer.model, clock.minutes, clock.tokens)
    report({"steps": trainer.state.global_step, "step_s": clock.seconds, "minutes": clock.minutes})


def made_trainer(table: dict[str, Any], data: str, model: Any, tokenizer: Any, way: str, seed: int, lora: Any) -> Any:
    """The trainer of a way. All train the rows of the task with this seed, in TRL's order for it."""
    import torch
    from trl import GRPOConfig, GRPOTrainer

    from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer
    from trl_grpo_tasks.training.dataset import task_dataset

    task = made_task(table, data, is_evaluation=False)
    own = {name: value for name, value in table["ways"][way].items() if name not in ("trainer", "control")}
    kind, is_random = table["ways"][way]["trainer"], "control" in table["ways"][way]
    on_gpu = torch.cuda.is_available()
    settings = {
        "output_dir": str(Path(os.environ.get("TMPDIR", "/tmp")) / f"real-{os.getpid()}"),
        "max_completion_length": table["max_completion_length"],
        "lr_scheduler_type": "constant_with_warmup",
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "seed": seed,
        "max_steps": 1_000_000,  # the clock ends the run
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        **table["settings"],
        **own,
    }
    common = {"processing_class": tokenizer, "peft_config": lora}
    rows = task_dataset(task, "train", table["train_rows"], seed)
    if kind == "ours":
        args = TaskGRPOConfig(**(COMMAND_LINE | settings), constrain=table["constrain"])
        if is_random:
            return TaskGRPOTrainer(model, random_rewards(seed), args, rows, **common)
        return TaskGRPOTrainer(model, args=args, train_dataset=rows, task=task, **common)
    if table["constrain"]:
        raise ValueError(
            f"way {way!r}: TRL has no constraint of this kind; set constrain: false in a table of its own"
        )
    if kind == "trl+vllm":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randrange(20000, 30000))}
        vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
        settings = vllm | settings
    rewards = random_rewards(seed) if is_random else task_rewards(task)
    return GRPOTrainer(model, rewards, GRPOConfig(**settings), rows, **common)


def task_rewards(task: Any) -> Any:
    """The total of the task's score as a reward function of TRL, computed by the workers that our trainer uses."""
    from trl_grpo_tasks.rewards.executor import RewardExecutor
    from trl_grpo_tasks.task import weighted_total

    executor = RewardExecutor(task)

    def reward(completions: Sequence[Any], row: Sequence[str], **_: Any) -> list[float | None]:
        texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
        outcomes = executor.submit(row, texts).result()
        return [None if one.score is None else weighted_total(one.score, task.weights) for one in outcomes]

    return reward


def random_rewards(seed: int) -> Any:
    """Rewards of 0 and 1 that know nothing of the completion."""
    draw = random.Random(seed)

    def reward(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(draw.random() < 0.5) for _ in completions]

    return reward


class Clock:
    """Counts the minutes of training, without evaluations; evaluates at the marks; writes a line per step; stops."""

    def __init__(self, trainer: Any, table: dict[str, Any], log: str, head: dict[str, Any], evaluate: Any):
        self._trainer, self._evaluate, self._head = trainer, evaluate, head
        self._marks = sorted(mark for mark in table["marks"] if mark < table["minutes"])
        self._end = table["minutes"]
        self.seconds: list[float] = []
        self.tokens = 0.0
        self._log = log

    @property
    def minutes(self) -> float:
        return sum(self.seconds) / 60

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Callback(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                clock._start = now()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                clock.seconds.append(now() - clock._start)
                control.should_training_stop = clock.minutes >= clock._end

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                clock.write(state.global_step, logs)
                if clock._marks and clock.minutes >= clock._marks[0]:
                    clock._marks.pop(0)
                    clock._evaluate(clock._trainer.model, clock.minutes, clock.tokens)

        return Callback()

    def write(self, step: int, logs: dict[str, Any]) -> None:
        """Write the numbers of a step, with its seconds and the tokens of all completions so far."""
        if "reward" in logs:
            args = self._trainer.args
            rollouts = args.gradient_accumulation_steps / args.steps_per_generation / args.num_iterations
            self.tokens += logs["completions/mean_length"] * args.generation_batch_size * rollouts
        times = {"step": step, "minutes": self.minutes, "tokens": self.tokens}
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        write_line(self._log, self._head | times | finite)


def write_line(log: str, values: dict[str, Any]) -> None:
    """Append a line to the log of a cell."""
    with Path(log).open("a") as file:
        file.write(json.dumps(values) + "\n")


def rates(samples: Sequence[Any], size: int) -> dict[str, dict[str, float]]:
    """Success and pass@k of the held-out rows for choosing settings, and of those for reporting them."""
    wanted = ("success", f"pass@{max(size // 2, 1)}", f"pass@{size}")
    values = {half: learning.values_of(rows_of(samples, size, half)) for half in ("choose", "report")}
    return {half: {name: round(statistics.fmean(found[name]), 4) for name in wanted} for half, found in values.items()}


def rows_of(samples: Sequence[Any], size: int, which: str) -> list[Sequence[Any]]:
    """The samples of each row, of the held-out rows that `which` names (see learning.ROWS)."""
    from trl_grpo_tasks.evaluation.samples import request_numbers

    rows = [samples[first : first + size] for first in range(0, len(samples), size)]
    return [rows[place] for place in learning.places_of(request_numbers(rows), which)]


# ---- the table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=MODEL", help="Hub ids or folders")
    parser.add_argument("--data", default="data", help="folder of prepare.py")
    parser.add_argument("--out", type=Path, default=Path("outputs/real"))
    parser.add_argument("--ways", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of those of the table")
    parser.add_argument("--minutes", type=float, help="instead of those of the table")
    parser.add_argument("--rows", choices=list(learning.ROWS), default="report")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which a cell is given up")
    parser.add_argument("--parallel", type=int, default=1, help="cells at a time")
    options = parser.parse_args()
    table = read_table(options.table)
    table |= {name: getattr(options, name) for name in ("seeds", "minutes") if getattr(options, name) is not None}
    models = dict(model.partition("=")[::2] for model in options.models)
    if unknown := set(options.ways or ()) - set(table["ways"]):
        parser.error(f"{options.table} has no way {', '.join(unknown)}; its ways are: {', '.join(table['ways'])}")
    table["ways"] = {name: way for name, way in table["ways"].items() if name in (options.ways or table["ways"])}
    held_out(table, options.data)  # what is missing is reported before a model is loaded
    folder = options.out / options.table.stem
    folder.mkdir(parents=True, exist_ok=True)
    for name in models:
        run_missing(table, folder, name, models[name], options)
    text = "\n\n".join(f"## {name}\n\n{page(table, folder, name, options)}" for name in models)
    (folder / "table.md").write_text(text + "\n")
    print(text)


def cell_file(folder: Path, model: str, way: str, seed: int) -> Path:
    return folder / f"{model} {way} {seed}.json".replace("/", "_")


def run_missing(table: dict[str, Any], folder: Path, model: str, path: str, options: Any) -> None:
    """Run the cells of a model that have not finished."""
    wanted = [(START, 0), *((way, seed) for seed in table["seeds"] for way in table["ways"])]
    cells = []
    for way, seed in wanted:
        file = cell_file(folder, model, way, seed)
        if not file.is_file():
            log = str(folder / "logs" / f"{file.stem}.jsonl")
            cells.append({"table": table, "data": options.data, "path": path, "way": way, "seed": seed, "log": log})

    def run(part: list[dict[str, Any]]) -> None:
        for values in run_cells("compare", part, options.limit, folder / "cells.log"):
            if "error" in values:
                print(f"{model}, {values['way']}, seed {values['seed']}: {values['error']}", flush=True)
                continue
            kept = {name: value for name, value in values.items() if name not in ("table", "data", "path", "log")}
            cell_file(folder, model, values["way"], values["seed"]).write_text(json.dumps(kept))
            print(f"{model}, {values['way']}, seed {values['seed']}: done", flush=True)

    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(run, [cells[place :: options.parallel] for place in range(options.parallel)]))


def page(table: dict[str, Any], folder: Path, model: str, options: Any) -> str:
    """The Markdown table of a model, and its figure, from the cells that have finished with all seeds."""
    from trl_grpo_tasks.evaluation.samples import Sample, request_numbers

    def cells_of(way: str) -> list[dict[str, Any]] | None:
        files = [cell_file(folder, model, way, seed) for seed in ([0] if way == START else table["seeds"])]
        return [json.loads(file.read_text()) for file in files] if all(file.is_file() for file in files) else None

    found = {way: cells for way in (START, *table["ways"]) if (cells := cells_of(way)) is not None}
    if START not in found:
        return "not finished"
    size = table["samples"]

    def rows_at(mark: dict[str, Any]) -> list[Sequence[Sample]]:
        return rows_of([Sample(**(one | {"row": {}})) for one in mark["samples"]], size, options.rows)

    values: dict[str, list[dict[str, list[float]]]] = {}
    success: dict[str, list[list[tuple[float, float, float]]]] = defaultdict(list)  # minutes, tokens, success
    for way, cells in found.items():
        for place, mark in enumerate(cells[0]["marks"]):
            ends = [rows_at(cell["marks"][place]) for cell in cells] * (len(table["seeds"]) if way == START else 1)
            name = START if way == START else f"{way}, {mark['minutes']:.0f} min"
            values[name] = list(map(learning.values_of, ends))
        for cell in cells:
            trained = cell["marks"] if way != START else []  # all ways begin at the one evaluation of the start
            all_marks = found[START][0]["marks"] + trained
            measured = [(mark, learning.values_of(rows_at(mark))["success"]) for mark in all_marks]
            success[way].append([(m["minutes"], m["tokens"], statistics.fmean(v)) for m, v in measured])
    requests = dict.fromkeys(values[START][0], request_numbers(rows_at(found[START][0]["marks"][-1])))
    text = learning.table(values, START, {}, requests)
    heads = ["way", "steps", "s per step", "start-up s", "tokens", "peak GB of torch", "GB of the GPU"]
    lines = [table_line(heads), "|---" * len(heads) + "|"]
    for way, cells in found.items():
        if way != START:
            seconds = [statistics.median(cell["step_s"][2:] or cell["step_s"]) for cell in cells]
            tokens = [cell["marks"][-1]["tokens"] for cell in cells]
            listed = ([cell.get(key, 0.0) for cell in cells] for key in ("start_up_s", "peak_gb", "device_gb"))
            start_up, peak, device = listed
            lines.append(table_line([way, [cell["steps"] for cell in cells], seconds, start_up, tokens, peak, device]))
    draw(success, folder / f"{model} curves.png")
    counted = len(set(requests["success"]))
    return f"{counted} held-out requests x {size} samples, {learning.ROWS[options.rows]}.\n\n{text}\n\n" + "\n".join(
        lines
    )


def draw(success: dict[str, list[list[tuple[float, float, float]]]], path: Path) -> None:
    """Draw held-out success over minutes and over generated tokens: thin lines are seeds, thick ones their means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axis, (axes, label) in enumerate(
        zip(figure.subplots(1, 2), ("minutes of training", "generated tokens"), strict=True)
    ):
        for number, (way, seeds) in enumerate((way, seeds) for way, seeds in success.items() if way != START):
            for points in seeds:
                axes.plot(
                    [p[axis] for p in points], [p[2] for p in points], color=f"C{number}", alpha=0.4, linewidth=0.8
                )
            marks = [
                [statistics.fmean(p[i] for p in points) for i in (axis, 2)] for points in zip(*seeds, strict=False)
            ]
            axes.plot(*zip(*marks, strict=True), color=f"C{number}", linewidth=2, marker="o", markersize=3, label=way)
        axes.set(xlabel=label, ylabel="held-out success")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
