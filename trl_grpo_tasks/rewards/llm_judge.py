"""LLMJudge: an LLM judge behind a chat API, with a cache on disk, retries, limited concurrency and a budget.

The judge runs in threads of the process that trains or evaluates, beside the reward workers: waiting for a server
needs no CPU core, and cache, budget and key then live in one place. The reward executor asks it when completions are
submitted, so that requests overlap with scoring and with reference log-probs.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..task import Row, Score, printable
from .answer_file import AnswerFile
from .chat_api import ChatApi, ChatError
from .rubric import AnswerError, Rubric

logger = logging.getLogger(__name__)

LONGEST_WAIT = 60.0  # seconds between two attempts, whatever the server asks for
CHARACTERS_PER_TOKEN = 3  # to estimate the tokens of a server that does not count them; most texts have more


@dataclass(frozen=True)
class Question:
    """What a judge is asked about a row: the prompt, a reference answer, the rubric, and the weight of its value."""

    prompt: str
    rubric: Rubric
    weight: float = 1.0
    reference: str | None = None


@dataclass
class Usage:
    """What a judge has used since the start of the run, in this process."""

    requests: int = 0
    cache_hits: int = 0  # completions whose scores were known
    failures: int = 0  # completions that the judge could not score
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0

    @classmethod
    def sum(cls, usages: list[Usage]) -> Usage:
        return cls(**{one.name: sum(getattr(usage, one.name) for usage in usages) for one in fields(cls)})

    def __str__(self) -> str:
        return (
            f"LLM judge: {self.requests:,} requests, {self.cache_hits:,} answers from the cache, {self.failures:,} "
            f"failures, {self.tokens_in:,} tokens in, {self.tokens_out:,} out, cost {self.cost:.4g}"
        )


@dataclass(frozen=True)
class JudgeLimits:
    """How often, how much and for how long a judge may be asked. Prices are per million tokens."""

    attempts: int = 4
    concurrency: int = 8
    budget: float | None = None
    price_in: float = 0.0
    price_out: float = 0.0
    first_wait: float = 1.0  # seconds before the second attempt; doubled for each further one


@dataclass(frozen=True)
class _Answer:
    """The judge's scores by criterion and its reason; or None and why there are none."""

    scores: Mapping[str, float] | None
    reason: str


class Opinion:
    """What the judge says about one completion; `added_to` waits for it."""

    def __init__(self, name: str, question: Question, answer: Future[_Answer]):
        self._name, self._question, self._answer = name, question, answer

    def added_to(self, score: Score) -> tuple[Score | None, str]:
        """Return `score` with the judge's component, which its total lacks, and ""; or None and why the judge could
        not score."""
        answer = self._answer.result()
        if answer.scores is None:
            return None, answer.reason
        value = self._question.rubric.value(answer.scores)
        component = self._question.weight * value
        said = f"{self._name}: {answer.reason}" if value < 1 and answer.reason else ""
        added = replace(
            score,
            components=score.components | {self._name: component},
            reason="; ".join(filter(None, (score.reason, said))),
            info=score.info | {self._name: dict(answer.scores)},
        )
        return added, ""


class LLMJudge:
    """Asks a chat API to grade completions.

    `question_of(row)` returns the question, or None if the row is not judged. An answer that is not what was asked for
    is asked for again, and so is one that failed for a reason that may pass. A completion without an answer is not
    scored; it does not count as 0. The scores of each criterion are cached in the file `cache`, if one is given.
    """

    def __init__(
        self,
        name: str,
        api: ChatApi,
        question_of: Callable[[Row], Question | None],
        limits: JudgeLimits | None = None,
        cache: str | Path | None = None,
    ):
        self.name, self.api, self.limits = name, api, limits or JudgeLimits()
        self._question_of = question_of
        self._cache = None if cache is None else AnswerFile(Path(cache).expanduser())
        self.usage = Usage()
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads: ThreadPoolExecutor | None = None
        self._in_progress: dict[str, Future[_Answer]] = {}
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        running = ("_lock", "_closed", "_threads", "_in_progress")
        return {name: value for name, value in self.__dict__.items() if name not in running}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def ask(self, row: Row, completion: str) -> Opinion | None:
        """Start to ask about a completion and return without waiting; None if the row is not judged."""
        question = self._question_of(row)
        if question is None:
            return None
        if not completion.strip():  # nothing to grade; the request is saved
            worst = dict.fromkeys(question.rubric.criteria, question.rubric.scale[0])
            return Opinion(self.name, question, _done(_Answer(worst, "the answer is empty")))
        messages = question.rubric.messages(question.prompt, completion, question.reference)
        key = self._key(messages)
        with self._lock:
            answer = self._in_progress.get(key)
            if answer is None and self._cache is not None and (known := self._cache.get(key)) is not None:
                answer = _done(_Answer(*known))
            if answer is not None:
                self.usage.cache_hits += 1
            else:
                if self._threads is None:
                    self._closed.clear()
                    self._threads = ThreadPoolExecutor(self.limits.concurrency, thread_name_prefix="judge")
                answer = self._threads.submit(self._answer, key, messages, question.rubric)
                self._in_progress[key] = answer
        return Opinion(self.name, question, answer)

    def close(self) -> None:
        """Drop questions that have not been asked, and end waits between attempts. `ask` starts again."""
        self._closed.set()
        with self._lock:
            threads, self._threads, self._in_progress = self._threads, None, {}
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.usage)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.usage = Usage(**state)

    def _key(self, messages: list[dict[str, str]]) -> str:
        # The rubric, the prompt and the completion are in the messages.
        parts = [self.api.base_url, self.api.model, self.api.parameters, messages]
        return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    # ---- in a thread of the judge

    def _answer(self, key: str, messages: list[dict[str, str]], rubric: Rubric) -> _Answer:
        try:
            answer = self._ask_until_answered(messages, rubric)
        except Exception as error:  # noqa: BLE001 - a bug or a broken environment must not end the run
            answer = _Answer(None, f"the judge failed: {type(error).__name__}: {error}")
        with self._lock:
            if answer.scores is None:
                self.usage.failures += 1
            elif self._cache is not None:
                self._cache.put(key, answer.scores, answer.reason)
            self._in_progress.pop(key, None)
        return answer

    def _ask_until_answered(self, messages: list[dict[str, str]], rubric: Rubric) -> _Answer:
        asked, problem = messages, ""
        for attempt in range(1, self.limits.attempts + 1):
            if self._is_budget_spent():
                return _Answer(None, f"the judge's budget of {self.limits.budget:g} is spent")
            wait = 0.0
            try:
                reply = self.api.complete(asked)
            except ChatError as error:
                with self._lock:
                    self.usage.requests += 1
                problem = str(error)
                if not error.retryable:
                    return _Answer(None, f"the judge refused the request: {problem}")
                # Jitter spreads the retries of requests that failed together.
                backoff = self.limits.first_wait * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
                wait = backoff if error.retry_after is None else error.retry_after
            else:
                self._count(asked, reply)
                try:
                    scores, reason = rubric.read(reply.text)
                    # The reply has been cleaned as text; JSON can spell the key with escapes.
                    return _Answer(scores, printable(self.api.clean(reason))[:300])
                except AnswerError as error:
                    problem = self.api.clean(f"its answer was rejected: {error}")
                    correction = f"Your reply was rejected: {error}. Reply with the JSON object only, as described."
                    asked = [
                        *messages,
                        {"role": "assistant", "content": reply.text[:2000]},
                        {"role": "user", "content": correction},
                    ]
            if attempt < self.limits.attempts and self._closed.wait(min(wait, LONGEST_WAIT)):
                return _Answer(None, "the run ended before the judge answered")
        return _Answer(None, f"the judge gave no score in {self.limits.attempts} attempts; {problem}")

    def _count(self, asked: list[dict[str, str]], reply: Any) -> None:
        tokens = [reply.tokens_in, reply.tokens_out]
        if None in tokens:
            self._warn_once("the judge's server reports no tokens; they are estimated from the length of the text")
            written = [sum(len(message["content"]) for message in asked), len(reply.text)]
            pairs = zip(tokens, written, strict=True)
            tokens = [math.ceil(size / CHARACTERS_PER_TOKEN) if n is None else n for n, size in pairs]
        with self._lock:
            usage, limits = self.usage, self.limits
            usage.requests += 1
            usage.tokens_in += tokens[0]
            usage.tokens_out += tokens[1]
            usage.cost += (tokens[0] * limits.price_in + tokens[1] * limits.price_out) / 1e6

    def _is_budget_spent(self) -> bool:
        budget = self.limits.budget
        # Processes share the budget equally, because they do not know what the others spend.
        if budget is None or self.usage.cost < budget / int(os.environ.get("WORLD_SIZE", 1)):
            return False
        self._warn_once(
            f"the judge's budget of {budget:g} is spent; it is not asked any more, and completions that it has not "
            "graded before are not scored. Raise --judge_budget to continue"
        )
        return True

    def _warn_once(self, message: str) -> None:
        with self._lock:
            is_new = message not in self._warned
            self._warned.add(message)
        if is_new:
            logger.warning(message)


def _done(answer: _Answer) -> Future[_Answer]:
    future: Future[_Answer] = Future()
    future.set_result(answer)
    return future
