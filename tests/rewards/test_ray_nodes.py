"""Rewards on a Ray cluster of two nodes, one of which dies during a batch; no score is lost."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time

import pytest

from tests.support.sandboxed import children_of, descendants
from tests.support.wild import is_gone, values
from trl_grpo_tasks.rewards import ray_backend
from trl_grpo_tasks.rewards.executor import RewardExecutor, RewardWorkerError

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(120)]

LIMIT = 15.0  # seconds per completion


@pytest.fixture(scope="module")
def cluster():
    """A cluster whose head node has one CPU; tests add a second node."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'trl_grpo_tasks[ray]'")
    from ray.cluster_utils import Cluster

    before = children_of(os.getpid())
    cluster = Cluster()
    try:
        try:
            cluster.add_node(num_cpus=1, include_dashboard=False)
        except Exception as error:  # noqa: BLE001 - sockets, shared memory or ports may be missing on this machine
            pytest.skip(f"Ray cannot start on this machine: {type(error).__name__}: {error}")
        os.environ["RAY_ADDRESS"] = cluster.address
        yield cluster
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        started = [one for pid in children_of(os.getpid()) - before for one in (pid, *descendants(pid))]
        cluster.shutdown()
    assert all(is_gone(pid) for pid in started)


@pytest.fixture
def raylet(cluster):
    """The process id of the second node, which is the parent of all processes of this node."""
    node = cluster.add_node(num_cpus=2)
    pid = node.all_processes["raylet"][0].process.pid
    yield pid
    family = [pid, *descendants(pid)]
    send(family, signal.SIGCONT)
    cluster.remove_node(node, allow_graceful=False)
    send(family, signal.SIGKILL)
    assert all(is_gone(one) for one in family)


@pytest.fixture
def executor(wild, raylet):
    """An executor with one worker on the head and two on the second node, all of which have scored."""
    with RewardExecutor(wild, workers=3, timeout=LIMIT, backend="ray") as executor:
        pids: set[int] = set()
        while len(pids) < 3:
            pids |= pids_of_workers(executor)
        assert len(pids & set(descendants(raylet))) == 2
        yield executor


def pids_of_workers(executor: RewardExecutor) -> set[int]:
    """The process ids of some workers, at least of one."""
    time.sleep(0.1)
    outcomes = executor.submit(["{}"] * 3, [f"pid {time.monotonic()} {i}" for i in range(3)]).result()
    return {outcome.score.info["pid"] for outcome in outcomes}


def send(pids: list[int], which: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, which)


def test_a_node_that_is_killed_loses_no_score(executor, raylet, caplog):
    """Each row gets its own score, and the batch ends in time."""
    rows = [json.dumps({"x": i}) for i in range(18)]
    started = time.monotonic()
    pending = executor.submit(rows, ["sleep 0.3"] * len(rows))
    time.sleep(0.5)
    send([raylet, *descendants(raylet)], signal.SIGKILL)
    outcomes = pending.result()
    assert time.monotonic() - started < LIMIT
    assert values(outcomes) == [float(i) for i in range(18)]
    assert all(outcome.reason == "" and not outcome.cached for outcome in outcomes)
    assert executor.stats.failures == 0
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said and all("a completion is scored again, because on Ray node" in message for message in said)


def test_a_cluster_without_a_free_cpu_is_an_error(cluster, wild, monkeypatch):
    with RewardExecutor(wild, workers=1, backend="ray") as first:
        first.submit(["{}"], ["good"]).result()
        monkeypatch.setattr(ray_backend, "START_SECONDS", 1.0)
        with (
            RewardExecutor(wild, workers=1, backend="ray") as second,
            pytest.raises(RewardWorkerError, match="no reward worker has started on the Ray cluster for 1 s"),
        ):
            second.submit(["{}"], ["good"]).result()
