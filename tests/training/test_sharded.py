"""FSDP2 in several processes (gloo) trains as one process does, with everything that this package adds to TRL."""

import json
import shutil

import pytest
import torch

from tests.support.training import launch

SCRIPT = """
import json, sys
from tests.support.sharded import train_cases
train_cases(**json.loads(sys.argv[1]))
"""
FORCED = "tests.training.test_forced_distributed:HalfForced"
EMA = {"reference_mode": "ema", "ema_alpha": 0.7}
CASES = {
    "plain": {},
    "constraint": {"constrain": True, "kl_target": 0.01, "curriculum": True, "curriculum_window": 4},
    "filters": {"top_k": 6, "top_p": 0.9},
    "both": {"constrain": True, "min_p": 0.2, "num_iterations": 2, "max_steps": 4, "loss_tokens": "decisions"},
    # All tokens of one process are forced, and its rollout ends before that of the other.
    "forced": {"constrain": True, "gradient_checkpointing": True, "task": FORCED},
    "lora": {"constrain": True, "lora": True, "share_prompts": True},
    # After an evaluation, FSDP2 leaves some weights of the policy whole.
    "ema": {"constrain": True, "eval_strategy": "steps", "eval_steps": 1, **EMA},
    "lora-ema": {"constrain": True, "lora": True, **EMA},
    "periodic": {"reference_mode": "periodic", "reference_update_freq": 1},
}
METRICS = {"loss", "kl", "reward", "entropy", "grad_norm", "beta", "completions/mean_length", "curriculum/level"}
METRICS |= {
    "constraint/forced_fraction",
    "constraint/allowed_tokens",
    "sampling/allowed_tokens",
    "eval_kl",
    "eval_reward",
}


def train(folder, model, processes, cases, sharded, batch=8, resume=None):
    """Train all cases in these processes, with `batch` completions per step in total; return weights and metrics."""
    common = {"max_steps": 3, "beta": 0.1, "per_device_train_batch_size": batch // processes}
    common["per_device_eval_batch_size"] = batch // processes
    cases = {name: common | options for name, options in cases.items()}
    argument = {"model": model, "folder": str(folder), "cases": cases, "sharded": sharded, "resume": resume}
    launch(SCRIPT, processes, argument, folder, timeout=400)
    return {name: _outcome(folder / name) for name in cases}


def _outcome(folder):
    lines = (folder / "training_metrics.jsonl").read_text().splitlines()
    return torch.load(folder / "weights.pt"), [json.loads(line) for line in lines]


def assert_equal(ours, theirs):
    for name, value in theirs[0].items():
        torch.testing.assert_close(ours[0][name], value, atol=1e-5, rtol=1e-5, msg=name)
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert a.keys() & METRICS == b.keys() & METRICS
        for key in a.keys() & METRICS:
            assert a[key] == pytest.approx(b[key], abs=1e-5), key


@pytest.fixture(scope="module")
def runs(tiny_path, tmp_path_factory):
    """All cases, in one process and in two sharded ones. Starting processes takes longer than training."""
    folder = tmp_path_factory.mktemp("sharded")
    return [train(folder / "one", tiny_path, 1, CASES, None), train(folder / "two", tiny_path, 2, CASES, "fsdp2")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_two_sharded_processes_equal_one(runs, case):
    one, two = runs[0][case], runs[1][case]
    assert_equal(two, one)
    trained = [line for line in two[1] if "loss" in line]
    assert len(trained) >= 3 and any(line["grad_norm"] > 0 for line in trained)
    for line in trained:  # there is one where a rollout is used for the first time
        assert line.get("sampling/logp_difference_max", 0) < 1e-5, "log-probs of generation and of training"


# Cases that depend on the number of processes: each has its own buffer, and shuffles its own rollout.
SAME_PROCESSES = {
    # One prompt gives no signal, so that in some steps only one process replays a group, which the reference scores.
    "replay": {"constrain": True, "replay_size": 4, "max_steps": 6, "task": FORCED},
    "lora-replay": {"constrain": True, "replay_size": 4, "max_steps": 6, "task": FORCED, "lora": True, **EMA},
    "batches": {"constrain": True, "steps_per_generation": 2, "gradient_accumulation_steps": 2, "num_iterations": 2},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_sharded_processes_equal_two_with_whole_weights(tiny_path, tmp_path):
    whole = train(tmp_path / "ddp", tiny_path, 2, SAME_PROCESSES, None)
    sharded = train(tmp_path / "fsdp", tiny_path, 2, SAME_PROCESSES, "fsdp2")
    for name, expected in whole.items():
        assert_equal(sharded[name], expected)
    for name in ("replay", "lora-replay"):
        assert 1 in [line.get("replay/replaced_groups") for line in whole[name][1]]
        for a, b in zip(sharded[name][1], whole[name][1], strict=True):
            replay = {key: value for key, value in a.items() if key.startswith("replay/")}
            assert replay == {key: value for key, value in b.items() if key.startswith("replay/")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sharded_checkpoint_is_resumed_by_another_number_of_processes(tiny_path, tmp_path):
    """Two sharded processes write a checkpoint after two of four steps, which three resume: as one that trains on."""
    options = {"constrain": True, "num_generations": 6, "max_steps": 4, "kl_target": 0.01, **EMA}
    options |= {"save_strategy": "steps", "save_steps": 2}
    cases = {"full": options, "lora": options | {"lora": True}}
    one = train(tmp_path / "one", tiny_path, 1, cases, None, batch=12)
    two = train(tmp_path / "two", tiny_path, 2, cases, "fsdp2", batch=12)
    for name in cases:
        shutil.copytree(tmp_path / "two" / name / "checkpoint-2", tmp_path / "three" / name / "checkpoint-2")
        shutil.copy(tmp_path / "two" / name / "training_metrics.jsonl", tmp_path / "three" / name)
    three = train(tmp_path / "three", tiny_path, 3, cases, "fsdp2", batch=12, resume="checkpoint-2")
    for name in cases:
        assert_equal(two[name], one[name])
        assert_equal(three[name], one[name])


GRADIENT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from trl_grpo_tasks.constraints.sharding import copy_whole, whole
dist.init_process_group("gloo")
torch.manual_seed(0)
plain = nn.Linear(3, 5)
sharded = nn.Linear(3, 5)
sharded.load_state_dict(plain.state_dict())
fully_shard(sharded)
rows = torch.arange(6.0).view(2, 3)
for layer in (plain, sharded):
    weight, bias = (whole(p) for p in (layer.weight, layer.bias))
    torch.testing.assert_close(weight, plain.weight)
    # One process has only the first row, the other only the second: the gradient is the mean of both.
    mine = rows if layer is plain else rows[dist.get_rank()][None]
    (mine @ weight.T + bias).square().sum(1).mean().backward()
for ours, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(ours.grad.full_tensor(), expected.grad)
copy_whole(sharded.weight, plain.weight.detach() + 1)
torch.testing.assert_close(sharded.weight.full_tensor(), plain.weight + 1)
"""


@pytest.mark.slow
def test_the_gradient_of_a_gathered_weight_is_the_mean_over_processes(tmp_path):
    launch(GRADIENT, 2, None, tmp_path / "run")
