"""The trainer's side of vLLM: requests carry their rows, and answers carry what is needed for exact scoring.

TRL has no arguments for the options of the engine or for parameters that differ between requests. Both are added at
the places through which all requests pass: `LLM.generate` of a colocated engine, or `VLLMClient.generate` of a server.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from ..constraints.base import Constraint
from ..constraints.turns import TurnsConstraint
from ..task import Task
from . import CONCURRENT_REQUESTS, ServerError, joined
from .conversations import OneTurn, Sampled, Turn, converse, row_text
from .served_task import CONFIG_KEY, PROCESSOR, ROW, ServedTask

# vLLM's server writes this for -inf, which JSON does not have.
_LEAST_LOGP = -9998.0
# Half precision has many equal logits, and vLLM keeps all tokens that are equal to the k-th.
_LOGPROBS_PER_TOP_K = 2
_MORE_LOGPROBS = 64


# What stands for the answer to a request that is not sent.
_NOTHING = SimpleNamespace(prompt_token_ids=[], outputs=[SimpleNamespace(token_ids=[], logprobs=[])])
_engines = itertools.count(1)


@contextmanager
def engine_options(processes_logits: bool, weights_folder: str | None) -> Iterator[str]:
    """Within this context, TRL's engines have our logits processor, and its clients send weights through a folder.

    Yields the key of a colocated engine: it samples under `COLOCATED[key]`.
    """
    from trl.generation import vllm_generation

    # The keys of equal runs are equal, because vLLM's cache of compiled code depends on the configuration.
    key = str(next(_engines))
    before = {name: getattr(vllm_generation, name) for name in ("LLM", "VLLMClient") if hasattr(vllm_generation, name)}
    if processes_logits and "LLM" in before:  # which TRL lacks if vLLM is not installed
        config = {CONFIG_KEY: {"key": key}}
        options = {"logits_processors": [PROCESSOR], "additional_config": config, "max_logprobs": -1}
        vllm_generation.LLM = functools.partial(before["LLM"], **options)
    if weights_folder is not None:
        from .servers import client_of

        vllm_generation.VLLMClient = functools.partial(client_of, weights_folder)
    try:
        yield key
    finally:
        for name, value in before.items():
            setattr(vllm_generation, name, value)


class VLLMRequests:
    """Sends the rows of a batch to the vLLM of a trainer together with its prompts."""

    def __init__(self, generation: Any, key: str, top_k: int, vocab_size: int):
        self._generation, self._key = generation, key
        self._turns: TurnsConstraint | None = None
        self.asked: list[Turn | None] | None = None  # one per request; None: it is not sent
        self._answer: Any = None
        self._all_logprobs = False
        generation.generate = functools.partial(self._keep_answer, generation.generate)
        if top_k:
            generation.logprobs = min(_LOGPROBS_PER_TOP_K * top_k + _MORE_LOGPROBS, vocab_size)
            self._all_logprobs = generation.logprobs == vocab_size
        if generation.mode == "colocate":
            generation.llm.generate = functools.partial(self._colocated, generation.llm.generate)
        elif generation.accelerator.is_main_process:
            client = generation.vllm_client
            client.generate = functools.partial(self._served, client.generate)

    def sample_under(self, constraint: Constraint | None, tokenizer: Any, task: Task | None) -> None:
        """Give the constraint to a colocated engine, or check that the server has the same one."""
        if constraint is None:
            return
        if isinstance(constraint, TurnsConstraint):
            self._turns, constraint = constraint, OneTurn(tokenizer, constraint)
        if self._generation.mode == "colocate":
            from .processor import COLOCATED, Sampling

            COLOCATED[self._key] = Sampling(constraint, tokenizer.eos_token_id)
            weakref.finalize(self, lambda key: COLOCATED.pop(key, None), self._key)
            return
        problem = None
        if self._generation.accelerator.is_main_process:
            length = self._generation.max_completion_length
            problems = ((name, server_problem(one, task, tokenizer, length)) for name, one in self._clients().items())
            problem = next((f"{name}{text}" for name, text in problems if text is not None), None)
        problem = broadcast_object_list([problem])[0]
        if problem is not None:
            raise ServerError(f"constrain=True with a vLLM server: {problem}")

    def _clients(self) -> dict[str, Any]:
        """The clients of several servers, each under what a message begins with; that of a single one under ""."""
        client = self._generation.vllm_client
        return {f"{server.url}: ": server.client for server in getattr(client, "servers", [])} or {"": client}

    def mask_milliseconds(self) -> float | None:
        """Return the time per pass that the CPU spent on masks since the last call. A server logs it instead."""
        if self._generation.mode != "colocate":
            return None
        from .processor import COST

        return COST.take() * 1e3

    def sample(
        self, rows: Sequence[Mapping[str, Any]] | None, generate: Callable[[], Any], completions_per_request: int
    ) -> Sampled:
        """Call TRL's `generate`, whose prompts have these rows; where there are several turns, once for each turn."""
        most = self._generation.max_completion_length
        prompts: list[list[int]] = []
        if self._turns is None or rows is None:
            asked = None if rows is None else self.first_turns(rows)
            return self._sample(asked, generate, completions_per_request)

        def send(turns: list[Turn | None]) -> Sampled:
            if not prompts:
                sampled = self._sample(turns, generate, completions_per_request)
                prompts.extend(self._answer[0])
                return sampled
            longer = [[*ids, *(() if turn is None else turn.ids)] for ids, turn in zip(prompts, turns, strict=True)]
            again = functools.partial(self._generation.generate, longer, None, 1)  # those of a group differ now
            return self._sample(turns, again, 1)

        return converse(self._turns, rows, most, send, lambda is_open: any(gather_object([is_open])))

    def first_turns(self, rows: Sequence[Mapping[str, Any]]) -> list[Turn | None]:
        """Return what the first requests of these rows sample."""
        return [Turn(row_text(row), [], self._generation.max_completion_length) for row in rows]

    def _sample(
        self, asked: Sequence[Turn | None] | None, generate: Callable[[], Any], completions_per_request: int
    ) -> Sampled:
        self.asked = None if asked is None else self._of_requests(list(asked), completions_per_request)
        generate()
        _, completion_ids, logps, token_ids = self._answer
        if self._generation.logprobs == 0:
            return Sampled(completion_ids, [[each[0] for each in row] for row in logps], None)
        most = None if self._all_logprobs else self._generation.logprobs
        return _with_kept(completion_ids, logps, token_ids, most)

    def _of_requests(self, asked: list[Turn | None], completions_per_request: int) -> list[Turn | None]:
        """Return the turns of the requests that this process sends."""
        if self._generation.mode == "server":  # the main process sends all prompts, each once per group
            asked = gather_object(asked)[::completions_per_request]
        elif self._generation.tensor_parallel_size > 1:  # each process of the group sends all prompts of the group
            gathered: list[Any] = [None] * self._generation.tensor_parallel_size
            torch.distributed.all_gather_object(gathered, asked, group=self._generation.tp_group)
            asked = [turn for part in gathered for turn in part]
        return asked

    def _keep_answer(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._answer = generate(*args, **kwargs)
        return self._answer

    def _colocated(self, generate: Callable[..., Any], prompts: Any, sampling_params: Any, **kwargs: Any) -> Any:
        if self.asked is None:
            return generate(prompts, sampling_params=sampling_params, **kwargs)
        sent, each = [], []
        for turn, prompt in zip(self.asked, prompts, strict=True):
            if turn is not None:
                params = sampling_params.clone()
                params.extra_args, params.max_tokens = {ROW: turn.row}, turn.most
                sent.append(prompt)
                each.append(params)
        answers = iter(generate(sent, sampling_params=each, **kwargs) if sent else [])
        return [_NOTHING if turn is None else next(answers) for turn in self.asked]

    def _served(
        self,
        generate: Callable[..., Any],
        prompts: Any,
        generation_kwargs: Any = None,
        asked: Sequence[Turn | None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One HTTP request per prompt, because the parameters of a request apply to all of its prompts. `asked` are
        those of these prompts, if they are not the ones of this rollout."""
        asked = self.asked if asked is None else asked
        if asked is None:
            return generate(prompts=prompts, generation_kwargs=generation_kwargs, **kwargs)

        alone, each = [], []  # the prompts that are sent, and the options of each
        for prompt, turn in zip(prompts, asked, strict=True):
            if turn is not None:
                own = {"max_tokens": turn.most, "vllm_xargs": {ROW: turn.row}}
                alone.append(prompt)
                each.append({"generation_kwargs": {**(generation_kwargs or {}), **own}})
        client = self._generation.vllm_client
        if hasattr(client, "servers"):
            answers = iter(client.generate_each(alone, each, **kwargs))
        else:
            with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
                send = functools.partial(generate, **kwargs)
                answers = iter(list(pool.map(lambda prompt, more: send(prompts=[prompt], **more), alone, each)))
        names = ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids")
        return joined([{name: [[]] for name in names} if turn is None else next(answers) for turn in asked])


def server_problem(client: Any, task: Task | None, tokenizer: Any, length: int) -> str | None:
    """Return why a server does not sample as this run needs it, and the way out; None if it does."""
    if task is None:
        return "a server takes the constraint of a task, but this one was given in Python; set vllm_mode='colocate'"
    info = client.get_server_info()
    served = ServedTask.from_config(info.get("additional_config"))
    if served is None:
        return "the server samples without a constraint; start it with `trl-grpo-tasks serve`"
    difference = served.difference(ServedTask.of(task, tokenizer))
    if difference is not None:
        return f"{difference}; start the server with the task, options and model of this run"
    config = info.get("model_config")
    mode, context = (
        config.get(name) if isinstance(config, Mapping) else None for name in ("logprobs_mode", "max_model_len")
    )
    if mode != "processed_logprobs":
        return f"the server's --logprobs-mode is {mode}; start it with `trl-grpo-tasks serve`"
    if not isinstance(context, int) or length >= context:
        return (
            f"max_completion_length={length} does not fit into the {context} tokens of the server's context; set a "
            "smaller one"
        )
    return None


def _with_kept(
    completion_ids: list[list[int]], logps: list[list[list[float]]], token_ids: list[list[list[int]]], most: int | None
) -> Sampled:
    """Read the kept tokens of each position from the returned log-probs: those of all others are -inf.

    `most` log-probs are returned per position; None means all.
    """
    kept: list[list[list[int]]] = []
    own: list[list[float]] = []
    for ids, row_logps, row_tokens in zip(completion_ids, logps, token_ids, strict=True):
        kept.append([])
        own.append([])
        for token, values, tokens in zip(ids, row_logps, row_tokens, strict=True):
            by_token = {t: value for t, value in zip(tokens, values, strict=True) if value is not None}
            allowed = [t for t, value in by_token.items() if value > _LEAST_LOGP]
            if most is not None and len(allowed) >= most:
                raise RuntimeError(
                    f"vLLM kept at least {len(allowed)} tokens at one position, more than it returns: too many logits "
                    "are equal to the top_k-th; set a larger top_k"
                )
            kept[-1].append(allowed)
            own[-1].append(by_token[token])
    return Sampled(completion_ids, own, kept)
