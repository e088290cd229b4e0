"""Training from Python, for scripts and notebooks: `load_recipe` reads settings, `train` runs them.

recipe = load_recipe("brick", output_dir="outputs/my_run", max_steps=50)
result = train(recipe)
result.evaluations[-1].metrics["success"]
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..redact import redacted_words
from ..registry import TASKS
from ..report.page import option_words
from ..rewards.repair import with_repair
from ..task import Task
from .arguments import RunArguments, parse
from .lock import locked
from .plan import prepare
from .quiet import quiet_third_party_logging
from .train import TrainingResult, run_training


@dataclass
class Recipe:
    """The settings of a run. Attributes may be changed before `train` is called.

    `config` is the TaskGRPOConfig of the trainer, `model` is TRL's ModelConfig, and `run` holds the settings of the
    cold start and of the evaluations. `command` is the command line with the same settings.
    """

    task: Task
    config: Any
    model: Any
    run: RunArguments
    command: str


def load_recipe(name: str | Path, **options: Any) -> Recipe:
    """Read a recipe of the package by name (`brick/single_gpu`), a YAML file by path, or the defaults of a task by its
    name (`brick`), which train the embedded model. `options` replace values;
    their names are those of the command line. Raises ValueError for options that do not exist or cannot be combined.
    """
    quiet_third_party_logging()
    values = {option: str(value) if isinstance(value, Path) else value for option, value in options.items()}
    words = ["--task" if str(name) in TASKS else "--config", str(name), *option_words(values)]
    task, run, config, model = parse(words)
    return Recipe(task, config, model, run, f"trl-grpo-tasks train {shlex.join(redacted_words(words))}")


def train(recipe: Recipe, callbacks: Sequence[Any] = ()) -> TrainingResult:
    """Run a recipe as `trl-grpo-tasks train` does: cold start, evaluation, GRPO, evaluation, report. `callbacks` are
    added to the trainer. Errors are raised.

    With `resume_from_checkpoint="auto"` in the recipe, a second call continues the run in the output folder from its
    newest checkpoint. A KeyboardInterrupt during GRPO is raised after the current step has been saved.
    """
    config = copy.copy(recipe.config)  # `prepare` replaces "auto" by what it finds; a second call must look again
    with ExitStack() as held:
        if config.process_index == 0:
            held.enter_context(locked(config.output_dir, "train"))
        task = with_repair(recipe.task, config)  # the turns may have been changed since the recipe was read
        plan = prepare(task, recipe.run, config, recipe.model)
        return run_training(task, recipe.run, config, recipe.model, plan, callbacks=callbacks, command=recipe.command)
