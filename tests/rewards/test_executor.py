"""The reward executor: a completion that misbehaves affects no other score, order is kept, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.wild import ROW, TASK_FILE, is_gone, values, zombie_children
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.rewards.executor import RewardExecutor, RewardWorkerError
from trl_grpo_tasks.task import Score, Task


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """An executor with two workers, which tests may kill."""
    path = tmp_path_factory.mktemp("wild") / "wild_task.py"
    path.write_text(TASK_FILE)
    with RewardExecutor(get_task(str(path)), workers=2, memory_mb=200) as executor:
        yield executor


def workers_of(executor):
    """The process ids of both workers."""
    pids = set()
    while len(pids) < 2:
        texts = [f"pid {time.monotonic()} {i}" for i in range(4)]
        pids |= {outcome.score.info["pid"] for outcome in executor.submit([ROW] * 4, texts).result()}
    return pids


@pytest.mark.parametrize("workers", [0, 2])
def test_order_is_kept_whatever_rows_and_completions_say(wild, workers, capfd):
    texts = ["sleep 0.2", "\ud800 lone surrogate", "\0", "y" * 200_000, *(["print"] if workers else [])]
    rows = [json.dumps({"x": i, "padding": "é" * 300_000}) for i in range(len(texts))]
    with RewardExecutor(wild, workers=workers) as executor:
        outcomes = executor.submit(rows, texts).result()
    assert values(outcomes) == [float(i) for i in range(len(texts))]
    assert all(not outcome.cached and outcome.reason == "" for outcome in outcomes)
    assert outcomes[0].seconds >= 0.2
    out, err = capfd.readouterr()
    assert out == "" and ("rude bytes" in err) == (workers > 0)


def test_a_completion_that_kills_its_worker_affects_no_other_completion(wild):
    bad = ["hang", "exit", "die", "sysexit", "raise", "none"]
    completions = [text for i, one in enumerate(bad) for text in (f"good {i}", one)] + ["good last"]
    rows = [json.dumps({"x": i}) for i in range(len(completions))]
    with RewardExecutor(wild, workers=2, timeout=1.5) as executor:
        outcomes = executor.submit(rows, completions).result()
        again = executor.submit([ROW], ["good after"]).result()
    assert values(outcomes) == [None if text in bad else float(i) for i, text in enumerate(completions)]
    reasons = {text: outcome.reason for text, outcome in zip(completions, outcomes, strict=True)}
    assert "timed out after 1.5 s" in reasons["hang"]
    assert "status 7" in reasons["exit"]
    assert "SIGKILL" in reasons["die"]
    assert "SystemExit: bye" in reasons["sysexit"]
    assert "ValueError: no such wheel" in reasons["raise"] and "wild_task.py" in reasons["raise"]
    assert "None" in reasons["none"]
    assert executor.stats.failures == len(bad)
    assert values(again) == [0.0]
    assert zombie_children() == []


def test_memory_limit(pair):
    outcomes = pair.submit([ROW] * 3, ["eat 100", "eat 1000", "eat 101"]).result()
    assert values(outcomes) == [0.0, None, 0.0]
    assert "MemoryError" in outcomes[1].reason and "memory limit" in outcomes[1].reason


def test_jobs_that_no_worker_began_survive_the_death_of_all_idle_workers(pair):
    before = workers_of(pair)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
        assert is_gone(pid)
    assert values(pair.submit([ROW] * 3, [f"good {i}" for i in range(3)]).result()) == [0.0] * 3
    assert not before & workers_of(pair)


def test_sigterm_ends_the_children_of_a_worker_but_not_the_worker(pair):
    """Slurm sends SIGTERM to all processes of a job; the current step is still scored."""
    before = workers_of(pair)
    pending = pair.submit([ROW] * 2, ["sleep 0.5", "sleep 0.50"])
    for pid in before:
        os.kill(pid, signal.SIGTERM)
    assert values(pending.result()) == [0.0, 0.0] and workers_of(pair) == before
    (forked,) = pair.submit([ROW], ["child"]).result()
    assert forked.score.info["status"] == signal.SIGTERM


def test_submit_returns_at_once_and_scoring_continues_in_the_background(pair, tmp_path):
    mark = tmp_path / "mark"
    pending = pair.submit([ROW] * 2, ["sleep 0.5", f"touch {mark}"])
    deadline = time.monotonic() + 20
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert mark.exists()  # although the result was not requested yet
    assert values(pending.result()) == values(pending.result()) == [0.0, 0.0]


def test_a_score_that_forks_shifts_no_other_score(wild, pair):
    rows = [json.dumps({"x": i}) for i in range(24)]
    completions = [f"fork {i}" if i % 3 == 0 else f"good {i}" for i in range(24)]
    assert values(pair.submit(rows, completions).result()) == [float(i) for i in range(24)]
    outcomes = RewardExecutor(wild).submit(rows[:3], completions[:3]).result()
    assert values(outcomes) == [0.0, 1.0, 2.0], "in this process: its copy ends as well"
    assert os.waitpid(outcomes[0].score.info["child"], 0)[1] == 0


def test_in_this_process_an_exception_is_a_reason(wild):
    outcomes = RewardExecutor(wild).submit([ROW] * 3, ["raise", "sysexit", "good"]).result()
    assert values(outcomes) == [None, None, 0.0]
    assert "ValueError: no such wheel" in outcomes[0].reason


def test_options_and_a_relative_path_reach_the_workers(task_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = get_task("wild_task.py", {"bonus": 2.5})
    with RewardExecutor(task, workers=1) as executor:
        monkeypatch.chdir("/")
        assert values(executor.submit([ROW], ["good"]).result()) == [2.5]


class Handmade(Task):
    """Scores with a function of the task and the completion."""

    name, version, description = "handmade", "1", "has a function"
    weights = {"value": 2.0}

    def __init__(self, function):
        super().__init__()
        self.function = function

    def score(self, row, completion):
        return self.function(self, completion)


def test_a_task_without_a_spec_is_pickled_and_sent_to_the_workers():
    offset = 20  # a local, over which the function closes
    task = Handmade(lambda task, text: task.make_score({"value": offset + len(text)}, True, True))
    with RewardExecutor(task, workers=1) as executor:
        assert values(executor.submit([ROW], ["a"]).result()) == [42.0]


def test_a_task_that_cannot_be_sent_says_what_to_do():
    with pytest.raises(TypeError, match=r"'handmade' cannot be sent.*workers=0"):
        RewardExecutor(Handmade(i for i in range(3)), workers=1)


@pytest.mark.parametrize(
    ("broken", "said"), [("import no_such_module", "no_such_module"), ("import os; os._exit(3)", "status 3")]
)
def test_a_task_that_cannot_be_loaded_in_a_worker_is_an_error(task_file, broken, said):
    task = get_task(task_file)
    Path(task_file).write_text(broken)
    with RewardExecutor(task, workers=2) as executor, pytest.raises(RewardWorkerError, match=said):
        executor.submit([ROW], ["good"]).result()


@pytest.mark.parametrize("workers", [0, 1])
def test_equal_pairs_are_scored_once_and_cached(wild, tmp_path, workers):
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


def test_failures_are_not_cached_and_the_cache_is_bounded(wild):
    executor = RewardExecutor(wild, cache_size=2)
    for _ in range(2):
        assert not executor.submit([ROW], ["raise"]).result()[0].cached
    executor.submit([ROW] * 3, ["a", "b", "c"]).result()
    assert executor.submit([ROW], ["b"]).result()[0].cached  # and is now the most recent entry
    executor.submit([ROW], ["d"]).result()
    cached = [executor.submit([ROW], [text]).result()[0].cached for text in ("b", "d", "c")]
    assert cached == [True, True, False]


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
        (Score({"value": 1e300}, 2e300, True, True), "component 'value' is 1e+300, but it must lie within -1e9 and"),
        (Score({"value": "1"}, 1.0, True, True), "component 'value' must be a number, got str"),
        (Score({"beauty": 1.0}, 1.0, True, True), "unknown component 'beauty'"),
        (Score({"value": 1.0}, 1.0, True, True), "total is 1.0 but the weighted sum of the components is 2.0"),
        (Score({"value": 1.0}, None, True, True), "total must be a finite number"),
        (Score({"value": 1.0}, 2.0, "yes", True), "valid must be a bool, got str"),
    ],
)
def test_an_invalid_score_becomes_none_with_a_reason(score, problem):
    (outcome,) = RewardExecutor(Handmade(lambda *_: score)).submit([ROW], [""]).result()
    assert outcome.score is None and problem in outcome.reason and f"(row {ROW})" in outcome.reason


def test_numpy_numbers_become_plain_ones():
    import numpy as np

    task = Handmade(lambda task, _: task.make_score({"value": np.float32(0.1)}, np.bool_(True), np.float64(1) > 2))
    (outcome,) = RewardExecutor(task).submit([ROW], [""]).result()
    assert type(outcome.score.components["value"]) is float and type(outcome.score.total) is float
    assert outcome.score.valid is True and outcome.score.success is False


@pytest.mark.parametrize(
    "arguments", [{"backend": "rai"}, {"workers": -1}, {"timeout": 0}, {"backend": "ray"}, {"memory_mb": 0}]
)
def test_settings_are_checked(wild, arguments):
    with pytest.raises(ValueError, match=str(next(iter(arguments.values())))):
        RewardExecutor(wild, **arguments)
