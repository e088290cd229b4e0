"""run_python: model-written Python in a fresh interpreter, kept away from the machine as far as the kernel allows.

What it does everywhere on Linux: a new interpreter without site-packages and with a scrubbed environment, in an empty
temporary folder; limits on CPU time, wall clock, memory of a process, number of processes, size of a file, number of
open files, and output; everything the program started is ended with it. Where the kernel allows (`sandbox_layers()`
tells, and a warning names what is missing): no network, its own process tree, a file system that shows only the
interpreter and the system libraries (read only), a user id of its own when started as root, no capabilities, Landlock,
and a seccomp filter without sockets, tracing, mounts or namespaces.

What it does not stop:
- a bug in the kernel: this is not a virtual machine. Against code that is written to attack, use one.
- use of the machine within the limits: `processes` x `memory_mb` of memory for `timeout` seconds, 64 MB of files.
  Without a file system of its own: as many files of 16 MB as it can write; without seccomp: memory of no process.
- learning about the machine: kernel version, CPU, time, the contents of the system's library folders.
- where a layer is refused, what that layer is for. With no layer at all, the program can read and write what the user
  can (these files and the interpreter's included, so that it could change later verdicts), reach the network, and
  signal the user's processes. It cannot open the descriptors or the memory of this process, of the launcher or of the
  judge, through which the tests and the verdicts go: they refuse to be traced, and a verdict carries a key. Those of a
  sandbox that another process is just starting it can, for some milliseconds.
- with Landlock but no file system of its own: asking whether a file is there, and changing the permissions and times
  of those that the user owns.
- as root without a user id of its own (the container forbids to change it): it is root, without capabilities. Files of
  root's are its own, and for some milliseconds it can have more processes than it may, before it is ended.
- as root, with an interpreter in a closed folder (`/root`) and no file system of its own: it has a user id of its own,
  but keeps the capability to enter such folders. Landlock confines that to the interpreter and the system; without
  Landlock it can read every file, and in a container that leaves root only CAP_DAC_OVERRIDE write them.
- side channels: timing, load.
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
FILE_MB = 16  # the largest single file that the program may write


@dataclass(frozen=True)
class TestsResult:
    """How many tests passed; `failures` has one line for each that did not, with its text."""

    __test__ = False  # pytest: not a class of tests

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
    max_output: int = 64_000,
    processes: int = 8,
) -> SandboxResult:
    """Run `code` as a program. Never raises for what the code does.

    `memory_mb` is for each process, `max_output` bytes for each of stdout and stderr (more ends the program),
    `processes` counts threads too. The hash seed is fixed, so the same program writes the same text.

    >>> run_python("print(6 * 7)").stdout
    '42\\n'
    """
    order = _order({"main.py": code}, timeout, memory_mb, processes)
    return run_launcher(order, sandbox_layers(), stdin, max_output)[0]


def run_tests(
    code: str,
    tests: Sequence[str],
    *,
    setup: str = "",
    timeout: float = 5,
    memory_mb: int = 512,
    max_output: int = 64_000,
    processes: int = 8,
) -> TestsResult:
    """Run `code`, then each test (such as `assert add(1, 2) == 3`) in one sandbox; a test that raises fails.

    The tests run in a process that the code cannot reach. Calls to what the code defines are passed over as values:
    numbers, text, lists and the like, and those of the standard library in `jail/values.py` (Fraction, Decimal, date,
    deque, ...). Objects of the code's own classes stay there and are referred to; one that is also a number, a text or
    a tuple counts as that in a comparison. What is asserted is decided on the tests' side. So printing a result,
    ending the interpreter, patching builtins or returning an object that equals everything gains nothing: a test
    passes only if the right values come back. The code does not see the tests, nor the tests' side of a comparison.

    What a test uses without defining or importing it:
    - builtins are the real ones, even if the code redefines them; `eval` and `exec` run a text on the code's side,
      with the variables of the test that it names;
    - `math.isclose` is that of the standard library, as is any other name of a module that is used like this;
    - every other name is the code's, which may have written an `isclose` that is always true: import it in the test.

    Limits of this: an operator between two objects of the code's own classes is the code's affair, and so is what one
    such object answers by itself (`in`, its truth, its methods) and what an exception class of the code's catches
    (`Empty = Exception` catches the assertion too); values are passed as copies (lists, dicts, sets, deques and
    bytearrays given as arguments are updated afterwards); a test that runs what the code returns in another way than
    by `eval` and `exec` (`pickle.loads(f())`, `timeit.timeit(f())`) hands the verdicts over to it.

    >>> run_tests("def add(a, b): return a + b", ["assert add(1, 2) == 3", "assert add(1, 1) == 3"]).passed
    1
    """
    order = _order({**_judge_files(), "solution.py": code}, timeout, memory_mb, processes + 1)
    key = secrets.token_hex(16)
    job = json.dumps({"setup": setup, "tests": list(tests), "key": key})
    result, verdicts = run_launcher(order, sandbox_layers(), job, max_output, with_results=True)
    missing = result.killed_reason or "not reached: the code ended the interpreter"
    reasons = _read_verdicts(verdicts, key, len(tests), missing)
    failures = [f"{test}: {reason}" for test, reason in zip(tests, reasons, strict=True) if reason]
    return TestsResult(len(tests) - len(failures), len(tests), failures, result)


def _read_verdicts(written: bytes, key: str, count: int, missing: str) -> list[str]:
    """A reason per test ("" for a pass). Tests fail from the first line on that is no verdict with this run's key."""
    reasons: list[str] = []
    for line in written.split(b"\n")[:-1]:  # a half-written last line is not a verdict
        found, _, text = line.partition(b" ")
        try:
            reason = json.loads(text) if found == key.encode() else None
        except (ValueError, RecursionError):
            reason = None
        if not isinstance(reason, str):
            missing = "what was written in place of its verdict is none"
            break
        reasons.append(reason)
    return [*reasons, *[missing] * count][:count]


@functools.lru_cache(maxsize=1)
def _judge_files() -> dict[str, bytes]:
    """What runs the tests, compiled: the sandbox's interpreter is this one, and would compile it for every program."""
    start = b"import sys\nsys.path.insert(0, '')\nfrom jail.judge import main\ndel sys.path[0]\nmain()\n"
    files = {"main.py": start}
    for name in ("__init__", "judge", "channel", "remote", "values"):
        source = (Path(__file__).parent / "jail" / f"{name}.py").read_text()
        code = compile(source, f"jail/{name}.py", "exec", dont_inherit=True)
        files[f"jail/{name}.pyc"] = importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)
    return files


def sandbox_layers() -> Mapping[str, str]:
    """Which protections are active on this machine: name -> "" where active, or why not. Found out once, with a
    warning if one is missing.

    userns: a user namespace, for a normal user to make the next three. network: no interfaces. pids: a process tree of
    its own. files: a file system of its own. landlock: file, TCP and signal rules. uid: an unused user id instead of
    root. capabilities: that user has none of root's; otherwise the one to enter closed folders. seccomp: dangerous
    system calls refused. Limits and the clean environment are always active.
    """
    return _probed_layers()


def missing_layers() -> str:
    """Which protections this machine lacks and why, in one line; "" if none."""
    return _in_a_line(sandbox_layers())


def _in_a_line(layers: Mapping[str, str]) -> str:
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in layers.items():
        if reason and not reason.startswith(NOT_NEEDED):
            names_by_reason.setdefault(" ".join(reason.split())[:200], []).append(name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in names_by_reason.items())


@functools.lru_cache(maxsize=1)
def _probed_layers() -> dict[str, str]:
    layers = _probe_layers()
    if missing := _in_a_line(layers):
        logger.warning("the sandbox lacks these layers on this machine: %s", missing)
    return layers


def _probe_layers() -> dict[str, str]:
    refused = {"userns": f"{NOT_NEEDED} by root"} if os.geteuid() == 0 else {"uid": f"{NOT_NEEDED}: not root"}
    while True:
        wanted = [name for name in LAYERS if name not in refused]
        problem = _problem_with(wanted)
        if problem is None:
            return {name: refused.get(name, "") for name in LAYERS}
        layer, reason = problem.layer, problem.reason
        if layer not in wanted:
            # The interpreter does not start: some layer hides a file from it. Give up one, the right one if it is one.
            hiding: list[str] = [name for name in ("files", "landlock", "uid", "seccomp") if name in wanted]
            if not hiding:
                raise problem
            if "uid" in wanted and "capabilities" in wanted:  # the mildest: it may enter the interpreter's folders
                hiding.insert(0, "capabilities")
            alone = [name for name in hiding if _problem_with([one for one in wanted if one != name]) is None]
            layer = (alone or hiding)[0]
        refused[layer] = reason
        if layer == "userns":
            refused.update(dict.fromkeys(("network", "pids", "files"), reason))
        if layer == "uid":
            refused.pop("capabilities", None)  # without another user there is none to keep


def _problem_with(layers: list[str]) -> SandboxError | None:
    order = _order({"main.py": "import ctypes, json; print(1)"}, 30, 512, 8)
    try:
        result, _ = run_launcher(order, dict.fromkeys(layers, ""), "", 1000)
    except SandboxError as error:
        return error
    if result.stdout == "1\n":
        return None
    return SandboxError("interpreter", f"it did not start: {result.stderr[-500:]}{result.killed_reason}")


def _order(files: Mapping[str, str | bytes], timeout: float, memory_mb: int, processes: int) -> dict[str, Any]:
    executable = os.path.realpath(sys.executable)
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    if "LD_LIBRARY_PATH" in os.environ:  # some clusters' interpreters do not start without it
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return {
        "files": {
            name: content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
            for name, content in files.items()
        },
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
