"""The prompts pack: rewards by hand-made and hostile cases, files good and bad, generators checked by other routes."""

import csv
import dataclasses
import json
import pickle
import re
import time
from string import Template

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trl_grpo_tasks.contract import GARBAGE, check_task
from trl_grpo_tasks.task import get_task
from trl_grpo_tasks.tasks.prompts import PromptsOptions, PromptsTask, data, generators, reward
from trl_grpo_tasks.tasks.prompts.reward import REWARDS, CannotJudgeError


def make(**options):
    return PromptsTask(PromptsOptions(**options))


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def from_rows(tmp_path, rows, **options):
    return make(prompts_file=write(tmp_path, "rows.json", rows), **options)


def only_row(task):
    (row,) = task.dataset("train", None, 0) + task.dataset("test", None, 0)
    return row


# ---- numeric and exact


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        ("The result is 42.", "42"),
        ("6 * 7 = 42", "42"),
        ("6 times 7\n#### 42", "42"),
        ("#### 42\nI used 2 steps", "42"),
        ("so \\boxed{42} after 3 steps", "42"),
        ("\\boxed{x = 42}", "42"),
        ("\\boxed{\\frac{3}{4}}", "3/4"),
        ("**Answer:** 42 (of 50)", "42"),
        ("The answer is $42$ for 3 people", "42"),
        ("answer: 17 + 25 = 42", "42"),
        ("<answer>42</answer> 7", "42"),
        ("1,234,567", "1234567"),
        ("$1,234.50", "1234.5"),
        ("-5", "-5"),
        ("\u22125", "-5"),
        ("x=-5", "-5"),
        ("12-5", "5"),
        ("6e3", "6000"),
        ("1.5E-3", "0.0015"),
        (".5", "1/2"),
        ("0.333333333", "1/3"),
        ("3 / 4", "0.75"),
        ("42kg", "42"),
        ("#### 7 then #### 42", "42"),
        ("first, the answer to it: 42", "42"),
        ("42", "Half of 84 is 42\n#### 42"),
        ("42.0", "42"),
    ],
)
def test_numeric_reads_the_final_number(text, answer):
    assert reward.numeric({"answer": answer}, text).value == 1.0


@pytest.mark.parametrize(
    ("text", "answer", "readable"),
    [
        ("", "42", False),
        ("forty-two", "42", False),
        ("42 or 43", "42", True),
        ("42.01", "42", True),
        ("1000001", "1000000", True),
        ("0.334", "1/3", True),
        ("1/0", "0", False),
        ("1e999999999", "0", False),
        ("9" * 100_000, "9", False),
        ("４２", "42", False),
        ("٤٢", "42", False),
        ("²", "2", False),
        ("eq42", "42", False),
        ("#### 43 (it is not 42)", "42", True),
        ("42 " + "x" * 5_000, "42", False),
        ("1,2,3", "123", True),
        ("nan", "0", False),
    ],
)
def test_numeric_is_not_fooled(text, answer, readable):
    verdict = reward.numeric({"answer": answer}, text)
    assert (verdict.value, verdict.readable) == (0.0, readable)
    assert verdict.reason


def test_numeric_tolerance():
    assert reward.numeric({"answer": "3.14159", "tolerance": 0.01}, "3.14").value == 1
    assert reward.numeric({"answer": "3.14159"}, "3.14").value == 0


def test_a_number_in_the_prompt_is_not_an_answer(tmp_path):
    task = from_rows(tmp_path, [{"prompt": "What is 42 + 0?", "answer": 42}], rewards=["numeric"])
    row = only_row(task)
    assert not task.score(row, "I would rather not say").success
    assert task.score(row, "42").success


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Paris", 1),
        ("  Paris \n", 1),
        ("It is far.\nAnswer: Paris.", 1),
        ("<answer>Paris</answer>", 1),
        ("\\boxed{Paris}", 1),
        ("#### **Paris**", 1),
        ("paris", 0),
        ("Paris or Rome", 0),
        ("Answer: x = Paris", 0),
        ("Answer: Paris\nAnswer: Rome", 0),
        ("Not Paris", 0),
        ("x" * 10_000 + "\nParis", 0),
    ],
)
def test_exact(text, value):
    assert reward.exact({"answer": "Paris"}, text).value == value


# ---- JSON

SCHEMA = json.dumps(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
)


@pytest.mark.parametrize(
    ("text", "json_value", "schema_value", "fields_value"),
    [
        ('{"a": 1}', 1, 1, 1),
        (' \n{"a": 1}\n', 1, 1, 1),
        ('Here it is:\n```json\n{"a": 1}\n```\nDone.', 1, 1, 1),
        ('```\n{"a": 1}\n```', 1, 1, 1),
        ('{"a": 1} I hope that helps', 0.5, 0.5, 0.5),
        ('{"a": 1}{"a": 2}', 0.5, 0.5, 0.5),
        ('{"a": 2}', 1, 1, 0),
        ('{"a": true}', 1, 0, 0),
        ('{"a": 1.0}', 1, 1, 1),
        ('{"a": "1"}', 1, 0, 0),
        ('{"a": 1, "b": 2}', 1, 0, 1),
        ("[1]", 1, 0, 0),
        ("null", 1, 0, 0),
        ('{"a": NaN}', 0, 0, 0),
        ('{"a": 1e999}', 0, 0, 0),
        ("{'a': 1}", 0, 0, 0),
        ('{"a": 1', 0, 0, 0),
        ("", 0, 0, 0),
        ("[" * 50_000, 0, 0, 0),
        ("[" * 900 + "]" * 900, 1, 0, 0),
        ('{"a": ' + "9" * 5_000 + "}", 0, 0, 0),
        ('{"a": 1}' + " " * 1_000_000, 0, 0, 0),
    ],
)
def test_json_schema_and_fields(text, json_value, schema_value, fields_value):
    row = {"schema": SCHEMA, "fields": '{"a": 1}'}
    assert reward.json_text(row, text).value == json_value
    assert reward.schema(row, text).value == schema_value
    assert reward.fields(row, text).value == fields_value


def test_fields_gives_partial_marks_and_compares_deeply():
    row = {"fields": '{"a": [1, {"b": true}], "c": "x", "d": 0.5}'}
    assert reward.fields(row, '{"a": [1, {"b": true}], "c": "y", "d": 0.5}').value == pytest.approx(2 / 3)
    assert reward.fields(row, '{"a": [1, {"b": 1}], "c": "x"}').value == pytest.approx(1 / 3)
    assert reward.fields(row, '{"a": [1, {"b": 1}], "c": "x"}').reason == "wrong or missing: a, d"


def test_a_schema_never_reaches_out():
    with pytest.raises(CannotJudgeError, match="not in it"):
        reward.schema({"schema": '{"$ref": "http://127.0.0.1:9/schema.json"}'}, "1")


# ---- form


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("\n<think>a</think>\n\n<answer>b</answer>\n", 1),
        ("<think>a</think> so <answer>b</answer>", 0.5),
        ("<answer>b</answer><think>a</think>", 0.5),
        ("<think>a<answer>b</answer></think>", 0.5),
        ("<think>a</think>", 0.25),
        ("<think></think><answer>b</answer>", 0.25),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.25),
        ("</think>a<think><answer>b</answer>", 0.25),
        ("nothing", 0),
    ],
)
def test_tags(text, value):
    assert reward.tags({"tags": ["think", "answer"]}, text).value == value


def test_regex_matches_all_of_the_text():
    row = {"pattern": r"[A-Z]{2}-\d+"}
    assert reward.pattern(row, " AB-12\n").value == 1
    assert reward.pattern(row, "see AB-12").value == 0
    assert reward.pattern(row, "A" * 20_000).reason == "longer than 10000 characters"


def test_a_regex_that_runs_away_is_stopped(monkeypatch):
    monkeypatch.setattr(reward, "REGEX_SECONDS", 0.2)
    started = time.perf_counter()
    with pytest.raises(CannotJudgeError, match="took longer"):
        reward.pattern({"pattern": "(a|aa)+b"}, "a" * 200 + "c")
    assert time.perf_counter() - started < 5


def test_what_cannot_be_judged_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(reward, "REGEX_SECONDS", 0.2)
    task = from_rows(tmp_path, [{"prompt": "p", "pattern": "(a|aa)+b", "rewards": ["regex"]}])
    assert task.score(only_row(task), "a" * 200 + "c") is None


@pytest.mark.parametrize(("words", "value"), [(10, 1), (11, 1), (9, 1), (15, 0.5), (5, 0.5), (20, 0), (0, 0), (99, 0)])
def test_length(words, value):
    assert reward.length({"target_length": 10}, "word " * words).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The Cat sat on a mat", 1),
        ("the cat", 2 / 3),
        ("category of mats", 1 / 3),
        ("cat mat dog", 2 / 3),
        ("dog", 0),
    ],
)
def test_keywords(text, value):
    row = {"keywords": ["cat", "mat"], "forbidden": ["dog"]}
    assert reward.keywords(row, text).value == pytest.approx(value)


def test_novelty():
    same, copy, other, blank = reward.novelty(["the cat sat down", "the  cat sat down", "a b c d e f", ""])
    assert (same, copy, other, blank) == (0, 0, 1, 0)
    assert reward.novelty(["alone"]) == [1.0]
    near, _ = reward.novelty(["the cat sat down", "the cat sat up"])
    assert 0 < near < 1


def test_novelty_is_a_group_component_scaled_by_the_row(tmp_path):
    row = {"prompt": "p", "answer": "1", "rewards": {"numeric": 1, "novelty": 0.5}}
    task = from_rows(tmp_path, [row, {"prompt": "q", "answer": "1", "rewards": "numeric"}], test_fraction=0)
    rows = {row["prompt"][0]["content"]: row for row in task.dataset("train", None, 0)}
    assert task.group_components([rows["p"]] * 2, ["abcdef", "uvwxyz"], [None] * 2) == {"novelty": [0.5, 0.5]}
    assert task.group_components([rows["q"]] * 2, ["abcdef", "uvwxyz"], [None] * 2) == {"novelty": [None, None]}
    assert "novelty" not in task.score(rows["p"], "1").components


# ---- code


def test_code_is_read_from_fences():
    assert reward.read_code("x = 1") == "x = 1"
    assert reward.read_code("Sure:\n```python\nx = 1\n```\nfor example\n```\nx\n```") == "x = 1\n"
    assert reward.read_code("```py\nx = 1") == "x = 1"
    assert reward.read_code("``` \n" + "`` " * 100_000)


CODE_ROW = {
    "prompt": "double it",
    "tests": ["assert f(2) == 4", "assert f(0) == 0", "assert f(-3) == -6"],
    "rewards": ["tests"],
    "gold": "def f(x):\n    return 2 * x",
}


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("def f(x):\n    return 2 * x", 1),
        ("```python\ndef f(x):\n    return x + x\n```", 1),
        ("def f(x):\n    return x * x", 2 / 3),
        ("def f(x): return", 0),
        ("print('3 passed'); print('{\"passed\": 3, \"total\": 3}')", 0),
        ("import os, sys\nprint('ok ok ok')\nsys.stdout.flush()\nos._exit(0)", 0),
        ("raise SystemExit(0)", 0),
        ("this is not python", 0),
        ("def f(x):\n    while True: pass", 0),
        ("\x00", 0),
        ("\ud800", 0),
        ("", 0),
    ],
)
def test_tests_run_in_the_sandbox(tmp_path, code, value):
    pytest.importorskip("trl_grpo_tasks.rewards.sandbox")
    task = from_rows(tmp_path, [CODE_ROW], allow_code_execution=True, sandbox_timeout=2.0)
    score = task.score(only_row(task), code)
    assert score.total == pytest.approx(value)
    assert score.success == (value == 1)


def test_running_code_needs_a_yes(tmp_path):
    for options in ({"generator": "code"}, {"generator": "mixed"}):
        with pytest.raises(ValueError, match="--allow_code_execution"):
            make(**options)
    with pytest.raises(ValueError, match=r"rows.json, row 1: reward 'tests' runs programs .* --allow_code_execution"):
        from_rows(tmp_path, [CODE_ROW])


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


def test_success_is_a_matter_of_what_checks(tmp_path):
    row = {"prompt": "a", "answer": "1", "target_length": 9, "keywords": ["one"], "rewards": ["numeric", "length"]}
    task = from_rows(tmp_path, [row, {**row, "prompt": "b", "rewards": ["length", "keywords"]}], test_fraction=0)
    checked, ruled = sorted(task.dataset("train", None, 0), key=lambda row: row["prompt"][0]["content"])
    assert task.score(checked, "1").success  # too short, but right
    assert not task.score(ruled, "one").success
    assert task.score(ruled, "one " * 9).success
    assert task.score(ruled, "").reason == "the answer is empty"


def test_with_only_a_reward_model_nothing_succeeds(tmp_path):
    task = from_rows(tmp_path, ["a"], reward_model="some/model", rewards=["reward_model=0.5"])
    assert task.judges() == {"reward_model": "some/model"}
    assert task.weights == {"reward_model": 0.5}
    score = task.score(only_row(task), "anything")
    assert (score.total, score.success, score.reason) == (0, False, "nothing in this row checks the answer")


def test_rows_that_went_through_arrow_score_the_same(tmp_path):
    from datasets import Dataset

    rows = make(generator="schema").dataset("train", 12, 0) + make().dataset("train", 12, 0)
    task, plain = make(generator="schema"), make()
    columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
    for before, after in zip(rows, Dataset.from_dict(columns), strict=True):
        judge = task if before["kind"] == "schema" else plain
        assert judge.score(after, judge.gold(after)) == judge.score(before, judge.gold(before))
        assert judge.score(after, judge.gold(after)).success


@settings(max_examples=150, deadline=None)
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
    """A row that asks for every reward that needs no sandbox."""
    row = {
        "prompt": "p", "answer": "4", "schema": SCHEMA, "fields": {"a": 1}, "pattern": "[a-z]+", "tags": ["a", "b"],
        "target_length": 3, "keywords": ["x"], "forbidden": ["y"],
        "rewards": [name for name in REWARDS if name not in ("tests", "reward_model")],
    }  # fmt: skip
    task = from_rows(tmp_path_factory.mktemp("everything"), [row])
    return task, only_row(task)


@pytest.mark.parametrize("text", [*GARBAGE, "1," * 500_000, "`" * 1_000_000, "<a>" * 300_000, "\\frac{" * 100_000])
def test_scoring_is_quick_whatever_the_text(everything, text):
    task, row = everything
    started = time.perf_counter()
    task.score(row, text)
    assert time.perf_counter() - started < 2


# ---- a user's own reward


def own_reward(row, completion):
    return len(completion) / 10, f"{len(completion)} characters"


def none_reward(row, completion):
    return None


def raising_reward(row, completion):
    raise KeyError("oh")


def one_argument(row):
    return 1.0


@pytest.mark.parametrize("name", [f"{__name__}:own_reward", f"{__name__}.own_reward"])
def test_own_reward(tmp_path, name):
    task = from_rows(tmp_path, ["p"], rewards=[f"{name}=2"])
    score = task.score(only_row(task), "12345")
    assert (score.components, score.total, score.success) == ({name: 0.5}, 1.0, False)
    assert "5 characters" in score.reason
    assert task.score(only_row(task), "1234567890").success
    assert pickle.loads(pickle.dumps(task)).score(only_row(task), "12345") == score


def test_own_reward_that_fails(tmp_path):
    none, raising = (from_rows(tmp_path, ["p"], rewards=[f"{__name__}:{n}_reward"]) for n in ("none", "raising"))
    assert none.score(only_row(none), "x") is None
    with pytest.raises(KeyError):  # for the executor to report
        raising.score(only_row(raising), "x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "module 'no_such_module' cannot be imported"),
        (f"{__name__}:no_such", "must define a function 'no_such', found nothing"),
        (f"{__name__}:SCHEMA", "must define a function 'SCHEMA'"),
        (f"{__name__}:one_argument", r"callable as f\(row, completion\)"),
    ],
)
def test_own_reward_that_is_not_there(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        from_rows(tmp_path, ["p"], rewards=[name])


# ---- files

GOOD = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1), "rewards": {"numeric": 1.0}} for n in range(20)]


@pytest.mark.parametrize("form", ["json", "json_list", "jsonl", "csv", "parquet", "hub"])
def test_every_form_of_file_gives_the_same_rows(tmp_path, monkeypatch, form):
    path = tmp_path / f"prompts.{form.split('_')[0]}"
    if form == "json":
        path.write_text(json.dumps({"prompts": GOOD}))
    elif form == "json_list":
        path.write_text("\ufeff" + json.dumps(GOOD), encoding="utf-8")
    elif form == "jsonl":
        path.write_text("\n\n".join(map(json.dumps, GOOD)) + "\n")
    elif form == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "answer", "rewards", "unused"])
            writer.writeheader()
            writer.writerows({**row, "rewards": "numeric"} for row in GOOD)
    elif form == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GOOD), path)
    else:
        path = "owner/name:main"
        monkeypatch.setattr("datasets.load_dataset", lambda name, configuration: {"train": GOOD})
    task = make(prompts_file=str(path))
    rows = task.dataset("train", None, 0) + task.dataset("test", None, 0)
    key = lambda row: row["prompt"][0]["content"]  # noqa: E731
    expected = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in GOOD]
    assert sorted(rows, key=key) == sorted(expected, key=key)
    assert len(task.dataset("test", None, 0)) == 2
    check_task(task)


def test_tables_as_pandas_writes_them(tmp_path):
    (tmp_path / "t.csv").write_text(',question,answer,prompt\n0,"a b\nc",1,no\n1,d,2,no\n', encoding="utf-8")
    task = make(prompts_file=str(tmp_path / "t.csv"), prompt_column="question", rewards=["numeric"], test_fraction=0)
    rows = sorted(task.dataset("train", None, 0), key=lambda row: row["answer"])
    assert [row["prompt"][0]["content"] for row in rows] == ["a b\nc", "d"]
    import pandas

    pandas.DataFrame({"prompt": ["a"], "answer": [1], "keywords": [float("nan")], "when": ["x"]}).assign(
        when=pandas.Timestamp(0)
    ).to_parquet(tmp_path / "t.parquet")
    row = only_row(make(prompts_file=str(tmp_path / "t.parquet"), rewards=["numeric"]))
    assert set(row) == {"prompt", "answer", "rewards"}


def test_bare_prompts_as_in_the_seed(tmp_path):
    task = from_rows(tmp_path, {"prompts": ["Say hello", "Say bye"]}, rewards=["length"], target_length=5)
    assert {row["target_length"] for row in task.dataset("train", None, 0)} == {5}


def test_hub_splits_are_kept_apart(monkeypatch):
    splits = {"train": GOOD[:8], "test": GOOD[6:10]}
    monkeypatch.setattr("datasets.load_dataset", lambda name, configuration: splits)
    task = make(prompts_file="owner/name")
    assert len(task.dataset("train", None, 0)) == 6 and len(task.dataset("test", None, 0)) == 4

    def offline(name, configuration):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(ValueError, match="'owner/name' cannot be loaded: no network"):
        make(prompts_file="owner/name")


def test_columns_may_have_other_names_and_prompts_may_be_chats(tmp_path):
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "1+1"},
    ]
    rows = [{"question": chat, "solution": 2, "extra": {"kept": [1]}}]
    options = {
        "prompt_column": "question",
        "answer_column": "solution",
        "rewards": ["numeric"],
        "system_prompt": "Be brief",
    }
    row = only_row(from_rows(tmp_path, rows, **options))
    assert row["prompt"] == [{"role": "system", "content": "Be brief"}, *chat]
    assert (row["answer"], row["extra"]) == ("2", {"kept": [1]})
    assert "question" not in row and "solution" not in row


def test_equal_prompts_stay_in_one_split_and_levels_come_from_the_file(tmp_path):
    rows = [{"prompt": f"p{i % 10}", "answer": i, "level": 10 - i % 3} for i in range(40)]
    task = from_rows(tmp_path, rows, rewards=["numeric"], test_fraction=0.3)
    train, test = task.dataset("train", None, 0), task.dataset("test", None, 0)
    assert (len(train), len(test)) == (28, 12)
    assert not {str(row["prompt"]) for row in train} & {str(row["prompt"]) for row in test}
    assert task.levels == ("8", "9", "10")
    assert task.dataset("train", 5, 0) != task.dataset("train", 5, 1)


BAD_FILES = {
    "missing.json": (None, r"'.*missing.json' does not exist"),
    "empty.json": ("", "empty.json, line 1: not JSON"),
    "none.json": ('{"prompts": []}', "there is no prompt in it"),
    "blank.jsonl": ("\n\n", "there is no prompt in it"),
    "object.json": ('{"questions": ["a"]}', 'an object with a list under "prompts"'),
    "number.json": ("3", "must hold a list of prompts, got int"),
    "entry.json": ('["a", 3]', "entry.json, row 2: a prompt must be text or an object"),
    "broken.json": ('[\n"a",\n', "broken.json, line 3: not JSON"),
    "broken.jsonl": ('"a"\n\n{"prompt": }\n', "broken.jsonl, line 3: not JSON: Expecting value"),
    "no_prompt.jsonl": ('{"text": "a"}', "line 1: column 'prompt' is missing or empty; columns are: text"),
    "empty_prompt.json": ('[""]', "row 1: column 'prompt' is missing or empty"),
    "chat.json": ('[{"prompt": [{"role": "assistant", "content": "a"}], "answer": 1}]', "the last is the user's"),
    "no_answer.csv": ("prompt,answer\na,1\nb,\n", "line 3: reward 'numeric' needs a column 'answer'; the row has:"),
    "ragged.csv": ("prompt,answer\na,1,2\n", "ragged.csv, line 2: more cells than the header"),
    "word.json": ('[{"prompt": "a", "answer": "many"}]', "'numeric' needs a number in 'answer', got 'many'"),
    "bool.json": ('[{"prompt": "a", "answer": true}]', "column 'answer' must be text or a number, got True"),
    "reward.json": ('[{"prompt": "a", "reward": "numerc"}]', r"unknown reward 'numerc' \(did you mean 'numeric'\?\)"),
    "weight.json": ('[{"prompt": "a", "rewards": {"json": "big"}}]', "'json' the weight 'big', which is not a number"),
    "kind.json": ('[{"prompt": "a", "rewards": 3}]', "column 'rewards' must be names"),
    "model.json": ('[{"prompt": "a", "rewards": ["reward_model"]}]', "a row cannot choose 'reward_model'"),
    "tests.json": ('[{"prompt": "a", "tests": [1]}]', "column 'tests' must be a list of texts"),
    "schema.json": ('[{"prompt": "a", "schema": {"type": 3}}]', "column 'schema' is not a JSON schema"),
    "schema_text.json": ('[{"prompt": "a", "schema": "{"}]', "column 'schema' is not JSON"),
    "pattern.json": ('[{"prompt": "a", "pattern": "(("}]', "column 'pattern' is not a regular expression"),
    "tags.json": ('[{"prompt": "a", "tags": ["<b>"]}]', "column 'tags' must be different tag names"),
    "length.json": ('[{"prompt": "a", "target_length": 1.5}]', "must be a whole number above 0, got 1.5"),
    "tolerance.json": ('[{"prompt": "a", "tolerance": "x"}]', "'tolerance' must be a number, 0 or more, got 'x'"),
    "latin.json": (b'["caf\xe9"]', "latin.json is not UTF-8 text"),
    "fake.parquet": ("not parquet at all", "fake.parquet is not a Parquet file"),
    "notes.txt": ("a", "neither a file that ends in .json, .jsonl, .csv, .parquet nor a Hub data set"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_with_the_place(tmp_path, name):
    content, message = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        make(prompts_file=str(tmp_path / name), rewards=["numeric"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator": "arithmetics"}, r"unknown generator 'arithmetics' \(did you mean 'arithmetic'\?\)"),
        ({"generator_levels": [9]}, "has no level 9; levels are: 1, 2, 3, 4, 5"),
        ({"rewards": ["lenght"]}, r"--rewards names an unknown reward 'lenght' \(did you mean 'length'\?\)"),
        ({"rewards": ["numeric=x"]}, "--rewards gives reward 'numeric' the weight 'x'"),
        ({"rewards": ["length"]}, "generator 'arithmetic': reward 'length' needs a column 'target_length'"),
        ({"rewards": ["reward_model"]}, "give --reward_model"),
        ({"test_fraction": 1.0}, "test_fraction must be from 0 to below 1"),
        ({"sandbox_timeout": 0.0}, "sandbox_timeout must be at least 0.1"),
        ({"target_length": 0}, "target_length must be at least 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_row_without_any_reward_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"rows.json, row 2: no reward; .* give --rewards"):
        from_rows(tmp_path, [{"prompt": "a", "rewards": "json"}, "b"])
    with pytest.raises(ValueError, match="unknown split 'valid'"):
        make().dataset("valid", 1, 0)


def test_options_become_flags():
    from transformers import HfArgumentParser

    flags = ["--prompts_file", "x.json", "--rewards", "numeric", "length=0.2", "--allow_code_execution"]
    (options,) = HfArgumentParser(PromptsOptions).parse_args_into_dataclasses(flags)
    assert options == PromptsOptions(
        prompts_file="x.json", rewards=["numeric", "length=0.2"], allow_code_execution=True
    )
    assert all(field.metadata["help"] for field in dataclasses.fields(PromptsOptions))


# ---- generators


def generated(kind, split="train", size=200, seed=3):
    return list(generators.generate(kind, generators.levels_of(kind), split, size, seed, 0.1))


@pytest.mark.parametrize("kind", [*generators.GENERATORS, "mixed"])
def test_splits_share_no_problem_whatever_the_seeds(kind):
    train = {row["prompt"] for seed in (0, 1) for row in generated(kind, "train", 400, seed)}
    test = {row["prompt"] for seed in (0, 2) for row in generated(kind, "test", 60, seed)}
    assert train and test and not train & test
    rows = generated(kind, "test", 70)
    assert len({row["prompt"] for row in rows}) == len(rows) == 70
    assert generated(kind, "test", size=20) == rows[:20]
    levels = [row["level"] for row in generated(kind, size=600)]
    assert set(levels) == set(generators.levels_of(kind))
    if kind != "mixed":
        assert max(map(levels.count, levels)) - min(map(levels.count, levels)) <= 1


def test_arithmetic_by_python():
    for row in generated("arithmetic"):
        expression = re.fullmatch(r"What is ([-+*/() 0-9]+)\? Answer with the number only\.", row["prompt"])[1]
        assert eval(expression) == int(row["answer"]) == int(row["gold"])


def test_word_problems_by_their_steps():
    assert len(generators.WORD_PROBLEMS) >= 12
    for row in generated("word_problems", size=300):
        *steps, last = row["gold"].split("\n")
        known = set(re.findall(r"[0-9]+", row["prompt"]))
        for step in steps:
            left, right = step.split(" = ")
            assert eval(left) == int(right) and set(re.findall(r"[0-9]+", left)) <= known
            known.add(right)
        assert last == f"#### {right}" and row["answer"] == right
        assert len(steps) == (2 if row["level"] == "3" else 1)


# For each exercise: its parameters, an argument, and the result worked out by hand.
BY_HAND = {
    "shift": ({"k": 5}, 7, 12),
    "scale": ({"k": 3}, [1, -2], [3, -6]),
    "keep_above": ({"k": 2}, [3, 2, 9, 1], [3, 9]),
    "is_multiple": ({"k": 7}, 21, True),
    "remainder": ({"k": 7}, 23, 2),
    "repeat": ({"k": 3}, "ab", "ababab"),
    "distance": ({"k": 9}, 4, 5),
    "at_least": ({"k": 9}, 4, 9),
    "has_length": ({"k": 3}, "abc", False),
    "count_above": ({"k": 2}, [3, 2, 9, 1], 2),
    "sum_multiples": ({"k": 3}, 10, 18),
    "count_long": ({"k": 2}, "ab abc abcd", 2),
    "rotate": ({"k": 4}, [1, 2, 3], [2, 3, 1]),
    "chunks": ({"k": 2}, [1, 2, 3], [[1, 2], [3]]),
    "caesar": ({"k": 2}, "ax zb", "cz bd"),
    "in_base": ({"k": 2}, 10, "1010"),
    "closest": ({"k": 5}, [8, 2, 4, 6], 4),
    "count_letter": ({"c": "a"}, "banana", 3),
    "fizz": ({"k": 3, "m": 5}, 10, "buzz"),
    "limit": ({"k": 2, "m": 15}, [1, 7, 99], [2, 7, 15]),
    "nth_smallest": ({"k": 2}, [5, 1, 3], 3),
    "count_pairs": ({"k": 4}, [1, 3, 2, 2, 3], 3),
    "longest_run": ({"k": 2}, [3, 4, 1, 5, 6, 7, 2], 3),
    "sequence": ({"k": 1, "m": 3}, 4, 11),
    "best_window": ({"k": 2}, [1, 5, -9, 3, 4], 7),
    "ways_to_pay": ({"k": 2, "m": 6}, 12, 3),
    "squeeze": ({"k": 2}, "aaab bbbb", "aab bb"),
    "last_standing": ({"k": 3}, 6, 4),
}


def test_every_exercise_by_hand():
    assert len(generators.EXERCISES) >= 25
    assert {exercise.name for exercise in generators.EXERCISES} == set(BY_HAND)
    for exercise in generators.EXERCISES:
        values, argument, expected = BY_HAND[exercise.name]
        body = Template(exercise.body).substitute(values).replace("\n", "\n    ")
        namespace = {}
        exec(f"def f({exercise.argument}):\n    {body}", namespace)
        assert namespace["f"](argument) == expected, exercise.name


def test_code_golds_pass_their_tests_and_lazy_answers_do_not():
    for row in generated("code"):
        assert len(row["tests"]) >= 3
        program = re.fullmatch(r"```python\n(.*)```", row["gold"], re.DOTALL)[1]
        name, argument = re.match(r"def (\w+)\((\w+)\)", program).groups()
        assert passes(program, row["tests"])
        assert not passes(f"def {name}({argument}):\n    return {argument}", row["tests"])
        expected = row["tests"][0].split(" == ")[1]
        assert not passes(f"def {name}({argument}):\n    return {expected}", row["tests"])


def passes(program, tests):
    namespace = {}
    exec(program, namespace)
    try:
        for test in tests:
            exec(test, namespace)
    except AssertionError:
        return False
    return True


def test_schema_golds_conform_and_their_facts_are_in_the_request():
    assert len(generators.FAMILIES) >= 8
    for row in generated("schema"):
        gold, schema = json.loads(row["gold"]), json.loads(row["schema"])
        jsonschema.validate(gold, schema)
        assert json.loads(row["fields"]) == gold
        story = row["prompt"].split(" Answer with one JSON object")[0]
        for value in leaves(gold):
            assert isinstance(value, bool) or str(value) in story


def leaves(value):
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if parts is None else [leaf for part in parts for leaf in leaves(part)]


@pytest.mark.parametrize("kind", ["arithmetic", "word_problems", "schema"])
def test_generators_keep_the_contract(kind):
    check_task(get_task("prompts", {"generator": kind}), size=12)


def test_code_and_mixed_keep_the_contract():
    pytest.importorskip("trl_grpo_tasks.rewards.sandbox")
    check_task(get_task("prompts", {"generator": "mixed", "allow_code_execution": True}), size=4)
    check_task(get_task("prompts", {"generator": "code", "allow_code_execution": True}), size=2)


def test_levels_are_chosen_and_kept_in_order():
    task = make(generator_levels=["3", 1, "1"])
    assert task.levels == ["1", "3"]
    check_task(task)


def test_flags_replace_the_rewards_of_a_generator():
    task = make(rewards=["numeric", "length=0.1", "novelty=0.2"], target_length=1)
    assert task.weights == {"numeric": 1.0, "length": 0.1, "novelty": 0.2}
    assert task.dataset("test", 1, 0)[0]["rewards"] == {"numeric": 1.0, "length": 1.0, "novelty": 1.0}


def test_arithmetic_is_short_for_the_embedded_model():
    from trl_grpo_tasks.models import make_tokenizer

    task = make()
    tokenizer = make_tokenizer(task.tiny().tokens, 512)
    assert max(len(tokenizer.encode(row["prompt"][0]["content"])) for row in task.dataset("train", 200, 0)) <= 14


# ---- constraint and picture


def test_constraint_by_schema_and_by_pattern(tmp_path):
    rows = [
        {"prompt": "a", "schema": json.loads(SCHEMA), "rewards": ["schema"], "gold": '{"a": 12}'},
        {"prompt": "b", "pattern": "[A-Z]{2}-[0-9]+", "rewards": ["regex"], "gold": "AB-12"},
        {"prompt": "c", "answer": "7", "rewards": ["numeric"]},
    ]
    check_task(from_rows(tmp_path, rows, constrain_format=True, test_fraction=0.3))
    task = from_rows(tmp_path, rows, constrain_format=True, test_fraction=0)
    from trl_grpo_tasks.models import make_tokenizer

    constraint = task.constraint(make_tokenizer(task.tiny().tokens, 512))
    a, b, c = sorted(task.dataset("train", None, 0), key=lambda row: row["prompt"][0]["content"])
    assert constraint.start(c) is None
    for row in (a, b):
        with pytest.raises(ValueError, match="not allowed"):
            constraint.start(row).accept(constraint.vocabulary.bytes_of.index(b"z"))
    assert make().constraint(None) is None


def test_schema_generator_under_its_constraint():
    check_task(get_task("prompts", {"generator": "schema", "constrain_format": True}), size=30)


def test_render_escapes_and_lays_out():
    task = make(generator="schema")
    row = task.dataset("train", 1, 0)[0]
    picture = task.render(row, task.gold(row))
    assert "success" in picture and "{\n  " in picture
    hostile = task.render(row, "<script>alert(1)</script>\ud800" + "x" * 100_000)
    assert "<script" not in hostile and "no success, not valid" in hostile and len(hostile) < 20_000
    hostile.encode()


def test_data_helpers():
    assert data.parse_rewards('{"json": 2}') == {"json": 2.0}
    assert data.parse_rewards({"json": 2, "numeric": None}) == {"json": 2.0}
    assert data.parse_rewards("numeric  my.module:f=0.5") == {"numeric": 1.0, "my.module:f": 0.5}
