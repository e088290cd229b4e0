"""Print BrickGPT's metrics of structures in LDraw files or in files of StableText2Brick's format.

trl-grpo-tasks tool brick metrics chair.ldr
trl-grpo-tasks tool brick metrics structures.jsonl more_structures.parquet

An LDraw file (.ldr, .mpd) is one structure, from any program: it may hold the eight bricks of the
task, in quarter turns, and submodels. Other parts are an error, because a structure without them
is another one. The lowest bricks stand on the ground. A .jsonl, .json or .parquet file has a
column `bricks`: text in a world of 20, as the data set has it or as a model wrote it. A structure
is valid if every line is a brick of the library and no brick collides or leaves the world. The
stability of a brick is 0 if it falls in the analysis of StableLego and BrickGPT, else the unused
share of its studs' friction. A structure is stable if it is valid and all its bricks have a
stability above 0. CLIP similarity, which the papers report as well, is left out: it needs a
renderer and a model of theirs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ...files import check_local_path
from .data.hub import FILES, read_entries
from .ldraw import from_ldr
from .physics.stability import SolverError, analyse
from .reward import published_facts, verdict
from .structure import WORLD, Reading, Structure, parse

LDRAW_FILES = (".ldr", ".mpd")
KNOWN_FILES = (*LDRAW_FILES, *FILES)


def main(arguments: Sequence[str]) -> int:
    """Print BrickGPT's metrics of LDraw files and of files in StableText2Brick's format."""
    parser = argparse.ArgumentParser(
        "trl-grpo-tasks tool brick metrics", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help=f"structures: {', '.join(KNOWN_FILES)}")
    files = {file: structures_of(file) for file in parser.parse_args(arguments).files}
    for file, content in files.items():
        for structure in content:
            if isinstance(structure, Structure):
                print(f"{file}: {_described(structure)}")
    found = metrics_of(structure for content in files.values() for structure in content)
    print(f"structures               {found['structures']}")
    print(f"valid                    {found['valid']:.1%}")
    print(f"stable                   {found['stable']:.1%}")
    for name in ("mean", "min"):
        value = found[f"{name}_brick_stability"]
        print(f"{name + ' brick stability':24} {'-' if value is None else f'{value:.3f}'}  (valid structures)")
    print(f"stable by load factor    {found['stable_by_load_factor']:.1%}  (the analysis of this task)")
    if found["unsolved"]:
        print(f"left out                 {found['unsolved']}  (no solver could analyse them)")
    return 0


def structures_of(source: str) -> list[str | Structure]:
    """Return the structures of a file, as text if it may be invalid. Raises ValueError if the file cannot be read."""
    check_local_path(source, "file")
    path = Path(source).expanduser()
    if not path.is_file() or path.suffix.lower() not in KNOWN_FILES:
        *first, last = KNOWN_FILES
        raise ValueError(f"{source} is not a {', '.join(first)} or {last} file; give a file of structures")
    if path.suffix.lower() in LDRAW_FILES:
        try:
            return [from_ldr(path.read_text(encoding="utf-8-sig", errors="replace"))]
        except ValueError as error:
            raise ValueError(f"{source} cannot be read: {error}") from error
    entries = read_entries(path)
    if not entries:
        raise ValueError(f"{source} contains no structures")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry.get("bricks"), str):
            columns = ", ".join(map(str, entry)) or "none"
            raise ValueError(f"{source}, row {number}: column 'bricks' is not text; columns are: {columns}")
    return [entry["bricks"] for entry in entries]


def _described(structure: Structure) -> str:
    problems = structure.problems()
    try:
        return verdict(structure, None if problems else analyse(structure), "; ".join(problems[:3]))
    except SolverError as error:
        return f"no solver could analyse it: {error}"


def metrics_of(structures: Iterable[str | Structure]) -> dict[str, Any]:
    """Compute the metrics of structures, given as such or as text of any kind.

    Shares are of all `structures` but the `unsolved` ones, which no solver could analyse; brick stabilities are
    averaged over valid structures, and None if there is none.
    """
    facts: list[dict[str, Any]] = []
    unsolved = 0
    for one in structures:
        reading = parse(one, WORLD) if isinstance(one, str) else Reading(one)
        structure = reading.structure
        valid = not (reading.problems or structure.problems())
        try:
            published, ours = (analyse(structure, "published"), analyse(structure)) if valid else (None, None)
        except SolverError:
            unsolved += 1
        else:
            ours_stable = ours is not None and ours.stable
            facts.append(published_facts(published) | {"valid": valid, "stable_by_load_factor": ours_stable})

    def mean(name: str) -> float | None:
        values = [fact[name] for fact in facts if fact[name] is not None]
        return fmean(values) if values else None

    shares = {name: mean(name) or 0.0 for name in ("valid", "stable_by_load_factor")}
    stabilities = {name: mean(name) for name in ("mean_brick_stability", "min_brick_stability")}
    stable = mean("published_stable") or 0.0
    return {"structures": len(facts), "unsolved": unsolved, "stable": stable, **shares, **stabilities}
