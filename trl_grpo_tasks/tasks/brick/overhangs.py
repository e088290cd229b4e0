"""Voxel shapes that reach over empty space and carry weights there. The last parameter is what must be strong enough.

They reach towards x=0, so the place of a weight does not depend on how thick the support behind is. What a joint bears
grows with the square of its depth: a support twice as thick lets the weight grow about fourfold. As in `shapes`, every
cell can be reached by a brick that has a stud below.
"""

from __future__ import annotations

import numpy as np

from .shapes import blank

ABUTMENT = 3  # where the gap of a wide footbridge begins, whatever the thickness of its piers


def balcony(reach: int, width: int, height: int, wall: int) -> np.ndarray:
    """A slab, its top `height` high, on a wall `wall` thick, with a railing at the far end."""
    cells = blank(reach + wall, width, height + 1)
    cells[reach:, :, : height - 1] = True
    cells[:, :, height - 1] = True
    cells[0, :, height] = True
    if width > 4:
        cells[:3, [0, -1], height] = True
    return cells


def shelf(reach: int, width: int, height: int, wall: int) -> np.ndarray:
    """A board, its top `height` high, out of a wall that goes on two layers above it."""
    cells = blank(reach + wall, width, height + 2)
    cells[reach:] = True
    cells[:, :, height - 1] = True
    return cells


def diving_board(reach: int, width: int, height: int, post: int) -> np.ndarray:
    """A board, its top `height` high, on a post, with a handrail at the rear."""
    cells = blank(reach + post, width, height + 2)
    cells[reach:, :, : height - 1] = True
    cells[:, :, height - 1] = True
    cells[-1, :, height:] = True
    return cells


def street_lamp(reach: int, height: int, pole: int) -> np.ndarray:
    """An arm, its top `height` high, on a pole with a wide foot; the light stands on the end of the arm."""
    cells = blank(reach + pole, 3, height + 1)
    cells[reach - 1 :, :, 0] = True
    cells[reach:, 1, :height] = True
    cells[:, 1, height - 1] = True
    cells[0, 1, height] = True
    return cells


def pedestal_table(length: int, width: int, height: int, column: int) -> np.ndarray:
    """A table on one column, two cells wide and `column` long, in the middle; a long top has a shorter board below."""
    cells = blank(length, width, height)
    start, side = (length - column) // 2, (width - 2) // 2
    cells[start : length - start, side : width - side] = True
    if length > 8:
        cells[start - 2 : length - start + 2, side : width - side, -2] = True
    cells[:, :, -1] = True
    return cells


def crane(reach: int, back: int, height: int, tower: int) -> np.ndarray:
    """A jib, two cells wide, that reaches `reach` beyond the front of a tower and `back` behind it; in front of the
    tower it is doubled."""
    cells = blank(reach + back, 2, height + 1)
    cells[reach : reach + tower, :, :height] = True
    cells[reach - 4 : reach + tower, :, height - 2] = True
    cells[:, :, height - 1] = True
    cells[reach, :, height] = True
    return cells


def footbridge(span: int, width: int, height: int, pier: int) -> np.ndarray:
    """A deck, its top `height` high, over one gap; where that is wide the deck rests on ends that reach into it."""
    start = pier if span <= 6 else ABUTMENT
    cells = blank(start + span + pier, width, height)
    cells[start - pier : start] = cells[start + span :] = True
    if span > 6:
        cells[start - pier : start + span // 2 - 3, :, -2] = cells[start + span - span // 2 + 3 :, :, -2] = True
    cells[start - pier :, :, -1] = True
    return cells
