"""Names that commands and options had before or have in other GRPO scripts: each is refused with the name here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Commands of earlier versions, and what to write now.
OLD_COMMANDS = {
    "archive": "export RUN --top N, for the best samples of its last evaluation",
    "generate": "solve RUN_OR_MODEL --text TEXT --samples 4 --all",
    "score": "tool TASK score --input FILE",
    "status": "report RUN ... --status",
    "sweep": "train TASK --out DIR, once for each setting; docs/guides/evaluation.md says how to compare them",
    "tasks": "list",
    "recipes": "list [TASK]",
    "task": "tool TASK [TOOL ...]",
}
# Options of earlier versions, by command, and what to write now.
OLD_OPTIONS: dict[str, dict[str, str]] = {
    "export": {
        "--archive": "gone; export RUN --top N writes the best samples of the last evaluation",
        "--gguf": "trl-grpo-tasks export-model RUN",
        "--gguf_type": "trl-grpo-tasks export-model RUN --type TYPE",
    },
    "play": {"--space": "gone; --share makes a public address, and trl-grpo-tasks push uploads the model"},
    "solve": {"--output_dir": "--out DIR"},
    "train": {
        "--num_samples": "--samples N",
        "--archive": "gone; trl-grpo-tasks export RUN writes the best samples of the last evaluation",
        "--replay_max_age": "50, a constant",
        "--replay_fraction": "0.5, a constant",
        "--step_credit": "gone, because it made no difference over three seeds; --gamma discounts per token",
        "--search": "one run of train.py per setting, each with its own --output_dir, from Optuna, a wandb sweep or a "
        "shell loop; results.json there holds the metrics to compare, in evaluations[-1]",
    },
    "eval": {"--num_samples": "--samples N"},
}
# Options of other scripts, as in docs/migration.md. In small letters, because some scripts have them as constants:
# GRPO_GROUP_SIZE.
OLD_NAMES = {
    "group_size": "num_generations",
    "grpo_group_size": "num_generations",
    "kl_coef": "beta",
    "kl_beta": "beta",
    "rl_kl": "beta",
    "clip_range": "epsilon",
    "clip_ratio": "epsilon",
    "advantage_clip_ratio": "advantage_clip",
    "gradient_clip": "max_grad_norm",
    "max_new_tokens": "max_completion_length",
    "minibatch_size": "per_device_train_batch_size",
    "rl_batch_size": "per_device_train_batch_size",
    "rl_learning_rate": "learning_rate",
    "ppo_epochs": "num_iterations",
    "num_epochs": "num_train_epochs",
    "num_episodes": "max_steps",
    "rl_max_steps": "max_steps",
    "eval_episodes": "eval_rows",
    "use_curriculum": "curriculum",
    "use_priority_buffer": "replay_size",
    "replay_buffer_size": "replay_size",
    "log_interval": "logging_steps",
    "save_interval": "save_steps",
    "checkpoint": "model_name_or_path",
    "model_path": "model_name_or_path",
    "resume": "resume_from_checkpoint",
    "dataset_path": "prompts_file",
    "generator_checkpoint": "model_name_or_path",
    "judge_checkpoint": "judge",
}
# Options that exist here with another meaning, and the option that has the meaning they have elsewhere.
OTHER_MEANINGS = {"num_iterations": "max_steps", "rollout_batch_size": "generation_batch_size"}
MOST_PASSES = 20  # over one rollout; a larger number was meant as a number of steps


def refuse_old_options(command: str, words: Sequence[str]) -> None:
    """Raise ValueError for the first option that an earlier version of this command had."""
    old = OLD_OPTIONS.get(command, {})
    for word in words:
        name = word.partition("=")[0]
        if name in old:
            raise ValueError(f"{name} is now: {old[name]}")


def meaning_hints(args: Any) -> list[str]:
    """Return a line for each option of a `TaskGRPOConfig` whose value only makes sense in the meaning that it has
    elsewhere."""
    hints = []
    if (passes := args.num_iterations) > MOST_PASSES:
        hints.append(
            f"--num_iterations {passes} makes {passes} passes over each rollout; for {passes} optimizer steps, give "
            f"--steps {passes} instead"
        )
    size, completions = args.rollout_batch_size, args.generation_batch_size // args.world_size
    if size is not None and size >= completions:
        hints.append(
            f"--rollout_batch_size {size} bounds how many completions are generated at a time, and a rollout has only "
            f"{completions} per process; for {size} prompts per rollout, give --generation_batch_size "
            f"{size * args.num_generations} instead"
        )
    return hints
