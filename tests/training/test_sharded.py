"""FSDP2 and ZeRO-3 in several processes (gloo) train as one process does, with everything this package adds to TRL.

Starting processes takes most of the time. So two processes do all of the work, one job after another, and tests look
at what they left; a job that fails names its case. ZeRO-3 needs DeepSpeed.
"""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.commands.test_train import metrics, results, saved, words
from tests.support import sharded

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
ZERO3 = pytest.param("zero3", marks=pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed"))
FORCED = "tests.training.test_forced_distributed:HalfForced"
EMA = {"reference_mode": "ema", "ema_alpha": 0.7}
OWN = {
    "constrain": True, "own_successes": 8, "own_successes_fraction": 0.5, "own_successes_weight": 1.0,
    "max_steps": 4,
}  # fmt: skip
# Each process generates from a whole copy of the weights. A large epsilon, because Adam divides the rounding of
# gradients near zero by their size.
FAST = {"rollout": "fast", "adam_epsilon": 1e-3}
CASES = {
    "both": {"constrain": True, "min_p": 0.2, "num_iterations": 2, "max_steps": 4},
    "controlled": {"constrain": True, "kl_target": 0.01, "curriculum": True, "curriculum_window": 4},
    "filters": {"top_k": 6, "top_p": 0.9, "reference_mode": "periodic", "reference_update_freq": 1},
    # After an evaluation, FSDP2 leaves some weights of the policy whole.
    "ema": OWN | EMA | {"eval_strategy": "steps", "eval_steps": 1},
    "lora-ema": {"constrain": True, "lora": True, **EMA},
    "lora-own": OWN | {"lora": True, "share_prompts": True},
    # All tokens of one process are forced, and its rollout ends before that of the other; so are all tokens of the
    # only success.
    "forced-own": OWN | {"gradient_checkpointing": True, "task": FORCED},
    "fast": {"constrain": True, "kl_target": 0.01} | FAST,
    "fast-lora": {"lora": True, "reference_mode": "periodic", "reference_update_freq": 1} | FAST,
    "fast-free": {"top_k": 6, "gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 2} | FAST,
}
# Each process has its own replay buffer, and shuffles its own rollout: these are compared with DDP.
DDP_CASES = {
    # One prompt gives no signal, so that in some steps only one process replays a group, which the reference scores.
    "replay": {"constrain": True, "replay_size": 4, "max_steps": 6, "task": FORCED},
    "lora-replay": {"constrain": True, "replay_size": 4, "max_steps": 6, "task": FORCED, "lora": True, **EMA},
    "batches": {"constrain": True, "steps_per_generation": 2, "gradient_accumulation_steps": 2, "num_iterations": 2},
}
SAVED = {"constrain": True, "num_generations": 6, "max_steps": 4, "kl_target": 0.01, **EMA}
SAVED |= {"save_strategy": "steps", "save_steps": 2, "weight_decay": 0.1}
# The adapter of a cold start, with the moving reference and with the one that stays as it was at first.
CONTINUED = {f"continued-{mode}": SAVED | {"lora": "continued", "reference_mode": mode} for mode in ("ema", "static")}
RESUMED = {"resumed": SAVED, **CONTINUED}
# Steps of saves are no multiple of the steps of evaluations.
BEST = {"best_by": "reward", "save_strategy": "steps", "save_steps": 50, "eval_steps": 1, "save_total_limit": 1,
        "max_steps": 4, "constrain": True}  # fmt: skip
BEST_CASES = {"best": BEST, "lora-best": BEST | EMA | {"lora": True}}
METRICS = {"loss", "kl", "reward", "entropy", "grad_norm", "beta", "completions/mean_length", "curriculum/level"}
METRICS |= {"constraint/forced_fraction", "constraint/allowed_tokens", "sampling/allowed_tokens", "eval_kl"}
METRICS |= {"eval_reward", "replay/size", "replay/replaced_groups", "replay/age"}
METRICS |= {"own_successes/size", "own_successes/loss"}
# Batches of 4 for the 9 samples: in the last round, one process has a single row and the other none.
RUN = {"cold_start_steps": 4, "constrain": True, "beta": 0.02, "reference_mode": "ema", "eval_rows": 3}
RUN |= {"samples": 3, "per_device_eval_batch_size": 4, "per_device_train_batch_size": 4, "save_steps": 2}


def job(model, folder, processes, cases, kind, batch=8, **extra):
    """The job of training these cases, with `batch` completions per step in total."""
    # A larger epsilon keeps Adam from turning the rounding of gradients near 0 into differences of the weights.
    common = {"max_steps": 3, "beta": 0.1, "adam_epsilon": 1e-6, "per_device_train_batch_size": batch // processes}
    common["per_device_eval_batch_size"] = batch // processes
    cases = {name: common | options for name, options in cases.items()}
    return "train_cases", {"model": model, "folder": str(folder), "cases": cases, "kind": kind, **extra}


@pytest.fixture(scope="module")
def one(tiny_path, tmp_path_factory):
    """All cases in this process, with whole weights."""
    folder = tmp_path_factory.mktemp("one")
    sharded.save_adapter(tiny_path)
    sharded.train_cases(**job(tiny_path, folder, 1, CASES, None)[1])
    sharded.train_cases(**job(tiny_path, folder, 1, RESUMED, None, batch=12)[1])
    sharded.warm_up(tiny_path, str(folder / "cold"), None, batch_size=8, lora=False)
    sharded.warm_up(tiny_path, str(folder / "lora-cold"), None, batch_size=8, lora=True)
    return folder


@pytest.fixture(scope="module", params=["fsdp2", ZERO3])
def two(request, tiny_path, tmp_path_factory):
    """The folder of what two sharded processes did, and what they printed."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    sharded.save_adapter(tiny_path)
    shard = ("shard_on_cpu", {"kind": kind})
    cold = {"model": tiny_path, "kind": kind, "batch_size": 4}
    copy = {"folder": str(folder), "to": str(folder / "again"), "cases": list(RESUMED), "checkpoint": "checkpoint-2"}
    jobs = [
        job(tiny_path, folder / "ddp", 2, DDP_CASES, None),
        shard,
        ("check_parts", {}),
        job(tiny_path, folder, 2, CASES | DDP_CASES | BEST_CASES, kind),
        ("check_average", {"kind": kind}),
        job(tiny_path, folder, 2, RESUMED, kind, batch=12),
        ("copy_checkpoints", copy),
        ("copy_checkpoints", copy | {"to": str(folder / "same")}),
        ("warm_up", cold | {"folder": str(folder / "cold"), "lora": False}),
        ("warm_up", cold | {"folder": str(folder / "lora-cold"), "lora": True}),
    ]
    for number, steps in enumerate((3, 5, 5)):
        command = words(folder / "run", **RUN, max_steps=steps, **sharded.options_of(kind))
        command += ["--resume_from_checkpoint"] * (number > 0)
        status = 2 if (kind, number) == ("zero3", 2) else 0
        jobs.append(("run_command", {"words": command, "keep": str(folder / f"model-{number}"), "status": status}))
    resume = job(tiny_path, folder / "again", 3, RESUMED, kind, batch=12, resume="checkpoint-2")
    groups = [(2, jobs), (3, [shard, resume])]
    if kind == "zero3":
        back = copy | {"folder": str(folder / "three"), "to": str(folder / "back")}
        three = job(tiny_path, folder / "three", 3, RESUMED, kind, batch=12)
        groups[1][1].extend([three, ("copy_checkpoints", back)])
        names = ("back", "same")
        resumes = [job(tiny_path, folder / one, 2, RESUMED, kind, batch=12, resume="checkpoint-2") for one in names]
        groups.append((2, [shard, *resumes]))
    printed = sharded.launch(groups, folder / "jobs", timeout=500)
    return kind, folder, printed


def outcome(folder):
    return torch.load(folder / "weights.pt"), json.loads((folder / "completions.json").read_text()), metrics(folder)


def assert_equal(ours, theirs):
    (weights, completions, log), (their_weights, their_completions, their_log) = outcome(ours), outcome(theirs)
    for name, value in their_weights.items():
        torch.testing.assert_close(weights[name], value, atol=1e-5, rtol=1e-5, msg=name)
    assert completions == their_completions
    for a, b in zip(log, their_log, strict=True):
        assert a.keys() & METRICS == b.keys() & METRICS
        for key in a.keys() & METRICS:
            assert a[key] == pytest.approx(b[key], abs=1e-5), key


@pytest.mark.parametrize("case", [*CASES, *RESUMED])
def test_two_sharded_processes_equal_one(one, two, case):
    assert_equal(two[1] / case, one / case)
    trained = [line for line in metrics(two[1] / case) if "loss" in line]
    assert len(trained) >= 3 and any(line["grad_norm"] > 0 for line in trained)
    assert not case.startswith("fast") or all("sampling/logp_difference_max" in line for line in trained)
    for line in trained:  # there is one where a rollout is used for the first time
        assert line.get("sampling/logp_difference_max", 0) < 1e-5, "log-probs of generation and of training"


@pytest.mark.parametrize("case", DDP_CASES)
def test_two_sharded_processes_equal_two_with_whole_weights(two, case):
    assert_equal(two[1] / case, two[1] / "ddp" / case)
    if "replay" in case:
        assert 1 in [line.get("replay/replaced_groups") for line in metrics(two[1] / case)]


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_equals_one_that_trains_on(one, two, case):
    """Two processes wrote the checkpoint after two of four steps, and three resume it."""
    kind, folder, _ = two
    assert_equal(folder / "again" / case, one / case)
    if kind == "zero3":  # three processes from the start; two resume their checkpoint, and that of two processes
        for name in ("three", "back", "same"):
            assert_equal(folder / name / case, one / case)
        for name in ("again", "back"):
            assert not list((folder / name / case / "checkpoint-2").glob("*universal"))


@pytest.mark.parametrize(("name", "file"), [("cold", "model.safetensors"), ("lora-cold", "adapter_model.safetensors")])
def test_cold_start(one, two, name, file):
    ours, theirs = (load_file(folder / name / file) for folder in (two[1], one))
    assert ours.keys() == theirs.keys()
    for weight, value in theirs.items():
        torch.testing.assert_close(ours[weight], value, atol=1e-5, rtol=1e-5, msg=weight)


@pytest.mark.parametrize("case", BEST_CASES)
def test_the_final_model_is_the_best_one(two, case):
    folder = two[1] / case
    made = json.loads((folder / "outcome.json").read_text())
    assert made["best_value"] == max(value for _, value in made["evaluations"])
    assert made["model_step"] == made["best_step"] and len(made["evaluations"]) == 4
    weights = torch.load(folder / "weights.pt")  # of the trainer at the end
    weights = {key.replace(".default", ""): value for key, value in weights.items()}
    best = saved(folder / f"checkpoint-{made['best_step']}")
    assert len(best) > 3 and all(weights[key].equal(value) for key, value in best.items())


def test_a_whole_run(two):
    """The command line: cold start, evaluations before and after, checkpoints, saved model, resumed."""
    kind, folder, printed = two
    run, first, second = folder / "run", load_file(folder / "model-0"), load_file(folder / "model-1")
    found = results(run)
    assert list(found) == ["cold start", "GRPO"]
    for evaluation in found.values():
        assert len(evaluation["samples"]) == 9 and evaluation["metrics"]["valid"] == 1
    started = load_file(run / "cold_start" / "model.safetensors")
    for before, after in ((started, first), (first, second)):
        assert any(not after[name].equal(value) for name, value in before.items())
    saved = AutoModelForCausalLM.from_pretrained(run, dtype="float32").state_dict()
    assert all(saved[name].equal(value) for name, value in second.items())
    assert "resuming from" in printed
    assert [line["step"] for line in metrics(run) if "loss" in line] == [1, 2, 3, 4, 5]
    assert "is the end of the run" in printed
    if kind == "fsdp2":
        third = load_file(folder / "model-2")
        assert all(third[name].equal(value) for name, value in second.items())
