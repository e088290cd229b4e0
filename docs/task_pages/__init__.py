"""The generated blocks of the task pages: a module per task, in which each public function makes one block."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

from trl_grpo_tasks.registry import TASKS

from .blocks import options, recipes


def blocks_of(task: str) -> dict[str, Callable[[], str]]:
    """Return {name of a block: function that makes it} of the page of a task."""
    module = import_module(f"{__name__}.{task}")
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    made = {name: make for name, make in own.items() if not name.startswith("_")}
    shared = {"recipes": partial(recipes, task), "options": partial(options, task)}
    return {f"{task}.{name}": make for name, make in (made | shared).items()}


BLOCKS = {name: make for task in TASKS for name, make in blocks_of(task).items()}
