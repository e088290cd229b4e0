"""Line charts as inline SVG with axes, a legend and a tooltip on every point. Colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .templating import render

Points = Sequence[tuple[float, float]]

MOST_POINTS = 150  # per line; longer lines are averaged in segments
SMOOTHED_FROM = 30  # from this number of points on, a running mean is drawn over the raw line
WIDTH, HEIGHT = 340, 200
COLOURS = 6  # CSS classes s0 to s5 of the style


def chart(
    title: str,
    lines: Mapping[str, Points],
    *,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    name: str = "",
    x_label: str = "step",
    limits: tuple[float, float] | None = None,
    log2: bool = False,
) -> str:
    """Return a figure with a line chart, or "" if there are no points.

    Args:
        title: The caption.
        lines: Label -> points (x, y).
        bands: Label -> (x, low, high), drawn as a shaded area behind the line of that label.
        name: The metric's name in the log files, shown below the title.
        x_label: Title of the horizontal axis.
        limits: Minimal range of the vertical axis; it is widened to contain all points.
        log2: Whether the horizontal axis is logarithmic, with a tick at every point.
    """
    lines = {label: _thinned(points) for label, points in lines.items() if points}
    if not lines:
        return ""
    steps = sorted({step for points in lines.values() for step, _ in points})
    bands = bands or {}
    values = [value for points in lines.values() for _, value in points]
    values += [end for band in bands.values() for _, *ends in band for end in ends]
    low, high = min([*values, *(limits or ())]), max([*values, *(limits or ())])
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - max(0.5, abs(low) / 10), high + max(0.5, abs(high) / 10)
    ticks = nice_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    left, right, top, bottom = 12 + 6.5 * max(len(_number(tick)) for tick in ticks), 10, 8, 34

    def x(step: float) -> float:
        first, last, at = (math.log2(s) if log2 else s for s in (steps[0], steps[-1], step))
        return round(left + (WIDTH - left - right) * ((at - first) / (last - first) if last > first else 0.5), 1)

    def y(value: float) -> float:
        return round(top + (HEIGHT - top - bottom) * (high - value) / (high - low), 1)

    def path(points: Points) -> str:
        return " ".join(f"{x(step)},{y(value)}" for step, value in points)

    drawn = []
    for label, points in lines.items():
        band = bands.get(label, ())
        around = [*((at, high) for at, _, high in band), *((at, low) for at, low, _ in reversed(band))]
        smooth = path(_running_mean(points)) if len(points) >= SMOOTHED_FROM else ""
        drawn.append({"label": label, "band": path(around), "points": points, "path": path(points), "smooth": smooth})
    marks = steps if log2 else [t for t in nice_ticks(steps[0], steps[-1], 5) if steps[0] <= t <= steps[-1]] or steps
    return render(
        "chart.html", title=title, name=name, x_label=x_label, width=WIDTH, height=HEIGHT, left=left, right=right,
        bottom=bottom, x=x, y=y, ticks=ticks, marks=marks, lines=drawn, colours=COLOURS, number=_number,
    )  # fmt: skip


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers whose range contains `low` and `high`."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _running_mean(points: Points) -> Points:
    reach = max(2, len(points) // 20)
    windows = [points[max(0, i - reach) : i + reach + 1] for i in range(len(points))]
    return [(step, sum(v for _, v in w) / len(w)) for (step, _), w in zip(points, windows, strict=True)]


def _thinned(points: Points) -> Points:
    """Average segments of consecutive points so that at most MOST_POINTS remain."""
    length = math.ceil(len(points) / MOST_POINTS)
    parts = [points[i : i + length] for i in range(0, len(points), length)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.3g}"
