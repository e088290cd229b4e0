"""The theory task: quantum field theories whose anomalies, vacuum and masses are checked by computation."""

from .anomalies import anomalies
from .task import TheoryOptions, TheoryTask

TASK = TheoryTask

__all__ = ["TASK", "TheoryOptions", "TheoryTask", "anomalies"]
