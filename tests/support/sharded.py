"""FSDP2 and ZeRO-3 on CPU processes (gloo) for tests.

accelerate 1.15 reads the FSDP plugin only where it finds several GPUs, and selects no communication backend for
DeepSpeed on CPUs. `shard_on_cpu` and `zero3_on_cpu` change that; model, optimizer and checkpoints are then handled by
the code of accelerate, transformers, DeepSpeed and TRL.
"""

import importlib
import os
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from peft import LoraConfig
from torch.distributed.tensor import DTensor

from trl_grpo_tasks.constraints.sharding import whole


def shard_on_cpu() -> None:
    """Make trainers of this process use FSDP2. Must be called before the configuration is created."""
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }
    original = AcceleratorState.__init__

    def with_plugin(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = with_plugin


def zero3_on_cpu() -> dict:
    """Prepare this process for ZeRO-3, before anything of accelerate is created; return the trainer's options."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.pop("ACCELERATE_USE_CPU", None)
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}  # small weights are sharded too
    config = {"zero_optimization": stage, "zero_allow_untested_optimizer": True} | dict.fromkeys(sizes, "auto")
    return {"use_cpu": False, "deepspeed": config, "optim": "adamw_torch"}


def train_cases(model, folder, cases, sharded, resume=None) -> None:
    """Train one trainer per case, in `folder`/name, and save its weights there. Cases are options by name; weights are
    sharded by "fsdp2" or "zero3", or None.

    A case may also contain `lora`, and a `task` as "module:class". With `resume`, every case resumes from this
    checkpoint of its folder.
    """
    common = {}
    if sharded == "fsdp2":
        shard_on_cpu()
    elif sharded == "zero3":
        common = zero3_on_cpu()
    from tests.support.training import toy_trainer

    for name, options in cases.items():
        extra = {}
        if "task" in options:
            module, attribute = options.pop("task").split(":")
            extra["task"] = getattr(importlib.import_module(module), attribute)()
        if options.pop("lora", False):
            extra["peft_config"] = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
        out = Path(folder) / name
        trainer = toy_trainer(model, out, **(options | common), **extra)
        assert (trainer.is_fsdp_enabled, trainer._dist.is_zero3) == (sharded == "fsdp2", sharded == "zero3")
        with placed_sampling(trainer):
            trainer.train(resume_from_checkpoint=None if resume is None else str(out / resume))
        is_shard = [isinstance(p, DTensor) or hasattr(p, "ds_status") for p in trainer.model.parameters()]
        assert all(is_shard) if sharded else not any(is_shard)
        weights = {name: whole(p).detach() for name, p in trainer.model.named_parameters()}
        if trainer.accelerator.is_main_process:
            torch.save(weights, out / "weights.pt")
        trainer.accelerator.wait_for_everyone()


@contextmanager
def placed_sampling(trainer):
    """While open, a token that `generate` draws depends on its row in the batch of all processes, its position and the
    step, but not on the number of processes."""
    drawn = {"rollout": None, "positions": 0}

    def multinomial(probabilities_B_V, num_samples):
        assert num_samples == 1
        step, is_training = trainer.state.global_step, trainer.model.training
        if drawn["rollout"] != (step, is_training):
            drawn.update(rollout=(step, is_training), positions=0)
        generator = torch.Generator().manual_seed(1000 * step + drawn["positions"])
        drawn["positions"] += 1
        rows, columns = probabilities_B_V.shape
        noise = torch.rand(rows * trainer.accelerator.num_processes, columns, generator=generator)
        noise = noise[trainer.accelerator.process_index * rows :][:rows]
        return (probabilities_B_V / -noise.log()).argmax(1, keepdim=True)

    original, torch.multinomial = torch.multinomial, multinomial
    try:
        yield
    finally:
        torch.multinomial = original
