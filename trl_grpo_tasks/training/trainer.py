"""TaskGRPOTrainer: TRL's GRPOTrainer with a task. With default options it is TRL's trainer; overrides call super().

The trainer consists of layers. Each is a subclass of the one before and does one job:

- layers/checkpoint.py: checkpoints that hold everything a run needs to resume;
- layers/generation.py: completions, and the masks and log-probs they were sampled with;
- layers/scoring.py: log-probs, entropies and KL under these masks, and the loss;
- layers/reward.py: the task's rewards, and advantages;
- layers/archive.py: an archive of distinct successes;
- layers/imitation.py: the model's own successes are stored and imitated;
- layers/group.py: groups without signal are sampled again, or replaced by stored ones;
- this file: what changes during training: reference, beta, the guard's weight, curriculum.

One rollout is one RolloutRecord (record.py), which each stage fills in. The stages of a training step, in order:

1. This file: the reference and beta are updated, and the curriculum chooses rows (`_update_controllers`).
2. layers/scoring.py starts the record; layers/generation.py samples completions (`_generate_single_turn`).
3. layers/reward.py: workers start to score completions as soon as these exist (`_generate`).
4. layers/scoring.py: old and reference log-probs (`_get_per_token_logps_and_entropies`).
5. layers/reward.py: rewards are collected (`_calculate_rewards`) and advantages computed (`_replace_advantages`).
   layers/archive.py: successes are archived (`_calculate_rewards`).
6. layers/imitation.py: successes are stored.
   layers/group.py: groups without signal may be replaced (`_resample_groups`, `_replay_groups`).
   This file: the curriculum and the guard observe the outcome of the first rollout.
7. For each batch of the rollout, `_compute_loss`: layers/scoring.py scores it under its masks and logs the parts of
   the loss; layers/imitation.py adds the imitation of stored successes; this file gives the KL divergence to the
   controller of beta.
"""

from __future__ import annotations

import json
import os
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import Trainer, TrainerState
from trl.trainer import grpo_trainer
from trl.trainer.utils import print_prompt_completions_sample

from ..failures import FailureNotice, first_line
from ..models import checkpoints
from ..report.card import write_card
from ..report.gallery import Pictures
from ..report.page import SECONDS_WHILE_RUNNING
from ..task import Task, printable
from .callbacks import Hints, MetricsFile
from .control.adaptive_kl import AdaptiveKL
from .control.best_model import BestModel
from .control.curriculum import Curriculum
from .control.guard import Guard, check_guard_component
from .control.reference import MovingReference
from .layers.group import GroupLayer
from .options.collapse import check_best_by
from .options.config import TaskGRPOConfig
from .repair import with_repair
from .state_files import load_state, state_file


def _print_completions(*args: Any, **kwargs: Any) -> None:
    """Print TRL's table of --log_completions with control characters, which a terminal would obey, as escapes."""

    def shown(value: Any) -> Any:
        if isinstance(value, str):
            return "\n".join(map(printable, value.split("\n")))
        if isinstance(value, dict):
            return {key: shown(inner) for key, inner in value.items()}
        return [shown(inner) for inner in value] if isinstance(value, list | deque) else value

    print_prompt_completions_sample(*map(shown, args), **shown(kwargs))


class TaskGRPOTrainer(GroupLayer):
    """GRPOTrainer with a task: `TaskGRPOTrainer(model, args=TaskGRPOConfig(...), task=task)`.

    Without a task it is a drop-in replacement for GRPOTrainer, with reward functions and a data set. `constraint`
    replaces the task's own; either is used when `args.constrain` is set.
    """

    _tag_names = ["trl", "grpo", "trl_grpo_tasks"]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TaskGRPOConfig | None = None,
        *more: Any,
        task: Task | None = None,
        **kwargs: Any,
    ):
        args = TaskGRPOConfig() if args is None else args
        if not isinstance(args, TaskGRPOConfig):
            raise TypeError(
                f"args must be a TaskGRPOConfig (it takes all options of {type(args).__name__}), got {args!r}"
            )
        if task is not None:
            task = with_repair(task, args)
        elif args.repair_turns > 1:
            raise ValueError(
                f"repair_turns={args.repair_turns} needs a task, which says why an answer fails; set it to 1"
            )
        super().__init__(model, reward_funcs, args, *more, task=task, **kwargs)
        self.pictures = None if task is None else Pictures(task)  # each is drawn once, for report and card
        self._updated_at: int | None = None  # the optimizer step of the last update of reference and beta
        self._reference = self._make_reference()
        self._kl = None if args.kl_target is None else AdaptiveKL(args.beta, args.kl_target)
        self._curriculum = self._make_curriculum()
        self._guard = self._make_guard()
        self._plain_weights = self.reward_weights.clone()
        check_best_by(args, self.reward_func_names, has_task=task is not None)
        self._best = None
        if args.best_by is not None:
            compared = [] if task is None else [task.request(json.loads(row)) for row in self.eval_dataset["row"]]
            self._best = BestModel(args, compared)
        self.metrics_file = MetricsFile()
        self._samples_notice, self._card_notice = FailureNotice(), FailureNotice()
        self.add_callback(self.metrics_file)
        self.add_callback(Hints())
        if self._best is not None:
            self.add_callback(self._best)

    def _make_reference(self) -> MovingReference | None:
        args = self.args
        if args.reference_mode == "static":
            return None
        policy = self.accelerator.unwrap_model(self.model)
        ref_model = None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model)
        return MovingReference(args.reference_mode, policy, ref_model, args.ema_alpha, args.reference_update_freq)

    def _make_curriculum(self) -> Curriculum | None:
        args = self.args
        if not args.curriculum:
            return None
        if self.task is None or not self.task.levels:
            raise ValueError("curriculum=True needs a task with levels; this task has none, so leave curriculum off")
        return Curriculum(
            [json.loads(row) for row in self.train_dataset["row"]],
            self.task.levels,
            args.curriculum_window,
            args.curriculum_advance,
            args.curriculum_fall_back,
            seed=args.seed,
        )

    def _make_guard(self) -> Guard | None:
        args = self.args
        check_guard_component(args, self.reward_func_names, () if self.task is None else self.task.watched)
        return None if args.guard is None else Guard(args.guard, args.guard_floor)

    def log(self, *args: Any, **kwargs: Any) -> None:
        grpo_trainer.print_prompt_completions_sample = _print_completions  # TRL has no argument for it
        try:
            super().log(*args, **kwargs)
            self._samples_notice.succeeded()
        except Exception as error:
            # TRL clears its metrics, which it logs with Trainer.log and its callbacks, before it logs samples.
            frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            if self._metrics[self._mode] or Trainer.log.__code__ in frames:
                raise
            file = Path(self.args.output_dir) / "completions" / f"completions_{self.state.global_step:05d}.parquet"
            if file.is_file() and not file.read_bytes().endswith(b"PAR1"):
                file.unlink()  # it is incomplete
            self._samples_notice.failed(
                f"samples could not be logged ({type(error).__name__}: {first_line(error)}); training continues"
            )
        finally:
            grpo_trainer.print_prompt_completions_sample = print_prompt_completions_sample

    # ---- around a rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._guard is not None:
            self._set_guarded_weight(self._guard)
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self._update_controllers()
        if self._curriculum is not None:
            chosen = [self._curriculum.select(example["index"], self.state.global_step) for example in inputs]
            inputs = [self.train_dataset[index] for index in chosen]
        output = super()._generate_and_score_completions(inputs)
        if self._guard is not None:
            self._metrics["train"]["guard/weight"].append(self._guard.weight)
            self._guard.observe(self._component(self._guard.component).nanmean().item())
            if self._guard.floor is not None:
                self._metrics["train"]["guard/floor"].append(self._guard.floor)
        if self._curriculum is not None:
            self._metrics["train"]["curriculum/level"].append(float(self._curriculum.level))
            levels = gather_object([str(json.loads(example["row"]).get("level")) for example in inputs])
            self._curriculum.observe(levels, self._component("success").tolist())
        return output

    def _set_guarded_weight(self, guard: Guard) -> None:
        """Add the guard's weight to that of its component, in training only: evaluations must stay comparable."""
        self.reward_weights = self._plain_weights.clone()
        if self.model.training:
            self.reward_weights[self.reward_func_names.index(guard.component)] += guard.weight

    def _train_example(self, index: int) -> dict[str, Any]:
        if self._curriculum is not None:
            index = self._curriculum.select(index, self.state.global_step)
        return super()._train_example(index)

    def _update_controllers(self) -> None:
        """Update the reference policy and beta, once per iteration, before its rollout."""
        if self._updated_at is not None and self._updated_at != self.state.global_step:
            if self._reference is not None:
                self._reference.update()
            if self._kl is not None:
                self.beta = self._kl.update(self.args.generation_batch_size)
                self._metrics["train"]["beta"].append(self.beta)
        self._updated_at = self.state.global_step

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        if self._kl is not None and self.model.training:
            self._kl.observe(self._metrics["train"]["kl"][-1])
        return loss

    # ---- checkpoints

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

    def _common_parts(self) -> dict[str, Any]:
        parts = {"reference": self._reference, "kl": self._kl, "curriculum": self._curriculum, "best": self._best,
                 "guard": self._guard}  # fmt: skip
        return super()._common_parts() | {name: part for name, part in parts.items() if part is not None}

    def _end_of_run(self, checkpoint: str, step: int) -> str | None:
        end = super()._end_of_run(checkpoint, step)
        if end is not None and self._best is not None and state_file(checkpoint, "common").is_file():
            common = load_state(state_file(checkpoint, "common"), mmap=True)
            self._best.load_state_dict(common.get("best", self._best.state_dict()))
            self.state = TrainerState.load_from_json(str(Path(checkpoint) / checkpoints.STATE_FILE))
            self.state.is_world_process_zero = self.is_world_process_zero()
            self._best.on_train_end(self.args, self.state, self.control)
        return end

    def _state_dict(self) -> dict[str, Any]:
        return super()._state_dict() | {"updated_at": self._updated_at}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        super()._load_state_dict(state)
        self._updated_at = state["updated_at"]
        if self._kl is not None:
            self.beta = self._kl.beta
