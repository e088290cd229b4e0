"""A lock on an output folder, so that two runs never write to it at the same time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BEAT = 10.0  # seconds between two signs of life of a run that holds a lock
PATIENCE = 3 * BEAT  # how long a lock of another machine is watched for one


@contextmanager
def locked(folder: str | Path, kind: str) -> Iterator[None]:
    """Hold the folder, which is made, against other runs of the same kind (train, eval, sweep).

    The system frees the lock of a process that dies. Locks may not reach other machines that share the folder: there,
    the lock file that a run touches every few seconds tells whether the run lives. ValueError where it does.
    """
    folder = Path(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{kind}.lock"
    try:
        descriptor = _acquired(path, folder)
    except ValueError:
        _remove_empty(made)
        raise
    ended = threading.Event()
    threading.Thread(target=_beat, args=(path, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if _is_file(path, descriptor):
            path.unlink(missing_ok=True)
        os.close(descriptor)
        _remove_empty(made)  # where nothing was written, nothing is left


def _acquired(path: Path, folder: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            is_ours = _flock(descriptor)
            holder = _read(path)
            is_here = holder.get("host") == socket.gethostname()
            is_held = _is_alive(holder["pid"]) if is_ours is None and is_here else is_ours is False
            if is_held or (holder and not is_here and _beats(path, folder, holder)):
                raise ValueError(
                    f"{folder} is in use by another run ({_said(holder)}): wait for it, stop it, or choose another "
                    "--output_dir"
                )
        except BaseException:
            os.close(descriptor)
            raise
        if _is_file(path, descriptor):  # otherwise its holder has removed it since we opened it
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
            return descriptor
        os.close(descriptor)


def _flock(descriptor: int) -> bool | None:
    """Whether the lock is ours; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's
        pass
    return True


def _beats(path: Path, folder: Path, holder: dict[str, Any]) -> bool:
    """Whether the run on another machine that left this lock file still gives signs of life."""
    print(f"waiting {PATIENCE:g} s to see whether {folder} is still in use ({_said(holder)})", flush=True)
    seen, end = _touched_at(path), time.monotonic() + PATIENCE
    while time.monotonic() < end and _touched_at(path) == seen:
        time.sleep(min(1.0, PATIENCE / 10))
    return _touched_at(path) not in (seen, None)


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with suppress(OSError):  # the folder may have been deleted, or its server may not answer for a while
            os.utime(path)


def _touched_at(path: Path) -> int | None:
    try:
        with open(path, "rb") as file:  # to open it is what makes a network file system look again
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) and isinstance(holder.get("pid"), int) else {}


def _said(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder.get('host')}" if holder else "which has just started"


def _is_file(path: Path, descriptor: int) -> bool:
    """Whether the file at `path` is the one that is open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
