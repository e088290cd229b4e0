"""Archive: the distinct successful answers of a run, and how often each was seen (`archive`).

Answers are equal if they belong to the same request and have the same `Task.canonical`. All processes hold the same
archive, because each adds the gathered successes of a rollout in the same order.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from ...failures import FailureNotice, first_line
from ...files import write_atomically
from ...report.archive import ARCHIVE_FILE
from ...task import Task, option
from .base import Extra

MOST_COUNTED = 1_000_000  # distinct answers; about 200 bytes of memory and 24 bytes of a checkpoint each
KEY_BYTES = 16


@dataclass
class ArchiveOptions:
    """Archive"""

    archive: int = option(
        0,
        "Archive distinct successful answers of the rollouts: at most this many, those with the best scores, are "
        "stored in archive.jsonl. 0: no archive.",
    )


@dataclass(frozen=True)
class Answer:
    """A successful completion. `row` is the row as JSON, `request` its `Task.request`, `total` the task's score."""

    row: str
    request: str
    completion: str
    canonical: str
    total: float

    @property
    def key(self) -> bytes:
        digest = hashlib.blake2b(digest_size=KEY_BYTES)
        for part in (self.request, self.canonical):
            text = part.encode("utf-8", "surrogatepass")
            digest.update(len(text).to_bytes(8, "big") + text)
        return digest.digest()


class Archive:
    """Counts distinct answers, up to MOST_COUNTED, and stores the `capacity` best by their total. Of equal totals, the
    earlier answer is kept. An answer is stored with the completion that was seen first."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._seen: dict[bytes, int] = {}  # in the order of discovery
        self._stored: dict[bytes, tuple[Answer, int]] = {}  # with the first step, in the order of discovery
        self._worst_first: list[tuple[float, int, bytes]] = []  # a heap: total, minus the number of the answer, key
        self._found = 0  # answers that were stored at some time
        self._logged = 0  # distinct answers at the last log

    @property
    def distinct(self) -> int:
        return len(self._seen)

    def add(self, answers: Sequence[Answer], step: int) -> None:
        """Count the successes of a rollout, and store those that are new and good enough."""
        for answer in answers:
            key = answer.key
            if key in self._seen:
                self._seen[key] += 1
            elif len(self._seen) < MOST_COUNTED:
                self._seen[key] = 1
                self._store(key, answer, step)

    def new_since_log(self) -> int:
        """The number of distinct answers since the last call."""
        new, self._logged = self.distinct - self._logged, self.distinct
        return new

    def ranked(self) -> list[dict[str, Any]]:
        """The stored answers, best first, as archive.jsonl has them."""
        order = sorted(self._stored.items(), key=lambda item: -item[1][0].total)  # stable: earlier answers first
        return [
            {"row": json.loads(answer.row), "completion": answer.completion, "canonical": answer.canonical,
             "total": answer.total, "first_step": step, "seen": self._seen[key]}
            for key, (answer, step) in order
        ]  # fmt: skip

    def write(self, folder: str | Path) -> None:
        """Write archive.jsonl into the folder of the run."""
        path = Path(folder) / ARCHIVE_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(f"{json.dumps(answer)}\n" for answer in self.ranked()))

    def state_dict(self) -> dict[str, Any]:
        return {
            "keys": torch.from_numpy(np.frombuffer(bytearray().join(self._seen), dtype=np.uint8)),
            "seen": torch.tensor(list(self._seen.values()), dtype=torch.int64),
            "stored": [asdict(answer) | {"step": step} for answer, step in self._stored.values()],
            "logged": self._logged,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stored.clear()
        self._worst_first.clear()
        keys, counts = state["keys"].numpy().tobytes(), state["seen"].tolist()
        self._seen = {keys[KEY_BYTES * i : KEY_BYTES * (i + 1)]: count for i, count in enumerate(counts)}
        for entry in state["stored"]:
            answer = Answer(**{name: value for name, value in entry.items() if name != "step"})
            self._store(answer.key, answer, entry["step"])
        self._logged = state["logged"]

    def _store(self, key: bytes, answer: Answer, step: int) -> None:
        if len(self._stored) == self._capacity and answer.total <= self._worst_first[0][0]:
            return
        self._stored[key] = (answer, step)
        heapq.heappush(self._worst_first, (answer.total, -self._found, key))
        self._found += 1
        if len(self._stored) > self._capacity:
            del self._stored[heapq.heappop(self._worst_first)[2]]


class ArchiveExtra(Extra):
    """Archives the successes of training rollouts. The main process writes the archive to the run folder: when
    training begins, in place of that of an earlier run, with every checkpoint, and when training ends."""

    name = "archive"
    Options = ArchiveOptions
    switch = "archive"

    @classmethod
    def check_task(cls, args: Any, task: Task | None) -> None:
        if args.archive and task is None:
            raise ValueError(f"archive={args.archive} needs a task, whose scores tell successes; set it to 0")

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.state = Archive(self._args.archive)
        self._notice = FailureNotice()

    def after_rewards(self, output: dict[str, Any]) -> None:
        self.state.add(gather_object(self._successes()), self._trainer.state.global_step + 1)

    def _successes(self) -> list[Answer]:
        """The successful completions of this process in the latest rollout."""
        record, trainer = self._record, self._trainer
        return [
            Answer(
                example["row"],
                trainer.task.request(row),
                text,
                trainer.rewarding.forms.of(example["row"], text),
                outcome.score.total,
            )
            for example, row, text, outcome in zip(
                record.examples, record.rows, record.completions, record.outcomes, strict=True
            )
            if outcome.score is not None and outcome.score.success
        ]

    def metrics(self) -> dict[str, float]:
        return {
            "archive/distinct": float(self.state.distinct),
            "archive/new": float(self.state.new_since_log()),
        }

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write archive.jsonl in the main process. A failure is printed, and the next call tries again."""
        if not state.is_world_process_zero:
            return
        try:
            self.state.write(args.output_dir)
        except OSError as error:
            self._notice.failed(
                f"the archive could not be written ({first_line(error)}); training continues, checkpoints hold it, "
                "and the next save tries again"
            )
        else:
            self._notice.succeeded()

    on_train_begin = on_train_end = on_save
