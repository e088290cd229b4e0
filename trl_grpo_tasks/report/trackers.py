"""What trackers get beside numbers: completions as a table, and pictures of a few of them."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..task import check_choice
from .gallery import Pictures, prompt_of

TRACKERS = ("trackio", "wandb", "tensorboard")
DEFAULT_PROJECT = "trl_grpo_tasks"
# Where trackers other than trackio look for --project, through transformers or themselves.
PROJECT_VARIABLES = (
    "WANDB_PROJECT", "COMET_PROJECT_NAME", "MLFLOW_EXPERIMENT_NAME", "CLEARML_PROJECT", "SWANLAB_PROJECT",
)  # fmt: skip
MOST_LINES = 32  # of the table of a log step
MOST_PICTURES = 4
COLUMNS = ("step", "prompt", "completion", "reward", "success", "valid", "reason")
Captioned = tuple[Any, str]  # an image of PIL, and what is said of it


def default_tracker() -> str:
    """trackio writes to this machine and asks nobody, so it is used wherever it is installed."""
    return "trackio" if importlib.util.find_spec("trackio") else "none"


def check_trackers(names: Sequence[str]) -> None:
    """ValueError for a tracker that is unknown or not installed, before anything slow starts."""
    for name in names:
        check_choice("report_to", name, ("none", "all", *TRACKERS, *INTEGRATION_TO_CALLBACK))
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise ValueError(f"--report_to {name}: it is not installed; pip install {name}, or give --report_to none")


def use_project(project: str) -> None:
    """Tell every tracker the project. What stands in the environment is kept unless the user chose another."""
    for name in PROJECT_VARIABLES:
        if project != DEFAULT_PROJECT or name not in os.environ:
            os.environ[name] = project


class TrackedSamples(TrainerCallback):
    """At a log step: the latest completions to every tracker of `--report_to`. Pictures never take more than a
    fiftieth of the time."""

    def __init__(self, trainer: Any, say: Any = tqdm.write):
        self._trainer, self._say = trainer, say
        self._next_pictures = 0.0
        use_project(trainer.args.project)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TrackioCallback):  # which has half a screen to say of itself
                for name in ("setup", "on_train_end"):
                    setattr(callback, name, _quietly(getattr(callback, name)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and "trackio" in args.report_to:
            self._say(f"to watch the run: trackio show --project {args.project}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or "reward" not in (logs or {}) or self._next_pictures == math.inf:
            return
        try:
            samples = self._trainer.latest_samples()
            # TRL has a table of its own, which stands in the same place.
            lines = [] if args.log_completions else [_line(state.global_step, *one) for one in samples[:MOST_LINES]]
            pictures = self._pictures(samples)
            for name in set(args.report_to) & set(TRACKERS):
                _SEND[name](self._trainer, state.global_step, lines, pictures)
        except Exception as error:  # noqa: BLE001 - whatever ails a tracker, training goes on
            self._say(f"samples could not be tracked ({type(error).__name__}: {error}); training goes on")
            self._next_pictures = math.inf

    def _pictures(self, samples: Sequence[tuple[dict, str, Any]]) -> list[Captioned]:
        """The first completion of each of the first few prompts, where the task draws PNG."""
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
        self._next_pictures = end + 50 * (end - start)
        return images


def _line(step: int, row: dict, text: str, outcome: Any) -> list[Any]:
    score = outcome.score
    judged = [None, None, None, outcome.reason]
    if score is not None:
        judged = [score.total, score.success, score.valid, score.reason]
    return [step, prompt_of({"row": row}, 400), text, *judged]


def _to_wandb(trainer: Any, step: int, lines: list[list[Any]], pictures: Sequence[Captioned]) -> None:
    import wandb

    logged: dict[str, Any] = {"completions": wandb.Table(columns=[*COLUMNS], data=lines)} if lines else {}
    logged |= {f"samples/{n}": wandb.Image(image, caption=said) for n, (image, said) in enumerate(pictures, 1)}
    wandb.log(logged | {"train/global_step": step})


def _to_trackio(trainer: Any, step: int, lines: list[list[Any]], pictures: Sequence[Captioned]) -> None:
    import pandas
    import trackio

    logged: dict[str, Any] = {
        f"samples/{n}": trackio.Image(i, caption=said) for n, (i, said) in enumerate(pictures, 1)
    }
    if lines:
        logged["completions"] = trackio.Table(dataframe=pandas.DataFrame(lines, columns=[*COLUMNS]))
    trackio.log(logged | {"train/global_step": step})


def _to_tensorboard(trainer: Any, step: int, lines: list[list[Any]], pictures: Sequence[Captioned]) -> None:
    import numpy as np

    (writer,) = (c.tb_writer for c in trainer.callback_handler.callbacks if isinstance(c, TensorBoardCallback))
    for n, (image, _) in enumerate(pictures, 1):
        writer.add_image(f"samples/{n}", np.asarray(image), step, dataformats="HWC")
    if lines:
        cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
        rows = [COLUMNS, ["---"] * len(COLUMNS), *cells]
        writer.add_text("completions", "\n".join(f"| {' | '.join(row)} |" for row in rows), step)


_SEND: dict[str, Callable[..., None]] = {"wandb": _to_wandb, "trackio": _to_trackio, "tensorboard": _to_tensorboard}


def _quietly(method: Callable[..., Any]) -> Callable[..., Any]:
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return method(*args, **kwargs)

    return quiet
