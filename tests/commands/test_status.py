"""`trl-grpo-tasks report --status`."""

import json
import os
import socket
import subprocess
import sys
import time

from tests.support.commands import refused
from tests.support.run_folders import before_and_after, edited, write_run
from trl_grpo_tasks.commands.lock import PATIENCE, locked, running_process
from trl_grpo_tasks.commands.main import main


def said(capsys, *folders):
    assert main(["report", "--status", *map(str, folders)]) == 0
    return capsys.readouterr().out


def test_a_finished_run(tmp_path, capsys):
    text = said(capsys, write_run(tmp_path, evaluations=before_and_after()))
    assert f"{tmp_path}: tests.support.toy, model tiny" in text
    assert "finished: step 40 of 40 in 2.5 min" in text
    assert "success 0.0244 -> 0.432" in text and "pass@8 0.0488 -> 0.865" in text
    assert "held-out, before: success" in text and "held-out, GRPO: success" in text
    assert "checkpoint" not in text


def test_a_run_that_trains_now_and_then_has_stopped(tmp_path, capsys):
    folder = write_run(tmp_path, steps=10, finished=False)
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-10").mkdir()
    with locked(folder, "train"):
        text = said(capsys, folder)
    # Steps 1 to 10 took 2 + n % 3 seconds each: 30 s in all, 3 s in the median, and 30 steps are left.
    assert f"running (process {os.getpid()} on {socket.gethostname()}): step 10 of 40, 30 s so far" in text
    assert "about 90 s left" in text and "newest checkpoint: step 10" in text
    assert "not running: step 10 of 40, 30 s so far; --resume_from_checkpoint continues it" in said(capsys, folder)


def test_folders_without_a_step_and_several(tmp_path, capsys):
    with locked(tmp_path / "starting", "train"):
        (tmp_path / "starting" / "base_model").mkdir()
        assert "no step yet" in said(capsys, tmp_path / "starting")
    write_run(tmp_path / "run")
    write_run(tmp_path / "eval", evaluations=before_and_after(), steps=0, settings=False, results="evaluation.json")
    (tmp_path / "empty").mkdir()
    text = said(capsys, tmp_path / "run", tmp_path / "eval", tmp_path / "empty")
    assert text.count("finished:") == 1 and "evaluation only" in text and "not a run folder" in text


def test_hostile_files_are_printed_safely_or_refused(tmp_path, capsys):
    folder = write_run(tmp_path)
    with edited(folder / "settings.json") as settings:
        settings["model"]["name"] = "\x1b[31mred\nline"
    (folder / "outcome.json").write_text('{"best_by": "\\u001b[2J"}')
    text = said(capsys, folder)
    assert "\x1b" not in text and "red\\nline" in text
    (folder / "outcome.json").write_text("[]")
    err = refused(capsys, "report", "--status", str(folder))
    assert "outcome.json is damaged: its content must be an object" in err


def test_who_holds_a_lock_is_found_without_taking_it(tmp_path):
    assert running_process(tmp_path, "train") is None
    lock = tmp_path / ".train.lock"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lock.write_text(json.dumps({"pid": ended.pid, "host": socket.gethostname()}))
    assert running_process(tmp_path, "train") is None, "the process has ended"
    lock.write_text(json.dumps({"pid": ended.pid, "host": "another"}))
    assert running_process(tmp_path, "train") == f"process {ended.pid} on another"
    old = time.time() - PATIENCE - 5
    os.utime(lock, (old, old))
    assert running_process(tmp_path, "train") is None, "no heartbeat"
    lock.write_text("no JSON")
    assert running_process(tmp_path, "train") is None
    with locked(tmp_path, "train"):
        assert running_process(tmp_path, "train") == f"process {os.getpid()} on {socket.gethostname()}"
        assert running_process(tmp_path, "eval") is None
