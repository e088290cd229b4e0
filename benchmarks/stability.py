"""Cost of the stability analysis of brick structures: milliseconds to build and solve, best of five, on one core.

    python benchmarks/stability.py

Each row is a structure: random connected ones and the reference structures of the tests. Columns:
- `auto`: `analyse` with its default solver; `highs`, `clarabel`, `gurobi`: with this solver;
- `published`: the analysis of StableLego and BrickGPT;
- `plain`: a direct formulation as in the papers, with variables for every contact point, stud and pair of cells,
  solved by gurobipy if its free licence allows the size and by scipy (HiGHS) otherwise;
- `ratio`: `plain` divided by `auto`.
Prints a table and writes benchmarks/results/stability.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from trl_grpo_tasks.tasks.brick.kit import KIT
from trl_grpo_tasks.tasks.brick.physics.stability import analyse
from trl_grpo_tasks.tasks.brick.structure import SIZES, Brick, Structure, parse

REFERENCE = Path(__file__).parents[1] / "tests" / "data" / "brick_structures.json"
COLUMNS = ("auto", "highs", "clarabel", "gurobi", "published", "plain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="number of random structures per size")
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "stability.json"))
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    structures = {
        f"random {bricks}, seed {seed}": random_structure(bricks, seed)
        for bricks in (10, 30, 100, 200)
        for seed in range(arguments.seeds)
    }
    for case in json.loads(REFERENCE.read_text())["cases"]:
        structures[case["name"]] = parse(case["bricks"], case["world"]).structure
    analyse("1x1 (0,0,0)", backend="gurobi")  # warm-up: imports and cached tables
    rows = []
    print(
        f"{'milliseconds':36}{'bricks':>7}"
        + "".join(f"{name:>10}" for name in COLUMNS)
        + f"{'ratio':>7}  plain solver"
    )
    for name, structure in structures.items():
        row = {"structure": name, "bricks": len(structure), **measure(structure)}
        rows.append(row)
        cells = "".join(f"{row[column]:10.2f}" if row[column] else f"{'-':>10}" for column in COLUMNS)
        times = f"{row['plain'] / row['auto']:7.1f}  {row['plain_by']}" if row["plain"] else ""
        print(f"{name:36}{len(structure):7}{cells}{times}")
    machine = {"machine": platform.machine(), "processors": os.cpu_count(), "python": platform.python_version()}
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**machine, "rows": rows}, indent=2))


def measure(structure: Structure) -> dict[str, Any]:
    """Time every variant of the analysis on one structure, and check that the plain formulation agrees."""

    def fresh() -> Structure:  # a structure caches its own results
        return Structure(structure.bricks, structure.world)

    found = analyse(structure)
    row: dict[str, Any] = {"load_factor": found.load_factor, "auto_by": found.solver, "plain": None, "plain_by": None}
    for backend in ("auto", "highs", "clarabel", "gurobi"):
        row[backend] = best(lambda backend=backend: analyse(fresh(), backend=backend))
    if found.load_factor is not None and analyse(structure, backend="gurobi").solver != "gurobi":
        row["gurobi"] = None  # the licence does not cover this size
    row["published"] = best(lambda: analyse(fresh(), "published"), repeats=2)
    if found.load_factor is not None:
        solve = plain_gurobi if plain_gurobi(structure) is not None else plain_scipy
        row["plain"], row["plain_by"] = best(lambda: solve(fresh())), solve.__name__.removeprefix("plain_")
        answer = solve(structure)
        assert answer is not None and abs(answer - found.load_factor) < 1e-6 * max(1, answer)
    return row


def best(call: Callable[[], Any], repeats: int = 5) -> float:
    """Return the shortest time of a call in milliseconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


def random_structure(bricks: int, seed: int, world: int = 20) -> Structure:
    """Return a random structure: bricks are attached above or below a random brick, or placed on the ground."""
    rng = random.Random(seed)
    placed: list[Brick] = []
    taken: set[tuple[int, int, int]] = set()
    while len(placed) < bricks:
        h, w = rng.choice(SIZES)
        if not placed or rng.random() < 0.1:
            brick = Brick(h, w, rng.randint(0, world - h), rng.randint(0, world - w), 0)
        else:
            on = rng.choice(placed)
            x, y = rng.randint(on.x - h + 1, on.x + on.h - 1), rng.randint(on.y - w + 1, on.y + on.w - 1)
            brick = Brick(h, w, x, y, on.z + rng.choice((1, 1, 1, 1, -1)))
        cells = {(i, j, brick.z) for i in range(brick.x, brick.x + h) for j in range(brick.y, brick.y + w)}
        if brick.is_inside(world) and not cells & taken:
            placed.append(brick)
            taken |= cells
    return Structure(tuple(placed), world)


def plain_forces(structure: Structure) -> Iterator[tuple[list[tuple[int, float]], bool]]:
    """Yield every force as its entries in the equilibrium equations, and whether friction limits it.

    Each brick has five equations, in mN and mm.
    """
    bricks = structure.bricks
    owner = {
        (i, j, b.z): n for n, b in enumerate(bricks) for i in range(b.x, b.x + b.h) for j in range(b.y, b.y + b.w)
    }

    def entries(n: int | None, sign: int, force: tuple[int, int, int], x: float, y: float, height: float) -> list:
        if n is None:
            return []
        fx, fy, fz = force
        dx, dy = x - bricks[n].x - (bricks[n].h - 1) / 2, y - bricks[n].y - (bricks[n].w - 1) / 2
        values = (fx, fy, fz, 7.8 * dy * fz - height * fy, -7.8 * dx * fz + height * fx)
        return [(5 * n + row, sign * value) for row, value in enumerate(values) if value]

    for (i, j, z), upper in owner.items():
        lower = owner.get((i, j, z - 1))
        if z == 0 or lower is not None:
            narrow = min(bricks[upper].h, bricks[upper].w) == 1
            for dx, dy in [(0, -2), (-2, 0), (0, 2), (2, 0)] if narrow else [(1, -1), (-2, 0), (1, 1)]:
                at = i + dx / 8, j + dy / 8
                for up in (1, -1):
                    force = (0, 0, up)
                    yield entries(upper, 1, force, *at, -4.8) + entries(lower, -1, force, *at, 4.8), up < 0
            for press in ((1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0)):
                yield entries(upper, 1, press, i, j, -4.8) + entries(lower, -1, press, i, j, 4.8), False
        for push in ((1, 0, 0), (0, 1, 0)):
            beside = owner.get((i + push[0], j + push[1], z))
            if beside is not None and beside != upper:
                yield entries(beside, 1, push, i, j, -4.8) + entries(upper, -1, push, i, j, -4.8), False


@cache
def gurobi_environment() -> Any:
    import gurobipy

    return gurobipy.Env(params={"OutputFlag": 0, "Threads": 1})


def plain_gurobi(structure: Structure) -> float | None:
    """Return the load factor, or None if gurobipy is not installed or its licence does not cover this size."""
    try:
        import gurobipy
    except ImportError:
        return None
    try:
        with gurobipy.Model(env=gurobi_environment()) as model:
            factor = model.addVar(obj=1)
            sums: list[list] = [[] for _ in range(5 * len(structure))]
            for entries, is_friction in plain_forces(structure):
                force = model.addVar()
                for row, value in entries:
                    sums[row].append(value * force)
                if is_friction:
                    model.addConstr(force <= 980 * factor)
            for row, terms in enumerate(sums):
                weight = 9800 * KIT.part_of[structure.bricks[row // 5][:2]].mass_kg if row % 5 == 2 else 0
                model.addConstr(gurobipy.quicksum(terms) == weight)
            model.optimize()
            return model.ObjVal
    except gurobipy.GurobiError:
        return None


def plain_scipy(structure: Structure) -> float | None:
    """Return the load factor, computed by scipy's linprog (HiGHS)."""
    rows, columns, values, frictions = [], [], [], []
    count = 0
    for entries, is_friction in plain_forces(structure):
        for row, value in entries:
            rows.append(row)
            columns.append(count)
            values.append(value)
        if is_friction:
            frictions.append(count)
        count += 1
    weights = np.zeros(5 * len(structure))
    weights[2::5] = [9800 * KIT.part_of[brick[:2]].mass_kg for brick in structure.bricks]
    at, ones = np.arange(len(frictions)), np.ones(len(frictions))
    limits = sparse.csr_array(
        (np.r_[ones, -980 * ones], (np.r_[at, at], np.r_[frictions, count * ones])), shape=(len(at), count + 1)
    )
    balance = sparse.csr_array((values, (rows, columns)), shape=(len(weights), count + 1))
    cost = np.append(np.zeros(count), 1)
    return linprog(cost, A_ub=limits, b_ub=np.zeros(len(at)), A_eq=balance, b_eq=weights).fun


if __name__ == "__main__":
    main()
