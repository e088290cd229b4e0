"""TaskGRPOTrainer: TRL's GRPOTrainer with a task. With default options it is TRL's trainer; overrides call super().

This file shows a training step from top to bottom. The work is done by objects that the trainer owns:

- `generation` (generation.py) samples completions, and keeps the masks and log-probs they were sampled with;
- `rewarding` (rewarding.py) has the task's rewards, and computes advantages;
- `scoring` (scoring.py) computes log-probs, entropies and KL under these masks, and logs the parts of the loss;
- `checkpoints` (checkpoint.py) hold everything a run needs to resume;
- `extras` (extras/) are optional features, called at fixed places.

One rollout is one RolloutRecord (record.py), which each stage fills in. TRL calls the methods of a step in this order:
`_generate_and_score_completions`, and within it `_generate`, `_generate_single_turn`,
`_get_per_token_logps_and_entropies` and `_calculate_rewards`; then `_compute_loss` for each batch of the rollout.
"""

from __future__ import annotations

import os
import traceback
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import Trainer
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import print_prompt_completions_sample

from ..constraints.base import Constraint
from ..failures import FailureNotice, first_line
from ..models.loading import set_template_variables
from ..models.masked_policy import is_masked_lm, save_fill_steps
from ..models.quantised import adapter_weights
from ..models.tiny import PLAIN_CHAT_TEMPLATE
from ..report.card import write_card
from ..report.gallery import Pictures
from ..report.page import SECONDS_WHILE_RUNNING
from ..rewards.components import TaskRewards
from ..rewards.repair import with_repair
from ..serving.generation import engine_options
from ..task import Task, printable
from .callbacks import Hints, MetricsFile
from .checkpoint import Checkpoints
from .config import TaskGRPOConfig
from .dataset import task_datasets
from .exact_sampling import check_endings, check_temperature
from .extras import EXTRAS, Extra
from .generation import Generation
from .groups import RolloutGroups
from .policy import correct_model, model_for_trl
from .record import RolloutRecord
from .rewarding import Rewarding
from .scoring import Scoring


class TaskGRPOTrainer(GRPOTrainer):
    """GRPOTrainer with a task: `TaskGRPOTrainer(model, args=TaskGRPOConfig(...), task=task)`.

    Without a task it is a drop-in replacement for GRPOTrainer, with reward functions and a data set. `constraint`
    replaces the task's own; either is used when `args.constrain` is set.
    """

    _tag_names = ["trl", "grpo", "trl_grpo_tasks"]
    args: TaskGRPOConfig
    use_vllm: bool

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TaskGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *more: Any,
        task: Task | None = None,
        constraint: Constraint | None = None,
        peft_config: Any = None,
        quantization_config: Any = None,
        **kwargs: Any,
    ):
        args = TaskGRPOConfig() if args is None else args
        task = _checked_task(task, args, reward_funcs, eval_dataset)
        rewards = None
        if task is not None:
            rewards = TaskRewards(task, args, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            reward_funcs = rewards.functions()
            train_dataset, eval_dataset = task_datasets(task, args, train_dataset, eval_dataset)
        check_temperature(args)
        is_masked = is_masked_lm(model) if task is None else task.policy == "masked"
        model, peft_config, quantization_config = model_for_trl(
            model, args, is_masked, peft_config, quantization_config
        )
        weights = adapter_weights(model)
        has_masks = args.samples_under_constraint or bool(args.sampling_filters)
        with engine_options(has_masks, args.vllm_weights_folder) as engine_key:
            super().__init__(
                model,
                reward_funcs,
                args,
                train_dataset,
                eval_dataset,
                *more,
                peft_config=peft_config,
                quantization_config=quantization_config,
                **kwargs,
            )
        correct_model(self, weights)
        self.task = task
        if task is not None:
            self._tokenizer.chat_template = self._tokenizer.chat_template or PLAIN_CHAT_TEMPLATE
            set_template_variables(self._tokenizer, args.chat_template_kwargs)
        self.latest_rollout = RolloutRecord(self.mode)
        self.updated_at: int | None = None  # the optimizer step at which the current iteration started
        self.generation = Generation(self, constraint, is_masked, engine_key)
        self.scoring = Scoring(self, self.generation)
        self.rewarding = Rewarding(self, rewards)
        self.checkpoints = Checkpoints(self)
        constraint = self.generation.constraint
        for extra in EXTRAS:
            extra.check_components(args, task, self.reward_func_names)
            extra.check_constraint(args, constraint)
        self.extras: dict[str, Extra] = {e.name: e(self) for e in EXTRAS if e.is_used(args, constraint)}
        self.pictures = None if task is None else Pictures(task)  # each is drawn once, for report and card
        self.metrics_file = MetricsFile()
        self._samples_notice, self._card_notice = FailureNotice(), FailureNotice()
        for callback in (self.checkpoints, self.metrics_file, Hints(), *self.extras.values()):
            self.add_callback(callback)

    @property
    def mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    @property
    def is_sharded(self) -> bool:
        """Whether processes hold parts of the weights, so that all of them must take part in each forward pass."""
        return self.is_fsdp_enabled or self._dist.is_zero3

    def latest_samples(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Row, completion and outcome of each sample in this process's latest rollout, for reports and trackers."""
        record = self.latest_rollout
        return list(zip(record.rows, record.completions, record.outcomes, strict=True)) if record.outcomes else []

    # ---- a rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        extras, is_training = self.extras.values(), self.model.training
        if is_training:
            self.start_iteration()
        for extra in extras:
            inputs = extra.before_rollout(inputs)
        output = self.sample_and_reward(inputs)
        if is_training:
            if replacing := [extra for extra in extras if extra.replaces_groups]:
                groups = RolloutGroups(self, output, [example["row"] for example in inputs])
                for extra in replacing:
                    extra.replace_groups(groups)
            for extra in extras:
                extra.after_rollout(inputs)
        return output

    def start_iteration(self) -> None:
        """Call the extras once per iteration, before its first rollout."""
        if self.updated_at is not None and self.updated_at != self.state.global_step:
            for extra in self.extras.values():
                extra.start_iteration()
        self.updated_at = self.state.global_step

    def sample_and_reward(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """One rollout: completions, log-probs, rewards and advantages."""
        self.latest_rollout = RolloutRecord(self.mode, inputs)
        with self.scoring.under(self.latest_rollout), self.generation.vllm_options(apply=True):
            output = super()._generate_and_score_completions(inputs)
        self.scoring.add_masks(output)
        for extra in self.extras.values():
            extra.after_sampling()
        self.rewarding.set_advantages(output)
        if self.model.training:
            for extra in self.extras.values():
                extra.after_rewards(output)
        self.rewarding.log_groups()
        return output

    def train_example(self, index: int) -> dict[str, Any]:
        """The entry of the training data that stands for this index."""
        for extra in self.extras.values():
            index = extra.row_for(index)
        return self.train_dataset[index]

    def _generate(self, prompts: list[Any]) -> Any:
        """Completions of all prompts. Workers start to score them at once."""
        with self.rewarding.scoring_turns(self.generation.constraint):
            generated = super()._generate(prompts)
        self.generation.record(prompts, generated)
        self.rewarding.begin()
        return generated

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Here completions are sampled, under the masks of the constraint."""
        generate = partial(super()._generate_single_turn, prompt_ids, *args, **kwargs)
        return self.generation.sample(prompt_ids, generate)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Current, old and reference log-probs, under the masks that completions were sampled with."""
        return self.scoring.logps_and_entropies(super()._get_per_token_logps_and_entropies, *args, **kwargs)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, *args: Any, **kwargs: Any) -> Any:
        compute = partial(super()._calculate_rewards, inputs, prompts, completions, *args, **kwargs)
        return self.rewarding.collect(inputs, completions, compute)

    # ---- the loss of a batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss, record = self.scoring.loss(inputs, partial(super()._compute_loss, model, inputs))
        for extra in self.extras.values():
            extra.after_loss(inputs, record)
        if self.model.training:
            for extra in self.extras.values():
                if (added := extra.extra_loss(model)) is not None:
                    loss = loss + added
        return loss

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        """The tokens that `top_entropy_quantile` selects. Forced tokens are not selected and do not count in the
        quantile: their entropy is 0, and if they are many the threshold would be 0, which every token reaches."""
        return super().get_high_entropy_mask(entropies, self.scoring.decisions(mask), threshold)

    # ---- evaluation and logs

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.rewarding.start_evaluation()
        return super().evaluation_loop(*args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.rewarding.log_totals()
        metrics = self._metrics["train"]
        if self.model.training and metrics:
            for extra in self.extras.values():
                # TRL logs the mean since the last log, which for a total must be the mean of one value.
                for name, value in extra.metrics().items():
                    metrics.setdefault(name, []).append(value)
        grpo_trainer.print_prompt_completions_sample = _print_completions  # TRL has no argument for it
        try:
            super().log(*args, **kwargs)
            self._samples_notice.succeeded()
        except Exception as error:
            # TRL clears its metrics, which it logs with Trainer.log and its callbacks, before it logs samples.
            frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            if self._metrics[self.mode] or Trainer.log.__code__ in frames:
                raise
            file = Path(self.args.output_dir) / "completions" / f"completions_{self.state.global_step:05d}.parquet"
            if file.is_file() and not file.read_bytes().endswith(b"PAR1"):
                file.unlink()  # it is incomplete
            self._samples_notice.failed(
                f"samples could not be logged ({type(error).__name__}: {first_line(error)}); training continues"
            )
        finally:
            grpo_trainer.print_prompt_completions_sample = print_prompt_completions_sample

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write our model card where there is a task. TRL calls this at every checkpoint, before a push."""
        if self.pictures is None or not self.is_world_process_zero():
            return super().create_model_card(*args, **kwargs)
        assert self.task is not None
        os.makedirs(self.args.output_dir, exist_ok=True)
        self.pictures.start_page(SECONDS_WHILE_RUNNING)
        try:
            write_card(self.args.output_dir, self.task, getattr(self, "hub_model_id", None), pictures=self.pictures)
        except Exception as error:  # noqa: BLE001 - a checkpoint must be written whatever is wrong with the card
            self._card_notice.failed(f"the model card could not be written ({type(error).__name__}: {error})")
        else:
            self._card_notice.succeeded()

    # ---- checkpoints

    def parts(self, is_common: bool) -> dict[str, Any]:
        """What checkpoints hold besides TRL's state: objects with state_dict and load_state_dict. The state of some is
        common to all processes, and that of the others belongs to each process."""
        states = {name: extra.state for name, extra in self.extras.items() if extra.is_common == is_common}
        own = {} if is_common else self.rewarding.parts()
        return own | {name: state for name, state in states.items() if state is not None}

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. `resume_from_checkpoint=True` resumes from the newest checkpoint whose files are as they
        were written."""
        train = super().train
        return self.checkpoints.train(resume_from_checkpoint, lambda checkpoint: train(checkpoint, *args, **kwargs))

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self.checkpoints.train_sampler = super()._get_train_sampler(dataset)
        return self.checkpoints.train_sampler

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        done = super()._init_training_state(max_steps, steps_per_epoch, epochs, resume_from_checkpoint, trial)
        return self.checkpoints.position(done, resume_from_checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.generation.masked_policy is not None and self.args.should_save:
            save_fill_steps(self.accelerator.unwrap_model(self.model), output_dir or self.args.output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        self.checkpoints.save(folder, partial(super()._save_checkpoint, model, trial))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.checkpoints.push(checkpoint_folder, partial(super()._push_from_checkpoint, checkpoint_folder))

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self.checkpoints.report_failed_pushes()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        # If there is an adapter in a sub-folder (TRL's "ref"), transformers loads that one instead of the trained one.
        model = self.model if model is None else model
        if is_peft_model(model) and len(model.peft_config) > 1 and not self.is_sharded:
            model.load_adapter(resume_from_checkpoint, model.active_adapters[0], is_trainable=True)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if (damage := self.checkpoints.damage(best)) is None:
            return super()._load_best_model()
        self.accelerator.print(f"{best} cannot be loaded: {damage}; the model of the last step is kept")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.checkpoints.load_state(checkpoint)


def _checked_task(task: Task | None, args: Any, reward_funcs: Any, held_out: Any) -> Task | None:
    """The task, with turns of repair where the options ask for them. Raise an error for what does not go together,
    before a model is loaded."""
    if not isinstance(args, TaskGRPOConfig):
        raise TypeError(f"args must be a TaskGRPOConfig (it takes all options of {type(args).__name__}), got {args!r}")
    if task is None and args.repair_turns > 1:
        raise ValueError(f"repair_turns={args.repair_turns} needs a task, which says why an answer fails; set it to 1")
    task = None if task is None else with_repair(task, args)
    for extra in EXTRAS:
        extra.check_task(args, task, held_out)
    if task is not None:
        check_endings(args)
        if reward_funcs is not None or args.reward_weights is not None:
            raise ValueError("a task defines its own rewards: leave out reward_funcs and reward_weights, and set "
                             "component_weights to weight its components")  # fmt: skip
    return task


def _print_completions(*args: Any, **kwargs: Any) -> None:
    """Print TRL's table of --log_completions with control characters, which a terminal would obey, as escapes."""

    def shown(value: Any) -> Any:
        if isinstance(value, str):
            return "\n".join(map(printable, value.split("\n")))
        if isinstance(value, dict):
            return {key: shown(inner) for key, inner in value.items()}
        return [shown(inner) for inner in value] if isinstance(value, list | deque) else value

    print_prompt_completions_sample(*map(shown, args), **shown(kwargs))
