"""Generation ahead of training (`rollouts_ahead`): a vLLM server samples the next rollouts while one is trained on.

At the start of each rollout, TRL sends the weights and asks its client for completions. Here the client answers with
completions that were requested `rollouts_ahead` rollouts earlier (fewer at the start and after a resume), and
requests those of a later one. TRL's importance sampling correction corrects for the older weights.

The plan of the main process has the prompts of all processes. A thread sends the requests, one after another: a
rollout, the weights, the next rollout. It takes part in no collective operation, which it could delay. Evaluations
wait in the same queue.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...constraints.base import Constraint
from ...constraints.turns import TurnsConstraint
from ...failures import first_line
from ...rewards.environment import TurnsTask
from ...serving import ServerError
from ...task import Task, option
from ..record import RolloutRecord
from .base import Extra


@dataclass
class AheadOptions:
    """Generation ahead of training"""

    rollouts_ahead: int = option(
        0,
        "Rollouts that a vLLM server generates ahead of training, at the same time. Importance weights correct for "
        "the older policy. More than 1 needs vllm_weights_folder.",
    )


class InOrder:
    """Calls functions one after another in a thread, which does not keep the process from ending. When one has failed,
    later ones are not called: their answers are its error."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()
        self._is_working = False

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            self._waiting.append((answer, call))
            if not self._is_working:
                self._is_working = True
                threading.Thread(target=self._work, daemon=True).start()
        return answer

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_working = False
                    return
                answer, call = self._waiting.popleft()
            if answer.set_running_or_notify_cancel():
                try:
                    if self.failure is not None:
                        raise self.failure
                    answer.set_result(call())
                except BaseException as error:  # noqa: BLE001 - it is raised where the answer is read
                    self.failure = error
                    answer.set_exception(error)


def planned(sampler: Any, first: int) -> Iterator[list[int]]:
    """Return the rows of each rollout's groups, over all processes, from rollout `first` of the present epoch on, in
    this and later epochs. TRL's `sampler`, which is about to begin the epoch, is copied and stays as it is."""
    ahead = copy.copy(sampler)
    if sampler.shuffle:
        ahead.generator = torch.Generator()
        ahead.generator.set_state(sampler.generator.get_state())
    return itertools.islice(_rollouts_of(ahead), first, None)


def _rollouts_of(sampler: Any) -> Iterator[list[int]]:
    batch = sampler.batch_size * sampler.mini_repeat_count
    while True:
        indexes = iter(sampler)
        while rollout := list(itertools.islice(indexes, batch * sampler.repeat_count)):
            yield rollout[: batch : sampler.mini_repeat_count]


def batches_until(steps: int, per_epoch: int, per_step: int) -> int:
    """The number of batches in this number of optimizer steps: the last step of an epoch takes what is left of it."""
    steps_per_epoch = max(-(-per_epoch // per_step), 1)
    epochs, more = divmod(steps, steps_per_epoch)
    return epochs * per_epoch + min(more * per_step, per_epoch)


@dataclass
class Request:
    """A rollout that was requested, with each prompt once per group."""

    prompts: list[list[int]]
    asked: Any  # what the requests sample under the constraint
    step: int  # the number of optimizer steps that made the weights
    answer: Future[Any]


class AheadExtra(Extra):
    """Replaces methods of TRL's client, which only the main process has."""

    name = "ahead"
    Options = AheadOptions
    switch = "rollouts_ahead"

    @classmethod
    def check(cls, args: Any) -> None:
        if not args.rollouts_ahead:
            return
        setting = f"rollouts_ahead={args.rollouts_ahead}"
        if not (args.use_vllm and args.vllm_mode == "server"):
            raise ValueError(
                f"{setting} needs a server that generates during training: set use_vllm=True and vllm_mode='server', "
                "or rollouts_ahead=0"
            )
        if not args.vllm_importance_sampling_correction:
            raise ValueError(
                f"{setting} trains on completions of an older policy, for which vllm_importance_sampling_correction "
                "corrects; set it to True, or rollouts_ahead=0"
            )
        if args.rollouts_ahead > 1 and args.vllm_weights_folder is None:
            raise ValueError(
                f"{setting} needs vllm_weights_folder: NCCL sends weights only while the server is idle, so that more "
                "than 1 would only be staler; set the folder, or rollouts_ahead=1"
            )
        if getattr(args, "curriculum", False):
            raise ValueError(
                f"{setting} does not work with curriculum, which chooses the rows of a rollout by the success of the "
                "one before; set one of them to 0 or False"
            )

    @classmethod
    def check_task(cls, args: Any, task: Task | None, held_out: Any = None) -> None:
        if args.rollouts_ahead and isinstance(task, TurnsTask):
            raise ValueError(_refused(args, "completions of several turns (repair_turns, environments)"))

    @classmethod
    def check_constraint(cls, args: Any, constraint: Constraint | None) -> None:
        if args.rollouts_ahead and isinstance(constraint, TurnsConstraint):
            raise ValueError(_refused(args, "completions of several turns (repair_turns, environments)"))

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        if trainer.tools or trainer.rollout_func is not None or trainer._is_vlm:
            raise ValueError(_refused(self._args, "tools, rollout_func or vision-language models"))
        if not hasattr(trainer.train_dataset, "__len__"):
            raise ValueError(_refused(self._args, "a streaming data set, whose order is not known in advance"))
        self._plan: Iterator[list[int]] | None = None  # None: not in training
        self._next = self._end = 0  # the number of the next rollout to request; that of rollouts in the run
        self._requests: deque[Request] = deque()
        self._seconds = 0.0  # waited since the last rollout
        if trainer.accelerator.is_main_process:
            self._calls = InOrder()
            client = trainer.vllm_generation.vllm_client
            self._generate, self._update = client.generate, client.update_named_params
            client.generate, client.update_named_params = self._answer, self._send_weights
            reset = client.reset_prefix_cache
            client.reset_prefix_cache = lambda: self._calls.submit(reset)

    # ---- the plan

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Plan the rollouts, after the sampler has been brought to the resumed epoch."""
        trainer = self._trainer
        if not trainer.accelerator.is_main_process:
            return
        self._drop("training begins anew")
        self._calls.failure = None
        sampler, size = trainer.checkpoints.train_sampler, args.steps_per_generation * trainer.num_iterations
        is_under_way = trainer._buffered_inputs is not None  # the rollout of the resumed step
        per_epoch = len(sampler) // (sampler.batch_size * sampler.mini_repeat_count)
        done, end = (
            batches_until(steps, per_epoch, args.gradient_accumulation_steps)
            for steps in (state.global_step, state.max_steps)
        )
        first, self._next = (
            (batches + (size - 1) * is_under_way) // size for batches in (trainer.checkpoints.batches_done, done)
        )
        self._plan, self._end = planned(sampler, first), -(-end // size)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._drop("training ends")
        self._plan = None

    def _drop(self, reason: str) -> None:
        if self._requests:
            count = len(self._requests)
            print(f"{count} rollout{'s' * (count > 1)} requested ahead: dropped, because {reason}", flush=True)
        for request in self._requests:
            request.answer.cancel()
        self._requests.clear()

    def start_iteration(self) -> None:
        self._trainer.scoring.consistency.trains_on_stale = True

    # ---- the client

    def _answer(self, prompts: list[list[int]], **options: Any) -> Any:
        """TRL's `generate`: in training, the answer to an earlier request. Later rollouts are requested."""
        trainer, requests = self._trainer, self._requests
        if self._plan is None or trainer.mode != "train":
            return _result(self._calls.submit(partial(self._generate, prompts, **options)))
        while not requests or (len(requests) <= self._args.rollouts_ahead and self._next < self._end):
            self._request(next(self._plan), options)
        request, vllm = requests.popleft(), trainer.generation.vllm
        if (request.prompts, request.asked) != (prompts, None if vllm is None else vllm.asked):
            raise RuntimeError(
                "rollouts_ahead: the prompts of this rollout are not those that were requested ahead of it, so the "
                "data loader does not follow TRL's sampler; set rollouts_ahead=0"
            )
        answer = self._waited_for(request.answer)
        self._metrics["rollout/staleness"].append(float(trainer.state.global_step - request.step))
        self._metrics["perf/rollout_wait_seconds"].append(self._seconds)
        self._seconds = 0.0
        return answer

    def _request(self, rows: list[int], options: dict[str, Any]) -> None:
        """Request a rollout. TRL has sent the weights of this step."""
        trainer, generation = self._trainer, self._trainer.generation
        record = RolloutRecord("train", [trainer.train_dataset[row] for row in rows])
        prompts = trainer._tokenize_prompts([example["prompt"] for example in record.examples])[0]
        asked = None if generation.constraint is None else generation.vllm.first_turns(record.rows)
        more = {} if asked is None else {"asked": asked}
        answer = self._calls.submit(partial(self._generate, prompts, **options, **more))
        self._requests.append(Request(prompts, asked, trainer.state.global_step, answer))
        self._next += 1

    def _send_weights(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send the weights after the rollouts that were requested before. Files are written at once, and read by the
        server in its turn; NCCL is a collective operation with the server, for which this thread waits."""
        client = self._trainer.vllm_generation.vllm_client
        if self._args.vllm_weights_folder is not None:
            self._calls.submit(partial(client.load, client.write(named_params)))
        else:
            self._waited_for(self._calls.submit(lambda: None))
            self._update(metadata, named_params)

    def _waited_for(self, answer: Future[Any]) -> Any:
        start = time.perf_counter()
        try:
            return _result(answer)
        finally:
            self._seconds += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        staleness = self._metrics.get("rollout/staleness")
        return {"rollout/staleness_max": max(staleness)} if staleness else {}


def _result(answer: Future[Any]) -> Any:
    try:
        return answer.result()
    except Exception as error:
        raise ServerError(
            f"a request to the vLLM server failed ({type(error).__name__}: {first_line(error)}); when the server "
            "works again, repeat the command with --resume_from_checkpoint"
        ) from error


def _refused(args: Any, what: str) -> str:
    return f"rollouts_ahead={args.rollouts_ahead} does not work with {what}; set it to 0"
