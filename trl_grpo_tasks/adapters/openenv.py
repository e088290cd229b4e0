"""`--task openenv:URL`: an environment of a running OpenEnv server, if its episodes have one step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..task import NoAnswerError, Row, Score, Task, option
from . import RewardOptions, RewardTask, is_held_out, library_version

ROWS = 200  # of a split, if no number is asked for
MISSES = 200  # prompts of the other split in a row, after which there are no more for this one


@dataclass(frozen=True)
class OpenEnvOptions(RewardOptions):
    """Options of the tasks of OpenEnv servers."""

    prompt_field: str | None = option(
        None, "Field of the observation that holds the prompt. Default: prompt, or the only one with text."
    )
    action_field: str | None = option(
        None, "Field of the action that gets the completion. Default: the only one of type string."
    )
    gold_field: str | None = option(
        None, "Field of the observation that holds a right answer; for check and cold starts."
    )


class OpenEnvTask(RewardTask):
    """An environment whose `reset(seed)` gives a prompt and whose first `step` ends the episode with a reward."""

    weights = {"reward": 1.0}
    defaults = {"max_completion_length": 512}
    Options = OpenEnvOptions
    url: str

    def __init__(self, options: Any = None):
        super().__init__(options)
        self._action = self.options.action_field or self._only_text_field()
        with self._session() as env:
            first, again = (env.reset(seed=0).observation for _ in range(2))
            if self._prompt(first) != self._prompt(again):
                raise ValueError(f"{self.url}: two resets with seed 0 give different prompts; the environment must "
                                 "make its episode from the seed")  # fmt: skip
            if self.options.gold_field is not None and self.options.gold_field not in first:
                raise self._unknown_field("gold_field", "right answer", first)
            if not env.step({self._action: ""}).done:
                raise ValueError(
                    f"{self.url}: the episode goes on after the first step; only environments with one step can be "
                    "trained here, so use TRL's environment_factory for this one"
                )

    def _session(self) -> Any:
        from openenv.core.generic_client import GenericEnvClient

        return GenericEnvClient(base_url=self.url).sync()

    def _only_text_field(self) -> str:
        import httpx

        try:
            answer = httpx.get(f"{self.url}/schema", timeout=30, follow_redirects=True).raise_for_status()
            fields = answer.json()["action"].get("properties", {})
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
            raise ValueError(f"{self.url} does not answer as an OpenEnv server: {error}") from error
        texts = [name for name, field in fields.items() if field.get("type") == "string"]
        if len(texts) != 1:
            raise ValueError(f"{self.url}: name the field of the action that gets the completion with --action_field; "
                             f"fields are: {', '.join(fields)}")  # fmt: skip
        return texts[0]

    def _prompt(self, observation: Mapping[str, Any]) -> Any:
        texts = [name for name, value in observation.items() if isinstance(value, str)]
        likely = ["prompt"] if "prompt" in observation else texts
        name = self.options.prompt_field or (likely[0] if len(likely) == 1 else "")
        if name not in observation:
            raise self._unknown_field("prompt_field", "prompt", observation)
        value = observation[name]
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    def _unknown_field(self, option: str, holds: str, observation: Mapping[str, Any]) -> ValueError:
        return ValueError(f"{self.url}: name the field of the observation that holds the {holds} with --{option}; "
                          f"fields are: {', '.join(observation)}")  # fmt: skip

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        episode, misses = seed * 1_000_000, 0
        with self._session() as env:
            while len(rows) < (size or ROWS) and misses < MISSES:
                observation = env.reset(seed=episode).observation
                prompt = self._prompt(observation)
                misses += 1
                if is_held_out(str(prompt)) == (split == "test"):
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
        return self.score_of({"reward": float(result.reward)}) if result.done and result.reward is not None else None

    def gold(self, row: Row) -> str:
        if not isinstance(row["gold"], str):
            raise NoAnswerError(
                f"{self.url} gives no right answer to this row; if an observation holds one, name it with --gold_field"
            )
        return row["gold"]


def task_class(url: str) -> type[Task]:
    """The task of the OpenEnv server at this address."""
    if not re.match(r"https?://[^/]", url):
        raise ValueError(
            f"openenv:{url}: write the address of a running server, such as openenv:http://localhost:8000"
        )
    described = {
        "url": url.rstrip("/"),
        "name": "openenv_" + re.sub(r"\W+", "_", url.partition("://")[2]).strip("_"),
        "version": f"1+{library_version('openenv', 'openenv.core')}",
        "description": f"Single-step episodes of the OpenEnv server at {url}.",
    }
    return type("OpenEnvTask", (OpenEnvTask,), described)
