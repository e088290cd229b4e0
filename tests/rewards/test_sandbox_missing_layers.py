"""The sandbox on kernels that refuse some layers: what is still protected, and how missing layers are reported."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.prompt_files import from_rows, only_row
from tests.support.sandboxed import dedent_run, is_refused, run_script
from trl_grpo_tasks.rewards import sandbox
from trl_grpo_tasks.rewards.jail.layers import LAYERS
from trl_grpo_tasks.rewards.sandbox import SandboxError, missing_layers, run_python, sandbox_layers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
CAPABILITIES = """
    import ctypes, struct
    data = ctypes.create_string_buffer(24)
    ctypes.CDLL(None).capget(struct.pack("=Ii", 0x20080522, 0), data)
    effective, permitted, inheritable, *high = struct.unpack("=6I", data.raw)
    print(hex(effective | permitted | inheritable), any(high))
"""


def only(monkeypatch, *kept: str) -> None:
    """Run the sandbox with these layers only."""
    layers = {name: "" if name in kept else "left out" for name in LAYERS}
    monkeypatch.setattr(sandbox, "_probed_layers", lambda: layers)


def refuse(monkeypatch, *names: str) -> None:
    """Simulate a kernel that refuses these layers; the others are really tried."""
    real = sandbox._problem_with

    def problem_with(wanted):
        refused = [name for name in wanted if name in names]
        return SandboxError(refused[0], "refused here") if refused else real(wanted)

    monkeypatch.setattr(sandbox, "_problem_with", problem_with)


@as_root
@pytest.mark.parametrize("kept", [("landlock", "seccomp"), ("seccomp",), ()])
def test_root_without_the_uid_layer_has_no_capabilities(monkeypatch, tmp_path, kept):
    only(monkeypatch, *kept)
    foreign = tmp_path / "foreign"
    foreign.touch()
    os.chown(foreign, 12345, 12345)
    assert dedent_run(CAPABILITIES).stdout == "0x0 False\n"
    assert is_refused(f"os.chown({str(foreign)!r}, 0, 0)", "import os") and foreign.stat().st_uid == 12345


FORKS = """
    import os, time
    made = 0
    try:
        for _ in range(150):
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            made += 1
    except OSError:
        pass
    print(made, os.getuid(), flush=True)
    time.sleep(60)
"""


@as_root
def test_root_without_the_uid_layer_is_killed_for_too_many_processes(monkeypatch):
    only(monkeypatch, "landlock", "seccomp")
    result = dedent_run(FORKS, timeout=30)
    assert result.killed_reason == "started more than 8 processes and threads" and result.exit_code is None
    few = (
        "import threading, time\nfor _ in range(6): threading.Thread(target=time.sleep, args=(0.2,)).start()\nprint(1)"
    )
    assert run_python(few, timeout=30).stdout == "1\n"


@as_root
def test_an_interpreter_in_a_closed_folder_is_run_by_another_user_without_namespaces(monkeypatch, tmp_path):
    """A regression test: in containers that refuse namespaces, with the interpreter below `/root`, the program used to
    keep running as root with its capabilities."""
    folder = Path(os.path.realpath(sys.executable))
    if all(parent.stat().st_mode & 1 for parent in folder.parents):
        pytest.skip("every user can reach this interpreter")
    refuse(monkeypatch, "network", "pids", "files")
    layers = sandbox._probe_layers()
    assert layers["uid"] == "" and "Permission denied" in layers["capabilities"]
    monkeypatch.setattr(sandbox, "_probed_layers", lambda: layers)
    assert dedent_run(CAPABILITIES).stdout in ("0x2 False\n", "0x4 False\n")  # only the one to enter folders
    result = dedent_run(FORKS, timeout=1)
    made, uid = map(int, result.stdout.split())
    assert made < 8 and uid != 0
    if layers["landlock"] == "":
        closed = tmp_path / "closed"
        closed.touch()
        closed.chmod(0o600)
        assert is_refused(f"open({str(closed)!r})")


def test_without_any_layer_the_tests_and_the_verdicts_cannot_be_reached(tmp_path):
    """The program tries /proc/PID/fd of its judge, of the launcher and of the host, which is a separate process."""
    program = """
        import os
        def look(pid):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if int(fd) < 3 and pid == HOST:
                    continue
                path = f"/proc/{pid}/fd/{fd}"
                pipe = os.readlink(path).startswith("pipe")
                if not pipe and b"assert add" in os.pread(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 10_000, 0):
                    return "read the tests"
                if pipe:
                    os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b'""\\\\n' * 2)
            return "reached"
        seen, pid = [], os.getpid()
        while pid != HOST:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
            try:
                seen.append(look(pid))
            except OSError as error:
                seen.append(error.strerror)
        def add(a, b): raise ValueError(" ".join(seen))
    """
    host = f"""
        import os
        from trl_grpo_tasks.rewards import sandbox
        sandbox._probed_layers = lambda: dict.fromkeys(sandbox.LAYERS, "left out")
        code = {textwrap.dedent(program)!r}.replace("HOST", str(os.getpid()))
        result = sandbox.run_tests(code, ["assert add(1, 2) == 3", "assert add(1, 1) == 2"])
        print(result.passed, result.failures[0])
    """
    ended = run_script(host)
    assert ended.stdout.startswith("0 ") and ended.stdout.count("Permission denied") == 4, ended
    assert "reached" not in ended.stdout and "read the tests" not in ended.stdout


# ---- how missing layers are reported


def test_missing_layers_are_reported_once_in_one_line(monkeypatch, caplog):
    unneeded = dict.fromkeys(LAYERS, "") | {"userns": "not needed by root"}
    missing = unneeded | {"network": "No\nway", "pids": "No\nway", "seccomp": "other"}
    for layers, said in ((unneeded, []), (missing, ["network, pids (No way); seccomp (other)"])):
        sandbox._probed_layers.cache_clear()
        monkeypatch.setattr(sandbox, "_probe_layers", lambda layers=layers: layers)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert sandbox_layers() == layers and missing_layers() == "".join(said)
        assert [line.partition("machine: ")[2] for line in caplog.messages] == said
    sandbox._probed_layers.cache_clear()


CODE_ROW = {"prompt": "double it", "tests": ["assert f(2) == 4"], "rewards": ["tests"]}
CODE_ROW["gold"] = "def f(x): return 2 * x"


def test_require_sandbox_refuses_to_run_without_a_layer(monkeypatch, tmp_path):
    layers = {**sandbox_layers(), "landlock": "left out"}
    monkeypatch.setattr(sandbox, "_probed_layers", lambda: layers)
    with pytest.raises(ValueError, match=r"--require_sandbox: .* landlock \(left out\).*omit --require_sandbox"):
        from_rows(tmp_path, [CODE_ROW], allow_code_execution=True, require_sandbox=True)
    from_rows(tmp_path, [{"prompt": "p", "answer": "1"}], rewards=["numeric"], require_sandbox=True)  # runs no program
    task = from_rows(tmp_path, [CODE_ROW], allow_code_execution=True)
    assert task.score(only_row(task), CODE_ROW["gold"]).success
    only(monkeypatch, *LAYERS)
    task = from_rows(tmp_path, [CODE_ROW], allow_code_execution=True, require_sandbox=True)
    only(monkeypatch, "landlock")
    assert task.score(only_row(task), CODE_ROW["gold"]) is None, "it is checked again in a worker"
