"""Rows of the prompts task: valid and invalid files; generators are verified independently."""

import json
import re
from string import Template

import jsonschema
import pyarrow
import pyarrow.parquet
import pytest

from tests.support.exhaustive import MARK
from tests.support.prompt_files import from_rows, make, only_row
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.tasks.prompts import data, generators

# ---- files

GOOD = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1), "rewards": {"numeric": 1.0}} for n in range(20)]


FORMS = {
    "prompts.json": json.dumps({"prompts": GOOD}),
    "list.json": "\ufeff" + json.dumps(GOOD),
    "prompts.jsonl": "\n\n".join(map(json.dumps, GOOD)) + "\n",
    "prompts.csv": "prompt,answer,rewards,unused\n" + "".join(f"{r['prompt']},{r['answer']},numeric,\n" for r in GOOD),
    "prompts.parquet": None,
    "owner/name:main": None,
}


@pytest.mark.parametrize("name", FORMS)
def test_every_file_format_gives_the_same_rows(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    if FORMS[name] is not None:
        (tmp_path / name).write_text(FORMS[name], encoding="utf-8")
    elif name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GOOD), name)
    else:
        monkeypatch.setattr("datasets.load_dataset", lambda name, configuration: {"train": GOOD})
    task = make(prompts_file=name)
    rows = task.dataset("train", None, 0) + task.dataset("test", None, 0)
    expected = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in GOOD]
    assert sorted(rows, key=lambda row: int(row["answer"])) == expected
    assert len(task.dataset("test", None, 0)) == 2


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


def test_rewards_are_read_from_text_mappings_and_lists():
    assert data.parse_rewards('{"json": 2}') == {"json": 2.0}
    assert data.parse_rewards({"json": 2, "numeric": None}) == {"json": 2.0}
    assert data.parse_rewards("numeric  my.module:f=0.5") == {"numeric": 1.0, "my.module:f": 0.5}


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
    said = (("user", "hi"), ("assistant", "yes?"), ("user", "1+1"))
    chat = [{"role": role, "content": text} for role, text in said]
    rows = [{"question": chat, "solution": 2, "extra": {"kept": [1]}}]
    columns = {"prompt_column": "question", "answer_column": "solution"}
    row = only_row(from_rows(tmp_path, rows, rewards=["numeric"], system_prompt="Be brief", **columns))
    assert row["prompt"] == [{"role": "system", "content": "Be brief"}, *chat]
    assert (row["answer"], row["extra"]) == ("2", {"kept": [1]})
    assert "question" not in row and "solution" not in row


def test_equal_prompts_stay_in_one_split_and_levels_come_from_the_file(tmp_path):
    rows = [{"prompt": f"p{i % 10}", "answer": i, "level": 10 - i % 3} for i in range(40)]
    task = from_rows(tmp_path, rows, rewards=["numeric"], test_fraction=0.3)
    train, test = task.dataset("train", None, 0), task.dataset("test", None, 0)
    with pytest.raises(ValueError, match="unknown split 'valid'"):
        task.dataset("valid", 1, 0)
    assert (len(train), len(test)) == (28, 12)
    assert not {str(row["prompt"]) for row in train} & {str(row["prompt"]) for row in test}
    assert task.levels == ("8", "9", "10")
    assert task.dataset("train", 5, 0) != task.dataset("train", 5, 1)


BAD_FILES = {
    "missing.json": (None, r"missing.json: this path does not exist"),
    "empty.json": ("", "empty.json, line 1: not JSON"),
    "none.json": ('{"prompts": []}', "contains no prompt"),
    "object.json": ('{"questions": ["a"]}', 'an object with a list under "prompts"'),
    "entry.json": ('["a", 3]', "entry.json, row 2: a prompt must be text or an object"),
    "broken.jsonl": ('"a"\n\n{"prompt": }\n', "broken.jsonl, line 3: not JSON: Expecting value"),
    "no_prompt.jsonl": ('{"text": "a"}', "line 1: column 'prompt' is missing or empty; columns are: text"),
    "chat.json": ('[{"prompt": [{"role": "assistant", "content": "a"}], "answer": 1}]', "end with a user message"),
    "no_answer.csv": ("prompt,answer\na,1\nb,\n", "line 3: reward 'numeric' needs a column 'answer'; the row has:"),
    "ragged.csv": ("prompt,answer\na,1,2\n", "ragged.csv, line 2: there are more cells than columns"),
    "word.json": ('[{"prompt": "a", "answer": "many"}]', "'numeric' needs a number in 'answer', got 'many'"),
    "bool.json": ('[{"prompt": "a", "answer": true}]', "column 'answer' must be text or a number, got True"),
    "reward.json": ('[{"prompt": "a", "reward": "numerc"}]', r"unknown reward 'numerc' \(did you mean 'numeric'\?\)"),
    "weight.json": ('[{"prompt": "a", "rewards": {"json": "big"}}]', "'json' the weight 'big', which is not a number"),
    "kind.json": ('[{"prompt": "a", "rewards": 3}]', "column 'rewards' must be names"),
    "schema_text.json": ('[{"prompt": "a", "schema": "{"}]', "column 'schema' is not JSON"),
    "model.json": ('[{"prompt": "a", "rewards": ["reward_model"]}]', "a row cannot choose 'reward_model'"),
    "tests.json": ('[{"prompt": "a", "tests": [1]}]', "column 'tests' must be a list of texts"),
    "schema.json": ('[{"prompt": "a", "schema": {"type": 3}}]', "column 'schema' is not a JSON schema"),
    "pattern.json": ('[{"prompt": "a", "pattern": "(("}]', "column 'pattern' is not a regular expression"),
    "tags.json": ('[{"prompt": "a", "tags": ["<b>"]}]', "column 'tags' must be different tag names"),
    "length.json": ('[{"prompt": "a", "target_length": 1.5}]', "must be a whole number above 0, got 1.5"),
    "tolerance.json": ('[{"prompt": "a", "tolerance": "x"}]', "'tolerance' must be a number, 0 or more, got 'x'"),
    "latin.json": (b'["caf\xe9"]', "latin.json is not UTF-8 text"),
    "fake.parquet": ("not parquet at all", "fake.parquet is not a Parquet file"),
    "bare.json": ('[{"prompt": "a", "rewards": "json"}, "b"]', "row 2: the row has no reward; .* pass --rewards"),
    "notes.txt": ("a", "neither a file that ends in .json, .jsonl, .csv, .parquet nor a Hub data set"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_invalid_files_are_reported_with_the_location(tmp_path, name):
    content, message = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        make(prompts_file=str(tmp_path / name), rewards=[] if name == "bare.json" else ["numeric"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator": "arithmetics"}, r"unknown generator 'arithmetics' \(did you mean 'arithmetic'\?\)"),
        ({"generator_levels": [9]}, "has no level 9; levels are: 1, 2, 3, 4, 5"),
        ({"rewards": ["lenght"]}, r"--rewards names an unknown reward 'lenght' \(did you mean 'length'\?\)"),
        ({"rewards": ["numeric=x"]}, "--rewards gives reward 'numeric' the weight 'x'"),
        ({"rewards": ["length"]}, "generator 'arithmetic': reward 'length' needs a column 'target_length'"),
        ({"rewards": ["reward_model"]}, "pass --reward_model"),
        ({"test_fraction": 1.0}, "--test_fraction 1.0 must be at least 0 and less than 1"),
        ({"target_length": 0}, "--target_length 0 must be at least 1"),
        ({"think_tokens": 5}, "needs --think"),
        ({"think": True, "think_tokens": 0}, "must be at least 1"),
        ({"think": True, "think_marker": " "}, "other than white space"),
        ({"think": True, "reward_model": "owner/model"}, "would read the thought"),
        ({"judge_url": "http://x/v1"}, "--judge_url and --judge_model belong together"),
        ({"judge_url": "x", "judge_model": "m"}, "--judge_url 'x' is not the base URL"),
        ({"judge_timeout": float("nan")}, "--judge_timeout nan must be at least"),
        ({"judge_budget": 1.0}, "--judge_budget needs prices"),
        ({"judge_budget": 0.0, "judge_price_in": 1.0}, "--judge_budget 0.0 must be above 0"),
        ({"judge_parameters": "[1]"}, "--judge_parameters '\\[1\\]' must be a JSON object"),
        ({"judge_parameters": '{"model": "x"}'}, "without model"),
        ({"judge_parameters": "x"}, "--judge_parameters is not JSON"),
        ({"generator": "code"}, "--allow_code_execution"),
        ({"generator": "mixed"}, "--allow_code_execution"),
    ],
)
def test_invalid_options_are_reported(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


# ---- generators


def generated(kind, split="train", size=200, seed=3):
    return list(generators.generate(kind, generators.levels_of(kind), split, size, seed, 0.1))


@pytest.mark.parametrize("kind", ["arithmetic", "schema", "mixed"])
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


@pytest.mark.parametrize(
    "options",
    [{"generator": "word_problems"}, {"generator": "schema"}, {"generator_levels": ["3", 1, "1"]},
     pytest.param({"generator": "mixed", "allow_code_execution": True}, marks=MARK)],
)  # fmt: skip
def test_generators_keep_the_contract(options):
    task = make(**options)
    check_task(task, size=4)
    assert "generator" in options or task.levels == ["1", "3"], "levels are chosen, and kept in order"


def test_flags_replace_the_rewards_of_a_generator():
    task = make(rewards=["numeric", "length=0.1", "novelty=0.2"], target_length=1)
    assert task.weights == {"numeric": 1.0, "length": 0.1, "novelty": 0.2}
    assert task.dataset("test", 1, 0)[0]["rewards"] == {"numeric": 1.0, "length": 1.0, "novelty": 1.0}


def test_arithmetic_is_short_for_the_embedded_model():
    task = make()
    tokenizer = make_tokenizer(task.tiny().tokens, 512)
    assert max(len(tokenizer.encode(row["prompt"][0]["content"])) for row in task.dataset("train", 200, 0)) <= 14
