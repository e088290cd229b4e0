"""The prompts task: the user's own prompts, or generated ones, with rewards chosen per row."""

from .options import PromptsOptions
from .task import PromptsTask

TASK = PromptsTask

__all__ = ["TASK", "PromptsOptions", "PromptsTask"]
