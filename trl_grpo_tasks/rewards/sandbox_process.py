"""One run of the sandbox, seen from the host: start the launcher, collect what comes out, leave nothing behind."""

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
from typing import IO, Any, cast

from .jail.layers import LAYERS, PR_SET_DUMPABLE, prctl

# Each of these keeps the program from looking into the processes of this one's user.
HIDING_LAYERS = ("uid", "pids", "files", "landlock")
GRACE_SECONDS = 20.0  # for the launcher to set up and clean up, on a machine with too much to do


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended. `exit_code` is negative for a signal, None where the sandbox ended it; `killed_reason` says
    why it was ended from outside ("" where it ended by itself)."""

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool
    killed_reason: str
    seconds: float


class SandboxError(RuntimeError):
    """The sandbox itself could not be set up; nothing was run."""

    def __init__(self, layer: str, reason: str):
        super().__init__(f"the sandbox could not be set up ({layer}): {reason}")
        self.layer = layer
        self.reason = reason


def run_launcher(
    order: dict[str, Any], layers: Mapping[str, str], stdin: str, max_output: int, with_results: bool = False
) -> tuple[SandboxResult, bytes]:
    """Start the launcher, feed it the order, and collect what comes out: the result, and what the judge wrote."""
    if sys.platform != "linux":
        raise SandboxError("system", f"it needs Linux, and this is {sys.platform}")
    if not any(layers.get(name) == "" for name in HIDING_LAYERS):
        # The tests and the verdicts go through descriptors of this process, which its user's programs could open.
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
    process = None
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
        output = _Output(process, report_read, results_read, max_output)
        message = marshal.dumps(order)
        with os.fdopen(orders_write, "wb", closefd=False) as orders, contextlib.suppress(BrokenPipeError):
            orders.write(len(message).to_bytes(8, "big") + message)
        overflow = output.collect(time.monotonic() + order["timeout"] + GRACE_SECONDS, orders_write)
    finally:
        os.close(orders_write)  # the launcher ends what is left, if an exception brought us here
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_SECONDS)
            process.kill()
            process.wait()
            cast(IO[bytes], process.stdout).close()
            cast(IO[bytes], process.stderr).close()
        for fd in (*theirs, report_read, results_read):
            if fd >= 0:
                os.close(fd)
    return _result(order, output, overflow), bytes(output.results)


class _Output:
    """What a running sandbox writes, kept up to a limit."""

    def __init__(self, process: subprocess.Popen[bytes], report: int, results: int, max_output: int):
        self.stdout, self.stderr, self.report, self.results = bytearray(), bytearray(), bytearray(), bytearray()
        self._selector = selectors.DefaultSelector()
        streams = [
            (cast(IO[bytes], process.stdout).fileno(), self.stdout, max_output),
            (cast(IO[bytes], process.stderr).fileno(), self.stderr, max_output),
            (report, self.report, 1 << 20),
            (results, self.results, 16 << 20),
        ]
        for fd, kept, limit in streams:
            if fd >= 0:
                self._selector.register(fd, selectors.EVENT_READ, (kept, limit))

    def collect(self, deadline: float, stop: int) -> bool:
        """Read until everything has ended. Too much output: end the program (by hanging up `stop`) and return True."""
        overflow = False
        while self._selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                piece = os.read(key.fd, 1 << 16)
                kept, limit = key.data
                if not piece:
                    self._selector.unregister(key.fd)
                elif len(kept) + len(piece) > limit and not overflow:
                    overflow = True
                    nothing = os.open(os.devnull, os.O_RDONLY)
                    os.dup2(nothing, stop)
                    os.close(nothing)
                kept += piece[: limit - len(kept)]
        self._selector.close()
        return overflow


def _result(order: dict[str, Any], output: _Output, overflow: bool) -> SandboxResult:
    if not output.report:
        raise SandboxError("launcher", f"it ended without a report: {output.stderr.decode(errors='replace')[-2000:]}")
    report = marshal.loads(output.report)
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
    return SandboxResult(
        stdout=output.stdout.decode("utf-8", "replace"),
        stderr=output.stderr.decode("utf-8", "replace"),
        exit_code=status,
        timed_out=timed_out,
        killed_reason=killed,
        seconds=report["seconds"],
    )


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)  # empty where the program had a file system of its own
    except OSError:
        # The program may have left folders without permissions, or nested deeper than shutil.rmtree can follow.
        subprocess.run(["chmod", "-R", "u+rwx", folder], check=False)  # if that fails, so does what follows
        subprocess.run(["rm", "-rf", folder], check=True)


# A bare interpreter that imports `jail` and nothing else of this package, which would take longer than the run itself.
_LAUNCHER = [
    os.path.realpath(sys.executable),
    "-I",
    "-S",
    "-c",
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from jail.launcher import main; main()",
    str(Path(__file__).parent),
]
