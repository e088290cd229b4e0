"""Python processes for tests, forked from a server that has imported torch and TRL.

Imports take longer than most tests. The server starts with the first use and ends with the tests. `python` is for what
a user types, `launch` for several processes; a launcher as users have it is in tests/support/training.py.
"""

import atexit
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
# Processes share one pipe. Unbuffered, print() writes each argument on its own, and lines of two processes mix.
ENVIRONMENT["PYTHONUNBUFFERED"] = ""
IMPORTED = (
    "peft",
    "trl_grpo_tasks.commands.main",
    "trl_grpo_tasks.commands.train",
    "trl_grpo_tasks.training.trainer",
    "tests.support.toy",
)
_ASKING = threading.Lock()
READ_AT_IMPORT = ("huggingface_hub.constants", "datasets.config")  # modules that keep variables of the environment


class Processes:
    """One or several processes that run a Python file, which has `argument` as JSON in sys.argv[1]. If there are
    several, they can form a process group (gloo). When one fails, the others are killed."""

    def __init__(self, file, argument, processes=1):
        self._start([str(file), json.dumps(argument)], str(file), processes=processes, cwd=os.getcwd(), env={})

    @classmethod
    def of_words(cls, words, cwd, env):
        """One process that does what `python` does with these words."""
        self = cls.__new__(cls)
        self._start([*map(str, words)], tempfile.mktemp(prefix="forked"), processes=1, cwd=str(cwd), env=dict(env))
        return self

    def _start(self, words, files, **order):
        self.out, self.err, self._status = (Path(f"{files}.{name}") for name in ("out", "err", "status"))
        self._status.unlink(missing_ok=True)
        order |= {"words": words, "out": str(self.out), "err": str(self.err), "status": str(self._status)}
        with _ASKING:
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


def python(*words, cwd=None, env=ENVIRONMENT, timeout=240, check=False):
    """As `subprocess.run([sys.executable, *words])` with captured output, without the time for imports."""
    running = Processes.of_words(words, cwd or os.getcwd(), env)
    done = subprocess.CompletedProcess(words, running.wait(timeout), running.out.read_text(), running.err.read_text())
    assert done.returncode == 0 or not check, done.stderr[-6000:]
    return done


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
    sys.stdout.flush()  # forked processes would write it again
    gc.collect()
    gc.freeze()  # a forked process neither copies these objects nor searches them for garbage
    atexit.register(gc.unfreeze)  # otherwise libraries report leaks at the end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaders that have ended leave nothing behind
    for line in sys.stdin:
        leader = os.fork()
        if leader == 0:
            return _lead(json.loads(line))
        print(leader, file=answers, flush=True)
    return None


def _lead(order):
    """Fork the processes of an order and save the status of the first that fails. Return its words in each process."""
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
    if order["env"]:
        os.environ.clear()
        os.environ.update(order["env"])
        for name in READ_AT_IMPORT:
            importlib.reload(sys.modules[name])
        hub = sys.modules["huggingface_hub"]
        hub.hf_api.api.endpoint = hub.constants.ENDPOINT
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
            return order["words"]
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


def _run(words):
    """Do what Python does with these words, but end without destroying objects one by one, which would copy shared
    memory."""
    faulthandler.enable()
    first, rest = words[0], words[1:]
    status = 1
    try:
        if first == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif first == "-m":
            sys.argv = rest
            sys.modules.pop(rest[0], None)  # otherwise runpy warns
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(first, run_name="__main__")
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__" and (words := _serve()):
    _run(words)
