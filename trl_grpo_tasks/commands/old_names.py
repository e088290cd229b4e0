"""Names that other GRPO scripts give to options, which are refused with the name here, as in docs/migration.md."""

from __future__ import annotations

from typing import Any

# In small letters, because some scripts have them as constants: GRPO_GROUP_SIZE.
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
