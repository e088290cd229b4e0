"""Atomic file writes; detection of model folders and of misspelt local paths."""

from __future__ import annotations

import difflib
from contextlib import suppress
from pathlib import Path

MODEL_FILES = ("config.json", "adapter_config.json")  # every model folder contains at least one of these
DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt", ".yaml", ".yml")
FILE_SUFFIXES = (*DATA_SUFFIXES, ".gguf", ".safetensors", ".bin", ".pt")


def write_atomically(path: Path, text: str, errors: str = "strict") -> None:
    """Write `text` to `path` through a temporary file, so that readers and resumed runs never see a partial file."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors=errors)
        temporary.replace(path)
    except OSError:  # most likely the disk is full
        with suppress(OSError):
            temporary.unlink()
        raise


def model_file_in(folder: str | Path) -> str | None:
    """Return the name of the configuration file that marks `folder` as a model folder, or None if it is not one."""
    return next((name for name in MODEL_FILES if (Path(folder) / name).is_file()), None)


def looks_local(text: str) -> bool:
    """Whether `text` is meant as a path on this machine rather than as an id on the Hub (owner/name)."""
    first, slash, _ = text.partition("/")
    return (
        text.startswith((".", "/", "~"))
        or text.endswith(FILE_SUFFIXES)
        or text.count("/") > 1
        or bool(slash and (first == "outputs" or Path(first).is_dir()))
    )


def check_local_path(text: str, option: str) -> None:
    """Raise ValueError if `text` looks like a local path and nothing is there: the Hub must not be asked for it."""
    path = Path(text).expanduser()
    if path.exists() or not looks_local(text):
        return
    parent = next(folder for folder in (path.parent, *path.parent.parents) if folder.exists())
    missing = path if parent == path.parent else next(p for p in path.parents if p.parent == parent)
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(missing.name, names, n=1)
    hint = f" (did you mean {str(parent / near[0])!r}?)" if near else ""
    what = "this path" if missing == path else f"folder {str(missing)!r}"
    raise ValueError(f"{option} {text}: {what} does not exist{hint}")
