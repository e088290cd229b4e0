"""Task packs for TRL's GRPO trainer: rewards a program can check, exact gradients under constraints.

Importing this module is fast: torch, transformers and TRL are loaded when the trainer is first asked for.
"""

from typing import TYPE_CHECKING, Any

from .task import Score, Task, get_task

if TYPE_CHECKING:
    from .training.config import TaskGRPOConfig
    from .training.trainer import TaskGRPOTrainer

__version__ = "0.1.0"
__all__ = ["Score", "Task", "TaskGRPOConfig", "TaskGRPOTrainer", "get_task"]


def __getattr__(name: str) -> Any:
    if name == "TaskGRPOTrainer":
        from .training.trainer import TaskGRPOTrainer

        return TaskGRPOTrainer
    if name == "TaskGRPOConfig":
        from .training.config import TaskGRPOConfig

        return TaskGRPOConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
