"""Brick structures for tests of stability, and constants for computing the forces by hand."""

import random

import pytest

from trl_grpo_tasks.tasks.brick.structure import SIZES, Brick, Structure

T = 0.98
CANTILEVER = "1x1 (5,5,0)\n1x8 (5,5,1)\n"
# A 1x8 brick of weight W on one stud at its end, with its middle 3.5 studs away. The stud touches at four points: the
# ones at y = -1/4 and x = +-1/4 hold it down with f each, the one at y = 1/4 pushes up with A. Forces: A - 3f = W.
# Moments about the stud: (A + f) / 4 = 3.5 W. So f = 3.25 W, and less than that at any point means more at another.
# The 1x1 below has the same moment but weighs down more, so it is the 1x8 that needs most.
# A load P at the far end, 7 studs away, makes that A - 3f = W + P and (A + f) / 4 = 3.5 W + 7 P: f = 3.25 W + 6.75 P.
W = 0.00303 * 9.8


def cells(brick: Brick) -> set[tuple[int, int, int]]:
    return {(brick.x + i, brick.y + j, brick.z) for i in range(brick.h) for j in range(brick.w)}


def overlaps(one: Brick, other: Brick) -> bool:
    """Whether two bricks share a cell when seen from above."""
    return not cells(one).isdisjoint(cells(other._replace(z=one.z)))


def random_structure(bricks: int, seed: int, up: float = 0.8, ground: float = 0.1, world: int = 20) -> Structure:
    """Build a structure by attaching each brick to a random earlier brick, above or below, or to the ground."""
    chance = random.Random(seed)
    placed: list[Brick] = []
    taken: set[tuple[int, int, int]] = set()
    while len(placed) < bricks:
        h, w = chance.choice(SIZES)
        if not placed or chance.random() < ground:
            brick = Brick(h, w, chance.randint(0, world - h), chance.randint(0, world - w), 0)
        else:
            other = chance.choice(placed)
            x = chance.randint(other.x - h + 1, other.x + other.h - 1)
            y = chance.randint(other.y - w + 1, other.y + other.w - 1)
            brick = Brick(h, w, x, y, other.z + (1 if chance.random() < up else -1))
        if brick.is_inside(world) and not cells(brick) & taken:
            placed.append(brick)
            taken |= cells(brick)
    return Structure(tuple(placed), world)


def close(value):
    return pytest.approx(value, rel=1e-6, abs=1e-9)
