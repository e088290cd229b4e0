"""The brick pack: structures of toy bricks as text, judged by an exact stability analysis."""

from .task import BrickOptions, BrickTask

TASK = BrickTask

__all__ = ["TASK", "BrickOptions", "BrickTask"]
