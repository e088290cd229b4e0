"""Fixtures of the tests of commands."""

import sys

import pytest

from trl_grpo_tasks.commands.main import main


@pytest.fixture
def my_task(tmp_path, monkeypatch, capsys):
    """The task that `new` writes, in an empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["new", "my_task"]) == 0
    capsys.readouterr()
    return tmp_path / "my_task.py"
