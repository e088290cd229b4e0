"""The files with which this package adds its own state to a checkpoint, and a compact form of what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..models.checkpoints import CheckpointError


def state_file(checkpoint: str | Path, process: int | str) -> Path:
    """The file with the state of one process, or with that of all ("common")."""
    return Path(checkpoint) / f"task_state_{process}.pt"


def load_state(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Read a file that was saved as `packed`. Raises CheckpointError if it does not exist."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist, so the checkpoint is incomplete on this machine; all machines of a run must "
            "share --output_dir"
        )
    return unpacked(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))


def packed(state: Any) -> Any:
    """Nested state in which lists of vectors, such as the masks of a rollout, are one tensor each. Per tensor,
    torch.save takes about 0.1 ms and 200 bytes, and torch.load 0.3 ms."""
    if isinstance(state, dict):
        return {name: packed(value) for name, value in state.items()}
    if not isinstance(state, list):
        return state
    kinds = {(x.dtype, x.device) if isinstance(x, torch.Tensor) and x.ndim == 1 else None for x in state}
    if len(kinds) == 1 and kinds != {None}:
        return {"vectors": torch.cat(state), "sizes": [len(vector) for vector in state]}
    return [packed(value) for value in state]


def unpacked(state: Any) -> Any:
    """The state that `packed` was given."""
    if isinstance(state, dict) and state.keys() == {"vectors", "sizes"}:
        return [vector.clone() for vector in state["vectors"].split(state["sizes"])]
    if isinstance(state, dict):
        return {name: unpacked(value) for name, value in state.items()}
    return [unpacked(value) for value in state] if isinstance(state, list) else state
