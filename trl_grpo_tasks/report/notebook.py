"""Output of a notebook cell: completions as pictures, a reward curve while a run trains, the report of a run."""

from __future__ import annotations

import html
import io
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..task import Row, Task
from .page import REPORT_FILE
from .run_folder import RunFolder

# Title of a chart -> its lines: label and metric.
CHARTS = {
    "reward": {"reward": "reward"},
    "share of completions": {"success": "rewards/success/mean", "valid": "rewards/valid/mean"},
}


class RewardCurve(TrainerCallback):
    """Draws reward, success and validity by step below the notebook cell that trains, and redraws them at a log step,
    at most once in `every` seconds. A resumed run shows the steps before it, too."""

    def __init__(self, every: float = 5.0):
        self._every, self._next = every, 0.0
        self._display: Any = None

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and time.monotonic() >= self._next:
            self._draw(args.output_dir, state.max_steps)
            self._next = time.monotonic() + self._every

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._draw(args.output_dir, state.max_steps)

    def _draw(self, run_dir: str | Path, last_step: int) -> None:
        from IPython.display import Image, display

        picture = Image(data=draw_curves(run_dir, last_step))
        if self._display is None:
            self._display = display(picture, display_id=True)
        else:
            self._display.update(picture)


def draw_curves(run_dir: str | Path, last_step: int) -> bytes:
    """A PNG of the training curves of a run so far."""
    from matplotlib.figure import Figure

    lines = RunFolder.read(run_dir).metrics
    figure = Figure(figsize=(8, 2.6), dpi=80, layout="constrained")
    for axes, (title, metrics) in zip(figure.subplots(1, len(CHARTS)), CHARTS.items(), strict=True):
        for label, name in metrics.items():
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            axes.plot(*zip(*points, strict=True) if points else ([], []), marker=".", label=label)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.set_xlim(0, max(1, last_step))
        axes.grid(alpha=0.3)
        if len(metrics) > 1:
            axes.legend(fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def show(task: Task, row: Row, completion: str, width: int = 380) -> None:
    """Display a completion as the task draws it."""
    from IPython.display import HTML, Image, display

    picture = task.render(row, completion)
    display(Image(data=picture, width=width) if isinstance(picture, bytes) else HTML(picture))


def show_report(run_dir: str | Path, height: int = 600) -> Any:
    """The report of a run in a frame, to be the last expression of a notebook cell."""
    from IPython.display import HTML

    page = html.escape((Path(run_dir) / REPORT_FILE).read_text(encoding="utf-8"), quote=True)
    return HTML(f'<div><iframe srcdoc="{page}" style="width: 100%; height: {height}px; border: 0"></iframe></div>')
