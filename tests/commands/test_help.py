"""Help: every command has a screen, which fits; --help-all lists every option."""

import sys

import pytest

from trl_grpo_tasks.commands import main as cli
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.arguments import RunArguments
from trl_grpo_tasks.commands.command_words import ALIASES
from trl_grpo_tasks.commands.help_screens import SCREENS
from trl_grpo_tasks.registry import TASKS, get_task
from trl_grpo_tasks.training.config import TaskGRPOConfig


def said(capsys, *words):
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


def check_screen(text):
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 100, text


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_a_command_is_one_screen(capsys, command):
    short = said(capsys, command, "-h")
    assert short.startswith(f"usage: trl-grpo-tasks {command}")
    check_screen(short)
    assert said(capsys, command, "--help") == said(capsys, "help", command) == short
    if command in ("train", "eval"):
        assert f"'trl-grpo-tasks {command} --help-all [WORD]' lists every option" in short


@pytest.mark.parametrize("command", ["train", "eval --task", "serve --task", "check", "tool"])
@pytest.mark.parametrize("task", sorted(TASKS))
def test_help_names_the_options_of_the_task(capsys, command, task):
    text = said(capsys, *command.split(), task, *(["score"] if command == "tool" else []), "-h")
    check_screen(text)
    assert f"options of task {task}:" in text
    assert all(f"--{name}" in text for name in vars(get_task(task).options))


def test_the_options_of_a_small_task_are_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said(capsys, "new", "my_task")
    assert "--word_length  Letters in the longest word" in said(capsys, "train", "my_task.py", "-h")


def test_help_without_a_command_is_one_screen(capsys):
    text = said(capsys)
    check_screen(text)
    assert text == said(capsys, "-h") == said(capsys, "help") == said(capsys, "--help")
    assert all(f"\n  {command}" in text for command in cli.COMMANDS)
    assert len(cli.COMMANDS) <= 13


def test_version(capsys):
    from importlib.metadata import version

    assert said(capsys, "--version") == f"trl-grpo-tasks {version('trl_grpo_tasks')}\n"


def test_help_all_lists_every_option_ours_first(capsys):
    text = said(capsys, "train", "brick", "--help-all")
    headings = [
        "the run:", "task brick:", "GRPO, added by this package:", "GRPO, added by this package: replay:",
        "the model (TRL's", "GRPO (TRL's", "training (transformers'",
    ]  # fmt: skip
    places = [text.index(f"\n{heading}") for heading in headings]
    assert places == sorted(places)
    for options in (RunArguments, TaskGRPOConfig, type(get_task("brick").options)):
        fields = [name for name, field in options.__dataclass_fields__.items() if field.init and name[0] != "_"]
        assert all(f"--{name}" in text for name in fields)
    assert "  --cold_start_steps N" in text and "--max-steps" not in text and "--max_steps, --steps N" in text
    assert "Turn --canonical off." in text  # not what --canonical does
    assert max(map(len, text.splitlines())) <= 120
    assert "--brick_levels" not in said(capsys, "train", "--help-all")


@pytest.mark.parametrize("words", [["train", "brick"], ["solve", "--task", "brick"], ["tool", "brick", "score"]])
def test_help_all_with_a_word_lists_what_is_about_it(capsys, words):
    text = said(capsys, *words, "--help-all", "Max_Bricks")
    assert "--max_bricks" in text and "--brick_levels" not in text and "--temperature" not in text


def test_every_option_has_a_heading(capsys):
    heading, lone = "", []
    for line in said(capsys, "train", "brick", "--help-all").splitlines():
        heading = line if line.endswith(":") and not line.startswith(" ") else heading
        lone += [line] if line.startswith("  --") and not heading else []
    assert lone == []


def test_screens_name_options_that_exist(capsys):
    every = said(capsys, "train", "--help-all")
    for parts in SCREENS.values():
        for option in parts["options"]:
            name = option.split()[0]
            assert name in ("--config", "RUN_OR_MODEL") or f"{name} " in every or f"{name}\n" in every, name
    assert all(f"{alias} " in every for alias in ALIASES)


def test_help_of_train_py(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "-h"])
    with pytest.raises(SystemExit) as end:
        run.main()
    text = capsys.readouterr().out
    assert end.value.code == 0 and text.startswith("usage: accelerate launch train.py [TASK]")
    check_screen(text)


@pytest.mark.parametrize(("task", "tool"), [(t, tool) for t in sorted(TASKS) for tool in get_task(t).tools])
def test_help_of_a_tool_is_one_screen(capsys, monkeypatch, task, tool):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        raise SystemExit(cli.main(["tool", task, tool, "-h"]))
    text = capsys.readouterr().out
    assert end.value.code == 0 and text.startswith(f"usage: trl-grpo-tasks tool {task} {tool}")
    check_screen(text)
