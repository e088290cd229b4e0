"""Killing a process together with all its descendants, including detached ones."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "TRL_GRPO_TASKS_WORKER"  # environment variable that the descendants of a worker inherit
SECONDS = 5.0  # time limit for catching processes that keep starting new ones


def kill_descendants(mark: str, root: int | None) -> None:
    """Kill every process with `MARK=mark` in its environment, the descendants of these, and those of `root`.

    `root` itself is not killed. Children that started their own session (`setsid`), orphans, and children that
    outlived their parent are found; an orphan that also replaced its environment is not. Processes are found in /proc,
    so on systems other than Linux nothing is found, and only the process group of a worker ends with it.
    """
    deadline = time.monotonic() + SECONDS
    stopped: set[int] = set()
    # Stop all processes before killing any: the children of a dead process get a new parent and would not be found.
    while (found := _living(mark, root) - stopped) and time.monotonic() < deadline:
        _signal(found, signal.SIGSTOP)
        stopped |= found
    _signal(stopped, signal.SIGKILL)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        # The process may have ended meanwhile, or may belong to another user.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _living(mark: str, root: int | None) -> set[int]:
    """Return the ids of the living processes with this mark and of all descendants of them and of `root`."""
    parents, found = {}, set() if root is None else {root}
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir() if os.path.isdir("/proc") else ():
        if entry.name.isdigit():
            # A process may end while its files are read, and those of other users cannot be read.
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}
