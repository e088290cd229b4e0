"""Task packs for TRL's GRPO trainer: rewards a program can check, exact gradients under constraints.

Importing this module is fast: torch, transformers and TRL are loaded when the trainer is first asked for.
"""

from typing import TYPE_CHECKING, Any

from .task import Score, Task, get_task

if TYPE_CHECKING:
    from .commands.python_api import load_recipe, train
    from .training.config import TaskGRPOConfig
    from .training.trainer import TaskGRPOTrainer

__version__ = "0.1.0"
__all__ = ["Score", "Task", "TaskGRPOConfig", "TaskGRPOTrainer", "get_task", "load_recipe", "train"]


def __getattr__(name: str) -> Any:
    if name == "TaskGRPOTrainer":
        from .training.trainer import TaskGRPOTrainer

        return TaskGRPOTrainer
    if name == "TaskGRPOConfig":
        from .training.config import TaskGRPOConfig

        return TaskGRPOConfig
    if name in ("load_recipe", "train"):
        from .commands import python_api

        return getattr(python_api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
