"""Task packs for TRL's GRPO trainer: rewards a program can check, exact gradients under constraints.

Importing this module is fast: torch, transformers and TRL are loaded when the trainer is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .registry import get_task
from .task import Score, Task

if TYPE_CHECKING:
    from .commands.python_api import load_recipe, train
    from .evaluation.solver import Solver
    from .rewards.environment import Environment, EnvironmentTask, Step
    from .training.config import TaskGRPOConfig
    from .training.trainer import TaskGRPOTrainer

__version__ = "0.1.0"
__all__ = ["Environment", "EnvironmentTask", "Score", "Solver", "Step", "Task", "TaskGRPOConfig", "TaskGRPOTrainer",
           "get_task", "load_recipe", "train"]  # fmt: skip


_LAZY = {
    "Environment": ".rewards.environment",
    "EnvironmentTask": ".rewards.environment",
    "Step": ".rewards.environment",
    "Solver": ".evaluation.solver",
    "TaskGRPOTrainer": ".training.trainer",
    "TaskGRPOConfig": ".training.config",
    "load_recipe": ".commands.python_api",
    "train": ".commands.python_api",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
