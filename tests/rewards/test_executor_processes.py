"""The life cycle of worker processes: nothing outlives its parent; and the same guarantees on Ray."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

from tests.support.sandboxed import run_script, with_package
from tests.support.wild import ROW, is_gone, values, zombie_children
from trl_grpo_tasks.rewards import pool, worker
from trl_grpo_tasks.rewards.executor import RewardExecutor, RewardWorkerError


@pytest.mark.skipif(sys.platform != "linux", reason="detached children are found in /proc")
def test_nothing_outlives_close(wild, tmp_path):
    """Nor children of workers: of one that has exited; with a session of its own, also with an empty environment; and
    one that has lost its parent."""
    ways = {"leave": "leave", "daemon": "daemon", "bare": "daemon", "orphan": "orphan"}
    texts = [f"{verb} {tmp_path / name} {name}" for name, verb in ways.items()]
    executor = RewardExecutor(wild, workers=1)
    executor.submit([ROW], texts[:1]).result()
    (worker,) = executor.submit([ROW] * 4, [*texts[1:], "pid"]).result()[3:]
    pids = [int((tmp_path / name).read_text()) for name in ways]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids[1:])
    open_ended = executor.submit([ROW], ["hang"])
    started = time.monotonic()
    executor.close()
    executor.close()
    assert time.monotonic() - started < 20
    assert all(is_gone(pid) for pid in [*pids, worker.score.info["pid"]]) and zombie_children() == []
    assert not [thread for thread in executor._pool._threads if thread.is_alive()]
    with pytest.raises(RewardWorkerError, match="closed"):
        open_ended.result()
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit([ROW], ["good"])


def test_a_worker_that_stops_in_the_middle_of_a_reply_is_replaced(wild, monkeypatch):
    monkeypatch.setattr(pool, "STALL_SECONDS", 1)
    with RewardExecutor(wild, workers=1) as executor:
        stalled, good = executor.submit([ROW] * 2, ["stall", "good"]).result()
    assert stalled.score is None and stalled.reason == "the worker stopped in the middle of a reply for 1 s"
    assert good.score is not None


def test_replies_to_other_jobs_are_ignored(wild, monkeypatch):
    """Each reply arrives twice, and each is preceded by a reply to an earlier job."""

    class Echoing:
        def __init__(self, connection):
            self._connection, self._left = connection, []

        def __getattr__(self, name):
            return getattr(self._connection, name)

        def poll(self, seconds):
            return bool(self._left) or self._connection.poll(seconds)

        def recv_bytes(self):
            if not self._left:
                message = self._connection.recv_bytes()
                stale = pickle.dumps((pickle.loads(message)[0] - 1, worker.Reply(None, "stale", 0.0)))
                self._left = [stale, message, message]
            return self._left.pop(0)

    def echoing_pipe():
        ours, theirs = Pipe()
        return Echoing(ours), theirs

    monkeypatch.setattr(pool, "Pipe", echoing_pipe)
    with RewardExecutor(wild, workers=2) as executor:
        outcomes = executor.submit([json.dumps({"x": i}) for i in range(20)], ["good"] * 20).result()
    assert values(outcomes) == [float(i) for i in range(20)]


def test_a_dropped_executor_cleans_up_after_itself(wild):
    executor = RewardExecutor(wild, workers=1)
    (outcome,) = executor.submit([ROW], ["pid"]).result()
    del executor
    assert is_gone(outcome.score.info["pid"])


def start_script(tmp_path: Path, task_file: str, ending: str) -> tuple[subprocess.Popen, list[int]]:
    """Start a script without a `__main__` guard in its own process group; return it and the pids of its workers."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import json, os, signal, sys, time
            from trl_grpo_tasks.rewards.executor import RewardExecutor
            from trl_grpo_tasks.registry import get_task
            executor = RewardExecutor(get_task({task_file!r}), workers=2, timeout=1000)
            pids = set()
            while len(pids) < 2:
                texts = [f"pid {{time.monotonic()}} {{i}}" for i in range(4)]
                pids |= {{o.score.info["pid"] for o in executor.submit(["{{}}"] * 4, texts).result()}}
            pending = executor.submit(["{{}}"] * 2, ["hang 1", "hang 2"])
            print(json.dumps(sorted(pids)), flush=True)
            {ending}
        """)
    )
    # Background processes ignore SIGINT, and their children would inherit that.
    options = {"start_new_session": True, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, str(script)], env=with_package(), **pipes, **options)
    pids = json.loads(process.stdout.readline() or process.stderr.read())
    assert len(pids) == 2
    return process, pids


def test_workers_die_with_a_killed_parent(tmp_path, task_file):
    process, pids = start_script(tmp_path, task_file, "time.sleep(1000)")
    process.kill()
    process.communicate(timeout=30)
    assert all(is_gone(pid) for pid in pids)


def test_ctrl_c_ends_everything_quietly(tmp_path, task_file):
    process, pids = start_script(tmp_path, task_file, "pending.result()")
    time.sleep(0.3)
    for pid in pids:
        os.kill(pid, signal.SIGINT)  # a terminal's Ctrl-C does not reach the workers; they ignore SIGINT anyway
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert all(is_gone(pid) for pid in pids)
    assert err.count("Traceback") == 1 and err.rstrip().endswith("KeyboardInterrupt")


def test_a_task_defined_in_a_script_and_the_end_of_the_script():
    ended = run_script("""
        import os
        from trl_grpo_tasks.rewards.executor import RewardExecutor
        from trl_grpo_tasks.task import Task
        FACTOR = 3
        class Mine(Task):
            name, version, description, weights = "mine", "1", "in __main__", {"value": 1.0}
            def score(self, row, completion):
                return self.make_score({"value": FACTOR * len(completion)}, True, True, info={"pid": os.getpid()})
        executor = RewardExecutor(Mine(), workers=1)
        score = executor.submit(["{}"], ["ab"]).result()[0].score
        print(score.total, score.info["pid"])
    """)
    total, pid = ended.stdout.split()
    assert (total, ended.returncode, ended.stderr) == ("6.0", 0, "") and is_gone(int(pid))


@pytest.mark.exhaustive
def test_the_same_on_a_local_ray_cluster(wild, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'trl_grpo_tasks[ray]'")
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not the cluster that another process tests at the same time
    bad = {"hang": "timed out", "exit": "died", "eat 5000": "MemoryError", "raise": "ValueError: no such wheel"}
    completions = [text for i, one in enumerate(bad) for text in (f"good {i}", one)] + ["good last"]
    rows = [json.dumps({"x": i}) for i in range(len(completions))]
    with RewardExecutor(wild, workers=2, timeout=2.0, memory_mb=2000, backend="ray") as executor:
        outcomes = executor.submit(rows, completions).result()
        again = executor.submit(rows[:1], completions[:1]).result()
    assert values(outcomes) == [None if text in bad else float(i) for i, text in enumerate(completions)]
    for text, outcome in zip(completions, outcomes, strict=True):
        assert bad.get(text, "") in outcome.reason
    assert again[0].cached
    assert not ray.is_initialized()


def test_without_ray_the_message_says_what_to_install(wild, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"trl_grpo_tasks\[ray\]"):
        RewardExecutor(wild, workers=1, backend="ray")
