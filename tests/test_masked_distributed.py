"""Two processes (gloo) that fill masks do what one does, also where groups straddle them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPT = """
import json, sys, torch
from tests.toy_fill import FillTask
from tests.training import config
from trl_grpo_tasks import TaskGRPOTrainer
model, output_dir, options = json.loads(sys.argv[1])
trainer = TaskGRPOTrainer(model, args=config(output_dir, **options), task=FillTask())

# Every fill is a function of its prompt, the step and its place in the gathered batch. Filling still happens, so that
# what could have been drawn is known, and the fills are chosen from that.
fill = trainer._policy.fill
def placed(model, prompt_ids):
    done = fill(model, prompt_ids)
    first = trainer.accelerator.process_index * len(prompt_ids) + 5 * trainer.state.global_step
    for i, row in enumerate(done.ids):
        for t in range(len(row)):
            may = done.support_B_T_V[i, t].nonzero().flatten().tolist()
            row[t] = may[(3 * (first + i) + t) % len(may)]
    return done
trainer._policy.fill = placed
trainer.train()
if trainer.accelerator.is_main_process:
    torch.save({n: p.detach() for n, p in trainer.model.named_parameters()}, output_dir + "/weights.pt")
"""


def run(model, output_dir, processes, options):
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_port=0", "--standalone"]
    script = Path(output_dir).parent / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *(launch if processes > 1 else []), str(script)]
    command.append(json.dumps([model, str(output_dir), options]))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (Path(output_dir) / "training_metrics.jsonl").read_text().splitlines()
    return torch.load(Path(output_dir) / "weights.pt"), [json.loads(line) for line in lines]


@pytest.mark.slow
def test_two_processes_equal_one(bert_path, tmp_path):
    """Groups of 4 in batches of 6 a process: the middle group lies half on each."""
    options = {"num_generations": 4, "max_steps": 3, "beta": 0.1, "top_p": 0.9, "reference_mode": "ema"}
    one, one_log = run(bert_path, tmp_path / "one", 1, options | {"per_device_train_batch_size": 12})
    two, two_log = run(bert_path, tmp_path / "two", 2, options | {"per_device_train_batch_size": 6})
    for name, value in one.items():
        if name.endswith("key.bias"):  # has no gradient but rounding, which Adam makes large
            continue
        torch.testing.assert_close(two[name], value, atol=2e-5, rtol=1e-3, msg=name)
    for a, b in zip(one_log, two_log, strict=True):
        for key in ("reward", "pass@4", "kl", "entropy", "pg_loss", "logp_mean", "advantage_mean", "kl_penalty"):
            assert a[key] == pytest.approx(b[key], abs=1e-5), key
