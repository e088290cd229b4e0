"""Rows of the brick task, generated offline from parametric shapes or read from a published data set (see `hub`).

The split of a request depends only on its content (`Request.is_held_out`), so no seed mixes training and test rows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ....constraints.workers import usable_cores
from ..kit import KIT, Kit
from .captions import caption, choices
from .catalogue import Request
from .designs import NoDesignError, decode_voxels, design, encode_voxels, loads_on, negatives
from .hub import from_hub
from .levels import LEVELS

__all__ = ["ALL", "SPLITS", "decode_voxels", "from_hub", "loads_on", "make_row", "make_rows", "negatives"]

ALL = tuple(LEVELS)
SPLITS = ("train", "test")
MIN_ROWS_PER_WORKER = 200  # starting a process does not pay off for fewer rows
PROGRESS_BAR_ROWS = 256  # show a progress bar from this many rows

# Worker processes are fresh interpreters with the parent's import path: unlike multiprocessing, this needs no
# `__main__` guard in the user's script, works in notebooks, and imports nothing heavy.
_WORKER = (
    "import json, pickle, sys; sys.path[:] = sys.argv[1].split(chr(10)); "
    "from trl_grpo_tasks.tasks.brick.data.rows import _row_or_none; "
    "plan, kit = pickle.load(sys.stdin.buffer); "
    "[print(json.dumps(_row_or_none(*entry, kit)), flush=True) for entry in plan]"
)


def make_rows(
    split: str,
    size: int | None,
    seed: int,
    *,
    levels: Sequence[str] = ALL,
    kit: Kit = KIT,
    one_world: bool = False,
    workers: int | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Generate `size` different rows of a split, alternating between levels (`size=None`: all rows).

    Where a level runs out, the others provide the rest; there are fewer rows if all of them run out. Requests that
    have no stable answer with the kit are left out, and with `one_world`, where all levels have a world of one size,
    captions that mean different things in two levels. The rows depend on all arguments but `workers`, the number of
    processes (None: chosen from the number of rows), and `progress`.

    Columns, to which the task adds the prompt: `caption`, `category`, `level`, `world`, `detail`, `voxels` (the
    target; read it with `decode_voxels`), `gold` (text in canonical order), `loads` (see `loads_on`), `bad` and
    `bad_label` (a failing answer and the kind of failure).
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; splits are: {', '.join(SPLITS)}")
    if unknown := [level for level in levels if level not in LEVELS]:
        raise ValueError(f"unknown level {unknown[0]!r}; levels are: {', '.join(LEVELS)}")
    if not levels:
        raise ValueError(f"no level was given; levels are: {', '.join(LEVELS)}")
    sharing = tuple(levels) if one_world else ()
    todo = {level: _shuffled(choices(level, sharing), f"{seed}-{split}-{level}", split) for level in levels}
    rows: dict[str, list[dict[str, Any]]] = {level: [] for level in levels}
    with _progress_bar(_shares(todo, size).total(), progress) as bar:
        # A request without an answer is replaced by the next of its level, or of another level, in another round.
        while plan := [
            (level, *choice)
            for level, share in _shares({level: rows[level] + todo[level] for level in levels}, size).items()
            for choice in todo[level][: max(0, share - len(rows[level]))]
        ]:
            processes = min(usable_cores(), 8, len(plan) // MIN_ROWS_PER_WORKER) if workers is None else workers
            for (level, *_), row in zip(plan, _rows_of(plan, processes, kit, bar), strict=True):
                todo[level] = todo[level][1:]
                if row is not None:
                    rows[level].append(row)
    if empty := [level for level in levels if not rows[level] and not todo[level]]:
        raise ValueError(
            f"nothing of level {empty[0]!r} can be built with these bricks at gravity {kit.gravity:g} and a stud "
            f"strength of {kit.stud_strength_N:g} N; choose other --brick_levels, --brick_library, --gravity or "
            "--stud_strength"
        )
    return _alternating(rows.values())[:size]


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


def _alternating(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """Take an item of each list in turn until all are used up."""
    return [item for turn in itertools.zip_longest(*lists) for item in turn if item is not None]


def _shares(supply: Mapping[str, Sequence[Any]], size: int | None) -> Counter[str]:
    """Return how many of `size` rows each level provides, given what it has."""
    return Counter(_alternating([level] * len(items) for level, items in supply.items())[:size])


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


def _progress_bar(total: int, wanted: bool) -> Any:
    from tqdm import tqdm

    shown = wanted and total >= PROGRESS_BAR_ROWS and sys.stderr.isatty()
    return tqdm(total=total, desc="making brick rows", unit="row", disable=not shown)


def _rows_of(plan: list[tuple[str, Request, int]], workers: int, kit: Kit, bar: Any) -> list[dict[str, Any] | None]:
    """Generate the rows of a plan, in worker processes if there are several, and return them in order.

    A request without an answer gives None. The plan is split by category as far as possible, because each worker
    caches the layers it has already covered.
    """
    if workers <= 1:
        made = []
        for entry in plan:
            made.append(_row_or_none(*entry, kit))
            bar.update()
        return made
    order = sorted(range(len(plan)), key=lambda index: plan[index][1].category)
    step = -(-len(plan) // workers)
    parts = [[plan[index] for index in order[start : start + step]] for start in range(0, len(plan), step)]
    with ThreadPoolExecutor(workers) as threads:
        results = threads.map(lambda part: _run_worker(part, kit, bar), parts)
        rows = dict(zip(order, itertools.chain.from_iterable(results), strict=True))
    return [rows[index] for index in range(len(plan))]


def _row_or_none(level: str, request: Request, detail: int, kit: Kit) -> dict[str, Any] | None:
    try:
        return make_row(level, request, detail, kit)
    except NoDesignError:
        return None


def _run_worker(part: list[tuple[str, Request, int]], kit: Kit, bar: Any) -> list[dict[str, Any] | None]:
    """Generate rows in a new process, updating the progress bar for each."""
    rows = []
    command = [sys.executable, "-P", "-c", _WORKER, "\n".join(sys.path)]
    pipe = subprocess.PIPE
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # the matrices are small
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=one_thread) as process:
        assert process.stdin is not None and process.stdout is not None  # both are pipes
        with contextlib.suppress(BrokenPipeError):  # the process died; its exit status is checked below
            process.stdin.write(pickle.dumps((part, kit)))
            process.stdin.close()
        for line in process.stdout:
            rows.append(json.loads(line))
            bar.update()
    if process.returncode or len(rows) < len(part):
        raise RuntimeError(
            f"a process that generates brick rows exited with status {process.returncode} after {len(rows)} of "
            f"{len(part)} rows; see its error output above, or pass workers=1 to generate rows in this process"
        )
    return rows
