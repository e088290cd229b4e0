"""Two processes (gloo) train together where a constraint leaves one of them nothing to choose."""

import pytest
import torch

from tests.support.toy import LettersConstraint, LettersState, ToyTask
from tests.support.training import run_processes
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.constraints.base import replay
from trl_grpo_tasks.constraints.table import pad_mask_numbers


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


class PlacedTrainer(TaskGRPOTrainer):
    """Where there is a choice, completions follow from the step and the place in the group."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        rows, step = self.latest_rollout.rows, self.state.global_step
        free = ["b", "ca", "bb", "dbc", "a", "bd"]
        texts = ["a" if row["letter"] == "a" else free[(i % 4 + step) % len(free)] for i, row in enumerate(rows)]
        ids = [self._tokenizer(text)["input_ids"] + [self._tokenizer.eos_token_id] for text in texts]
        table = self.generation.tables.start("train", self.model.config.vocab_size)
        masks = [replay(self.generation.constraint, row, one) for row, one in zip(rows, ids, strict=True)]
        self.latest_rollout.mask_numbers_B_T = pad_mask_numbers(
            [[table.number_of(mask) for mask in each] for each in masks]
        )
        return ids, None


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
    one, one_log = run_processes(SCRIPT, tiny_path, tmp_path / "one", 1, options | {"per_device_train_batch_size": 8})
    two, two_log = run_processes(
        SCRIPT, tiny_path, tmp_path / "two", 2, options | {"per_device_train_batch_size": 4}, timeout=200
    )
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=2e-6, rtol=1e-4, msg=name)
    for a, b in zip(one_log, two_log, strict=True):
        assert 0 < a["constraint/forced_fraction"] < 1 and a["grad_norm"] > 0
        for key in ("reward", "kl", "entropy", "constraint/forced_fraction", "grad_norm"):
            assert a[key] == pytest.approx(b[key], abs=1e-5), key
