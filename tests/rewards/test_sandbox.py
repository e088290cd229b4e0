"""Resource limits of the sandbox: time, memory, processes, output and files; and the results of programs."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.sandboxed import dedent_run, needs, run_script
from trl_grpo_tasks.rewards.sandbox import run_python

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux"),
    pytest.mark.usefixtures("nothing_is_left"),
]


def test_an_ordinary_program(each_way):
    result = run_python("import sys; print(input()); print('é', file=sys.stderr); sys.exit(3)", stdin="hello\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("hello\n", "é\n", 3)
    assert not result.timed_out and result.killed_reason == "" and 0 < result.seconds < 30


def test_a_program_that_ignores_all_signals_times_out(each_way):
    result = dedent_run(
        """
        import signal
        for number in range(1, 64):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        print("begun", flush=True)
        while True:
            pass
        """,
        timeout=0.5,
    )
    assert result.timed_out and result.exit_code is None and "timed out after 0.5 s" in result.killed_reason
    assert result.stdout == "begun\n" and result.seconds < 15


def test_fork_bomb():
    if os.geteuid() == 0:
        needs("uid")  # the limit on processes does not apply to root
    result = dedent_run(
        """
        import os, time
        made = 0
        try:
            for _ in range(100):
                if os.fork() == 0:
                    time.sleep(1000)
                    os._exit(0)
                made += 1
        except OSError as error:
            print(made, type(error).__name__)
        """,
        processes=5,
        timeout=20,
    )
    assert result.stdout == "4 BlockingIOError\n"


def test_two_sandboxes_do_not_count_each_others_processes():
    if os.geteuid() == 0:
        needs("uid")
    fill = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: time.sleep(3); os._exit(0)\nprint('full')\n"
    probe = f"""
        import threading
        from trl_grpo_tasks.rewards.sandbox import run_python, sandbox_layers
        sandbox_layers()
        results = []
        def run(): results.append(run_python({fill + "time.sleep(1)"!r}, processes=4, timeout=20))
        threads = [threading.Thread(target=run) for _ in range(2)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        print([r.stdout for r in results])
    """
    ended = run_script(probe)
    assert ended.stdout == "['full\\n', 'full\\n']\n", ended.stderr


def test_cpu_time_memory_and_the_size_of_files_are_limited_for_each_process():
    result = dedent_run(
        """
        import resource
        print(resource.getrlimit(resource.RLIMIT_CPU))
        try:
            with open("big", "wb") as file:
                for _ in range(40):
                    file.write(bytes(2**20))
        except OSError as error:
            print(error.strerror)
        block = bytearray(300 * 2**20)
        print("fine")
        """,
        memory_mb=200,
        timeout=3,
    )
    assert result.stdout == "(4, 4)\nFile too large\n"
    assert result.exit_code == 1 and "MemoryError" in result.stderr


def test_a_gigabyte_of_output():
    code = "import sys\nfor _ in range(1000): sys.stdout.write('x' * 1_000_000)\nopen('reached', 'w')"
    result = run_python(code, max_output=1000, timeout=60)
    assert result.stdout == "x" * 1000
    assert result.killed_reason == "wrote too much output" and result.exit_code is None
    assert result.seconds < 30


def test_memory_outside_the_limits_cannot_be_allocated():
    """Files in memory and shared segments count neither as memory of a process nor as files of the sandbox."""
    needs("seccomp")
    result = dedent_run(
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            os.memfd_create("more")
        except PermissionError:
            print("no files in memory")
        print(libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600))
        """
    )
    assert result.stdout == "no files in memory\n-1 -1 -1\n", result


def test_the_number_of_files_is_limited():
    needs("files")
    code = """
        try:
            for number in range(50_000):
                open(str(number), "w").close()
        except OSError as error:
            print(error.strerror)
        """
    assert dedent_run(code, timeout=30).stdout == "No space left on device\n"


def test_folders_without_permissions_and_nested_deeply_are_removed_too(each_way):
    code = "import os\nos.makedirs('a/b/c')\nos.chmod('a/b', 0)\n"
    code += "for _ in range(1200):\n    os.mkdir('folder')\n    os.chdir('folder')\nprint(1)"
    assert run_python(code).stdout == "1\n"


def test_malformed_code_gives_a_result_and_no_exception():
    for code in ("", "\0", "é = 'ü'; print(é)", "def", "\ud800"):
        assert isinstance(run_python(code).exit_code, int)
