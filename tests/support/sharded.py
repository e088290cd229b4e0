"""FSDP2 and ZeRO-3 on CPU processes (gloo) for tests.

`shard_on_cpu` gives this process the environment that `accelerate launch` makes of accelerate_configs/, in float32.
accelerate 1.15 reads the FSDP plugin only where it finds several GPUs, and selects no communication backend for
DeepSpeed on CPUs; both are changed here. ZeRO-3 would keep weights as small as these whole, so that its threshold is
set to 0. Model, optimizer and checkpoints are then handled by the code of accelerate, transformers, DeepSpeed and TRL.
"""

import importlib
import json
import os
import shutil
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.support import forked
from tests.support.paths import ROOT
from tests.support.toy import ToyTask
from tests.support.training import toy_trainer
from trl_grpo_tasks.commands import train as command
from trl_grpo_tasks.constraints.sharding import gathered, part, part_of, put_part, reshard, whole
from trl_grpo_tasks.evaluation.evaluate import evaluate
from trl_grpo_tasks.models.loading import load_model
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.rollout.groups import SteppedGroup
from trl_grpo_tasks.rollout.support import without_adapter
from trl_grpo_tasks.training.cold_start import cold_start
from trl_grpo_tasks.training.extras.moving_reference import MovingReference
from trl_grpo_tasks.training.generation import Generation


def launch(groups, folder, timeout) -> str:
    """Run groups of processes (gloo), one group after another, and return what they print. A group is a number of
    processes and their jobs: names of functions of this file, with options."""
    script = "import json, sys\nfrom tests.support.sharded import work\nwork(json.loads(sys.argv[1]))\n"
    printed = [forked.launch(script, processes, jobs, folder, timeout) for processes, jobs in groups]
    return "".join(out + err for out, err in printed)


def work(jobs) -> None:
    """Do these jobs in this process."""
    for name, options in jobs:
        start = time.monotonic()
        globals()[name](**options)
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
    dist.destroy_process_group()


def launch_environment(kind, precision) -> None:
    """Give this process the environment that `accelerate launch` makes of a file of accelerate_configs/."""
    file = ROOT / "accelerate_configs" / f"{kind}.yaml"
    words = ["--config_file", str(file), "--mixed_precision", precision, "--num_processes", os.environ["WORLD_SIZE"]]
    args = _validate_launch_command(launch_command_parser().parse_args([*words, "train.py"]))[0]
    if args.use_fsdp:
        os.environ |= prepare_multi_gpu_env(args)
    else:
        args.deepspeed_fields_from_accelerate_config = ",".join(yaml.safe_load(file.read_text())["deepspeed_config"])
        os.environ |= prepare_deepspeed_cmd_env(args)[1]


def shard_on_cpu(kind) -> None:
    """Make trainers of this process shard weights by "fsdp2" or "zero3". Trainers before that may have used DDP."""
    launch_environment(kind, "no")
    if kind == "fsdp2":
        AcceleratorState.__init__ = _with_plugin
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.pop("ACCELERATE_USE_CPU", None)
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # compiling it takes a minute
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
        DeepSpeedPlugin.__post_init__ = _with_small_parts
    AcceleratorState._reset_state(reset_partial_state=True)


def _with_plugin(self, *args, fsdp_plugin=None, _original=AcceleratorState.__init__, **kwargs):
    _original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = self.distributed_type


def _with_small_parts(self, _original=DeepSpeedPlugin.__post_init__):
    _original(self)
    self.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0


def options_of(kind) -> dict:
    """Options of trainers on CPUs: with `use_cpu`, accelerate would ignore DeepSpeed."""
    return {"use_cpu": kind != "zero3", "optim": "adamw_torch"}


ADAPTER = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def adapter_of(model) -> str:
    """The folder of the adapter that `save_adapter` made for a model."""
    return f"{model}-adapter"


def save_adapter(model) -> None:
    """Save an adapter that changes the model's answers, as a cold start leaves it."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, LoraConfig(**ADAPTER, init_lora_weights=False)).save_pretrained(adapter_of(model))


# ---- jobs of the processes


def train_cases(model, folder, cases, kind, resume=None) -> None:
    """Train one trainer per case, in `folder`/name; save its weights and greedy completions there. Cases are options
    by name; weights are sharded by `kind`, "fsdp2" or "zero3", or None.

    A case may also contain `lora` ("continued": the adapter of `save_adapter`), and a `task` as "module:class". TRL
    generates, unless `rollout` is "fast". With `resume`, every case resumes from this checkpoint of its folder.
    """
    for name, options in cases.items():
        try:
            _train_case(model, Path(folder) / name, dict(options) | options_of(kind), kind, resume)
        except BaseException as error:
            error.add_note(f"in case {name!r} with weights sharded by {kind}")
            raise


def _train_case(model, out, options, kind, resume) -> None:
    extra = {}
    if "task" in options:
        module, attribute = options.pop("task").split(":")
        extra["task"] = getattr(importlib.import_module(module), attribute)()
    lora = options.pop("lora", False)
    if lora == "continued":
        model = adapter_of(model)
    elif lora:
        extra["peft_config"] = LoraConfig(**ADAPTER)
    trainer = toy_trainer(model, out, **options, **extra)
    assert (trainer.is_fsdp_enabled, trainer._dist.is_zero3) == (kind == "fsdp2", kind == "zero3")
    is_ours = options.get("rollout") == "fast"
    with placed_rollouts(trainer) if is_ours else placed_sampling(trainer):
        trainer.train(resume_from_checkpoint=None if resume is None else str(out / resume))
    trained = trainer.accelerator.unwrap_model(trainer.model)
    reshard(trained)  # an evaluation leaves some weights whole
    is_shard = [isinstance(p, DTensor) or hasattr(p, "ds_status") for p in trained.parameters()]
    assert all(is_shard) if kind else not any(is_shard)
    weights = {name: whole(p).detach() for name, p in trained.named_parameters()}
    rows, executor = trainer.task.dataset("test", 3, 0), RewardExecutor(trainer.task, workers=0)
    greedy = {"temperature": 0.0, "max_completion_length": 5, "constraint": trainer.generation.constraint}
    # Of 9 completions in batches of 4, the second of two processes has none in the last round.
    with trainer.generation.policy_for_evaluation() if is_ours else nullcontext(trained) as policy:
        assert not is_ours or all(p.isfinite().all() and p.numel() for p in policy.parameters())
        made = evaluate("after", policy, trainer.processing_class, trainer.task, rows, executor=executor,
                        num_samples=3, batch_size=4, **greedy)  # fmt: skip
    if is_ours and kind:
        assert policy is not without_adapter(trained) and held_bytes(policy) == 0, "the whole copy is freed"
    trainer.save_model(str(out))
    if trainer.accelerator.is_main_process:
        torch.save(weights, out / "weights.pt")
        (out / "completions.json").write_text(json.dumps([sample.completion for sample in made.samples]))
        saved = dict(load_model(str(out), dtype="float32").named_parameters())
        for name, value in saved.items():
            torch.testing.assert_close(value, weights[name], atol=0, rtol=0, msg=f"{name} of the saved model")
    trainer.accelerator.wait_for_everyone()


def warm_up(model, folder, kind, batch_size, lora) -> None:
    """A cold start of three steps, which saves a model."""
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    task = ToyTask()
    cold_start(model, task, task.dataset("train", 24, 0), folder, steps=3, learning_rate=1e-2, batch_size=batch_size,
               peft_config=adapter, bf16=False, seed=0, **options_of(kind))  # fmt: skip


def run_command(words, keep, status=0) -> None:
    """`trl-grpo-tasks train` with these words; keep the saved model under this name."""
    assert command.main(words) == status, "the exit status"
    folder = Path(words[words.index("--output_dir") + 1])
    if status == 0 and PartialState().is_main_process:
        shutil.copy(folder / "model.safetensors", keep)
    PartialState().wait_for_everyone()


def copy_checkpoints(folder, to, cases, checkpoint) -> None:
    """Copy a checkpoint of these cases to another folder, with the metrics that it continues."""
    for case in cases if PartialState().is_main_process else ():
        shutil.copytree(Path(folder) / case / checkpoint, Path(to) / case / checkpoint)
        shutil.copy(Path(folder) / case / "training_metrics.jsonl", Path(to) / case)
    PartialState().wait_for_everyone()


def check_parts() -> None:
    """Weights of FSDP2 that are gathered, differentiated and written in parts equal whole ones."""
    torch.manual_seed(0)
    plain, sharded = nn.Linear(3, 5), nn.Linear(3, 5)
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
    with torch.no_grad():
        put_part(sharded.weight, part_of(sharded.weight, plain.weight + 1))
        torch.testing.assert_close(gathered(sharded.weight, part(sharded.weight)), plain.weight + 1)


@torch.no_grad()
def check_average(kind) -> None:
    """An average of bf16 weights, which is kept in float32, is the same in parts and on whole weights, bit for bit."""

    def layer(seed, kind=None):
        torch.manual_seed(seed)
        made = nn.Linear(3, 5).bfloat16()
        if kind == "fsdp2":
            fully_shard(made)
        elif kind == "zero3":
            import deepspeed

            options = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 3},
                "bf16": {"enabled": True},
            }
            deepspeed.zero.Init(module=made, config_dict_or_path=options)
        return made

    expected = MovingReference("ema", layer(0), layer(1), 0.9, 1)
    ours = MovingReference("ema", layer(0, kind), layer(1, kind), 0.9, 1)
    for reference in (expected, ours):
        for _ in range(3):
            reference.update()
    moved = expected.state_dict()["weights"]
    assert moved["weight"].dtype == torch.float32
    torch.testing.assert_close(ours.state_dict()["weights"], moved, atol=0, rtol=0)
    other = layer(2, kind)
    resumed = MovingReference("ema", layer(0, kind), other, 0.9, 1)
    resumed.load_state_dict(ours.state_dict())
    torch.testing.assert_close(resumed.state_dict()["weights"], moved, atol=0, rtol=0)
    torch.testing.assert_close(gathered(other.weight, part(other.weight)), moved["weight"].bfloat16(), atol=0, rtol=0)


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


@contextmanager
def placed_rollouts(trainer):
    """As `placed_sampling`, for tokens that our rollouts draw; while open, TRL must not generate."""
    places = []
    kept = SteppedGroup._gather_logits, torch.multinomial, Generation.generate_recorded

    def noted(group):
        logits, batch = kept[0](group), group._batch
        first = len(batch.prompts) * trainer.accelerator.process_index
        places[:] = [(first + i, len(batch.result.completion_ids[i])) for i in group.active]
        return logits

    def placed(probabilities_B_V, num_samples):
        seeds = [10_000 * trainer.state.global_step + 100 * row + position for row, position in places]
        size = probabilities_B_V.shape[1]
        noise = torch.stack([torch.rand(size, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        return (probabilities_B_V / -noise.log()).argmax(1, keepdim=True)

    def refuse(*_):
        raise AssertionError("TRL generates")

    SteppedGroup._gather_logits, torch.multinomial, Generation.generate_recorded = noted, placed, refuse
    try:
        yield
    finally:
        SteppedGroup._gather_logits, torch.multinomial, Generation.generate_recorded = kept


def held_bytes(model):
    return sum(weight.untyped_storage().nbytes() for weight in model.parameters())
