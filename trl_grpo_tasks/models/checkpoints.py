"""Detection of complete checkpoints.

A marker file is written last and removed first. A run that is killed at any moment therefore leaves no incomplete
checkpoint that looks complete.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MARKER = "complete"
STATE_FILE = "trainer_state.json"  # written by transformers' Trainer


class DifferentStartError(ValueError):
    """The starting model of a run with checkpoints would be replaced by a different one."""


class CheckpointError(ValueError):
    """A checkpoint cannot be resumed."""


def checkpoint_folders(output_dir: str | Path) -> list[Path]:
    """Return all checkpoint-N folders, latest step first."""
    found = [(int(match[1]), path) for path in Path(output_dir).glob("checkpoint-*")
             if path.is_dir() and (match := re.fullmatch(r"checkpoint-(\d+)", path.name))]  # fmt: skip
    return [path for _, path in sorted(found, reverse=True)]


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a folder is a checkpoint, complete or not."""
    return (Path(folder) / STATE_FILE).is_file()


def belongs_to(checkpoint: str | Path, output_dir: str | Path) -> bool:
    """Whether a checkpoint lies in the folder of the run in `output_dir`."""
    return Path(checkpoint).resolve().parent == Path(output_dir).resolve()


def is_complete(checkpoint: str | Path) -> bool:
    """Whether a checkpoint was written completely, so that a run can resume from it."""
    return (Path(checkpoint) / MARKER).is_file()


def mark_complete(checkpoint: str | Path) -> None:
    (Path(checkpoint) / MARKER).touch()


def mark_incomplete(checkpoint: str | Path) -> None:
    (Path(checkpoint) / MARKER).unlink(missing_ok=True)


def step_of(checkpoint: str | Path) -> int:
    """Return the number of optimizer steps after which a checkpoint was written."""
    return state_of(checkpoint)["global_step"]


def state_of(checkpoint: str | Path) -> dict[str, Any]:
    """Return the state of transformers' Trainer in a checkpoint: steps, epoch and logs."""
    return json.loads((Path(checkpoint) / STATE_FILE).read_text())


def newest_complete(output_dir: str | Path) -> tuple[Path | None, list[Path]]:
    """Return the newest complete checkpoint (None if there is none) and the newer, incomplete ones."""
    skipped: list[Path] = []
    for path in checkpoint_folders(output_dir):
        if is_complete(path):
            return path, skipped
        skipped.append(path)
    return None, skipped
