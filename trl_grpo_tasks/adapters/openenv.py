"""`--task openenv:URL`: an environment of a running OpenEnv server. An episode is a conversation, a step is a turn."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ..rewards.environment import Environment, Step
from ..task import NoAnswerError, Row, Score, Task, option
from . import RewardEnvironmentTask, RewardOptions, is_held_out, library_version

ROWS = 200  # of a split, if no number is asked for
MISSES = 200  # prompts of the other split in a row, after which there are no more for this one
TURNS = 8  # of an environment of several steps
TRIED = ("", "1", "a", "yes", "{}")  # actions, until one is accepted, which shows how episodes go
NO_ROOM = "CAPACITY_REACHED"  # in errors of a server whose sessions are all in use
WAIT = 20.0  # seconds, after which there is none


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
        None, "Field of the observation that holds a right answer, or a list of actions; for check and cold starts."
    )
    observation_field: str | None = option(
        None, "Field of the observation that the model is told after a step. Default: that of the prompt."
    )
    turns: int | None = option(
        None, f"The most steps of an episode. Default: 1 if the first step ends the episode, otherwise {TURNS}."
    )


class OpenEnvSession(Environment):
    """An episode in a session of its own, which ends with the conversation."""

    def __init__(self, task: OpenEnvTask):
        self._task = task

    def start(self, row: Row) -> str:
        self._client, _ = self._task.session(row["episode"])
        return ""

    def step(self, action: str) -> Step:
        try:
            result = self._client.step({self._task.action_field: action})
        except RuntimeError as error:  # the server's answer to this action is an error
            if NO_ROOM in str(error):  # the client had lost its session
                raise
            return Step(done=True, valid=False, reason=f"the server refused the action: {error}"[:300])
        reward = math.nan if result.done and result.reward is None else result.reward or 0.0
        return Step(self._task.told(result.observation), float(reward), bool(result.done))

    def close(self) -> None:
        self._client.close()


class OpenEnvTask(RewardEnvironmentTask):
    """An environment whose `reset(seed)` gives a prompt and whose steps give rewards.

    Servers have few sessions, often a single one. So none is kept: each score plays its episode from the start.
    """

    defaults = {"max_completion_length": 512}
    most_kept = 0
    Options = OpenEnvOptions
    url: str

    def __init__(self, options: Any = None):
        super().__init__(options)
        if self.options.turns is not None and self.options.turns < 1:
            raise ValueError(f"--turns {self.options.turns} must be at least 1")
        self.action_field = self.options.action_field or self._only_text_field()
        client, first = self.session(0)
        with closing(client):
            again = client.reset(seed=0).observation
        if self._prompt(first) != self._prompt(again):
            raise ValueError(f"{self.url}: two resets with seed 0 give different prompts; the environment must "
                             "make its episode from the seed")  # fmt: skip
        for name, holds in (("gold_field", "right answer"), ("observation_field", "text after a step")):
            if (given := getattr(self.options, name)) is not None and given not in first:
                raise self._unknown_field(name, holds, first)
        self._told_field = self.options.observation_field or self._prompt_field(first)
        row = {"episode": 0}
        answers = ((text, self.play(row, [text])[0]) for text in TRIED)
        accepted, step = next(((text, step) for text, step in answers if step.valid), ("", None))
        if self.options.turns is None and step is None:
            tried = ", ".join(map(repr, TRIED))
            raise ValueError(f"{self.url} refuses the actions {tried}, so that it is not known whether its episodes "
                             "have one step; give the most steps of an episode with --turns")  # fmt: skip
        self.turns = self.options.turns or (1 if step is not None and step.done else TURNS)
        self.check_repeats(row, [accepted] * self.turns)

    def session(self, episode: int) -> tuple[Any, Mapping[str, Any]]:
        """Return a client with a session of its own, which must be closed, and the first observation of an episode."""
        from openenv.core.generic_client import GenericEnvClient

        deadline = time.monotonic() + WAIT
        while True:
            client = GenericEnvClient(base_url=self.url).sync()
            try:
                return client, client.reset(seed=episode).observation
            except BaseException as error:
                client.close()
                if NO_ROOM not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def environment(self) -> OpenEnvSession:
        return OpenEnvSession(self)

    def told(self, observation: Mapping[str, Any]) -> str:
        """Return what the model is told of the observation after a step."""
        value = observation.get(self._told_field) or ""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

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

    def _prompt_field(self, observation: Mapping[str, Any]) -> str:
        texts = [name for name, value in observation.items() if isinstance(value, str)]
        likely = ["prompt"] if "prompt" in observation else texts
        return self.options.prompt_field or (likely[0] if len(likely) == 1 else "")

    def _prompt(self, observation: Mapping[str, Any]) -> Any:
        name = self._prompt_field(observation)
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
        client, _ = self.session(episode)
        with closing(client):
            while len(rows) < (size or ROWS) and misses < MISSES:
                observation = client.reset(seed=episode).observation
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
            return super().score(row, completion)
        except Exception as error:
            if isinstance(error, OSError | RuntimeError) or type(error).__module__.startswith("websockets."):
                return None  # the server cannot be reached, or has no room for another session
            raise

    def gold(self, row: Row) -> str:
        gold = row["gold"]
        if isinstance(gold, list) and gold:
            return self.conversation(row, [str(action) for action in gold])
        if not isinstance(gold, str):
            raise NoAnswerError(
                f"{self.url} gives no right answer to this row; if an observation holds one, name it with --gold_field"
            )
        return gold


def task_class(url: str) -> type[Task]:
    """The task of the OpenEnv server at this address."""
    if not re.match(r"https?://[^/]", url):
        raise ValueError(
            f"openenv:{url}: write the address of a running server, such as openenv:http://localhost:8000"
        )
    described = {
        "url": url.rstrip("/"),
        "name": "openenv_" + re.sub(r"\W+", "_", url.partition("://")[2]).strip("_"),
        "version": f"2+{library_version('openenv', 'openenv.core')}",
        "description": f"Episodes of the OpenEnv server at {url}.",
    }
    return type("OpenEnvTask", (OpenEnvTask,), described)
