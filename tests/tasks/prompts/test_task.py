"""The prompts task: scores from several rewards, user-defined rewards, constraint and picture."""

import importlib
import json
import math
import pickle
import sys
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.prompt_files import SCHEMA, from_rows, make, only_row
from tests.support.training import config
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.commands.check import GARBAGE, check_task
from trl_grpo_tasks.models.loading import prepare_model
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.tasks.prompts import data
from trl_grpo_tasks.tasks.prompts.reward import REWARDS

# ---- the score


def test_row_weights_scale_components_and_flags_set_weights(tmp_path):
    rows = [
        {"prompt": "a", "answer": "1", "target_length": 2, "rewards": {"numeric": 2.0, "length": 0.5}},
        {"prompt": "b", "answer": "1", "target_length": 2},
    ]
    task = from_rows(tmp_path, rows, rewards=["numeric=3", "length=0.2"], test_fraction=0)
    assert task.weights == {"numeric": 3.0, "length": 0.2}
    a, b = sorted(task.dataset("train", None, 0), key=lambda row: row["prompt"][0]["content"])
    score = task.score(a, "it's 1")
    assert score.components == {"numeric": 2.0, "length": 0.5}
    assert score.total == pytest.approx(3 * 2 + 0.2 * 0.5)
    assert score.info["raw"] == {"numeric": 1.0, "length": 1.0}
    assert task.score(b, "it's 1").total == pytest.approx(3.2)


def test_success_depends_on_rewards_that_check(tmp_path):
    row = {"prompt": "a", "answer": "1", "target_length": 9, "keywords": ["one"], "rewards": ["numeric", "length"]}
    task = from_rows(tmp_path, [row, {**row, "prompt": "b", "rewards": ["length", "keywords"]}], test_fraction=0)
    checked, ruled = sorted(task.dataset("train", None, 0), key=lambda row: row["prompt"][0]["content"])
    assert task.score(checked, "1").success  # too short, but correct
    assert not task.score(ruled, "one").success
    assert task.score(ruled, "one " * 9).success
    assert task.score(ruled, "").reason == "the answer is empty"


def test_with_only_a_reward_model_nothing_succeeds(tmp_path):
    task = from_rows(tmp_path, ["a"], reward_model="some/model", rewards=["reward_model=0.5"])
    assert task.judges() == {"reward_model": "some/model"}
    assert task.weights == {"reward_model": 0.5}
    score = task.score(only_row(task), "anything")
    assert (score.total, score.success, score.reason) == (0, False, "no reward of this row checks the answer")


def test_rows_that_went_through_arrow_score_the_same(tmp_path):
    from datasets import Dataset

    rows = make(generator="schema").dataset("train", 12, 0) + make().dataset("train", 12, 0)
    task, plain = make(generator="schema"), make()
    columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
    for before, after in zip(rows, Dataset.from_dict(columns), strict=True):
        judge = task if before["kind"] == "schema" else plain
        assert judge.score(after, judge.gold(after)) == judge.score(before, judge.gold(before))
        assert judge.score(after, judge.gold(after)).success


@settings(max_examples=100)
@given(st.one_of(st.text(), st.text("0123456789/.,-+eE#= \\boxed{}answer:"), st.text('{}[]":,tfn01 `json\n<>ab')))
@example("\ud800")
@example("#### " * 1000)
@example("answer" * 1000)
def test_score_never_raises(everything, text):
    task, row = everything
    score = task.score(row, text)
    assert score is not None and not (score.success and not score.valid)
    assert isinstance(task.render(row, text), str)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A row that asks for every reward that needs neither a sandbox, a model nor an extra."""
    row = {
        "prompt": "p", "answer": "4", "schema": SCHEMA, "fields": {"a": 1}, "pattern": "[a-z]+", "tags": ["a", "b"],
        "target_length": 3, "keywords": ["x"], "forbidden": ["y"],
        "rewards": [name for name in REWARDS if name not in ("tests", "reward_model", "judge")],
    }  # fmt: skip
    task = from_rows(tmp_path_factory.mktemp("everything"), [row])
    return task, only_row(task)


@pytest.mark.parametrize("text", [*GARBAGE, "1," * 500_000, "`" * 1_000_000, "<a>" * 300_000, "\\frac{" * 100_000])
def test_scoring_is_quick_whatever_the_text(everything, text):
    task, row = everything
    started = time.thread_time()
    task.score(row, text)
    assert time.thread_time() - started < 2


# ---- a user's own reward


def own_reward(row, completion):
    return len(completion) / 10, f"{len(completion)} characters"


def none_reward(row, completion):
    return None


def raising_reward(row, completion):
    raise KeyError("oh")


def one_argument(row):
    return 1.0


def test_own_reward(tmp_path):
    names = [f"{__name__}:own_reward", f"{__name__}.own_reward"]
    task, dotted = (from_rows(tmp_path, ["p"], rewards=[f"{name}=2"]) for name in names)
    score = task.score(only_row(task), "12345")
    assert (score.components, score.total, score.success) == ({names[0]: 0.5}, 1.0, False)
    assert "5 characters" in score.reason and task.score(only_row(task), "1234567890").success
    assert pickle.loads(pickle.dumps(task)).score(only_row(task), "12345") == score
    assert dotted.score(only_row(dotted), "12345").components == {names[1]: 0.5}
    none, raising = (from_rows(tmp_path, ["p"], rewards=[f"{__name__}:{n}_reward"]) for n in ("none", "raising"))
    assert none.score(only_row(none), "x") is None
    with pytest.raises(KeyError):  # for the executor to report
        raising.score(only_row(raising), "x")
    for name, message in (
        ("no_such_module:f", "module 'no_such_module' cannot be imported"),
        (f"{__name__}:no_such", "must define a function 'no_such', found nothing"),
        (f"{__name__}:one_argument", r"callable as f\(row, completion\)"),
    ):
        with pytest.raises(ValueError, match=message):
            from_rows(tmp_path, ["p"], rewards=[name])


# ---- constraint and picture


def test_constraint_by_schema_and_by_pattern(tmp_path):
    rows = [
        {"prompt": "a", "schema": json.loads(SCHEMA), "rewards": ["schema"], "gold": '{"a": 12}'},
        {"prompt": "b", "pattern": "[A-Z]{2}-[0-9]+", "rewards": ["regex"], "gold": "AB-12"},
        {"prompt": "c", "answer": "7", "rewards": ["numeric"]},
    ]
    check_task(from_rows(tmp_path, rows, test_fraction=0.3))
    task = from_rows(tmp_path, rows, test_fraction=0)
    constraint = task.constraint(make_tokenizer(task.tiny().tokens, 512))
    a, b, c = sorted(task.dataset("train", None, 0), key=lambda row: row["prompt"][0]["content"])
    assert constraint.start(c) is None
    for row in (a, b):
        with pytest.raises(ValueError, match="not allowed"):
            constraint.start(row).accept(constraint.vocabulary.bytes_of.index(b"z"))
    assert make().constraint(None) is None


def test_keywords_that_the_constraint_does_not_enforce_are_named_once(tmp_path, caplog):
    unique = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    rows = [{"prompt": str(n), "schema": {**unique, "minItems": n}, "rewards": ["schema"]} for n in range(3)]
    task = from_rows(tmp_path, rows)
    task.constraint(make_tokenizer(task.tiny().tokens, 512))
    (warning,) = [record.getMessage() for record in caplog.records if "does not enforce" in record.getMessage()]
    assert warning.endswith("only the reward notices: uniqueItems (at $)")


def test_render_escapes_and_lays_out():
    task = make(generator="schema")
    row = task.dataset("train", 1, 0)[0]
    picture = task.render(row, task.gold(row))
    assert "success" in picture and "{\n  " in picture
    hostile = task.render(row, "<script>alert(1)</script>\ud800" + "x" * 100_000)
    assert "<script" not in hostile and "no success, not valid" in hostile and len(hostile) < 20_000
    hostile.encode()


def test_programs_json_and_xml_are_exported(tmp_path):
    rows = [
        {"prompt": "code", "tests": ["assert f(2) == 4"], "rewards": ["tests"]},
        {"prompt": "json", "schema": SCHEMA, "rewards": ["schema"]},
        {"prompt": "text", "answer": "1", "rewards": ["numeric"]},
        {"prompt": "xml", "gold": "<a>1</a>", "rewards": ["xml"]},
    ]
    task = from_rows(tmp_path, rows, test_fraction=0, allow_code_execution=True)
    code, data_row, text, xml = sorted(task.dataset("train", None, 0), key=lambda row: row["prompt"][0]["content"])
    files = task.exports(code, "Here:\n```python\ndef f(x):\n    return x + x\n```\nDone.")
    assert set(files) == {"sample.html", "answer.py"} and files["answer.py"] == "def f(x):\n    return x + x\n"
    given = {"b": [1.5, None, "\u00e9<"], "a": {}}
    files = task.exports(data_row, f"```json\n{json.dumps(given)}\n```")
    assert set(files) == {"sample.html", "answer.json"} and json.loads(files["answer.json"]) == given
    assert json.loads(task.exports(data_row, 'It is {"a": 1}, I think.')["answer.json"]) == {"a": 1}
    assert task.exports(xml, "Well: <a>1</a>")["answer.xml"] == "<a>1</a>\n"
    assert task.score(xml, "<a>1</a>").success and not task.score(xml, "<a>1<a>").valid
    for row, answer in ((data_row, "no JSON"), (text, "1"), (xml, "none")):
        assert set(task.exports(row, answer)) == {"sample.html"}


# ---- rewards over token ids

TOKEN_REWARDS = """
seen = []

def short(completion_ids):
    seen.append([list(ids) for ids in completion_ids])
    return [1 / (1 + len(ids)) for ids in completion_ids]

def columns(completion_ids, row, completions, prompts, **others):
    assert {"trainer_state", "log_metric"} <= others.keys()
    return [len(one["answer"]) + len(text[0]["content"]) for one, text in zip(row, completions)]

def fails(completion_ids, **columns):
    raise RuntimeError("no such token")

def too_few(completion_ids):
    return [None]
"""


@pytest.fixture
def token_rewards(tmp_path, monkeypatch):
    """A module of rewards over token ids, in the current folder."""
    (tmp_path / "token_rewards.py").write_text(TOKEN_REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "token_rewards", raising=False)
    return importlib.import_module("token_rewards")


def test_rewards_over_token_ids_get_the_tokens_that_were_sampled(tmp_path, token_rewards):
    rows = [{"prompt": f"{i} + 1 =", "answer": i + 1} for i in range(8)]
    task = from_rows(tmp_path, rows, rewards=["numeric", "token_rewards:short=2", "token_rewards:columns"])
    model = prepare_model("tiny", task, tmp_path / "model")
    trainer = TaskGRPOTrainer(model, args=config(tmp_path / "run", max_steps=1, max_completion_length=6), task=task)
    trainer.train()
    record = trainer.latest_rollout
    assert token_rewards.seen == [record.completion_ids]
    names = trainer.reward_func_names
    short, columns = (names.index(f"token_rewards:{name}") for name in ("short", "columns"))
    oracle = [1 / (1 + len(ids)) for ids in record.completion_ids]
    assert record.rewards_N_F[:, short].tolist() == pytest.approx(oracle)
    read = [len(row["answer"]) + len(text) for row, text in zip(record.rows, record.completions, strict=True)]
    assert record.rewards_N_F[:, columns].tolist() == pytest.approx(read)
    numeric = record.rewards_N_F[:, names.index("numeric")].tolist()
    totals = [a + 2 * b + c for a, b, c in zip(numeric, oracle, read, strict=True)]
    (line,) = [line for line in trainer.state.log_history if "reward" in line]
    assert line["reward"] == pytest.approx(sum(totals) / len(totals), abs=1e-5)


def test_rewards_over_token_ids_that_fail_leave_completions_out(tmp_path, token_rewards, caplog):
    task = from_rows(tmp_path, [{"prompt": "a", "answer": 1}], rewards=["numeric", "token_rewards:fails"])
    row = only_row(task)
    other = {**row, "rewards": {"numeric": 1.0}}
    reward = task.judges()["token_rewards:fails"]
    assert reward(completion_ids=[[1], [2]], row=[json.dumps(row), json.dumps(other)]) == [math.inf, None]
    assert "RuntimeError: no such token" in caplog.text
    score = task.score(row, "1")
    assert score.success and score.components == {"numeric": 1.0}, "evaluations leave it out"
    short = from_rows(tmp_path, [{"prompt": "a"}], rewards=["token_rewards:too_few"])
    assert short.score(only_row(short), "1").reason == "no reward of this row checks the answer"
    with pytest.raises(ValueError, match="'token_rewards:too_few' returned 1 numbers for 2 completions"):
        short.judges()["token_rewards:too_few"](completion_ids=[[1], [2]], row=[json.dumps(only_row(short))] * 2)


# ---- the example file


def test_the_example_file_is_complete(tmp_path, monkeypatch):
    """Each answer succeeds and `check` finds nothing; a file of this name in the current folder comes first."""
    monkeypatch.chdir(tmp_path)
    task = get_task("prompts", {"prompts_file": "example_prompts.json"})
    rows = [row for split in ("train", "test") for row in task.dataset(split, None, 0)]
    assert len(rows) == len(json.loads(data.EXAMPLE.read_text())["prompts"]) == 16
    assert all(task.score(row, task.gold(row)).success for row in rows)
    check_task(task)
    (tmp_path / "example_prompts.json").write_text(json.dumps({"prompts": ["mine", "mine too"]}))
    mine = get_task("prompts", {"prompts_file": "example_prompts.json", "rewards": ["json"]})
    assert len(mine.dataset("train", None, 0) + mine.dataset("test", None, 0)) == 2
