"""One run at a time writes to a folder; a run whose folder is taken away says so."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.commands.test_train import ROOT, words
from tests.support.commands import refused
from trl_grpo_tasks.commands import lock
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.lock import locked
from trl_grpo_tasks.training.callbacks import MetricsFile

HOLD = """
import sys, time
from trl_grpo_tasks.commands.lock import locked
with locked(sys.argv[1], "train"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder `run`."""
    command, environment = [sys.executable, "-c", HOLD, str(tmp_path / "run")], os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_and_told_who_is_there(tmp_path, capsys, holder):
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    line = refused(capsys, "train", *words(tmp_path / "run"))
    assert f"{tmp_path / 'run'} is in use by another run" in line and "choose another --out" in line
    assert f"(process {holder.pid} on {socket.gethostname()})" in line
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before == [".train.lock"]
    with locked(tmp_path / "run", "eval"):  # which writes files of its own
        pass


def test_the_lock_of_a_process_that_was_killed_holds_nobody(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    path = tmp_path / "run" / ".train.lock"
    assert json.loads(path.read_text())["pid"] == holder.pid
    with locked(tmp_path / "run", "train"):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not path.exists()


def test_where_the_file_system_has_no_locks_the_process_is_looked_for(tmp_path, monkeypatch, holder):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    with pytest.raises(ValueError, match=f"process {holder.pid} on "), locked(tmp_path / "run", "train"):
        pass
    holder.kill()
    holder.wait()
    with locked(tmp_path / "run", "train"):
        pass


@pytest.mark.parametrize("lives", [True, False])
def test_the_lock_of_another_machine_holds_while_it_gives_signs_of_life(tmp_path, monkeypatch, capsys, lives):
    monkeypatch.setattr(lock, "PATIENCE", 5.0 if lives else 0.2)
    path = tmp_path / ".train.lock"
    path.write_text(json.dumps({"pid": 7, "host": "another-machine"}))
    times, ended = iter(range(1, 10**6)), threading.Event()

    def beat():
        while lives and not ended.wait(0.01):
            os.utime(path, (0, next(times)))

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        if lives:
            used = r"in use by another run \(process 7 on another-machine\)"
            with pytest.raises(ValueError, match=used), locked(tmp_path, "train"):
                pass
        else:
            with locked(tmp_path, "train"):
                assert json.loads(path.read_text())["pid"] == os.getpid()
    finally:
        ended.set()
        beating.join()
    assert "to see whether" in capsys.readouterr().out


def test_a_run_that_holds_a_folder_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.01)
    path, touched = tmp_path / ".train.lock", threading.Event()
    real = os.utime
    monkeypatch.setattr(lock.os, "utime", lambda given: (real(given), touched.set()))
    with locked(tmp_path, "train"):
        real(path, (0, 0))
        touched.clear()
        assert touched.wait(30) and path.stat().st_mtime > 0


def test_a_run_that_is_refused_leaves_no_folder_and_no_lock(tmp_path, capsys):
    for _ in range(2):
        assert "in use" not in refused(capsys, "train", *words(tmp_path / "a" / "run", model_name_or_path="./nowhere"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_deleted_during_a_run_is_no_success(tmp_path, monkeypatch, capsys):
    real = MetricsFile.on_log

    def deleting(self, args, state, *rest, **kwargs):
        if state.global_step == 2 and Path(args.output_dir, "settings.json").exists():
            shutil.rmtree(args.output_dir)
        real(self, args, state, *rest, **kwargs)

    monkeypatch.setattr(MetricsFile, "on_log", deleting)
    assert run.main(words(tmp_path / "run", model_name_or_path=str(_model(tmp_path)))) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert f"{tmp_path / 'run'} was deleted or emptied during the run" in line
    assert (tmp_path / "run" / "model.safetensors").is_file(), "what there is at the end is saved all the same"


def _model(folder):
    from trl_grpo_tasks.commands.task_template import MyTask
    from trl_grpo_tasks.models.tiny import save_tiny

    save_tiny(MyTask().tiny(), folder / "model")
    return folder / "model"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_lock_is_not_taken_through_a_link(tmp_path, is_there):
    victim = tmp_path / "victim"
    if is_there:
        victim.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".train.lock").symlink_to(victim)
    with pytest.raises(ValueError, match=r"\.train\.lock is a link.*delete it"), locked(tmp_path / "run", "train"):
        pass
    assert victim.read_text() == "mine" if is_there else not victim.exists()
