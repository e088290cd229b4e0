"""The infill task: texts with gaps, filled in a single step and scored by a frozen judge model."""

from .task import InfillOptions, InfillTask

TASK = InfillTask

__all__ = ["TASK", "InfillOptions", "InfillTask"]
