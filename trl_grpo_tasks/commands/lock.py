"""A lock on an output folder, so that two runs never write to it at the same time."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import SoftFileLease, Timeout

LEASE = 30.0  # seconds without a sign of life after which the lock of a run on another machine is taken


@contextmanager
def locked(folder: str | Path, kind: str) -> Iterator[None]:
    """Lock the folder, which is created if necessary, against other runs of the same kind (train or eval).

    A process that dies loses its lock: at once on this machine, after LEASE seconds on another one. ValueError if
    another run is alive.
    """
    folder = Path(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = _acquired(folder, kind)
        try:
            yield
        finally:
            lock.release()
    finally:
        for path in made:  # a folder in which nothing was written is removed
            with suppress(OSError):
                path.rmdir()


def running_process(folder: str | Path, kind: str) -> str | None:
    """Describe the run of this kind that is alive in the folder; None if there is none. The lock is not taken."""
    path = Path(folder) / f".{kind}.lock"
    pid, host = _holder(path)
    try:
        with open(path, "rb") as file:  # opening the file makes a network file system refresh its times
            is_beating = time.time() - os.fstat(file.fileno()).st_mtime <= LEASE
    except OSError:
        return None
    if pid is None or not is_beating:
        return None
    return f"process {pid} on {host}" if host != socket.gethostname() or _is_alive(pid) else None


def _acquired(folder: Path, kind: str) -> SoftFileLease:
    path = folder / f".{kind}.lock"
    if path.is_symlink():
        raise ValueError(f"{path} is a link, which no run makes; delete it, or choose another folder")
    lock = SoftFileLease(path, lease_duration=LEASE)
    pid, host = _holder(path)
    described = "which has just started" if pid is None else f"process {pid} on {host}"
    patience = 0.0
    if path.exists() and host != socket.gethostname():
        patience = 1.2 * LEASE
        print(f"waiting {patience:g} s to see whether {folder} is still in use ({described})", flush=True)
    try:
        lock.acquire(timeout=patience)
    except Timeout as error:
        raise ValueError(
            f"{folder} is in use by another run ({described}); wait for it, stop it, or choose another --out"
        ) from error
    return lock


def _holder(path: Path) -> tuple[int | None, str | None]:
    """The process and the machine that a lock file names."""
    try:
        named = dict(re.findall(r"^(pid|host)=(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE))
        return int(named["pid"]), named["host"]
    except (OSError, ValueError, KeyError):
        return None, None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process belongs to another user
        pass
    return True
