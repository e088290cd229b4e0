"""Ctrl-C: the step under way is finished and saved, and the run can go on from there as if nothing had happened."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback


class StoppedError(KeyboardInterrupt):
    """Training was interrupted, and everything up to `step` is in a checkpoint."""

    def __init__(self, step: int):
        super().__init__(f"stopped after step {step}")
        self.step = step


@contextmanager
def saved_when_interrupted(trainer: Any) -> Iterator[None]:
    """Around `trainer.train()`: the first Ctrl-C raises StoppedError once a checkpoint is written, a second one
    KeyboardInterrupt at once."""
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    callback = _SaveAndStop(trainer)
    trainer.add_callback(callback)
    earlier = signal.signal(signal.SIGINT, callback.ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)
        trainer.remove_callback(callback)


class _SaveAndStop(TrainerCallback):
    def __init__(self, trainer: Any):
        self._accelerator = trainer.accelerator
        self._asked = self._stopping = False

    def ask(self, *_: Any) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        if self._accelerator.is_main_process:
            tqdm.write("stopping: this step is finished and saved first (Ctrl-C again stops at once)")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        asked = torch.tensor([self._asked], device=self._accelerator.device)
        # The signal reaches processes at different moments; they must all save after the same step.
        if self._accelerator.gather(asked).any():
            control.should_save = self._stopping = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stopping:
            raise StoppedError(state.global_step)
