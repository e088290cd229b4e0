"""Options of a run: TRL's parser over our options, TRL's and those of the task, from flags and a recipe file."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .task import Task, find_task_class, get_task


@dataclass
class RunArguments:
    """What a run does around GRPO: which task, a warm-up before, an evaluation before and after."""

    task: str = field(
        default="prompts", metadata={"help": "A task's name, a path to a .py file with one, or a module."}
    )
    cold_start_steps: int = field(
        default=0, metadata={"help": "Supervised steps on the task's gold answers before GRPO. 0: none."}
    )
    cold_start_learning_rate: float = field(default=1e-3, metadata={"help": "Learning rate of the cold start."})
    cold_start_batch_size: int = field(default=32, metadata={"help": "Rows a step (and device) of the cold start."})
    eval_only: bool = field(default=False, metadata={"help": "Evaluate the model on held-out rows and stop."})
    eval_before_and_after: bool = field(
        default=True, metadata={"help": "Evaluate on held-out rows before and after GRPO."}
    )
    eval_samples: int = field(default=4, metadata={"help": "Completions of each held-out row in an evaluation."})

    def __post_init__(self) -> None:
        for name, least in (("cold_start_steps", 0), ("cold_start_batch_size", 1), ("eval_samples", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least {least}")


def parse(argv: Sequence[str] | None = None) -> tuple[Task, RunArguments, Any, Any]:
    """(task, run, TaskGRPOConfig, ModelConfig) from the command line. Raises ValueError in words for a person."""
    import torch
    from trl import ModelConfig, TrlParser

    from .config import TaskGRPOConfig
    from .models import is_bf16_fast

    argv = _with_resume_value(list(sys.argv[1:] if argv is None else argv))
    task_class = find_task_class(_first_value(argv, "task") or RunArguments.task)
    parser = TrlParser((RunArguments, TaskGRPOConfig, ModelConfig, task_class.Options), allow_abbrev=False)
    on_accelerator = is_bf16_fast() or torch.cuda.is_available()
    # Below the task's defaults, which are below the recipe, which is below the flags.
    defaults = {
        "bf16": is_bf16_fast(),
        "gradient_checkpointing": on_accelerator,
        "dataloader_pin_memory": on_accelerator,
        "output_dir": f"outputs/{task_class.name}",
        "logging_steps": 5,
        "save_steps": 50,
        "save_total_limit": 2,
        "eval_rows": 64,
    }
    unknown = parser.set_defaults_with_config(**(defaults | dict(task_class.defaults)))
    if unknown:
        raise ValueError(f"task {task_class.name!r}: its defaults name options that do not exist: {unknown}")
    *parsed, from_file, from_flags = parser.parse_args_and_config(
        argv, return_remaining_strings=True, separate_remaining_strings=True
    )
    known = {option for action in parser._actions for option in action.option_strings}
    for text in [*from_file, *from_flags]:
        raise ValueError(_unknown_option(text, known))
    run, args, model, options = parsed
    return get_task(run.task, options), run, args, model


def _unknown_option(text: str, known: set[str]) -> str:
    if not text.startswith("--"):
        return f"{text!r} does not belong to any option"
    name = text.split("=")[0]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else "; --help lists all of them")


def _first_value(argv: Sequence[str], name: str) -> str | None:
    """The value of an option before the parser exists: from the flags, or from the recipe that --config names."""
    for i, text in enumerate(argv):
        if text == f"--{name}" and i + 1 < len(argv):
            return argv[i + 1]
        if text.startswith(f"--{name}="):
            return text.split("=", 1)[1]
    if name != "config" and (recipe := _first_value(argv, "config")):
        import yaml

        try:
            with open(recipe) as file:
                values = yaml.safe_load(file)
        except OSError as error:
            raise ValueError(f"--config {recipe}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ValueError(f"--config {recipe} is not YAML: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"--config {recipe} must hold options as 'name: value' lines")
        return values.get(name)
    return None


def _with_resume_value(argv: list[str]) -> list[str]:
    """`--resume_from_checkpoint` without a value means the newest complete checkpoint."""
    flag = "--resume_from_checkpoint"
    if flag in argv:
        after = argv.index(flag) + 1
        if after == len(argv) or argv[after].startswith("--"):
            argv.insert(after, "newest")
    return argv
