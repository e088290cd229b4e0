"""Selection of representative samples for reports, and their pictures within limits on size and time."""

from __future__ import annotations

import base64
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..task import Task
from .templating import render

ROWS_SHOWN = 8  # prompts with their samples before and after, or with a single sample
MOST_BYTES = 4_500_000  # limit for the pictures of a page, as encoded in the page
MOST_KEPT = 200  # pictures kept for the next version of a page; those used least recently are dropped
MOST_LINKED = 200  # answers whose exported files are linked
LONGEST_HTML = 60_000  # characters, without embedded PNGs; longer HTML pictures are replaced by a note
_EMBEDDED_PNG = re.compile("data:image/png;base64,[A-Za-z0-9+/=]+")
Sample = dict[str, Any]


@dataclass
class Pair:
    """A held-out request before and after training: its median sample by reward, and means over all its samples."""

    before: Sample
    after: Sample
    successes: tuple[float, float]  # success rate before and after
    rewards: tuple[float, float]  # mean reward before and after

    @property
    def verdict(self) -> str:
        """Return "better", "worse" or "same"."""
        # By success rate, then by reward, because most rows of a hard task have no success at all.
        change = (self.successes[1] - self.successes[0]) or (self.rewards[1] - self.rewards[0])
        return "better" if change > 1e-9 else "worse" if change < -1e-9 else "same"

    @property
    def different_samples(self) -> list[Sample]:
        """Return the samples before and after, or one if they are identical."""
        return list({key_of(sample): sample for sample in (self.before, self.after)}.values())


def pairs(before: dict[str, Any], after: dict[str, Any]) -> list[Pair]:
    """Pair the samples of the requests that both evaluations contain."""
    first, second = requests_of(before), requests_of(after)
    return [
        Pair(_typical(old), _typical(new), (_mean(old, "success"), _mean(new, "success")),
             (_mean(old, "total"), _mean(new, "total")))
        for old, new in ((first[key], second[key]) for key in first if key in second)
    ]  # fmt: skip


def choose(found: Sequence[Pair], count: int) -> list[Pair]:
    """Select `count` rows without cherry-picking.

    Improved, worse and unchanged rows appear in proportion, but each kind at least once. Within a kind, the rows are
    evenly spaced in the order of the dataset.
    """
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
    """Return the median sample by reward of `count` evenly spaced requests."""
    return spread([_typical(samples) for samples in requests_of(evaluation).values()], count)


def best_and_worst(evaluation: dict[str, Any], count: int, shown: set[str]) -> tuple[list[Sample], list[Sample]]:
    """Return `count` samples each with the highest and the lowest rewards, one per request, none in `shown`."""
    scored = [s for s in evaluation["samples"] if s["score"] is not None and key_of(s) not in shown]
    order = sorted(scored, key=rank_of, reverse=True)
    best = _one_of_each(order, count)
    taken = {key_of(sample) for sample in best}
    return best, _one_of_each([s for s in reversed(order) if key_of(s) not in taken], count)


def requests_of(evaluation: dict[str, Any]) -> dict[str, list[Sample]]:
    """Group the samples of an evaluation by request."""
    requests: dict[str, list[Sample]] = {}
    for sample in evaluation["samples"]:
        requests.setdefault(_request_key(sample), []).append(sample)
    return requests


def key_of(sample: Sample) -> str:
    """Return a key that is equal for samples with the same picture (same row and completion)."""
    return json.dumps(sample["row"], sort_keys=True) + sample["completion"]


def prompt_of(sample: Sample, longest: int = 160) -> str:
    """Return the text of a sample's prompt (the last message of a chat) in one line, shortened to `longest`."""
    prompt = sample["row"].get("prompt", "")
    if isinstance(prompt, list):
        last = prompt[-1] if prompt else ""
        prompt = last.get("content", "") if isinstance(last, dict) else last
    text = " ".join(str(prompt).split())
    # Both ends are kept, because prompts often differ at the end only.
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def exported_files(folder: Path) -> list[tuple[int, list[str]]]:
    """Return the files that `trl-grpo-tasks export` wrote into this folder of the run, by number of the answer."""
    found: dict[int, list[str]] = {}
    for file in sorted(folder.glob("*_*.*")):
        if match := re.fullmatch(r".+_([0-9]{1,6})", file.stem):
            found.setdefault(int(match[1]), []).append(file.name)
    return sorted(found.items())[:MOST_LINKED]


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Select `count` evenly spaced items."""
    return [items[i * len(items) // count] for i in range(count)] if len(items) > count else list(items)


@dataclass
class Note:
    """The reason why there is no picture, and the text to show in its place."""

    reason: str
    text: str = ""


class Pictures:
    """The pictures of a run. Each is drawn once, within limits on the bytes and the drawing time per page.

    An instance can be kept between versions of a page, so that refreshing the page during a run is cheap.
    """

    def __init__(self, task: Task, most_bytes: int = MOST_BYTES):
        self._task, self._most_bytes, self._most_seconds = task, most_bytes, math.inf
        self._drawn: dict[str, str | bytes | Note] = {}
        self._room, self._seconds = most_bytes, 0.0

    def start_page(self, most_seconds: float) -> None:
        """Start a new page, for which drawing stops after `most_seconds`."""
        self._room, self._seconds, self._most_seconds = self._most_bytes, 0.0, most_seconds

    def of(self, sample: Sample) -> str:
        """Return the picture as HTML, or a note why there is none."""
        picture = self.drawn(sample)
        shown = _as_html(picture, prompt_of(sample))
        if len(shown) > self._room:
            return _as_html(Note("picture omitted to limit the size of this page"))
        self._room -= len(shown)
        return shown

    def drawn(self, sample: Sample) -> str | bytes | Note:
        """Return the task's picture: HTML as str, PNG as bytes, or a note why there is none."""
        key = key_of(sample)
        if key not in self._drawn:
            if self._seconds > self._most_seconds:
                return Note(f"not drawn: the pictures of this page took longer than {self._most_seconds:g} s")
            start = time.monotonic()
            self._drawn[key] = self._draw(sample)
            self._seconds += time.monotonic() - start
            if len(self._drawn) > MOST_KEPT:
                del self._drawn[next(iter(self._drawn))]
        self._drawn[key] = picture = self._drawn.pop(key)  # the last in the order of use
        return picture

    def _draw(self, sample: Sample) -> str | bytes | Note:
        try:
            picture: Any = self._task.render(sample["row"], sample["completion"])
        except Exception as error:  # noqa: BLE001 - an error in the task's code must not prevent the report
            return Note(f"cannot be drawn: {type(error).__name__}: {error}", sample["completion"])
        if isinstance(picture, str) and len(_EMBEDDED_PNG.sub("", picture)) > LONGEST_HTML:
            return Note("too long to show", sample["completion"])
        if not isinstance(picture, str | bytes):
            return Note(
                f"cannot be drawn: render returned {type(picture).__name__} instead of bytes or str",
                sample["completion"],
            )
        return picture


def _as_html(picture: str | bytes | Note, alt: str = "") -> str:
    if isinstance(picture, Note):
        return render("picture.html", reason=picture.reason, text=picture.text)
    if isinstance(picture, str):
        return render("picture.html", reason="", drawn=picture)
    # A PNG file holds its width and height at these offsets. Wide pictures are not placed side by side.
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    png = base64.b64encode(picture).decode()
    return render("picture.html", reason="", drawn="", alt=alt, is_wide=width > 1.7 * height, png=png)


def _typical(samples: Sequence[Sample]) -> Sample:
    """Return the median sample by reward."""
    ordered = sorted(samples, key=lambda s: float("-inf") if s["score"] is None else s["score"]["total"])
    return ordered[(len(ordered) - 1) // 2]


def _one_of_each(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return the first `count` samples of different requests; if more are tied with the first, evenly spaced ones."""
    chosen: dict[str, Sample] = {}
    for sample in samples:
        chosen.setdefault(_request_key(sample), sample)
    tied = [sample for sample in chosen.values() if rank_of(sample) == rank_of(samples[0])]
    return spread(tied, count) if len(tied) > count else list(chosen.values())[:count]


def rank_of(sample: Sample) -> tuple[bool, float]:
    """Return a key that sorts scored samples: successes above others, then by reward."""
    return sample["score"]["success"], sample["score"]["total"]


def _mean(samples: Sequence[Sample], name: str) -> float:
    return sum(float(s["score"][name]) for s in samples if s["score"] is not None) / len(samples)


def _request_key(sample: Sample) -> str:
    return sample.get("request") or json.dumps(sample["row"], sort_keys=True)
