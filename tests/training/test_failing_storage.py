"""A disk that is full in the middle of a run: nothing that was saved is lost. test_failures.py has other failures.

The disks are real: small ones in memory, mounted for a test, that are filled while a run trains.
"""

import errno
import signal
import subprocess
from functools import partial

import pandas
import pytest
import torch
from transformers import TrainerCallback

from tests.commands.test_train import assert_same_weights, metrics, words
from tests.support.training import parameters, toy_trainer
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.models import checkpoints
from trl_grpo_tasks.report.trackers import TrackedSamples

EVERYTHING = {
    "max_steps": 6, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "constrain": True, "beta": 0.1,
    "reference_mode": "ema", "replay_size": 4, "log_completions": True, "num_completions_to_print": 0,
}  # fmt: skip


@pytest.fixture
def disk(tmp_path):
    """A disk of 4 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a disk needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


class Full(TrainerCallback):
    """Fills a disk before step `first`, and makes room before step `last`."""

    def __init__(self, disk, first, last=None):
        self.disk, self.first, self.last = disk, first, last
        self.newest = None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.first:
            self.fill()
        if state.global_step + 1 == self.last:
            self.newest = checkpoints.newest_intact(self.disk / "run")
            self.make_room()

    def fill(self):
        with open(self.disk / "ballast", "wb", buffering=0) as file:
            size = 2**16
            while size:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    size //= 2

    def make_room(self):
        (self.disk / "ballast").unlink()


@pytest.fixture(scope="module")
def undisturbed(tiny_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    trainer = toy_trainer(tiny_path, folder, **EVERYTHING)
    trainer.train()
    return metrics(folder), parameters(trainer)


def test_training_survives_a_full_disk_and_saves_again_when_there_is_room(
    tiny_path, tmp_path, disk, undisturbed, capsys
):
    trainer = toy_trainer(tiny_path, disk / "run", **EVERYTHING)
    broken = Full(disk, first=3, last=5)
    trainer.add_callback(broken)
    trainer.train()
    said = capsys.readouterr()
    assert broken.newest == (disk / "run" / "checkpoint-2", {}), "no incomplete checkpoint takes up space"
    assert said.out.count("could not be saved") == 1 and said.out.count("samples could not be logged") == 1
    (line,) = [line for line in said.out.splitlines() if "could not be saved" in line]
    assert "checkpoint-3 could not be saved" in line and "No space left on device" in line
    assert line.endswith("checkpoint-2 is complete")
    assert said.out.count("metrics could not be written") == 1
    assert sorted(path.name for path in (disk / "run").glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]
    assert all(checkpoints.is_complete(path) for path in (disk / "run").glob("checkpoint-*"))
    lines, weights = undisturbed
    assert metrics(disk / "run") == lines
    assert all(torch.equal(value, weights[name]) for name, value in parameters(trainer).items())
    written = [pandas.read_parquet(path)["step"].iloc[0] for path in (disk / "run" / "completions").iterdir()]
    assert sorted(written) == [1, 2, 5, 6]


SHORT = {"max_steps": 4, "eval_before_and_after": False, "task": "tests.support.toy", "max_completion_length": 5}


def with_callbacks(monkeypatch, *callbacks):
    monkeypatch.setattr(run, "run_training", partial(run.run_training, callbacks=callbacks))


def test_a_run_that_ends_on_a_full_disk_fails_and_resumes_from_its_last_checkpoint(
    tmp_path, disk, monkeypatch, capsys
):
    assert run.main(words(tmp_path / "undisturbed", **SHORT)) == 0
    capsys.readouterr()
    broken = Full(disk, first=3)
    with monkeypatch.context() as patch:
        with_callbacks(patch, broken)
        assert run.main(words(disk / "run", **SHORT)) == 1
    said = capsys.readouterr()
    assert said.out.count("could not be saved") == 1
    (line,) = said.err.splitlines()
    assert line.startswith("error: no space left on the device") and "--resume_from_checkpoint" in line
    assert checkpoints.newest_complete(disk / "run").name == "checkpoint-2"
    broken.make_room()
    assert run.main([*words(disk / "run", **SHORT), "--resume_from_checkpoint", "auto"]) == 0
    assert "resuming from" in capsys.readouterr().out
    assert_same_weights(disk / "run", tmp_path / "undisturbed")
    assert metrics(disk / "run") == metrics(tmp_path / "undisturbed")


class Stop(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)


def test_a_run_that_is_stopped_on_a_full_disk_does_not_claim_to_be_saved(disk, monkeypatch, capsys):
    with_callbacks(monkeypatch, Full(disk, first=3), Stop())
    assert run.main(words(disk / "run", **SHORT)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no space left on the device")
    assert checkpoints.newest_complete(disk / "run").name == "checkpoint-2"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tracker_whose_disk_is_full_is_left_out(tiny_path, tmp_path, disk, monkeypatch):
    """TensorBoard writes in a thread, and raises its error at a later call."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(disk / "runs"))
    trainer = toy_trainer(tiny_path, tmp_path / "run", report_to=["tensorboard"], max_steps=6)
    said = []
    trainer.add_callback(TrackedSamples(trainer, say=said.append))
    trainer.add_callback(Full(disk, first=3))
    trainer.train()
    (line,) = said
    assert line.startswith("the tracker tensorboard failed (OSError: [Errno 28] No space left on device"), line
    assert "training continues without it" in line
    assert [one["step"] for one in metrics(tmp_path / "run")][:6] == [1, 2, 3, 4, 5, 6]
