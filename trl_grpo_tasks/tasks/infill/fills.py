"""Conversion between completions and fills: a masked model gives one piece per place, a causal one a line per gap."""

from __future__ import annotations

from collections.abc import Sequence

from ...task import Row
from .masking import runs


def gold_fills(row: Row) -> list[str]:
    """Return the original text of each gap; tokens are joined by spaces."""
    joint = "" if isinstance(row["pieces"], str) else " "
    return [joint.join(row["pieces"][place] for place in run) for run in runs(row["places"])]


def write(row: Row, fills: Sequence[str]) -> str:
    """Write a completion with these fills, one per gap."""
    if row["policy"] == "causal":
        return "\n".join(fills)
    return ("" if isinstance(row["pieces"], str) else " ").join(fills)


def read(row: Row, completion: str) -> tuple[list[str], str]:
    """Return the fill of each gap and an empty message, or no fills and a message that says what is wrong."""
    gaps = runs(row["places"])
    if row["policy"] == "causal":
        fills = completion.split("\n")
        if len(fills) != len(gaps):
            return [], f"there are {len(fills)} fills for {len(gaps)} gaps"
        for number, (fill, (least, most)) in enumerate(zip(fills, lengths(row), strict=True), 1):
            if not least <= len(fill) <= most:
                wanted = f"{least}" if least == most else f"{least} to {most}"
                return [], f"fill {number} has {len(fill)} characters; its gap needs {wanted}"
        return fills, ""
    pieces = list(completion) if isinstance(row["pieces"], str) else completion.split(" ")
    if len(pieces) != len(row["places"]):
        return [], f"there are {len(pieces)} fills for {len(row['places'])} masks"
    following = iter(pieces)
    joint = "" if isinstance(row["pieces"], str) else " "
    return [joint.join(next(following) for _ in run) for run in gaps], ""


def lengths(row: Row) -> list[tuple[int, int]]:
    """Return the minimum and maximum number of characters of each gap's fill."""
    slack = row.get("slack", 0)
    return [(max(1, len(run) - slack), len(run) + slack) for run in runs(row["places"])]


def agreement(row: Row, fills: Sequence[str]) -> float:
    """Return the fraction of places (characters or tokens) at which the fills match the original."""
    right, total = 0, 0
    for fill, gold in zip(fills, gold_fills(row), strict=True):
        if isinstance(row["pieces"], str):
            ours, theirs = list(fill), list(gold)
        else:
            ours, theirs = fill.split(" "), gold.split(" ")
        right += sum(a == b for a, b in zip(ours, theirs, strict=False))
        total += max(len(ours), len(theirs))
    return right / total


def restored(row: Row, fills: Sequence[str]) -> float:
    """Return the fraction of gaps whose whole fill matches the original."""
    gold = gold_fills(row)
    return sum(ours == theirs for ours, theirs in zip(fills, gold, strict=True)) / len(gold)


def parts(row: Row, fills: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the filled text in parts, each with whether it is a fill."""
    pieces, result, at = row["pieces"], [], 0
    joint = "" if isinstance(pieces, str) else " "
    for run, fill in zip(runs(row["places"]), fills, strict=True):
        if run[0] > at:
            result.append((joint.join(pieces[at : run[0]]), False))
        result.append((fill, True))
        at = run[-1] + 1
    if at < len(pieces):
        result.append((joint.join(pieces[at:]), False))
    return result
