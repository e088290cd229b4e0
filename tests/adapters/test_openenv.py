"""Tasks of OpenEnv, against servers of the package itself; skipped where openenv is not installed."""

import json
from contextlib import closing

import pytest

from tests.support.server_process import start
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.constraints.turns import join_turns, split_turns
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.task import NoAnswerError

pytest.importorskip("openenv.core", reason="needs openenv: pip install 'trl_grpo_tasks[openenv]'")

SERVER = """
import os, random, sys
import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Answer(Action):
    text: str

class Sum(Observation):
    prompt: str = ""
    answer: str = ""
    hint: str = ""
    actions: list[str] = []

class SumEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    steps, seeded = "1", "seeded"  # steps "none": one, without a reward

    def reset(self, seed=None, episode_id=None, **more):
        rng = random.Random(None if self.seeded == "unseeded" else seed)
        self.a, self.b, self.done = rng.randint(0, 99), rng.randint(0, 99), 0
        right = str(self.a + self.b)
        return Sum(prompt=f"{self.a} + {self.b} =", answer=right, actions=["0", right, right])

    def step(self, action, timeout_s=None, **more):
        if action.text == "refuse me" or self.steps == "refuse":
            raise ValueError("no such action")
        if action.text == "die":
            os._exit(0)
        if self.steps == "none":
            return Sum(done=True)
        self.done += 1
        is_right, value = action.text == str(self.a + self.b), int(action.text) if action.text.isdecimal() else 0
        hint = random.choice("abcdefgh") * 9 if self.seeded == "noisy" else ""
        hint = hint or ("higher" if value < self.a + self.b else "lower or equal")
        return Sum(reward=is_right / (1 if self.steps == "1" else 2), done=self.done >= int(self.steps), hint=hint)

    @property
    def state(self):
        return State(step_count=self.done)

served = FastAPI()

@served.get("/health")
def health():
    return "ok"

for name in sys.argv[2:]:
    steps, seeded, sessions = name.split("-")
    one = type("Environment", (SumEnvironment,), {"steps": steps, "seeded": seeded})
    served.mount(f"/{name}", create_fastapi_app(one, Answer, Sum, max_concurrent_envs=int(sessions)))
uvicorn.run(served, port=int(sys.argv[1]), log_level="error")
"""


KINDS = ("1-seeded-8", "3-seeded-8", "3-seeded-1", "3-noisy-8", "1-unseeded-8", "none-seeded-8", "refuse-seeded-8")


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Start a server of these kinds: steps, seeds and sessions."""
    file = tmp_path_factory.mktemp("server") / "server.py"
    file.write_text(SERVER)
    processes = []

    def started(*kinds):
        process, url = start(file, *kinds)
        processes.append(process)
        return f"openenv:{url}"

    yield started
    for process in processes:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def serve(started):
    url = started(*KINDS)
    return lambda steps="1", seeded="seeded", sessions="8": f"{url}/{steps}-{seeded}-{sessions}"


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


def test_a_single_step_is_a_task_of_one_turn(serve):
    """It has no conversations, so that it can be trained as other tasks are."""
    task = get_task(serve())
    assert task.turns == 1 and task.constraint(None) is None
    row = task.dataset("test", 1, 0)[0]
    a, b = (int(word) for word in row["prompt"][0]["content"].split() if word.isdigit())
    assert task.score(row, str(a + b)).info == {"turns": 1, "turn_rewards": [1.0]}
    assert get_task(serve("none")).score(row, "1") is None


@pytest.mark.parametrize(
    ("steps", "seeded", "words"),
    [("1", "unseeded", "different prompts"), ("3", "noisy", "get different answers, from action 1 on"),
     ("refuse", "seeded", "give the most steps of an episode with --turns")],
)  # fmt: skip
def test_other_environments_are_refused(serve, steps, seeded, words):
    with pytest.raises(ValueError, match=words):
        get_task(serve(steps, seeded), {"observation_field": "hint"})


def outcome(a, b, actions):
    """(reward, what is told after each action) of an episode of the server of three steps, written down by hand."""
    told = ["higher" if int(text) < a + b else "lower or equal" for text in actions]
    return 0.5 * sum(text == str(a + b) for text in actions), told


def test_an_episode_of_several_steps_is_a_conversation(serve):
    task = get_task(serve("3"), {"observation_field": "hint", "success_at": 0.5})
    assert task.turns == 8 and get_task(task.spec, {"turns": 2}).turns == 2
    check_task(task, size=2)
    for row in task.dataset("train", 3, 1):
        a, b = (int(word) for word in row["prompt"][0]["content"].split() if word.isdigit())
        for actions in (["0", str(a + b), "0"], ["500", "0", "7"], [str(a + b)] * 3):
            reward, told = outcome(a, b, actions)
            text = task.conversation(row, actions)
            assert split_turns(text) == (actions, told[:-1])
            score = task.score(row, text)
            assert (score.total, score.success) == (reward, reward >= 0.5) and score.info["turns"] == 3
            assert task.reply(row, text) is None
            assert [task.reply(row, task.conversation(row, actions[:n])) for n in (1, 2)] == told[:2]
        assert task.score(row, "0").reason == "the conversation did not end"
    short = get_task(task.spec, {"turns": 2, "observation_field": "hint"})
    assert short.score(row, task.conversation(row, actions)).total == 1.0, "the third action is left out"


def test_a_refused_action_ends_the_episode(serve):
    task = get_task(serve("3"), {"observation_field": "hint"})
    row = task.dataset("train", 1, 1)[0]
    score = task.score(row, join_turns(["7", "refuse me", "7"], ["higher", "higher"]))
    assert (score.valid, score.success, score.total, score.info["turns"]) == (False, False, 0.0, 2)
    assert "refused the action" in score.reason and "no such action" in score.reason
    assert task.reply(row, join_turns(["7", "refuse me"], ["higher"])) is None
    with pytest.raises(ValueError, match=r"text after a step with --observation_field; fields are: .*hint"):
        get_task(task.spec, {"observation_field": "hnit"})
    with pytest.raises(ValueError, match="--turns 0 must be at least 1"):
        get_task(task.spec, {"turns": 0})


def test_gold_actions_are_played(serve):
    task = get_task(serve("3"), {"observation_field": "hint", "gold_field": "actions"})
    row = task.dataset("train", 1, 1)[0]
    assert task.score(row, task.gold(row)).success and len(split_turns(task.gold(row))[0]) == 3


def test_a_server_that_dies_leaves_completions_unscored(started):
    task = get_task(f"{started('3-seeded-8')}/3-seeded-8", {"observation_field": "hint"})
    row = task.dataset("train", 1, 1)[0]
    assert task.score(row, "7").total == 0
    assert task.score(row, join_turns(["7", "die"], ["higher"])) is None
    assert task.score(row, "7") is None and task.reply(row, "7") is None
    with RewardExecutor(task, 0) as executor:
        assert executor.submit([json.dumps(row)], ["7"]).result()[0].score is None


def test_a_server_with_one_session_is_shared(serve):
    """By this process and two workers, which build the same task; no session stays open."""
    task = get_task(serve("3", "seeded", "1"), {"observation_field": "hint"})
    row = task.dataset("train", 1, 1)[0]
    texts = [task.conversation(row, [str(n), "7", "7"]) for n in range(8)] + ["1", "2"]
    with RewardExecutor(task, 2, 120) as executor:
        outcomes = executor.submit([json.dumps(row)] * len(texts), texts).result()
    assert [o.score for o in outcomes] == [task.score(row, text) for text in texts]
    assert all(o.score is not None for o in outcomes)
    client, _ = task.session(0)
    with closing(client), pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl_grpo_tasks.adapters.openenv.WAIT", 0.2)
        assert task.score(row, "1") is None


@pytest.mark.parametrize("url", ["localhost:8000", "http://127.0.0.1:9"])
def test_wrong_addresses_are_refused(url):
    with pytest.raises(ValueError, match=r"address of a running server|does not answer"):
        get_task(f"openenv:{url}")
