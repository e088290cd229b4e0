"""Evaluation of a model on held-out rows: sampling, scoring and metrics.

It works with causal models, with or without a constraint, and with masked models. An interrupted evaluation can be
resumed, and several processes share the rows.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from tqdm.auto import tqdm

from ..constraints.base import Constraint
from ..constraints.filters import SamplingFilters
from ..constraints.sharding import is_sharded
from ..files import not_through_a_link, write_atomically
from ..rewards.environment import answering_with
from ..rewards.executor import Outcome, Pending, RewardExecutor
from ..rollout import NO_FILTERS, Editor
from ..task import EditorError, Row, Score, Task, check_editor, short_hash
from .sampler import PLAIN_BATCH, CompletionSampler
from .samples import Completion, Evaluation, Sample
from .summary import summarise

# Completions of a batch if no number is given. Samples are kept after each batch. The number does not depend on free
# memory or on the number of processes, because each batch has its own seed.
ROLLOUT_ROWS = {"cuda": 512, "cpu": 64}


def evaluate(
    name: str,
    model: Any,
    tokenizer: Any,
    task: Task,
    rows: Sequence[Row],
    *,
    executor: RewardExecutor,
    num_samples: int = 4,
    temperature: float = 1.0,
    filters: SamplingFilters = NO_FILTERS,
    max_completion_length: int = 256,
    batch_size: int | None = None,
    rollout_batch_size: int | None = None,
    constraint: Constraint | None = None,
    editor: str | None = None,
    seed: int = 0,
    kept: KeptSamples | None = None,
) -> Evaluation:
    """Sample `num_samples` completions per row, score them and compute metrics. The global random state is restored.

    Sampling follows `constraint` if one is given; `editor` is one of `task.editors` and may delete generated tokens.
    Samples that are already in `kept` are reused.

    A batch is what one process samples before its samples are scored and kept: `batch_size` completions, or a number
    that suits the device. Of a batch, at most `rollout_batch_size` completions are generated at a time; without it, as
    many as fit into free memory.

    With several processes, every process must call this with the same arguments: each samples its share of the
    batches, and all return the same samples. The seed of a batch depends on its position among all samples, so the
    number of processes does not change the samples.
    """
    check_editor(task, editor, constraint is not None)
    repeated = [row for row in rows for _ in range(num_samples)]
    processes = PartialState()
    # Only the main process reads what is kept: file systems of the processes may differ.
    found = [kept.read() if kept is not None and processes.is_main_process else ([], 0.0)]
    samples, seconds = broadcast_object_list(found)[0]
    start = time.monotonic() - seconds
    was_training = model.training
    model.eval()
    at_a_time = rollout_batch_size or batch_size
    sampler = CompletionSampler(model, tokenizer, temperature, max_completion_length, constraint, filters, at_a_time)
    sharded = is_sharded(model)
    rows_per_device = PLAIN_BATCH if sharded else ROLLOUT_ROWS.get(model.device.type, ROLLOUT_ROWS["cpu"])
    batch_size = batch_size or rows_per_device
    devices = [model.device] if model.device.type == "cuda" else []
    scoring: _Batch | None = None
    # With None, tqdm shows the bar only on a terminal, so that log files stay free of it.
    hidden = None if processes.is_main_process else True
    bar = tqdm(total=len(repeated), initial=len(samples), desc=name, unit="sample", leave=False, disable=hidden)
    per_round = batch_size * processes.num_processes  # one batch per process
    turns_scored = answering_with(executor, constraint)
    with torch.random.fork_rng(devices), torch.no_grad(), turns_scored, bar:
        for round_start in range(len(samples), len(repeated), per_round):
            first = round_start + processes.process_index * batch_size
            batch = repeated[first : first + batch_size]  # may be empty for some processes in the last round
            completions: list[Completion] = []
            counts: list[dict[str, int]] = []
            # Every forward pass of a sharded model needs all processes, so all sample the same number of rows.
            padding = repeated[:1] * (batch_size - len(batch)) if sharded else []
            if batch or padding:
                completions, counts = sample_batch(sampler, task, tokenizer, batch, padding, editor, seed, first)
            rows_as_json = [json.dumps(row, ensure_ascii=False) for row in batch]
            pending = executor.submit(rows_as_json, [one.text for one in completions])
            if scoring is not None:  # the previous batch was scored while this one was generated
                samples += scoring.finish(task, kept)
            scoring = _Batch(batch, completions, counts, pending, time.monotonic() - start)
            bar.update(min(per_round, len(repeated) - round_start))
        if scoring is not None:
            samples += scoring.finish(task, kept)
    model.train(was_training)
    add_group_components(task, executor.weights, samples, num_samples)
    metrics, intervals = summarise(samples, num_samples, task.facts)
    metrics["seconds"] = round(time.monotonic() - start, 2)
    return Evaluation(name, metrics, samples, intervals)


def sample_batch(
    sampler: Any,
    task: Task,
    tokenizer: Any,
    rows: Sequence[Row],
    padding: Sequence[Row],
    editor: str | None,
    seed: int | str,
    first: int,
) -> tuple[list[Completion], list[dict[str, int]]]:
    """Sample one completion per row; return the completions and the counters of the editor.

    The random numbers depend on the seed and on `first`, the position of the batch among all samples. Completions of
    `padding` are sampled too and dropped.
    """
    torch.manual_seed(random.Random(f"{seed}-{first}").getrandbits(63))
    edits = None if editor is None else _make_editor(editor, task, rows, tokenizer, sampler)
    completions = sampler.sample([*rows, *padding], edits)[: len(rows)]
    return completions, [{} if edits is None else edits.counts(i) for i in range(len(rows))]


def scored_samples(
    task: Task,
    rows: Sequence[Row],
    completions: Sequence[Completion],
    outcomes: Sequence[Outcome],
    counts: Sequence[dict[str, int]] | None = None,
) -> list[Sample]:
    """Combine completions with their outcomes from an executor."""
    samples = []
    for i, (row, (text, tokens, cut_off), outcome) in enumerate(zip(rows, completions, outcomes, strict=True)):
        score = None if outcome.score is None else outcome.score.as_dict()
        reason = outcome.reason if outcome.score is None else outcome.score.reason
        form, request = short_hash(task.canonical(row, text)), short_hash(task.request(row))
        edits = counts[i] if counts else {}
        samples.append(Sample(dict(row), text, tokens, score, reason, edits, form, request, cut_off))
    return samples


def add_group_components(
    task: Task, weights: Mapping[str, float], samples: Sequence[Sample], num_samples: int
) -> None:
    """Add the components that depend on all samples of a row, such as novelty, to samples that are ordered by row."""
    for first in range(0, len(samples) if task.defines("group_components") else 0, num_samples):
        group = samples[first : first + num_samples]
        scores = [None if one.score is None else Score(**one.score) for one in group]
        texts = [one.completion for one in group]
        for name, values in task.group_components([one.row for one in group], texts, scores).items():
            for one, value in zip(group, values, strict=True):
                if one.score is not None and value is not None:
                    one.score["components"][name] = value
                    one.score["total"] += weights[name] * value


class KeptSamples:
    """A .jsonl file with the samples of an unfinished evaluation, from which the evaluation resumes.

    Only the main process reads and writes it. Each line is a sample; the last line of a round of batches also holds
    the settings and the time spent so far. Samples made with other `settings` are discarded.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self._path = path
        self._settings = json.loads(json.dumps(settings))

    def read(self) -> tuple[list[Sample], float]:
        """Return the samples of complete rounds and the seconds they took; remove all other lines from the file."""
        samples: list[Sample] = []
        complete = (0, 0.0)
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines() if self._path.is_file() else []
        for line in lines:
            try:
                entry = json.loads(line)
                after = entry.pop("after", None)
                samples.append(Sample(**entry))
            except (ValueError, TypeError, AttributeError):
                break  # a line that was cut off when the evaluation was killed, or that another version wrote
            if after is not None:
                if after["settings"] != self._settings:
                    break
                complete = (len(samples), after["seconds"])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, "".join(f"{line}\n" for line in lines[: complete[0]]))
        return samples[: complete[0]], complete[1]

    def add(self, samples: Sequence[Sample], seconds: float) -> None:
        """Append the samples of a round."""
        entries = [asdict(sample) for sample in samples]
        entries[-1]["after"] = {"settings": self._settings, "seconds": seconds}
        with open(self._path, "a", encoding="utf-8", opener=not_through_a_link) as file:
            # ASCII output: a completion may contain lone surrogates, which UTF-8 cannot encode.
            file.write("".join(f"{json.dumps(entry)}\n" for entry in entries))


@dataclass
class _Batch:
    """A batch of completions that is being scored."""

    rows: Sequence[Row]
    completions: list[Completion]
    counts: list[dict[str, int]]
    pending: Pending
    seconds: float

    def finish(self, task: Task, kept: KeptSamples | None) -> list[Sample]:
        """Wait for the scores and return the samples of all processes in this round, in the order of the rows."""
        own = scored_samples(task, self.rows, self.completions, self.pending.result(), self.counts)
        samples = gather_object(own)
        if kept is not None and PartialState().is_main_process:
            kept.add(samples, self.seconds)
        return samples


def _make_editor(name: str, task: Task, rows: Sequence[Row], tokenizer: Any, sampler: Any) -> Editor:
    if sampler.no_editor_reason is not None:
        raise EditorError(
            f"--editor {name} deletes generated tokens, which only the fast rollout supports, and "
            f"{sampler.no_editor_reason}; leave --editor out"
        )
    return task.editor(name, rows, tokenizer)
