"""Two processes (gloo) do what one does, also where groups straddle them."""

import pytest
import torch

from tests.support.training import run_processes

SCRIPT = """
from tests.training.test_trainer import PlacedTrainer
from tests.training.test_controllers import record_masks
from tests.support.toy import ToyTask
from tests.support.training import config
PlacedTrainer.fixed = ["a", "bb", "ab", "ccc", "c", "b", "dcc", "a", "dd", "d", "ca", "abc"]
trainer = PlacedTrainer(model, args=config(output_dir, **options), task=ToyTask())
record_masks(trainer)
"""


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["maxk", "grpo"])
def test_two_processes_equal_one(tiny_path, tmp_path, estimator):
    """Groups of 4 in batches of 6 a process: the middle group lies half on each."""
    options = {
        "num_generations": 4,
        "max_steps": 3,
        "beta": 0.1,
        "constrain": True,
        "advantage_estimator": estimator,
        "pass_k": 2,
        "advantage_clip": 0.5,
        "kl_target": 0.01,
        "curriculum": True,
        "curriculum_window": 4,
    }
    one, one_log = run_processes(SCRIPT, tiny_path, tmp_path / "one", 1, options | {"per_device_train_batch_size": 12})
    two, two_log = run_processes(SCRIPT, tiny_path, tmp_path / "two", 2, options | {"per_device_train_batch_size": 6})
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=2e-6, rtol=1e-4, msg=name)
    same = ("reward", "pass@1", "pass@4", "max@2", "groups_without_signal", "advantage_clipped_fraction", "beta")
    same += ("constraint/allowed_tokens", "constraint/forced_fraction", "curriculum/level", "kl", "entropy")
    for a, b in zip(one_log, two_log, strict=True):
        for key in same:
            assert a.get(key) == pytest.approx(b.get(key), abs=1e-5), key


ONE_SIGNAL = """
from tests.training.test_trainer import FixedTrainer
from tests.support.toy import ToyTask
from tests.support.training import config
trainer = FixedTrainer(model, args=config(output_dir, **options), task=ToyTask())

def only_at_first(prompt_ids):
    texts = ["a", "bb", "ab", "ccc"] if trainer.state.global_step == 0 else ["b"] * 4
    return [trainer._tokenizer(t)["input_ids"] + [trainer._tokenizer.eos_token_id] for t in texts], None

FixedTrainer._generate_single_turn = lambda self, prompt_ids, *a, **k: only_at_first(prompt_ids)
"""


@pytest.mark.slow
def test_replay_with_one_group_per_process(tiny_path, tmp_path):
    """Half of the groups of a batch may be replaced: one of the two, which leaves fresh data in every batch."""
    options = {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_steps": 5,
        "advantage_estimator": "mean",
        "replay_size": 4,
        "replay_fraction": 0.5,
    }
    _, log = run_processes(ONE_SIGNAL, tiny_path, tmp_path / "two", 2, options)
    assert [line["replay/replaced_groups"] for line in log] == [0, 1, 1, 1, 1]
    assert [line["replay/size"] for line in log] == [2] * 5
