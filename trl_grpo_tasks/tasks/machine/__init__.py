"""The machine task: cars and catapults as construction trees, scored by a physics simulation."""

from .results import Result
from .scene import to_xml
from .simulator import simulate
from .task import MachineOptions, MachineTask
from .tree import ConstructionTree

TASK = MachineTask

__all__ = ["TASK", "ConstructionTree", "MachineOptions", "MachineTask", "Result", "simulate", "to_xml"]
