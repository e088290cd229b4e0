"""Print the published metrics of structures in files of StableText2Brick's format.

trl-grpo-tasks task brick metrics structures.jsonl more_structures.parquet

A file is .jsonl, .json or .parquet with a column `bricks`: text in a world of 20, as the data set
has it or as a model wrote it. A structure is valid if every line is a brick of the library and no
brick collides or leaves the world. The stability of a brick is 0 if it falls in the analysis of
StableLego and BrickGPT, else the unused share of its studs' friction. A structure is stable if it
is valid and all its bricks have a stability above 0. CLIP similarity, which the papers report as
well, is left out: it needs a renderer and a model of theirs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ...files import check_local_path
from .hub import FILES, read_entries
from .stability import SolverError, analyse
from .structure import WORLD, parse


@dataclass(frozen=True)
class Metrics:
    """Metrics of some structures. Shares are of all structures; brick stabilities are averaged over valid ones."""

    structures: int
    valid: float
    stable: float
    mean_brick_stability: float | None  # None if no structure is valid
    min_brick_stability: float | None
    stable_by_load_factor: float
    unsolved: int  # structures that no solver could analyse, which are left out


def main(arguments: Sequence[str]) -> int:
    """Print the published metrics of files in StableText2Brick's format."""
    parser = argparse.ArgumentParser(
        "trl-grpo-tasks task brick metrics",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", help=f"files with a column `bricks`: {', '.join(FILES)}")
    texts = [text for file in parser.parse_args(arguments).files for text in texts_of(file)]
    found = metrics_of(texts)
    means = [found.mean_brick_stability, found.min_brick_stability]
    mean, least = ("-" if value is None else f"{value:.3f}" for value in means)
    print(f"structures               {found.structures}")
    print(f"valid                    {found.valid:.1%}")
    print(f"stable                   {found.stable:.1%}")
    print(f"mean brick stability     {mean}  (valid structures)")
    print(f"min brick stability      {least}  (valid structures)")
    print(f"stable by load factor    {found.stable_by_load_factor:.1%}  (the analysis of this task)")
    if found.unsolved:
        print(f"left out                 {found.unsolved}  (no solver could analyse them)")
    return 0


def texts_of(source: str) -> list[str]:
    """Return the structures of a file as text. Raises ValueError if it is not in the format."""
    check_local_path(source, "file")
    path = Path(source).expanduser()
    if not path.is_file() or path.suffix not in FILES:
        raise ValueError(f"{source} is not a {', '.join(FILES[:-1])} or {FILES[-1]} file; give a file of structures")
    entries: list[dict[str, Any]] = read_entries(path)
    if not entries:
        raise ValueError(f"{source} contains no structures")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry.get("bricks"), str):
            columns = ", ".join(map(str, entry)) or "none"
            raise ValueError(f"{source}, row {number}: column 'bricks' is not text; columns are: {columns}")
    return [entry["bricks"] for entry in entries]


def metrics_of(texts: Iterable[str]) -> Metrics:
    """Compute the metrics of structures, given as text of any kind."""
    valid: list[bool] = []
    stable: list[bool] = []
    by_load_factor: list[bool] = []
    means: list[float] = []
    least: list[float] = []
    unsolved = 0
    for text in texts:
        reading = parse(text, WORLD)
        is_valid = not (reading.problems or reading.structure.problems())
        published = ours = None
        if is_valid:
            try:
                published, ours = analyse(reading.structure, "published"), analyse(reading.structure)
            except SolverError:
                unsolved += 1
                continue
        valid.append(is_valid)
        stable.append(published is not None and published.stable)
        by_load_factor.append(ours is not None and ours.stable)
        if published is not None and published.loads is not None:
            stabilities = [1 - load for load in published.loads]
            means.append(fmean(stabilities))
            least.append(min(stabilities))
    shares = [fmean(values) if values else 0.0 for values in (valid, stable, by_load_factor)]
    averages = [fmean(values) if values else None for values in (means, least)]
    return Metrics(len(valid), shares[0], shares[1], averages[0], averages[1], shares[2], unsolved)
