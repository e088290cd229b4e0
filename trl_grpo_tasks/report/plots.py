"""Line charts as inline SVG with axes, a legend and a tooltip on every point. Colours come from the page's style."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Collection, Mapping, Sequence

Points = Sequence[tuple[float, float]]
Scale = Callable[[float], float]

MOST_POINTS = 150  # per line; longer lines are averaged in segments
SMOOTHED_FROM = 30  # from this number of points on, a running mean is drawn over the raw line
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
    size: tuple[int, int] = (340, 200),
    joined: Collection[str] | None = None,
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
        size: Width and height.
        joined: Labels whose points are joined by a line; None means all.
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
    width, height = size
    left, right, top, bottom = 12 + 6.5 * max(len(_number(tick)) for tick in ticks), 10, 8, 34

    def x(step: float) -> float:
        first, last, at = (math.log2(s) if log2 else s for s in (steps[0], steps[-1], step))
        return left + (width - left - right) * ((at - first) / (last - first) if last > first else 0.5)

    def y(value: float) -> float:
        return top + (height - top - bottom) * (high - value) / (high - low)

    parts = []
    for tick in ticks:
        parts.append(f"<line class=grid x1={left:.1f} x2={width - right} y1={y(tick):.1f} y2={y(tick):.1f} />")
        parts.append(f"<text x={left - 6:.1f} y={y(tick) + 4:.1f} text-anchor=end>{_number(tick)}</text>")
    marks = steps if log2 else [t for t in nice_ticks(steps[0], steps[-1], 5) if steps[0] <= t <= steps[-1]] or steps
    for mark in marks:
        parts.append(f"<text x={x(mark):.1f} y={height - bottom + 16} text-anchor=middle>{_number(mark)}</text>")
    parts.append(
        f"<text x={(left + width - right) / 2:.1f} y={height - 3} text-anchor=middle>{html.escape(x_label)}</text>"
    )
    for place, label in enumerate(lines):
        band = bands.get(label, ())
        around = [*((at, high) for at, _, high in band), *((at, low) for at, low, _ in reversed(band))]
        if around:
            parts.append(f"<polygon class='band f{place % COLOURS}' points='{_path(around, x, y)}' />")
    for place, (label, points) in enumerate(lines.items()):
        tooltip = f"{label}, {x_label}" if len(lines) > 1 else x_label
        parts.append(_line(points, x, y, place % COLOURS, tooltip, joined is None or label in joined))
    legend = ""
    if len(lines) > 1:
        keys = (f"<span><i class=k{i % COLOURS}></i>{html.escape(label)}</span>" for i, label in enumerate(lines))
        legend = f"<div class=legend>{''.join(keys)}</div>"
    change = ""
    if len(lines) == 1 and joined is None:
        (points,) = lines.values()
        change = f"<span>{_number(points[0][1])} &rarr; {_number(points[-1][1])}</span>"
    metric = f"<code>{html.escape(name)}</code>" if name else ""
    return (
        f"<figure class=chart><figcaption><b>{html.escape(title)}</b>{change}{metric}</figcaption>"
        f"<svg viewBox='0 0 {width} {height}' role=img aria-label='{html.escape(title)}'>{''.join(parts)}</svg>"
        f"{legend}</figure>"
    )


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers whose range contains `low` and `high`."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _line(points: Points, x: Scale, y: Scale, colour: int, tooltip: str, joined: bool) -> str:
    smooth = joined and len(points) >= SMOOTHED_FROM
    drawn, size = [], 2 if joined else 4
    if joined:
        drawn.append(f"<polyline class='s{colour}{' raw' if smooth else ''}' points='{_path(points, x, y)}' />")
    if smooth:
        drawn.append(f"<polyline class=s{colour} points='{_path(_running_mean(points), x, y)}' />")
    for step, value in points:
        dot = f"<circle class='dot f{colour}' r={size} cx={x(step):.1f} cy={y(value):.1f} />" if not smooth else ""
        target = f"<circle class=hit r=7 cx={x(step):.1f} cy={y(value):.1f} />"
        drawn.append(f"<g>{dot}{target}<title>{html.escape(tooltip)} {_number(step)}: {_number(value)}</title></g>")
    return "".join(drawn)


def _path(points: Points, x: Scale, y: Scale) -> str:
    return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)


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
