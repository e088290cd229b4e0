"""Samples to look at: which rows and completions show honestly what changed, and their pictures within bounds."""

from __future__ import annotations

import base64
import html
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..task import Task

ROWS_SHOWN = 8  # pairs of pictures, or single ones
MOST_BYTES = 4_500_000  # of all pictures of a page, as they stand in it
LONGEST_HTML = 60_000
Sample = dict[str, Any]


@dataclass
class Pair:
    """A held-out row before and after: its typical sample (the middle one by reward), and how all of them fared."""

    before: Sample
    after: Sample
    successes: tuple[float, float]
    rewards: tuple[float, float]

    @property
    def verdict(self) -> str:
        # By success, and where that is equal by reward: most rows of a hard task have no success at all.
        change = (self.successes[1] - self.successes[0]) or (self.rewards[1] - self.rewards[0])
        return "better" if change > 1e-9 else "worse" if change < -1e-9 else "same"


def pairs(before: dict[str, Any], after: dict[str, Any]) -> list[Pair]:
    """The rows that both evaluations have."""
    first, second = rows_of(before), rows_of(after)
    return [
        Pair(_typical(old), _typical(new), (_mean(old, "success"), _mean(new, "success")),
             (_mean(old, "total"), _mean(new, "total")))
        for old, new in ((first[key], second[key]) for key in first if key in second)
    ]  # fmt: skip


def choose(found: Sequence[Pair], count: int) -> list[Pair]:
    """`count` rows: better, worse and unchanged ones as often as they are among all, and each kind at least once. Of
    a kind, rows at even distances, in the order of the data set: nobody picked them."""
    kinds = {kind: [pair for pair in found if pair.verdict == kind] for kind in ("better", "worse", "same")}
    kinds = {kind: members for kind, members in kinds.items() if members}
    if len(found) <= count:
        return [pair for members in kinds.values() for pair in members]
    shares = {kind: max(1, int(count * len(members) / len(found))) for kind, members in kinds.items()}
    while sum(shares.values()) != count:
        step = 1 if sum(shares.values()) < count else -1
        kind = max(kinds, key=lambda k: step * (len(kinds[k]) / len(found) - shares[k] / count))
        shares[kind] += step
    return [pair for kind, members in kinds.items() for pair in spread(members, shares[kind])]


def typical_samples(evaluation: dict[str, Any], count: int) -> list[Sample]:
    return spread([_typical(samples) for samples in rows_of(evaluation).values()], count)


def best_and_worst(evaluation: dict[str, Any], count: int, shown: set[str]) -> tuple[list[Sample], list[Sample]]:
    """Samples with the highest and the lowest rewards, at most one a row, without those in `shown`."""
    scored = [s for s in evaluation["samples"] if s["score"] is not None and key_of(s) not in shown]
    order = sorted(scored, key=_rank, reverse=True)
    best = _one_a_row(order, count)
    taken = {key_of(sample) for sample in best}
    return best, _one_a_row([s for s in reversed(order) if key_of(s) not in taken], count)


def rows_of(evaluation: dict[str, Any]) -> dict[str, list[Sample]]:
    """Samples by their row."""
    rows: dict[str, list[Sample]] = {}
    for sample in evaluation["samples"]:
        rows.setdefault(_row_key(sample), []).append(sample)
    return rows


def key_of(sample: Sample) -> str:
    """The same for samples with the same picture."""
    return _row_key(sample) + sample["completion"]


def prompt_of(sample: Sample, longest: int = 160) -> str:
    prompt = sample["row"].get("prompt", "")
    if isinstance(prompt, list):
        prompt = prompt[-1].get("content", "") if prompt else ""
    text = " ".join(str(prompt).split())
    # What tells prompts apart is often at their ends.
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """`count` of the items, at even distances."""
    return [items[i * len(items) // count] for i in range(count)] if len(items) > count else list(items)


@dataclass
class Note:
    """Why there is no picture, and the text that is shown in its place."""

    reason: str
    text: str = ""


class Pictures:
    """The pictures of a run, each drawn once, and put on a page until so many bytes or seconds are spent. Kept between
    versions of the page, so that a page that is written again while a run goes on costs little."""

    def __init__(self, task: Task, most_bytes: int = MOST_BYTES):
        self._task, self._most_bytes, self._most_seconds = task, most_bytes, math.inf
        self._drawn: dict[str, str | bytes | Note] = {}
        self._bytes, self._seconds = 0, 0.0

    def start_page(self, most_seconds: float) -> None:
        """A new page, for which at most about so long may be spent on drawing."""
        self._bytes, self._seconds, self._most_seconds = 0, 0.0, most_seconds

    def of(self, sample: Sample) -> str:
        """The picture as HTML, or a note."""
        picture = self.drawn(sample)
        shown = _as_html(picture, prompt_of(sample))
        if self._bytes + len(shown) > self._most_bytes:
            return _as_html(Note("left out to keep the page small"))
        self._bytes += len(shown)
        return shown

    def drawn(self, sample: Sample) -> str | bytes | Note:
        """What the task draws: HTML, or PNG."""
        key = key_of(sample)
        if key not in self._drawn:
            if self._seconds > self._most_seconds:
                return Note(f"not drawn: the pictures of this page took more than {self._most_seconds:g} s")
            start = time.monotonic()
            self._drawn[key] = self._draw(sample)
            self._seconds += time.monotonic() - start
        return self._drawn[key]

    def _draw(self, sample: Sample) -> str | bytes | Note:
        try:
            picture: Any = self._task.render(sample["row"], sample["completion"])
        except Exception as error:  # noqa: BLE001 - a task's own code: whatever ails it, the page is written
            return Note(f"cannot be drawn: {type(error).__name__}: {error}", sample["completion"])
        if isinstance(picture, str) and len(picture) > LONGEST_HTML:
            return Note("too long to show", sample["completion"])
        if not isinstance(picture, str | bytes):
            return Note(
                f"cannot be drawn: render gave {type(picture).__name__}, not bytes or text", sample["completion"]
            )
        return picture


def _as_html(picture: str | bytes | Note, alt: str = "") -> str:
    if isinstance(picture, Note):
        text = f"<pre>{html.escape(picture.text[:2000])}</pre>" if picture.text else ""
        return f"<p class=note>{html.escape(picture.reason[:300])}</p>{text}"
    if isinstance(picture, str):
        return f"<div class=paper>{picture}</div>"
    # Width and height are the first numbers of a PNG; wide ones do not stand side by side.
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    kind = " class=wide" if width > 1.7 * height else ""
    code = base64.b64encode(picture).decode()
    return f"<img{kind} loading=lazy alt='{html.escape(alt)}' src='data:image/png;base64,{code}'>"


def _typical(samples: Sequence[Sample]) -> Sample:
    ordered = sorted(samples, key=lambda s: float("-inf") if s["score"] is None else s["score"]["total"])
    return ordered[(len(ordered) - 1) // 2]


def _one_a_row(samples: Sequence[Sample], count: int) -> list[Sample]:
    chosen: dict[str, Sample] = {}
    for sample in samples:
        chosen.setdefault(_row_key(sample), sample)
    equal = [sample for sample in chosen.values() if _rank(sample) == _rank(samples[0])]  # with the first of them
    return spread(equal, count) if len(equal) > count else list(chosen.values())[:count]


def _rank(sample: Sample) -> tuple[bool, float]:
    return sample["score"]["success"], sample["score"]["total"]


def _mean(samples: Sequence[Sample], name: str) -> float:
    return sum(float(s["score"][name]) for s in samples if s["score"] is not None) / len(samples)


def _row_key(sample: Sample) -> str:
    return json.dumps(sample["row"], sort_keys=True)
