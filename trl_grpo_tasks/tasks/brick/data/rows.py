"""Rows of the brick task, generated offline from parametric shapes.

The split of a request depends only on its content (`Request.is_held_out`), so no seed mixes training and test rows.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ....constraints.workers import fresh_python, usable_cores
from ..kit import KIT, Kit
from .captions import caption, choices
from .catalogue import LEVELS, Request
from .designs import NoDesignError, design, encode_voxels

ALL = tuple(LEVELS)
SPLITS = ("train", "test")
PROGRESS_BAR_ROWS = 256  # show a progress bar from this many rows
MIN_ROWS_PER_WORKER = 200  # starting a process does not pay off for fewer rows
_WORKER = (
    "import pickle; from trl_grpo_tasks.tasks.brick.data.rows import row_or_none; "
    "part, kit = pickle.load(sys.stdin.buffer); "
    "sys.stdout.buffer.write(pickle.dumps([row_or_none(*entry, kit) for entry in part]))"
)
Entry = tuple[str, Request, int]  # level, request, detail of the caption


def make_rows(
    split: str, size: int | None, seed: int, *, levels: Sequence[str] = ALL, kit: Kit = KIT, one_world: bool = False
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
    entries = [[(level, *one) for one in requests] for level, requests in zip(levels, found, strict=True)]
    total = min(sum(map(len, found)), sys.maxsize if size is None else size)
    ready = _made_by_workers(list(itertools.islice(_alternating(entries), total)), kit)
    alternating = _alternating([_rows_of(*one, kit, ready) for one in zip(levels, entries, strict=True)])
    hidden = total < PROGRESS_BAR_ROWS or not sys.stderr.isatty()
    rows = itertools.islice(alternating, size)
    return list(tqdm(rows, "making brick rows", total, unit="row", disable=hidden))


def _alternating(lists: Sequence[Any]) -> Iterator[Any]:
    """Take an item of each in turn until all are used up."""
    return (item for turn in itertools.zip_longest(*lists) for item in turn if item is not None)


def _rows_of(level: str, entries: Sequence[Entry], kit: Kit, ready: Mapping[Entry, Any]) -> Iterator[dict[str, Any]]:
    """Generate the rows of a level, unless they are `ready`; ValueError if no request has an answer."""
    is_empty = True
    for entry in entries:
        row = ready[entry] if entry in ready else row_or_none(*entry, kit)
        if row is not None:
            is_empty = False
            yield row
    if is_empty:
        raise ValueError(
            f"nothing of level {level!r} can be built at gravity {kit.gravity:g} and a stud strength of "
            f"{kit.stud_strength_N:g} N; choose other --brick_levels, --gravity or --stud_strength"
        )


def row_or_none(level: str, request: Request, detail: int, kit: Kit) -> dict[str, Any] | None:
    """Return the row of a request; None if nothing that stands has its shape."""
    try:
        return make_row(level, request, detail, kit)
    except NoDesignError:
        return None


def _made_by_workers(entries: Sequence[Entry], kit: Kit) -> dict[Entry, dict[str, Any] | None]:
    """Generate many rows in several processes; none if they are few."""
    workers = min(usable_cores(), 8, len(entries) // MIN_ROWS_PER_WORKER)
    if workers < 2:
        return {}
    # By category as far as possible: a process caches the layers that it has already covered.
    ordered = sorted(entries, key=lambda entry: entry[1].category)
    step = -(-len(ordered) // workers)
    parts = [ordered[start : start + step] for start in range(0, len(ordered), step)]
    with ThreadPoolExecutor(workers) as threads:
        rows = itertools.chain.from_iterable(threads.map(partial(_in_process, kit=kit), parts))
        return dict(zip(ordered, rows, strict=True))


def _in_process(part: list[Entry], kit: Kit) -> list[dict[str, Any] | None]:
    one_thread = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # the matrices are small
    ended = subprocess.run(
        fresh_python(_WORKER), input=pickle.dumps((part, kit)), stdout=subprocess.PIPE, env=one_thread
    )
    if ended.returncode:
        raise RuntimeError(
            f"a process that generates brick rows exited with status {ended.returncode}; see its error output above"
        )
    return pickle.loads(ended.stdout)


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
