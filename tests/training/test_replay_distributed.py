"""Replay in several processes (gloo), each with one group: what is replaced, and that nobody waits for the others."""

import pytest
import torch

from tests.support.toy import ToyTask
from tests.support.training import run_processes

# With signal in both groups of the first rollout, and none later: all completions are alike.
SCRIPT = """
from tests.support.scripted import FixedTrainer
from tests.support.toy import ToyTask
from tests.support.training import config

class OnceWithSignal(FixedTrainer):
    def texts(self, count):
        return ["a", "bb", "ab", "ccc"] if self.state.global_step == 0 else ["x"] * count

trainer = OnceWithSignal(model, args=config(output_dir, **options), task=ToyTask())
"""
STEPS = 5


@pytest.mark.exhaustive
def test_a_group_per_process_is_replayed(tiny_path, tmp_path):
    """At most half of the groups of the four rollouts without signal. Only a process that replays asks the reference
    once more."""
    processes, most = 3, 6
    options = {"replay_size": 4, "per_device_train_batch_size": 4, "num_generations": 4, "max_steps": STEPS}
    options |= {"beta": 0.1, "learning_rate": 1e-3}
    weights, log = run_processes(SCRIPT, tiny_path, tmp_path / "run", processes, options, timeout=200)
    assert [line["groups_without_signal"] for line in log] == [0.0] + [1.0] * (STEPS - 1)
    assert [line["replay/size"] for line in log] == [processes] * STEPS
    replaced = [line["replay/replaced_groups"] for line in log]
    rows = ToyTask().dataset("train", None, 0)
    means = [sum(ToyTask().score(row, text).total for text in ("a", "bb", "ab", "ccc")) / 4 for row in rows]
    least, largest = min(means) - 1e-6, max(means) + 1e-6
    assert replaced[0] == 0 and 0 < sum(replaced) <= most + 1
    for line in log:
        for name in ("age", "mean_reward", "success"):
            assert (f"replay/{name}" in line) == bool(line["replay/replaced_groups"])
        if line["replay/replaced_groups"]:
            assert least <= line["replay/mean_reward"] <= largest and 0 <= line["replay/success"] <= 1
            assert line["replay/age"] == line["step"] - 1
            assert line["pg_loss"] != 0, "a stored group has advantages"
    assert all(torch.isfinite(value).all() for value in weights.values())
