"""ArchiveLayer: distinct successful answers of training rollouts are archived, and may earn a reward for novelty."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from ...failures import FailureNotice, first_line
from ...rewards.components import NOVELTY
from ...task import Task
from ..options.config import TaskGRPOConfig
from ..stores.archive import Answer, Archive
from .reward import RewardLayer


class ArchiveLayer(RewardLayer):
    """All processes hold the same archive. The main process writes it to the run folder: when training begins, with
    every checkpoint, and when training ends."""

    def __init__(
        self, model: Any, reward_funcs: Any, args: TaskGRPOConfig, *more: Any, task: Task | None, **kwargs: Any
    ):
        if args.archive and task is None:
            raise ValueError(f"archive={args.archive} needs a task, whose scores tell successes; set it to 0")
        self._archive = Archive(args.archive) if args.archive else None
        self._archive_notice = FailureNotice()
        super().__init__(model, reward_funcs, args, *more, task=task, **kwargs)
        if self._archive is not None:
            self.add_callback(_WriteArchive(self))

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        rewards_N_F = super()._calculate_rewards(*args, **kwargs)
        if self._archive is not None and self.model.training:
            answers_N = gather_object(self._answers())
            novelty = [0.0 if answer is None else self._archive.novelty(answer) for answer in answers_N]
            self._fill_novelty(rewards_N_F, novelty)
            self._archive.add([answer for answer in answers_N if answer is not None], self.state.global_step + 1)
        elif self._archive is not None:
            self._fill_novelty(rewards_N_F, [0.0] * len(rewards_N_F))
        return rewards_N_F

    def _answers(self) -> list[Answer | None]:
        """The completions of this process in the latest rollout; None for those that are not a success."""
        assert self._forms is not None
        answers: list[Answer | None] = []
        record = self.latest_rollout
        for example, text, outcome in zip(record.examples, record.completions, record.outcomes, strict=True):
            if outcome.score is None or not outcome.score.success:
                answers.append(None)
            else:
                form = self._forms.of(example["row"], text)
                answers.append(Answer(example["row"], text, form, outcome.score.total))
        return answers

    def _fill_novelty(self, rewards_N_F: torch.Tensor, values: list[float]) -> None:
        """Write the component, where it has a weight, for the completions that were scored."""
        if self.args.novelty_weight:
            unscored = torch.isnan(self._component("success"))
            filled = torch.tensor(values).to(rewards_N_F).masked_fill(unscored, torch.nan)
            rewards_N_F[:, self.reward_func_names.index(NOVELTY)] = filled

    def log(self, *args: Any, **kwargs: Any) -> None:
        metrics = self._metrics["train"]
        if self._archive is not None and self.model.training and metrics:
            # TRL logs the mean since the last log, which for a count must be the mean of one value.
            metrics["archive/distinct"].append(float(self._archive.distinct))
            metrics["archive/new"].append(float(self._archive.new_since_log()))
        super().log(*args, **kwargs)

    # ---- checkpoints

    def write_archive(self) -> None:
        """Write archive.jsonl in the main process. A failure is printed, and the next call tries again."""
        if self._archive is None or not self.is_world_process_zero():
            return
        try:
            self._archive.write(self.args.output_dir)
        except OSError as error:
            self._archive_notice.failed(
                f"the archive could not be written ({first_line(error)}); training continues, checkpoints hold it, "
                "and the next save tries again"
            )
        else:
            self._archive_notice.succeeded()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.write_archive()

    def _common_parts(self) -> dict[str, Any]:
        return super()._common_parts() | ({} if self._archive is None else {"archive": self._archive})


class _WriteArchive(TrainerCallback):
    """Writes the archive when training begins, in place of that of an earlier run, and when training ends."""

    def __init__(self, trainer: ArchiveLayer):
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.write_archive()

    on_train_end = on_train_begin
