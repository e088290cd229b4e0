"""The reward executor: whatever one completion does, every other one gets its score, in order, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from trl_grpo_tasks.rewards.executor import RewardExecutor, RewardWorkerError
from trl_grpo_tasks.task import Score, Task, get_task

ROW = json.dumps({"prompt": "?"})

TASK_FILE = """
import os, signal, sys, time
from dataclasses import dataclass
from trl_grpo_tasks.task import Score, Task

@dataclass(frozen=True)
class Options:
    bonus: float = 0.0

class Wild(Task):
    name, version, description = "wild", "1", "does what the completion says"
    weights = {"value": 1.0}
    Options = Options

    def score(self, row, completion):
        verb, _, argument = completion.partition(" ")
        if verb == "hang":
            time.sleep(1000)
        if verb == "exit":
            os._exit(7)
        if verb == "sysexit":
            sys.exit("bye")
        if verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if verb == "eat":
            bytearray(int(argument) * 2**20)
        if verb == "raise":
            raise ValueError("no such wheel")
        if verb == "none":
            return None
        if verb == "print":
            print("x" * 100_000)
            sys.stdout.flush()
            os.write(1, b"rude bytes")
            assert sys.stdin.read() == ""
        if verb == "sleep":
            time.sleep(float(argument))
        if verb == "sandbox":
            from trl_grpo_tasks.rewards.sandbox import run_python
            run_python("import time; time.sleep(1000)", timeout=1000)
        if verb == "touch":
            open(argument, "a").write("scored\\n")
        if verb == "pid":
            return self.make_score({"value": 0.0}, True, True, info={"pid": os.getpid()})
        return self.make_score({"value": float(row.get("x", 0)) + self.options.bonus}, True, True)
"""


@pytest.fixture
def task_file(tmp_path: Path) -> str:
    path = tmp_path / "wild_task.py"
    path.write_text(TASK_FILE)
    return str(path)


@pytest.fixture
def wild(task_file: str) -> Task:
    return get_task(task_file)


def values(outcomes):
    return [None if outcome.score is None else outcome.score.total for outcome in outcomes]


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process has ended (a zombie of somebody else's counts as ended)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def zombie_children() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state == "Z" and int(parent) == os.getpid():
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_order_is_kept(wild, workers):
    rows = [json.dumps({"x": i}) for i in range(12)]
    slow_first = [f"sleep {0.2 if i == 0 else 0}" for i in range(12)]
    with RewardExecutor(wild, workers=workers) as executor:
        outcomes = executor.submit(rows, slow_first).result()
    assert values(outcomes) == [float(i) for i in range(12)]
    assert all(not outcome.cached and outcome.reason == "" for outcome in outcomes)
    assert outcomes[0].seconds >= 0.2


def test_a_worker_that_is_lost_costs_only_its_own_completion(wild):
    bad = ["hang", "exit", "die", "sysexit", "raise", "none"]
    completions = [text for i, one in enumerate(bad) for text in (f"good {i}", one)] + ["good last"]
    rows = [json.dumps({"x": i}) for i in range(len(completions))]
    with RewardExecutor(wild, workers=2, timeout=2.0) as executor:
        outcomes = executor.submit(rows, completions).result()
        again = executor.submit([ROW], ["good after"]).result()
    assert values(outcomes) == [None if text in bad else float(i) for i, text in enumerate(completions)]
    reasons = {text: outcome.reason for text, outcome in zip(completions, outcomes, strict=True)}
    assert "timed out after 2 s" in reasons["hang"]
    assert "status 7" in reasons["exit"]
    assert "SIGKILL" in reasons["die"]
    assert "SystemExit: bye" in reasons["sysexit"]
    assert "ValueError: no such wheel" in reasons["raise"] and "wild_task.py" in reasons["raise"]
    assert "None" in reasons["none"]
    assert executor.stats.failures == len(bad)
    assert values(again) == [0.0]
    assert zombie_children() == []


def test_memory_limit(wild):
    with RewardExecutor(wild, workers=1, memory_mb=200) as executor:
        outcomes = executor.submit([ROW] * 3, ["eat 100", "eat 1000", "eat 101"]).result()
    assert values(outcomes) == [0.0, None, 0.0]
    assert "MemoryError" in outcomes[1].reason and "memory limit" in outcomes[1].reason


def test_an_idle_worker_that_is_killed_is_replaced(wild):
    with RewardExecutor(wild, workers=1) as executor:
        (first,) = executor.submit([ROW], ["pid 1"]).result()
        os.kill(first.score.info["pid"], signal.SIGKILL)
        (second,) = executor.submit([ROW], ["pid 2"]).result()
    # The signal can arrive just after the job was sent; then the job is lost with its worker, and says so.
    assert second.score is None or second.score.info["pid"] != first.score.info["pid"]


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")
def test_a_sandbox_ends_with_the_worker_that_runs_it(wild):
    def below(pid: int) -> list[int]:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        direct = [int(child) for child in children.read_text().split()] if children.exists() else []
        return direct + [one for child in direct for one in below(child)]

    with RewardExecutor(wild, workers=1, timeout=5.0) as executor:
        (first,) = executor.submit([ROW], ["pid"]).result()
        pending = executor.submit([ROW], ["sandbox"])
        family: list[int] = []
        while len(family) < 3 and Path(f"/proc/{first.score.info['pid']}").exists():
            family = below(first.score.info["pid"])  # launcher, init, program
            time.sleep(0.05)
        assert len(family) == 3
        assert "timed out" in pending.result()[0].reason
    assert all(is_gone(pid) for pid in family)


def test_in_this_process_an_exception_is_a_reason(wild):
    outcomes = RewardExecutor(wild).submit([ROW] * 3, ["raise", "sysexit", "good"]).result()
    assert values(outcomes) == [None, None, 0.0]
    assert "ValueError: no such wheel" in outcomes[0].reason


def test_options_reach_the_workers(task_file):
    with RewardExecutor(get_task(task_file, {"bonus": 2.5}), workers=1) as executor:
        assert values(executor.submit([ROW], [""]).result()) == [2.5]


def test_a_relative_task_path_works_after_chdir(task_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = get_task("wild_task.py")
    with RewardExecutor(task, workers=1) as executor:
        monkeypatch.chdir("/")
        assert values(executor.submit([ROW], ["good"]).result()) == [0.0]


def test_a_task_made_by_hand_is_sent_whole():
    offset = 41

    class Handmade(Task):
        name, version, description = "handmade", "1", "closes over a local"
        weights = {"value": 1.0}

        def score(self, row, completion):
            return self.make_score({"value": offset + len(completion)}, True, True)

    with RewardExecutor(Handmade(), workers=1) as executor:
        assert values(executor.submit([ROW], ["a"]).result()) == [42.0]


def test_a_task_that_cannot_be_sent_says_what_to_do():
    class Locked(Task):
        name, version, description = "locked", "1", "holds a lock"
        weights = {"value": 1.0}

        def __init__(self):
            super().__init__()
            self.generator = (i for i in range(3))

    with pytest.raises(TypeError, match=r"'locked' cannot be sent.*workers=0"):
        RewardExecutor(Locked(), workers=1)


def test_a_task_that_cannot_be_loaded_is_an_error_not_none(task_file):
    task = get_task(task_file)
    Path(task_file).write_text("import a_module_that_is_not_there\n")
    with (
        RewardExecutor(task, workers=2) as executor,
        pytest.raises(RewardWorkerError, match="a_module_that_is_not_there"),
    ):
        executor.submit([ROW], ["good"]).result()


def test_a_task_that_kills_its_worker_while_loading_is_an_error(task_file):
    task = get_task(task_file)
    Path(task_file).write_text("import os; os._exit(3)\n")
    with RewardExecutor(task, workers=1) as executor, pytest.raises(RewardWorkerError, match="status 3"):
        executor.submit([ROW], ["good"]).result()


def test_prints_do_not_disturb_the_protocol(wild, capfd):
    with RewardExecutor(wild, workers=1) as executor:
        outcomes = executor.submit([ROW] * 2, ["print", "good"]).result()
    assert values(outcomes) == [0.0, 0.0]
    out, err = capfd.readouterr()
    assert out == "" and "rude bytes" in err


def test_large_rows_and_odd_text(wild):
    row = json.dumps({"x": 3, "padding": "é" * 300_000})
    with RewardExecutor(wild, workers=2) as executor:
        outcomes = executor.submit([row] * 3, ["\ud800 lone surrogate", "\0", "y" * 200_000]).result()
    assert values(outcomes) == [3.0] * 3


def test_submit_returns_before_scoring_ends_and_work_goes_on_without_the_caller(wild, tmp_path):
    mark = tmp_path / "mark"
    with RewardExecutor(wild, workers=1) as executor:
        executor.submit([ROW], ["good"]).result()  # the worker is up
        started = time.monotonic()
        pending = executor.submit([ROW] * 2, ["sleep 0.5", f"touch {mark}"])
        assert time.monotonic() - started < 0.4
        deadline = time.monotonic() + 20
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert mark.exists()  # nobody has asked for the result yet
        assert values(pending.result()) == [0.0, 0.0]
        assert values(pending.result()) == [0.0, 0.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_equal_pairs_are_scored_once_and_remembered(wild, tmp_path, workers):
    mark = tmp_path / "mark"
    same = f"touch {mark}"
    with RewardExecutor(wild, workers=workers) as executor:
        first = executor.submit([ROW] * 3, [same, same, "good"])
        second = executor.submit([ROW], [same])
        assert [outcome.cached for outcome in second.result()] == [True]
        assert [outcome.cached for outcome in first.result()] == [False, True, False]
        assert values(first.result()) == [0.0] * 3
        third = executor.submit([ROW, json.dumps({"x": 1})], [same, same]).result()
        assert [outcome.cached for outcome in third] == [True, False]
        assert mark.read_text() == "scored\n" * 2
        assert (executor.stats.hits, executor.stats.misses, executor.stats.failures) == (3, 3, 0)
        assert executor.stats.hit_rate == 0.5
        assert executor.stats.seconds > 0


def test_failures_are_not_remembered_and_the_cache_is_bounded(wild):
    executor = RewardExecutor(wild, cache_size=2)
    for _ in range(2):
        assert not executor.submit([ROW], ["raise"]).result()[0].cached
    executor.submit([ROW] * 3, ["a", "b", "c"]).result()
    assert executor.submit([ROW], ["b"]).result()[0].cached  # and is now the newest
    executor.submit([ROW], ["d"]).result()
    cached = [executor.submit([ROW], [text]).result()[0].cached for text in ("b", "c")]
    assert cached == [True, False]


def test_statistics_survive_a_checkpoint(wild):
    executor = RewardExecutor(wild)
    executor.submit([ROW] * 2, ["a", "a"]).result()
    state = json.loads(json.dumps(executor.state_dict()))
    assert state["hits"] == state["misses"] == 1
    resumed = RewardExecutor(wild)
    resumed.load_state_dict(state)
    resumed.submit([ROW], ["b"]).result()
    assert (resumed.stats.hits, resumed.stats.misses) == (1, 2)
    assert resumed.stats.seconds > state["seconds"]


@dataclass(frozen=True)
class NotAScore:
    total: float = 1.0


@pytest.mark.parametrize(
    ("score", "problem"),
    [
        (NotAScore(), "must be a Score or None, got NotAScore"),
        (0.5, "must be a Score or None, got float"),
        (Score({"value": float("nan")}, float("nan"), True, True), "component 'value' is nan"),
        (Score({"value": float("inf")}, float("inf"), True, True), "component 'value' is inf"),
        (Score({"value": "1"}, 1.0, True, True), "component 'value' must be a number, got str"),
        (Score({"beauty": 1.0}, 1.0, True, True), "unknown component 'beauty'"),
        (Score({"value": 1.0}, 1.0, True, True), "total is 1.0 but the weighted sum of the components is 2.0"),
        (Score({"value": 1.0}, None, True, True), "total must be a finite number"),
        (Score({"value": 1.0}, 2.0, "yes", True), "valid must be a bool, got str"),
    ],
)
def test_a_wrong_score_is_none_with_what_is_wrong(score, problem):
    class Wrong(Task):
        name, version, description = "wrong", "1", "returns what it is told"
        weights = {"value": 2.0}

        def score(self, row, completion):
            return score

    (outcome,) = RewardExecutor(Wrong()).submit([ROW], [""]).result()
    assert outcome.score is None and problem in outcome.reason


def test_numpy_numbers_become_plain_ones():
    import numpy as np

    class Numeric(Task):
        name, version, description = "numeric", "1", "scores with NumPy"
        weights = {"value": 2.0}

        def score(self, row, completion):
            return self.make_score({"value": np.float32(0.1)}, np.bool_(True), np.float64(1) > 2)

    (outcome,) = RewardExecutor(Numeric()).submit([ROW], [""]).result()
    assert type(outcome.score.components["value"]) is float and type(outcome.score.total) is float
    assert outcome.score.valid is True and outcome.score.success is False


@pytest.mark.parametrize(
    "arguments", [{"backend": "rai"}, {"workers": -1}, {"timeout": 0}, {"backend": "ray"}, {"memory_mb": 0}]
)
def test_settings_are_checked(wild, arguments):
    with pytest.raises(ValueError, match=str(next(iter(arguments.values())))):
        RewardExecutor(wild, **arguments)


def test_close_is_idempotent_and_leaves_nothing(wild):
    executor = RewardExecutor(wild, workers=2)
    outcomes = executor.submit([ROW] * 4, [f"pid {i}" for i in range(4)]).result()
    open_ended = executor.submit([ROW], ["hang"])
    started = time.monotonic()
    executor.close()
    executor.close()
    assert time.monotonic() - started < 20
    assert all(is_gone(outcome.score.info["pid"]) for outcome in outcomes)
    assert zombie_children() == []
    assert not [thread for thread in threading.enumerate() if thread.name == "reward-pool"]
    with pytest.raises(RewardWorkerError, match="closed"):
        open_ended.result()
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit([ROW], ["good"])


def test_a_dropped_executor_cleans_up_after_itself(wild):
    executor = RewardExecutor(wild, workers=1)
    (outcome,) = executor.submit([ROW], ["pid"]).result()
    del executor
    assert is_gone(outcome.score.info["pid"])


def with_package() -> dict[str, str]:
    """The environment, with this package on the import path of scripts that are not started from here."""
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def run_script(tmp_path: Path, task_file: str, ending: str) -> tuple[subprocess.Popen, list[int]]:
    """A training script without a `__main__` guard, in a process group of its own; it prints its workers' pids."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import json, os, signal, sys, time
            from trl_grpo_tasks.rewards.executor import RewardExecutor
            from trl_grpo_tasks.task import get_task
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
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=with_package(),
        # What is started in the background ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    pids = json.loads(process.stdout.readline() or process.stderr.read())
    assert len(pids) == 2
    return process, pids


@pytest.mark.parametrize("killer", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_a_killed_parent(tmp_path, task_file, killer):
    process, pids = run_script(tmp_path, task_file, "time.sleep(1000)")
    process.send_signal(killer)
    process.communicate(timeout=30)
    assert all(is_gone(pid) for pid in pids)


def test_ctrl_c_ends_everything_quietly(tmp_path, task_file):
    process, pids = run_script(tmp_path, task_file, "pending.result()")
    time.sleep(0.3)
    for pid in pids:
        os.kill(pid, signal.SIGINT)  # a terminal does not reach the workers; if something does, they take no notice
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert all(is_gone(pid) for pid in pids)
    assert err.count("Traceback") == 1 and err.rstrip().endswith("KeyboardInterrupt")


def test_the_end_of_a_script_ends_its_workers(tmp_path, task_file):
    process, pids = run_script(tmp_path, task_file, "")
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert all(is_gone(pid) for pid in pids)


def test_a_task_defined_in_the_script_itself(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        textwrap.dedent("""
            from trl_grpo_tasks.rewards.executor import RewardExecutor
            from trl_grpo_tasks.task import Task
            FACTOR = 3
            class Mine(Task):
                name, version, description, weights = "mine", "1", "in __main__", {"value": 1.0}
                def score(self, row, completion):
                    return self.make_score({"value": FACTOR * len(completion)}, True, True)
            with RewardExecutor(Mine(), workers=1) as executor:
                print(executor.submit(["{}"], ["ab"]).result()[0].score.total)
        """)
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=with_package()
    )
    assert ended.stdout == "6.0\n", ended.stderr


def test_workers_do_not_load_torch(tmp_path):
    probe = "import sys, trl_grpo_tasks.rewards.executor, trl_grpo_tasks.rewards.worker; print('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert ended.stdout == "False\n", ended.stderr


@pytest.mark.slow
def test_the_same_on_a_local_ray_cluster(wild):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'trl_grpo_tasks[ray]'")
    bad = {"hang": "timed out", "exit": "died", "eat 5000": "MemoryError", "raise": "ValueError: no such wheel"}
    completions = [text for i, one in enumerate(bad) for text in (f"good {i}", one)] + ["good last"]
    rows = [json.dumps({"x": i}) for i in range(len(completions))]
    with RewardExecutor(wild, workers=2, timeout=5.0, memory_mb=2000, backend="ray") as executor:
        outcomes = executor.submit(rows, completions).result()
        again = executor.submit(rows[:1], completions[:1]).result()
    assert values(outcomes) == [None if text in bad else float(i) for i, text in enumerate(completions)]
    for text, outcome in zip(completions, outcomes, strict=True):
        assert bad.get(text, "") in outcome.reason
    assert again[0].cached
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_task_that_cannot_be_loaded_on_ray_is_an_error(task_file):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'trl_grpo_tasks[ray]'")
    task = get_task(task_file)
    Path(task_file).write_text("import a_module_that_is_not_there\n")
    with (
        RewardExecutor(task, workers=1, backend="ray") as executor,
        pytest.raises(RewardWorkerError, match="a_module_that_is_not_there"),
    ):
        executor.submit([ROW], ["good"]).result()


def test_without_ray_the_message_says_what_to_install(wild, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"trl_grpo_tasks\[ray\]"):
        RewardExecutor(wild, workers=1, backend="ray")
