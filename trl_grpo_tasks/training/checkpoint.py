"""Checkpoints: a run can be killed at any moment and resumed bit for bit.

TRL and transformers keep some state in memory only: the current rollout and the position in it, metrics and loss since
the last log, and the order of later epochs. It is added to checkpoints here, with the state of the trainer's parts.
Each process writes its own state; the state that all processes have in common is written once. A checkpoint that
cannot be written does not end the run: it is removed, earlier ones stay, and the next save tries again.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, send_to_device
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput, rotate_checkpoints

from ..failures import FailureNotice, first_line, is_write_failure
from ..models import checkpoints
from . import deepspeed_checkpoint
from .state_files import load_state, packed, state_file


class Checkpoints(TrainerCallback):
    """Checkpoints that hold everything a run needs to resume, and are marked when complete.

    Further state of the trainer is in `trainer.parts(is_common)`: name -> object with state_dict and load_state_dict.
    """

    def __init__(self, trainer: Any):
        self._trainer, self._accelerator = trainer, trainer.accelerator
        self._resumed: dict[str, Any] | None = None  # the state of this process, until training begins
        self._is_converted = False  # whether DeepSpeed loads the converted form of the checkpoint
        self._epochs_done = 0  # before the resumed step
        self.batches_done = 0  # before it in its epoch
        self.train_sampler: Any = None  # None for streaming data sets, which have no sampler
        self.failure: Exception | None = None  # why the latest checkpoint could not be written
        self._notice, self._push_notice = FailureNotice(), FailureNotice()

    # ---- writing

    def save(self, folder: Path, save: Callable[[], None]) -> None:
        """Write a checkpoint: what `save` writes, and our state."""
        args = self._trainer.args
        # Old checkpoints are deleted only when the new one is complete, so that there is always one to resume from.
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            failure = self._attempt(lambda: self._write(folder, save))
        finally:
            args.save_total_limit = limit
        failed = torch.tensor([failure is not None], device=self._accelerator.device)
        if self._accelerator.gather(failed).any() and failure is None:
            failure = OSError("another process could not write its part")
        elif failure is None and args.should_save:
            failure = self._attempt(lambda: self._finish(folder, limit))
        self.failure = failure
        if failure is None:
            self._notice.succeeded()
        elif args.should_save:
            if not checkpoints.is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
            newest = checkpoints.newest_complete(folder.parent)
            self._notice.failed(
                f"{folder} could not be saved ({first_line(failure)}); training continues, and the next save tries "
                f"again; {'there is no checkpoint yet' if newest is None else f'{newest.name} is complete'}"
            )
        # An interrupted process ends after this; it must not do so while another process still writes.
        self._accelerator.wait_for_everyone()

    def _attempt(self, write: Callable[[], None]) -> Exception | None:
        """Write files; return the error if the file system failed. Raise it where other processes may already wait in
        a collective operation for this one: while sharded weights or the best checkpoint are saved."""
        trainer = self._trainer
        try:
            write()
        except Exception as error:
            is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
            is_collective = is_sharded or trainer.args.metric_for_best_model
            if not is_write_failure(error) or (is_collective and self._accelerator.num_processes > 1):
                raise
            return error
        return None

    def _write(self, folder: Path, save: Callable[[], None]) -> None:
        trainer = self._trainer
        if trainer.args.should_save:
            checkpoints.mark_incomplete(folder)
        save()
        torch.save(packed(self.state()), state_file(folder, self._accelerator.process_index))
        if trainer.args.should_save or trainer.is_sharded:  # all processes are needed to gather weights
            common = {name: part.state_dict() for name, part in trainer.parts(is_common=True).items()}
        if trainer.args.should_save:
            torch.save(common, state_file(folder, "common"))

    def _finish(self, folder: Path, limit: int | None) -> None:
        trainer = self._trainer
        checkpoints.mark_complete(folder)
        rotate_checkpoints(
            output_dir=str(folder.parent),
            save_total_limit=limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )
        if trainer.args.push_to_hub:
            trainer._push_from_checkpoint(str(folder))

    def state(self) -> dict[str, Any]:
        """The state of this process."""
        trainer = self._trainer
        is_rollout_used_up = trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) == 0
        batches = None if is_rollout_used_up else trainer._buffered_inputs
        return {
            "processes": self._accelerator.num_processes,
            "parts": {name: part.state_dict() for name, part in trainer.parts(is_common=False).items()},
            "micro_step": trainer._step,
            "buffered_inputs": batches,
            "metrics": {mode: dict(metrics) for mode, metrics in trainer._metrics.items()},
            "loss_since_log": trainer._tr_loss,
            "last_logged_step": trainer._globalstep_last_logged,
            "updated_at": trainer.updated_at,
            **trainer.generation.state_of_masks(batches or []),
        }

    # ---- pushing

    def push(self, folder: str, push: Callable[[], None]) -> None:
        if not checkpoints.is_complete(folder):  # transformers calls this before our state is written
            return
        self.report_failed_pushes()
        try:
            push()
        except OSError as error:  # it copies the model to the output folder first
            self._push_notice.failed(_push_failure(error))

    def report_failed_pushes(self) -> None:
        """Print why the latest push failed. Pushes run in a thread, where transformers leaves their errors unread."""
        pushing = getattr(self._trainer, "push_in_progress", None)  # transformers sets it only with push_to_hub
        jobs = [] if pushing is None else [job for job in pushing.jobs if job.done()]
        errors = [error for job in jobs if (error := job.exception()) is not None]
        if errors:
            self._push_notice.failed(_push_failure(errors[0]))
        elif jobs:
            self._push_notice.succeeded()

    # ---- resuming

    def train(self, checkpoint: Any, train: Callable[[Any], Any]) -> Any:
        """Train from a checkpoint. True: from the newest whose files are as they were written, and it is printed which
        ones are skipped. If the checkpoint is the end of the run, its weights are loaded and no step is taken.
        CheckpointError if one that is named is incomplete or damaged."""
        trainer = self._trainer
        if checkpoint is True:
            checkpoint = self._newest()
        elif checkpoint and (damage := self.damage(checkpoint)) is not None:
            raise checkpoints.CheckpointError(f"{checkpoint} cannot be resumed: {damage}")
        if checkpoint and 0 < trainer.args.max_steps <= checkpoints.step_of(checkpoint):
            return self._load_end_of_run(checkpoint)
        if checkpoint and trainer.is_deepspeed_enabled:
            self._prepare_deepspeed(checkpoint)
        if checkpoint:
            self._supersede_later(Path(checkpoint))
        return train(checkpoint)

    def _load_end_of_run(self, checkpoint: str) -> TrainOutput:
        """Load the final model of the run that ended at a checkpoint: the best one, if that is asked for."""
        trainer, end = self._trainer, f"{checkpoint} is the end of the run"
        if trainer.is_deepspeed_enabled:
            raise checkpoints.CheckpointError(
                f"{end}; DeepSpeed loads weights only to train further: raise max_steps, or evaluate the saved model "
                "with `trl-grpo-tasks eval`"
            )
        self._accelerator.print(end)
        if trainer.extras and state_file(checkpoint, "common").is_file():
            common = load_state(state_file(checkpoint, "common"), mmap=True)
            for extra in trainer.extras.values():
                extra.has_ended(checkpoint, common)
        best = Path(checkpoint).parent / f"checkpoint-{checkpoints.state_of(checkpoint).get('best_global_step')}"
        is_wanted = trainer.args.load_best_model_at_end and checkpoints.is_complete(best)
        trainer._load_from_checkpoint(str(best) if is_wanted and self.damage(best) is None else checkpoint)
        return TrainOutput(checkpoints.step_of(checkpoint), math.nan, {})

    def damage(self, checkpoint: str | Path) -> str | None:
        """What is wrong with a checkpoint, as the main process sees it; None if nothing is."""
        is_main = self._accelerator.is_main_process
        return broadcast_object_list([checkpoints.damage(checkpoint) if is_main else None])[0]

    def _newest(self) -> str:
        folder, is_main = self._trainer.args.output_dir, self._accelerator.is_main_process
        found, skipped = broadcast_object_list([checkpoints.newest_intact(folder) if is_main else (None, {})])[0]
        for path, reason in skipped.items():
            self._accelerator.print(f"skipping {path}: {reason}")
        if found is None:
            raise ValueError(f"no complete checkpoint in {folder}; start without resuming")
        self._accelerator.print(f"resuming from {found}")
        return str(found)

    def _supersede_later(self, resumed: Path) -> None:
        """Mark checkpoints after the resumed one: they stay, but a later resume does not choose them."""
        args, step = self._trainer.args, checkpoints.step_of(resumed)
        if not checkpoints.belongs_to(resumed, args.output_dir) or not args.should_save:
            return
        for path in checkpoints.checkpoint_folders(resumed.parent):
            if checkpoints.is_complete(path) and int(path.name.partition("-")[2]) > step:
                checkpoints.mark_superseded(path)
                self._accelerator.print(f"{path} is kept, but --resume_from_checkpoint no longer chooses it")

    def _prepare_deepspeed(self, checkpoint: str) -> None:
        """Convert a checkpoint that another number of processes wrote, which DeepSpeed could not load. Raise
        CheckpointError where this does not help."""
        if not state_file(checkpoint, 0).is_file():  # a checkpoint of plain TRL
            return
        wrote, processes = load_state(state_file(checkpoint, 0)).get("processes"), self._accelerator.num_processes
        if wrote in (None, processes):
            return
        if self._trainer.args.load_best_model_at_end:
            raise checkpoints.CheckpointError(
                f"{checkpoint} was written by {wrote} processes. {processes} processes can resume it with DeepSpeed, "
                "but they could not load an earlier best model at the end: leave best_by and load_best_model_at_end "
                f"out, or use {wrote} processes"
            )
        self._accelerator.print(f"converting {checkpoint} from {wrote} to {processes} processes")
        if self._accelerator.is_main_process:
            deepspeed_checkpoint.convert(checkpoint)
        self._accelerator.wait_for_everyone()
        self._deepspeed_config.setdefault("checkpoint", {})["load_universal"] = True
        self._is_converted = True

    @property
    def _deepspeed_config(self) -> dict[str, Any]:
        return self._accelerator.state.deepspeed_plugin.deepspeed_config

    def _finish_deepspeed(self, checkpoint: str) -> None:
        """Correct the optimizer after DeepSpeed has loaded a converted checkpoint, and remove the converted form."""
        deepspeed_checkpoint.correct_optimizer(self._trainer.model_wrapped.optimizer.optimizer, checkpoint)
        del self._deepspeed_config["checkpoint"]["load_universal"]
        self._is_converted = False
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            deepspeed_checkpoint.remove(checkpoint)

    def load_state(self, checkpoint: str | None) -> None:
        """Restore our state, when transformers has loaded optimizer and scheduler."""
        if checkpoint is not None and self._is_converted:
            self._finish_deepspeed(checkpoint)
        if checkpoint is None or not state_file(checkpoint, 0).is_file():  # checkpoints of plain TRL have none
            return
        trainer, state = self._trainer, self._read_state(checkpoint)
        common = load_state(state_file(checkpoint, "common"), mmap=True)  # all processes read the same pages
        for states, is_common in ((common, True), (state["parts"], False)):
            for name, part in trainer.parts(is_common).items():
                if name in states:
                    part.load_state_dict(states[name])
        trainer._step = state["micro_step"]
        trainer._buffered_inputs = send_to_device(state["buffered_inputs"], self._accelerator.device)
        for mode, metrics in state["metrics"].items():
            trainer._metrics[mode].update(metrics)
        trainer.updated_at = state["updated_at"]
        trainer.generation.load_masks(state, trainer._buffered_inputs or [])
        for extra in trainer.extras.values():
            extra.resumed()
        self._resumed = state

    def _read_state(self, checkpoint: str) -> dict[str, Any]:
        """The state of this process in a checkpoint. If another number of processes wrote it, replay groups are
        redistributed, and rollouts are dropped."""
        index, processes = self._accelerator.process_index, self._accelerator.num_processes
        is_there = state_file(checkpoint, index).is_file()
        state = load_state(state_file(checkpoint, index if is_there else 0))
        wrote = state.get("processes", processes)
        if is_there and wrote == processes:
            return state
        parts = self._trainer.parts(is_common=False)
        theirs: dict[str, list[Any]] = {name: [] for name in state["parts"] if hasattr(parts.get(name), "share_out")}
        losses = []
        for number in range(wrote):
            other = load_state(state_file(checkpoint, number))
            losses.append(other["loss_since_log"])
            for name, states in theirs.items():
                states.append(other["parts"][name])
        for name, states in theirs.items():
            state["parts"][name] = parts[name].share_out(states, index, processes)
        self._accelerator.print(
            f"{checkpoint} was written by {wrote} process{'es' * (wrote > 1)} and is resumed by {processes}: rollouts "
            "under way are dropped and sampled again"
        )
        return state | {
            "buffered_inputs": None,
            "micro_step": checkpoints.step_of(checkpoint) * self._trainer.args.gradient_accumulation_steps,
            "loss_since_log": torch.stack(losses).mean(0),  # the mean is what is logged
        }

    def position(self, done: tuple[int, int], checkpoint: str | None) -> tuple[int, int]:
        """The number of finished epochs, and of batches in the current epoch, before the resumed step; `done` is what
        transformers computes."""
        args = self._trainer.args
        if checkpoint is not None and self.train_sampler is None and not args.ignore_data_skip:
            # transformers assumes that a stream lasts as long as the run; it may have ended and been read again.
            saved = checkpoints.state_of(checkpoint)
            batches_per_epoch = saved["max_steps"] * args.gradient_accumulation_steps
            done = int(saved["epoch"]), round(saved["epoch"] % 1 * batches_per_epoch)
        self._epochs_done, self.batches_done = done
        return done

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore counters that transformers sets to zero after loading a checkpoint, just before this."""
        if self._resumed is None:
            return
        self._trainer._tr_loss.copy_(self._resumed["loss_since_log"])
        self._trainer._globalstep_last_logged = self._resumed["last_logged_step"]
        # The sampler draws one permutation per epoch from its own generator, which has been seeded again.
        sampler = self.train_sampler
        if sampler is not None and sampler.shuffle:
            for _ in range(self._epochs_done):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        self._resumed = None


def _push_failure(error: BaseException) -> str:
    return (
        f"a push to the Hub failed ({first_line(error)}); training continues, everything is saved on this machine, "
        "and the next save pushes again"
    )
