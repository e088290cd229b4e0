"""The parts of the page, from top to bottom. Each is empty where the run has nothing to show for it."""

from __future__ import annotations

import html
import re
import statistics
from collections.abc import Sequence
from typing import Any

from ..task import Task
from .gallery import (
    ROWS_SHOWN,
    Pair,
    Pictures,
    Sample,
    best_and_worst,
    choose,
    key_of,
    pairs,
    prompt_of,
    typical_samples,
)
from .plots import chart
from .run_folder import RunFolder, duration, is_number, shown_metrics

EXTREMES_SHOWN = 4  # best, and as many worst
SHARES = ("success", "valid", "unscored", "cut_off")  # metrics that are parts of one
LEARNED = {"reward": "Reward", "rewards/success/mean": "Success", "rewards/valid/mean": "Valid"}
TRAINING = {
    "kl": "KL divergence from the reference",
    "entropy": "Entropy",
    "completions/clipped_ratio": "Cut off at the longest length",
    "constraint/allowed_mass": "Probability of allowed tokens",
    "constraint/forced_fraction": "Tokens that were forced",
    "groups_without_signal": "Groups without signal",
    "reward_std": "Spread of rewards",
    "reward_failures": "Completions that could not be scored",
    "beta": "Beta",
    "curriculum/level": "Curriculum level",
    "replay/replaced_groups": "Groups from the replay",
    "grad_norm": "Norm of the gradient",
    "learning_rate": "Learning rate",
}
LENGTHS = {
    "mean": "completions/mean_length",
    "longest": "completions/max_length",
    "shortest": "completions/min_length",
}
TIMES = {"step_time": "Seconds a step", "perf/reward_seconds": "Seconds to score a completion",
         "perf/reward_cache_hit_rate": "Scores found in the cache"}  # fmt: skip


def headline(run: RunFolder, task: Task, running_to: int | None) -> str:
    """What was trained, on what, how long, and the numbers that matter."""
    settings, model = run.settings, run.settings.get("model", {})
    steps = running_to or settings.get("training", {}).get("max_steps")
    of_steps = f" of {steps:,}" if isinstance(steps, int) and steps > 0 else ""
    if running_to is not None:
        state = f"<span class='state going'>running: step {run.last_step:,}{of_steps}</span>"
    elif run.is_finished:
        state = f"<span class='state done'>finished: {run.last_step:,} steps</span>"
    elif run.metrics:
        state = f"<span class=state>not finished: step {run.last_step:,}{of_steps}</span>"
    else:
        state = "<span class=state>no step logged yet</span>" if settings else "<span class=state>evaluation</span>"
    facts = {
        "task": f"{task.name}, version {settings.get('task', {}).get('version', task.version)}",
        "model": model.get("name"),
        "weights": None if not model else "an adapter (LoRA)" if model.get("use_peft") else "all of them",
        "parameters": f"{model['parameters']:,}" if is_number(model.get("parameters")) else None,
        "cold start": f"{n:,} steps" if (n := settings.get("run", {}).get("cold_start_steps")) else None,
        "hardware": settings.get("machine"),
        "training": duration(run.seconds) if run.seconds is not None else None,
        "decoding": "under the task's constraint" if settings.get("training", {}).get("constrain") else None,
    }
    listed = "".join(f"<li><span class=soft>{k}</span> {html.escape(str(v))}</li>" for k, v in facts.items() if v)
    version = settings.get("task", {}).get("version")
    stale = ""
    if version is not None and version != task.version:
        stale = f"<p class=note>Scored by version {html.escape(version)} of the task; drawn by {task.version}.</p>"
    return (
        f"<header>{state}<h1>{html.escape(task.name)}: {html.escape(task.description)}</h1>"
        f"<ul class=facts>{listed}</ul>{stale}{_tiles(run, task)}</header>"
    )


def evaluation_table(run: RunFolder) -> str:
    if not run.evaluations:
        return "<p class=note>No evaluation so far.</p>"
    names = shown_metrics([one["metrics"] for one in run.evaluations])
    head = "".join(f"<th>{html.escape(one['name'])}</th>" for one in run.evaluations)
    lines = []
    for name in names:
        cells = "".join(_cell(one["metrics"].get(name), one.get("intervals", {}).get(name)) for one in run.evaluations)
        lines.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    counts = {(len({prompt_of(s, 10**6) for s in one["samples"]}), len(one["samples"])) for one in run.evaluations}
    size = "; ".join(f"{made:,} samples of {rows:,} prompts" for rows, made in sorted(counts))
    return (
        f"<p class=soft>{size}, none of them trained on; "
        "in small print 95% intervals, by bootstrap over rows.</p>"
        f"<div class=scroll><table><tr><th></th>{head}</tr>{''.join(lines)}</table></div>"
    )


def best_of_k(run: RunFolder) -> str:
    """pass@k and max@k of all evaluations, with their intervals."""
    drawn = []
    for kind, limits in (("pass", (0.0, 1.0)), ("max", None)):
        lines, bands = {}, {}
        for one in run.evaluations:
            found = ((re.fullmatch(rf"{kind}@(\d+)", name), name) for name in one["metrics"])
            curve = sorted((int(match[1]), name) for match, name in found if match and is_number(one["metrics"][name]))
            if len(curve) > 1:
                lines[one["name"]] = [(float(k), one["metrics"][name]) for k, name in curve]
                ends = one.get("intervals", {})
                bands[one["name"]] = [(float(k), *ends[name]) for k, name in curve if name in ends]
        drawn.append(chart(f"{kind}@k", lines, bands=bands, x_label="k", limits=limits, log2=True))
    if not any(drawn):
        return ""
    return (
        f"<div class=charts>{''.join(drawn)}</div><p class=soft>pass@k: how often at least one of k samples succeeds. "
        "max@k: the reward of the best of k. distinct_answers: different valid answers of a row, as a share of its "
        "samples. cut_off: samples that met the longest length.</p>"
    )


def samples(run: RunFolder, pictures: Pictures) -> str:
    """Before and after for the same rows, then the best and the worst; of one evaluation, typical ones."""
    before, after = run.before_and_after
    latest = after or before
    if latest is None or not latest["samples"]:
        return ""
    parts = []
    if before is not None and after is not None and (found := pairs(before, after)):
        chosen = choose(found, ROWS_SHOWN)
        shown = {key_of(sample) for pair in chosen for sample in (pair.before, pair.after)}
        counts = {kind: sum(pair.verdict == kind for pair in found) for kind in ("better", "same", "worse")}
        names = tuple(html.escape(one["name"]) for one in (before, after))
        parts.append(
            f"<h2>Before and after</h2><p>Of {len(found):,} held-out rows <b class=better>{counts['better']:,} got "
            f"better</b>, {counts['same']:,} stayed as they were, <b class=worse>{counts['worse']:,} got worse</b>, "
            "by success and then by reward. Shown are some of each, about as many as there are; of each row the "
            "sample in the middle by reward. Click to see one large.</p>"
        )
        parts.append(_grid("pairs", [_pair(pair, names, pictures) for pair in chosen]))
    else:
        chosen_samples = typical_samples(latest, ROWS_SHOWN)
        shown = {key_of(sample) for sample in chosen_samples}
        parts.append(
            f"<h2>Samples: {html.escape(latest['name'])}</h2><p>Of each row the sample in the middle by reward. "
            f"Click to see one large.</p>{_samples(chosen_samples, pictures)}"
        )
    for title, extremes in zip(("Best", "Worst"), best_and_worst(latest, EXTREMES_SHOWN, shown), strict=True):
        if extremes:
            parts.append(f"<h2>{title}: {html.escape(latest['name'])}</h2>{_samples(extremes, pictures)}")
    return f"<section>{''.join(parts)}</section>"


def curves(run: RunFolder) -> str:
    """Small charts of what was logged; what never changed is said in a line."""
    components = {
        name: name.split("/")[1].replace("_", " ").capitalize()
        for line in run.metrics
        for name in line
        if name.startswith("rewards/") and name.endswith("/mean") and name not in LEARNED
    }
    ks = [int(m[1]) for line in run.metrics for name in line if (m := re.fullmatch(r"pass@(\d+)", name))]
    learned = {**LEARNED, **({f"pass@{max(ks)}": f"Any of {max(ks)} succeeds"} if max(ks, default=1) > 1 else {})}
    lengths = {label: points for label, name in LENGTHS.items() if (points := run.curve(name))}
    first, first_flat = _charts(run, {**learned, **components})
    second, second_flat = _charts(run, TRAINING)
    if len(lengths.get("mean", ())) > 1:
        second.insert(min(2, len(second)), chart("Length in tokens", lengths, name=LENGTHS["mean"]))
    if not (first or second):
        return "<section><h2>Training</h2><p class=note>Fewer than two steps were logged so far.</p></section>"
    flat = [*first_flat, *second_flat]
    constant = f"<p class=soft>Never changed: {', '.join(flat)}.</p>" if flat else ""
    return (
        f"<section><h2>What it learned</h2><div class=charts>{''.join(first)}</div>"
        f"<h2>How training went</h2><div class=charts>{''.join(second)}</div>{constant}</section>"
    )


def times(run: RunFolder) -> str:
    names = [*TIMES, *sorted({n for line in run.performance for n in line if n.startswith("perf/")} - set(TIMES))]
    titles = {name: TIMES.get(name, name.removeprefix("perf/").replace("_", " ")) for name in names}
    lines = []
    for name, title in titles.items():
        if values := [value for _, value in run.curve(name)]:
            cells = (values[0], statistics.median(values), max(values), values[-1])
            lines.append(f"<tr><td>{html.escape(title)}</td>{''.join(f'<td>{v:.3g}</td>' for v in cells)}</tr>")
    if not lines:
        return ""
    head = "<tr><th></th><th>first</th><th>median</th><th>most</th><th>last</th></tr>"
    drawn, _ = _charts(run, titles)
    whole = f"<p>Training took {duration(run.seconds)}.</p>" if run.is_finished and run.seconds is not None else ""
    return (
        f"{whole}<div class=charts>{''.join(drawn)}</div><div class=scroll><table>{head}{''.join(lines)}</table></div>"
    )


def reproduce(run: RunFolder) -> str:
    command = run.settings.get("command")
    if not command:
        return ""
    versions = run.settings.get("versions", {})
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"<pre class=block>{html.escape(command)}</pre>" + (
        f"<p class=soft>{html.escape(told)}</p>" if told else ""
    )


def _cell(value: Any, interval: Any) -> str:
    if not is_number(value):
        return "<td>&ndash;</td>"
    return f"<td>{value:.3f}{f'<small>{interval[0]:.3f} to {interval[1]:.3f}</small>' if interval else ''}</td>"


def _tiles(run: RunFolder, task: Task) -> str:
    before, after = run.before_and_after
    if before is None and after is None:
        return _training_tiles(run)
    measured = [one["metrics"] for one in (before, after) if one is not None]
    best_of = [n for n in measured[-1] if re.fullmatch(r"pass@\d+", n)]
    main = ("success", "reward", *task.watched)  # what is wanted, what is trained, and what should rise with it
    names = ["success", "valid", "reward", *task.watched, *best_of[-1:], "tokens"]
    tiles = []
    for name in names:
        values = [metrics[name] for metrics in measured if is_number(metrics.get(name))]
        if not values or (name == "valid" and set(values) == {1.0}):
            continue
        label = {"success": "success on held-out rows", "tokens": "tokens a sample"}.get(name, name)
        label += ", not trained on" if name in task.watched else ""
        is_share = name in SHARES or "@" in name
        tiles.append(_tile(label, values, is_share, judged=name != "tokens", main=name in main))
    return f"<div class=tiles>{''.join(tiles)}</div>"


def _training_tiles(run: RunFolder) -> str:
    tiles = []
    for name, label in LEARNED.items():
        if points := run.curve(name):
            values = [points[0][1], points[-1][1]] if len(points) > 1 else [points[0][1]]
            tiles.append(_tile(f"{label.lower()} in training", values, name != "reward", True, "success" in name))
    return f"<div class=tiles>{''.join(tiles)}</div>" if tiles else ""


def _tile(label: str, values: Sequence[float], share: bool, judged: bool, main: bool) -> str:
    shown = [f"{100 * v:.1f}%" if share else f"{v:.3g}" for v in values]
    way = ""
    if judged and len(values) > 1 and values[0] != values[-1]:
        way = " class=up" if values[-1] > values[0] else " class=down"
    earlier = f"<span class=soft>{shown[0]} &rarr; </span>" if len(values) > 1 else ""
    kind = "tile main" if main else "tile"
    return f"<div class='{kind}'><small>{html.escape(label)}</small><b{way}>{earlier}{shown[-1]}</b></div>"


def _charts(run: RunFolder, names: dict[str, str]) -> tuple[list[str], list[str]]:
    """Charts of metrics, and 'name value' for each that never changed."""
    drawn, flat = [], []
    for name, title in names.items():
        points = run.curve(name)
        values = {value for _, value in points}
        if len(points) > 1 and len(values) > 1:
            limits = (0.0, 1.0) if "success" in name or "valid" in name or "pass@" in name else None
            drawn.append(chart(title, {title: points}, name=name, limits=limits))
        elif points:
            flat.append(f"<code>{html.escape(name)}</code> {points[0][1]:.3g}")
    return drawn, flat


def _pair(pair: Pair, names: Sequence[str], pictures: Pictures) -> str:
    said = {"better": "better", "worse": "worse", "same": "as before"}[pair.verdict]
    rates = f"success {pair.successes[0]:.0%} &rarr; {pair.successes[1]:.0%}, reward {pair.rewards[0]:.2f} &rarr; "
    head = (
        f"<header><b class={pair.verdict}>{said}</b> <span class=soft>{rates}{pair.rewards[1]:.2f}</span><br>"
        f"{html.escape(prompt_of(pair.before))}</header>"
    )
    if key_of(pair.before) == key_of(pair.after):
        sides = _sample(pair.after, pictures, f"{names[0]} and {names[1]}, the same: ")
        return f"<div class=pair>{head}<div class='sides one'>{sides}</div></div>"
    sides = "".join(_sample(s, pictures, f"{n}: ") for s, n in zip((pair.before, pair.after), names, strict=True))
    return f"<div class=pair>{head}<div class=sides>{sides}</div></div>"


def _samples(shown: Sequence[Sample], pictures: Pictures) -> str:
    return _grid("samples", [_sample(sample, pictures) for sample in shown])


def _grid(kind: str, figures: Sequence[str]) -> str:
    # Pictures stand side by side on a phone too; text does not.
    text = "" if any("<img " in figure for figure in figures) else " text"
    return f"<div class='{kind}{text}'>{''.join(figures)}</div>"


def _sample(sample: Sample, pictures: Pictures, prefix: str = "") -> str:
    score: dict[str, Any] = sample["score"] or {}
    success = bool(score.get("success"))
    verdict = "success" if success else html.escape(sample.get("reason") or "no success")
    reward = f"<span class=soft>reward {score['total']:.2f}</span>" if is_number(score.get("total")) else ""
    prompt = "" if prefix else f"<div>{html.escape(prompt_of(sample))}</div>"
    caption = f"<span class=why><b>{prefix}</b>{verdict}</span> {reward}"
    return (
        f"<figure class='sample {'good' if success else 'bad'}' tabindex=0 role=button>"
        f"<div class=picture>{pictures.of(sample)}</div><figcaption>{prompt}{caption}</figcaption></figure>"
    )
