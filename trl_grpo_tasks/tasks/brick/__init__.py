"""The brick task: toy-brick structures as text, scored by an exact stability analysis."""

from .task import BrickOptions, BrickTask

TASK = BrickTask

__all__ = ["TASK", "BrickOptions", "BrickTask"]
