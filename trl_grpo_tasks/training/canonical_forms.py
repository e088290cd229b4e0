"""Canonical forms of answers during training, where an error in the code of a task must not end the run."""

from __future__ import annotations

import json
from functools import lru_cache

from ..failures import FailureNotice, first_line
from ..rewards.time_limit import time_limit
from ..task import Task

CACHED_FORMS = 10_000
SECONDS_PER_FORM = 5.0


class CanonicalForms:
    """Canonical forms of answers, cached by row and text. An error in the task's code does not stop training: such an
    answer, and one whose form takes longer than SECONDS_PER_FORM, is compared by its text."""

    def __init__(self, task: Task):
        self._task = task
        self._notice = FailureNotice()
        self.of = lru_cache(CACHED_FORMS)(self._compute)

    def _compute(self, row: str, completion: str) -> str:
        try:
            with time_limit(SECONDS_PER_FORM):
                return str(self._task.canonical(json.loads(row), completion))
        except Exception as error:  # noqa: BLE001 - the task's code, on text that a model wrote
            self._notice.failed(
                f"canonical of task {self._task.name!r} failed ({type(error).__name__}: {first_line(error)}); "
                "training continues, and such answers are compared by their text"
            )
            return completion.strip()
