"""Several vLLM servers as one client: each request goes to the server with the fewest, and servers may fail.

A server is out when it does not answer, was restarted, or has open requests and makes no tokens. Its requests are sent
to the others. With the next weights it is taken back, if it answers by then. A process that was started again has the
weights of its files; so a server is looked at after its answers, and they count only if it was not restarted.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import requests
import torch
from requests.adapters import HTTPAdapter

from ..failures import first_line
from . import CONCURRENT_REQUESTS, ServerError, addresses_in, joined
from .weights import FolderClient

WATCH_SECONDS = 2.0  # between two looks at a server with open requests
ANSWERS_WITHIN = 10.0  # seconds, to a look
HANGS_AFTER = 120.0  # seconds without an answer or a token
NONE_LEFT_SECONDS = 600.0  # to wait for one of them to come back
TRIES = 3  # of a request that servers answer with an error although they work
_TOKENS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
_STARTED = "process_start_time_seconds"


class _Session(requests.Session):
    """Raises for what a failing server answers, instead of trying again for a minute as TRL's session does."""

    def __init__(self) -> None:
        super().__init__()
        self.mount("http://", HTTPAdapter(pool_maxsize=CONCURRENT_REQUESTS))
        self.mount("https://", HTTPAdapter(pool_maxsize=CONCURRENT_REQUESTS))

    def request(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().request(*args, **{"timeout": (10, None), **kwargs})
        if answer.status_code >= 500:
            raise requests.ConnectionError(f"status {answer.status_code}: {answer.text[:500]}")
        return answer


class Server:
    """One of the servers, its open requests, and what was last seen of it."""

    def __init__(self, client: FolderClient):
        client.session = _Session()
        self.client, self.url = client, client.base_url
        self.is_out = self.is_loading = False
        self.reads = 0
        self.open: set[Future[Any]] = set()
        self.looking = threading.Lock()
        self._process, self._tokens = self._state(ANSWERS_WITHIN)
        self._moved = self._seen = time.monotonic()

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        """Call a function that sends a request, in a thread that does not keep the process from ending."""
        answer: Future[Any] = Future()
        self.open.add(answer)
        answer.add_done_callback(self.open.discard)
        threading.Thread(target=_answer, args=(answer, call), daemon=True).start()
        return answer

    def read_weights(self, folder: str) -> None:
        self._process, self._tokens = self._state(WATCH_SECONDS if self.is_out else ANSWERS_WITHIN)
        self.client.read(folder)
        self.client.reset_prefix_cache()

    def problem(self, at_once: bool = False) -> str | None:
        """Why this server is of no use, as seen now or a moment ago; None if it works."""
        now = time.monotonic()
        if not at_once and now - self._seen < WATCH_SECONDS:
            return None
        try:
            process, tokens = self._state(ANSWERS_WITHIN)
            if process != self._process:
                return "it was restarted"
            if tokens != self._tokens or self.is_loading or not self.open:
                self._tokens, self._moved = tokens, now
        except requests.Timeout:
            pass
        except requests.RequestException as error:
            return _cause(error)
        self._seen = time.monotonic()
        if now - self._moved > HANGS_AFTER:
            return f"no answer, or open requests and no token, for {HANGS_AFTER:g} s"
        return None

    def _state(self, timeout: float) -> tuple[float, float]:
        """Return when the process of the server started, and how many tokens it has read and made since."""
        with _Session() as session:  # new connections: kept ones may just have been closed, which would be an error
            session.get(f"{self.url}/health", timeout=timeout)
            lines = session.get(f"{self.url}/metrics", timeout=timeout).text.splitlines()
        values = [line.rsplit(" ", 1) for line in lines if line.startswith((_STARTED, *_TOKENS))]
        tokens = [float(value) for name, value in values if name.startswith(_TOKENS)]
        # A server may be told to count no tokens. It always moves, because NaN differs from itself.
        return sum(float(value) for name, value in values if name == _STARTED), sum(tokens) if tokens else math.nan


@dataclass
class _Sent:
    """A request that was sent to a server after this number of its readings of weights."""

    server: Server
    reads: int
    answer: Future[Any]


class Servers:
    """What TRL's trainer calls of its client, for several servers."""

    def __init__(self, folder: str, addresses: Sequence[str], **kwargs: Any):
        clients = [FolderClient(folder, base_url=address, **kwargs) for address in addresses]
        self.servers = [Server(client) for client in clients]
        self._newest: tempfile.TemporaryDirectory[str] | None = None
        self._lock, self._loading = threading.Lock(), threading.Lock()

    def init_communicator(self, device: Any = 0) -> None:
        self.servers[0].client.init_communicator(device)

    def get_server_info(self) -> dict[str, Any]:
        """That of a server whose log-probs are not what TRL requires, or else that of the first."""
        infos = [server.client.get_server_info() for server in self.servers]
        return max(infos, key=lambda info: info["model_config"]["logprobs_mode"] != "processed_logprobs")

    def image_features(self, *_: Any, **__: Any) -> Any:
        raise ValueError("prompts with images need a single vLLM server; give one address in vllm_server_base_url")

    def reset_prefix_cache(self) -> None:
        """Each server has done so when it read the newest weights."""

    # ---- generation

    def generate(self, prompts: Sequence[Any], features: None = None, **options: Any) -> dict[str, list[Any]]:
        """TRL's `generate`."""
        return joined(self.generate_each(prompts, [{}] * len(prompts), **options))

    def generate_each(
        self, prompts: Sequence[Any], each: Sequence[dict[str, Any]], **options: Any
    ) -> list[dict[str, list[Any]]]:
        """Return the answers of TRL's `generate` to each prompt by itself. Options in `each` are of one prompt."""
        calls = [
            partial(FolderClient.generate, prompts=[prompt], **options | more)
            for prompt, more in zip(prompts, each, strict=True)
        ]
        waiting = deque(range(len(calls)))
        sent: dict[int, _Sent] = {}
        answered: dict[int, _Sent] = {}
        failed: dict[int, list[Server]] = defaultdict(list)
        for server in self.servers:
            self._is_out(server)
        while waiting or sent:
            while waiting and len(sent) < CONCURRENT_REQUESTS * len(self.servers):
                number = waiting.popleft()
                sent[number] = self._send(calls[number], failed[number])
            wait([one.answer for one in sent.values()], WATCH_SECONDS, FIRST_COMPLETED)
            for number, one in list(sent.items()):
                if one.answer.done():
                    del sent[number]
                    if self._is_answered(one, failed[number]):
                        answered[number] = one
                    else:
                        waiting.append(number)
            for server in {one.server for one in sent.values()}:
                self._is_out(server)
            if not (waiting or sent):  # a server that was restarted meanwhile may have answered with old weights
                works = [server for server in self.servers if not self._is_out(server, at_once=True)]
                for number, one in answered.items():
                    if one.server not in works or one.reads != one.server.reads:
                        waiting.append(number)
        return [answered[number].answer.result() for number in range(len(calls))]

    def _is_answered(self, one: _Sent, failed: list[Server]) -> bool:
        """Whether a request has its answer; if not, it is to be sent again. `failed` are servers that answered it with
        an error although they work."""
        try:
            one.answer.result()
        except _OutError:
            return False
        except requests.RequestException as error:
            if not self._is_out(one.server, at_once=True):
                failed.append(one.server)
            if len(failed) == TRIES:
                raise ServerError(
                    f"vLLM servers answered a request {TRIES} times with an error: {_cause(error)}"
                ) from error
            return False
        return True

    def _send(self, call: Callable[..., Any], failed: list[Server]) -> _Sent:
        """Send a request to the server with the fewest, if possible to one that has not failed it. If no server works,
        wait for one to come back."""
        until = time.monotonic() + NONE_LEFT_SECONDS
        while True:
            with self._lock:
                working = [server for server in self.servers if not server.is_out]
                if working:
                    server = min(working, key=lambda one: (failed.count(one), len(one.open)))
                    return _Sent(server, server.reads, server.start(partial(call, server.client)))
            if time.monotonic() > until:
                raise ServerError(
                    f"none of the vLLM servers {', '.join(one.url for one in self.servers)} has answered for "
                    f"{NONE_LEFT_SECONDS:g} s; when one works again, repeat the command with --resume_from_checkpoint"
                )
            with self._loading:
                if self._newest is not None and all(server.is_out for server in self.servers):
                    self._let_read(self._newest.name)
            time.sleep(WATCH_SECONDS)

    def _is_out(self, server: Server, at_once: bool = False) -> bool:
        """Look at a server, and take it out if there is a problem."""
        with server.looking:
            if not server.is_out and (problem := server.problem(at_once)) is not None:
                self._take_out(server, problem)
        return server.is_out

    def _take_out(self, server: Server, problem: str) -> None:
        with self._lock:
            if not server.is_out:
                print(f"vLLM server {server.url} is out: {problem}. Others take its requests; it is taken back with "
                      "the next weights, if it answers by then", flush=True)  # fmt: skip
            server.is_out = True
            for answer in list(server.open):
                with suppress(InvalidStateError):  # it has just been answered
                    answer.set_exception(_OutError(problem))

    # ---- weights

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.load(self.write(named_params))

    def write(self, named_params: Iterator[tuple[str, torch.Tensor]]) -> tempfile.TemporaryDirectory[str]:
        """Write the weights to a new folder, for `load`."""
        return self.servers[0].client.write(named_params)

    def load(self, written: tempfile.TemporaryDirectory[str]) -> None:
        """Let all servers read weights that `write` wrote. They are kept until the next, for those that come back."""
        with self._loading:
            before, self._newest = self._newest, written
            self._let_read(written.name)
            if before is not None:
                before.cleanup()
            elif unread := [server.url for server in self.servers if server.is_out]:  # wrong options, most likely
                raise ServerError(
                    f"{', '.join(unread)}: the vLLM server could not read the weights of this run; the reason is above"
                )

    def _let_read(self, folder: str) -> None:
        """Let all servers read weights, at the same time."""
        reading = []
        for server in self.servers:
            server.is_loading = True
            reading.append((server, server.start(partial(server.read_weights, folder))))
        for server, answer in reading:
            while not answer.done():
                wait([answer], WATCH_SECONDS)
                if not answer.done() and (problem := server.problem()) is not None:
                    self._take_out(server, problem)
            server.is_loading = False
            if (error := answer.exception()) is not None:
                self._take_out(server, _cause(error))
                continue
            server.reads += 1
            if server.is_out:
                server.is_out = False
                print(f"vLLM server {server.url} is back, with the newest weights", flush=True)


class _OutError(Exception):
    """The server of a request was taken out."""


def _answer(answer: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result, error = call(), None
    except BaseException as failure:  # noqa: BLE001 - it is raised where the answer is read
        result, error = None, failure
    with suppress(InvalidStateError):  # the server was taken out meanwhile
        answer.set_result(result) if error is None else answer.set_exception(error)


def _cause(error: BaseException) -> str:
    """What is at the bottom of an error: above it is the address, which the reader knows."""
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)


def client_of(folder: str, base_url: str, **kwargs: Any) -> FolderClient | Servers:
    """Return a client of one server, or of several with commas between their addresses."""
    addresses = addresses_in(base_url)
    if len(addresses) == 1:
        return FolderClient(folder, base_url=addresses[0], **kwargs)
    return Servers(folder, addresses, **kwargs)
