"""The sections of the report from top to bottom. Each function returns HTML, "" if the run has no data for it."""

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
from .run_folder import RunFolder, duration, is_number, largest_k, shown_metrics

EXTREMES_SHOWN = 4  # best samples, and as many worst samples
SHARES = ("success", "valid", "unscored", "cut_off")  # metrics between 0 and 1, shown as percentages
REWARDS = {"reward": "Reward", "rewards/success/mean": "Success", "rewards/valid/mean": "Valid"}
TRAINING = {
    "kl": "KL divergence from the reference",
    "entropy": "Entropy",
    "completions/clipped_ratio": "Share cut off at the length limit",
    "constraint/allowed_mass": "Probability mass of allowed tokens",
    "constraint/forced_fraction": "Share of forced tokens",
    "groups_without_signal": "Share of groups with zero advantages",
    "reward_std": "Standard deviation of rewards",
    "reward_failures": "Completions that could not be scored",
    "beta": "KL coefficient (beta)",
    "entropy_coef": "Entropy coefficient",
    "curriculum/level": "Curriculum level",
    "replay/replaced_groups": "Groups from the replay buffer",
    "grad_norm": "Gradient norm",
    "learning_rate": "Learning rate",
}
LENGTHS = {
    "mean": "completions/mean_length",
    "longest": "completions/max_length",
    "shortest": "completions/min_length",
}
TIMES = {
    "step_time": "Seconds per step",
    "perf/reward_seconds": "Seconds to score a completion",
    "perf/reward_cache_hit_rate": "Share of scores from the cache",
    "perf/vllm_mask_ms": "Milliseconds for the masks of a pass of vLLM",
    "perf/judge_cost": "Cost of the LLM judge so far",
    "perf/judge_requests": "Requests to the LLM judge so far",
}
# The metrics of the evaluation table, explained below it.
GLOSSARY = {
    "success": "share of samples that solve the task",
    "valid": "share of well-formed samples",
    "reward": "mean reward",
    "pass@k": "probability that at least one of k samples succeeds",
    "max@k": "expected reward of the best of k samples",
    "distinct_answers": "different valid answers per prompt, divided by its number of samples",
    "distinct_ngrams": "share of distinct word trigrams among the samples of a prompt",
    "unscored": "share of samples that could not be scored",
    "tokens": "mean length of a sample in tokens",
    "cut_off": "share of samples that reached the length limit before their end",
    "seconds": "duration of the evaluation",
}


def headline(run: RunFolder, task: Task, running_to: int | None) -> str:
    """Return the state of the run, the task and model, the training time, and tiles with the main results."""
    settings, model = run.settings, run.settings.get("model", {})
    steps = running_to or run.planned_steps
    of_steps = f" of {steps:,}" if steps else ""
    if running_to is not None:
        state = f"<span class='state going'>running: step {run.last_step:,}{of_steps}</span>"
    elif run.is_finished:
        state = f"<span class='state done'>finished: {run.last_step:,} steps</span>"
    elif run.metrics:
        state = f"<span class=state>not finished: step {run.last_step:,}{of_steps}</span>"
    else:
        state = f"<span class=state>{'no step logged yet' if settings else 'evaluation only'}</span>"
    facts = {
        "task": f"{task.name}, version {settings.get('task', {}).get('version', task.version)}",
        "model": model.get("name"),
        "trained weights": None if not model else "LoRA adapter" if model.get("use_peft") else "all",
        "parameters": f"{model['parameters']:,}" if is_number(model.get("parameters")) else None,
        "cold start": f"{n:,} supervised steps" if (n := settings.get("run", {}).get("cold_start_steps")) else None,
        "hardware": settings.get("machine"),
        "training time": duration(run.seconds) if run.seconds is not None else None,
        "final model": run.final_model,
        "sampling": "under the task's constraint" if settings.get("training", {}).get("constrain") else None,
    }
    listed = "".join(f"<li><span class=soft>{k}</span> {html.escape(str(v))}</li>" for k, v in facts.items() if v)
    version = settings.get("task", {}).get("version")
    stale = ""
    if version is not None and version != task.version:
        stale = (
            f"<p class=note>The samples were scored with version {html.escape(version)} of the task; the pictures are "
            f"drawn with version {task.version}.</p>"
        )
    return (
        f"<header>{state}<h1>{html.escape(task.name)}: {html.escape(task.description)}</h1>"
        f"<ul class=facts>{listed}</ul>{stale}{_tiles(run, task)}</header>"
    )


def evaluation_table(run: RunFolder) -> str:
    """Return a table of all metrics with one column per evaluation."""
    if not run.evaluations:
        return "<p class=note>There is no evaluation yet.</p>"
    names = shown_metrics([one["metrics"] for one in run.evaluations])
    head = "".join(f"<th>{html.escape(one['name'])}</th>" for one in run.evaluations)
    lines = []
    for name in names:
        cells = "".join(cell(one["metrics"].get(name), one.get("intervals", {}).get(name)) for one in run.evaluations)
        lines.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    counts = {(len({prompt_of(s, 10**6) for s in one["samples"]}), len(one["samples"])) for one in run.evaluations}
    size = "; ".join(f"{made:,} samples of {rows:,} prompts" for rows, made in sorted(counts))
    columns = f" Columns: {run.evaluation_names}." if run.evaluation_names else ""
    return (
        f"<p class=soft>{size}; none of these prompts was used for training. "
        f"Small print: 95% confidence intervals (bootstrap over prompts).{columns}</p>"
        f"<div class=scroll><table><tr><th></th>{head}</tr>{''.join(lines)}</table></div>"
    )


def glossary(run: RunFolder) -> str:
    """Explain the metrics that the evaluation table shows."""
    shown = {re.sub(r"@\d+$", "@k", name) for name in shown_metrics([one["metrics"] for one in run.evaluations])}
    terms = [f"<b>{name}</b>: {meaning}" for name, meaning in GLOSSARY.items() if name in shown]
    if any(name not in GLOSSARY for name in shown):
        terms.append("other rows: components of the reward and further measures of the task")
    return f"<p class=soft>{'; '.join(terms)}.</p>" if terms else ""


def best_of_k(run: RunFolder) -> str:
    """Return charts of pass@k and max@k of all evaluations, with their intervals."""
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
    return f"<div class=charts>{''.join(drawn)}</div>" if any(drawn) else ""


def samples(run: RunFolder, pictures: Pictures) -> str:
    """Return samples before and after training for the same prompts, then those with the highest and lowest rewards.

    If there is only one evaluation, typical samples are shown instead of pairs.
    """
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
            f"<h2>Before and after</h2><p>Of {len(found):,} held-out prompts, <b class=better>{counts['better']:,} "
            f"improved</b>, {counts['same']:,} did not change, and <b class=worse>{counts['worse']:,} got worse</b> "
            "(by success rate, then by mean reward over the samples of the prompt). The examples are not "
            "cherry-picked: improved, unchanged and worse prompts appear in proportion, but each kind at least once, "
            "and each prompt is shown with its median sample by reward. Click on a sample to enlarge it.</p>"
        )
        parts.append(_grid("pairs", [_pair(pair, names, pictures) for pair in chosen]))
    else:
        chosen_samples = typical_samples(latest, ROWS_SHOWN)
        shown = {key_of(sample) for sample in chosen_samples}
        parts.append(
            f"<h2>Samples: {html.escape(latest['name'])}</h2><p>For each prompt, the median sample by reward. "
            f"Click on a sample to enlarge it.</p>{sample_grid(chosen_samples, pictures)}"
        )
    titles = ("Highest rewards", "Lowest rewards")
    for title, extremes in zip(titles, best_and_worst(latest, EXTREMES_SHOWN, shown), strict=True):
        if extremes:
            parts.append(f"<h2>{title}: {html.escape(latest['name'])}</h2>{sample_grid(extremes, pictures)}")
    return f"<section>{''.join(parts)}</section>"


def sample_grid(shown: Sequence[Sample], pictures: Pictures) -> str:
    """Return the pictures of samples with their prompts and rewards."""
    return _grid("samples", [_sample(sample, pictures) for sample in shown])


def curves(run: RunFolder) -> str:
    """Return small charts of the logged metrics; constant metrics are listed in one line."""
    lengths = {label: points for label, name in LENGTHS.items() if (points := run.curve(name))}
    rewards, constant_rewards = _charts(run, reward_titles([run]))
    others, constant_others = _charts(run, TRAINING)
    if len(lengths.get("mean", ())) > 1:
        others.insert(min(2, len(others)), chart("Length in tokens", lengths, name=LENGTHS["mean"]))
    if not (rewards or others):
        return "<section><h2>Training</h2><p class=note>Fewer than two steps have been logged.</p></section>"
    constant = [*constant_rewards, *constant_others]
    listed = f"<p class=soft>Constant during training: {', '.join(constant)}.</p>" if constant else ""
    return (
        f"<section><h2>Rewards during training</h2><div class=charts>{''.join(rewards)}</div>"
        f"<h2>Other training metrics</h2><div class=charts>{''.join(others)}</div>{listed}</section>"
    )


def reward_titles(runs: Sequence[RunFolder]) -> dict[str, str]:
    """Return the logged metrics about rewards and successes that the runs have, with their titles."""
    logged = dict.fromkeys(name for run in runs for line in run.metrics for name in line)
    components = {
        name: name.split("/")[1].replace("_", " ").capitalize()
        for name in logged
        if name.startswith("rewards/") and name.endswith("/mean") and name not in REWARDS
    }
    k = largest_k(logged)
    best = {f"pass@{k}": f"At least one of {k} succeeds"} if k > 1 else {}
    for run in runs:
        training = run.settings.get("training", {})
        if training.get("best_by"):
            held_out = f"Held-out {training['best_by']}, which chooses the model"
            best[f"eval_{training['metric_for_best_model']}"] = held_out
    return {**REWARDS, **best, **components}


def times(run: RunFolder) -> str:
    """Return charts and a table of the timings, the training time, and what an LLM judge has cost."""
    names = [*TIMES, *sorted({n for line in run.performance for n in line if n.startswith("perf/")} - set(TIMES))]
    titles = {name: TIMES.get(name, name.removeprefix("perf/").replace("_", " ")) for name in names}
    lines = []
    for name, title in titles.items():
        if values := [value for _, value in run.curve(name)]:
            cells = (values[0], statistics.median(values), max(values), values[-1])
            lines.append(f"<tr><td>{html.escape(title)}</td>{''.join(f'<td>{v:.3g}</td>' for v in cells)}</tr>")
    if not lines:
        return ""
    head = "<tr><th></th><th>first</th><th>median</th><th>max</th><th>last</th></tr>"
    drawn, _ = _charts(run, titles)
    total = f"<p>Training took {duration(run.seconds)}.</p>" if run.is_finished and run.seconds is not None else ""
    if judge := run.judge.get("summary"):
        total += f"<p>{html.escape(str(judge))}.</p>"
    return (
        f"{total}<div class=charts>{''.join(drawn)}</div><div class=scroll><table>{head}{''.join(lines)}</table></div>"
    )


def reproduce(run: RunFolder) -> str:
    """Return the command of the run and the versions of the libraries."""
    command = run.settings.get("command")
    if not command:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in run.settings.get("versions", {}).items())
    listed = f"<p class=soft>{html.escape(versions)}</p>" if versions else ""
    return f"<pre class=block>{html.escape(command)}</pre>{listed}"


def cell(value: Any, interval: Any) -> str:
    """Return a cell of a table with a metric and its interval, if there is one."""
    if not is_number(value):
        return "<td>&ndash;</td>"
    return f"<td>{value:.3f}{f'<small>{interval[0]:.3f} to {interval[1]:.3f}</small>' if interval else ''}</td>"


def _tiles(run: RunFolder, task: Task) -> str:
    before, after = run.before_and_after
    if before is None and after is None:
        return _training_tiles(run)
    measured = [one["metrics"] for one in (before, after) if one is not None]
    main = ("success", "reward", *task.watched)  # the goal, the training signal, and independent measures
    names = ["success", "valid", "reward", *task.watched, f"pass@{largest_k(measured[-1])}", "tokens"]
    tiles = []
    for name in names:
        values = [metrics[name] for metrics in measured if is_number(metrics.get(name))]
        if not values or (name == "valid" and set(values) == {1.0}):
            continue
        label = {"success": "success on held-out prompts", "tokens": "tokens per sample"}.get(name, name)
        label += ", not trained on" if name in task.watched else ""
        is_share = name in SHARES or "@" in name
        tiles.append(_tile(label, values, is_share, judged=name != "tokens", main=name in main))
    return f"<div class=tiles>{''.join(tiles)}</div>"


def _training_tiles(run: RunFolder) -> str:
    tiles = []
    for name, label in REWARDS.items():
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
    """Return charts of the metrics in `names`, and "name value" for each that is constant."""
    drawn, constant = [], []
    for name, title in names.items():
        points = run.curve(name)
        values = {value for _, value in points}
        if len(points) > 1 and len(values) > 1:
            limits = (0.0, 1.0) if "success" in name or "valid" in name or "pass@" in name else None
            drawn.append(chart(title, {title: points}, name=name, limits=limits))
        elif points:
            constant.append(f"<code>{html.escape(name)}</code> {points[0][1]:.3g}")
    return drawn, constant


def _pair(pair: Pair, names: Sequence[str], pictures: Pictures) -> str:
    verdict = {"better": "improved", "worse": "worse", "same": "unchanged"}[pair.verdict]
    rates = f"success {pair.successes[0]:.0%} &rarr; {pair.successes[1]:.0%}, reward {pair.rewards[0]:.2f} &rarr; "
    head = (
        f"<header><b class={pair.verdict}>{verdict}</b> <span class=soft>{rates}{pair.rewards[1]:.2f}</span><br>"
        f"{html.escape(prompt_of(pair.before))}</header>"
    )
    if key_of(pair.before) == key_of(pair.after):
        sides = _sample(pair.after, pictures, f"{names[0]} and {names[1]} (identical): ")
        return f"<div class=pair>{head}<div class='sides one'>{sides}</div></div>"
    sides = "".join(_sample(s, pictures, f"{n}: ") for s, n in zip((pair.before, pair.after), names, strict=True))
    return f"<div class=pair>{head}<div class=sides>{sides}</div></div>"


def _grid(kind: str, figures: Sequence[str]) -> str:
    # On a phone, pictures are placed side by side, but text is not.
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
