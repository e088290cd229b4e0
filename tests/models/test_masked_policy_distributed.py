"""Training a masked policy on two processes (gloo) equals training on one, also if groups span both processes."""

import pytest
import torch

from tests.support.training import run_processes

SCRIPT = """
from tests.support.toy_fill import FillTask
from tests.support.training import config
from trl_grpo_tasks import TaskGRPOTrainer
trainer = TaskGRPOTrainer(model, args=config(output_dir, **options), task=FillTask())

# Every fill is a function of its prompt, the step and its position in the gathered batch. The policy still fills the
# prompts, and the replacement for each fill is chosen from the tokens that could have been sampled: those that
# the filters kept or, without filters, all letters.
fill = trainer.generation.masked_policy.fill
def deterministic_fill(model, prompt_ids, table=None):
    done = fill(model, prompt_ids, table)
    first = trainer.accelerator.process_index * len(prompt_ids) + 5 * trainer.state.global_step
    for i, row in enumerate(done.ids):
        for t in range(len(row)):
            may = range(5, 10) if table is None else table.ids(done.masks[i][t]).tolist()
            row[t] = may[(3 * (first + i) + t) % len(may)]
    return done
trainer.generation.masked_policy.fill = deterministic_fill
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "more",
    [{"top_p": 0.9}, {"fill_steps": 2, "guard": "match", "guard_floor": 1.0}],
    ids=["filters", "two steps and a guard"],
)
def test_two_processes_equal_one(bert_path, tmp_path, more):
    """With groups of 4 and batches of 6 per process, the middle group spans both processes."""
    options = {"num_generations": 4, "max_steps": 3, "beta": 0.1, "reference_mode": "ema", **more}
    one, one_log = run_processes(SCRIPT, bert_path, tmp_path / "one", 1, options | {"per_device_train_batch_size": 12})
    two, two_log = run_processes(SCRIPT, bert_path, tmp_path / "two", 2, options | {"per_device_train_batch_size": 6})
    for name, value in one.items():
        if name.endswith("key.bias"):  # its gradient is only rounding noise, which Adam amplifies
            continue
        torch.testing.assert_close(two[name], value, atol=2e-5, rtol=1e-3, msg=name)
    for a, b in zip(one_log, two_log, strict=True):
        keys = ["reward", "pass@4", "kl", "entropy", "pg_loss", "logp_mean", "advantage_mean", "kl_penalty"]
        for key in [*keys, *["guard/weight"] * ("guard" in more)]:
            assert a[key] == pytest.approx(b[key], abs=1e-5), key
