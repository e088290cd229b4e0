"""The constraint states of the requests that vLLM is generating, and the masks of its next pass.

vLLM samples every token itself, also those that a constraint forces: it has no way to append a token without a pass
of the model. States advance past forced tokens at once, so that a forced token costs no work when it is sampled.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..constraints.base import FREE, Constraint
from ..constraints.sampling import DeviceMasks
from ..constraints.shared import Forced, SharedStates
from ..constraints.table import MaskTable
from ..constraints.workers import WorkerStates, states_for

# A table with more masks is replaced: a server that is never idle would otherwise collect masks without end.
_MOST_MASKS = 1 << 13
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Request:
    """A request that samples under a constraint."""

    row: Mapping[str, Any]
    tokens: list[int]  # the completion so far
    slot: int = -1  # of its state; -1 before the state is made
    forced: deque[tuple[int, int]] = field(default_factory=deque)  # tokens that must follow, and their mask numbers
    failure: str | None = None  # why the constraint cannot be applied; only the end is allowed then


class RequestStates:
    """The states of all requests of one vLLM engine. Problems with a request never raise: they end that request."""

    def __init__(self, constraint: Constraint, eos: int, vocab_size: int, most_requests: int):
        self._constraint, self._eos, self._vocab_size = constraint, eos, vocab_size
        self._most_requests = most_requests
        self._new: dict[Request, None] = {}  # in the order in which they came
        self._requests: dict[int, Request] = {}  # by slot
        self._free_slots: list[int] = []
        self._table: MaskTable
        self._states: SharedStates | WorkerStates
        self._device_masks: DeviceMasks | None = None

    def start(self, row: Mapping[str, Any], tokens: Sequence[int] = ()) -> Request:
        """Add a request, whose completion may have begun with `tokens` before. The next `advance` makes its state."""
        request = Request(row, list(tokens))
        self._new[request] = None
        return request

    def release(self, request: Request) -> None:
        """Forget a request that has ended or was interrupted."""
        self._new.pop(request, None)
        if self._requests.pop(request.slot, None) is not None:
            self._states.release(request.slot)
            heapq.heappush(self._free_slots, request.slot)

    def advance(self, sampled: Sequence[tuple[Request, Sequence[int]]]) -> None:
        """Make the states of new requests, and accept the tokens of each request that are new since the last call."""
        self._begin_new()
        open_requests: list[Request] = []
        tokens: list[int] = []
        failed = False
        for request, new in sampled:
            for place, token in enumerate(new):
                if request.failure or self._has_ended(request):
                    break  # vLLM may run a request once more after its end, which it discards
                request.tokens.append(token)
                if request.forced:
                    failed |= request.forced.popleft()[0] != token
                elif place + 1 == len(new):
                    open_requests.append(request)
                    tokens.append(token)
                else:
                    failed |= not self._accept([request], [token])
        if failed or not self._accept(open_requests, tokens):
            self._restart_all()

    def mask(self, logits_B_V: torch.Tensor, requests: Mapping[int, Request]) -> None:
        """Set the logits of disallowed tokens to -inf, in place; `requests` are given by row of the logits."""
        if self._device_masks is None:
            self._device_masks = DeviceMasks(self._table, logits_B_V.device)
        numbers = [FREE] * len(logits_B_V)
        open_rows = []
        for row, request in requests.items():
            if request.failure:
                numbers[row] = self._table.number_of_single_token(self._eos)
            elif request.forced:
                numbers[row] = request.forced[0][1]
            elif not self._has_ended(request):
                open_rows.append(row)
        open_slots = [requests[row].slot for row in open_rows]
        for row, number in zip(open_rows, self._states.numbers(open_slots), strict=True):
            numbers[row] = number
        self._device_masks.fill(numbers).apply(logits_B_V)

    def _has_ended(self, request: Request) -> bool:
        return bool(request.tokens) and request.tokens[-1] == self._eos

    def _begin_new(self) -> None:
        if not self._new:
            return
        if not self._requests:
            self._renew()
        new, self._new = list(self._new), {}
        for request in new:
            request.slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._requests)
            self._requests[request.slot] = request
        if len(self._table) > _MOST_MASKS or self._begin(new) is not None:
            self._restart_all()

    def _renew(self) -> None:
        self._table = MaskTable(self._vocab_size)
        self._states = states_for(self._constraint, self._table, self._most_requests)
        self._device_masks = None

    def _begin(self, requests: Sequence[Request]) -> str | None:
        """Make states at the completions so far. Returns an error if there is one: the states must be made again."""
        try:
            started = self._states.start([each.slot for each in requests], [each.row for each in requests])
            for request, forced in zip(requests, started, strict=True):
                request.forced.clear()
                if self._has_ended(request):
                    continue
                if request.tokens:
                    forced = self._states.restart(request.slot, request.tokens)
                _expect(request, forced)
        except Exception as error:  # noqa: BLE001 - a row must not end the engine
            return f"{type(error).__name__}: {error}"
        return None

    def _accept(self, requests: Sequence[Request], tokens: Sequence[int]) -> bool:
        """Accept one token of each request. Returns False if the states must be made again."""
        try:
            accepted = self._states.accept([request.slot for request in requests], tokens)
        except Exception as error:  # noqa: BLE001 - `_restart_all` finds the request
            _log.warning("constraint states are made again after an error: %s: %s", type(error).__name__, error)
            return False
        for request, forced in zip(requests, accepted, strict=True):
            _expect(request, forced)
        return True

    def _restart_all(self) -> None:
        """Make all states again. If that fails, make them one by one in this process; requests that fail end."""
        requests = [request for request in self._requests.values() if request.failure is None]
        self._renew()
        if self._begin(requests) is None:
            return
        self._states = SharedStates(self._constraint, self._table)
        for request in requests:
            request.failure = self._begin([request])
            if request.failure:
                _log.warning("a request ends at once, because its constraint failed: %s", request.failure)


def _expect(request: Request, forced: Forced) -> None:
    request.forced.extend(zip(forced.tokens, forced.numbers, strict=True))
