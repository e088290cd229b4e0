"""A lock on an output folder, so that two runs never write to it at the same time.

filelock has leases too, but on network file systems they do not take over the lock of a run that died.
"""

from __future__ import annotations

import errno
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

BEAT = 10.0  # seconds between two heartbeats of a run that holds a lock
PATIENCE = 3 * BEAT  # how long to wait for a heartbeat of a run on another machine


@contextmanager
def locked(folder: str | Path, kind: str) -> Iterator[None]:
    """Lock the folder, which is created if necessary, against other runs of the same kind (train, eval).

    The operating system frees the lock of a process that dies. Locks may not work across machines that share the
    folder, so a run also touches its lock file every few seconds: a heartbeat. ValueError if another run is alive.
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
    beat = threading.Thread(target=_beat, args=(descriptor, ended), daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()  # it uses the descriptor
        if _is_file(path, descriptor):
            path.unlink(missing_ok=True)
        os.close(descriptor)
        _remove_empty(made)  # a folder in which nothing was written is removed


def running_process(folder: str | Path, kind: str) -> str | None:
    """Describe the run of this kind that is alive in the folder; None if there is none. The lock is not taken."""
    path = Path(folder) / f".{kind}.lock"
    holder, touched = _read(path), _touched_at(path)
    if not holder or touched is None or time.time() - touched / 1e9 > PATIENCE:
        return None
    is_here = holder.get("host") == socket.gethostname()
    return _describe(holder) if not is_here or _is_alive(holder["pid"]) else None


def _acquired(path: Path, folder: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ValueError(f"{path} is a link, which no run makes; delete it, or choose another folder") from error
        try:
            is_ours = _flock(descriptor)
            holder = _read(path)
            is_here = holder.get("host") == socket.gethostname()
            is_held = _is_alive(holder["pid"]) if is_ours is None and is_here else is_ours is False
            if is_held or (holder and not is_here and _is_beating(path, folder, holder)):
                raise ValueError(
                    f"{folder} is in use by another run ({_describe(holder)}); wait for it, stop it, or choose "
                    "another --out"
                )
        except BaseException:
            os.close(descriptor)
            raise
        if _is_file(path, descriptor):  # otherwise its holder has removed the file in the meantime
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
            return descriptor
        os.close(descriptor)


def _flock(descriptor: int) -> bool | None:
    """Whether we got the lock; None if the file system does not support locks."""
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
    except PermissionError:  # the process belongs to another user
        pass
    return True


def _is_beating(path: Path, folder: Path, holder: dict[str, Any]) -> bool:
    """Whether the run on another machine that wrote this lock file still sends heartbeats."""
    print(f"waiting {PATIENCE:g} s to see whether {folder} is still in use ({_describe(holder)})", flush=True)
    seen, end = _touched_at(path), time.monotonic() + PATIENCE
    while time.monotonic() < end and _touched_at(path) == seen:
        time.sleep(min(1.0, PATIENCE / 10))
    return _touched_at(path) not in (seen, None)


def _beat(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with suppress(OSError):  # the file server may not answer
            os.utime(descriptor)


def _touched_at(path: Path) -> int | None:
    try:
        with open(path, "rb") as file:  # opening the file makes a network file system refresh its times
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) and isinstance(holder.get("pid"), int) else {}


def _describe(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder.get('host')}" if holder else "which has just started"


def _is_file(path: Path, descriptor: int) -> bool:
    """Whether the file at `path` is the open one."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
