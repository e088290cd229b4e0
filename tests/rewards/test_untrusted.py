"""Code named in a run folder or a data file is not imported unless the user names it on the command line, and files
that a run folder names are not written."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.commands import command, refused
from tests.support.run_folders import before_and_after, write_run
from trl_grpo_tasks.commands import main as cli
from trl_grpo_tasks.report.page import task_of
from trl_grpo_tasks.tasks.infill.task import JUDGES

PLANTED = "from pathlib import Path\nPath('it_ran').touch()\ndef reward(row, completion): return 1.0\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a module and a task file that create the file `it_ran` when they are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in list(sys.modules):
        if name.split(".")[0] in ("planted", "_task_file_planted"):
            monkeypatch.delitem(sys.modules, name)
    (tmp_path / "planted").mkdir()
    for name in ("planted.py", "planted/__init__.py", "planted/task.py"):
        (tmp_path / name).write_text(PLANTED + "from trl_grpo_tasks.commands.task_template import MyTask as TASK\n")
    return tmp_path


def run_of(folder, spec, options):
    run = write_run(folder / "run", evaluations=before_and_after())
    settings = {"task": {"name": "toy", "version": "1", "options": options}, "run": {"task": spec}}
    (run / "settings.json").write_text(json.dumps(settings))
    return run


@pytest.mark.parametrize("spec", ["planted.py", "planted.task", "./run/planted.py", "os.path", "toy\x1b[2J"])
@pytest.mark.parametrize("typed", [["report", "run"], ["solve", "run", "--text", "a b"]])
def test_a_task_named_by_a_run_folder_is_not_imported(folder, capsys, spec, typed):
    run = run_of(folder, spec, {"word_length": 4, "words": ["a", "b c"], "none": None, "on": True})
    (run / "planted.py").write_text(PLANTED)
    line = refused(capsys, *typed)
    assert not Path("it_ran").exists() and "\x1b" not in line
    assert "for safety is not taken from a run folder; if you trust it, name it yourself: trl-grpo-tasks " in line
    shown = shlex.split(line.split("yourself: trl-grpo-tasks ")[1])
    flags = ["--word_length", "4", "--words", "a", "b c", "--on", "true"]
    assert shown == [*typed, "--task", spec.replace("\x1b", "\\x1b"), *flags]


def test_a_task_named_by_results_alone_is_not_imported_either(folder, capsys):
    run = write_run(folder / "run", evaluations=before_and_after(), settings=False)
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps(results | {"task": "planted.task"}))
    assert cli.main(["report", "run"]) == 2
    assert "name it yourself" in capsys.readouterr().err and not Path("it_ran").exists()


def test_the_command_that_is_shown_works(folder, capsys):
    run_of(folder, "planted.py", {"word_length": 4})
    assert cli.main(["report", "run"]) == 2
    shown = shlex.split(capsys.readouterr().err.split("yourself: trl-grpo-tasks ")[1])
    assert cli.main(shown) == 0
    assert Path("it_ran").exists() and Path("run/report.html").is_file()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rewards": ["planted:reward"]}, "--rewards"),
        ({"rewards": ["numeric", "planted.task.reward=0.5"]}, "--rewards"),
        ({"generator": "code", "allow_code_execution": True}, "--allow_code_execution"),
    ],
)
def test_code_named_by_options_of_a_built_in_task_is_not_imported(folder, capsys, options, named):
    """The last case would run the programs in the run's results."""
    run_of(folder, "prompts", options)
    said = refused(capsys, "report", "run")
    assert f"names code to run or files to write ({named})" in said and not Path("it_ran").exists()
    assert task_of(run_of(folder, "prompts", {"rewards": ["numeric=2"]})).name == "prompts"


@pytest.mark.parametrize(
    ("task", "options", "named"),
    [("brick", {"solver_log": "victim"}, "--solver_log"), ("infill", {"judges_folder": "victims"}, "--judges_folder")],
)
def test_files_named_by_options_of_a_built_in_task_are_not_written(folder, capsys, task, options, named):
    run_of(folder, task, options)
    for words in (["report", "run"], ["solve", "run", "--text", "a table"], ["play", "run"]):
        said = refused(capsys, *words)
        assert f"names code to run or files to write ({named})" in said and f"{named} victim" in said
    assert not Path("victim").exists() and not Path("victims").exists()


def test_judges_that_are_there_are_read_from_the_folder_that_a_run_names(folder):
    for name in JUDGES:
        (folder / "judges" / name).mkdir(parents=True)
        (folder / "judges" / name / "config.json").write_text("{}")
    assert task_of(run_of(folder, "infill", {"judges_folder": "judges"})).options.judges_folder == "judges"


@pytest.mark.parametrize("rewards", ["planted:reward", ["numeric", "planted.reward"], {"planted.task:reward": 1}])
def test_a_reward_named_by_a_row_is_not_imported(folder, rewards):
    rows = [{"prompt": f"p{i}", "answer": "1", "rewards": rewards} for i in range(4)]
    (folder / "rows.json").write_text(json.dumps(rows))
    score = ["tool", "prompts", "score", "--prompts_file", "rows.json", "--input", "-"]
    code, _, err = command(*score, cwd=folder)
    (name,) = (name for name in rewards if ":" in name or "." in name) if not isinstance(rewards, str) else [rewards]
    assert code == 2 and not Path("it_ran").exists()
    assert f"rows.json, row 1: reward {name!r} refers to code" in err
    assert f"if you trust it, pass --rewards {name}\n" in err
    line = json.dumps({"row": {"prompt": "p", "answer": "1", "rewards": {name: 2}}, "completion": "1"})
    code, out, err = command(*score, "--rewards", name, cwd=folder, stdin=line)
    assert code == 0 and json.loads(out)["components"] == {name: 2.0}, err


def test_a_command_without_a_task_imports_nothing_from_the_current_folder(folder):
    """A file there could have the name of a library that is not installed, and would be imported instead of it."""
    run_of(folder, "brick", {})
    (folder / "run" / "results.json").unlink()
    assert cli.main(["report", "run"]) == 0
    assert str(folder) not in sys.path
