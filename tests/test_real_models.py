"""benchmarks/real: prepared data, tables, and a whole small comparison with TRL."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trl_grpo_tasks.models.loading import prepare_model
from trl_grpo_tasks.registry import get_task

FOLDER = Path(__file__).parents[1] / "benchmarks" / "real"
sys.path.insert(0, str(FOLDER))

import compare  # noqa: E402
import prepare  # noqa: E402

SMALL = {
    "task": "prompts",
    "options": {"generator": "arithmetic", "generator_levels": ["1"]},
    "rows": 4,
    "samples": 2,
    "train_rows": 40,
    "max_completion_length": 4,
    "minutes": 0.02,
    "marks": [0.001],
    "seeds": [1],
    "settings": {"learning_rate": 1e-3, "num_generations": 4, "per_device_train_batch_size": 8, "beta": 0.0},
    "ways": {"TRL": {"trainer": "trl"}, "ours": {"trainer": "ours"}},
}


def test_word_problems_become_prompts_with_answers(tmp_path):
    for split in ("train", "test"):
        line = json.dumps({"question": f"A {split} question?", "answer": "1 + 1 = 2\n#### 2"})
        (tmp_path / f"{split}.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    found = prepare.gsm8k(str(tmp_path))
    assert [rows[0]["prompt"].split("?")[0] for rows in found.values()] == ["A train question", "A test question"]
    path = tmp_path / "gsm8k_train.jsonl"
    path.write_text(json.dumps(found["gsm8k_train"][0]))
    task = get_task("prompts", {"prompts_file": str(path), "rewards": ["numeric"], "test_fraction": 0})
    (row,) = task.dataset("train", None, 0)
    assert task.score(row, "It is 2.").success and not task.score(row, "It is 3.").success


def test_functions_become_prompts_with_unit_tests(tmp_path):
    problem = {
        "prompt": "def double(x):\n",
        "canonical_solution": "    return 2 * x\n",
        "entry_point": "double",
        "test": "def check(candidate):\n    assert candidate(2) == 4",
    }
    source = tmp_path / "problems.jsonl"
    source.write_text(json.dumps(problem))
    path = tmp_path / "humaneval.jsonl"
    path.write_text(json.dumps(prepare.humaneval(str(source))["humaneval"][0]))
    task = get_task("prompts", {"prompts_file": str(path), "allow_code_execution": True, "test_fraction": 0})
    (row,) = task.dataset("train", None, 0)
    assert task.score(row, task.gold(row)).success
    assert not task.score(row, "```python\ndef double(x):\n    return x\n```").success


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_tables_can_be_read(path):
    table = compare.read_table(path)
    assert max(table["marks"]) < table["minutes"]


def test_wrong_tables_are_refused(tmp_path):
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "way": {}}))
    with pytest.raises(ValueError, match="way unknown or missing; the keys are"):
        compare.read_table(path)
    path.write_text(yaml.safe_dump({**SMALL, "ways": {"x": {"trainer": "verl"}}}))
    with pytest.raises(ValueError, match="way 'x' has trainer 'verl'; trainers are trl, trl\\+vllm, ours"):
        compare.read_table(path)


@pytest.mark.exhaustive
def test_a_small_comparison_with_trl(tmp_path):
    model = prepare_model("tiny", get_task("prompts"), tmp_path / "model")
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    words = [sys.executable, str(FOLDER / "compare.py"), str(tmp_path / "small.yaml"), "--models", f"tiny={model}"]
    words += ["--out", str(tmp_path / "out")]
    said = subprocess.run(words, capture_output=True, text=True)
    folder = tmp_path / "out" / "small"
    assert said.returncode == 0 and "error" not in said.stdout.lower(), said.stdout + said.stderr
    table = (folder / "table.md").read_text()
    assert "| TRL | " in table and "| ours | " in table and (folder / "tiny curves.png").stat().st_size > 5000
    for way in ("TRL", "ours"):
        cell = json.loads((folder / f"tiny {way} 1.json").read_text())
        assert [len(mark["samples"]) for mark in cell["marks"]] == [16, 16]
        lines = [json.loads(line) for line in (folder / "logs" / f"tiny {way} 1.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "reward" in line]
        assert [line["step"] for line in steps] == list(range(1, cell["steps"] + 1))
        assert cell["minutes"] >= 0.02 > sum(cell["step_s"][:-1]) / 60
        assert steps[-1]["tokens"] == cell["marks"][-1]["tokens"] > 0
        for line, mark in zip([line for line in lines if "held_out" in line], cell["marks"], strict=True):
            both = [line["held_out"][half]["success"] for half in ("choose", "report")]  # halves of the same size
            assert sum(both) / 2 == pytest.approx(sum(s["score"]["success"] for s in mark["samples"]) / 16)
    again = subprocess.run(words, capture_output=True, text=True)
    assert "done" not in again.stdout, "finished cells were run again"
