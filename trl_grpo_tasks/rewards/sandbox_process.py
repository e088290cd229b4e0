"""The host's side of one sandbox run: starts the launcher, collects the output, and cleans up.

It shares nothing with the pools of workers: a program gets a new process, and its output is no reply but bytes.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .jail.layers import LAYERS, PR_SET_DUMPABLE, SandboxError, prctl

# Each of these layers keeps the program from inspecting other processes of this user.
HIDING_LAYERS = ("uid", "pids", "files", "landlock")
GRACE_SECONDS = 20.0  # for the launcher to set up and clean up on an overloaded machine


@dataclass(frozen=True)
class SandboxResult:
    """The output of a program and how it ended."""

    stdout: str
    stderr: str
    exit_code: int | None  # negative for a signal; None if the sandbox killed the program
    timed_out: bool
    killed_reason: str  # why the program was killed; "" if it ended by itself
    seconds: float


def run_launcher(
    order: dict[str, Any], layers: Mapping[str, str], stdin: str, max_output: int, with_results: bool = False
) -> tuple[SandboxResult, bytes]:
    """Start the launcher, send it the order, and return the program's result and the bytes that the judge wrote."""
    if sys.platform != "linux":
        raise SandboxError("system", f"it needs Linux, but this system is {sys.platform}")
    if not any(layers.get(name) == "" for name in HIDING_LAYERS):
        # Tests and verdicts pass through descriptors of this process, which other programs of its user could open.
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        order = {**order, "folder": folder, "layers": [name for name in LAYERS if layers.get(name) == ""]}
        with tempfile.TemporaryFile() as stdin_file:
            stdin_file.write(stdin.encode("utf-8", "surrogatepass"))
            stdin_file.seek(0)
            return _start_and_collect(order, stdin_file, max_output, with_results)
    finally:
        _remove(folder)


def _start_and_collect(
    order: dict[str, Any], stdin_file: IO[bytes], max_output: int, with_results: bool
) -> tuple[SandboxResult, bytes]:
    orders_read, orders_write = os.pipe()
    report_read, report_write = os.pipe()
    results_read, results_write = os.pipe() if with_results else (-1, -1)
    theirs = [fd for fd in (orders_read, report_write, results_write) if fd >= 0]
    process: Any = None
    try:
        process = subprocess.Popen(
            [*_LAUNCHER, str(orders_read), str(report_write), str(results_write)],
            stdin=stdin_file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=theirs,
            env=order["environment"],
            start_new_session=True,
        )
        for fd in theirs:
            os.close(fd)
        theirs = []
        streams = [(process.stdout.fileno(), max_output), (process.stderr.fileno(), max_output)]
        streams += [(report_read, 1 << 20), (results_read, 16 << 20)]
        with os.fdopen(orders_write, "wb", closefd=False) as orders, contextlib.suppress(BrokenPipeError):
            orders.write(marshal.dumps(order))
        outputs, overflow = _collect(streams, time.monotonic() + order["timeout"] + GRACE_SECONDS, orders_write)
    finally:
        os.close(orders_write)  # makes the launcher kill the program if it is still running
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_SECONDS)
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
        for fd in (*theirs, report_read, results_read):
            if fd >= 0:
                os.close(fd)
    stdout, stderr, report, results = outputs
    return _result(order, stdout, stderr, report, overflow), results


def _collect(streams: list[tuple[int, int]], deadline: float, stop: int) -> tuple[list[bytes], bool]:
    """Read descriptors, each up to a limit, until all end or the deadline passes. Return their bytes, and whether one
    had too many: then the program is killed by closing the pipe `stop`, for whose end of file the launcher waits."""
    kept = [bytearray() for _ in streams]
    overflow = False
    with selectors.DefaultSelector() as selector:
        for (fd, limit), read in zip(streams, kept, strict=True):
            if fd >= 0:
                selector.register(fd, selectors.EVENT_READ, (read, limit))
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                piece = os.read(key.fd, 1 << 16)
                read, limit = key.data
                if not piece:
                    selector.unregister(key.fd)
                elif len(read) + len(piece) > limit and not overflow:
                    overflow = True
                    nothing = os.open(os.devnull, os.O_RDONLY)
                    os.dup2(nothing, stop)
                    os.close(nothing)
                read += piece[: limit - len(read)]
    return [bytes(read) for read in kept], overflow


def _result(order: dict[str, Any], stdout: bytes, stderr: bytes, written: bytes, overflow: bool) -> SandboxResult:
    if not written:
        raise SandboxError("launcher", f"it ended without a report: {stderr.decode(errors='replace')[-2000:]}")
    report = marshal.loads(written)
    if report["failed"] is not None:
        raise SandboxError(*report["failed"])
    status, timed_out = report["status"], report["timed_out"]
    if overflow:
        killed = "wrote too much output"
    elif timed_out:
        killed = f"timed out after {order['timeout']:g} s"
    elif report["crowded"]:
        killed = f"started more than {order['processes']} processes and threads"
    elif status == -signal.SIGXCPU or status == -signal.SIGKILL:
        killed = "used up its CPU time, or was killed by the kernel"
    else:
        killed = ""
    texts = stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace")
    return SandboxResult(
        *texts, exit_code=status, timed_out=timed_out, killed_reason=killed, seconds=report["seconds"]
    )


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)  # it is empty if the program had its own file system
    except OSError:
        # The program may have left folders without permissions, or nested deeper than shutil.rmtree can follow.
        subprocess.run(["chmod", "-R", "u+rwx", folder], check=False)  # if this fails, so does the next command
        subprocess.run(["rm", "-rf", folder], check=True)


# A bare interpreter that imports only `jail`: importing the whole package would take longer than the run itself.
_LAUNCHER = [
    os.path.realpath(sys.executable),
    "-I",
    "-S",
    "-c",
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from jail.launcher import main; main()",
    str(Path(__file__).parent),
]
