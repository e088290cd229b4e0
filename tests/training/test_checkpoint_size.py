"""What a checkpoint holds: shared state once, a rollout and its masks only while they are still trained on."""

import zipfile

import pytest
import torch

from tests.support.training import resumed, run_processes, toy_trainer
from trl_grpo_tasks.training.state_files import packed, unpacked

MOVING = {"beta": 0.1, "reference_mode": "ema", "ema_alpha": 0.7, "kl_target": 0.01, "constrain": True}
SAVING = {"save_strategy": "steps", "save_steps": 1, "replay_size": 4}
SCRIPT = "from tests.support.training import toy_trainer\ntrainer = toy_trainer(model, output_dir, **options)\n"


def tensors(value):
    """All tensors in nested dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for one in inner for tensor in tensors(one)]


def state(folder, name):
    return torch.load(folder / f"task_state_{name}.pt", weights_only=True)


@pytest.mark.exhaustive
def test_two_processes_save_the_reference_once_and_resume_bit_for_bit(tiny_path, tmp_path):
    options = MOVING | SAVING | {"max_steps": 4, "per_device_train_batch_size": 4}
    weights, log = run_processes(SCRIPT, tiny_path, tmp_path / "run", 2, options)
    folder = tmp_path / "run" / "checkpoint-2"
    shapes = sorted(tuple(p.shape) for p in weights.values())
    assert sorted(tuple(p.shape) for p in tensors(state(folder, "common"))) == shapes
    for process in range(2):
        assert not {tuple(t.shape) for t in tensors(state(folder, process))} & {s for s in shapes if len(s) == 2}
    assert sorted(path.name for path in folder.glob("task_*")) == [f"task_state_{n}.pt" for n in (0, 1, "common")]
    for path in (tmp_path / "run").glob("checkpoint-[34]/complete"):
        path.unlink()
    resumed, again = run_processes(SCRIPT, tiny_path, tmp_path / "run", 2, options, resume=True)
    assert all(resumed[name].equal(value) for name, value in weights.items()) and again == log


def test_rollouts_and_masks_are_saved_only_while_they_are_trained_on(tiny_path, tmp_path):
    """A rollout lasts for two steps, twice: it is used up after every fourth step. Evaluations have masks too."""
    options = MOVING | SAVING | {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "num_iterations": 2}
    options |= {"replay_size": 0, "max_steps": 8, "eval_strategy": "steps", "eval_steps": 1, "eval_rows": 2}
    ((whole, _),) = resumed(lambda: toy_trainer(tiny_path, tmp_path, **options), tmp_path, (5,))
    rows = options["steps_per_generation"] * whole.args.per_device_train_batch_size
    for step in range(1, 9):
        saved = state(tmp_path / f"checkpoint-{step}", 0)
        batches = saved["buffered_inputs"]
        assert ("masks" in saved) == (batches is not None) == bool(step % 4), step
        if batches is not None:
            assert sum(len(batch["mask_numbers"]) for batch in batches) == rows
            used = {number for batch in batches for number in batch["mask_numbers"].flatten().tolist()}
            assert max(used) <= len(unpacked(saved)["masks"]["masks"]), "every mask of the rollout is there"


def test_lists_of_vectors_are_packed_and_come_back_as_they_were(tmp_path):
    """The number of records in the file is that of its tensors: 3 here."""
    vectors = [torch.arange(size, dtype=torch.int32) for size in (3, 0, 5)]
    given = {"a": [{"masks": vectors, "one": torch.ones(2, 2)}, [[1, 2], []]], "b": [torch.zeros(2, 1)], "c": (1, [])}
    torch.save(packed(given), tmp_path / "state.pt")
    assert records(tmp_path / "state.pt") == 3
    restored = unpacked(torch.load(tmp_path / "state.pt", weights_only=True))
    masks = restored["a"][0].pop("masks")
    assert all(map(torch.equal, masks, vectors)) and [v.dtype for v in masks] == [torch.int32] * 3
    assert len({v.untyped_storage().data_ptr() for v in masks if len(v)}) == 2, "each has its own memory"
    assert restored["a"][1:] == [[[1, 2], []]] and restored["c"] == (1, []) and restored["b"][0].shape == (2, 1)


def test_a_replay_buffer_is_few_tensors(tiny_path, tmp_path):
    options = MOVING | SAVING | {"replay_size": 6, "max_steps": 4, "num_generations": 8, "max_completion_length": 4}
    trainer = toy_trainer(tiny_path, tmp_path, **options)
    trainer.train()
    folder = tmp_path / "checkpoint-4"
    groups = unpacked(state(folder, 0))["parts"]["replay"]["groups"]
    assert len(groups) >= 3 and len(tensors(groups)) > 24 * len(groups)
    assert records(folder / "task_state_0.pt") <= 7 * len(groups) + 2, "and the loss since the last log"


def records(path):
    with zipfile.ZipFile(path) as file:
        return sum("/data/" in name for name in file.namelist())
