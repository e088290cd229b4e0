"""A sandbox for model-written Python: `run_python` runs a program, `run_tests` runs unit tests against it.

The program runs in a fresh interpreter, isolated from the machine as far as the kernel allows.

Protections that are always active (Linux only): a new interpreter without site-packages, with a clean environment, in
an empty temporary folder; limits on CPU time, wall-clock time, memory per process, number of processes, file size,
number of open files, and output; every process that the program started is killed with it.

Protections that depend on the kernel (`sandbox_layers()` reports them, and a warning names the missing ones): no
network; a separate process tree; a file system that contains only the interpreter and the system libraries, read
only; a separate user id if started as root; no capabilities; Landlock; and a seccomp filter against sockets, tracing,
mounts and namespaces.

What the sandbox does not protect against:
- Kernel bugs. This is not a virtual machine; use one for code that is written to attack.
- Use of resources within the limits: `processes` x `memory_mb` of memory for `timeout` seconds, and 64 MB of files.
  Without the layer `files`, the program can write any number of 16 MB files. Without `seccomp`, it can allocate memory
  that belongs to no process (shared segments, files in memory).
- Information about the machine: kernel version, CPU, time, the contents of the system's library folders.
- What a missing layer is for. Without any layer, the program can read and write all files of the user (including this
  package and the interpreter, so that it could change later verdicts), reach the network, and signal the user's
  processes. It still cannot open the descriptors or the memory of this process, the launcher or the test runner,
  through which tests and verdicts pass: these processes cannot be traced, and each verdict carries a secret key. For
  some milliseconds, however, it can open those of a sandbox that another process is just starting.
- With `landlock` but without `files`: it can check whether a file exists, and change the permissions and times of the
  user's files.
- As root without `uid` (the container forbids changing the user id): the program runs as root without capabilities.
  It owns root's files, and for some milliseconds it can exceed the limit on processes before it is killed.
- As root, with an interpreter inside a closed folder such as `/root`, and without `files`: the program has a separate
  user id but keeps the capability to enter such folders. Landlock limits this to the interpreter and the system
  folders. Without Landlock it can read every file, and also write every file in a container where root only has
  CAP_DAC_OVERRIDE.
- Side channels, such as timing and load.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import marshal
import math
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .jail.layers import LAYERS
from .sandbox_process import SandboxError, SandboxResult, run_launcher

__all__ = [
    "SandboxError",
    "SandboxResult",
    "TestsResult",
    "missing_layers",
    "run_python",
    "run_tests",
    "sandbox_layers",
]

logger = logging.getLogger(__name__)

NOT_NEEDED = "not needed"
FILE_MB = 16  # size limit of a file that the program writes
MAX_OUTPUT = 64_000  # bytes of stdout, and of stderr
PROCESSES = 8  # processes and threads


@dataclass(frozen=True)
class TestsResult:
    """The result of `run_tests`; `failures` contains "TEST: REASON" for each test that did not pass."""

    __test__ = False  # tells pytest that this is not a test class

    passed: int
    total: int
    failures: list[str]
    result: SandboxResult


def run_python(
    code: str,
    *,
    stdin: str = "",
    timeout: float = 5,
    memory_mb: int = 512,
    max_output: int = MAX_OUTPUT,
    processes: int = PROCESSES,
) -> SandboxResult:
    """Run `code` as a program. Nothing that the code does makes this raise.

    The limits: `timeout` in seconds; `memory_mb` per process; `max_output` bytes each for stdout and stderr, beyond
    which the program is killed; `processes` counts processes and threads. The hash seed is fixed, so that the same
    program prints the same text.

    >>> run_python("print(6 * 7)").stdout
    '42\\n'
    """
    order = _order({"main.py": code.encode("utf-8", "surrogatepass")}, timeout, memory_mb, processes)
    return run_launcher(order, sandbox_layers(), stdin, max_output)[0]


def run_tests(
    code: str, tests: Sequence[str], *, setup: str = "", timeout: float = 5, memory_mb: int = 512
) -> TestsResult:
    """Run `code` and then each test (such as `assert add(1, 2) == 3`) in one sandbox. A test that raises has failed.

    The tests run in a separate process, which the code cannot reach. Calls to the code's functions go through a pipe.
    Arguments and results are copied if they are plain values: numbers, strings, lists and the like, and the classes of
    the standard library in `jail/values.py` (Fraction, Decimal, date, deque, ...). Objects of the code's own classes
    stay in the code's process, and the tests hold references to them; one that is also a number, a string or a tuple
    is compared as such. Assertions are evaluated in the tests' process. So printing a result, ending the interpreter,
    patching builtins or returning an object that equals everything does not help: a test passes only if the right
    values come back. The code sees neither the tests nor the values it is compared with.

    How names are resolved that a test uses without defining or importing them:
    - Builtins are the real ones, even if the code redefines them. `eval` and `exec` run their text in the code's
      process, with the variables of the test that the text mentions.
    - `math.isclose`, and any other attribute of a standard-library module, is that of the standard library.
    - Every other name is the code's. The code may define an `isclose` that is always true; import it in the test.

    Limitations:
    - Operators between two objects of the code's own classes are evaluated by the code, and so are the methods, the
      truth value and `in` of one such object.
    - An exception class of the code decides what it catches: with `Empty = Exception`, it also catches a failed
      assertion.
    - Values are passed as copies. Lists, dicts, sets, deques and bytearrays given as arguments are updated afterwards.
    - A test must not execute what the code returns other than with `eval` or `exec`: `pickle.loads(f())` or
      `timeit.timeit(f())` would let the code decide the verdicts.

    >>> run_tests("def add(a, b): return a + b", ["assert add(1, 2) == 3", "assert add(1, 1) == 3"]).passed
    1
    """
    files = _runner_files() | {"solution.py": code.encode("utf-8", "surrogatepass")}
    order = _order(files, timeout, memory_mb, PROCESSES + 1)
    key = secrets.token_hex(16)
    job = json.dumps({"setup": setup, "tests": list(tests), "key": key})
    result, verdicts = run_launcher(order, sandbox_layers(), job, MAX_OUTPUT, with_results=True)
    missing = result.killed_reason or "not reached: the code ended the interpreter"
    reasons = _read_verdicts(verdicts, key, len(tests), missing)
    failures = [f"{test}: {reason}" for test, reason in zip(tests, reasons, strict=True) if reason]
    return TestsResult(len(tests) - len(failures), len(tests), failures, result)


def _read_verdicts(written: bytes, key: str, count: int, missing: str) -> list[str]:
    """Return the reason for failure of each test, "" for a pass.

    From the first line that is not a verdict with this run's key, all tests count as failed.
    """
    reasons: list[str] = []
    for line in written.split(b"\n")[:-1]:  # a half-written last line is not a verdict
        found, _, text = line.partition(b" ")
        try:
            reason = json.loads(text) if found == key.encode() else None
        except (ValueError, RecursionError):
            reason = None
        if not isinstance(reason, str):
            missing = "invalid output in place of its verdict"
            break
        reasons.append(reason)
    return [*reasons, *[missing] * count][:count]


@functools.lru_cache(maxsize=1)
def _runner_files() -> dict[str, bytes]:
    """Return the files of the test runner, compiled once: the sandbox would compile them for every program."""
    start = b"import sys\nsys.path.insert(0, '')\nfrom jail.runner import main\ndel sys.path[0]\nmain()\n"
    files = {"main.py": start}
    for name in ("__init__", "runner", "channel", "remote", "values"):
        source = (Path(__file__).parent / "jail" / f"{name}.py").read_text()
        code = compile(source, f"jail/{name}.py", "exec", dont_inherit=True)
        files[f"jail/{name}.pyc"] = importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)
    return files


def sandbox_layers() -> Mapping[str, str]:
    """Return which protections work on this machine: name -> "" if active, else the reason why not.

    The layers are probed once per process, with a warning if one is missing:
    - userns: a user namespace, which a user other than root needs for the next three;
    - network: no network interfaces;
    - pids: a separate process tree;
    - files: a separate file system;
    - landlock: rules for files, TCP and signals;
    - uid: an unused user id instead of root;
    - capabilities: that user has no capabilities; without this layer, it has the one to enter closed folders;
    - seccomp: dangerous system calls fail.

    Resource limits and the clean environment are always active.
    """
    return _probed_layers()


def missing_layers() -> str:
    """Return in one line which protections this machine lacks and why; "" if none are missing."""
    return _describe_missing(sandbox_layers())


def _describe_missing(layers: Mapping[str, str]) -> str:
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in layers.items():
        if reason and not reason.startswith(NOT_NEEDED):
            names_by_reason.setdefault(" ".join(reason.split())[:200], []).append(name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in names_by_reason.items())


@functools.lru_cache(maxsize=1)
def _probed_layers() -> dict[str, str]:
    layers = _probe_layers()
    if missing := _describe_missing(layers):
        logger.warning("the sandbox lacks these protections on this machine: %s", missing)
    return layers


def _probe_layers() -> dict[str, str]:
    """Find the layers that work by starting a small program with all of them and dropping those that fail."""
    refused = {"userns": f"{NOT_NEEDED} by root"} if os.geteuid() == 0 else {"uid": f"{NOT_NEEDED}: not root"}
    while True:
        wanted = [name for name in LAYERS if name not in refused]
        problem = _problem_with(wanted)
        if problem is None:
            return {name: refused.get(name, "") for name in LAYERS}
        layer, reason = problem.layer, problem.reason
        if layer not in wanted:
            # The interpreter does not start because some layer hides a file from it. Drop a layer, preferably one
            # without which it starts.
            hiding: list[str] = [name for name in ("files", "landlock", "uid", "seccomp") if name in wanted]
            if not hiding:
                raise problem
            if "uid" in wanted and "capabilities" in wanted:  # the smallest loss: lets it enter closed folders
                hiding.insert(0, "capabilities")
            enough = [name for name in hiding if _problem_with([one for one in wanted if one != name]) is None]
            layer = (enough or hiding)[0]
        refused[layer] = reason
        if layer == "userns":
            refused.update(dict.fromkeys(("network", "pids", "files"), reason))
        if layer == "uid":
            refused.pop("capabilities", None)  # capabilities are only kept for a separate user id


def _problem_with(layers: list[str]) -> SandboxError | None:
    """Try to run a small program with these layers; return the error, or None if it ran."""
    order = _order({"main.py": b"import ctypes, json; print(1)"}, 30, 512, 8)
    try:
        result, _ = run_launcher(order, dict.fromkeys(layers, ""), "", 1000)
    except SandboxError as error:
        return error
    if result.stdout == "1\n":
        return None
    return SandboxError("interpreter", f"Python did not start: {result.stderr[-500:]}{result.killed_reason}")


def _order(files: Mapping[str, bytes], timeout: float, memory_mb: int, processes: int) -> dict[str, Any]:
    """Return the instructions for the launcher: files to write, command, environment and limits."""
    executable = os.path.realpath(sys.executable)
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    if "LD_LIBRARY_PATH" in os.environ:  # on some clusters the interpreter does not start without it
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return {
        "files": files,
        "command": [executable, "-P", "-s", "-S", "-B", "-X", "utf8", "main.py"],
        "environment": environment,
        "prefixes": sorted({os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}),
        "timeout": float(timeout),
        "processes": processes,
        "limits": {
            "CPU": math.ceil(timeout) + 1,
            "AS": memory_mb * 2**20,
            "FSIZE": FILE_MB * 2**20,
            "NOFILE": 256,
            "CORE": 0,
        },
    }
