"""What structures are built with: the parts and their masses, gravity, and the strength of studs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

Size = tuple[int, int]


class Part(NamedTuple):
    """A brick of `short` x `long` cells, one layer high. `ldraw` is its number in LDraw's library."""

    short: int
    long: int
    mass_kg: float
    ldraw: str


PARTS = (
    Part(1, 1, 0.00043, "3005"), Part(1, 2, 0.00081, "3004"), Part(1, 4, 0.00157, "3010"),
    Part(1, 6, 0.00228, "3009"), Part(1, 8, 0.00303, "3008"), Part(2, 2, 0.00115, "3003"),
    Part(2, 4, 0.00216, "3001"), Part(2, 6, 0.00323, "2456"),
)  # fmt: skip
GRAVITY = 9.8
STUD_STRENGTH_N = 0.98


@dataclass(frozen=True)
class Kit:
    """Parts and physics. The default is the kit of StableLego and BrickGPT.

    `gravity` is in m/s2. `stud_strength_N` is the largest friction that one contact point of a stud can bear. Parts
    can be rotated, so `sizes`, which text and constraints use, has both orientations of a part that is not square.
    """

    parts: tuple[Part, ...] = PARTS
    gravity: float = GRAVITY
    stud_strength_N: float = STUD_STRENGTH_N

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(sorted({size for part in self.parts for size in (part[:2], part[1::-1])}))

    @cached_property
    def part_of(self) -> dict[Size, Part]:
        """The part of each size, in both orientations."""
        return {size: part for part in self.parts for size in (part[:2], part[1::-1])}

    @property
    def written_sizes(self) -> str:
        return ", ".join(f"{h}x{w}" for h, w in self.sizes)


KIT = Kit()
