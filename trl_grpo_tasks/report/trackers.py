"""Experiment trackers: default tracker, project name, and logging of completions, histograms and pictures."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..failures import first_line
from ..task import check_choice
from .gallery import Pictures, prompt_of

TRACKERS = ("trackio", "wandb", "tensorboard")
DEFAULT_PROJECT = "trl_grpo_tasks"
# The environment variables from which trackers other than trackio, or their callbacks, read the project name.
PROJECT_VARIABLES = (
    "WANDB_PROJECT", "COMET_PROJECT_NAME", "MLFLOW_EXPERIMENT_NAME", "CLEARML_PROJECT", "SWANLAB_PROJECT",
)  # fmt: skip
MOST_LINES = 32  # completions in the table of a logging step
MOST_PICTURES = 4  # per logging step
COLUMNS = ("step", "prompt", "completion", "reward", "success", "valid", "reason")
Captioned = tuple[Any, str]  # a PIL image and its caption


def default_tracker() -> str:
    """Return "trackio" if it is installed, else "none". trackio needs no account and writes to the local disk."""
    return "trackio" if importlib.util.find_spec("trackio") else "none"


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError if a tracker is unknown or not installed. Called before anything slow starts."""
    for name in names:
        check_choice("report_to", name, ("none", "all", *TRACKERS, *INTEGRATION_TO_CALLBACK))
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"--report_to {name}: the package is not installed; run pip install {name}, or pass --report_to none"
            )


def use_project(project: str) -> None:
    """Set the project for every tracker. Existing environment variables are kept unless the user chose a project."""
    for name in PROJECT_VARIABLES:
        if project != DEFAULT_PROJECT or name not in os.environ:
            os.environ[name] = project


class TrackedSamples(TrainerCallback):
    """Sends the latest completions and histograms of their rewards to every tracker of `--report_to` at each logging
    step.

    Pictures are drawn rarely enough to take at most 2% of the time.
    """

    def __init__(self, trainer: Any, say: Any = tqdm.write):
        self._trainer, self._say = trainer, say
        self._next_pictures = 0.0
        self._failed: set[str] = set()
        use_project(trainer.args.project)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TrackioCallback):  # it prints half a screen of its own messages
                for name in ("setup", "on_train_end"):
                    setattr(callback, name, self._without_output(getattr(callback, name)))
            if isinstance(callback, tuple(INTEGRATION_TO_CALLBACK.values())):
                self._survive(callback)

    def _without_output(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method so that what it prints to standard output is discarded, and of its warnings only the last is
        printed. If trackio's server does not answer, that one says where the data is and how to send it."""

        def quiet(*args: Any, **kwargs: Any) -> Any:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                result = method(*args, **kwargs)
            if caught:
                self._say(f"trackio: {str(caught[-1].message).removeprefix('* ')}")
            return result

        return quiet

    def _survive(self, callback: TrainerCallback) -> None:
        """Make training continue without this tracker once one of its calls has failed."""
        tracker = next(name for name, kind in INTEGRATION_TO_CALLBACK.items() if isinstance(callback, kind))

        def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if tracker in self._failed:
                    return None
                try:
                    return method(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - no error of a tracker may stop training
                    self._leave_out(tracker, error)
                    return None

            return call

        for name in ("on_log", "on_step_end", "on_evaluate", "on_save", "on_train_end"):
            setattr(callback, name, guarded(getattr(callback, name)))

    def _leave_out(self, tracker: str, error: Exception) -> None:
        self._failed.add(tracker)
        self._say(
            f"the tracker {tracker} failed ({type(error).__name__}: {first_line(error)}); training continues without "
            "it, and the metrics are in the output folder"
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and "trackio" in args.report_to:
            self._say(f"to watch the run: trackio show --project {args.project}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or "reward" not in (logs or {}) or self._next_pictures == math.inf:
            return
        try:
            samples = self._trainer.latest_samples()
            # With log_completions, TRL logs its own table under the same name.
            lines = [] if args.log_completions else [_line(state.global_step, *one) for one in samples[:MOST_LINES]]
            pictures = self._pictures(samples)
            for name in set(args.report_to) & set(TRACKERS) - self._failed:
                try:
                    _SEND[name](self._trainer, state.global_step, lines, pictures)
                except OSError as error:  # a full disk, or a server that does not answer: metrics would fail too
                    self._leave_out(name, error)
        except Exception as error:  # noqa: BLE001 - no error of a tracker may stop training
            self._say(
                f"samples could not be sent to the tracker ({type(error).__name__}: {error}); "
                "training continues without them"
            )
            self._next_pictures = math.inf

    def _pictures(self, samples: Sequence[tuple[dict, str, Any]]) -> list[Captioned]:
        """Draw the first completion of each of the first few prompts, if the task renders PNG and it is time to."""
        start = time.monotonic()
        if start < self._next_pictures or importlib.util.find_spec("PIL") is None:
            return []
        from PIL import Image

        first = {prompt_of({"row": row}, 10**6): (row, text) for row, text, _ in reversed(samples)}
        drawer, images = Pictures(self._trainer.task), []
        for prompt, (row, text) in list(reversed(first.items()))[:MOST_PICTURES]:
            drawn = drawer.drawn({"row": row, "completion": text})
            if isinstance(drawn, bytes):
                images.append((Image.open(io.BytesIO(drawn)).convert("RGB"), prompt[:200]))
        end = time.monotonic()
        self._next_pictures = end + 50 * (end - start)  # wait 50 times as long as drawing took
        return images


def _line(step: int, row: dict, text: str, outcome: Any) -> list[Any]:
    """Return a line of the table of completions; see COLUMNS."""
    score = outcome.score
    verdict = [None, None, None, outcome.reason]
    if score is not None:
        verdict = [score.total, score.success, score.valid, score.reason]
    return [step, prompt_of({"row": row}, 400), text, *verdict]


def _to_module(name: str, trainer: Any, step: int, lines: list[list[Any]], pictures: Sequence[Captioned]) -> None:
    """Send to wandb, or to trackio, which has the same functions."""
    import pandas

    api = importlib.import_module(name)
    table = pandas.DataFrame(lines, columns=[*COLUMNS], dtype=object)  # None stays None
    logged: dict[str, Any] = {"completions": api.Table(dataframe=table)} if lines else {}
    logged |= {f"samples/{n}": api.Image(image, caption=caption) for n, (image, caption) in enumerate(pictures, 1)}
    logged |= {f"histograms/{name}": api.Histogram(v) for name, v in trainer.rewarding.distributions().items()}
    api.log(logged | {"train/global_step": step})


def _to_tensorboard(trainer: Any, step: int, lines: list[list[Any]], pictures: Sequence[Captioned]) -> None:
    import numpy as np

    (writer,) = (c.tb_writer for c in trainer.callback_handler.callbacks if isinstance(c, TensorBoardCallback))
    for n, (image, _) in enumerate(pictures, 1):
        writer.add_image(f"samples/{n}", np.asarray(image), step, dataformats="HWC")
    for name, values in trainer.rewarding.distributions().items():
        writer.add_histogram(f"histograms/{name}", np.asarray(values), step)
    if lines:
        cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
        rows = [COLUMNS, ["---"] * len(COLUMNS), *cells]
        writer.add_text("completions", "\n".join(f"| {' | '.join(row)} |" for row in rows), step)


_SEND: dict[str, Callable[..., None]] = {
    "wandb": partial(_to_module, "wandb"), "trackio": partial(_to_module, "trackio"), "tensorboard": _to_tensorboard
}  # fmt: skip
