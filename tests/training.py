"""How tests build trainers: small, on the CPU, seeded, quiet."""

from tests.toy import ToyTask
from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer

QUIET = {
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 5,
    "learning_rate": 1e-2,
    "reward_workers": 0,
}


def config(output_dir, **options) -> TaskGRPOConfig:
    return TaskGRPOConfig(output_dir=str(output_dir), **(QUIET | options))


def toy_trainer(model, output_dir, task=None, **options) -> TaskGRPOTrainer:
    extra = {name: options.pop(name) for name in ("peft_config", "constraint", "eval_dataset") if name in options}
    return TaskGRPOTrainer(model, args=config(output_dir, **options), task=task or ToyTask(), **extra)


def parameters(trainer) -> dict:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


TIMES = ("runtime", "per_second", "step_time", "perf/")


def timeless(logs: dict) -> dict:
    return {key: value for key, value in logs.items() if not any(word in key for word in TIMES)}
