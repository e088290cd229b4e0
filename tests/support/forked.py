"""Python processes for tests, forked from a server that has imported torch and TRL.

Imports take longer than most tests. The server starts with the first use and ends with the tests. A launcher as users
have it is in tests/support/training.py.
"""

import atexit
import faulthandler
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
# Processes share one pipe. Unbuffered, print() writes each argument on its own, and lines of two processes mix.
ENVIRONMENT["PYTHONUNBUFFERED"] = ""
IMPORTED = ("peft", "trl_grpo_tasks.commands.train", "trl_grpo_tasks.training.trainer", "tests.support.toy")


class Processes:
    """One or several processes that run a Python file, which has `argument` as JSON in sys.argv[1]. If there are
    several, they can form a process group (gloo). When one fails, the others are killed."""

    def __init__(self, file, argument, processes=1):
        self.out, self.err = (Path(f"{file}.{stream}") for stream in ("out", "err"))
        self._status = Path(f"{file}.status")
        self._status.unlink(missing_ok=True)
        order = {"file": str(file), "argument": json.dumps(argument), "processes": processes, "cwd": os.getcwd()}
        order |= {"out": str(self.out), "err": str(self.err), "status": str(self._status)}
        server = _server()
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        self._pid = int(server.stdout.readline())

    def poll(self):
        """The exit status of the first process that failed, or 0; None while processes are running."""
        if self._status.is_file():
            return int(self._status.read_text())
        return None

    def wait(self, timeout):
        """Wait for the end and return the exit status; after `timeout` seconds, kill the processes and fail."""
        deadline = time.monotonic() + timeout
        try:
            while (status := self.poll()) is None:
                assert time.monotonic() < deadline, f"still running after {timeout} s\n{self.err.read_text()[-4000:]}"
                time.sleep(0.01)
        finally:
            self.kill()
        return status

    def kill(self):
        """Send SIGKILL to all processes and wait until they have ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it may end at this moment
                os.kill(self._pid, signal.SIGTERM)
            while self.poll() is None:
                time.sleep(0.01)


def launch(script, processes, argument, output_dir, timeout=300):
    """Run `script` in this number of processes, which must succeed; return stdout and stderr."""
    file = Path(output_dir).parent / f"{Path(output_dir).name}.py"
    file.write_text(script)
    running = Processes(file, argument, processes)
    assert running.wait(timeout) == 0, running.err.read_text()[-6000:]
    return running.out.read_text(), running.err.read_text()


@cache
def _server():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", __name__], env=ENVIRONMENT, cwd=ROOT, text=True, **pipes)


def _serve():
    """Fork a leader for each order on stdin and print its process id."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaders that have ended leave nothing behind
    for line in sys.stdin:
        leader = os.fork()
        if leader == 0:
            return _lead(json.loads(line))
        print(leader, file=answers, flush=True)
    return None


def _lead(order):
    """Fork the processes of an order and save the status of the first that fails. Returns the file in each process."""
    running, status = set(), 0

    def kill(*_):
        for process in running:
            os.kill(process, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(order["cwd"])
    for stream, path in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if stream else 0)), stream)
    sys.argv = [order["file"], order["argument"]]
    count = order["processes"]
    if count > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    for rank in range(count):
        if count > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return order["file"]
        running.add(process)
    while running:
        process, ended = os.wait()
        running.discard(process)
        if ended and not status:
            status = os.waitstatus_to_exitcode(ended)
            kill()  # the others would wait for it
    Path(order["status"] + ".new").write_text(str(status))
    os.rename(order["status"] + ".new", order["status"])
    os._exit(0)


def _run(file):
    """Run a file as Python would, but end without destroying objects one by one, which would copy shared memory."""
    faulthandler.enable()
    status = 1
    try:
        runpy.run_path(file, run_name="__main__")
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__" and (file := _serve()):
    _run(file)
