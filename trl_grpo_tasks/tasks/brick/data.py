"""Rows of the brick task: made offline from parametric shapes, or read from the published data set (see `hub`).

Which requests are for testing is decided by what they ask for (`Request.is_held_out`), so no seed mixes the splits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .captions import PROMPT_STYLES, caption, choices, prompt
from .catalogue import Request
from .designs import decode_voxels, design, encode_voxels, loads_on, negatives
from .hub import from_hub
from .levels import LEVELS

__all__ = ["ALL", "SPLITS", "decode_voxels", "from_hub", "loads_on", "make_row", "make_rows", "negatives"]

ALL = tuple(LEVELS)
SPLITS = ("train", "test")
ROWS_A_WORKER = 200  # below that a process of its own does not pay
SLOW = 256  # rows that take long enough to show a progress bar

# A fresh interpreter with the parent's import path: it needs no `__main__` guard in the user's script, works from a
# notebook, and imports nothing heavy.
_WORKER = (
    "import sys; sys.path[:] = sys.argv[1].split(chr(10)); from trl_grpo_tasks.tasks.brick.data import _work; _work()"
)


def make_rows(
    split: str,
    size: int | None,
    seed: int,
    *,
    levels: Sequence[str] = ALL,
    prompt_style: str = "short",
    workers: int | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """`size` rows of a split (None: every one once), the levels in turn. A level begins again when it is used up.

    The rows depend on split, size, seed, levels and style, not on `workers`: how many processes make them (None: as
    many as pay).

    Columns: `prompt` (chat messages), `caption`, `category`, `level`, `world`, `detail`, `voxels` (the target; read it
    with `decode_voxels`), `gold` (text in canonical order), `loads` (see `loads_on`), `bad` and `bad_label` (an answer
    that fails, and why).
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; splits are: {', '.join(SPLITS)}")
    if unknown := [level for level in levels if level not in LEVELS]:
        raise ValueError(f"unknown level {unknown[0]!r}; levels are: {', '.join(LEVELS)}")
    if not levels:
        raise ValueError(f"no level is given; levels are: {', '.join(LEVELS)}")
    if prompt_style not in PROMPT_STYLES:
        raise ValueError(f"unknown prompt style {prompt_style!r}; styles are: {', '.join(PROMPT_STYLES)}")
    plan = _plan(split, size, seed, levels)
    if workers is None:
        workers = min(os.cpu_count() or 1, 8, len(plan) // ROWS_A_WORKER)
    with _bar(len(plan), progress) as bar:
        if workers > 1:
            return _in_processes(plan, workers, prompt_style, bar)
        rows = []
        for entry in plan:
            rows.append(make_row(*entry, prompt_style))
            bar.update()
        return rows


def make_row(level: str, request: Request, detail: int, prompt_style: str = "short") -> dict[str, Any]:
    world = LEVELS[level].world
    made = design(request, world)
    text = caption(level, request, detail, made.support)
    return {
        "prompt": prompt(text, world, prompt_style),
        "caption": text,
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


def _plan(split: str, size: int | None, seed: int, levels: Sequence[str]) -> list[tuple[str, Request, int]]:
    orders = [[(level, *choice) for choice in _shuffled(level, split, seed)] for level in levels]
    if size is None:
        return [entry for turn in itertools.zip_longest(*orders) for entry in turn if entry is not None]
    turns = [itertools.cycle(order) for order in orders]
    return [next(turns[index % len(turns)]) for index in range(size)]


def _shuffled(level: str, split: str, seed: int) -> list[tuple[Request, int]]:
    """The choices of a level in random order, without repeats. Categories and details with few choices come as early
    as those with many: the order of a draw in which each has the same chance."""
    found = [choice for choice in choices(level) if choice[0].is_held_out == (split == "test")]
    crowd = Counter((request.category, detail) for request, detail in found)
    rng = random.Random(f"{seed}-{split}-{level}")
    arrival = [rng.expovariate(1 / crowd[request.category, detail]) for request, detail in found]
    return [found[index] for index in sorted(range(len(found)), key=arrival.__getitem__)]


def _bar(total: int, wanted: bool) -> Any:
    from tqdm import tqdm

    shown = wanted and total >= SLOW and sys.stderr.isatty()
    return tqdm(total=total, desc="making brick rows", unit="row", disable=not shown)


def _in_processes(
    plan: list[tuple[str, Request, int]], workers: int, prompt_style: str, bar: Any
) -> list[dict[str, Any]]:
    """The rows of a plan, in order, made by other processes. Each gets whole categories, as far as that goes: layers
    that were covered once need not be again."""
    order = sorted(range(len(plan)), key=lambda index: plan[index][1].category)
    step = -(-len(plan) // workers)
    parts = [[plan[index] for index in order[start : start + step]] for start in range(0, len(plan), step)]
    with ThreadPoolExecutor(workers) as threads:
        made = itertools.chain.from_iterable(threads.map(lambda part: _ask(part, prompt_style, bar), parts))
        rows = dict(zip(order, made, strict=True))
    return [rows[index] for index in range(len(plan))]


def _ask(part: list[tuple[str, Request, int]], prompt_style: str, bar: Any) -> list[dict[str, Any]]:
    entries = [(level, request.category, request.params, request.grams, detail) for level, request, detail in part]
    rows = []
    command = [sys.executable, "-P", "-c", _WORKER, "\n".join(sys.path)]
    pipe = subprocess.PIPE
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # the matrices are small
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8", env=one_thread) as process:
        assert process.stdin is not None and process.stdout is not None  # both are pipes
        with contextlib.suppress(BrokenPipeError):  # it died; its status says so
            process.stdin.write(json.dumps([prompt_style, entries]))
            process.stdin.close()
        for line in process.stdout:
            rows.append(json.loads(line))
            bar.update()
    if process.returncode or len(rows) < len(part):
        raise RuntimeError(
            f"a process that makes brick rows ended with status {process.returncode} after {len(rows)} of {len(part)} "
            "rows; what it wrote above says why, and workers=1 does without it"
        )
    return rows


def _work() -> None:
    """What such a process does: it reads all that it is to make, and writes a row a line."""
    prompt_style, entries = json.load(sys.stdin)
    for level, category, params, grams, detail in entries:
        request = Request(category, tuple((name, value) for name, value in params), tuple(grams))
        print(json.dumps(make_row(level, request, detail, prompt_style)), flush=True)
