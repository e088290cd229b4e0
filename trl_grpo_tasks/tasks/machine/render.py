"""Pictures of simulated machines: a PNG with the path, and an animated GIF. Needs Pillow only.

from trl_grpo_tasks.tasks.machine import simulate
from trl_grpo_tasks.tasks.machine.render import animation

Path("car.gif").write_bytes(animation(simulate(text, "car", record=True, to_the_end=True), "car"))
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .painter import SKY, Camera, Image, ImageDraw, paint
from .results import Result
from .trials import Trial, get_trial

INK, WARNING = (40, 44, 52), (170, 40, 30)
_SIZE, _FILM_SIZE = (560, 350), (400, 250)
_LINES_SHOWN = 8


def picture(result: Result | None, trial: Trial | str | None, lines: Sequence[str]) -> bytes:
    """Return a PNG: a close view of the machine at the start above a view of its, or its boulder's, whole path.

    `lines` are written on it. Without a recorded run the picture contains only the lines.
    """
    if result is None or not result.valid or result.frames is None or trial is None:
        image = Image.new("RGB", _SIZE, SKY)
        _write(image, ["no machine", *lines], WARNING)
        return _png(image)
    paths = _paths(result, get_trial(trial))
    close = paint(_close_camera(result, 0), result.frames, 0)
    far = paint(_far_camera(paths), result.frames, len(result.times) - 1, paths)
    image = Image.new("RGB", (_SIZE[0], 2 * _SIZE[1]))
    image.paste(close, (0, 0))
    image.paste(far, (0, _SIZE[1]))
    ImageDraw.Draw(image).line((0, _SIZE[1], _SIZE[0], _SIZE[1]), "white", 4)  # separates the two views
    _write(image, [line for line in lines if line], INK)
    return _png(image)


def animation(result: Result, trial: Trial | str, *, frames_per_second: int = 10, caption: str = "") -> bytes:
    """Return an animated GIF of a recorded run. The camera follows a car; a throw is shown as a whole."""
    if result.frames is None or not result.valid:
        raise ValueError("an animation needs a valid run made with record=True")
    trial = get_trial(trial)
    paths = _paths(result, trial)
    wanted = np.arange(0, result.times[-1] + 1e-9, 1 / frames_per_second)
    moments = np.searchsorted(result.times, wanted).clip(max=len(result.times) - 1)
    images = []
    for moment in moments.tolist():
        # A fast car moves more than a metre between frames, so a fine grid would seem to stand still or move back.
        camera = _far_camera(paths) if trial.throws else _close_camera(result, moment, span=14.0, grid=5.0)
        camera = replace(camera, size=_FILM_SIZE)
        image = paint(camera, result.frames, moment, [path[: moment + 1] for path in paths if moment])
        _write(image, [f"{caption}  {result.times[moment]:.1f} s".strip()], INK)
        images.append(image.quantize(48, method=Image.Quantize.FASTOCTREE))
    stream = io.BytesIO()
    images[0].save(
        stream, "GIF", save_all=True, append_images=images[1:], duration=round(1000 / frames_per_second), loop=0
    )
    return stream.getvalue()


def _paths(result: Result, trial: Trial) -> list[np.ndarray]:
    return list(result.boulder_paths) if trial.throws and result.boulder_paths else [result.path]


def _close_camera(result: Result, moment: int, span: float | None = None, grid: float = 1.0) -> Camera:
    frames = result.frames
    named = [frames.model.geom(n).name for n in range(frames.model.ngeom)]
    start = frames.positions[0][[name.startswith("g") and name != "ground" for name in named]]
    low, high = start.min(axis=0), start.max(axis=0)
    moved = result.path[moment] - result.path[0]
    centre = (low + high) / 2 + [moved[0], moved[1], 0.0]
    return Camera(centre, span or 6.0 + float((high - low).max()) * 1.2, _SIZE, grid)


def _far_camera(paths: Sequence[np.ndarray]) -> Camera:
    points = np.concatenate(paths)
    low, high = points.min(axis=0), points.max(axis=0)
    span = 12.0 + 1.3 * float((high - low).max())
    return Camera((low + high) / 2, span, _SIZE, 1.0 if span < 25 else 5.0)


def _write(image: Any, lines: Sequence[str], colour: tuple[int, int, int]) -> None:
    draw = ImageDraw.Draw(image)
    plain = [line.encode("ascii", "replace").decode() for line in lines]
    wrapped = [part for line in plain for part in textwrap.wrap(line[:400], 95)]
    for n, line in enumerate(wrapped[:_LINES_SHOWN]):
        draw.text((12, 10 + 16 * n), line, fill=colour)


def _png(image: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
