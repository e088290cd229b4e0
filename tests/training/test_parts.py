"""Checkpoints without a trainer: they get what host.py says, and nothing else."""

from collections import defaultdict
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from transformers import TrainerState

from tests.support.training import config
from trl_grpo_tasks.models import checkpoints
from trl_grpo_tasks.training.checkpoint import Checkpoints


class Part:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def checkpointed(folder, value):
    """A host after `value` batches, with a part of each kind."""
    parts = {True: {"common": Part(value)}, False: {"own": Part(-value)}}
    masks = SimpleNamespace(state_of_masks=lambda batches: {}, load_masks=lambda state, batches: None)
    made = SimpleNamespace(
        args=config(folder, steps_per_generation=2), accelerator=Accelerator(cpu=True), state=TrainerState(),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)}, mode="train", extras={},
        generation=masks, parts=lambda is_common: parts[is_common], is_deepspeed_enabled=False, is_fsdp_enabled=False,
        is_sharded=False, num_iterations=1, updated_at=value, _step=value,
        _buffered_inputs=[{"ids": torch.arange(value)}], _globalstep_last_logged=value, _tr_loss=torch.tensor(1.5),
    )  # fmt: skip
    made._metrics["train"]["loss"].append(float(value))
    return made, parts


def test_checkpoints_restore_what_they_saved(tmp_path):
    folder = tmp_path / "checkpoint-3"
    made, _ = checkpointed(tmp_path, 3)
    Checkpoints(made).save(folder, lambda: folder.mkdir(exist_ok=True))
    assert checkpoints.is_complete(folder)
    other, parts = checkpointed(tmp_path, 5)
    Checkpoints(other).load_state(str(folder))
    assert (parts[True]["common"].value, parts[False]["own"].value) == (3, -3)
    assert (other._step, other.updated_at, other._metrics["train"]["loss"]) == (3, 3, [3.0])
    assert other._buffered_inputs[0]["ids"].equal(torch.arange(3))


def test_a_checkpoint_that_cannot_be_written_is_removed(tmp_path, capsys):
    folder = tmp_path / "checkpoint-3"
    made, _ = checkpointed(tmp_path, 3)
    written = Checkpoints(made)

    def full():
        folder.mkdir(exist_ok=True)
        raise OSError(28, "No space left on device")

    written.save(folder, full)
    assert not folder.exists() and "No space left" in capsys.readouterr().out and written.failure is not None
