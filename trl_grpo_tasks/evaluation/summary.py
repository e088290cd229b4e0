"""Metrics of evaluation samples (means, pass@k, max@k, diversity) with bootstrap intervals, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..report.run_folder import shown_metrics
from ..training.advantages import doublings, expected_best
from .samples import Evaluation, Sample, request_numbers

FLAGS = ("success", "valid")
NGRAM = 3  # words
RESAMPLES = 2000
CONFIDENCE = 0.95


def summarise(
    samples: Sequence[Sample], num_samples: int, facts: Sequence[str] = ()
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Compute metrics and their 95% intervals from samples ordered by row, `num_samples` of each row.

    - Means leave out samples that could not be scored. `facts` are keys of the scores' info that are averaged too.
    - `success/LEVEL` is added for each level if the rows are of several levels.
    - pass@k and max@k are unbiased estimates, for k = 1, 2, 4, ... and `num_samples`.
    - `distinct_answers` is the number of different valid answers to a row divided by its number of samples.
    - `distinct_ngrams` is the share of distinct word trigrams among all word trigrams of a row.
    - Intervals come from a bootstrap over requests, because samples of the same request are not independent.
    """
    rows_P = [samples[first : first + num_samples] for first in range(0, len(samples), num_samples)]
    measured = _measured(rows_P, facts, doublings(num_samples))
    sums_M_P, counts_M_P = np.array([list(zip(*rows, strict=True)) for rows in measured.values()]).transpose(1, 0, 2)
    metrics = dict(zip(measured, _ratio(sums_M_P.sum(1), counts_M_P.sum(1)).tolist(), strict=True))
    intervals = dict(zip(measured, _intervals(sums_M_P, counts_M_P, request_numbers(rows_P)), strict=True))
    for name in samples[0].counts:
        metrics[f"{name}_median"] = float(statistics.median(sample.counts[name] for sample in samples))
    return metrics, intervals


def change(before: Evaluation, after: Evaluation, flag: str, num_samples: int) -> list[float]:
    """Return the 95% interval of the change of `success` or `valid` between two evaluations of the same rows."""
    rows_P = [before.samples[first : first + num_samples] for first in range(0, len(before.samples), num_samples)]
    changes_N = [
        None if one.score is None or other.score is None else float(other.score[flag]) - float(one.score[flag])
        for one, other in zip(before.samples, after.samples, strict=True)
    ]
    per_row_P = [_sum_and_count(changes_N[i : i + num_samples]) for i in range(0, len(changes_N), num_samples)]
    sums_P, counts_P = np.array(per_row_P).T
    return _intervals(sums_P[None], counts_P[None], request_numbers(rows_P))[0]


def table(evaluations: Sequence[Evaluation], markdown: bool = False) -> str:
    """Format the metrics of several evaluations as a table with one column each, with intervals where known."""
    names = shown_metrics([evaluation.metrics for evaluation in evaluations])
    first_column = ["", *names]
    columns = [[evaluation.name, *(_cell(evaluation, name) for name in names)] for evaluation in evaluations]
    widths = [max(map(len, column)) for column in columns]
    left = max(map(len, first_column))
    lines = []
    for first, *cells in zip(first_column, *columns, strict=True):
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("| " + " | ".join([first.ljust(left), *padded]) + " |" if markdown else
                     "  ".join([first.ljust(left), *padded]))  # fmt: skip
    if markdown:
        lines.insert(1, "|---" + "|---:" * len(columns) + "|")
    return "\n".join(lines)


def _measured(
    rows_P: Sequence[Sequence[Sample]], facts: Sequence[str], ks: Sequence[int]
) -> dict[str, list[tuple[float, int]]]:
    """Return the sum and the count of each metric in each row."""
    scores_P = [[sample.score for sample in row if sample.score is not None] for row in rows_P]
    measured = {name: [_sum_and_count(score[name] for score in scores) for scores in scores_P] for name in FLAGS}
    for fact in facts:
        measured[fact] = [_sum_and_count(score["info"].get(fact) for score in scores) for scores in scores_P]
    levels_P = [row[0].row.get("level") for row in rows_P]
    for level in dict.fromkeys(levels_P) if len(set(levels_P)) > 1 else ():
        measured[f"success/{level}"] = [
            value if row_level == level else (0.0, 0)
            for value, row_level in zip(measured["success"], levels_P, strict=True)
        ]
    measured["reward"] = [_sum_and_count(score["total"] for score in scores) for scores in scores_P]
    for part in sorted({part for scores in scores_P for score in scores for part in score["components"]}):
        measured[part] = [_sum_and_count(score["components"].get(part) for score in scores) for scores in scores_P]
    for name, key in (("pass", "success"), ("max", "total")):
        values_P = [torch.tensor([float(score[key]) for score in scores]) for scores in scores_P]
        for k in ks:
            measured[f"{name}@{k}"] = [
                (expected_best(values, k).item(), 1) if len(values) >= k else (0.0, 0) for values in values_P
            ]
    measured["distinct_answers"] = [(_distinct_answers(row), len(row)) for row in rows_P]
    measured["distinct_ngrams"] = [_distinct_ngrams(row) for row in rows_P]
    measured["unscored"] = [_sum_and_count(sample.score is None for sample in row) for row in rows_P]
    measured["tokens"] = [_sum_and_count(sample.tokens for sample in row) for row in rows_P]
    measured["cut_off"] = [_sum_and_count(sample.cut_off for sample in row) for row in rows_P]
    for name in rows_P[0][0].counts:
        measured[name] = [_sum_and_count(sample.counts[name] for sample in row) for row in rows_P]
    return measured


def _cell(evaluation: Evaluation, name: str) -> str:
    value, interval = evaluation.metrics.get(name), evaluation.intervals.get(name)
    if value is None or value != value:
        return "-"
    return f"{value:.3f}" if interval is None else f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


def _sum_and_count(values: Iterable[Any]) -> tuple[float, int]:
    known = [float(value) for value in values if value is not None]
    return sum(known), len(known)


def _distinct_answers(row: Sequence[Sample]) -> int:
    return len({sample.form or sample.completion for sample in row if sample.score and sample.score["valid"]})


def _distinct_ngrams(row: Sequence[Sample]) -> tuple[int, int]:
    found = []
    for words in (sample.completion.split() for sample in row):
        # A text shorter than an n-gram counts as one n-gram, so that repeating a single word counts as repetition.
        found += [tuple(words[i : i + NGRAM]) for i in range(max(1, len(words) - NGRAM + 1))]
    return len(set(found)), len(found)


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _intervals(sums_M_P: np.ndarray, counts_M_P: np.ndarray, requests_P: Sequence[int]) -> list[list[float]]:
    """Percentile bootstrap over requests, or over rows if all are one request. All metrics, and all models with
    equally many requests, share the resamples."""
    units_P = requests_P if max(requests_P) > 0 else range(len(requests_P))
    units = max(units_P) + 1
    is_of_P_Q = np.eye(units)[list(units_P)]
    weights_R_Q = np.random.default_rng(0).multinomial(units, np.full(units, 1 / units), size=RESAMPLES).astype(float)
    values_R_M = _ratio(weights_R_Q @ (sums_M_P @ is_of_P_Q).T, weights_R_Q @ (counts_M_P @ is_of_P_Q).T)
    ends = []
    for values in values_R_M.T:
        known = values[~np.isnan(values)]
        tails = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
        ends.append(np.quantile(known, tails).tolist() if len(known) else [float("nan")] * 2)
    return ends
