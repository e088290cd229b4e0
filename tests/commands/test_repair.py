"""`--repair_turns` on the command line: training, evaluation, report, export and generation of several turns."""

import json
import re
from pathlib import Path

import pytest

from tests.support.commands import refused, said
from trl_grpo_tasks.commands.main import main
from trl_grpo_tasks.constraints.turns import MARK, split_turns

SHORT = ["--use_cpu", "--bf16", "false", "--report_to", "none", "--max_steps", "1", "--train_rows", "8", "--eval_rows",
         "4", "--num_generations", "2", "--per_device_train_batch_size", "4", "--reward_workers", "0"]  # fmt: skip
TURNS = ["--repair_turns", "2", "--max_completion_length", "32"]


def test_a_run_and_what_is_made_of_it(my_task, capsys):
    words = ["my_task.py", *SHORT, *TURNS, "--cold_start_steps", "2"]
    assert main(["train", *words, "--output_dir", "run"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^turns +\d", shown, re.MULTILINE) and re.search(r"^repaired +\d", shown, re.MULTILINE)
    samples = json.loads(Path("run/results.json").read_text())["evaluations"][-1]["samples"]
    assert {len(split_turns(sample["completion"])[0]) for sample in samples} >= {2}
    assert all(sample["score"]["info"]["turns"] == len(split_turns(sample["completion"])[0]) for sample in samples)
    assert "<ol class=turns>" in Path("run/report.html").read_text()
    for command in (["report", "run"], ["export", "run", "--top", "2"]):
        assert main([*command, "--task", "my_task.py"]) == 0
    assert "<ol class=turns>" in Path("run/report.html").read_text()
    assert MARK not in Path("run/exports/sample_1.html").read_text()  # the files are those of the last turn
    code, out, err = said(capsys, "solve", "run", "--task", "my_task.py", "--text", "abc", "--all")
    assert code == 0 and "turns " in out, err
    code, out, err = said(capsys, "eval", "run", "--task", "my_task.py", *SHORT, *TURNS, "--out", "compared")
    assert code == 0 and "up to 2 turns" in out, err


@pytest.mark.parametrize(
    ("task", "given", "message"),
    [
        ("brick", ["--repair_turns", "2", "--editor", "rollback"], "--editor rollback edits a single answer"),
        ("infill", ["--repair_turns", "2"], "a masked language model fills all gaps at once"),
        ("brick", [*TURNS, "--max_completion_length", "4"], "max_completion_length=4 is too short for 2 turns"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(my_task, capsys, task, given, message):
    assert message in refused(capsys, "train", task, *SHORT, "--output_dir", "run", *given)
    assert not Path("run/settings.json").exists()
