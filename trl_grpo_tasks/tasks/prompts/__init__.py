"""The prompts pack: the user's own prompts, or generated ones, with rewards chosen row by row."""

from .task import PromptsOptions, PromptsTask

TASK = PromptsTask

__all__ = ["TASK", "PromptsOptions", "PromptsTask"]
