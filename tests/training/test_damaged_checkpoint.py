"""A run does not resume from a checkpoint whose files are damaged: it takes the one before, or says why it cannot."""

import os
import shutil

import pytest

from tests.commands.test_train import words
from tests.support.commands import refused
from tests.support.training import parameters, toy_trainer
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.models import checkpoints

OPTIONS = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "constrain": True, "replay_size": 4}


def harm(path, how):
    if how == "missing":
        return path.unlink()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    return path.write_bytes(content)


@pytest.fixture(scope="module")
def whole(tiny_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer = toy_trainer(tiny_path, folder, **OPTIONS)
    trainer.train()
    return folder, parameters(trainer)


def test_all_files_of_a_real_checkpoint_are_checked(tmp_path, whole):
    names = [path.name for path in (whole[0] / "checkpoint-2").iterdir() if path.name != "complete"]
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "task_state_0.pt", "trainer_state.json"} < set(names)
    for name in names:
        copy = shutil.copytree(whole[0] / "checkpoint-2", tmp_path / name / "checkpoint-2")
        harm(copy / name, "flipped")
        assert checkpoints.damage(copy).startswith(f"{name} ")


def test_a_damaged_checkpoint_that_is_named_is_refused(tiny_path, tmp_path, whole):
    copy = shutil.copytree(whole[0] / "checkpoint-2", tmp_path / "checkpoint-2")
    (copy / "rng_state.pth").unlink()
    damage = r"checkpoint-2 cannot be resumed: rng_state\.pth is missing"
    with pytest.raises(checkpoints.CheckpointError, match=damage):
        toy_trainer(tiny_path, tmp_path / "run", **OPTIONS).train(resume_from_checkpoint=str(copy))


def test_the_checkpoint_before_a_damaged_one_is_resumed(tiny_path, tmp_path, whole, capsys):
    folder, weights = whole
    (folder / "checkpoint-10").mkdir(exist_ok=True)
    harm(folder / "checkpoint-3" / "optimizer.pt", "flipped")
    harm(folder / "checkpoint-2" / "trainer_state.json", "missing")
    again = toy_trainer(tiny_path, folder, **OPTIONS)
    again.train(resume_from_checkpoint=True)
    said = capsys.readouterr().out.splitlines()
    assert f"skipping {folder / 'checkpoint-3'}: optimizer.pt has changed since it was written" in said
    assert f"skipping {folder / 'checkpoint-2'}: trainer_state.json is missing" in said
    assert f"skipping {folder / 'checkpoint-10'}: it was not written completely" in said
    assert f"resuming from {folder / 'checkpoint-1'}" in said
    assert all(value.equal(weights[name]) for name, value in parameters(again).items())
    with pytest.raises(ValueError, match="no complete checkpoint"):
        toy_trainer(tiny_path, tmp_path, **OPTIONS).train(resume_from_checkpoint=True)


def test_a_command_refuses_damaged_checkpoints_before_anything_slow(tmp_path, monkeypatch, capsys):
    options = {"max_steps": 2, "eval_before_and_after": False, "task": "tests.support.toy", "max_completion_length": 5}
    command = words(tmp_path / "run", **options)
    assert run.main(command) == 0
    monkeypatch.setattr(run, "run_training", lambda *_: pytest.fail("the run was started"))
    monkeypatch.setattr("trl_grpo_tasks.commands.plan.rows_of", lambda *_: pytest.fail("rows were made"))
    harm(tmp_path / "run" / "checkpoint-1" / "optimizer.pt", "flipped")
    capsys.readouterr()
    line = refused(capsys, "train", *command, "--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-1"))
    assert "checkpoint-1 cannot be resumed: optimizer.pt has" in line and "restore the files" in line
    harm(tmp_path / "run" / "checkpoint-2" / "scheduler.pt", "missing")
    for value in ("auto", "true"):
        err = refused(capsys, "train", *command, "--resume_from_checkpoint", value)
        assert "is intact (checkpoint-2: scheduler.pt is missing; checkpoint-1: optimizer.pt has" in err


def test_a_damaged_best_checkpoint_is_not_loaded_at_the_end(tiny_path, tmp_path, capsys):
    options = OPTIONS | {"best_by": "reward", "eval_steps": 1, "per_device_eval_batch_size": 8}
    first = toy_trainer(tiny_path, tmp_path, **options)
    first.train()
    best = first.state.best_model_checkpoint
    harm(tmp_path / os.path.basename(best) / "model.safetensors", "flipped")
    before = parameters(first)
    first._load_best_model()
    kept = "model.safetensors has changed since it was written; the model of the last step is kept"
    assert kept in capsys.readouterr().out
    assert all(value.equal(before[name]) for name, value in parameters(first).items())
