"""Conversion between completions and fills: a masked model gives one piece per place, a causal one a line per gap."""

from __future__ import annotations

from collections.abc import Sequence

from ...task import Row
from .masking import runs


def gold_fills(row: Row) -> list[str]:
    """Return the original text of each gap; tokens are joined by spaces."""
    return [_joint(row).join(row["pieces"][place] for place in run) for run in runs(row["places"])]


def write(row: Row, fills: Sequence[str]) -> str:
    """Write a completion with these fills, one per gap."""
    return ("\n" if row["policy"] == "causal" else _joint(row)).join(fills)


def read(row: Row, completion: str) -> tuple[list[str], str]:
    """Return the fill of each gap and an empty message, or no fills and a message that says what is wrong."""
    gaps = runs(row["places"])
    if row["policy"] == "causal":
        fills = completion.split("\n")
        if len(fills) != len(gaps):
            return [], f"there are {len(fills)} fills for {len(gaps)} gaps"
        for number, (fill, gap) in enumerate(zip(fills, gaps, strict=True), 1):
            if len(fill) != len(gap):
                return [], f"fill {number} has {len(fill)} characters; its gap needs {len(gap)}"
        return fills, ""
    pieces = _split(row, completion)
    if len(pieces) != len(row["places"]):
        return [], f"there are {len(pieces)} fills for {len(row['places'])} masks"
    following = iter(pieces)
    return [_joint(row).join(next(following) for _ in run) for run in gaps], ""


def agreement(row: Row, fills: Sequence[str]) -> float:
    """Return the fraction of places (characters or tokens) at which the fills match the original."""
    pairs = [(_split(row, fill), _split(row, gold)) for fill, gold in zip(fills, gold_fills(row), strict=True)]
    return sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)) / len(row["places"])


def restored(row: Row, fills: Sequence[str]) -> float:
    """Return the fraction of gaps whose whole fill matches the original."""
    gold = gold_fills(row)
    return sum(ours == theirs for ours, theirs in zip(fills, gold, strict=True)) / len(gold)


def parts(row: Row, fills: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the filled text in parts, each with whether it is a fill."""
    pieces, result, at = row["pieces"], [], 0
    for run, fill in zip(runs(row["places"]), fills, strict=True):
        result += [(_joint(row).join(pieces[at : run[0]]), False), (fill, True)]
        at = run[-1] + 1
    result.append((_joint(row).join(pieces[at:]), False))
    return [(part, is_fill) for part, is_fill in result if part or is_fill]


def _joint(row: Row) -> str:
    return "" if isinstance(row["pieces"], str) else " "


def _split(row: Row, text: str) -> list[str]:
    return list(text) if isinstance(row["pieces"], str) else text.split(" ")
