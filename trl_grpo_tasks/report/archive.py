"""The archive of a run: archive.jsonl, and the section of the report with the distinct successes and the best ones."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from .gallery import Pictures, Sample
from .plots import chart
from .run_folder import NUMBER, RunFolder, mismatch
from .sections import shown_sample

ARCHIVE_FILE = "archive.jsonl"  # one answer per line, the best first
ANSWERS_SHOWN = 8  # in the report
MOST_BYTES = 1_800_000  # limit for their pictures
ANSWER = {
    "row": {"prompt": str | list}, "completion": str, "canonical": str, "total": NUMBER, "first_step": NUMBER,
    "seen": NUMBER,
}  # fmt: skip
CURVES = {"archive/distinct": "Distinct successes so far", "archive/new": "New since the last log"}


def read_answers(run_dir: str | Path, most: int | None = None) -> list[dict[str, Any]]:
    """Return the answers in the archive of a run, best first, at most `most` of them; [] if there is no archive.

    Raises ValueError with the number of the line that is not an answer.
    """
    path = Path(run_dir) / ARCHIVE_FILE
    if not path.is_file():
        return []
    answers = []
    with open(path, "rb") as lines:
        for number, line in enumerate(itertools.islice(lines, most), 1):
            try:
                answer = json.loads(line, parse_constant=_refuse)
                problem = mismatch(answer, ANSWER)
            except (ValueError, RecursionError) as error:
                problem = f"not valid JSON ({error})"
            if problem:
                raise ValueError(
                    f"{path}, line {number}: {problem}; the file is damaged or was not written by a run: resume the "
                    "run, which writes it again, or move it away"
                )
            answers.append(answer)
    return answers


def as_sample(answer: dict[str, Any]) -> Sample:
    """Return an answer as a successful sample of an evaluation, which the gallery can show."""
    return {
        "row": answer["row"],
        "completion": answer["completion"],
        "score": {"success": True, "total": answer["total"]},
    }


def archive_section(run: RunFolder, pictures: Pictures) -> dict[str, Any]:
    """Return charts of the number of distinct successes, and the best ones with their pictures."""
    points = {name: run.curve(name) for name in CURVES}
    if not points["archive/distinct"]:  # an archive of an earlier run in the same folder is not shown
        return {}
    pictures.start_section(MOST_BYTES)
    return {
        "distinct": int(points["archive/distinct"][-1][1]),
        "charts": [chart(title, {title: points[n]}, name=n) for n, title in CURVES.items() if len(points[n]) > 1],
        "best": [shown_sample(as_sample(answer), pictures) for answer in read_answers(run.path, ANSWERS_SHOWN)],
    }


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")
