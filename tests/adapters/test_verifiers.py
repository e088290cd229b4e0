"""Tasks of verifiers, with tasksets written with its own classes; skipped where verifiers is not installed."""

import asyncio
import json

import pytest

from trl_grpo_tasks.adapters.verifiers_turn import messages_of, scored_trace
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.task import NoAnswerError

pytest.importorskip("verifiers.v1", reason="needs verifiers: pip install 'trl_grpo_tasks[verifiers]'")

TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace) -> float:
        return float(trace.last_reply == trace.task.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, task, trace) -> dict[str, float]:
        return {"brief": 1.0 / (1 + len(trace.last_reply))}

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_reply)

class SumConfig(vf.TasksetConfig):
    most: int = 12

class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for a in range(self.config.most):
            for b in range(5):
                data = SumData(prompt=f"{a} + {b} =", system_prompt="Add.", answer=str(a + b))
                yield SumTask(data, self.config.task)

class TwoAgents(vf.Env[vf.EnvConfig]):
    async def run(self, task, agents):
        pass

__all__ = ["SumTaskset"]
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return f"verifiers:{name}"

    return write


def test_taskset_keeps_the_contract(write):
    task = get_task(write("sums_a", TASKSET), {"gold_field": "answer"})
    check_task(task)
    assert task.weights == {"correct": 1.0, "brief": 0.25}
    row = task.dataset("train", 1, 0)[0]
    assert row["prompt"][0] == {"role": "system", "content": "Add."} and row["prompt"][1]["content"].endswith("=")
    everything = task.dataset("train", None, 0) + task.dataset("test", None, 0)
    assert sorted(row["index"] for row in everything) == list(range(60))


def test_scores_are_those_of_verifiers(write):
    task = get_task(write("sums_b", TASKSET))
    for row in task.dataset("train", 5, 0):
        theirs = task._tasks[row["index"]]
        for answer in (theirs.data.answer, "12345", " x "):
            right, length = answer == theirs.data.answer, len(answer.strip())
            score = task.score(row, answer)
            assert score.total == pytest.approx(right + 0.25 / (1 + length))
            assert score.info == {"length": length} and score.success == right
            trace = scored_trace(theirs, messages_of(theirs), answer)
            assert score.total == pytest.approx(trace.reward)

    async def in_a_notebook():
        return task.score(row, "12345")

    assert asyncio.run(in_a_notebook()) == task.score(row, "12345")


def test_configuration_is_the_tasksets(write):
    spec = write("sums_c", TASKSET)
    assert len(get_task(spec, {"taskset_config": '{"most": 2}'})._tasks) == 10
    for text, words in (("{", "taskset_config"), ('{"mots": 2}', "mots"), ("[]", "taskset_config")):
        with pytest.raises(ValueError, match=words):
            get_task(spec, {"taskset_config": text})


def test_workers_score_as_this_process(write):
    task = get_task(write("sums_d", TASKSET), {"gold_field": "answer"})
    rows = task.dataset("test", 2, 0)
    with RewardExecutor(task, 1, 120) as executor:
        outcomes = executor.submit([json.dumps(row) for row in rows], [task.gold(rows[0]), "no"]).result()
    assert [outcome.score.success for outcome in outcomes] == [True, False]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("vf.Task[SumData]):", "vf.Task[SumData]):\n    NEEDS_CONTAINER = True\n", "container"),
        ("correct(self, trace)", "correct(self, trace, runtime)", "a runtime for the reward correct"),
        ('prompt=f"{a} + {b} =", ', "", "opens the conversation"),
        ("range(5)", "range(0)", "no tasks"),
        ("float(trace.last_reply ==", "float(int(trace.last_reply) ==", "fails for an empty answer"),
        ('["SumTaskset"]', "[]", "exports no Taskset"),
        ('["SumTaskset"]', '["SumTaskset", "TwoAgents"]', "the turns of TwoAgents"),
    ],
)  # fmt: skip
def test_other_tasksets_are_refused(write, old, new, words):
    assert old in TASKSET
    with pytest.raises(ValueError, match=words):
        get_task(write(f"refused_{abs(hash(new))}", TASKSET.replace(old, new)))


def test_a_reward_that_raises_is_a_score_with_a_reason(write):
    text = TASKSET.replace(
        "return float(trace.last_reply ==", "return float(int(trace.last_reply or 0) == 1 or trace.last_reply =="
    )
    task = get_task(write("raises", text))
    score = task.score(task.dataset("train", 1, 0)[0], "not a number")
    assert not score.valid and "failed" in score.reason


def test_unknown_taskset_and_missing_gold_field(write):
    with pytest.raises(ValueError, match="no_such_taskset"):
        get_task("verifiers:no_such_taskset")
    task = get_task(write("sums_e", TASKSET))
    with pytest.raises(NoAnswerError, match="fields with text are: answer"):
        task.gold(task.dataset("train", 1, 0)[0])
    with pytest.raises(ValueError, match=r"--gold_field anwser.* fields with text are: answer"):
        get_task(task.spec, {"gold_field": "anwser"})
