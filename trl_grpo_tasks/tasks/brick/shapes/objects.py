"""Parametric voxel shapes of everyday objects. Each function returns the smallest boolean grid [x, y, z] that fits.

x is the length, y the width or depth (the front is at y=0), z the height. Every cell can be reached by a brick that
has a stud below it: nothing hangs, spans are no longer than the longest part, and wide plates lie on a frame.
"""

from __future__ import annotations

import numpy as np


def blank(length: int, width: int, height: int) -> np.ndarray:
    return np.zeros((length, width, height), dtype=bool)


def stack(length: int, width: int, height: int, lean: str, shift: int) -> np.ndarray:
    """Build `height` equal bricks on top of each other: straight, crossed, leaning, or zigzag along x or y."""
    room = length + width + shift * height
    cells = blank(room, room, height)
    way, _, side = lean.partition(" ")
    for z in range(height):
        h, w = (width, length) if way == "crossed" and z % 2 else (length, width)
        offset = shift * {"straight": 0, "crossed": 0, "leaning": z, "zigzag": z % 2}[way]
        x, y = (offset, 0) if side == "right" else (0, offset)
        cells[x : x + h, y : y + w, z] = True
    end_x, end_y, _ = np.argwhere(cells).max(axis=0) + 1
    return cells[:end_x, :end_y]


def _ring(cells: np.ndarray, z: int | slice, thick: int = 1) -> None:
    """Fill the rim of the layer or layers `z`."""
    inner = cells[thick:-thick, thick:-thick, z].copy()
    cells[:, :, z] = True
    cells[thick:-thick, thick:-thick, z] = inner


def _plate_on_legs(cells: np.ndarray, top: int, leg: int) -> None:
    """Build four legs below a plate in layer `top`, with a frame where the legs do not reach the middle."""
    for x in (slice(None, leg), slice(-leg, None)):
        for y in (slice(None, leg), slice(-leg, None)):
            cells[x, y, :top] = True
    cells[:, :, top] = True
    if cells.shape[1] > 2 * leg + 2:
        _ring(cells, top - 1)


def table(length: int, width: int, height: int, leg: int) -> np.ndarray:
    cells = blank(length, width, height)
    _plate_on_legs(cells, height - 1, leg)
    return cells


def desk(length: int, width: int, height: int, drawer: int) -> np.ndarray:
    """A plate on a drawer block `drawer` long on the left and a panel on the right."""
    cells = blank(length, width, height)
    cells[:drawer] = True
    cells[-1] = True
    cells[drawer:-1, -1, height // 2 :] = True
    cells[:, :, -1] = True
    return cells


def chair(width: int, seat: int, height: int, leg: int) -> np.ndarray:
    """A square seat, its top `seat` high, on four legs, with a back up to `height`."""
    cells = blank(width, width, height)
    _plate_on_legs(cells, seat - 1, leg)
    cells[:, -leg:, seat:] = True
    return cells


def bench(length: int, width: int, height: int, leg: int) -> np.ndarray:
    """Build a board on two legs, or three if it is long; a large bench has a back twice as high as its seat."""
    cells = blank(length, width, 2 * height if length > 12 else height)
    middle = (length - leg) // 2
    for x in (0, length - leg, middle if length > 2 * leg + 14 else 0):
        cells[x : x + leg, :, : height - 1] = True
    cells[:, :, height - 1] = True
    cells[:, -1, height:] = True
    return cells


def sofa(length: int, depth: int, height: int, seat: int) -> np.ndarray:
    """A solid seat with a back at the rear and an arm, one higher than the seat, at each end."""
    cells = blank(length, depth, height)
    thick = 1 if depth < 5 else 2
    cells[:, :, :seat] = True
    cells[:, -thick:, :] = True
    cells[:thick, :, seat] = cells[-thick:, :, seat] = True
    return cells


def bed(length: int, width: int, height: int, head: int) -> np.ndarray:
    """A mattress, its top `height` high, on a panel at each end; the head end rises `head` above it."""
    cells = blank(length, width, height + head)
    cells[:1, :, : height - 1] = cells[-1:, :, : height - 1] = True
    if length > 14:
        cells[length // 2, :, : height - 1] = True
    cells[:, :, height - 1] = True
    cells[0, :, height:] = True
    if length > 8:
        cells[-1, :, height] = True
        cells[1:4, 1:-1, height] = True
    return cells


def bookshelf(width: int, depth: int, shelves: int, gap: int) -> np.ndarray:
    """Boards with `gap` empty layers between them, in a case with sides and a back."""
    cells = blank(width, depth, shelves + gap * (shelves - 1))
    cells[:, -1] = cells[0] = cells[-1] = True
    cells[:, :, :: gap + 1] = True
    return cells


def tower(width: int, height: int, base: int) -> np.ndarray:
    """A square tower, hollow if it is wide, on a plinth `base` high and one cell wider on all sides."""
    cells = blank(width + 2, width + 2, height)
    trunk = cells[1:-1, 1:-1]
    if width < 5:
        trunk[:] = True
    else:
        _ring(trunk, slice(None))
        trunk[1:-1:2, :, -1] = trunk[:, 1:-1:2, -1] = False  # battlements
    cells[:, :, :base] = True
    return cells if base else trunk


def arch(length: int, width: int, height: int, pillar: int) -> np.ndarray:
    """Two pillars, a layer that reaches one cell further in, and a lintel."""
    cells = blank(length, width, height)
    cells[:pillar] = cells[-pillar:] = True
    reach = pillar + 1 if length < 12 else pillar + 2
    cells[:reach, :, -2] = cells[-reach:, :, -2] = True
    if length >= 12:
        cells[: pillar + 1, :, -3] = cells[-pillar - 1 :, :, -3] = True
    cells[:, :, -1] = True
    return cells


def bridge(length: int, width: int, height: int, pier: int) -> np.ndarray:
    """A deck on piers at its ends, with a third pier if it is long, and a railing on both sides."""
    cells = blank(length, width, height + 1)
    cells[:pier, :, : height - 1] = cells[-pier:, :, : height - 1] = True
    if length > 2 * pier + 8:
        middle = (length - pier) // 2
        cells[middle : middle + pier, :, : height - 1] = True
    cells[:, :, height - 1] = True
    cells[:, 0, height] = cells[:, -1, height] = True
    return cells


def car(length: int, width: int, body: int, cabin: int) -> np.ndarray:
    """A body, `body` high, on two axles, with a cabin `cabin` long behind the bonnet."""
    wheel = 1 if length < 10 else 2
    roof = 1 if length < 10 else 3
    cells = blank(length, width, wheel + body + roof)
    for axle in (1, length - 1 - wheel):
        cells[axle : axle + wheel, :, :wheel] = True
    cells[:, :, wheel : wheel + body] = True
    start = (length - cabin) // 2 + (1 if length >= 10 else 0)
    room = cells[start : start + cabin, :, wheel + body :]
    room[:] = True
    if roof > 1:
        room[1:-1, 1:-1, :-1] = False
    return cells


def ship(length: int, width: int, hull: int, mast: int) -> np.ndarray:
    """A hull that widens upwards to a pointed bow, with a deck house at the stern and a mast."""
    cells = blank(length, width, hull + mast)
    for z in range(hull):
        inset = min((hull - z) // 2, (width - 1) // 2)
        for y in range(inset, width - inset):
            from_middle = abs(2 * y - (width - 1)) // 2
            cells[inset : length - inset - 2 * from_middle, y, z] = True
    if length >= 12:
        cells[3:-6, 3:-3, 2 : hull - 1] = False  # the hold
        cells[2:5, 2:-2, hull : hull + 2] = True
    middle = (width - 1) // 2
    cells[length // 2, middle : width - middle, hull:] = True
    return cells


def train(length: int, width: int, height: int, cab: int) -> np.ndarray:
    """A locomotive: axles, a frame, a boiler, a cab `cab` long at the rear, and a chimney."""
    cells = blank(length, width, height)
    for axle in range(1, length - 1, 3):
        cells[axle, :, 0] = True
    cells[:, :, 1] = True
    inset = 1 if width > 3 else 0
    cells[cab : length - 1, inset : width - inset, 2:-2] = True
    cells[:cab, :, 2:] = True
    if cab > 2 and width > 4:
        cells[1 : cab - 1, 1:-1, 2:-1] = False
    cells[length - 3, inset : width - inset, 2:] = True
    return cells


def piano(width: int, depth: int, height: int, keys: int) -> np.ndarray:
    """An upright piano: a case at the rear, and a keyboard whose top is `keys` high, on two legs, in front of it."""
    cells = blank(width, depth, height)
    case = max(2, depth // 3)
    cells[:, -case:] = True
    if case > 2 and height > 6:
        cells[1:-1, -case + 1 : -1, : height - 2] = False
    cells[:, :, keys - 1] = True
    cells[0, 0, : keys - 1] = cells[-1, 0, : keys - 1] = True
    return cells


def guitar(width: int, body: int, neck: int) -> np.ndarray:
    """A guitar that stands on its body: two bouts with a waist between them, a neck and a wider head."""
    cells = blank(width, 2, body + neck)
    waist = body // 2
    for z in range(body):
        inset = 1 if z in (0, body - 1) else 2 if z == waist and width > 5 else 1 if z > waist else 0
        cells[inset : width - inset, :, z] = True
    middle = (width - 2) // 2
    cells[middle : width - middle, :, body:] = True
    cells[middle - 1 : width - middle + 1, :, -1] = True
    return cells


def mug(width: int, height: int, grip: int) -> np.ndarray:
    """A hollow cup with a bottom, and a handle that reaches out three cells and is `grip` high."""
    cells = blank(width + 3, width, height)
    cup = cells[:width]
    _ring(cup, slice(None))
    cup[:, :, 0] = True
    if width > 6:
        cup[:: width - 1, :: width - 1] = False  # round the corners
    middle = slice((width - 1) // 2, (width - 1) // 2 + 2)
    cells[width:, middle, [1, grip]] = True
    cells[-1, middle, 1 : grip + 1] = True
    return cells


def stairs(steps: int, width: int, tread: int) -> np.ndarray:
    """Solid steps that rise along x; each is one brick high and `tread` deep."""
    cells = blank(steps * tread, width, steps)
    for step in range(steps):
        cells[step * tread :, :, step] = True
    return cells


def wall(length: int, height: int, thick: int, door: int) -> np.ndarray:
    """A wall with a door, `door` wide, in the middle; the top layer is whole."""
    cells = blank(length, thick, height)
    cells[:] = True
    left = (length - door) // 2
    cells[left : left + door, :, :-1] = False
    return cells


def lamp(base: int, height: int, shade: int) -> np.ndarray:
    """A square foot, a pole, and a shade of `shade` layers, each wider than the one below."""
    cells = blank(base, base, height)
    middle = (base - 2) // 2
    cells[:, :, 0] = True
    cells[middle : base - middle, middle : base - middle] = True
    for layer in range(shade):
        edge = max(0, middle - 1 - layer)
        cells[edge : base - edge, edge : base - edge, height - shade + layer] = True
    return cells


def house(length: int, width: int, height: int, door: int) -> np.ndarray:
    """Walls `height` high with a door and a window in front, and a pitched roof in steps."""
    roof = (width + 1) // 2
    cells = blank(length, width, height + roof)
    _ring(cells, slice(0, height))
    cells[1 : 1 + door, 0, : height - 1] = False
    if height > 3 and length > 6:
        cells[length - 3 : length - 1, 0, 1 : height - 1] = False
    for layer in range(roof):
        slope = [layer, min(layer + 1, width - 1 - layer)]  # two cells, one of them above the layer below
        cells[:, [*slope, *(width - 1 - y for y in slope)], height + layer] = True
        cells[[0, -1], layer : width - layer, height + layer] = True  # gables
    return cells


def pyramid(base: int, step: int) -> np.ndarray:
    """Square layers, each `step` cells narrower on every side."""
    layers = (base + 2 * step - 1) // (2 * step)
    cells = blank(base, base, layers)
    for z in range(layers):
        cells[z * step : base - z * step, z * step : base - z * step, z] = True
    return cells


def tree(crown: int, height: int, trunk: int) -> np.ndarray:
    """A trunk `trunk` high below a crown that first widens to `crown` and then narrows."""
    cells = blank(crown, crown, height)
    middle = (crown - 2) // 2
    for z in range(height):
        grown = z - trunk + 1
        left = height - 1 - z
        edge = middle if grown <= 0 else max(0, middle - grown, middle - 1 - left)
        cells[edge : crown - edge, edge : crown - edge, z] = True
    return cells
