"""The infill pack: texts with gaps, filled in a single step and judged by a frozen model."""

from .task import InfillOptions, InfillTask

TASK = InfillTask

__all__ = ["TASK", "InfillOptions", "InfillTask"]
