"""A task that misbehaves as the completion tells it to (hang, exit, fork, ...), and helpers to find processes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

ROW = json.dumps({"prompt": "?"})

TASK_FILE = """
import os, signal, subprocess, sys, time
from dataclasses import dataclass
from trl_grpo_tasks.task import Score, Task

@dataclass(frozen=True)
class Options:
    bonus: float = 0.0

class Wild(Task):
    name, version, description = "wild", "1", "does what the completion says"
    weights = {"value": 1.0}
    Options = Options

    def score(self, row, completion):
        verb, _, argument = completion.partition(" ")
        if verb == "hang":
            time.sleep(1000)
        if verb == "exit":
            os._exit(7)
        if verb == "sysexit":
            sys.exit("bye")
        if verb == "stall":  # after the first bytes of a reply of 256
            os.write(int(sys.argv[1]), bytes([0, 0, 1, 0, 42]))
            os.kill(os.getpid(), signal.SIGSTOP)
        if verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if verb == "eat":
            bytearray(int(argument) * 2**20)
        if verb == "raise":
            raise ValueError("no such wheel")
        if verb == "none":
            return None
        if verb == "print":
            print("x" * 100_000)
            sys.stdout.flush()
            os.write(1, b"rude bytes")
            assert sys.stdin.read() == ""
        if verb == "sleep":
            time.sleep(float(argument))
        if verb == "touch":
            open(argument, "a").write("scored\\n")
        if verb == "fork":
            return self.make_score({"value": float(row["x"])}, True, True, info={"child": os.fork()})
        if verb in ("daemon", "orphan", "leave"):  # a process in a session of its own; its id goes to a file
            path, *more = argument.split()
            sleeper = [sys.executable, "-c", "import os, time; os.closerange(1, 3); time.sleep(1000)"]
            if verb == "orphan":
                start = f"import subprocess; print(subprocess.Popen({sleeper!r}, start_new_session=True).pid)"
                pid = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True).stdout
            else:
                environment = {} if more == ["bare"] else None
                pid = subprocess.Popen(sleeper, start_new_session=True, env=environment).pid
            open(path, "w").write(str(pid))
            if verb == "leave":
                os._exit(7)
        if verb == "child":
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            return self.make_score({"value": 0.0}, True, True, info={"status": os.waitpid(child, 0)[1]})
        if verb == "pid":
            return self.make_score({"value": 0.0}, True, True, info={"pid": os.getpid()})
        return self.make_score({"value": float(row.get("x", 0)) + self.options.bonus}, True, True)
"""


def values(outcomes):
    return [None if outcome.score is None else outcome.score.total for outcome in outcomes]


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    """Wait up to `seconds` for a process to end; a zombie counts as ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def zombie_children() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state == "Z" and int(parent) == os.getpid():
                found.append(int(entry.name))
    return found
