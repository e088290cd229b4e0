"""`--task openenv:URL`: an environment of a running OpenEnv server, if its episodes have one step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from ..task import Row, Score, Task, option
from . import is_held_out, verdict

ROWS = 200  # of a split, if no number is asked for
MISSES = 200  # prompts of the other split in a row, after which there are no more for this one


@dataclass(frozen=True)
class OpenEnvOptions:
    """Options of the tasks of OpenEnv servers."""

    prompt_field: str | None = option(
        None, "Field of the observation that holds the prompt. Default: prompt, or the only one with text."
    )
    action_field: str | None = option(
        None, "Field of the action that gets the completion. Default: the only one of type string."
    )
    success_reward: float = option(1.0, "Reward from which on an answer counts as a success.")
    gold_field: str | None = option(
        None, "Field of the observation that holds a right answer; for check and cold starts."
    )


class OpenEnvTask(Task):
    """An environment whose `reset(seed)` gives a prompt and whose first `step` ends the episode with a reward."""

    weights = {"reward": 1.0}
    defaults = {"max_completion_length": 512}
    Options = OpenEnvOptions
    url: str

    def __init__(self, options: Any = None):
        super().__init__(options)
        self._action = self.options.action_field or self._only_text_field()
        with self._session() as env:
            prompts = [self._prompt(env.reset(seed=0).observation) for _ in range(2)]
            if prompts[0] != prompts[1]:
                raise ValueError(f"{self.url}: two resets with seed 0 give different prompts; the environment must "
                                 "make its episode from the seed")  # fmt: skip
            if not env.step({self._action: ""}).done:
                raise ValueError(
                    f"{self.url}: the episode goes on after the first step; only environments with one step can be "
                    "trained here, so use TRL's environment_factory for this one"
                )

    @contextmanager
    def _session(self) -> Iterator[Any]:
        from openenv.core.generic_client import GenericEnvClient

        with GenericEnvClient(base_url=self.url).sync() as env:
            yield env

    def _only_text_field(self) -> str:
        import requests

        try:
            answer = requests.get(f"{self.url}/schema", timeout=30)
            answer.raise_for_status()
            fields = answer.json()["action"].get("properties", {})
        except (requests.RequestException, ValueError, KeyError) as error:
            raise ValueError(f"{self.url} does not answer as an OpenEnv server: {error}") from error
        texts = [name for name, field in fields.items() if field.get("type") == "string"]
        if len(texts) != 1:
            raise ValueError(f"{self.url}: name the field of the action that gets the completion with --action_field; "
                             f"fields are: {', '.join(fields)}")  # fmt: skip
        return texts[0]

    def _prompt(self, observation: Mapping[str, Any]) -> Any:
        texts = [name for name, value in observation.items() if isinstance(value, str)]
        name = self.options.prompt_field or ("prompt" if "prompt" in observation else [*texts, ""][0])
        if name not in observation or (self.options.prompt_field is None and name != "prompt" and len(texts) > 1):
            raise ValueError(f"{self.url}: name the field of the observation that holds the prompt with "
                             f"--prompt_field; fields are: {', '.join(observation)}")  # fmt: skip
        value = observation[name]
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        episode, misses = seed * 1_000_000, 0
        with self._session() as env:
            while len(rows) < (size or ROWS) and misses < MISSES:
                observation = env.reset(seed=episode).observation
                prompt = self._prompt(observation)
                misses += 1
                if is_held_out(str(prompt), 2) == (split == "test"):
                    rows.append(
                        {"prompt": prompt, "episode": episode, "gold": observation.get(self.options.gold_field)}
                    )
                    misses = 0
                episode += 1
        return rows

    def score(self, row: Row, completion: str) -> Score | None:
        try:
            with self._session() as env:
                env.reset(seed=row["episode"])
                try:
                    result = env.step({self._action: completion})
                except RuntimeError as error:  # the server's answer to this action is an error
                    return self.make_score(
                        {"reward": 0.0}, False, False, f"the server refused the action: {error}"[:300]
                    )
        except (OSError, RuntimeError):
            return None  # the server cannot be reached, or has no room for another session
        if not result.done or result.reward is None or not math.isfinite(result.reward):
            return None
        value = float(result.reward)
        success, reason = verdict(value, self.options.success_reward)
        return self.make_score({"reward": value}, True, success, reason)

    def gold(self, row: Row) -> str:
        if not isinstance(row["gold"], str):
            raise ValueError(
                f"{self.url} gives no right answers; if an observation holds one, name it with --gold_field"
            )
        return row["gold"]

    def bad(self, row: Row) -> str:
        return ""


def task_class(url: str) -> type[Task]:
    """The task of the OpenEnv server at this address."""
    if not re.match(r"https?://[^/]", url):
        raise ValueError(
            f"openenv:{url}: write the address of a running server, such as openenv:http://localhost:8000"
        )
    try:
        import openenv.core  # noqa: F401
    except ImportError as error:
        raise ImportError("tasks of OpenEnv need its package: pip install 'trl_grpo_tasks[openenv]'") from error
    described = {
        "url": url.rstrip("/"),
        "name": "openenv_" + re.sub(r"\W+", "_", url.partition("://")[2]).strip("_"),
        "version": f"1+{version('openenv')}",
        "description": f"Single-step episodes of the OpenEnv server at {url}.",
    }
    return type("OpenEnvTask", (OpenEnvTask,), described)
