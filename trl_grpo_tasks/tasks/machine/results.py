"""Results of a simulated run: distances, throws, loads, paths and poses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Throw:
    """The flight of a boulder: its highest point, its rise above its start, and where it lands."""

    height: float
    rise: float
    distance: float
    from_machine: float  # distance between the boulder and the start block at that time
    landed: bool
    landing: tuple[float, float]  # relative to its start: right, forward


@dataclass(frozen=True)
class Result:
    """The result of a run. Paths are (samples, 3) in metres: right, forward, up.

    `timed_out` means that the run exceeded its wall-clock limit, so the outcome is unknown.
    """

    valid: bool
    reason: str = ""
    timed_out: bool = False
    distance: float = 0.0
    forward: float = 0.0
    seconds: float = 0.0
    throws: tuple[Throw, ...] = ()
    broken: str = ""
    loads: dict[int, tuple[float, float]] = field(default_factory=dict)
    times: np.ndarray = field(default_factory=lambda: np.zeros(0), compare=False)
    path: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)), compare=False)
    boulder_paths: tuple[np.ndarray, ...] = field(default=(), compare=False)
    frames: Any = field(default=None, compare=False, repr=False)  # poses for pictures; only with record=True


@dataclass(frozen=True)
class Frames:
    """The poses of all geoms during a run, for pictures."""

    model: Any
    times: np.ndarray
    positions: np.ndarray
    matrices: np.ndarray
    sites: np.ndarray
