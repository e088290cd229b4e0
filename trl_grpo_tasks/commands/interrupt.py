"""Ctrl-C and SIGTERM: the current step is finished and saved, so that the run can be resumed without loss.

Slurm and Kubernetes send SIGTERM before they kill a process. A run that was stopped ends with the exit status that
shells report for the signal: 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback

# Launchers pass a signal on to processes that may have received it already, from the terminal or from Slurm. With
# several processes, a second signal within this time counts as the same one.
SAME_SIGNAL_SECONDS = 5.0


class SignalError(KeyboardInterrupt):
    """A signal asked the run to end."""

    def __init__(self, number: int, message: str = "stopped"):
        super().__init__(message)
        self.number = number


class StoppedError(SignalError):
    """Training was interrupted in all processes, and everything up to `step` is in a checkpoint."""

    def __init__(self, step: int, number: int = signal.SIGINT):
        super().__init__(number, f"stopped after step {step}")
        self.step = step


def exit_status(interruption: KeyboardInterrupt) -> int:
    """The exit status of an interrupted run, as shells report it."""
    return 128 + (interruption.number if isinstance(interruption, SignalError) else signal.SIGINT)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """While open, SIGTERM raises a KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(number: int, _: Any) -> None:
        raise SignalError(number)

    with _handling(interrupt, signal.SIGTERM):
        yield


@contextmanager
def saved_when_interrupted(trainer: Any) -> Iterator[None]:
    """Around `trainer.train()`: the first Ctrl-C or SIGTERM, in any process, raises StoppedError in all of them once a
    checkpoint is written, or the error if it cannot be written. A second Ctrl-C raises KeyboardInterrupt at once."""
    callback = _SaveAndStop(trainer)
    trainer.add_callback(callback)
    try:
        with _handling(callback.ask, signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        trainer.remove_callback(callback)
    if callback.number:  # the signal came after the last step, so everything is saved
        raise SignalError(callback.number)


class _SaveAndStop(TrainerCallback):
    def __init__(self, trainer: Any):
        self._trainer, self._accelerator = trainer, trainer.accelerator
        self.number = 0  # of the signal that asked to stop
        self._asked_at = 0.0
        self._stopping = False

    def ask(self, number: int, _: Any) -> None:
        now = time.monotonic()
        is_new = self._accelerator.num_processes == 1 or now - self._asked_at > SAME_SIGNAL_SECONDS
        self._asked_at = now
        if self.number and number == signal.SIGINT and is_new:
            raise KeyboardInterrupt
        if not self.number and self._accelerator.is_main_process:
            tqdm.write("stopping after this step, which is saved first (Ctrl-C again stops at once)")
        self.number = self.number or number

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        asked = torch.tensor([self.number], device=self._accelerator.device)
        # The signal may reach processes at different times, or only one of them; all must save after the same step.
        self.number = int(self._accelerator.gather(asked).max())
        if self.number:
            control.should_save = self._stopping = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stopping and self._trainer.checkpoints.failure is not None:
            raise self._trainer.checkpoints.failure
        if self._stopping:
            raise StoppedError(state.global_step, self.number)


@contextmanager
def _handling(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """While open, `handler` takes these signals. Only the main thread may handle signals; elsewhere this does
    nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, its_handler in earlier.items():
            signal.signal(number, its_handler)
