"""Processor: the logits processor with which vLLM samples under a constraint.

vLLM has two model runners with different interfaces, and decides late which one it uses, so this class implements
both. In either, the tokens of the previous pass reach the CPU while the GPU runs the current one, and the masks are
computed during that time.

Requests carry their row as JSON text: `SamplingParams(extra_args={"row": ...})`, over HTTP `vllm_xargs`. Requests
without a row are not constrained. The constraint is fixed when the engine starts: a colocated engine finds it in
COLOCATED, a server makes it from its configuration (see served_task.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import LogitsProcessor as ProcessorV1
from vllm.v1.sample.logits_processor import MoveDirectionality

from ..constraints.base import Constraint
from ..constraints.budget import LIMIT
from .served_task import CONFIG_KEY, ROW, ServedTask, check_row
from .states import Request, RequestStates

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorV2
except ImportError:  # vLLM before 0.31

    class ProcessorV2:  # type: ignore[no-redef]
        pass


_PASSES_PER_LOG_LINE = 10_000
_log = init_logger(__name__)


class Sampling(NamedTuple):
    """What a colocated engine samples under."""

    constraint: Constraint
    eos: int


# By the key in the configuration of the engine. The trainer adds its constraint after it has made the engine.
COLOCATED: dict[str, Sampling] = {}


class Cost:
    """The time that the CPU spends on masks."""

    def __init__(self) -> None:
        self._seconds, self._passes = 0.0, 0

    def add(self, seconds: float) -> None:
        self._seconds += seconds
        self._passes += 1
        if self._passes == _PASSES_PER_LOG_LINE:
            _log.info("constraint masks: %.2f ms per pass", self.take() * 1e3)

    def take(self) -> float:
        """Return the mean seconds per pass since the last call."""
        mean = self._seconds / max(self._passes, 1)
        self._seconds, self._passes = 0.0, 0
        return mean


COST = Cost()  # of all engines of this process


class Processor(ProcessorV1, ProcessorV2):
    """Masks the logits of requests that carry a row. Model Runner V1 calls `update_state`; V2 calls `add_request` and
    `apply_staged_writes`; both call `apply`."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        check_row(sampling_params)

    def __init__(self, vllm_config: Any, *runner: Any):
        if vllm_config.speculative_config is not None:
            raise ValueError("a constraint does not work with speculative decoding; remove --speculative-config")
        self._vllm_config = vllm_config
        self._config = vllm_config.additional_config[CONFIG_KEY]
        self._states: RequestStates | None = None
        if "key" not in self._config:
            self._make_states()  # a server reports a problem when it starts
        self._live: dict[int, _Live] = {}  # by row of the batch (V1) or by slot (V2)
        self._runner_v2 = _RunnerV2(runner[0]) if len(runner) == 1 else None

    def is_argmax_invariant(self) -> bool:
        return False

    def _make_states(self) -> RequestStates:
        if "key" in self._config:
            sampling = COLOCATED[self._config["key"]]
        else:
            served = ServedTask.from_config(self._vllm_config.additional_config)
            assert served is not None
            _, constraint, tokenizer = served.build()
            sampling = Sampling(constraint, tokenizer.eos_token_id)
        vocab_size = self._vllm_config.model_config.get_vocab_size()
        most = self._vllm_config.scheduler_config.max_num_seqs
        self._states = RequestStates(*sampling, vocab_size, most)
        return self._states

    def _start(self, place: int, params: Any, output_ids: list[int]) -> bool:
        """Begin the request at `place`. Returns whether it is constrained."""
        self._release(place)
        text = (params.extra_args or {}).get(ROW)
        if text is None:
            return False
        row = json.loads(text) | {LIMIT: params.max_tokens}  # as the trainer, which scores under the same masks
        self._live[place] = _Live(self._states or self._make_states(), row, output_ids)
        return True

    def _release(self, place: int) -> None:
        live = self._live.pop(place, None)
        if live is not None:
            live.park()

    # ---- Model Runner V1

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._release(place)
        for place, params, _, output_ids in batch_update.added:
            self._start(place, params, output_ids)
        for a, b, direction in batch_update.moved:
            at_a, at_b = self._live.pop(a, None), self._live.pop(b, None)
            if at_a is not None:
                self._live[b] = at_a
            if at_b is not None and direction == MoveDirectionality.SWAP:
                self._live[a] = at_b
            elif at_b is not None:
                at_b.park()

    # ---- Model Runner V2

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return self._start(req_idx, sampling_params, [])

    def apply_staged_writes(self) -> None:
        if self._live and self._runner_v2 is not None:
            self._runner_v2.copy_last_tokens()

    # ---- both

    def apply(self, logits: torch.Tensor, context: Any = None) -> torch.Tensor:
        if not self._live or self._states is None:
            return logits
        start = time.perf_counter()
        if self._runner_v2 is None:
            live = self._live
        else:
            live = self._runner_v2.update(self._live, logits, context)
        if not live:  # V2 keeps requests that have ended
            return logits
        requests = {row: each.present() for row, each in live.items()}
        # Under asynchronous scheduling, the latest output id of V1 is a placeholder until now.
        self._states.advance([(requests[row], each.take_new()) for row, each in live.items()])
        self._states.mask(logits, requests)
        COST.add(time.perf_counter() - start)
        return logits


class _Live:
    """A request in the batch, and the ids of its completion; V1 appends to this list itself."""

    def __init__(self, states: RequestStates, row: Mapping[str, Any], output_ids: list[int]):
        self._states, self._row, self.output_ids = states, row, output_ids
        self._request: Request | None = None
        self._taken = 0

    def present(self) -> Request:
        """Return the request, which has a state from now on."""
        if self._request is None:
            self._request = self._states.start(self._row, self.output_ids[: self._taken])
        return self._request

    def park(self) -> None:
        """Release the state. V2 does not tell when a request has ended, so that those outside the batch have none."""
        if self._request is not None:
            self._states.release(self._request)
            self._request = None

    def take_new(self) -> list[int]:
        """Return the tokens since the last call. A token that is still on its way to the CPU is -1."""
        new = [token for token in self.output_ids[self._taken :] if token >= 0]
        self._taken += len(new)
        return new


class _RunnerV2:
    """Reads the tokens of requests from the buffers of Model Runner V2, which are on the device."""

    def __init__(self, states: Any):
        self._states = states
        self._last: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def copy_last_tokens(self) -> None:
        """Start to copy the last token and the length of every slot, before the forward pass begins."""
        lengths = self._states.total_len.gpu
        last = self._states.all_token_ids.gpu.gather(1, (lengths[:, None].long() - 1).clamp(min=0))[:, 0]
        both = torch.stack([last, lengths.to(last.dtype)])
        if both.device.type != "cuda":
            self._last = both
            return
        if self._last is None:
            self._last = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
        self._last.copy_(both, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def update(self, live: Mapping[int, _Live], logits: torch.Tensor, context: Any) -> dict[int, _Live]:
        """Append new tokens to the completions of the requests in the batch, and return them by row of the logits."""
        slots = context.idx_mapping_np.tolist()
        if len(slots) != len(logits):
            raise RuntimeError("a constraint needs one row of logits per request; turn speculative decoding off")
        assert self._last is not None
        if self._copied is not None:
            self._copied.synchronize()
        last, lengths = self._last.tolist()
        present = {row: live[slot] for row, slot in enumerate(slots) if slot in live}
        for slot in live.keys() - set(slots):
            live[slot].park()
        for row, each in present.items():
            slot = slots[row]
            prompt = int(self._states.prompt_len.np[slot])
            missing = lengths[slot] - prompt - len(each.output_ids)
            if missing == 1:
                each.output_ids.append(last[slot])
            elif missing > 1:  # the request was interrupted, and has its completion so far as a part of the prompt
                begin = prompt + len(each.output_ids)
                each.output_ids += self._states.all_token_ids.gpu[slot, begin : begin + missing].tolist()
        return present
