"""The generated blocks of the documentation: a module per page, or per folder of the reference, in which each public
function makes one block."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

from trl_grpo_tasks.registry import TASKS

from .blocks import options, recipes


def blocks_of(name: str) -> dict[str, Callable[[], str]]:
    """Return {name of a block: function that makes it} of a module of this package."""
    module = import_module(f"{__name__}.{name}")
    own = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    return {f"{name}.{key}": make for key, make in own.items() if not key.startswith("_")}


def shared_blocks(task: str) -> dict[str, Callable[[], str]]:
    """Return the blocks that every task page has."""
    return {f"{task}.recipes": partial(recipes, task), f"{task}.options": partial(options, task)}


BLOCKS = blocks_of("reference")
for _task in TASKS:
    BLOCKS |= blocks_of(_task) | shared_blocks(_task)
