"""Editors of brick structures, which delete generated text in evaluations and `solve`.

"rejection": a line that is not a brick, leaves the world, collides, or is one brick too many is sampled again; after
too many attempts the last one is kept. The choice tree (--constrain) never allows such a line, so the two do not go
together. "rollback": a finished structure that does not stand under its weights is cut before the first brick that
fails, repeatedly until the rest stands, and the model continues from there. "rejection+rollback" does both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from ...task import Row
from .data.designs import loads_on
from .options import BrickOptions
from .physics.stability import SolverError, analyse
from .structure import LONGEST_LINE, Reading, lines_of, parse

ANALYSES_KEPT = 4096
EDITORS = ("rejection", "rollback", "rejection+rollback")


@dataclass
class _Progress:
    """Progress of one row: attempts at the current line, invalid lines accepted, and total counts."""

    redrawn: int = 0
    accepted: int = 0
    rejections: int = 0
    rollbacks: int = 0


class BrickEditor:
    """An editor that deletes invalid lines, cuts back unstable structures, or does both; `name` is one of EDITORS."""

    def __init__(self, rows: Sequence[Row], tokenizer: Any, name: str, options: BrickOptions):
        self._rows, self._tokenizer, self._options = rows, tokenizer, options
        self._rejects, self._rolls_back = "rejection" in name, "rollback" in name
        self._progress = [_Progress() for _ in rows]
        self._ends_line: dict[int, bool] = {}
        # What is kept after a cut was analysed before, and samples of one caption are often equal.
        self._analyse = lru_cache(ANALYSES_KEPT)(partial(analyse, backend=options.solving))

    def keep(self, i: int, ids: Sequence[int], ended: bool) -> int | None:
        kept = self._before_rejected_line(i, ids, ended) if self._rejects else None
        if kept is None and ended and self._rolls_back:
            kept = self._before_failing_brick(i, ids)
        return kept

    def counts(self, i: int) -> dict[str, int]:
        done = self._progress[i]
        counted = {"rejections": self._rejects, "rollbacks": self._rolls_back}
        return {name: getattr(done, name) for name, is_counted in counted.items() if is_counted}

    def _before_rejected_line(self, i: int, ids: Sequence[int], ended: bool) -> int | None:
        """Return the number of tokens before the last line if that line must be sampled again, else None."""
        start = next((t for t in range(len(ids) - 1, 0, -1) if self._is_break(ids[t - 1])), 0)
        is_whole = ended or self._is_break(ids[-1])
        if not is_whole and len(ids) - start <= LONGEST_LINE:
            return None
        progress = self._progress[i]
        wrong = self._wrong(i, self._text(ids, ended)) if is_whole else progress.accepted + 1
        if wrong > progress.accepted and progress.redrawn < self._options.max_brick_rejections:
            progress.redrawn += 1
            progress.rejections += 1
            return start
        if is_whole:
            progress.redrawn, progress.accepted = 0, wrong
        return None

    def _before_failing_brick(self, i: int, ids: Sequence[int]) -> int | None:
        """Return the number of tokens to keep if the finished structure is unstable, else None."""
        progress = self._progress[i]
        if progress.rollbacks >= self._options.max_rollbacks:
            return None
        try:
            sound = self._sound_bricks(i, self._text(ids, ended=True))
        except SolverError:
            return None  # a solver failure says nothing about the structure
        if sound is None:
            return None
        progress.rollbacks += 1
        progress.redrawn = progress.accepted = 0  # every line that is kept is valid
        ends = [0, *(t for t, token in enumerate(ids, 1) if self._is_break(token))]
        return ends[bisect_right(ends, sound, key=lambda end: len(lines_of(self._text(ids[:end], False))[0])) - 1]

    def _sound_bricks(self, i: int, text: str) -> int | None:
        """Return how many of the first bricks are stable together, or None if all lines are valid and stable."""
        row = self._rows[i]
        lines = [line for line in text.split("\n") if line.strip()]
        reading = self._parse(i, "\n".join(lines))
        right = self._right_lines(reading)
        structure = reading.structure.first(right)
        resting = loads_on(structure, row.get("loads") or ())
        if isinstance(resting, str):
            if right == len(lines):
                return 0  # a weight has no brick below it; no single brick causes that, so start again
            resting = []
        count = len(structure)
        while count:
            built = structure.first(count)
            carried = tuple(load for load in resting if built.occupied[load[:3]])  # later bricks carry the others
            analysis = self._analyse(built, loads=carried)
            if analysis.stable:
                break
            count = min(analysis.failing, default=0)
        return None if 0 < count == len(lines) else count

    def _right_lines(self, reading: Reading) -> int:
        """Return the number of lines before the first that is invalid; up to there, every line is a brick."""
        structure = reading.structure
        firsts = [structure.outside[:1], [later for _, later in structure.collisions[:1]]]
        valid = reading.is_brick.index(False) if False in reading.is_brick else reading.lines
        return min(valid, self._options.max_bricks, *(index for first in firsts for index in first))

    def _wrong(self, i: int, text: str) -> int:
        """Return the number of invalid lines, bricks outside the world, collisions, and bricks above the limit."""
        reading = self._parse(i, text)
        structure = reading.structure
        too_many = max(len(structure) - self._options.max_bricks, 0)
        return len(reading.problems) + len(structure.outside) + len(structure.collisions) + too_many

    def _parse(self, i: int, text: str) -> Reading:
        return parse(text, self._rows[i]["world"], self._options.max_offset_distance, self._options.kit)

    def _text(self, ids: Sequence[int], ended: bool) -> str:
        """Decode the tokens; unless the text has ended, return only its complete lines."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text if ended else text[: text.rfind("\n") + 1]

    def _is_break(self, token: int) -> bool:
        if token not in self._ends_line:
            self._ends_line[token] = "\n" in self._tokenizer.decode([token], skip_special_tokens=True)
        return self._ends_line[token]
