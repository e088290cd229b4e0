"""CheckpointLayer: a GRPO trainer that can be killed at any moment and resumed bit for bit.

TRL and transformers keep some state in memory only: the current rollout and the position in it, metrics and loss since
the last log, and the order of later epochs. This layer adds it to checkpoints, with the state of every `_parts` entry.
Each process writes its own state; the state that all processes have in common is written once. A checkpoint that
cannot be written does not end the run: it is removed, earlier ones stay, and the next save tries again.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, is_peft_model, send_to_device
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput, rotate_checkpoints
from trl import GRPOTrainer

from ...failures import FailureNotice, first_line, is_write_failure
from ...models import checkpoints
from .. import universal
from ..state_files import load_state, packed, state_file


class CheckpointLayer(GRPOTrainer):
    """GRPOTrainer whose checkpoints hold everything a run needs to resume, and are marked when complete."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._resumed: dict[str, Any] | None = None
        self._is_converted = False  # whether DeepSpeed loads the converted form of the checkpoint
        self._epochs_done = 0  # before the resumed step
        self._train_sampler: Any = None  # None for streaming data sets, which have no sampler
        self.checkpoint_failure: Exception | None = None  # why the latest checkpoint could not be written
        self._checkpoint_notice, self._push_notice = FailureNotice(), FailureNotice()
        self.add_callback(_RestoreCounters(self))

    @property
    def _is_sharded(self) -> bool:
        """Whether processes hold parts of the weights, so that all of them must take part in each forward pass."""
        return self.is_fsdp_enabled or self._dist.is_zero3

    def _parts(self) -> dict[str, Any]:
        """Further state of this process that changes during training: name -> object with state_dict and
        load_state_dict."""
        return {}

    def _common_parts(self) -> dict[str, Any]:
        """Like `_parts`, but state that is equal in all processes. Only the process that saves the model saves it."""
        return {}

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. `resume_from_checkpoint=True` resumes from the newest checkpoint whose files are as they
        were written, and prints which ones it skips. If that checkpoint is the end of the run, its weights are loaded
        and no step is taken. CheckpointError if a checkpoint that is named is incomplete or damaged."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_checkpoint()
        elif resume_from_checkpoint and (damage := self._damage(resume_from_checkpoint)) is not None:
            raise checkpoints.CheckpointError(f"{resume_from_checkpoint} cannot be resumed: {damage}")
        step = checkpoints.step_of(resume_from_checkpoint) if resume_from_checkpoint else 0
        end = self._end_of_run(resume_from_checkpoint, step) if resume_from_checkpoint else None
        if end is not None and self.is_deepspeed_enabled:
            raise checkpoints.CheckpointError(
                f"{end}; DeepSpeed loads weights only to train further: raise max_steps, or evaluate the saved model "
                "with `trl-grpo-tasks eval`"
            )
        if end is not None:
            self.accelerator.print(end)
            self._load_from_checkpoint(self._final_checkpoint(resume_from_checkpoint))  # without one more step
            return TrainOutput(step, math.nan, {})
        if resume_from_checkpoint and self.is_deepspeed_enabled:
            self._prepare_deepspeed(resume_from_checkpoint)
        if resume_from_checkpoint:
            self._supersede_later(Path(resume_from_checkpoint), step)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _end_of_run(self, checkpoint: str, step: int) -> str | None:
        """Why the run of a checkpoint has ended, so that there is nothing to resume; None if it has not."""
        return f"{checkpoint} is the end of the run" if 0 < self.args.max_steps <= step else None

    def _final_checkpoint(self, last: str) -> str:
        """The checkpoint with the final model of a run that ended at `last`: the best one, if that is asked for."""
        best = Path(last).parent / f"checkpoint-{checkpoints.state_of(last).get('best_global_step')}"
        is_wanted = self.args.load_best_model_at_end and checkpoints.is_complete(best)
        return str(best) if is_wanted and self._damage(best) is None else last

    def _prepare_deepspeed(self, checkpoint: str) -> None:
        """Convert a checkpoint that another number of processes wrote, which DeepSpeed could not load. Raise
        CheckpointError where this does not help."""
        if not state_file(checkpoint, 0).is_file():  # a checkpoint of plain TRL
            return
        wrote, processes = load_state(state_file(checkpoint, 0)).get("processes"), self.accelerator.num_processes
        if wrote in (None, processes):
            return
        if self.args.load_best_model_at_end:
            raise checkpoints.CheckpointError(
                f"{checkpoint} was written by {wrote} processes. {processes} processes can resume it with DeepSpeed, "
                "but they could not load an earlier best model at the end: leave best_by and load_best_model_at_end "
                f"out, or use {wrote} processes"
            )
        self.accelerator.print(f"converting {checkpoint} from {wrote} to {processes} processes")
        if self.accelerator.is_main_process:
            universal.convert(checkpoint)
        self.accelerator.wait_for_everyone()
        self.accelerator.state.deepspeed_plugin.deepspeed_config.setdefault("checkpoint", {})["load_universal"] = True
        self._is_converted = True

    def _finish_deepspeed(self, checkpoint: str) -> None:
        """Correct the optimizer after DeepSpeed has loaded a converted checkpoint, and remove the converted form."""
        universal.correct_optimizer(self.model_wrapped.optimizer.optimizer, checkpoint)
        del self.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"]["load_universal"]
        self._is_converted = False
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            universal.remove(checkpoint)

    def _damage(self, checkpoint: str | Path) -> str | None:
        """What is wrong with a checkpoint, as the main process sees it; None if nothing is."""
        return broadcast_object_list([checkpoints.damage(checkpoint) if self.accelerator.is_main_process else None])[0]

    def _newest_checkpoint(self) -> str:
        is_main = self.accelerator.is_main_process
        found, skipped = broadcast_object_list(
            [checkpoints.newest_intact(self.args.output_dir) if is_main else (None, {})]
        )[0]
        for path, reason in skipped.items():
            self.accelerator.print(f"skipping {path}: {reason}")
        if found is None:
            raise ValueError(f"no complete checkpoint in {self.args.output_dir}; start without resuming")
        self.accelerator.print(f"resuming from {found}")
        return str(found)

    def _supersede_later(self, resumed: Path, step: int) -> None:
        """Mark checkpoints after the resumed one: they stay, but a later resume does not choose them."""
        if not checkpoints.belongs_to(resumed, self.args.output_dir) or not self.args.should_save:
            return
        for path in checkpoints.checkpoint_folders(resumed.parent):
            if checkpoints.is_complete(path) and int(path.name.partition("-")[2]) > step:
                checkpoints.mark_superseded(path)
                self.accelerator.print(f"{path} is kept, but --resume_from_checkpoint no longer chooses it")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        # Old checkpoints are deleted only when the new one is complete, so that there is always one to resume from.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        save = partial(super()._save_checkpoint, model, trial)
        try:
            failure = self._attempt(lambda: self._write_checkpoint(save, folder))
        finally:
            self.args.save_total_limit = limit
        failed = torch.tensor([failure is not None], device=self.accelerator.device)
        if self.accelerator.gather(failed).any() and failure is None:
            failure = OSError("another process could not write its part")
        elif failure is None and self.args.should_save:
            failure = self._attempt(lambda: self._finish_checkpoint(folder, limit))
        self.checkpoint_failure = failure
        if failure is None:
            self._checkpoint_notice.succeeded()
        elif self.args.should_save:
            if not checkpoints.is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
            newest = checkpoints.newest_complete(folder.parent)
            self._checkpoint_notice.failed(
                f"{folder} could not be saved ({first_line(failure)}); training continues, and the next save tries "
                f"again; {'there is no checkpoint yet' if newest is None else f'{newest.name} is complete'}"
            )
        # An interrupted process ends after this; it must not do so while another process still writes.
        self.accelerator.wait_for_everyone()

    def _attempt(self, write: Callable[[], None]) -> Exception | None:
        """Write files; return the error if the file system failed. Raise it where other processes may already wait in
        a collective operation for this one: while sharded weights or the best checkpoint are saved."""
        try:
            write()
        except Exception as error:
            is_collective = self.is_fsdp_enabled or self.is_deepspeed_enabled or self.args.metric_for_best_model
            if not is_write_failure(error) or (is_collective and self.accelerator.num_processes > 1):
                raise
            return error
        return None

    def _write_checkpoint(self, save: Callable[[], None], folder: Path) -> None:
        if self.args.should_save:
            checkpoints.mark_incomplete(folder)
        save()
        torch.save(packed(self._state_dict()), state_file(folder, self.accelerator.process_index))
        if self.args.should_save or self._is_sharded:  # all processes are needed to gather weights
            common = {name: part.state_dict() for name, part in self._common_parts().items()}
        if self.args.should_save:
            torch.save(common, state_file(folder, "common"))

    def _finish_checkpoint(self, folder: Path, limit: int | None) -> None:
        checkpoints.mark_complete(folder)
        rotate_checkpoints(
            output_dir=str(folder.parent),
            save_total_limit=limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not checkpoints.is_complete(checkpoint_folder):  # transformers calls this before our state is written
            return
        self._report_failed_pushes()
        try:
            super()._push_from_checkpoint(checkpoint_folder)
        except OSError as error:  # it copies the model to the output folder first
            self._push_notice.failed(_push_failure(error))

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._report_failed_pushes()

    def _report_failed_pushes(self) -> None:
        """Print why the latest push failed. Pushes run in a thread, where transformers leaves their errors unread."""
        pushing = getattr(self, "push_in_progress", None)  # transformers sets it only with push_to_hub
        jobs = [] if pushing is None else [job for job in pushing.jobs if job.done()]
        errors = [error for job in jobs if (error := job.exception()) is not None]
        if errors:
            self._push_notice.failed(_push_failure(errors[0]))
        elif jobs:
            self._push_notice.succeeded()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        # If there is an adapter in a sub-folder (TRL's "ref"), transformers loads that one instead of the trained one.
        model = self.model if model is None else model
        if is_peft_model(model) and len(model.peft_config) > 1 and not self._is_sharded:
            model.load_adapter(resume_from_checkpoint, model.active_adapters[0], is_trainable=True)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if (damage := self._damage(best)) is None:
            return super()._load_best_model()
        self.accelerator.print(f"{best} cannot be loaded: {damage}; the model of the last step is kept")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._is_converted:
            self._finish_deepspeed(checkpoint)
        if checkpoint is not None and state_file(checkpoint, 0).is_file():  # checkpoints of plain TRL have none
            self._resumed = self._read_state(checkpoint)
            common = load_state(state_file(checkpoint, "common"), mmap=True)  # all processes read the same pages
            for name, part in self._common_parts().items():
                if name in common:
                    part.load_state_dict(common[name])
            self._load_state_dict(self._resumed)

    def _read_state(self, checkpoint: str) -> dict[str, Any]:
        """The state of this process in a checkpoint. If another number of processes wrote it, replay groups are
        redistributed, and rollouts are dropped."""
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        is_there = state_file(checkpoint, index).is_file()
        state = load_state(state_file(checkpoint, index if is_there else 0))
        wrote = state.get("processes", processes)
        if is_there and wrote == processes:
            return state
        shared = [name for name, part in self._parts().items() if hasattr(part, "share_out")]
        theirs: dict[str, list[Any]] = {name: [] for name in shared if name in state["parts"]}
        losses = []
        for number in range(wrote):
            other = load_state(state_file(checkpoint, number))
            losses.append(other["loss_since_log"])
            for name, states in theirs.items():
                states.append(other["parts"][name])
        for name, states in theirs.items():
            state["parts"][name] = self._parts()[name].share_out(states, index, processes)
        self.accelerator.print(
            f"{checkpoint} was written by {wrote} process{'es' * (wrote > 1)} and is resumed by {processes}: rollouts "
            "under way are dropped and sampled again"
        )
        return state | {
            "buffered_inputs": None,
            "micro_step": checkpoints.step_of(checkpoint) * self.args.gradient_accumulation_steps,
            "loss_since_log": torch.stack(losses).mean(0),  # the mean is what is logged
        }

    def _state_dict(self) -> dict[str, Any]:
        is_rollout_used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return {
            "processes": self.accelerator.num_processes,
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
            "micro_step": self._step,
            "buffered_inputs": None if is_rollout_used_up else self._buffered_inputs,
            "metrics": {mode: dict(metrics) for mode, metrics in self._metrics.items()},
            "loss_since_log": self._tr_loss,
            "last_logged_step": self._globalstep_last_logged,
        }

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])
        self._step = state["micro_step"]
        self._buffered_inputs = send_to_device(state["buffered_inputs"], self.accelerator.device)
        for mode, metrics in state["metrics"].items():
            self._metrics[mode].update(metrics)

    def _restore_counters(self) -> None:
        if self._resumed is None:
            return
        self._tr_loss.copy_(self._resumed["loss_since_log"])
        self._globalstep_last_logged = self._resumed["last_logged_step"]
        # The sampler draws one permutation per epoch from its own generator, which has been seeded again.
        sampler = self._train_sampler
        if sampler is not None and sampler.shuffle:
            for _ in range(self._epochs_done):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        self._resumed = None

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """The number of finished epochs, and of batches in the current epoch, before the resumed step."""
        done = super()._init_training_state(max_steps, steps_per_epoch, epochs, resume_from_checkpoint, trial)
        is_stream = self._train_sampler is None
        if resume_from_checkpoint is not None and is_stream and not self.args.ignore_data_skip:
            # transformers assumes that a stream lasts as long as the run; it may have ended and been read again.
            saved = checkpoints.state_of(resume_from_checkpoint)
            batches_per_epoch = saved["max_steps"] * self.args.gradient_accumulation_steps
            done = int(saved["epoch"]), round(saved["epoch"] % 1 * batches_per_epoch)
        self._epochs_done = done[0]
        return done


def _push_failure(error: BaseException) -> str:
    return (
        f"a push to the Hub failed ({first_line(error)}); training continues, everything is saved on this machine, "
        "and the next save pushes again"
    )


class _RestoreCounters(TrainerCallback):
    """Restores counters that transformers sets to zero after loading a checkpoint, just before on_train_begin."""

    def __init__(self, trainer: CheckpointLayer):
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._restore_counters()
