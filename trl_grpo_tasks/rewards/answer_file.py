"""AnswerFile: the cache on disk of an LLM judge's answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)


class AnswerFile:
    """Scores by question in a .jsonl file, read on first use. Several processes may append to it."""

    def __init__(self, path: Path):
        self._path = path
        self._known: dict[str, tuple[dict[str, float], str]] | None = None
        self._is_writable = True

    def get(self, key: str) -> tuple[dict[str, float], str] | None:
        if self._known is None:
            self._known = {}
            lines = self._path.read_text("utf-8", "replace").splitlines() if self._path.is_file() else []
            for line in lines:
                try:
                    entry = json.loads(line)
                    scores = {str(name): float(score) for name, score in entry["scores"].items()}
                    self._known[str(entry["key"])] = (scores, str(entry["reason"]))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    continue  # a line that was cut off
        return self._known.get(key)

    def put(self, key: str, scores: Mapping[str, float], reason: str) -> None:
        assert self._known is not None
        self._known[key] = (dict(scores), reason)
        if not self._is_writable:
            return
        line = json.dumps({"key": key, "scores": dict(scores), "reason": reason}) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", buffering=0) as file:  # one write, so that lines of processes do not mix
                file.write(line.encode())
        except OSError as error:
            self._is_writable = False
            logger.warning("answers of the judge are not cached on disk any more: %s", error)
