"""A checkpoint of one number of processes (gloo) is resumed by another."""

import shutil

import pytest

from tests.support.training import assert_same_runs, run_processes
from tests.training.test_distributed import SCRIPT

# In three processes of 4 completions each, groups lie on two of them. Logs are between two saves, so that a loss is
# under way in a checkpoint.
OPTIONS = {
    "num_generations": 6, "max_steps": 6, "beta": 0.1, "constrain": True, "reference_mode": "ema", "ema_alpha": 0.7,
    "kl_target": 0.01, "curriculum": True, "curriculum_window": 4, "save_strategy": "steps",
    "save_steps": 2, "logging_steps": 3,
}  # fmt: skip


@pytest.mark.exhaustive
def test_another_number_of_processes_goes_on_as_one_would(tiny_path, tmp_path):
    """One process trains six steps; three resume from its second step, and two from the fourth, which the three wrote.
    Completions are fixed, so that only the state could make a difference."""

    def train(name, processes, earlier=None, step=None):
        if earlier is not None:
            shutil.copytree(tmp_path / earlier / f"checkpoint-{step}", tmp_path / name / f"checkpoint-{step}")
            shutil.copy(tmp_path / earlier / "training_metrics.jsonl", tmp_path / name)
        options = OPTIONS | {"per_device_train_batch_size": 12 // processes}
        return run_processes(SCRIPT, tiny_path, tmp_path / name, processes, options, resume=earlier is not None)

    whole = train("one", 1)
    keys = ("step", "reward", "loss", "kl", "beta", "curriculum/level", "pass@4", "learning_rate")
    for name, processes, earlier, step in (("three", 3, "one", 2), ("two", 2, "three", 4)):
        assert_same_runs(whole, train(name, processes, earlier, step), keys, atol=5e-6)
