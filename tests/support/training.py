"""Helpers that build small trainers on the CPU for tests and run them in several processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import forked
from tests.support.toy import ToyTask
from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer

QUIET = {
    "bf16": False, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    "logging_steps": 1, "save_strategy": "no", "num_generations": 4, "per_device_train_batch_size": 8,
    "max_completion_length": 5, "learning_rate": 1e-2, "reward_workers": 0,
}  # fmt: skip


def config(output_dir, **options) -> TaskGRPOConfig:
    return TaskGRPOConfig(output_dir=str(output_dir), **(QUIET | options))


def toy_trainer(model, output_dir, task=None, **options) -> TaskGRPOTrainer:
    extra = {name: options.pop(name) for name in ("peft_config", "constraint", "eval_dataset") if name in options}
    return TaskGRPOTrainer(model, args=config(output_dir, **options), task=task or ToyTask(), **extra)


def parameters(trainer) -> dict:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def resumed(make, folder, steps):
    """Train `make()`, then resume from the checkpoint of each of these steps, which must give the same weights and
    metrics bit for bit. Yield both trainers for each step."""
    whole, file = make(), Path(folder) / "training_metrics.jsonl"
    whole.train()
    wanted, metrics = parameters(whole), file.read_text()
    for step in steps:
        again = make()
        again.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{step}"))
        for name, value in parameters(again).items():
            assert value.equal(wanted[name]), f"{name} after resuming at step {step}"
        assert file.read_text() == metrics, f"metrics after step {step}"
        yield whole, again


TIMES = ("runtime", "per_second", "step_time", "perf/")


def timeless(logs: dict) -> dict:
    return {key: value for key, value in logs.items() if not any(word in key for word in TIMES)}


# Code before and after a script that creates `trainer` from `model`, `output_dir` and `options`.
BEFORE = "import json, sys, torch\nmodel, output_dir, options, resume = json.loads(sys.argv[1])\n"
AFTER = """
trainer.train(resume_from_checkpoint=resume)
if trainer.accelerator.is_main_process:
    torch.save({n: p.detach() for n, p in trainer.model.named_parameters()}, output_dir + "/weights.pt")
"""


def run_processes(script, model, output_dir, processes, options, resume=False, timeout=300):
    """Train the trainer that `script` creates in several processes (gloo); return its weights and metrics."""
    forked.launch(BEFORE + script + AFTER, processes, [model, str(output_dir), options, resume], output_dir, timeout)
    lines = (Path(output_dir) / "training_metrics.jsonl").read_text().splitlines()
    return torch.load(Path(output_dir) / "weights.pt"), [json.loads(line) for line in lines]


def launch(script, processes, argument, output_dir, timeout=300, status=0):
    """Run `script` with torch's launcher and `argument` as JSON in sys.argv[1]; return stdout and stderr.

    The processes are killed after `timeout` seconds. Tests that do not depend on the launcher use `forked.launch`.
    """
    file = Path(output_dir).parent / f"{Path(output_dir).name}.py"
    file.write_text(script)
    command = [*launcher(processes), str(file), json.dumps(argument)]
    running = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = running.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        running.terminate()  # the launcher then kills its processes, which are in separate sessions
        out, err = running.communicate(timeout=60)
        raise AssertionError(f"still running after {timeout} s\n{err[-4000:]}") from None
    assert running.returncode == status, err[-4000:]
    return out, err


def launcher(processes):
    """The command that starts a script in this number of processes."""
    words = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_port=0", "--standalone"]
    return [sys.executable, *(words if processes > 1 else [])]


ENVIRONMENT = forked.ENVIRONMENT | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}  # seconds from SIGTERM to SIGKILL


def assert_same_runs(one, other, keys, atol=2e-6):
    """Two results of `run_processes`: equal weights, and equal metrics of these names, up to rounding."""
    for name, value in one[0].items():
        torch.testing.assert_close(other[0][name], value, atol=atol, rtol=1e-4, msg=name)
    for a, b in zip(one[1], other[1], strict=True):
        for key in keys:
            assert a.get(key) == pytest.approx(b.get(key), abs=1e-5), key
