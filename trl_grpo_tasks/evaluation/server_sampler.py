"""Sampling of completions from a vLLM server, under the task's constraint if `trl-grpo-tasks serve` started it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import httpx
import torch

from ..constraints.base import Constraint
from ..constraints.filters import SamplingFilters
from ..constraints.turns import TurnsConstraint
from ..serving import CONCURRENT_REQUESTS, ServerError
from ..serving.conversations import Sampled, Turn, converse, row_text
from ..serving.generation import server_problem
from ..serving.served_task import ROW
from ..task import Row, Task
from .sampler import prompt_ids, scored_text
from .samples import Completion

T = TypeVar("T")
ANSWER_SECONDS = 3600.0  # limit for one request; a batch of long completions on a busy server takes minutes


class ServerSampler:
    """Samples completions from the vLLM server at `url`, with the interface of `CompletionSampler`.

    ServerError if the server cannot be reached or, if a `constraint` is given, does not sample under that of `task`
    for this tokenizer. `model` is what the server calls its model; its weights cannot be checked.
    """

    no_editor_reason = "a vLLM server samples the completions"

    def __init__(
        self,
        url: str,
        task: Task,
        tokenizer: Any,
        temperature: float,
        max_length: int,
        filters: SamplingFilters,
        constraint: Constraint | None,
    ):
        if not url.startswith(("http://", "https://")):
            raise ServerError(f"--vllm_server_url {url}: give an address such as http://127.0.0.1:8000")
        self._url, self._tokenizer, self._constraint = url.rstrip("/"), tokenizer, constraint
        self._most, self._params = max_length, {"temperature": temperature}
        self._params |= {"top_k": filters.top_k, "top_p": filters.top_p, "min_p": filters.min_p}
        self.model = self._ask("/v1/models", lambda reply: str(reply["data"][0]["id"]))
        if constraint is not None and (problem := server_problem(self, task, tokenizer, max_length)) is not None:
            raise ServerError(f"--vllm_server_url {url}: {problem}")

    def get_server_info(self) -> dict[str, Any]:
        """Return vLLM's configuration, which only servers with development endpoints tell."""
        return self._ask("/server_info?config_format=json", lambda reply: dict(reply["vllm_config"]))

    def sample(self, rows: Sequence[Row], editor: None = None) -> list[Completion]:
        """Sample one completion per row."""
        prompts = [prompt_ids(self._tokenizer, [row["prompt"]])[0] for row in rows]
        if isinstance(constraint := self._constraint, TurnsConstraint):

            def send(turns: list[Turn | None]) -> Sampled:
                drawn = [ids for ids, _ in self._draw(prompts, turns)]
                return Sampled(drawn, [[] for _ in drawn], None)

            conversations = converse(constraint, rows, self._most, send).completion_ids
            eos = self._tokenizer.eos_token_id
            texts = [constraint.text_of(row, ids) for row, ids in zip(rows, conversations, strict=True)]
            return [Completion(text, len(ids), ids[-1] != eos) for text, ids in zip(texts, conversations, strict=True)]
        completions = []
        drawn = self._draw(prompts, [Turn(row_text(row), [], self._most) for row in rows])
        for row, prompt, (ids, is_cut_off) in zip(rows, prompts, drawn, strict=True):
            text = scored_text(self._tokenizer, row["prompt"], prompt, ids)
            completions.append(Completion(text, len(ids), is_cut_off))
        return completions

    def _draw(self, prompts: Sequence[list[int]], turns: Sequence[Turn | None]) -> list[tuple[list[int], bool]]:
        """Sample what follows each prompt and the tokens of its turn, and return whether it was cut off. Equal
        neighbours are one request; nothing is sampled for None."""
        pairs = groupby(zip(prompts, turns, strict=True))
        requests = [(*pair, len(list(equal)), int(torch.randint(2**31, ()))) for pair, equal in pairs]

        def send(request: tuple[list[int], Turn | None, int, int]) -> list[tuple[list[int], bool]]:
            prompt, turn, count, seed = request
            if turn is None:
                return [([], False)] * count
            # Without randomness all completions are equal, and vLLM refuses to make several.
            number = count if self._params["temperature"] else 1
            body = {"model": self.model, "prompt": [[*prompt, *turn.ids]], "n": number, "seed": seed,
                    "return_token_ids": True, "max_tokens": turn.most, **self._params}  # fmt: skip
            if self._constraint is not None:
                body["vllm_xargs"] = {ROW: turn.row}
            return self._ask("/v1/completions", partial(self._read_choices, number), body) * (count // number)

        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            return [one for drawn in pool.map(send, requests) for one in drawn]

    def _read_choices(self, number: int, reply: Any) -> list[tuple[list[int], bool]]:
        """Read the tokens of each completion, and whether it was cut off; ValueError if there are not `number`."""
        drawn = [(list(one["token_ids"]), one.get("finish_reason") == "length") for one in reply["choices"]]
        if len(drawn) != number:
            raise ValueError(f"{len(drawn)} completions instead of {number}")
        known = range(len(self._tokenizer))
        if not all(isinstance(token, int) and token in known for tokens, _ in drawn for token in tokens):
            raise ValueError("token_ids must be tokens of the model's tokenizer")
        return drawn

    def _ask(self, path: str, read: Callable[[Any], T], body: Mapping[str, Any] | None = None) -> T:
        """Return what `read` finds in the JSON reply of the server."""
        method, url = "GET" if body is None else "POST", self._url + path
        try:
            answer = httpx.request(method, url, json=body, timeout=ANSWER_SECONDS, follow_redirects=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(
                f"the vLLM server at {self._url} does not answer ({error}); start one with `trl-grpo-tasks serve`"
            ) from error
        if answer.is_success:
            try:
                return read(answer.json())
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                raise ServerError(
                    f"the reply of {self._url}{path} is not that of a vLLM server ({type(error).__name__}: {error}): "
                    f"{answer.text[:200]!r}; start one with `trl-grpo-tasks serve`"
                ) from error
        if answer.status_code == 404 and path.startswith("/server_info"):
            raise ServerError(
                f"the vLLM server at {self._url} does not tell its configuration, so its constraint cannot be "
                "checked; start it with `trl-grpo-tasks serve`, or give --constrain false"
            )
        raise ServerError(
            f"the vLLM server at {self._url} answered with status {answer.status_code}: {answer.text[:500]}"
        )
