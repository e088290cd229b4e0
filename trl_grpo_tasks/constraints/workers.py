"""Constraint states in worker processes, for batches whose constraint one processor core cannot keep up with.

Each worker holds the states of some rows. Requests carry tokens; replies carry forced tokens and mask numbers. The
words of a mask are sent once. Workers are fresh interpreters, which end when their connection closes.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from .base import FREE, Asked, Constraint
from .shared import NOTHING, AcceptingStates, Advanced, Forced, SharedStates

if TYPE_CHECKING:
    from .table import MaskTable

_SERVE = "from trl_grpo_tasks.constraints.workers import serve; serve(int(sys.argv[1]))"
_MOST_WORKERS = 12
_FEWEST_ROWS = 256  # smaller batches need no workers
_SLOTS = 1 << 16  # slots that may be asked for before they are used
_log = logging.getLogger(__name__)
_WORKERS: weakref.WeakKeyDictionary[Any, StateWorkers] = weakref.WeakKeyDictionary()


def usable_cores() -> int:
    """Return the number of cores, on Linux without those that the process may not run on (taskset, containers)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fresh_python(code: str, *arguments: str) -> list[str]:
    """Return the command of a new interpreter with this import path that runs `code`; sys.argv[1:] are `arguments`.

    Unlike multiprocessing, it needs no `__main__` guard in the user's script, and works from a notebook.
    """
    start = "import sys; sys.path[:] = sys.argv.pop(1).split(chr(10)); "
    return [sys.executable, "-P", "-c", start + code, "\n".join(sys.path), *arguments]


def states_for(constraint: Constraint, table: MaskTable, rows: int) -> SharedStates | WorkerStates:
    """Return the states of a rollout of so many rows, held by workers if the batch is large and they are ready.

    The first large batch of a constraint starts the workers in the background and does not wait for them. They end
    with the constraint or with this process.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes of a distributed run on this machine
    count = min(_MOST_WORKERS, usable_cores() * 3 // (4 * processes))
    if rows < _FEWEST_ROWS or count < 2:
        return SharedStates(constraint, table)
    workers = _WORKERS.get(constraint)
    if workers is None:
        workers = _WORKERS[constraint] = StateWorkers(constraint, count)
    if not workers.ready:
        return SharedStates(constraint, table)
    return WorkerStates(workers, table, getattr(constraint, "ask", None))


class StateWorkers:
    """Worker processes that hold copies of a constraint. They start in the background.

    If the constraint cannot be sent to another process, the reason is logged, and the workers are never ready.
    """

    def __init__(self, constraint: Constraint, count: int):
        import dill

        self.connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starting = 0
        self._request = 0  # the number of the last request, which its reply repeats; 0: the start
        try:
            payload = dill.dumps(constraint, recurse=True)
        except Exception as error:  # noqa: BLE001 - pickling runs user code
            _log.info("constraint states stay in this process: %s: %s", type(error).__name__, error)
            return
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with tempfile.TemporaryFile() as file:  # unlike a socket, it takes any amount before the workers read
            file.write(payload)
            file.flush()
            for _ in range(count):
                ours, theirs = socket.socketpair()
                command = fresh_python(_SERVE, str(theirs.fileno()))
                self._processes.append(
                    subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=file, process_group=0)
                )
                theirs.close()
                self.connections.append(Connection(ours.detach()))
        weakref.finalize(self, _stop, os.getpid(), self.connections, self._processes)
        self._starting = count

    @property
    def ready(self) -> bool:
        """Whether all workers have loaded the constraint."""
        while self._starting and self.connections[self._starting - 1].poll():
            try:
                self.receive(0, [self._starting - 1])
                self._starting -= 1
            except Exception as error:  # noqa: BLE001 - unpickling runs user code
                _log.info("constraint states stay in this process: %s: %s", type(error).__name__, error)
                _stop(os.getpid(), self.connections, self._processes)
                self._starting = 0
        return not self._starting and bool(self.connections)

    def send(self, requests: Mapping[int, Any]) -> int:
        """Send a request to each of these workers, and return its number. Workers reply in the order of requests."""
        self._request += 1
        for worker, request in requests.items():
            try:
                self.connections[worker].send((self._request, request))
            except OSError as error:
                raise self._death(worker) from error
        return self._request

    def receive(self, request: int, workers: Iterable[int]) -> list[Any]:
        """Return the replies of these workers to the request of this number; those to earlier ones are dropped.

        Exceptions are raised after all have replied.
        """
        replies: list[Any] = []
        for worker in workers:
            number = -1
            while number != request:  # an interrupted rollout leaves replies behind
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
        _stop(os.getpid(), self.connections, self._processes)
        return RuntimeError(
            f"a constraint worker ended unexpectedly (exit code {code}), perhaps because memory ran out; "
            "the next rollout of this process computes its masks without workers"
        )


class _Request(NamedTuple):
    """A request to workers whose replies have not been read."""

    number: int
    slots_B: np.ndarray
    places: dict[int, np.ndarray]  # which of the slots each worker holds
    results: list[Forced]  # by slot; written when the replies are read
    questions: dict[int, Any]  # of the states, by place in the slots; written when the replies are read


class WorkerStates(AcceptingStates):
    """The states of the rows of a rollout, by slot, held by workers; see SharedStates for the methods.

    `ask` of the constraint is called in this process, for the questions of all workers. Slots are small numbers.
    Only the latest WorkerStates may use the workers. After an exception, a new one is needed.
    """

    def __init__(
        self,
        workers: StateWorkers,
        table: MaskTable,
        ask: Callable[[Any], Asked] | None = None,
    ):
        self._workers, self._table = workers, table
        if ask is not None:
            self.ask = ask
        count = len(workers.connections)
        self._worker_of = np.full(_SLOTS, -1)  # by slot
        self._numbers = np.full(_SLOTS, FREE)  # the next mask of each slot
        # What the numbers in replies stand for, by worker: mask numbers of the table, and forced tokens.
        self._table_numbers = [np.array([FREE]) for _ in range(count)]
        self._forced = [[NOTHING] for _ in range(count)]
        self._outstanding: deque[_Request] = deque()
        workers.receive(workers.send(dict.fromkeys(range(count), ("reset", (), ()))), range(count))

    def start(self, slots: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> list[Forced]:
        missing = max(slots, default=0) + 1 - len(self._worker_of)
        if missing > 0:
            self._worker_of = np.pad(self._worker_of, (0, missing), constant_values=-1)
            self._numbers = np.pad(self._numbers, (0, missing), constant_values=FREE)
        self._worker_of[list(slots)] = -1
        loads = np.bincount(self._worker_of[self._worker_of >= 0], minlength=len(self._forced))
        worker, previous = 0, None
        for slot, row in zip(slots, rows, strict=True):
            if previous is None or row != previous:  # rows of the same prompt share states in one worker
                worker, previous = int(loads.argmin()), row
            self._worker_of[slot] = worker
            loads[worker] += 1
        return self._call("start", slots, rows).forced

    def accept_async(self, slots: Sequence[int], tokens: Sequence[int]) -> Callable[[], Advanced]:
        request = self._send("advance", slots, tokens)
        return lambda: self._results(request)

    def resume(self, slots: Sequence[int], answers: Sequence[Any]) -> Advanced:
        return self._call("advance", slots, answers)

    def restart(self, slot: int, tokens: Sequence[int]) -> Forced:
        return self._call("restart", [slot], [tuple(tokens)]).forced[0]

    def numbers(self, slots: Sequence[int]) -> list[int]:
        numbers: list[int] = self._numbers[list(slots)].tolist()
        return numbers

    def release(self, slot: int) -> None:
        # The worker forgets the state when the slot is used again or the next rollout begins.
        self._worker_of[slot], self._numbers[slot] = -1, FREE

    def _call(self, method: str, slots: Sequence[int], arguments: Sequence[Any]) -> Advanced:
        """Call a method of the states of many slots, each with one argument."""
        # A worker does not read while its reply waits to be read. These requests may be too long for the buffer of
        # the connection, so that both sides would wait; those of `accept_async` are short.
        while self._outstanding:
            self._register_oldest()
        return self._results(self._send(method, slots, arguments))

    def _send(self, method: str, slots: Sequence[int], arguments: Sequence[Any]) -> _Request:
        slots_B = np.array(slots, dtype=np.int64)
        workers_B = self._worker_of[slots_B]
        places = {
            worker: np.flatnonzero(workers_B == worker) for worker in np.unique(workers_B).tolist() if worker >= 0
        }
        requests = {
            worker: (method, slots_B[at].tolist(), [arguments[i] for i in at.tolist()])
            for worker, at in places.items()
        }
        request = _Request(self._workers.send(requests), slots_B, places, [NOTHING] * len(slots), {})
        self._outstanding.append(request)
        return request

    def _results(self, request: _Request) -> Advanced:
        """Wait for the replies to a request."""
        while self._outstanding and self._outstanding[0].number <= request.number:
            self._register_oldest()
        return Advanced(request.results, request.questions)

    def _register_oldest(self) -> None:
        """Wait for the replies to the oldest request: they number masks and forced tokens for those to later ones."""
        number, slots_B, places, results, questions = self._outstanding.popleft()
        for (worker, at), reply in zip(places.items(), self._workers.receive(number, places), strict=True):
            forced_numbers, mask_numbers, new_forced, new_masks, asked = reply
            questions |= {int(at[place]): question for place, question in asked.items()}
            if new_masks:
                added = [self._table.number_of(words) for words in new_masks]
                self._table_numbers[worker] = np.append(self._table_numbers[worker], added)
            self._numbers[slots_B[at]] = self._table_numbers[worker][mask_numbers]
            single, forced = self._table.number_of_single_token, self._forced[worker]
            forced += [Forced(tokens, tuple([single(token) for token in tokens])) for tokens in new_forced]
            for place, number in zip(at.tolist(), forced_numbers, strict=True):
                results[place] = forced[number]


class _Numbering:
    """Numbers for the masks and forced tokens of a worker, from 1 in the order of their first use."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._forced: dict[tuple[int, ...], int] = {(): 0}
        self.new_masks: list[np.ndarray] = []  # those that have not been sent yet
        self.new_forced: list[tuple[int, ...]] = []

    def number_of(self, words: np.ndarray) -> int:
        key = xxh3_128_digest(words.data)
        number = self._masks.get(key)
        if number is None:
            number = self._masks[key] = len(self._masks) + 1
            self.new_masks.append(words.copy())
        return number

    def number_of_forced(self, tokens: tuple[int, ...]) -> int:
        number = self._forced.get(tokens)
        if number is None:
            number = self._forced[tokens] = len(self._forced)
            self.new_forced.append(tokens)
        return number

    def reply(self, forced: list[Forced], mask_numbers: list[int], questions: dict[int, Any]) -> tuple[Any, ...]:
        """Return the reply to a request, with everything that it numbers for the first time."""
        forced_numbers = [self.number_of_forced(each.tokens) for each in forced]
        new_forced, new_masks, self.new_forced, self.new_masks = self.new_forced, self.new_masks, [], []
        return forced_numbers, mask_numbers, new_forced, new_masks, questions


def serve(file_descriptor: int) -> None:
    """Run a worker: load the constraint from standard input, then answer requests until the connection is closed."""
    import gc

    import dill

    connection = Connection(file_descriptor)
    constraint: Any = None
    states: Any = None
    numbering = _Numbering()
    number = 0
    request: tuple[str, Any, Any] = ("load", (), ())
    while True:
        method, slots, arguments = request
        reply: Any = None
        try:
            if method == "load":
                # pread, because all workers have the same file, with one position
                constraint = dill.loads(os.pread(0, os.fstat(0).st_size, 0))
                gc.disable()  # states are freed by reference counting
            elif method == "reset":
                numbering = _Numbering()
                states = SharedStates(constraint, numbering)
                gc.collect()
            else:
                if method == "restart":
                    forced = [states.restart(slot, tokens) for slot, tokens in zip(slots, arguments, strict=True)]
                else:
                    forced = getattr(states, method)(slots, arguments)
                reply = numbering.reply(forced, states.numbers(slots), states.questions(slots))
        except Exception as error:  # noqa: BLE001 - raised again in the process that asked
            reply = error
        try:
            connection.send((number, reply))
            number, request = connection.recv()
        except (EOFError, OSError):
            return


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
