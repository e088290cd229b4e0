"""Tasks of OpenEnv, against servers of the package itself; skipped where openenv is not installed."""

import json

import pytest

from tests.support.server_process import start
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.task import NoAnswerError

pytest.importorskip("openenv.core", reason="needs openenv: pip install 'trl_grpo_tasks[openenv]'")

SERVER = """
import random, sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Answer(Action):
    text: str

class Sum(Observation):
    prompt: str = ""
    answer: str = ""

class SumEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    steps = int(sys.argv[2])

    def reset(self, seed=None, episode_id=None, **more):
        rng = random.Random(seed if sys.argv[3] == "seeded" else None)
        self.a, self.b, self.done = rng.randint(0, 99), rng.randint(0, 99), 0
        return Sum(prompt=f"{self.a} + {self.b} =", answer=str(self.a + self.b))

    def step(self, action, timeout_s=None, **more):
        self.done += 1
        return Sum(reward=float(action.text == str(self.a + self.b)), done=self.done >= self.steps)

    @property
    def state(self):
        return State(step_count=self.done)

app = create_fastapi_app(SumEnvironment, Answer, Sum, max_concurrent_envs=8)
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    file = tmp_path_factory.mktemp("server") / "server.py"
    file.write_text(SERVER)
    started = []

    def serve(steps="1", seeded="seeded"):
        process, url = start(file, steps, seeded)
        started.append(process)
        return f"openenv:{url}"

    yield serve
    for process in started:
        process.terminate()
        process.wait()


def test_environment_keeps_the_contract(serve):
    spec = serve()
    task = get_task(spec, {"gold_field": "answer"})
    check_task(task, size=4)
    rows = task.dataset("train", 4, 1)
    for row in rows:
        a, b = (int(word) for word in row["prompt"][0]["content"].split() if word.isdigit())
        assert task.score(row, str(a + b)).total == 1 and task.score(row, str(a + b + 1)).total == 0
    with RewardExecutor(task, 2, 120) as executor:
        outcomes = executor.submit([json.dumps(row) for row in rows], [task.gold(rows[0]), *"abc"]).result()
    assert [outcome.score.success for outcome in outcomes] == [True, False, False, False]
    nowhere = get_task(spec)
    nowhere.url = "http://127.0.0.1:9"
    assert nowhere.score(rows[0], "1") is None
    with pytest.raises(NoAnswerError, match="gold_field"):
        nowhere.gold(rows[0] | {"gold": None})
    with pytest.raises(ValueError, match=r"--prompt_field; fields are: .*prompt"):
        get_task(spec, {"prompt_field": "question"})
    with pytest.raises(ValueError, match=r"right answer with --gold_field; fields are: .*answer"):
        get_task(spec, {"gold_field": "anwser"})


@pytest.mark.parametrize(
    ("steps", "seeded", "words"),
    [("3", "seeded", "environments with one step"), ("1", "unseeded", "different prompts")],
)
def test_other_environments_are_refused(serve, steps, seeded, words):
    with pytest.raises(ValueError, match=words):
        get_task(serve(steps, seeded))


@pytest.mark.parametrize("url", ["localhost:8000", "http://127.0.0.1:9"])
def test_wrong_addresses_are_refused(url):
    with pytest.raises(ValueError, match=r"address of a running server|does not answer"):
        get_task(f"openenv:{url}")
