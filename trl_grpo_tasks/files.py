"""Files that are whole or not there, and what tells the folder of a model."""

from __future__ import annotations

from pathlib import Path

MODEL_FILES = ("config.json", "adapter_config.json")  # one of which lies in the folder of every model


def write_atomically(path: Path, text: str, errors: str = "strict") -> None:
    """Write a file that is never seen half written, by a browser or by a run that is killed and resumed."""
    half_written = path.with_suffix(".tmp")
    half_written.write_text(text, encoding="utf-8", errors=errors)
    half_written.replace(path)


def model_file_in(folder: str | Path) -> str | None:
    """The file by which `folder` is known as that of a model; None if it is none."""
    return next((name for name in MODEL_FILES if (Path(folder) / name).is_file()), None)
