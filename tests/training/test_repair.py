"""Repair over several turns: exact gradients, scores of the last turn, options that are refused, and resumed runs."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest

from tests.support.enumerated import assert_exact_policy_gradient, every_completion
from tests.support.exhaustive import exhaustive_but
from tests.support.paths import ROOT
from tests.support.toy import ToyTask
from tests.support.toy_fill import FillTask
from tests.support.toy_repair import AdvisingToy
from tests.support.training import toy_trainer
from tests.training.test_environment import assert_same_with_workers
from trl_grpo_tasks import redact
from trl_grpo_tasks.constraints.turns import join_turns, split_turns
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.rewards.environment import TurnsTask
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.rewards.repair import (
    LONGEST_REASON,
    NO_REASON,
    RepairTask,
    shown_reason,
    with_repair,
    without_answer,
)
from trl_grpo_tasks.task import Task
from trl_grpo_tasks.training.cold_start import gold_dataset

ON = {"repair_turns": 2, "rollout": "fast", "max_completion_length": 24, "constrain": True}
ROW = {"prompt": "a1x", "letter": "a", "level": "1"}


def repaired(turns=3, discount=0.5, inner=None, constrain=True):
    return RepairTask(inner or AdvisingToy(), turns, discount, constrain)


# ---- the gradient


def test_the_policy_gradient_is_that_of_the_expected_reward(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, AdvisingToy(), **ON)
    constraint, task = trainer.generation.constraint, trainer.task
    completions = every_completion(constraint, ROW)
    assert sum(len(one) == 1 for _, sets in completions for one in sets) > len(completions), "feedback is forced"
    rewards = [task.score(ROW, constraint.text_of(ROW, ids)).total for ids, _ in completions]
    assert_exact_policy_gradient(trainer, ROW, completions, rewards)


# ---- training


def test_training_repairs_and_reports_it(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, AdvisingToy(), **ON, max_steps=2, gamma=0.9, own_successes=8,
                          num_generations=8, per_device_train_batch_size=16)  # fmt: skip
    trainer.train()
    record, constraint = trainer.latest_rollout, trainer.generation.constraint
    scores = [outcome.score for outcome in record.outcomes]
    assert {score.info["turns"] for score in scores} == {1, 2}  # rows that succeed at once are beside others
    columns = record.rows, record.completion_ids, record.completions, record.last_turns, scores
    for row, ids, text, start, score in zip(*columns, strict=True):
        assert text == constraint.text_of(row, ids) and trainer.task.score(row, text) == score
        assert (start > 0) == (score.info["turns"] > 1)
        assert set(trainer._tokenizer.decode(ids[start:], skip_special_tokens=True)) <= set("abcd")
    stored = [success for kept in trainer.extras["own_successes"].state.state_dict()["requests"] for success in kept]
    assert stored
    for success in stored:  # what is imitated is the last turn, after the others
        assert trainer._tokenizer.decode(success["completion_ids"], skip_special_tokens=True) == success["answer"]
    logged = trainer.state.log_history[1]
    assert logged["constraint/forced_fraction"] > 0.3
    for name in ("turns", "repaired"):
        assert logged[f"repair/{name}"] == pytest.approx(sum(score.info[name] for score in scores) / len(scores))


def test_workers_score_the_turns_of_a_rollout(tiny_path, tmp_path):
    """First turns that succeed are scored once."""
    trainer = assert_same_with_workers(tiny_path, tmp_path, AdvisingToy(), **ON)
    assert trainer.generation.constraint.asks is None and trainer.rewarding.rewards.executor.stats.hits > 0
    assert all(one.cached for one in trainer.latest_rollout.outcomes if one.score.info["turns"] == 1)


def test_one_turn_is_the_task_itself(tiny_path, tmp_path):
    task = ToyTask()
    assert with_repair(task, SimpleNamespace(repair_turns=1)) is task
    assert with_repair(repaired(inner=task), SimpleNamespace(repair_turns=1)) is task
    assert toy_trainer(tiny_path, tmp_path, task, repair_turns=1, constrain=True).task is task


def test_what_it_does_not_define_is_that_of_the_task():
    """Except what several turns have no use for."""
    unused = {"policy", "thought_markers", "editor", "editors", "redundant_editors", "feedback", "relabel", "judges",
              "llm_judge", "user_options", "spec"}  # fmt: skip
    task = repaired(inner=get_task("prompts", {"generator": "arithmetic"}))
    public = {name for name in dir(Task) if not name.startswith("_")}
    names = public - unused - set(vars(RepairTask)) - set(vars(TurnsTask))
    assert {"gold", "row_of", "defines", "tools"} <= names
    for name in names - {"defaults", "facts"}:  # which it extends
        assert getattr(task, name) == getattr(task.inner, name), name


def test_tasks_and_lengths_that_cannot_work_are_refused(tiny_path, tmp_path):
    for turns, discount in ((1, 0.9), (5, 0.9), (2, 0.0)):
        with pytest.raises(ValueError, match="is not possible; turns are from 2 to 4"):
            repaired(turns, discount)
    with pytest.raises(ValueError, match="fills all gaps at once"):
        repaired(inner=FillTask())
    judged = AdvisingToy()
    judged.judges = lambda: {"match": "a model"}
    with pytest.raises(ValueError, match="its judges would rate"):
        repaired(inner=judged)
    with pytest.raises(ValueError, match=r"max_completion_length=8 is too short for 2 turns.*at least to 9"):
        toy_trainer(tiny_path, tmp_path, AdvisingToy(), **ON | {"max_completion_length": 8})


# ---- the task


class Penalised(AdvisingToy):
    weights = {"match": 1.0, "short": -0.1, "malus": 1.0, "logged": 0.0}

    def score(self, row, completion):
        score = super().score(row, completion)
        components = {"match": score.components["match"], "short": 0.5, "malus": -1.0, "logged": -1.0}
        return self.make_score(components, score.valid, score.success, score.reason)


def test_penalties_are_not_discounted():
    """Otherwise a failure in a later turn would be worth more than one in the first."""
    task = repaired(turns=3, discount=0.5, inner=Penalised())
    first, second = task.score(ROW, "b"), task.score(ROW, join_turns(["b", "b"], ["no"]))
    assert second.components == first.components and second.total == first.total == pytest.approx(-1.05)
    good = task.score(ROW, join_turns(["b", "a"], ["no"]))
    assert good.components == {"match": 0.5, "short": 0.5, "malus": -1.0, "logged": -1.0}
    assert good.total == pytest.approx(0.5 - 0.05 - 1)


def test_the_score_is_that_of_the_last_turn_discounted():
    task, inner = repaired(), AdvisingToy()
    for turns in (["a"], ["b", "a"], ["b", "cc", "aa"], ["b", "c", "d"], ["b", "ab"]):
        score = task.score(ROW, join_turns(turns, ["1 x"] * (len(turns) - 1)))
        last = inner.score(ROW, turns[-1])
        assert score.total == pytest.approx(0.5 ** (len(turns) - 1) * last.total)
        assert score.info == {"turns": len(turns), "repaired": last.success and len(turns) > 1}
        assert (score.success, score.valid, score.reason) == (last.success, last.valid, last.reason)
        assert math.isclose(score.total, sum(task.weights[n] * v for n, v in score.components.items()))
    assert task.canonical(ROW, join_turns(["b", "a"], ["1 x"])) == "a"


def test_workers_score_conversations_of_a_task_in_a_file(tmp_path):
    file = shutil.copy(ROOT / "trl_grpo_tasks" / "commands" / "task_template.py", tmp_path / "my_task.py")
    for inner in (AdvisingToy(), get_task(str(file))):
        task = RepairTask(inner, 2, 0.9, None)
        row = inner.dataset("train", 1, 0)[0]
        text = join_turns([inner.bad(row), inner.gold(row)], ["x"])
        with RewardExecutor(task, workers=1, timeout=60) as executor:
            (outcome,) = executor.submit([json.dumps(row)], [text]).result()
        assert outcome.score == task.score(row, text) and outcome.score.info["repaired"]


def test_the_picture_shows_all_turns():
    task = repaired()
    assert task.render(ROW, "a") == AdvisingToy().render(ROW, "a")
    shown = task.render(ROW, join_turns(["<b>", "a"], ["1 & x"]))
    assert "&lt;b&gt;" in shown and "1 &amp; x" in shown and "<b>a</b>" in shown and shown.count("<li>") == 2
    task.inner.render = lambda row, text: b"PNG of " + text.encode()
    assert "data:image/png;base64,UE5HIG9mIGE=" in task.render(ROW, join_turns(["b", "a"], ["x"]))
    assert task.exports(ROW, join_turns(["b", "a"], ["x"])) == {"sample.png": b"PNG of a"}


def test_reasons_are_one_short_line_without_folders_and_secrets(monkeypatch):
    monkeypatch.setattr(redact, "_known", {"hf_secret_token"})
    assert shown_reason("line 1\n\tof \x1b /tmp/x1/y/answer.py: 3/4 of 1") == "line 1 of answer.py: 3/4 of 1"
    assert "hf_secret" not in shown_reason("token hf_secret_token is wrong")
    assert shown_reason("  \n") == NO_REASON
    assert len(shown_reason("word " * 200)) <= LONGEST_REASON
    assert shown_reason("word " * 200).endswith("...")


@pytest.mark.parametrize("pack", exhaustive_but(["prompts"], ["brick", "theory", "machine", "prompts"]))
def test_every_pack_repairs_a_bad_answer_and_does_not_tell_the_gold_one(pack):
    """With the tokens of the tiny model: a bad answer, its feedback, and the gold answer."""
    inner = get_task(pack)
    task = RepairTask(inner, 2, 0.9, False)
    spec = task.tiny()
    tokenizer = make_tokenizer(spec.tokens, spec.context)
    for row in inner.dataset("train", 2 if pack == "machine" else 6, 0):  # a film of a machine takes seconds
        gold, bad = inner.gold(row), "60" if pack == "prompts" else inner.bad(row)
        constraint, ids = task.constraint(tokenizer), []
        state = constraint.start(row)
        for text in (bad, gold):
            for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id, None]:
                feedback = () if state.question is None else constraint.answers([state.question])[0]
                forced = list(feedback) if token is None else [token]
                for one in forced:
                    state.accept(one)
                ids += forced
        assert state.finished
        text = constraint.text_of(row, ids)
        assert split_turns(text)[0] == [bad, gold]
        score = task.score(row, text)
        assert score.success and score.info["repaired"] and score.total == 0.9 * inner.score(row, gold).total
        assert gold.strip() not in task.reply(row, bad).split()
        assert task.render(row, text) and task.exports(row, text).keys() == inner.exports(row, gold).keys()


def test_reasons_do_not_tell_the_answer():
    inner = get_task("prompts", {"generator": "arithmetic"})
    task = RepairTask(inner, 2, 0.9, None)
    for row in inner.dataset("train", 40, 0):
        reason = inner.score(row, "-987").reason
        assert reason.endswith(f"; expected {inner.gold(row)}")
        assert task.reply(row, "-987") == "numeric: the final number is -987"
    assert without_answer("expected 'cba', not 'cbaa'", " cba\n") == "expected '...', not 'cbaa'"


def test_the_cold_start_shows_failures_in_prompts_only(tiny_path):
    tokenizer = load_tokenizer(tiny_path)
    rows = [{"prompt": f"a1x{'1' * n}", "letter": "a", "level": "1"} for n in range(40)]
    task = repaired(2)
    shown = gold_dataset(task, rows, tokenizer).to_list()
    assert shown == gold_dataset(task, rows, tokenizer).to_list()
    assert {example["completion"] for example in shown} == {"a"}
    longer = [(e["prompt"], row["prompt"]) for e, row in zip(shown, rows, strict=True) if e["prompt"] != row["prompt"]]
    assert 2 <= len(longer) <= 20
    assert all(prompt == f"{given}x<eos>\n1x\n{given}" for prompt, given in longer)
    # The tokens are those of a rollout, up to the bad answer.
    constraint = task.turns_under(tokenizer, None)
    (feedback,) = constraint.answers([(json.dumps(ROW), "x")])
    assert tokenizer("a1xx<eos>\n1x\na1x")["input_ids"][-len(feedback) :] == list(feedback)
    chat = {**ROW, "prompt": [{"role": "user", "content": "a1x"}]}
    examples = [task.demonstrations({**chat, "n": n}, tokenizer)[0][0] for n in range(20)]
    repairs = [prompt for prompt in examples if len(prompt) > 1]
    assert repairs and all([message["content"] for message in prompt] == ["a1x", "x", "1x"] for prompt in repairs)
