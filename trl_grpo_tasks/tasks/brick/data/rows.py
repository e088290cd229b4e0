"""Rows of the brick task, generated offline from parametric shapes.

The split of a request depends only on its content (`Request.is_held_out`), so no seed mixes training and test rows.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ..kit import KIT, Kit
from .captions import caption, choices
from .catalogue import LEVELS, Request
from .designs import NoDesignError, design, encode_voxels

ALL = tuple(LEVELS)
SPLITS = ("train", "test")
PROGRESS_BAR_ROWS = 256  # show a progress bar from this many rows


def make_rows(
    split: str,
    size: int | None,
    seed: int,
    *,
    levels: Sequence[str] = ALL,
    kit: Kit = KIT,
    one_world: bool = False,
) -> list[dict[str, Any]]:
    """Generate `size` different rows of a split, alternating between levels (`size=None`: all rows).

    Where a level runs out, the others provide the rest; there are fewer rows if all of them run out. Requests that
    have no stable answer with the kit are left out, and with `one_world`, where all levels have a world of one size,
    captions that mean different things in two levels. The rows depend on all arguments.

    Columns, to which the task adds the prompt: `caption`, `category`, `level`, `world`, `detail`, `voxels` (the
    target; read it with `decode_voxels`), `gold` (text in canonical order), `loads` (see `loads_on`), `bad` and
    `bad_label` (a failing answer and the kind of failure).
    """
    from tqdm import tqdm

    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; splits are: {', '.join(SPLITS)}")
    sharing = tuple(levels) if one_world else ()
    found = [_shuffled(choices(level, sharing), f"{seed}-{split}-{level}", split) for level in levels]
    made = [_rows_of(level, requests, kit) for level, requests in zip(levels, found, strict=True)]
    alternating = (row for turn in itertools.zip_longest(*made) for row in turn if row is not None)
    total = min(sum(map(len, found)), sys.maxsize if size is None else size)
    hidden = total < PROGRESS_BAR_ROWS or not sys.stderr.isatty()
    rows = itertools.islice(alternating, size)
    return list(tqdm(rows, "making brick rows", total, unit="row", disable=hidden))


def _rows_of(level: str, requests: Sequence[tuple[Request, int]], kit: Kit) -> Iterator[dict[str, Any]]:
    """Generate the rows of a level; ValueError if no request has an answer."""
    is_empty = True
    for request, detail in requests:
        try:
            row = make_row(level, request, detail, kit)
        except NoDesignError:
            continue
        is_empty = False
        yield row
    if is_empty:
        raise ValueError(
            f"nothing of level {level!r} can be built with these bricks at gravity {kit.gravity:g} and a stud "
            f"strength of {kit.stud_strength_N:g} N; choose other --brick_levels, --brick_library, --gravity or "
            "--stud_strength"
        )


def make_row(level: str, request: Request, detail: int, kit: Kit = KIT) -> dict[str, Any]:
    """Generate the row for one request, with a caption at the given level of detail (1 to 3).

    Raises NoDesignError if the request has no stable answer with the kit.
    """
    world = LEVELS[level].world
    made = design(request, world, kit)
    return {
        "caption": caption(level, request, detail, made.support),
        "category": request.category,
        "level": level,
        "world": world,
        "detail": detail,
        "voxels": encode_voxels(made.voxels),
        "gold": made.gold.text,
        "loads": made.loads,
        "bad": made.bad.text,
        "bad_label": made.bad_label,
    }


def _shuffled(found: Sequence[tuple[Request, int]], seed: str, split: str) -> list[tuple[Request, int]]:
    """Return the choices that belong to a split in random order.

    Each (category, detail) pair is equally likely at every position, however many choices it has: sorting by
    exponential arrival times, with rates inverse to the group's size, draws without replacement in that way.
    """
    found = [choice for choice in found if choice[0].is_held_out == (split == "test")]
    crowd = Counter((request.category, detail) for request, detail in found)
    rng = random.Random(seed)
    arrival = [rng.expovariate(1 / crowd[request.category, detail]) for request, detail in found]
    return [found[index] for index in sorted(range(len(found)), key=arrival.__getitem__)]
