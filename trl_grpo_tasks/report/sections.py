"""What the sections of the report show, from top to bottom: texts, numbers and charts for its template."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..task import Task
from .gallery import ROWS_SHOWN, Pictures, Sample, best_and_worst, choose, key_of, pairs, prompt_of, typical_samples
from .plots import chart
from .run_folder import RunFolder, duration, is_number, largest_k

EXTREMES_SHOWN = 4  # best samples, and as many worst samples
SHARES = ("success", "valid", "unscored", "cut_off")  # metrics between 0 and 1, shown as percentages
REWARDS = {"reward": "Reward", "rewards/success/mean": "Success", "rewards/valid/mean": "Valid"}
TRAINING = {
    "kl": "KL divergence from the reference",
    "entropy": "Entropy",
    "completions/clipped_ratio": "Share cut off at the length limit",
    "constraint/allowed_mass": "Probability mass of allowed tokens",
    "constraint/forced_fraction": "Share of forced tokens",
    "thought/tokens": "Tokens per thought",
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


def headline(run: RunFolder, task: Task, running_to: int | None) -> dict[str, Any]:
    """Return the state of the run with its CSS class, and facts about the task, the model and the training."""
    settings, model = run.settings, run.settings.get("model", {})
    steps = running_to or run.planned_steps
    of_steps = f" of {steps:,}" if steps else ""
    kind = ""
    if running_to is not None:
        kind, state = "going", f"running: step {run.last_step:,}{of_steps}"
    elif run.is_finished:
        kind, state = "done", f"finished: {run.last_step:,} steps"
    elif run.metrics:
        state = f"not finished: step {run.last_step:,}{of_steps}"
    else:
        state = "no step logged yet" if settings else "evaluation only"
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
    return {"state": state, "kind": kind, "facts": {name: fact for name, fact in facts.items() if fact}}


def tiles(run: RunFolder, task: Task) -> list[dict[str, Any]]:
    """Return the main results before and after training; those of training rollouts if nothing was evaluated."""
    before, after = run.before_and_after
    found = []
    if before is None and after is None:
        for name, label in REWARDS.items():
            if points := run.curve(name):
                values = [points[0][1], points[-1][1]] if len(points) > 1 else [points[0][1]]
                is_main = "success" in name
                found.append(_tile(f"{label.lower()} in training", values, is_main, is_share=name != "reward"))
        return found
    measured = [one["metrics"] for one in (before, after) if one is not None]
    main = ("success", "reward", *task.watched)  # the goal, the training signal, and independent measures
    for name in ("success", "valid", "reward", *task.watched, f"pass@{largest_k(measured[-1])}", "tokens"):
        values = [metrics[name] for metrics in measured if is_number(metrics.get(name))]
        if not values or (name == "valid" and set(values) == {1.0}):
            continue
        label = {"success": "success on held-out prompts", "tokens": "tokens per sample"}.get(name, name)
        label += ", not trained on" if name in task.watched else ""
        is_share = name in SHARES or "@" in name
        found.append(_tile(label, values, name in main, is_share=is_share, is_judged=name != "tokens"))
    return found


def sample_counts(run: RunFolder) -> str:
    """Return how many samples of how many prompts the evaluations have."""
    counts = {(len({prompt_of(s, 10**6) for s in one["samples"]}), len(one["samples"])) for one in run.evaluations}
    return "; ".join(f"{made:,} samples of {rows:,} prompts" for rows, made in sorted(counts))


def glossary(names: Sequence[str]) -> dict[str, str]:
    """Explain the metrics that the evaluation table shows."""
    shown = {re.sub(r"@\d+$", "@k", name) for name in names}
    terms = {name: meaning for name, meaning in GLOSSARY.items() if name in shown}
    if len(terms) < len(shown):
        terms["other rows"] = "components of the reward and further measures of the task"
    return terms


def best_of_k(run: RunFolder) -> list[str]:
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
    return [one for one in drawn if one]


def samples(run: RunFolder, pictures: Pictures) -> dict[str, Any]:
    """Return samples before and after training for the same prompts, then those with the highest and lowest rewards.

    If there is only one evaluation, typical samples are shown instead of pairs.
    """
    (before, after), latest = run.before_and_after, run.latest_evaluation
    if latest is None or not latest["samples"]:
        return {}
    found = [] if before is None or after is None else pairs(before, after)
    chosen = choose(found, ROWS_SHOWN)
    typical = [] if found else typical_samples(latest, ROWS_SHOWN)
    shown = {key_of(sample) for sample in [*typical, *(one for pair in chosen for one in (pair.before, pair.after))]}
    return {
        "before": before,
        "latest": latest,
        "counts": Counter(pair.verdict for pair in found),
        "pairs": [(pair, [shown_sample(sample, pictures) for sample in pair.different_samples]) for pair in chosen],
        "typical": [shown_sample(sample, pictures) for sample in typical],
        "extremes": {
            title: [shown_sample(sample, pictures) for sample in extremes]
            for title, extremes in zip(
                ("Highest rewards", "Lowest rewards"), best_and_worst(latest, EXTREMES_SHOWN, shown), strict=True
            )
            if extremes
        },
    }


def shown_sample(sample: Sample, pictures: Pictures) -> dict[str, Any]:
    """Return a sample as the template shows it, with its picture."""
    score: dict[str, Any] = sample["score"] or {}
    picture, success = pictures.of(sample), bool(score.get("success"))
    return {
        "picture": picture,
        "is_image": "<img " in picture,
        "success": success,
        "verdict": "success" if success else sample.get("reason") or "no success",
        "reward": score.get("total"),
        "prompt": prompt_of(sample),
    }


def curves(run: RunFolder) -> dict[str, Any]:
    """Return small charts of the logged metrics, and the values of those that are constant."""
    lengths = {label: points for label, name in LENGTHS.items() if (points := run.curve(name))}
    rewards, constant_rewards = metric_charts({"": run}, reward_titles([run]))
    others, constant_others = metric_charts({"": run}, TRAINING)
    if len(lengths.get("mean", ())) > 1:
        others.insert(min(2, len(others)), chart("Length in tokens", lengths, name=LENGTHS["mean"]))
    return {"rewards": rewards, "others": others, "constant": constant_rewards | constant_others}


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


def times(run: RunFolder) -> dict[str, Any]:
    """Return charts and a table of the timings: first, median, largest and last value."""
    names = [*TIMES, *sorted({n for line in run.performance for n in line if n.startswith("perf/")} - set(TIMES))]
    titles = {name: TIMES.get(name, name.removeprefix("perf/").replace("_", " ")) for name in names}
    logged = {title: [value for _, value in run.curve(name)] for name, title in titles.items()}
    return {
        "charts": metric_charts({"": run}, titles)[0],
        "table": {t: (v[0], statistics.median(v), max(v), v[-1]) for t, v in logged.items() if v},
    }


def _tile(
    label: str, values: Sequence[float], is_main: bool, *, is_share: bool, is_judged: bool = True
) -> dict[str, Any]:
    change = values[-1] - values[0] if is_judged else 0.0
    shown = [f"{100 * value:.1f}%" if is_share else f"{value:.3g}" for value in values]
    return {
        "label": label, "is_main": is_main, "earlier": shown[0] if len(values) > 1 else "", "value": shown[-1],
        "way": "up" if change > 0 else "down" if change < 0 else "",
    }  # fmt: skip


def metric_charts(runs: Mapping[str, RunFolder], titles: Mapping[str, str]) -> tuple[list[str], dict[str, float]]:
    """Return charts of the metrics in `titles` with a line per run, and the values of those that are constant."""
    drawn, constant = [], {}
    for name, title in titles.items():
        lines = {label: points for label, run in runs.items() if (points := run.curve(name))}
        values = [value for points in lines.values() for _, value in points]
        if len(set(values)) > 1:
            limits = (0.0, 1.0) if "success" in name or "valid" in name or "pass@" in name else None
            drawn.append(chart(title, lines, name=name, limits=limits))
        elif values:
            constant[name] = values[0]
    return drawn, constant
