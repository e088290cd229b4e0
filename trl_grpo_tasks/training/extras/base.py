"""Extra: an optional feature of training, in one file with its options, checks, state and hooks.

The trainer knows no extra by name. It asks each one of the list in `__init__.py` whether it is on, and calls those
that are on at the hooks below, in the order of the list. An extra is a TrainerCallback too, so that transformers calls
it when training begins, a checkpoint is saved, an evaluation is done and training ends. Removing an extra is deleting
its file and its line in the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from transformers import TrainerCallback

from ...constraints.base import Constraint
from ...task import Task
from ..groups import RolloutGroups
from ..record import RolloutRecord


def check_advantages_per_token(args: Any, setting: str, way_out: str) -> None:
    """Raise ValueError if the loss cannot use an advantage per token, which the setting makes."""
    if args.importance_sampling_level == "sequence":
        raise ValueError(
            f"{setting} does not work with importance_sampling_level='sequence', whose gradient gives every token the "
            f"mean advantage of its completion; set importance_sampling_level='token', or {way_out}"
        )


class Extra(TrainerCallback):
    """A feature that `is_on` with the options of a TaskGRPOConfig. `state`, if it has one, is part of checkpoints: an
    object with state_dict and load_state_dict, which is equal in all processes if `is_common`."""

    name: ClassVar[str]  # of its state in checkpoints, and in `trainer.extras`
    Options: ClassVar[type]  # a dataclass from which TaskGRPOConfig inherits; its docstring is the heading in lists
    switch: ClassVar[str]  # the option that turns it on where it is not None and not its default
    is_common: ClassVar[bool] = True
    replaces_groups: ClassVar[bool] = False
    updates_reference: ClassVar[bool] = False
    needs_fsdp2: ClassVar[bool] = False  # does not work with the first version of FSDP
    state: Any = None

    def __init__(self, trainer: Any):
        self._trainer = trainer

    # ---- options

    @classmethod
    def complete(cls, args: Any) -> None:
        """Set options of a TaskGRPOConfig that others imply, before transformers checks them."""

    @classmethod
    def check(cls, args: Any) -> None:
        """Raise ValueError for options of a TaskGRPOConfig that cannot work."""

    @classmethod
    def check_task(cls, args: Any, task: Task | None, held_out: Any = None) -> None:
        """Raise ValueError if the extra is on and cannot work with the task, or with held-out rows that were given to
        the trainer, before a model is loaded."""

    @classmethod
    def check_components(cls, args: Any, task: Task | None, components: Sequence[str]) -> None:
        """Raise ValueError if the extra names no component of the reward."""

    @classmethod
    def check_constraint(cls, args: Any, constraint: Constraint | None) -> None:
        """Raise ValueError if the extra is on and cannot work with the constraint, before a cold start."""

    @classmethod
    def is_on(cls, args: Any) -> bool:
        value = getattr(args, cls.switch)
        return value is not None and bool(value != getattr(cls.Options, cls.switch))

    @classmethod
    def is_used(cls, args: Any, constraint: Constraint | None) -> bool:
        """Return whether a trainer with these options and this constraint has the extra."""
        return cls.is_on(args)

    # ---- hooks

    def start_iteration(self) -> None:
        """Called before the first rollout after each optimizer step."""

    def before_rollout(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the entries of the data set for a rollout, in training and in evaluation."""
        return inputs

    def row_for(self, index: int) -> int:
        """Return the index of the training row that stands for this one."""
        return index

    def after_sampling(self) -> None:
        """Called after each rollout, in training and in evaluation, when its completions are in the record."""

    def after_rewards(self, output: dict[str, Any]) -> None:
        """Called after each training rollout, when rewards and advantages are known."""

    def replace_groups(self, groups: RolloutGroups) -> None:
        """Replace groups of a training rollout; called if `replaces_groups`."""

    def after_rollout(self, inputs: list[dict[str, Any]]) -> None:
        """Called after each training rollout, when groups have been replaced. The record is that of the first rollout,
        whose prompts were not selected by their outcome."""

    def extra_loss(self, model: Any) -> torch.Tensor | None:
        """Return what a batch of training adds to the loss. The metrics of TRL's loss are known."""

    def after_loss(self, batch: dict[str, Any], record: RolloutRecord) -> None:
        """Called after TRL's loss of each batch, in training and in evaluation; `record` is that of the batch."""

    def metrics(self) -> dict[str, float]:
        """Return values for the next log of training."""
        return {}

    def resumed(self) -> None:
        """Called when the state of a checkpoint has been loaded."""

    def has_ended(self, checkpoint: str, common: dict[str, Any]) -> None:
        """Called if the checkpoint to resume from is the end of its run; `common` are the states that it holds."""

    # ---- the trainer

    @property
    def _args(self) -> Any:
        return self._trainer.args

    @property
    def _record(self) -> RolloutRecord:
        return self._trainer.latest_rollout

    @property
    def _metrics(self) -> dict[str, list[float]]:
        """The metrics of training since the last log."""
        return self._trainer._metrics["train"]
