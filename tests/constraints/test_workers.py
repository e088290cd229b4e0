"""States in worker processes: the same results as in this process, errors, and processes that end."""

import gc
import os
import signal
import time

import numpy as np
import pytest

from tests.constraints.test_shared import CONSTRAINTS, PATTERNS, TOKENIZER
from trl_grpo_tasks.constraints import ChoiceTreeConstraint
from trl_grpo_tasks.constraints import workers as workers_module
from trl_grpo_tasks.constraints.shared import SharedStates
from trl_grpo_tasks.constraints.table import FREE, MaskTable
from trl_grpo_tasks.constraints.workers import StateWorkers, WorkerStates, states_for

WIDE_MODEL = len(TOKENIZER) + 45


def started(constraint):
    workers = StateWorkers(constraint, 2)
    deadline = time.monotonic() + 100
    while not workers.ready:
        assert time.monotonic() < deadline and workers.connections
        time.sleep(0.05)
    return workers


def assert_ended(processes):
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_workers_agree_with_states_of_this_process_and_end_when_nobody_uses_them():
    constraint, rng = CONSTRAINTS["spelled tree"], np.random.default_rng(0)
    workers = started(constraint)
    rows = {slot: {"pattern": PATTERNS[slot // 2]} for slot in range(2 * len(PATTERNS))}
    for _ in range(2):  # the workers serve several rollouts
        table = MaskTable(WIDE_MODEL)
        states, expected = WorkerStates(workers, table), SharedStates(constraint, table)
        begun = [each.start(list(rows), list(rows.values())) for each in (states, expected)]
        assert begun[0] == begun[1]
        written = {slot: list(forced.tokens) for slot, forced in zip(rows, begun[0], strict=True)}
        for turn in range(12):
            numbers = states.numbers(list(rows))
            assert numbers == expected.numbers(list(rows))
            active = [slot for slot, number in zip(rows, numbers, strict=True) if number != FREE]
            tokens = [int(rng.choice(table.ids(numbers[slot]))) for slot in active]
            accepted = states.accept(active, tokens)
            assert accepted == expected.accept(active, tokens)
            for slot, token, forced in zip(active, tokens, accepted, strict=True):
                written[slot] += [token, *forced.tokens]
            if turn % 3 == 0 and active:
                slot = active[0]
                kept = written[slot][: len(written[slot]) // 2]
                forced = states.restart(slot, kept)
                assert forced == expected.restart(slot, kept)
                written[slot] = [*kept, *forced.tokens]
            if turn == 5:
                for each in (states, expected):
                    each.release(1)
                    assert each.numbers([1]) == [FREE]
                written[1] = list(states.start([1], [rows[1]])[0].tokens)
                assert written[1] == list(expected.start([1], [rows[1]])[0].tokens)
    one, minus = TOKENIZER.convert_tokens_to_ids(["1", "-"])
    states = WorkerStates(workers, MaskTable(WIDE_MODEL))
    states.start([0, 1], [rows[0], rows[2]])
    with pytest.raises(ValueError, match="not allowed"):
        states.accept([0, 1], [one, minus])
    workers.send({0: ("start", [0], [rows[0]])})  # interrupted calls, whose replies are never read
    states.accept_async([0, 1], [minus, minus])
    states.accept_async([0, 1], [minus, minus])
    states = WorkerStates(workers, MaskTable(WIDE_MODEL))  # the next rollout
    states.start([0, 1], [rows[0], rows[2]])
    assert len(states.accept([0, 1], [one, one])) == 2
    processes = [process.pid for process in workers._processes]
    del workers, states
    gc.collect()
    assert_ended(processes)


class WideState:
    """A state whose masks, all different, are longer than the buffer of a connection; no token is forced."""

    finished = False

    def __init__(self, text):
        self._seed = len(text)

    def mask(self):
        return np.random.default_rng(self._seed).integers(1, 2**31, WIDE // 32, dtype=np.int32)

    def accept(self, token):
        self._seed = self._seed * 31 + token

    def fork(self):
        other = WideState("")
        other._seed = self._seed
        return other


WIDE = 2**22  # tokens; 512 KiB per mask


class WideConstraint:
    vocab_size = WIDE

    def start(self, row):
        return WideState(row["text"])


@pytest.mark.exhaustive
def test_two_groups_of_slots_with_the_same_workers():
    """Several requests may be outstanding, in any order of waiting; long ones do not block."""
    constraint, table = WideConstraint(), MaskTable(WIDE)
    workers = started(constraint)
    states, expected = WorkerStates(workers, table), SharedStates(constraint, table)
    rows = [{"text": "x" * (10**6 + i)} for i in range(6)]
    groups, started_later = ([0, 1], [2, 3]), [4, 5]
    for group in groups:
        for each in (states, expected):
            each.start(group, [rows[slot] for slot in group])
    assert {*states._worker_of[[0, 1]]} == {*states._worker_of[[2, 3]]} == {0, 1}
    for turn in range(4):
        waits = [states.accept_async(group, [turn + slot for slot in group]) for group in groups]
        if turn == 1:
            states.start(started_later, rows[4:])
            expected.start(started_later, rows[4:])
        if turn == 2:
            states.restart(4, [1, 2, 3])
            expected.restart(4, [1, 2, 3])
        for group, wait in list(zip(groups, waits, strict=True))[:: 1 if turn % 2 else -1]:
            assert wait().forced == expected.accept(group, [turn + slot for slot in group])
            assert states.numbers(group) == expected.numbers(group)
    assert len(set(states.numbers(range(6)))) == 6 and states.numbers(range(6)) == expected.numbers(range(6))


def test_workers_serve_large_batches_once_they_are_ready_until_one_dies(monkeypatch):
    monkeypatch.setattr(workers_module.os, "sched_getaffinity", lambda pid: range(4))
    # A constraint of a notebook: its functions exist only in this process.
    constraint = ChoiceTreeConstraint(TOKENIZER, lambda row: 0, lambda node: [("1x", None), ("10", None)])
    table = MaskTable(WIDE_MODEL)
    assert isinstance(states_for(constraint, table, 10), SharedStates)
    deadline = time.monotonic() + 100
    while isinstance(states := states_for(constraint, table, 1000), SharedStates):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    states.start([7], [{}])
    assert set(TOKENIZER.convert_ids_to_tokens(table.ids(states.numbers([7])[0]).tolist())) == {"1", "10", "1x"}
    workers = states._workers
    processes = [process.pid for process in workers._processes]
    os.kill(processes[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="worker ended unexpectedly"):
        for _ in range(2):  # the first message may still be written
            states.start(range(3), [{}, {"a": 1}, {"b": 2}])
    assert not workers.ready and isinstance(states_for(constraint, table, 1000), SharedStates)
    assert_ended(processes)


def test_a_constraint_that_cannot_be_sent_stays_in_this_process():
    class Unsendable:
        def __reduce__(self):
            raise TypeError("this constraint cannot be pickled")

    workers = StateWorkers(Unsendable(), 2)
    assert not workers.ready and not workers.connections
