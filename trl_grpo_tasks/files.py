"""Atomic file writes, and detection of model folders."""

from __future__ import annotations

from pathlib import Path

MODEL_FILES = ("config.json", "adapter_config.json")  # every model folder contains at least one of these


def write_atomically(path: Path, text: str, errors: str = "strict") -> None:
    """Write `text` to `path` through a temporary file, so that readers and resumed runs never see a partial file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8", errors=errors)
    temporary.replace(path)


def model_file_in(folder: str | Path) -> str | None:
    """Return the name of the configuration file that marks `folder` as a model folder, or None if it is not one."""
    return next((name for name in MODEL_FILES if (Path(folder) / name).is_file()), None)
