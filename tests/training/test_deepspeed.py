"""ZeRO stages 1 and 2 keep whole weights: our rollouts are used, and training equals DDP; another number of processes
can resume. Needs DeepSpeed."""

import pytest

from tests.support.training import assert_same_runs, run_processes

pytest.importorskip("deepspeed")

PREPARE = """
import os
if "deepspeed" in options:
    os.environ["DS_ACCELERATOR"] = "cpu"
    del os.environ["ACCELERATE_USE_CPU"]
    # accelerate selects no communication backend for DeepSpeed on CPUs.
    from accelerate.state import DistributedType, PartialState
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
    import deepspeed.comm.torch
    deepspeed.comm.torch.build_shm_op = lambda: None  # compiling it takes a minute
"""
SCRIPT = f"""{PREPARE}
from tests.support.training import toy_trainer
trainer = toy_trainer(model, output_dir, **options)
assert trainer.is_deepspeed_enabled == ("deepspeed" in options) and trainer.generation.uses_engine
"""
OPTIONS = {"max_steps": 4, "rollout": "fast", "constrain": True, "beta": 0.05, "seed": 3, "optim": "adamw_torch"}


def zero(stage):
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    return {"use_cpu": False, "deepspeed": config | dict.fromkeys(sizes, "auto")}


@pytest.fixture(scope="module")
def ddp(tiny_path, tmp_path_factory):
    return run_processes(SCRIPT, tiny_path, tmp_path_factory.mktemp("ddp") / "run", 2, OPTIONS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_stages_with_whole_weights_equal_ddp(tiny_path, tmp_path, ddp, stage):
    zero_run = run_processes(SCRIPT, tiny_path, tmp_path / "zero", 2, OPTIONS | zero(stage))
    assert_same_runs(ddp, zero_run, ("loss", "reward", "kl", "sampling/logp_difference_max"))
