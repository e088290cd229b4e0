"""ArchiveLayer: distinct successful answers of training rollouts are archived."""

from __future__ import annotations

from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from ...failures import FailureNotice, first_line
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
            self._archive.add(gather_object(self._successful_answers()), self.state.global_step + 1)
        return rewards_N_F

    def _successful_answers(self) -> list[Answer]:
        """The successful completions of this process in the latest rollout."""
        assert self._forms is not None and self.task is not None
        record = self.latest_rollout
        return [
            Answer(
                example["row"], self.task.request(row), text, self._forms.of(example["row"], text), outcome.score.total
            )
            for example, row, text, outcome in zip(
                record.examples, record.rows, record.completions, record.outcomes, strict=True
            )
            if outcome.score is not None and outcome.score.success
        ]

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
