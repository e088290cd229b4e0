"""Two processes (gloo) do what one does, also where groups straddle them."""

import pytest

from tests.support.exhaustive import MARK
from tests.support.toy import ToyTask
from tests.support.training import assert_same_runs, run_processes


class EveryTask(ToyTask):
    """A completion of equal letters is the answer to the prompt with that letter. Of the other completions, it makes a
    claim that is wrong."""

    def relabel(self, row, completion):
        letter = completion[:1]
        return {"prompt": f"{letter}1x", "letter": letter, "level": "1"} if letter else None


SCRIPT = """
from tests.support.scripted import PlacedTrainer
from tests.training.test_distributed import EveryTask
from tests.support.training import config
PlacedTrainer.fixed = ["a", "bb", "ab", "ccc", "c", "b", "dcc", "a", "dd", "d", "ca", "abc"]
trainer = PlacedTrainer(model, args=config(output_dir, **options), task=EveryTask())
"""
ESTIMATED = {
    "advantage_estimator": "maxk", "pass_k": 2, "advantage_clip": 0.5, "kl_target": 0.01, "curriculum": True,
    "curriculum_window": 4,
}  # fmt: skip
# The coefficient of the entropy follows the entropy of both processes together.
EXTRAS = {
    "gamma": 0.9, "own_successes": 6, "own_successes_fraction": 0.5, "own_successes_weight": 0.3,
    "relabel": True, "use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_coef_delta": 0.02,
    "entropy_target": 1.28,
}  # fmt: skip
SAME = (
    "reward", "pass@1", "pass@4", "max@2", "groups_without_signal", "advantage_clipped_fraction", "beta", "pg_loss",
    "constraint/allowed_tokens", "constraint/forced_fraction", "curriculum/level", "kl", "entropy", "entropy_coef",
    "discount/mean", "own_successes/size",
    "own_successes/loss", "own_successes/relabelled",
)  # fmt: skip


@pytest.mark.parametrize("options", [ESTIMATED, pytest.param(EXTRAS, marks=MARK)], ids=["estimated", "every extra"])
def test_two_processes_equal_one(tiny_path, tmp_path, options):
    """Groups of 4 in batches of 6 a process: the middle group lies half on each."""
    options = options | {"num_generations": 4, "max_steps": 5, "beta": 0.1, "constrain": True}
    one = run_processes(SCRIPT, tiny_path, tmp_path / "one", 1, options | {"per_device_train_batch_size": 12})
    two = run_processes(SCRIPT, tiny_path, tmp_path / "two", 2, options | {"per_device_train_batch_size": 6})
    assert_same_runs(one, two, SAME)
    if "own_successes" in options:
        assert 0.8 < one[1][0]["discount/mean"] < 1 and one[1][-1]["own_successes/relabelled"] > 0
        assert len({line["entropy_coef"] for line in one[1]}) > 1
