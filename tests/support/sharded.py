"""FSDP2 on CPU processes (gloo) for tests.

accelerate 1.15 reads the FSDP plugin only where it finds several GPUs. `shard_on_cpu` makes it do the same for several
CPU processes; model, optimizer and checkpoints are then handled by accelerate's, transformers' and TRL's own code.
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


def train_cases(model, folder, cases, sharded, resume=None) -> None:
    """Train one trainer per case, in `folder`/name, and save its weights there. Cases are options by name.

    A case may also contain `lora`, and a `task` as "module:class". With `resume`, every case resumes from this
    checkpoint of its folder.
    """
    if sharded:
        shard_on_cpu()
    from tests.support.training import toy_trainer

    for name, options in cases.items():
        extra = {}
        if "task" in options:
            module, attribute = options.pop("task").split(":")
            extra["task"] = getattr(importlib.import_module(module), attribute)()
        if options.pop("lora", False):
            extra["peft_config"] = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
        out = Path(folder) / name
        trainer = toy_trainer(model, out, **options, **extra)
        assert trainer.is_fsdp_enabled == sharded
        with placed_sampling(trainer):
            trainer.train(resume_from_checkpoint=None if resume is None else str(out / resume))
        assert sharded == any(isinstance(p, DTensor) for p in trainer.model.parameters())
        weights = {name: whole(p.detach()) for name, p in trainer.model.named_parameters()}
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
