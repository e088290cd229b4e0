"""Instructions for building a structure by hand: a parts list (CSV) and building steps (Markdown)."""

from __future__ import annotations

import csv
import heapq
import io
from collections import Counter, defaultdict

from .structure import GROUND, Structure


def parts_csv(structure: Structure) -> str:
    """Return the parts list: size, count, LDraw part number, and name if parts have names, with one line per size.

    >>> print(parts_csv(Structure(((2, 4, 0, 0, 0), (4, 2, 0, 0, 1)))), end="")
    size,count,ldraw_part
    2x4,2,3001
    """
    counts = Counter(structure.kit.part_of[h, w] for h, w, *_ in structure.bricks)
    has_names = any(part.name for part in structure.kit.parts)
    lines = []
    for part, count in sorted(counts.items()):
        named = [part.name] if has_names else []
        lines.append([f"{part.short}x{part.long}", str(count), part.ldraw, *named])
    header = ["size", "count", "ldraw_part", *(["name"] if has_names else [])]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *lines])
    return text.getvalue()


def build_order(structure: Structure) -> list[int]:
    """Return the indices of the bricks that can be built, in an order in which each brick holds on to the ground or to
    an earlier one. Of several such bricks the lowest comes first, so that most structures grow layer by layer.

    Bricks that collide, leave the world or float are left out.
    """
    neighbours: dict[int, list[int]] = defaultdict(list)
    for lower, upper in structure.links:
        neighbours[lower].append(upper)
        neighbours[upper].append(lower)
    order: list[int] = []
    seen, ready = {GROUND}, [(-1, 0, 0, GROUND)]
    while ready:
        index = heapq.heappop(ready)[-1]
        if index != GROUND:
            order.append(index)
        for other in neighbours[index]:
            if other not in seen and other != GROUND:
                seen.add(other)
                brick = structure.bricks[other]
                heapq.heappush(ready, (brick.z, -brick.x, -brick.y, other))
    return order


def steps_markdown(structure: Structure, title: str) -> str:
    """Return numbered building steps, one brick each, with a heading where the layer changes.

    A step says what the brick holds on to, by the numbers of earlier steps. Bricks that cannot be built are listed at
    the end with the reasons.
    """
    order = build_order(structure)
    step_of = {index: step for step, index in enumerate(order, 1)}
    below: dict[int, list[int]] = defaultdict(list)
    above: dict[int, list[int]] = defaultdict(list)
    for lower, upper in structure.links:
        below[upper].append(lower)
        above[lower].append(upper)
    lines = [f"# {' '.join(title.split()) or 'untitled'}", ""]
    lines += [f"{len(order)} bricks. Positions are (x, y) in studs from the left front corner.", ""]
    layer = None
    for step, index in enumerate(order, 1):
        brick = structure.bricks[index]
        if brick.z != layer:
            layer = brick.z
            lines += [*([""] if step > 1 else []), f"## Layer {layer + 1}", ""]
        held = ["on the ground"] if GROUND in below[index] else []
        for word, others in (("on top of", below[index]), ("under", above[index])):
            earlier = sorted(step_of[other] for other in others if other != GROUND and step_of[other] < step)
            if earlier:
                held.append(f"{word} brick{'s' * (len(earlier) > 1)} {', '.join(map(str, earlier))}")
        lines.append(f"{step}. {brick.h}x{brick.w} at ({brick.x}, {brick.y}), {' and '.join(held)}")
    faulty = {*structure.outside, *(later for _, later in structure.collisions)}
    problems = structure.problems() + [
        f"brick {i + 1}, {structure.bricks[i]}, floats" for i in structure.floating if i not in faulty
    ]
    if problems:
        lines += ["", "## What cannot be built", "", *(f"- {problem}" for problem in problems)]
    return "\n".join([*lines, ""])
