"""Constraint states in worker processes, for batches whose constraint one processor core cannot keep up with.

Each worker holds the states of some rows. A request and its reply are small: tokens there, forced tokens and mask
numbers back; the words of a mask are sent once. Workers are fresh interpreters, which end when their connection closes.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_128_digest

from .base import FREE, Constraint
from .shared import NOTHING, Forced, SharedStates

if TYPE_CHECKING:
    from .table import MaskTable

# Unlike multiprocessing, this needs no `__main__` guard in the user's script and works from a notebook.
_COMMAND = [
    sys.executable,
    "-P",
    "-c",
    "import sys; sys.path[:] = sys.argv[2].split(chr(10)); "
    "from trl_grpo_tasks.constraints.workers import serve; serve(int(sys.argv[1]))",
]
_MOST_WORKERS = 8
_FEWEST_ROWS = 256  # smaller batches need no workers
_log = logging.getLogger(__name__)
_WORKERS: weakref.WeakKeyDictionary[Any, StateWorkers] = weakref.WeakKeyDictionary()


def states_for(constraint: Constraint, table: MaskTable, rows: int) -> SharedStates | WorkerStates:
    """Return the states of a rollout of so many rows, held by workers if the batch is large and they are ready.

    The first large batch of a constraint starts the workers in the background and does not wait for them. They end with
    the constraint or with this process.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes of a distributed run on this machine
    count = min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // (2 * processes))
    if rows < _FEWEST_ROWS or count < 2:
        return SharedStates(constraint, table)
    workers = _WORKERS.get(constraint)
    if workers is None:
        workers = _WORKERS[constraint] = StateWorkers(constraint, count)
    return WorkerStates(workers, table) if workers.ready else SharedStates(constraint, table)


class StateWorkers:
    """Worker processes that hold copies of a constraint. They start in the background; `ready` reports when they can be
    used. A constraint that cannot be sent to another process is logged once, and the workers are never ready."""

    def __init__(self, constraint: Constraint, count: int):
        import dill

        self.connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starting = 0
        self._request = 0  # the number of the last request, which its reply repeats
        try:
            payload = dill.dumps(constraint, recurse=True)
        except Exception as error:  # noqa: BLE001 - pickling runs user code
            _log.info("constraint states stay in this process: %s: %s", type(error).__name__, error)
            return
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        for _ in range(count):
            ours, theirs = socket.socketpair()
            command = [*_COMMAND, str(theirs.fileno()), "\n".join(sys.path)]
            self._processes.append(
                subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, process_group=0
                )
            )
            theirs.close()
            self.connections.append(Connection(ours.detach()))
        weakref.finalize(self, _stop, os.getpid(), self.connections, self._processes)
        self._starting = count
        self.send(dict.fromkeys(range(count), payload))

    @property
    def ready(self) -> bool:
        """Whether all workers have loaded the constraint."""
        while self._starting and self.connections[self._starting - 1].poll():
            try:
                self.receive([self._starting - 1])
                self._starting -= 1
            except Exception as error:  # noqa: BLE001 - unpickling runs user code
                _log.info("constraint states stay in this process: %s: %s", type(error).__name__, error)
                _stop(os.getpid(), self.connections, self._processes)
                self._starting = 0
        return not self._starting and bool(self.connections)

    def send(self, requests: Mapping[int, Any]) -> None:
        """Send a request to each of these workers."""
        self._request += 1
        for worker, request in requests.items():
            try:
                self.connections[worker].send((self._request, request))
            except OSError as error:
                raise self._death(worker) from error

    def receive(self, workers: Iterable[int]) -> list[Any]:
        """Return the replies of these workers to the last request. Exceptions are raised after all have replied."""
        replies: list[Any] = []
        for worker in workers:
            number = 0
            while number != self._request:  # an interrupted call leaves replies behind
                try:
                    number, reply = self.connections[worker].recv()
                except (EOFError, OSError) as error:
                    raise self._death(worker) from error
            replies.append(reply)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def _death(self, worker: int) -> RuntimeError:
        code = self._processes[worker].wait()
        return RuntimeError(
            f"a constraint worker ended unexpectedly (exit code {code}), perhaps because memory ran out; "
            "use fewer workers, or none"
        )


class WorkerStates:
    """The states of the rows of a rollout, by slot, held by workers; see SharedStates for the methods.

    Only the latest WorkerStates may use the workers. After an exception it cannot be used any more, but the workers can.
    """

    def __init__(self, workers: StateWorkers, table: MaskTable):
        self._workers, self._table = workers, table
        count = len(workers.connections)
        self._worker_of: dict[int, int] = {}
        self._loads = [0] * count
        self._numbers: dict[int, int] = {}  # the next mask of each slot
        self._table_numbers: list[list[int]] = [[FREE] for _ in range(count)]  # by worker and its mask number
        workers.send(dict.fromkeys(range(count), ("reset", ())))
        workers.receive(range(count))

    def start(self, slots: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> list[Forced]:
        worker, previous = 0, None
        for slot, row in zip(slots, rows, strict=True):
            self.release(slot)
            if previous is None or row != previous:  # rows of the same prompt share states in one worker
                worker, previous = self._loads.index(min(self._loads)), row
            self._worker_of[slot] = worker
            self._loads[worker] += 1
        return self._call("start", slots, rows)

    def accept(self, slots: Sequence[int], tokens: Sequence[int]) -> list[Forced]:
        return self._call("accept", slots, tokens)

    def restart(self, slot: int, tokens: Sequence[int]) -> Forced:
        return self._call("restart", [slot], [list(tokens)])[0]

    def numbers(self, slots: Sequence[int]) -> list[int]:
        return [self._numbers.get(slot, FREE) for slot in slots]

    def release(self, slot: int) -> None:
        # The worker forgets the state when the slot is used again or the next rollout begins.
        worker = self._worker_of.pop(slot, None)
        if worker is not None:
            self._loads[worker] -= 1
            self._numbers.pop(slot, None)

    def _call(self, method: str, slots: Sequence[int], arguments: Sequence[Any]) -> list[Forced]:
        """Call a method of the states of many slots, each with one argument, and return the forced tokens by slot."""
        calls: dict[int, tuple[list[int], list[Any], list[int]]] = {}
        for place, (slot, argument) in enumerate(zip(slots, arguments, strict=True)):
            of_worker = calls.setdefault(self._worker_of[slot], ([], [], []))
            of_worker[0].append(slot)
            of_worker[1].append(argument)
            of_worker[2].append(place)
        self._workers.send({worker: (method, call[:2]) for worker, call in calls.items()})
        results = [NOTHING] * len(slots)
        single = self._table.number_of_single_token
        replies = self._workers.receive(calls)
        for (worker, (of_worker, _, places)), (forced, numbers, new) in zip(calls.items(), replies, strict=True):
            table_numbers = self._table_numbers[worker]
            table_numbers += [self._table.number_of(words) for words in new]
            for slot, place, tokens, number in zip(of_worker, places, forced, numbers, strict=True):
                self._numbers[slot] = table_numbers[number]
                if tokens:
                    results[place] = Forced(tokens, tuple([single(token) for token in tokens]))
        return results


class _LocalMasks:
    """The distinct masks of a worker, numbered from 1 in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.new: list[np.ndarray] = []  # masks that have not been sent yet

    def number_of(self, words: np.ndarray) -> int:
        key = xxh3_128_digest(words.data)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers) + 1
            self.new.append(words.copy())
        return number


def serve(file_descriptor: int) -> None:
    """Run a worker: load the constraint that arrives first, then answer requests until the connection is closed."""
    import gc

    import dill

    connection = Connection(file_descriptor)
    constraint: Any = None
    states: Any = None
    masks = _LocalMasks()
    while True:
        try:
            number, request = connection.recv()
        except (EOFError, OSError):
            return
        reply: Any = None
        try:
            if constraint is None:
                constraint = dill.loads(request)
                gc.disable()  # states are freed by reference counting
            elif request[0] == "reset":
                masks = _LocalMasks()
                states = SharedStates(constraint, masks)
                gc.collect()
            else:
                method, (slots, arguments) = request
                if method == "restart":
                    forced = [states.restart(slot, tokens) for slot, tokens in zip(slots, arguments, strict=True)]
                else:
                    forced = getattr(states, method)(slots, arguments)
                numbers = states.numbers(slots)
                reply, masks.new = ([each.tokens for each in forced], numbers, masks.new), []
        except Exception as error:  # noqa: BLE001 - raised again in the process that asked
            reply = error
        connection.send((number, reply))


def _stop(owner: int, connections: list[Connection], processes: list[subprocess.Popen[bytes]]) -> None:
    if os.getpid() != owner:  # a fork of the process that started the workers
        return
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()
        process.wait()
    connections.clear()
    processes.clear()
