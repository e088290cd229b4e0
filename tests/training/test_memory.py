"""Long runs: the number of Python objects and tensors that are alive does not grow with the steps."""

import gc
from collections import Counter, deque

import pytest
import torch
from transformers import TrainerCallback

from tests.support.training import toy_trainer

EVERYTHING = {
    "max_steps": 40, "num_generations": 4, "per_device_train_batch_size": 8, "constrain": True, "top_p": 0.9,
    "beta": 0.1, "reference_mode": "ema", "kl_target": 0.05, "replay_size": 4, "curriculum": True,
    "curriculum_window": 16, "advantage_estimator": "mean", "advantage_clip": 2.0, "eval_strategy": "steps",
    "eval_steps": 10, "eval_rows": 2, "per_device_eval_batch_size": 4, "save_strategy": "steps", "save_steps": 10,
    "save_total_limit": 1, "log_completions": True, "num_completions_to_print": 0,
}  # fmt: skip


class Alive(TrainerCallback):
    """Counts containers, tensors and objects of this package that are alive after some steps, and bytes of tensors."""

    def __init__(self, *steps):
        self.counts, self.bytes = dict.fromkeys(steps), {}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.counts:
            gc.collect()
            kinds = (dict, list, tuple, set, deque, torch.Tensor)
            alive = [
                o for o in gc.get_objects() if type(o) in kinds or str(type(o).__module__).startswith("trl_grpo_tasks")
            ]
            self.counts[state.global_step] = Counter(type(one).__name__ for one in alive)
            tensors = [one for one in alive if type(one) is torch.Tensor]
            self.bytes[state.global_step] = sum(one.untyped_storage().nbytes() for one in tensors)


@pytest.mark.exhaustive
def test_objects_and_tensors_do_not_accumulate(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, **EVERYTHING)
    alive = Alive(18, 38)  # both between two evaluations and between two checkpoints
    trainer.add_callback(alive)
    trainer.train()
    grown = alive.counts[38] - alive.counts[18]
    assert max(grown.values(), default=0) < 15, f"in 20 steps, these were added: {grown.most_common(5)}"
    assert alive.bytes[38] < 1.1 * alive.bytes[18]
