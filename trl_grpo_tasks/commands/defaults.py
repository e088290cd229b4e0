"""Default options of a run, in layers: those of every run, of the kind of weights, and of the task.

TRL's own defaults stay for the Python API (`TaskGRPOConfig()`); these apply to `train`, `eval` and recipes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..report.run_folder import settings_of
from ..task import Task

PROMPTS_PER_STEP = 8  # of pretrained models, over all devices
BATCH_OPTIONS = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size",
                 "steps_per_generation")  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of trained weights: its defaults, and the learning rates that neither stall nor destroy a model."""

    title: str
    lowest_rate: float
    highest_rate: float
    defaults: Mapping[str, Any]


RATES = ("learning_rate", "cold_start_learning_rate")
# The learning rates were tried on several tasks each: benchmarks/results/learning_rates.md.
KINDS = {
    "tiny": Kind("the embedded model", 5e-5, 6e-4, {
        "learning_rate": 5e-4, "max_steps": 100, "cold_start_steps": 150, "cold_start_learning_rate": 1e-3,
        "num_generations": 8, "per_device_train_batch_size": 128,
    }),
    "adapter": Kind("LoRA adapters", 5e-6, 5e-4, {
        "learning_rate": 5e-5, "max_steps": 200, "cold_start_learning_rate": 3e-4, "lora_r": 32, "lora_alpha": 64,
        "lora_target_modules": ["all-linear"],
    }),
    "full": Kind("full weights", 5e-7, 5e-5, {
        "learning_rate": 5e-6, "max_steps": 200, "cold_start_learning_rate": 3e-5,
    }),
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """Default options and where they come from."""

    origin: str
    values: dict[str, Any]


def kind_of(given: Mapping[str, Any]) -> str:
    """Return the kind of weights, one of `KINDS`, that these options train or evaluate.

    A model that a run made of the embedded model is of the same kind, also its cold start.
    """
    from ..models.loading import TINY, is_adapter

    made_from: list[str] = []  # the model, the model that it was trained from, and so on
    name = _model(given)
    while name and name not in made_from:
        made_from.append(name)
        name = settings_of(name).get("model", {}).get("name")
    if TINY in made_from:
        return "tiny"
    is_lora = str(given.get("use_peft", "false")).lower() == "true"
    return "adapter" if is_lora or is_adapter(made_from[0]) else "full"


def _model(given: Mapping[str, Any]) -> str:
    from ..models.loading import TINY

    return str(given.get("model_name_or_path") or str(given.get("models") or "").rpartition("=")[2] or TINY)


def layers(task_class: type[Task], kind: str, given: Mapping[str, Any], half: str | None) -> list[Layer]:
    """Return the layers of defaults of a run, from low to high precedence. The options `given` override them.

    `half` is the half precision that the machine computes fast, or None.
    """
    from ..models.loading import is_adapter

    weights = Layer(f"defaults for {KINDS[kind].title}", dict(KINDS[kind].defaults))
    own = Layer(f"defaults of task {task_class.name}" if task_class is not Task else "", dict(task_class.defaults))
    found = [weights, own]
    if kind == "tiny":
        found.append(Layer(f"{own.origin} for the embedded model", dict(task_class.tiny_defaults)))
    elif "num_train_epochs" in given:
        del weights.values["max_steps"]
    if kind == "adapter" and half == "bf16":
        # Frozen weights need no more precision. Full weights stay float32: bf16 would round away most updates.
        weights.values["dtype"] = "bfloat16"
    if kind != "tiny" and not set(BATCH_OPTIONS) & given.keys():
        options = {"num_generations": 8, "per_device_train_batch_size": 8} | own.values
        group = str(given.get("num_generations", options["num_generations"]))
        per_pass = options["per_device_train_batch_size"] * int(os.environ.get("WORLD_SIZE", 1))
        parts = -(-PROMPTS_PER_STEP * int(group) // per_pass) if group.isdecimal() else 1  # the parser refuses others
        weights.values["gradient_accumulation_steps"] = max(1, parts)
    name = _model(given)
    if settings_of(name) or is_adapter(name):
        found.append(Layer("default for models that were trained before", {"cold_start_steps": 0}))
    return found


def take_adapter_defaults(task: Task, run: Any, args: Any) -> None:
    """Replace the learning rates for full weights by those for adapters, and leave the cold start out, unless they
    were given: the model is an adapter that was trained before."""
    taken = {name: KINDS["adapter"].defaults[name] for name in RATES if name not in task.defaults}
    taken = {name: value for name, value in [*taken.items(), ("cold_start_steps", 0)] if name not in run.given}
    for name, value in taken.items():
        setattr(args if name == "learning_rate" else run, name, value)
    run.kind = "adapter"
    run.defaults.append(
        f"the model is an adapter, so instead: {', '.join(f'{n} {_text(v)}' for n, v in taken.items())}"
    )


def describe(found: Sequence[Layer], given: Mapping[str, Any]) -> list[str]:
    """Return a line for each origin, with its defaults that no other layer or option replaces."""
    lines = []
    for place, layer in enumerate(found):
        later = [*given, *(name for one in found[place + 1 :] for name in one.values)]
        values = [f"{name} {_text(value)}" for name, value in layer.values.items() if name not in later]
        lines += [f"{layer.origin}: {', '.join(values)}"] if values else []
    return lines


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def rate_hints(kind: str, learning_rate: float) -> list[str]:
    """Return a hint for a learning rate outside the range that suits the kind of weights."""
    known = KINDS[kind]
    if known.lowest_rate <= learning_rate <= known.highest_rate:
        return []
    effect = "so small that little is learned" if learning_rate < known.lowest_rate else "large enough to ruin a model"
    return [
        f"the learning rate {learning_rate:g} may be {effect}; for {known.title}, {known.lowest_rate:g} to "
        f"{known.highest_rate:g} is usual, and the default is {known.defaults['learning_rate']:g}"
    ]
