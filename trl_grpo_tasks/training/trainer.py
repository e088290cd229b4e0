"""TaskGRPOTrainer: TRL's GRPOTrainer with a task. With default options it is TRL's trainer; overrides call super().

The trainer consists of layers. Each is a subclass of the one before and does one job:

- checkpoint_layer.py: checkpoints that hold everything a run needs to resume;
- generation_layer.py: completions, and the masks and log-probs they were sampled with;
- scoring_layer.py: log-probs, entropies and KL under these masks, and the loss;
- reward_layer.py: the task's rewards, and advantages;
- this file: what changes during training: reference, beta, curriculum, replay.

One rollout is one RolloutRecord (record.py), which each stage fills in. The stages of a training step, in order:

1. This file: the reference and beta are updated, and the curriculum chooses rows (`_update_controllers`).
2. scoring_layer.py starts the record; generation_layer.py samples completions (`_generate_single_turn`).
3. reward_layer.py: workers start to score completions as soon as these exist (`_generate`).
4. scoring_layer.py: old and reference log-probs (`_get_per_token_logps_and_entropies`).
5. reward_layer.py: rewards are collected (`_calculate_rewards`) and advantages computed (`_replace_advantages`).
6. This file: the curriculum observes the outcome, and replay may replace groups without signal (`_replay_groups`).
7. For each batch of the rollout, `_compute_loss`: scoring_layer.py scores it under its masks and logs the parts of the
   loss; this file gives the KL divergence to the controller of beta.
"""

from __future__ import annotations

import json
import os
from collections import deque
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import gather, gather_object
from trl.trainer import grpo_trainer
from trl.trainer.utils import print_prompt_completions_sample, use_adapter

from ..report.card import write_card
from ..report.gallery import Pictures
from ..report.page import SECONDS_WHILE_RUNNING
from ..task import Task, printable
from .adaptive_kl import AdaptiveKL
from .callbacks import Hints, MetricsFile
from .config import TaskGRPOConfig
from .curriculum import Curriculum
from .reference import ADAPTER, MovingReference
from .replay import ReplayBuffer, StoredGroup, groups_of, put_groups
from .reward_layer import RewardLayer


def _print_completions(*args: Any, **kwargs: Any) -> None:
    """Print TRL's table of --log_completions with control characters, which a terminal would obey, as escapes."""

    def shown(value: Any) -> Any:
        if isinstance(value, str):
            return "\n".join(map(printable, value.split("\n")))
        if isinstance(value, dict):
            return {key: shown(inner) for key, inner in value.items()}
        return [shown(inner) for inner in value] if isinstance(value, list | deque) else value

    print_prompt_completions_sample(*map(shown, args), **shown(kwargs))


class TaskGRPOTrainer(RewardLayer):
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
        super().__init__(model, reward_funcs, args, *more, task=task, **kwargs)
        self.pictures = None if task is None else Pictures(task)  # each is drawn once, for report and card
        self._updated_at: int | None = None  # the optimizer step of the last update of reference and beta
        self._reference = self._make_reference()
        self._kl = None if args.kl_target is None else AdaptiveKL(args.beta, args.kl_target, args.kl_horizon)
        self._curriculum = self._make_curriculum()
        self._replay = self._make_replay()
        self.add_callback(MetricsFile())
        self.add_callback(Hints())

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
            args.curriculum_review,
            args.seed,
        )

    def _make_replay(self) -> ReplayBuffer | None:
        args = self.args
        if not args.replay_size:
            return None
        if self.task is None:
            raise ValueError("replay_size needs a task, because replayed groups belong to its rows; set replay_size=0")
        if self.tools or self._is_vlm:
            raise ValueError("replay_size does not work with tools or vision-language models; set replay_size=0")
        seed = args.seed + self.accelerator.process_index
        return ReplayBuffer(args.replay_size, args.replay_max_age, args.replay_alpha, args.replay_beta, seed)

    def log(self, *args: Any, **kwargs: Any) -> None:
        grpo_trainer.print_prompt_completions_sample = _print_completions  # TRL has no argument for it
        try:
            super().log(*args, **kwargs)
        finally:
            grpo_trainer.print_prompt_completions_sample = print_prompt_completions_sample

    # ---- around a rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self._update_controllers()
        if self._curriculum is not None:
            chosen = [self._curriculum.select(example["index"], self.state.global_step) for example in inputs]
            inputs = [self.train_dataset[index] for index in chosen]
        output = super()._generate_and_score_completions(inputs)
        if self._curriculum is not None:
            self._metrics["train"]["curriculum/level"].append(float(self._curriculum.level))
            levels = gather_object([str(json.loads(example["row"]).get("level")) for example in inputs])
            self._curriculum.observe(levels, self._component("success").tolist())
        if self._replay is not None:
            self._replay_groups(self._replay, output)
        return output

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

    # ---- replay

    @torch.no_grad()
    def _replay_groups(self, buffer: ReplayBuffer, output: dict[str, Any]) -> None:
        """Store groups with signal, and replace groups without signal by stored ones."""
        step, size = self.state.global_step, self.num_generations
        groups = len(output["advantages"]) // size
        first = self.accelerator.process_index * groups
        record = self.latest_rollout
        assert record.without_signal_P is not None
        is_empty_P = record.without_signal_P.tolist()
        is_empty = is_empty_P[first : first + groups]
        buffer.drop_older(step)
        allotted = buffer.allot(is_empty_P, gather_object([len(buffer)]), self.args.replay_fraction)
        mine = sorted(group - first for group in allotted if first <= group < first + groups)
        drawn = buffer.sample(len(mine))
        chosen = [(group, stored, weight) for group, (stored, weight) in zip(mine, drawn, strict=True)]
        if "old_per_token_logps" not in output:
            # TRL leaves them out where they equal the current ones, which those of a stored group do not.
            output["old_per_token_logps"] = self._score(output, of_reference=False)
        rows = [example["row"] for example in record.examples]
        table = self._tables["train"] if "mask_numbers" in output else None
        for group in groups_of(output, rows, [g for g in range(groups) if not is_empty[g]], size, step, table):
            buffer.add(group)
        replaced_rows = len(chosen) * size
        if self._is_sharded:
            replaced_rows = max(gather_object([replaced_rows]))
        if replaced_rows:
            self._put_groups(output, chosen, replaced_rows)
        output["num_items_in_batch"] = self.accelerator.gather(self._loss_mask(output).sum()).sum()
        ages = [float(step - stored.step) for _, stored, _ in chosen]
        sums = torch.tensor([len(ages), sum(ages), len(buffer)], device=self.accelerator.device)
        replaced_groups, age, stored_groups = gather(sums.float()).view(-1, 3).sum(0).tolist()
        self._metrics["train"]["replay/size"].append(stored_groups)
        self._metrics["train"]["replay/replaced_groups"].append(replaced_groups)
        if replaced_groups:
            self._metrics["train"]["replay/age"].append(age / replaced_groups)

    def _put_groups(
        self, output: dict[str, Any], chosen: list[tuple[int, StoredGroup, float]], scored_rows: int
    ) -> None:
        """Write stored groups into a rollout and compute their reference log-probs with the present reference, which
        scores this number of rows: where they are more than those replaced, the rest is not used."""
        table = self._tables["train"] if "mask_numbers" in output else None
        replaced = put_groups(output, chosen, self.num_generations, self._tokenizer.pad_token_id, table)
        if "ref_per_token_logps" in output:
            scored = replaced + [0] * (scored_rows - len(replaced))
            part = {
                key: value[scored]
                for key, value in output.items()
                if isinstance(value, torch.Tensor) and value.ndim == 2
            }
            output["ref_per_token_logps"][replaced] = self._score(part, of_reference=True)[: len(replaced)]

    def _score(self, output: dict[str, Any], of_reference: bool) -> torch.Tensor:
        """Log-probs of a rollout's completions under the present policy or reference."""
        model, adapter = self.model, nullcontext()
        if of_reference and self.ref_model is not None:
            model = self.ref_model
        elif of_reference:
            policy = self.accelerator.unwrap_model(self.model)
            adapter = use_adapter(policy, ADAPTER if ADAPTER in policy.peft_config else None)
        with self._scoring(self._record_of(output)), adapter:
            return self._get_per_token_logps_and_entropies(
                model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                output["completion_ids"].shape[1],
                batch_size=self.args.per_device_train_batch_size,
            )[0]

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
            self.accelerator.print(f"the model card could not be written ({type(error).__name__}: {error})")

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | ({} if self._replay is None else {"replay": self._replay})

    def _common_parts(self) -> dict[str, Any]:
        parts = {"reference": self._reference, "kl": self._kl, "curriculum": self._curriculum}
        return super()._common_parts() | {name: part for name, part in parts.items() if part is not None}

    def _state_dict(self) -> dict[str, Any]:
        return super()._state_dict() | {"updated_at": self._updated_at}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        super()._load_state_dict(state)
        self._updated_at = state["updated_at"]
        if self._kl is not None:
            self.beta = self._kl.beta
