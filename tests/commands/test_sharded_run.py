"""A whole run in two processes (gloo) under FSDP2: cold start, evaluations, checkpoints, saved model, resumed."""

import pytest
import torch
from safetensors.torch import load_file

from tests.commands.test_train import metrics, results, words
from tests.support.training import launch

SCRIPT = """
import json, sys
from tests.support.sharded import shard_on_cpu
shard_on_cpu()
from trl_grpo_tasks.commands import train as run
sys.exit(run.main(json.loads(sys.argv[1])))
"""
# Batches of 4 for the 9 samples: in the last round, one process has a single row and the other none.
OPTIONS = {"cold_start_steps": 4, "constrain": True, "beta": 0.02, "reference_mode": "ema", "eval_rows": 3}
OPTIONS |= {"num_samples": 3, "per_device_eval_batch_size": 4, "per_device_train_batch_size": 4, "save_steps": 2}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_whole_run(tmp_path):
    folder = tmp_path / "run"
    launch(SCRIPT, 2, words(folder, **OPTIONS, max_steps=3), tmp_path / "first")
    found = results(folder)
    assert list(found) == ["cold start", "GRPO"]
    for evaluation in found.values():
        assert len(evaluation["samples"]) == 9 and evaluation["metrics"]["valid"] == 1
    first = load_file(folder / "model.safetensors")
    started = load_file(folder / "cold_start" / "model.safetensors")
    assert any(not first[name].equal(value) for name, value in started.items())
    assert all(torch.isfinite(value).all() for value in first.values())

    out, _ = launch(
        SCRIPT, 2, [*words(folder, **OPTIONS, max_steps=5), "--resume_from_checkpoint"], tmp_path / "second"
    )
    assert "resuming from" in out and [line["step"] for line in metrics(folder) if "loss" in line] == [1, 2, 3, 4, 5]
    second = load_file(folder / "model.safetensors")
    assert any(not first[name].equal(value) for name, value in second.items())

    out, _ = launch(
        SCRIPT, 2, [*words(folder, **OPTIONS, max_steps=5), "--resume_from_checkpoint"], tmp_path / "third"
    )
    assert "is the end of the run" in out
    third = load_file(folder / "model.safetensors")
    assert all(third[name].equal(value) for name, value in second.items())
