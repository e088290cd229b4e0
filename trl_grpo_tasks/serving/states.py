"""The constraint states of the requests that vLLM is generating, and the masks of its next pass.

vLLM samples every token itself, also those that a constraint forces: it has no way to append a token without a pass
of the model.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..constraints.base import FREE, Constraint
from ..constraints.rebuilt import ReplayedStates
from ..constraints.recording import DeviceMasks
from ..constraints.shared import SharedStates
from ..constraints.table import MaskTable
from ..constraints.workers import states_for

# A table with more masks is replaced: a server that is never idle would otherwise collect masks without end.
_MOST_MASKS = 1 << 13
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Request:
    """A request that samples under a constraint."""

    row: Mapping[str, Any]
    tokens: list[int]  # the completion so far
    slot: int = -1  # of its state; -1 before the state is made
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
        self._states: ReplayedStates
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
        taken = [(request.slot, self._take(request, new)) for request, new in sampled]
        for place in range(max((len(tokens) for _, tokens in taken), default=0)):
            accepted = {slot: tokens[place] for slot, tokens in taken if place < len(tokens)}
            error = _error_of(self._states.accept, list(accepted), list(accepted.values()))
            if error is not None:
                _log.warning("constraint states are made again after an error: %s", error)
                self._restart_all()
                return

    def _take(self, request: Request, new: Sequence[int]) -> list[int]:
        """Append new tokens to a completion, and return those that its state must accept."""
        taken = []
        for token in new:
            if request.failure or self._has_ended(request):
                break  # vLLM may run a request once more after its end, which it discards
            request.tokens.append(token)
            taken.append(token)
        return taken

    def mask(self, logits_B_V: torch.Tensor, requests: Mapping[int, Request]) -> None:
        """Set the logits of disallowed tokens to -inf, in place; `requests` are given by row of the logits."""
        if self._device_masks is None:
            self._device_masks = DeviceMasks(self._table, logits_B_V.device)
        numbers = [FREE] * len(logits_B_V)
        open_rows = []
        for row, request in requests.items():
            if request.failure:
                numbers[row] = self._table.number_of_single_token(self._eos)
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
        if len(self._table) > _MOST_MASKS or _error_of(self._begin, new) is not None:
            self._restart_all()

    def _renew(self) -> None:
        self._table = MaskTable(self._vocab_size)
        self._states = ReplayedStates(states_for(self._constraint, self._table, self._most_requests))
        self._device_masks = None

    def _begin(self, requests: Sequence[Request]) -> None:
        """Make states at the completions so far."""
        self._states.start([each.slot for each in requests], [each.row for each in requests])
        for request in requests:
            if request.tokens and not self._has_ended(request):
                self._states.restart(request.slot, request.tokens)

    def _restart_all(self) -> None:
        """Make all states again. If that fails, make them one by one in this process; requests that fail end."""
        requests = [request for request in self._requests.values() if request.failure is None]
        self._renew()
        if _error_of(self._begin, requests) is None:
            return
        self._states = ReplayedStates(SharedStates(self._constraint, self._table))
        for request in requests:
            request.failure = _error_of(self._begin, [request])
            if request.failure:
                _log.warning("a request ends at once, because its constraint failed: %s", request.failure)


def _error_of(call: Callable[..., None], *arguments: Any) -> str | None:
    """Call and return the error, if there is one: a row must not end the engine. States are unusable after it."""
    try:
        call(*arguments)
    except Exception as error:  # noqa: BLE001 - a task's code can fail in any way
        return f"{type(error).__name__}: {error}"
    return None
