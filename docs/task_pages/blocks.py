"""Markdown, and what the generated blocks of all task pages have in common: options and recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

import trl_grpo_tasks
from trl_grpo_tasks import get_task
from trl_grpo_tasks.commands.recipes import expected_result

RECIPES = Path(trl_grpo_tasks.__file__).parent / "recipes"
SEED = 42


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def code(value: Any) -> str:
    return f"`{value}`"


def codes(values: Iterable[Any]) -> str:
    return " ".join(map(code, values))


def fenced(text: str, language: str = "text") -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def options(name: str) -> str:
    """Every option of a task with its default and what --help says. Weights of components are one row."""
    task = get_task(name)
    weights = {f"{component}_weight" for component in task.weights}
    own = fields(task.Options)
    rows = []
    for field in own:
        if field.name in weights:
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        rows.append((code(f"--{field.name}"), code(_shown(default)), field.metadata["help"]))
    if shown := [f"--{field.name}" for field in own if field.name in weights]:
        rows.append((codes(shown), "see Score", "Weights of the components."))
    return table(["option", "default", "meaning"], rows)


_HARDWARE = {
    "tiny_gpu": "1 GPU",
    "pivot": "2 CPU cores",
    "multi_step": "2 CPU cores",
    "colab_t4": "GPU with 15 GB",
    "single_gpu": "1 GPU",
    "multi_gpu": "8 GPUs",
    "machine/paper": "8 GPUs",
    "machine/authors": "8 GPUs",
}


def recipes(task: str) -> str:
    """A task without a recipe, and its recipes: for which hardware, with which model, and what to expect."""
    steps = get_task(task).tiny_defaults.get("max_steps", "-")
    rows = [(f"none (`--task {task}`)", "2 CPU cores", "embedded", steps, expected_result(task))]
    for file in sorted((RECIPES / task).glob("*.yaml")):
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
        name = f"{task}/{file.stem}"
        hardware = _HARDWARE.get(name) or _HARDWARE.get(file.stem, "see the recipe")
        model = code(recipe["model_name_or_path"]) if "model_name_or_path" in recipe else "embedded, or `--model`"
        weights = " (LoRA)" if recipe.get("use_peft") else ""
        steps = recipe.get("max_steps") or f"{recipe['num_train_epochs']} epochs"
        rows.append((code(name), hardware, model + weights, steps, expected_result(name)))
    return table(["recipe", "hardware", "model", "GRPO steps", "expected on held-out rows"], rows)


def _shown(default: Any) -> str:
    """A default as one would type it."""
    if isinstance(default, list):
        return " ".join(map(str, default)) or "none"
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)


def first_row(name: str, choose: Callable[[Any], bool] = lambda row: True, **given: Any) -> tuple[Any, Any]:
    """A task, and the first of its test rows that fits."""
    task = get_task(name, given)
    return task, next(row for row in task.dataset("test", 64, SEED) if choose(row))


def score_line(score: Any) -> str:
    parts = ", ".join(f"{name} {value:.3g}" for name, value in score.components.items())
    return f"success: {str(score.success).lower()}; total {score.total:.3g}; {parts}"
