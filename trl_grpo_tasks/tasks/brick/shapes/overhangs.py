"""Voxel shapes with an overhang that carries weights; the last parameter is the thickness of the support.

The overhang points towards x=0, so the position of a weight does not depend on the thickness of the support behind it.
The load that a joint bears grows with the square of its depth: a support twice as thick carries about four times the
weight. As in `shapes`, every cell can be reached by a brick that has a stud below it.
"""

from __future__ import annotations

import numpy as np

from .objects import blank

ABUTMENT = 3  # x where the gap of a wide footbridge begins, whatever the thickness of its piers


def balcony(reach: int, width: int, height: int, wall: int) -> np.ndarray:
    """Build a slab with its top at `height`, on a wall `wall` thick, with a railing at the far end."""
    cells = blank(reach + wall, width, height + 1)
    cells[reach:, :, : height - 1] = True
    cells[:, :, height - 1] = True
    cells[0, :, height] = True
    if width > 4:
        cells[:3, [0, -1], height] = True
    return cells


def shelf(reach: int, width: int, height: int, wall: int) -> np.ndarray:
    """Build a board with its top at `height`, in a wall that continues two layers above it."""
    cells = blank(reach + wall, width, height + 2)
    cells[reach:] = True
    cells[:, :, height - 1] = True
    return cells


def diving_board(reach: int, width: int, height: int, post: int) -> np.ndarray:
    """Build a board with its top at `height`, on a post, with a handrail at the rear."""
    cells = blank(reach + post, width, height + 2)
    cells[reach:, :, : height - 1] = True
    cells[:, :, height - 1] = True
    cells[-1, :, height:] = True
    return cells


def street_lamp(reach: int, height: int, pole: int) -> np.ndarray:
    """Build an arm with its top at `height`, on a pole with a wide foot; the light is on the end of the arm."""
    cells = blank(reach + pole, 3, height + 1)
    cells[reach - 1 :, :, 0] = True
    cells[reach:, 1, :height] = True
    cells[:, 1, height - 1] = True
    cells[0, 1, height] = True
    return cells


def pedestal_table(length: int, width: int, height: int, column: int) -> np.ndarray:
    """Build a table on one central column, 2 wide and `column` long; a long top gets a shorter board below it."""
    cells = blank(length, width, height)
    start, side = (length - column) // 2, (width - 2) // 2
    cells[start : length - start, side : width - side] = True
    if length > 8:
        cells[start - 2 : length - start + 2, side : width - side, -2] = True
    cells[:, :, -1] = True
    return cells


def crane(reach: int, back: int, height: int, tower: int) -> np.ndarray:
    """Build a jib two cells wide that reaches `reach` in front of a tower and `back` behind it; doubled in front."""
    cells = blank(reach + back, 2, height + 1)
    cells[reach : reach + tower, :, :height] = True
    cells[reach - 4 : reach + tower, :, height - 2] = True
    cells[:, :, height - 1] = True
    cells[reach, :, height] = True
    return cells


def footbridge(span: int, width: int, height: int, pier: int) -> np.ndarray:
    """Build a deck with its top at `height` over one gap; above a wide gap it rests on cantilevered ends."""
    start = pier if span <= 6 else ABUTMENT
    cells = blank(start + span + pier, width, height)
    cells[start - pier : start] = cells[start + span :] = True
    if span > 6:
        cells[start - pier : start + span // 2 - 3, :, -2] = cells[start + span - span // 2 + 3 :, :, -2] = True
    cells[start - pier :, :, -1] = True
    return cells
