"""Ending a process together with everything it started, wherever its children went."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "TRL_GRPO_TASKS_WORKER"  # an environment variable, inherited by whatever a worker starts
SECONDS = 5.0  # to catch up with what keeps starting new processes


def kill_descendants(mark: str, root: int | None) -> None:
    """Kill every process that has `MARK=mark` in its environment or descends from one that has, and every descendant
    of `root`, but not `root` itself.

    This finds children that made a session of their own (`setsid`), that became orphans, and that outlived the
    process which started them. It does not find an orphan that also replaced its environment. It needs /proc, so
    elsewhere than on Linux nothing is found: there only the process group of a worker ends with it.
    """
    deadline = time.monotonic() + SECONDS
    stopped: set[int] = set()
    # Stopped first and killed when all are found: the children of a process that ends belong to another from then on.
    while (found := _living(mark, root) - stopped) and time.monotonic() < deadline:
        _signal(found, signal.SIGSTOP)
        stopped |= found
    _signal(stopped, signal.SIGKILL)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        # One that has ended needs nothing more, and one of another user is not ours.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _living(mark: str, root: int | None) -> set[int]:
    parents, found = {}, set() if root is None else {root}
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir() if os.path.isdir("/proc") else ():
        if entry.name.isdigit():
            # Processes end while they are looked at, and those of other users cannot be looked at.
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}
