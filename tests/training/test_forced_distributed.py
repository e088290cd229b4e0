"""Two processes (gloo) train together where a constraint leaves one of them nothing to choose."""

import pytest

from tests.support.scripted import ScriptedTrainer
from tests.support.toy import LettersConstraint, LettersState, ToyTask
from tests.support.training import assert_same_runs, run_processes


class HalfForced(ToyTask):
    """Two prompts: one can only be answered with "a", the other with up to three letters."""

    def dataset(self, split, size, seed):
        return [{"prompt": f"{letter}1x", "letter": letter, "level": "1"} for letter in "ab"]

    def constraint(self, tokenizer):
        return HalfForcedConstraint(tokenizer)


class HalfForcedConstraint(LettersConstraint):
    def start(self, row):
        if row["letter"] == "a":
            return LettersState(self._ids[:1], self._eos, self.vocab_size, most=1)
        return super().start(row)


class PlacedTrainer(ScriptedTrainer):
    """Where there is a choice, completions follow from the step and the place in the group."""

    has_logps = False

    def texts(self, count):
        step, free = self.state.global_step, ["b", "ca", "bb", "dbc", "a", "bd"]
        rows = enumerate(self.latest_rollout.rows)
        return ["a" if row["letter"] == "a" else free[(i % 4 + step) % len(free)] for i, row in rows]


SCRIPT = """
from tests.training.test_forced_distributed import HalfForced, PlacedTrainer
from tests.support.training import config
trainer = PlacedTrainer(model, args=config(output_dir, **options), task=HalfForced())
assert not trainer.model.config.tie_word_embeddings
"""


@pytest.mark.exhaustive
def test_a_process_whose_tokens_are_all_forced_does_not_hang_the_others(tiny_path, tmp_path):
    """Each process has one group, and that of one of them is forced. The head is untied: nothing but the scores leads
    to its weight; and with gradient checkpointing, DDP waits for the gradient of every weight."""
    options = {"constrain": True, "gradient_checkpointing": True, "max_steps": 3, "beta": 0.1}
    options |= {"optim": "sgd", "learning_rate": 0.5}  # Adam would make much of the rounding of small gradients
    one = run_processes(SCRIPT, tiny_path, tmp_path / "one", 1, options | {"per_device_train_batch_size": 8})
    four = options | {"per_device_train_batch_size": 4}
    two = run_processes(SCRIPT, tiny_path, tmp_path / "two", 2, four, timeout=200)
    assert_same_runs(one, two, ("reward", "kl", "entropy", "constraint/forced_fraction", "grad_norm"))
    assert all(0 < line["constraint/forced_fraction"] < 1 and line["grad_norm"] > 0 for line in one[1])
