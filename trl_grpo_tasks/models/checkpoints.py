"""Which checkpoints are whole. A marker is written last and removed first, so a run killed at any moment leaves either
a checkpoint that can be resumed or one that is known not to be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MARKER = "complete"
STATE_FILE = "trainer_state.json"  # of transformers


class DifferentStartError(ValueError):
    """What a run began with would be replaced by something else."""


class CheckpointError(ValueError):
    """A checkpoint cannot be resumed."""


def checkpoint_folders(output_dir: str | Path) -> list[Path]:
    """All checkpoint-N folders, newest step first."""
    found = [(int(match[1]), path) for path in Path(output_dir).glob("checkpoint-*")
             if path.is_dir() and (match := re.fullmatch(r"checkpoint-(\d+)", path.name))]  # fmt: skip
    return [path for _, path in sorted(found, reverse=True)]


def is_checkpoint(folder: str | Path) -> bool:
    return (Path(folder) / STATE_FILE).is_file()


def is_of(checkpoint: str | Path, output_dir: str | Path) -> bool:
    """Whether a checkpoint is one of the run in `output_dir`, not one that lies elsewhere."""
    return Path(checkpoint).resolve().parent == Path(output_dir).resolve()


def is_complete(checkpoint: str | Path) -> bool:
    return (Path(checkpoint) / MARKER).is_file()


def mark_complete(checkpoint: str | Path) -> None:
    (Path(checkpoint) / MARKER).touch()


def mark_incomplete(checkpoint: str | Path) -> None:
    (Path(checkpoint) / MARKER).unlink(missing_ok=True)


def step_of(checkpoint: str | Path) -> int:
    """After how many optimizer steps it was written."""
    return state_of(checkpoint)["global_step"]


def state_of(checkpoint: str | Path) -> dict[str, Any]:
    """The state of transformers' Trainer in a checkpoint: steps, epoch and logs."""
    return json.loads((Path(checkpoint) / STATE_FILE).read_text())


def newest_complete(output_dir: str | Path) -> tuple[Path | None, list[Path]]:
    """The newest complete checkpoint, and the newer ones that were skipped because they are half-written."""
    skipped: list[Path] = []
    for path in checkpoint_folders(output_dir):
        if is_complete(path):
            return path, skipped
        skipped.append(path)
    return None, skipped
