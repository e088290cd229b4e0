"""Rewards of the prompts task, with hand-written and adversarial cases."""

import time

import pytest

from tests.support.prompt_files import SCHEMA, from_rows, only_row
from trl_grpo_tasks.tasks.prompts import reward
from trl_grpo_tasks.tasks.prompts.verdict import CannotJudgeError

# ---- numeric and exact


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"), ("6 * 7 = 42", "42"), ("6 times 7\n#### 42", "42"), ("so \\boxed{42} after 3 steps", "42"),
        ("\\boxed{\\frac{3}{4}}", "3/4"), ("**Answer:** 42 (of 50)", "42"), ("The answer is $42$ for 3 people", "42"),
        ("answer: 17 + 25 = 42", "42"), ("<answer>42</answer> 7", "42"), ("$1,234.50", "1234.5"), ("-5", "-5"),
        ("\u22125", "-5"), ("x=-5", "-5"), ("12-5", "5"), ("6e3", "6000"), (".5", "1/2"), ("0.333333333", "1/3"),
        ("3 / 4", "0.75"), ("42kg", "42"), ("#### 7 then #### 42", "42"), ("first, the answer to it: 42", "42"),
        ("42", "Half of 84 is 42\n#### 42"), ("42.0", "42"),
    ],
)  # fmt: skip
def test_numeric_reads_the_final_number(text, answer):
    assert reward.numeric({"answer": answer}, text).value == 1.0


@pytest.mark.parametrize(
    ("text", "answer", "readable"),
    [
        ("", "42", False), ("forty-two", "42", False), ("42 or 43", "42", True), ("42.01", "42", True),
        ("0.334", "1/3", True), ("1/0", "0", False), ("1e999999999", "0", False), ("9" * 100_000, "9", False),
        ("４２", "42", False), ("eq42", "42", False), ("#### 43 (it is not 42)", "42", True),
        ("42 " + "x" * 5_000, "42", False), ("1,2,3", "123", True), ("nan", "0", False),
        ("1" + "0" * 40 + "e300", "42", True),
    ],
)  # fmt: skip
def test_numeric_is_not_fooled(text, answer, readable):
    verdict = reward.numeric({"answer": answer}, text)
    assert (verdict.value, verdict.readable) == (0.0, readable)
    assert verdict.reason


def test_numeric_tolerance():
    assert reward.numeric({"answer": "3.14159", "tolerance": 0.01}, "3.14").value == 1
    assert reward.numeric({"answer": "3.14159"}, "3.14").value == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Paris", 1), ("It is far.\nAnswer: Paris.", 1), ("<answer>Paris</answer>", 1), ("\\boxed{Paris}", 1),
        ("#### **Paris**", 1),
        ("paris", 0), ("Paris or Rome", 0), ("Answer: x = Paris", 0), ("Answer: Paris\nAnswer: Rome", 0),
        ("Not Paris", 0), ("x" * 10_000 + "\nParis", 0),
    ],
)  # fmt: skip
def test_exact(text, value):
    assert reward.exact({"answer": "Paris"}, text).value == value


# ---- JSON


@pytest.mark.parametrize(
    ("text", "json_value", "schema_value", "fields_value"),
    [
        ('{"a": 1}', 1, 1, 1), ('Here it is:\n```json\n{"a": 1}\n```\nDone.', 1, 1, 1),
        ('```\n{"a": 1}\n```', 1, 1, 1),
        ('{"a": 1} I hope that helps', 0.5, 0.5, 0.5), ('{"a": 1}{"a": 2}', 0.5, 0.5, 0.5), ('{"a": 2}', 1, 1, 0),
        ('{"a": true}', 1, 0, 0), ('{"a": 1.0}', 1, 1, 1), ('{"a": 1, "b": 2}', 1, 0, 1), ("[1]", 1, 0, 0),
        ('{"a": NaN}', 0, 0, 0), ('{"a": 1e999}', 0, 0, 0), ("{'a': 1}", 0, 0, 0), ('{"a": 1', 0, 0, 0), ("", 0, 0, 0),
        ("[" * 50_000, 0, 0, 0), ("[" * 900 + "]" * 900, 1, 0, 0), ('{"a": ' + "9" * 5_000 + "}", 0, 0, 0),
        ('{"a": 1}' + " " * 1_000_000, 0, 0, 0),
    ],
)  # fmt: skip
def test_json_schema_and_fields(text, json_value, schema_value, fields_value):
    row = {"schema": SCHEMA, "fields": '{"a": 1}'}
    assert reward.json_text(row, text).value == json_value
    assert reward.schema(row, text).value == schema_value
    assert reward.fields(row, text).value == fields_value


def test_fields_gives_partial_credit_and_compares_deeply():
    row = {"fields": '{"a": [1, {"b": true}], "c": "x", "d": 0.5}'}
    assert reward.fields(row, '{"a": [1, {"b": true}], "c": "y", "d": 0.5}').value == pytest.approx(2 / 3)
    assert reward.fields(row, '{"a": [1, {"b": 1}], "c": "x"}').value == pytest.approx(1 / 3)
    assert reward.fields(row, '{"a": [1, {"b": 1}], "c": "x"}').reason == "fields wrong or missing: a, d"


def test_a_schema_never_fetches_references():
    with pytest.raises(CannotJudgeError, match="unresolvable reference"):
        reward.schema({"schema": '{"$ref": "http://127.0.0.1:9/schema.json"}'}, "1")


def test_a_schema_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr(reward, "SCHEMA_SECONDS", 0.1)
    many = "[" + ", ".join(f'{{"a": {i}}}' for i in range(6_000)) + "]"
    for schema, text in (
        ('{"uniqueItems": true}', many),
        ('{"pattern": "^(a+)+$"}', '"' + "a" * 27 + '!"'),
        ('{"patternProperties": {"^(a+)+$": {}}, "additionalProperties": false}', '{"' + "a" * 27 + '!": 1}'),
    ):
        with pytest.raises(CannotJudgeError, match=r"took longer than 0\.1 s"):
            reward.schema({"schema": schema}, text)
    assert reward.schema({"schema": '{"uniqueItems": true}'}, "[1, 2]").value == 1


# ---- form


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1), ("<think>a</think> so <answer>b</answer>", 0.5),
        ("<answer>b</answer><think>a</think>", 0.5), ("<think>a<answer>b</answer></think>", 0.5),
        ("<think>a</think>", 0.25), ("<think></think><answer>b</answer>", 0.25),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.25), ("</think>a<think><answer>b</answer>", 0.25),
        ("nothing", 0),
    ],
)  # fmt: skip
def test_tags(text, value):
    assert reward.tags({"tags": ["think", "answer"]}, text).value == value


def test_regex_matches_all_of_the_text():
    row = {"pattern": r"[A-Z]{2}-\d+"}
    assert reward.pattern(row, " AB-12\n").value == 1
    assert reward.pattern(row, "see AB-12").value == 0
    assert reward.pattern(row, "A" * 20_000).reason == "the answer is longer than 10000 characters"


def test_a_slow_regex_is_stopped_and_gives_no_score(tmp_path, monkeypatch):
    monkeypatch.setattr(reward, "REGEX_SECONDS", 0.1)
    task = from_rows(tmp_path, [{"prompt": "p", "pattern": "(a|aa)+b", "rewards": ["regex"]}])
    started = time.perf_counter()
    with pytest.raises(CannotJudgeError, match="took longer"):
        reward.pattern({"pattern": "(a|aa)+b"}, "a" * 200 + "c")
    assert task.score(only_row(task), "a" * 200 + "c") is None
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(("words", "value"), [(10, 1), (11, 1), (9, 1), (15, 0.5), (5, 0.5), (20, 0), (0, 0), (99, 0)])
def test_length(words, value):
    assert reward.length({"target_length": 10}, "word " * words).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"), [("The Cat sat on a mat", 1), ("the cat", 2 / 3), ("category of mats", 1 / 3), ("dog", 0)]
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
        ("def f(x):\n    return 2 * x", 1), ("```python\ndef f(x):\n    return x + x\n```", 1),
        ("def f(x):\n    return x * x", 2 / 3), ("def f(x):\n    while True: pass", 0), ("\ud800", 0), ("", 0),
    ],
)  # fmt: skip
def test_tests_run_in_the_sandbox(tmp_path, code, value):
    """What a program may do there: tests/rewards/test_sandbox_runner.py."""
    task = from_rows(tmp_path, [CODE_ROW], allow_code_execution=True, sandbox_timeout=0.5 if "while" in code else 10.0)
    score = task.score(only_row(task), code)
    assert score.total == pytest.approx(value) and score.success == (value == 1)
    assert ("timed out after 0.5 s" in score.reason) == ("while True" in code)


def test_running_code_needs_an_explicit_option(tmp_path):
    with pytest.raises(ValueError, match=r"rows.json, row 1: reward 'tests' runs model-written programs; .* --allow"):
        from_rows(tmp_path, [CODE_ROW])
