"""Sets up a sandbox, runs one program in it, kills all processes that the program left, and reports the result.

There are three processes: a supervisor, which is outside the new process tree and enforces the time limit; init,
process 1 of the new tree, with whose end the kernel kills the whole tree; and the program. Descriptors are passed by
number: the order arrives on `orders`, whose end of file means "stop now" (the host has died or has read enough); the
report is written to `report`; the program gets `results` as descriptor 3.
"""

from __future__ import annotations

import ctypes  # noqa: F401 - loaded before limits are set and the file system is replaced
import marshal
import os
import resource
import select
import sys
import time

from . import layers

TYPE_CHECKING = False  # importing the typing and signal modules would take a fifth of the time of a short program
if TYPE_CHECKING:
    from typing import Any

SIGKILL = 9


def main() -> None:
    layers.prctl(layers.PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program must not trace or read this process
    orders, report, results = (int(argument) for argument in sys.argv[1:4])
    try:
        with os.fdopen(orders, "rb", closefd=False) as stream:
            order = marshal.load(stream)
    except EOFError:  # the host has died
        os._exit(1)
    outcome: dict[str, Any] = {"failed": None, "status": None, "timed_out": False, "crowded": False, "seconds": 0.0}
    try:
        _supervise(order, orders, report, results, outcome)
    except layers.SandboxError as error:
        outcome["failed"] = (error.layer, error.reason)
    os.write(report, marshal.dumps(outcome))


def _supervise(order: dict[str, Any], orders: int, report: int, results: int, outcome: dict[str, Any]) -> None:
    """Create the namespaces, start init, wait for the program within its limits, and fill in `outcome`."""
    wanted = order["layers"]
    order["uid"] = _unused_uid() if "uid" in wanted else None
    order["limits"]["NPROC"] = order["processes"] + _processes_counted_already(wanted)
    layers.prctl(layers.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if "userns" in wanted:
        layers.prctl(layers.PR_SET_DUMPABLE, 1, 0, 0, 0)  # required for writing the user id map
    for name, enter in (
        ("userns", layers.enter_user_namespace),
        ("network", lambda: layers.unshare(layers.NEWNET)),
        ("pids", lambda: layers.unshare(layers.NEWPID | layers.NEWIPC)),
        ("files", lambda: layers.unshare(layers.NEWNS)),
    ):
        if name in wanted:
            _try(name, enter)
    layers.prctl(layers.PR_SET_DUMPABLE, 0, 0, 0, 0)

    status_read, status_write = os.pipe()
    started = time.monotonic()
    init = os.fork()
    if init == 0:
        for fd in (orders, report, status_read):
            os.close(fd)
        _run_init(order, results, status_write)
    os.close(status_write)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    if results >= 0:
        os.close(results)

    status_message = b""
    watch = select.poll()
    watch.register(orders, select.POLLIN | select.POLLHUP)
    watch.register(status_read, select.POLLIN | select.POLLHUP)
    counted_by_kernel = order["uid"] is not None or os.geteuid() != 0  # the kernel's limit does not apply to root
    while True:
        left = started + order["timeout"] - time.monotonic()
        if left <= 0:
            outcome["timed_out"] = True
            break
        if not counted_by_kernel and _threads_below(init) > order["processes"]:
            outcome["crowded"] = True
            break
        ready = [fd for fd, _ in watch.poll((left if counted_by_kernel else min(left, 0.02)) * 1000 + 1)]
        if status_read in ready:
            piece = os.read(status_read, 65536)
            status_message += piece
            if not piece:
                break
        if orders in ready:  # end of file
            break
    outcome["seconds"] = time.monotonic() - started
    os.kill(init, SIGKILL)
    os.waitpid(init, 0)
    _end_descendants()
    message = marshal.loads(status_message) if status_message else {}
    if "refused" in message:
        raise layers.SandboxError(*message["refused"])
    outcome["status"] = message.get("status")


def _run_init(order: dict[str, Any], results: int, status: int) -> None:
    """Run process 1: prepare the file system, start the program, reap orphans, report how the program ended."""
    try:
        layers.prctl(layers.PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        uid = order["uid"]
        folder = order["folder"]
        if "files" in order["layers"]:
            _try("files", lambda: layers.enter_own_root(folder, order["prefixes"], uid))
            folder = layers.INNER_FOLDER
        else:
            os.chdir(folder)
            if uid is not None:
                _try("uid", lambda: os.chown(folder, uid, uid))
        os.umask(0o022)
        for name, text in order["files"].items():
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            with open(name, "wb") as file:
                file.write(text)
        program = os.fork()
        if program == 0:
            _run_program(order, folder, uid, results, status)
        for fd in (0, 1, 2, results):
            if fd >= 0:
                os.close(fd)
        ended, code = -1, 0
        while ended != program:
            ended, code = os.waitpid(-1, 0)
        os.write(status, marshal.dumps({"status": os.waitstatus_to_exitcode(code)}))
    except Exception as error:  # noqa: BLE001 - reported to the supervisor
        refused = ("files", f"{type(error).__name__}: {error}")
        if isinstance(error, layers.SandboxError):
            refused = (error.layer, error.reason)
        os.write(status, marshal.dumps({"refused": refused}))
    finally:
        os._exit(0)


def _run_program(order: dict[str, Any], folder: str, uid: int | None, results: int, status: int) -> None:
    """Restrict this process with all layers and limits, then replace it by the program."""
    step = "limits"
    try:
        os.setsid()
        if results >= 0 and results != 3:
            status = os.dup(status) if status == 3 else status
            os.dup2(results, 3)
            os.close(results)  # if the host has many open files, its number is above those closed below
        os.set_inheritable(status, False)
        first = 4 if results >= 0 else 3
        os.closerange(first, status)
        os.closerange(status + 1, 4096)
        if results >= 0:
            os.set_inheritable(3, True)
        if "landlock" in order["layers"]:
            step = "landlock"
            own_root = "files" in order["layers"]
            readable = ["/"] if own_root else [*layers.SYSTEM_FOLDERS, *order["prefixes"], *layers.DEVICES]
            layers.restrict_with_landlock(readable, [folder, "/dev/null"] + (["/dev/shm"] if own_root else []))
        step = "limits"
        for name, amount in order["limits"].items():
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
            resource.setrlimit(kind, (amount, amount))
        if uid is not None:
            step = "uid"
            layers.change_user(uid, keep_search="capabilities" not in order["layers"])
        layers.prctl(layers.PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)  # set now because changing the user resets it
        layers.prctl(layers.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if uid is None or "capabilities" in order["layers"]:
            step = "capabilities"
            layers.drop_capabilities()
        if "seccomp" in order["layers"]:
            step = "seccomp"
            layers.refuse_system_calls()
        step = "interpreter"
        os.execve(order["command"][0], order["command"], {**order["environment"], "HOME": folder, "TMPDIR": folder})
    except Exception as error:  # noqa: BLE001 - reported to the supervisor
        os.write(status, marshal.dumps({"refused": (step, f"{type(error).__name__}: {error}")}))
    finally:
        os._exit(126)


def _try(name: str, enter: Any) -> None:
    try:
        enter()
    except OSError as error:
        raise layers.SandboxError(name, f"{type(error).__name__}: {error}") from error


def _unused_uid() -> int:
    """Return a user id that nobody uses, not even another sandbox; 65534 (nobody) if such ids are not mapped.

    The range is above the ids that systemd gives to containers.
    """
    uid = 1_900_000_000 + os.getpid()
    with open("/proc/self/uid_map") as lines:
        mapped = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    return uid if any(first <= uid < first + count for first, count in mapped) else 65534


def _processes_counted_already(wanted: list[str]) -> int:
    """Return how many processes count against the limit before the program starts.

    The kernel counts the processes of a user id within a user namespace.
    """
    if "uid" in wanted or os.geteuid() == 0:
        return 0  # the user id is unused, or the limit does not apply because the user is root
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if "userns" in wanted and version >= (5, 14):
        return 2  # the supervisor and init
    count = 2
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.stat(f"/proc/{entry}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{entry}/task"))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return count


def _threads_below(pid: int) -> int:
    """Count the threads of the descendants of `pid` and of orphans that this process has inherited."""
    count, parents = 0, [str(pid), "self"]
    seen = set(parents)
    while parents:
        parent = parents.pop()
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as children:
                    found = set(children.read().split()) - seen
                seen |= found
                parents += found
                count += parent not in (str(pid), "self")
        except OSError:  # the process has ended, or the kernel does not provide these lists
            continue
    return count


def _end_descendants() -> None:
    """Kill all processes that outlived init: without a process namespace, this process inherits the orphans."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        try:
            # This must be fast: a process that keeps forking and exiting has a new id before a slow search ends.
            with open("/proc/thread-self/children") as children:
                suspects = children.read().split()
        except OSError:  # the kernel does not provide this list
            suspects = os.listdir("/proc")
        for entry in suspects:
            if entry.isdigit():
                try:
                    with open(f"/proc/{entry}/stat", "rb") as stat:
                        parent = int(stat.read().rpartition(b")")[2].split()[1])
                    if parent == os.getpid():
                        os.kill(int(entry), SIGKILL)
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    continue
        time.sleep(0.001)
