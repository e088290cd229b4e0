"""Isolation of the sandbox: one attack per property. A test is skipped if the kernel refuses the layer it needs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.sandboxed import command_of, dedent_run, descendants, is_refused, needs, run_script, with_package
from trl_grpo_tasks.rewards import sandbox

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux"),
    pytest.mark.usefixtures("nothing_is_left"),
]


def test_no_environment_descriptors_or_packages_are_inherited(monkeypatch, each_way):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    result = dedent_run(
        """
        import glob, os
        found = []
        for fd in range(256):
            try:
                os.fstat(fd)
                found.append(fd)
            except OSError:
                pass
        print(found)
        print(sorted(os.environ))
        for path in glob.glob("/proc/*/environ"):
            try:
                print(open(path, "rb").read())
            except OSError:
                pass
        import numpy
        """
    )
    descriptors, names, *_ = result.stdout.splitlines()
    assert descriptors == "[0, 1, 2]" and "No module named 'numpy'" in result.stderr
    assert "SECRET" not in result.stdout and "hunter2" not in result.stdout
    if "LD_LIBRARY_PATH" not in os.environ:
        assert names == "['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED', 'TMPDIR']"


def test_files_outside_cannot_be_written(tmp_path, each_way):
    needs("files", "landlock", "uid")
    target = tmp_path / "open_to_all"
    target.mkdir()
    target.chmod(0o777)
    (target / "precious").write_text("precious")
    (target / "precious").chmod(0o666)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    result = dedent_run(
        f"""
        import os
        for path in ("{target}/new", "{target}/precious", "/tmp/of-a-sandbox", "/etc/of-a-sandbox", "/of-a-sandbox"):
            try:
                with open(path, "w") as file:
                    file.write("written")
            except OSError:
                pass
        try:
            os.remove("{target}/precious")
        except OSError:
            pass
        with open("inside", "w") as file:
            file.write("allowed")
        print(open("inside").read())
        """
    )
    assert result.stdout == "allowed\n", result.stderr
    assert [path.name for path in target.iterdir()] == ["precious"]
    assert (target / "precious").read_text() == "precious"
    assert not any(Path(folder, "of-a-sandbox").exists() for folder in ("/tmp", "/etc", "/"))


def test_files_outside_cannot_be_read_and_the_interpreter_cannot_be_changed(tmp_path, each_way):
    needs("files", "landlock")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o666)
    for statement in (f"open({str(secret)!r})", "open('/etc/passwd')", "import os; open(os.__file__, 'a')"):
        assert is_refused(statement), statement


def test_a_mount_below_the_system_folders_is_read_only_too():
    needs("files")
    if os.geteuid() != 0 or tuple(int(part) for part in os.uname().release.split(".")[:2]) < (5, 12):
        pytest.skip("needs root, to mount something, and Linux 5.12")
    script = """
        import os
        from trl_grpo_tasks.rewards import sandbox
        from trl_grpo_tasks.rewards.jail import layers
        layers.unshare(layers.NEWNS)
        layers._mount(None, "/", None, layers.MS_REC | layers.MS_PRIVATE)
        layers._mount("tmpfs", "/usr/local", "tmpfs", 0, "size=1m,mode=777")
        sandbox._probed_layers = lambda: {"files": ""}
        print(sandbox.run_python("open('/usr/local/written', 'w')").stderr, os.listdir("/usr/local"))
    """
    ended = run_script(script)
    assert "Read-only file system" in ended.stdout and ended.stdout.endswith(" []\n"), ended


def test_a_socket_cannot_be_opened(each_way):
    needs("network", "seccomp", "landlock")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        assert is_refused(f"socket.create_connection({server.getsockname()}, timeout=2)", "import socket")
        with pytest.raises(TimeoutError):
            server.accept()


def test_seccomp_refuses_what_a_program_does_not_need():
    needs("seccomp")
    result = dedent_run(
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        def refused(result):
            return result == -1 and ctypes.get_errno() == 1
        print(refused(libc.unshare(0x10000000)), refused(libc.ptrace(0, 0, 0, 0)), refused(libc.socket(1, 1, 0)))
        clone = 56 if os.uname().machine == "x86_64" else 220
        child = libc.syscall(clone, ctypes.c_ulong(0x10000000 | 17), None, None, None, None)  # a user namespace
        if child == 0:
            os._exit(0)
        print(refused(child))
        """
    )
    assert result.stdout == "True True True\nTrue\n", result.stderr


def test_threads_child_processes_and_socket_pairs_still_work(each_way):
    result = dedent_run(
        """
        import asyncio, multiprocessing, subprocess, sys, threading
        thread = threading.Thread(target=print, args=("thread",))
        thread.start()
        thread.join()
        child = multiprocessing.get_context("fork").Process(target=print, args=("process",))
        child.start()
        child.join()
        print(asyncio.run(asyncio.to_thread(lambda: "asyncio")))
        print(subprocess.run([sys.executable, "-S", "-c", "print('run')"], capture_output=True, text=True).stdout)
        """,
        timeout=20,
    )
    assert result.stdout.split() == ["thread", "process", "asyncio", "run"], result


def test_a_socket_pair_cannot_send_to_another_socket(each_way, tmp_path):
    needs("seccomp")
    path = Path(tempfile.mkdtemp()) / "socket"  # short, because socket paths are limited to 107 characters
    path.parent.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(path))
        path.chmod(0o777)
        server.settimeout(0.2)
        sending = f"one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\none.sendto(b'hello', {str(path)!r})"
        assert is_refused(sending, "import socket")
        with pytest.raises(TimeoutError):
            server.recv(10)
    shutil.rmtree(path.parent)


def test_other_processes_cannot_be_killed(each_way):
    needs("pids", "uid", "landlock")
    marker = subprocess.Popen(["sleep", "60"])  # an unrelated process
    try:
        result = dedent_run(
            f"""
            import os, signal
            refused = 0
            for pid in (os.getppid(), {os.getpid()}, {marker.pid}):
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    refused += 1
            print("alive", refused)
            """
        )
        assert marker.poll() is None
        # The sandbox's own init (process 1) may be signalled, without effect, if both have the same user id.
        assert result.stdout in ("alive 3\n", "alive 2\n"), result
    finally:
        marker.kill()
        marker.wait()


def test_a_detached_grandchild_is_killed(each_way, tmp_path):
    result = dedent_run(
        """
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
        os.wait()
        print("done")
        """,
        timeout=20,
    )
    # The grandchild holds stdout open, so the run can only end before the timeout if the grandchild is dead.
    assert result.stdout == "done\n" and result.exit_code == 0 and not result.timed_out and result.seconds < 15


def test_a_child_that_keeps_changing_its_process_id_is_killed():
    """Without a separate process tree, on a machine with so many processes that a search takes long."""
    script = f"""
        import os, sys, time
        sys.path.insert(0, {str(Path(sandbox.__file__).parent)!r})
        from jail import launcher, layers
        layers.prctl(layers.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if os.fork() == 0:
            ends = time.monotonic() + 10
            while time.monotonic() < ends:
                time.sleep(0.02)
                if os.fork():
                    os._exit(0)
            os._exit(0)
        def slow_open(*arguments):
            time.sleep(0.008)
            return open(*arguments)
        launcher.open = slow_open
        started = time.monotonic()
        launcher._end_descendants()
        print(time.monotonic() - started)
    """
    ended = run_script(script)
    assert float(ended.stdout) < 5, ended  # the time after which it gives up


def test_the_sandbox_dies_with_its_host(tmp_path):
    script = f"""
        from trl_grpo_tasks.rewards.sandbox import run_python, sandbox_layers
        sandbox_layers()
        print("ready", flush=True)
        run_python("import time; time.sleep(1000) #unique-{os.getpid()}", timeout=1000)
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    host = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=with_package())
    assert host.stdout.readline() == "ready\n"
    launchers: list[int] = []
    deadline = time.monotonic() + 20
    while not launchers and time.monotonic() < deadline:
        launchers = [pid for pid in descendants(host.pid) if "main.py" in command_of(pid)]
        time.sleep(0.02)
    family = descendants(host.pid)
    assert launchers and len(family) >= 3
    host.send_signal(signal.SIGKILL)
    host.wait()
    host.stdout.close()
    deadline = time.monotonic() + 20
    while (left := [pid for pid in family if command_of(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []
