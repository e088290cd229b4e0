"""A server of OpenEnv, exported from trl_grpo_tasks with `trl-grpo-tasks export --to openenv`.

Run `python server.py [PORT]`. An episode has one step: `reset(seed=N)` gives a prompt, `step` scores the completion.
"""

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from trl_grpo_tasks.registry import get_task

SPEC = "SPEC"
OPTIONS: dict[str, Any] = {}

# A task that is a file travels beside this one.
TASK = get_task(str(Path(__file__).parent / SPEC) if SPEC.endswith(".py") else SPEC, OPTIONS)
SESSIONS = 64
BATCH = 32  # rows that are made at once: a task with levels alternates between them


class Answer(Action):
    completion: str


class Question(Observation):
    prompt: str | list[dict[str, str]] = ""


@lru_cache
def rows_of(split: str, seed: int) -> list[dict[str, Any]]:
    return TASK.dataset(split, BATCH, seed)


class ExportedEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, split: str = "train", **more: Any
    ) -> Question:
        """Start an episode with the row of this split that the seed chooses."""
        batch, place = divmod(seed or 0, BATCH)
        rows = rows_of(split, batch)
        self._row = rows[place % len(rows)]
        self._state = State(episode_id=episode_id)
        return Question(prompt=self._row["prompt"])

    def step(self, action: Answer, timeout_s: float | None = None, **more: Any) -> Question:
        """Score the completion and end the episode. A reward of None: it could not be scored."""
        score = TASK.score(self._row, action.completion)
        self._state.step_count += 1
        if score is None:
            return Question(done=True)
        told = {"components": score.components, "valid": score.valid, "success": score.success, "reason": score.reason}
        return Question(done=True, reward=score.total, metadata=told)

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(ExportedEnvironment, Answer, Question, max_concurrent_envs=SESSIONS)

if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=int((*sys.argv[1:], "8000")[0]))
