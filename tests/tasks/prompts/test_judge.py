"""The reward `judge` of the prompts task: options, rows, and runs against a local server."""

import json

import pytest

from tests.support.chat_server import ChatServer
from tests.support.prompt_files import from_rows, make, write
from trl_grpo_tasks.commands import train
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.tasks.prompts import PromptsTask

KEY = "sk-planted-0123456789"
JUDGE = {"judge_url": "http://127.0.0.1:9/v1", "judge_model": "m"}
RUBRIC = {"criteria": {"a": {"description": "x", "weight": 3}, "b": "y"}, "scale": [0, 10]}


def grades(**scores):
    return json.dumps({"reason": "so", "scores": scores})


def test_rows_choose_the_judge_and_their_rubric(tmp_path):
    rows = [
        {"prompt": "one", "answer": "4", "rewards": {"numeric": 1.0, "judge": 0.5}, "rubric": RUBRIC},
        {"prompt": "two", "rewards": ["judge"]},
        {"prompt": "three", "answer": "4", "rewards": ["numeric"]},
    ]
    elsewhere = {"prompt": "p", "rewards": ["judge"], "rubric": 5}

    def grade(body):
        return grades(a=10, b=2) if '"a": x' in body["messages"][0]["content"] else grades(style=3)

    with ChatServer(grade) as server:
        options = {"judge_url": server.url, "judge_model": "m", "test_fraction": 0}
        options["judge_rubric"] = write(tmp_path, "rubric.json", {"criteria": {"style": "nice?"}})
        task = from_rows(tmp_path, rows, judge_cache=str(tmp_path / "c.jsonl"), rewards=["judge=2"], **options)
        by_prompt = {row["prompt"][0]["content"]: row for row in task.dataset("train", None, 0)}
        chosen = [json.dumps(row) for row in (*(by_prompt[name] for name in ("one", "two", "three")), elsewhere)]
        with RewardExecutor(task, workers=1) as executor:  # the worker has the judge's options, and asks nothing
            outcomes = executor.submit(chosen, ["4", "hello", "4", "text"]).result()
    one, two, three, four = (outcome.score for outcome in outcomes)
    assert task.weights == {"numeric": 1.0, "judge": 2.0}
    assert one.components == {"numeric": 1.0, "judge": pytest.approx(0.5 * (3 * 1 + 0.2) / 4)} and one.success
    assert one.total == pytest.approx(1 + 2 * 0.4)
    assert two.components == {"judge": 0.5} and not two.success
    assert "no reward of this row checks the answer; judge: so" in two.reason and two.info["judge"] == {"style": 3.0}
    assert three.components == {"numeric": 1.0} and len(server.requests) == 2
    assert four is None and "column 'rubric' must be text" in outcomes[3].reason
    (about_one,) = [r["messages"][1]["content"] for r in server.requests if "\none\n" in r["messages"][1]["content"]]
    assert "reference answer" in about_one


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"rewards": ["judge"], "rubric": "x"}, {}, r"row 1: reward 'judge' needs a model to ask"),
        ({"rewards": ["judge"]}, JUDGE, r"row 1: reward 'judge' needs a rubric"),
        ({"rewards": ["judge"], "rubric": {"criteria": {}}}, JUDGE, r"row 1: column 'rubric' needs 'criteria'"),
        ({"rewards": ["judge"]}, JUDGE | {"judge_rubric": "{"}, r"--judge_rubric is not JSON"),
        ({"rewards": ["judge"]}, JUDGE | {"judge_rubric": "missing.json"}, r"--judge_rubric file missing.json"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_reported_with_the_row(tmp_path, row, options, message):
    with pytest.raises(ValueError, match=message):
        from_rows(tmp_path, [{"prompt": "p", **row}], **options)


def test_a_key_in_the_wrong_place_is_not_shown():
    with pytest.raises(ValueError, match="must be the name of an environment variable") as error:
        make(**JUDGE, judge_key_variable=KEY)
    assert KEY not in str(error.value)


def test_a_run_folder_cannot_name_the_judge():
    assert PromptsTask.user_options({"judge_url": "http://evil/v1", "rewards": ["judge"]}) == ["judge_url"]
    assert PromptsTask.user_options({"judge_url": None}) == []


def test_an_unreachable_judge_is_reported_before_training(tmp_path):
    with ChatServer("") as server:
        pass
    task = from_rows(tmp_path, ["a"], rewards=["judge"], judge_rubric="good?", **JUDGE | {"judge_url": server.url})
    with pytest.raises(ValueError, match=r"the judge cannot be used: no connection to http://127\.0\.0\.1"):
        task.prepare(0)


@pytest.mark.exhaustive
def test_a_training_run_with_a_judge(tmp_path, monkeypatch, capsys):
    """The judge likes answers with an x. Totals are in metrics and report; the key is in no file of the run."""
    monkeypatch.setenv("MY_JUDGE", KEY)
    usage = {"prompt_tokens": 1000, "completion_tokens": 100}

    def grade(body):
        answer = body["messages"][1]["content"].split("[answer ")[1]
        return grades(quality=5 if "x" in answer.split("\n", 1)[1].split("[/answer")[0] else 1)

    file = write(tmp_path, "p.json", [{"prompt": text} for text in "abcd"])
    run = tmp_path / "run"
    with ChatServer(grade, usage=usage) as server:
        words = ["prompts", "--prompts_file", file, "--rewards", "judge", "--judge_rubric", "an x?"]
        words += ["--judge_url", server.url, "--judge_model", "m", "--judge_key_variable", "MY_JUDGE"]
        words += ["--judge_price_in", "1", "--judge_price_out", "10", "--judge_cache", str(tmp_path / "cache.jsonl")]
        small = "--use_cpu true --bf16 false --max_steps 2 --num_generations 4 --samples 1 --eval_rows 1 --report_to"
        small += " none --per_device_train_batch_size 4 --max_completion_length 8 --logging_steps 1"
        words += small.split()
        assert train.main([*words, "--output_dir", str(run)]) == 0
    assert server.requests and set(server.keys) == {f"Bearer {KEY}"}
    cost = len(server.requests) * (1000 + 1000) / 1e6
    performance = [json.loads(line) for line in (run / "performance.jsonl").read_text().splitlines()]
    logged = [line["perf/judge_cost"] for line in performance if "perf/judge_cost" in line]
    assert len(logged) == 2 and 0 < logged[0] <= logged[1] <= cost + 1e-9
    assert json.loads((run / "judge.json").read_text())["cost"] == pytest.approx(cost)
    summary = f"LLM judge: {len(server.requests)} requests"
    assert summary in (run / "report.html").read_text() and summary in capsys.readouterr().out
    metrics = [json.loads(line) for line in (run / "training_metrics.jsonl").read_text().splitlines()]
    assert all(line["reward_failures"] == 0 for line in metrics if "reward_failures" in line)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10 and not [path for path in files if KEY.encode() in path.read_bytes()]
    assert get_task("prompts").llm_judge() is None


def test_a_row_in_the_form_of_the_data_set_cannot_name_a_file_as_its_rubric(tmp_path):
    """Rows come from visitors and requests too; their columns are checked whatever their form."""
    (tmp_path / "secret.json").write_text('{"criteria": {"secret": "planted"}}')
    seen = []

    def grade(body):
        seen.append(json.dumps(body))
        return grades(quality=3)

    with ChatServer(grade) as server:
        options = {"judge_url": server.url, "judge_model": "m", "judge_cache": str(tmp_path / "c.jsonl")}
        task = make(rewards=["judge", "numeric"], judge_rubric="nice?", **options)
        row = {"prompt": [{"role": "user", "content": "p"}], "rewards": {"judge": 1.0}}
        with RewardExecutor(task, workers=0) as executor:
            rubric = str(tmp_path / "secret.json")
            executor.submit([json.dumps({**row, "rubric": rubric})], ["hello"]).result()
    assert len(seen) == 1 and rubric in seen[0] and "planted" not in seen[0]
    with pytest.raises(ValueError, match="the row: column 'rubric' needs 'criteria'"):
        task.row_from({**row, "rubric": {"criteria": {}}})
    with pytest.raises(ValueError, match="the row: reward 'numeric' needs a column 'answer'"):
        task.row_from({**row, "rewards": {"numeric": 1.0}})
