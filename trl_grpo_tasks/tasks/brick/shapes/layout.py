"""Conversion of voxels to bricks, such that every brick rests on the ground or on studs of a brick below it.

Layers are covered from the bottom up. Bricks that reach over empty space are placed first, with the deepest joint
possible. The others follow in rows whose direction and starting side alternate from layer to layer, and preferably
bridge the seams of the layer below (running bond). If a layout is too weak, a second one uses narrow planks over
empty space (side by side they bear more than one wide plank), and later ones add seeded noise to the choices.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator

import numpy as np

from ..structure import SIZES, Brick, Structure

Place = tuple[int, int, int, int]  # h, w, x, y of a brick in its layer
# Penalty per cell of brick edge above a seam, in cells of brick area: a 2x4 that bridges a seam beats a 2x6 that
# ends at it.
SEAM_PENALTY = 2.2


def lay(
    voxels: np.ndarray, load_factor: Callable[[Structure], float], limit: float = 0.9, attempts: int = 20
) -> tuple[Structure | None, float]:
    """Fill exactly the True cells of `voxels[x, y, z]` with bricks; return the structure and its load factor.

    Returns the first layout below `limit`, else the strongest one found, or (None, inf) if bricks cannot reach some
    cell. Bricks are in canonical order. `load_factor` evaluates a layout together with its weights. The result is
    deterministic.
    """
    best: tuple[Structure | None, float] = (None, float("inf"))
    for structure in layouts(voxels, attempts):
        factor = load_factor(structure)
        if factor < best[1] or best[0] is None:
            best = structure, factor
        if factor < limit:
            break
    return best


def layouts(voxels: np.ndarray, attempts: int) -> Iterator[Structure]:
    """Generate distinct layouts of the same voxels, the most regular first."""
    seen = set()
    for attempt in range(attempts):
        rng = random.Random(attempt) if attempt > 1 else None
        structure = lay_once(voxels, narrow=attempt == 1, rng=rng)
        if structure is not None and structure.bricks not in seen:
            seen.add(structure.bricks)
            yield structure


def lay_once(
    voxels: np.ndarray, narrow: bool = False, rng: random.Random | None = None, joint: float = 3.0
) -> Structure | None:
    """Make one layout, or return None if it reaches a cell that no brick with a stud below it can cover.

    `joint` is the weight of deep joints; a negative value makes the weak layouts of a careless builder.
    """
    world = voxels.shape[0]
    bricks: list[Brick] = []
    below = np.ones((world, world), dtype=np.int16)  # 1 is the ground; above it, 0 is empty and bricks count from 1
    for z in range(voxels.shape[2]):
        layer = voxels[:, :, z]
        cover = _cover if rng is not None else _cover_cached  # layers repeat within a shape and between shapes
        placed = cover(world, layer.tobytes(), below.tobytes(), z % 2, narrow, joint, rng)
        if placed is None:
            return None
        bricks += [Brick(*place, z) for place in placed]
        below = np.zeros_like(below)
        for number, (h, w, x, y) in enumerate(placed, 1):
            below[x : x + h, y : y + w] = number
    return Structure(tuple(bricks), world).canonical() if bricks else None


def _cover(
    world: int, layer: bytes, below_layer: bytes, turn: int, narrow: bool, joint: float, rng: random.Random | None
) -> list[Place] | None:
    """Cover a layer exactly with bricks that have a stud below; return their places, or None at a dead end."""
    cells = np.flatnonzero(np.frombuffer(layer, dtype=bool))
    below = np.frombuffer(below_layer, dtype=np.int16).reshape(world, world)
    places, cover, area = _places(world, tuple(cells.tolist()))
    owners = below.ravel()[cells]
    studs = cover @ (owners > 0).astype(np.float32)
    usable = studs > 0
    places, cover, area, studs = places[usable], cover[usable], area[usable], studs[usable]
    # A place scores by area, the layer's direction, the number of bricks below it, and, over empty space, the depth
    # of its joint, because the load that a joint bears grows with the square of its depth.
    score = area + 0.3 * (places[:, turn] - places[:, 1 - turn])
    for brick in np.unique(owners[owners > 0]):
        score += 1.5 * (cover @ (owners == brick).astype(np.float32) > 0)
    score -= SEAM_PENALTY * _seams(below, np.frombuffer(layer, dtype=bool).reshape(world, world), places)
    for place in np.flatnonzero(studs < area):
        h, w, x, y = places[place]
        supported = below[x : x + h, y : y + w] > 0
        deep_x, deep_y = supported.any(axis=1).sum(), supported.any(axis=0).sum()
        depth = min(deep_x if deep_x < h else 9, deep_y if deep_y < w else 9)
        score[place] += joint * depth - (area[place] if narrow and min(h, w) > 1 else 0)
    if rng is not None:
        score += [rng.gauss(0, 3) for _ in range(len(score))]
    # Unsupported cells come first, those that the fewest bricks can reach before others; then in reading order.
    x, y = np.divmod(cells, world)
    reading = x * 100 + y if turn == 0 else 10_000 - y * 100 - x
    free = np.ones(len(cells), dtype=bool)
    alive = np.ones(len(places), dtype=bool)
    ways = cover.sum(axis=0)
    chosen: list[Place] = []
    while free.any():
        urgency = np.where(owners > 0, 10**9 + reading, ways * 10**5 + reading)
        cell = int(np.argmin(np.where(free, urgency, 10**10)))
        candidates = np.flatnonzero(alive & (cover[:, cell] > 0))
        for best in candidates[np.argsort(-score[candidates], kind="stable")]:
            taken = cover[best] > 0
            gone = alive & (cover @ cover[best] > 0)
            ways_left = ways - gone.astype(np.float32) @ cover
            if (ways_left[free & ~taken] > 0).all():
                break
        else:
            return None
        h, w, x0, y0 = places[best].tolist()
        chosen.append((h, w, x0, y0))
        free, alive, ways = free & ~taken, alive & ~gone, ways_left
    return chosen


def _seams(below: np.ndarray, layer: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Count, for each place, the cells of its edges inside the layer that lie above a seam of the layer below."""
    h, w, x, y = places.T
    counts = np.zeros(len(places))
    for across, (start, long, side, wide) in ((False, (x, h, y, w)), (True, (y, w, x, h))):
        bricks, cells = (below.T, layer.T) if across else (below, layer)
        apart = (bricks[:-1] != bricks[1:]) & (bricks[:-1] > 0) & (bricks[1:] > 0) & cells[:-1] & cells[1:]
        # Zero rows stand for the edges of the world; sums along an edge are differences of cumulative sums.
        running = np.pad(np.cumsum(apart, axis=1), ((1, 1), (1, 0)))
        for edge in (start, start + long):
            counts += running[edge, side + wide] - running[edge, side]
    return counts


_cover_cached = functools.lru_cache(maxsize=20_000)(_cover)


@functools.lru_cache(maxsize=2_000)
def _places(world: int, cells: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return every place inside `cells`, its 0/1 coverage as [place, cell], and its area."""
    index = np.full(world * world, -1)
    index[list(cells)] = np.arange(len(cells))
    places, covers = [np.empty((0, 4), dtype=np.int64)], [np.empty((0, len(cells)), dtype=np.float32)]
    for of_size, on_cells in _places_in(world):
        covered = index[on_cells]
        inside = covered.min(axis=1) >= 0
        cover = np.zeros((int(inside.sum()), len(cells)), dtype=np.float32)
        np.put_along_axis(cover, covered[inside], 1, axis=1)
        places.append(of_size[inside])
        covers.append(cover)
    cover = np.concatenate(covers)
    return np.concatenate(places), cover, cover.sum(axis=1)


@functools.cache
def _places_in(world: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return, for each brick size, its places in a layer and the cells they cover, as x * world + y."""
    found = []
    for h, w in SIZES:
        corners = [(x, y) for x in range(world - h + 1) for y in range(world - w + 1)]
        footprint = np.add.outer(np.arange(h) * world, np.arange(w)).ravel()
        if corners:
            places = np.array([(h, w, x, y) for x, y in corners])
            found.append((places, np.add.outer(places[:, 2] * world + places[:, 3], footprint)))
    return found
