"""Errors of commands: one line, the traceback with --debug, and a line that tells a bug from a mistake of the user."""

import pytest

from tests.support.commands import refused
from tests.support.gguf_file import write_gguf
from trl_grpo_tasks.commands import main as cli
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.errors import takes_debug
from trl_grpo_tasks.tasks.brick.task import BrickTask


def bug(words):
    return int("no number")


def mistake(words):
    raise ValueError("give a number")


@pytest.mark.parametrize(("command", "place"), [(bug, 'int("no number")'), (mistake, "raise ValueError")])
def test_debug_shows_where_an_error_was_raised(monkeypatch, capsys, command, place):
    monkeypatch.setitem(cli.COMMANDS, "list", command)
    for words in (["list", "--debug"], ["--debug", "list"]):
        assert cli.main(words) == 2
        err = capsys.readouterr().err
        assert err.startswith("Traceback") and place in err and err.splitlines()[-1].startswith("error: ")


def test_an_error_that_nobody_raised_says_how_to_find_it(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "list", bug)
    assert cli.main(["list"]) == 2
    message = "invalid literal for int() with base 10: 'no number' (ValueError; --debug shows where)"
    assert capsys.readouterr().err == f"error: {message}\n"
    monkeypatch.setitem(cli.COMMANDS, "list", mistake)
    assert cli.main(["list"]) == 2 and capsys.readouterr().err == "error: give a number\n"


def test_train_takes_debug(capsys):
    assert run.main(["brick", "--debug", "--steps", "-5"]) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Traceback") and last == "error: --max_steps -5 must be at least 1, or -1"
    assert run.main(["brick", "--steps", "-5"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_option_of_transformers_with_the_same_name_is_passed_on():
    seen = []
    command = takes_debug(lambda words: seen.append(words) or 0)
    command(["a", "--debug", "underflow_overflow"])
    command(["a", "--debug"])
    assert seen == [["a", "--debug", "underflow_overflow"], ["a"]]


def test_a_file_that_ends_too_early_is_found_before_rows_are_made(tmp_path, monkeypatch, capsys):
    write_gguf(tmp_path / "small.gguf")
    whole = (tmp_path / "small.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    monkeypatch.setattr(BrickTask, "dataset", lambda *_: pytest.fail("rows were made first"))
    words = ["brick", "--model", str(tmp_path / "half.gguf"), "--output_dir", str(tmp_path / "run")]
    assert "half.gguf cannot be read" in refused(capsys, "train", *words, "--use_cpu", "true", "--report_to", "none")
