"""Evaluation on held-out rows: sample, score, add up. Works on any causal language model, with or without a
constraint, and on masked ones; resumes where it was stopped; several processes share the rows."""

from __future__ import annotations

import hashlib
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
from ..files import write_atomically
from ..rewards.executor import Outcome, Pending, RewardExecutor
from ..rewards.judge import FrozenJudge, frozen_of
from ..rollout import NO_FILTERS, Editor
from ..task import EditorError, Row, Task, check_editor
from .sampler import Writer
from .samples import Evaluation, Sample
from .summary import summarise


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
    batch_size: int = 64,
    constraint: Constraint | None = None,
    editor: str | None = None,
    seed: int = 0,
    kept: KeptSamples | None = None,
) -> Evaluation:
    """Sample `num_samples` completions of each row and score them. The random state outside is left as it was.

    Sampling follows `constraint` if one is given; `editor` is one of `task.editors` and may delete generated tokens.
    What is in `kept` already is not sampled again.

    With several processes, every process must call this with the same arguments: each samples its share of the
    batches, and all return the same samples. The seed of a batch depends on the rows in it, so the number of processes
    does not change what is sampled.
    """
    check_editor(task, editor, constraint is not None)
    repeated = [row for row in rows for _ in range(num_samples)]
    processes = PartialState()
    samples, seconds = _read_on_main(kept, processes)
    start = time.monotonic() - seconds
    was_training = model.training
    model.eval()
    writer = Writer(model, tokenizer, temperature, max_completion_length, constraint, filters)
    devices = [model.device] if model.device.type == "cuda" else []
    judges = frozen_of(task.judges())
    scoring: _Batch | None = None
    # Only where somebody watches: a file of logs wants no bar.
    hidden = None if processes.is_main_process else True
    bar = tqdm(total=len(repeated), initial=len(samples), desc=name, unit="sample", leave=False, disable=hidden)
    in_a_round = batch_size * processes.num_processes  # one batch per process
    with torch.random.fork_rng(devices), torch.no_grad(), bar:
        for round_start in range(len(samples), len(repeated), in_a_round):
            first = round_start + processes.process_index * batch_size
            batch = repeated[first : first + batch_size]  # in the last round, some processes may have none
            written: list[tuple[str, int]] = []
            counts: list[dict[str, int]] = []
            if batch:
                torch.manual_seed(random.Random(f"{seed}-{first}").getrandbits(63))
                edits = None if editor is None else _make_editor(editor, task, batch, tokenizer, writer)
                written = writer.write(batch, edits)
                counts = [{} if edits is None else edits.counts(i) for i in range(len(batch))]
            pending = executor.submit([json.dumps(row, ensure_ascii=False) for row in batch], [t for t, _ in written])
            if scoring is not None:  # its scores were computed while this batch was written
                samples += scoring.finish(task, judges, kept)
            scoring = _Batch(batch, written, counts, pending, time.monotonic() - start)
            bar.update(min(in_a_round, len(repeated) - round_start))
        if scoring is not None:
            samples += scoring.finish(task, judges, kept)
    model.train(was_training)
    metrics, intervals = summarise(samples, num_samples, max_completion_length, task.facts)
    metrics["seconds"] = round(time.monotonic() - start, 2)
    return Evaluation(name, metrics, samples, intervals)


def scored_samples(
    task: Task,
    judges: Mapping[str, FrozenJudge],
    rows: Sequence[Row],
    completions: Sequence[tuple[str, int | None]],
    outcomes: Sequence[Outcome],
    counts: Sequence[dict[str, int]] | None = None,
) -> list[Sample]:
    """Completions (texts and numbers of tokens) with what came of scoring them, by the executor and by judges."""
    texts = [text for text, _ in completions]
    judged = {name: judge.score(rows, texts) for name, judge in judges.items()}
    samples = []
    for i, (row, (text, tokens), outcome) in enumerate(zip(rows, completions, outcomes, strict=True)):
        score = None if outcome.score is None else outcome.score.as_dict()
        why = outcome.reason if outcome.score is None else outcome.score.reason
        if score is not None:
            for name, values in judged.items():
                score["components"][name] = values[i]
                score["total"] += task.weights[name] * values[i]
        form = hashlib.sha256(task.canonical(row, text).encode(errors="replace")).hexdigest()[:16]
        samples.append(Sample(dict(row), text, tokens, score, why, counts[i] if counts else {}, form))
    return samples


class KeptSamples:
    """A .jsonl file of the samples of an evaluation under way, one per line, which the main process reads and writes.
    The last line of a round also holds how long the evaluation has taken so far. Samples that were made under other
    `settings` are not taken."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self._path = path
        self._settings = json.loads(json.dumps(settings))

    def read(self) -> tuple[list[Sample], float]:
        """The samples of complete rounds, and the seconds they took."""
        samples: list[Sample] = []
        whole = (0, 0.0)
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines() if self._path.is_file() else []
        for line in lines:
            try:
                entry = json.loads(line)
                after = entry.pop("after", None)
                samples.append(Sample(**entry))
            except (ValueError, TypeError, AttributeError):
                break  # the line that was being written when the evaluation was killed, or one of another version
            if after is not None:
                if after["settings"] != self._settings:
                    break
                whole = (len(samples), after["seconds"])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, "".join(f"{line}\n" for line in lines[: whole[0]]))
        return samples[: whole[0]], whole[1]

    def add(self, samples: Sequence[Sample], seconds: float) -> None:
        """Append the samples of a round."""
        entries = [asdict(sample) for sample in samples]
        entries[-1]["after"] = {"settings": self._settings, "seconds": seconds}
        with open(self._path, "a", encoding="utf-8") as file:
            # In ASCII: a completion may hold lone surrogates.
            file.write("".join(f"{json.dumps(entry)}\n" for entry in entries))


def _read_on_main(kept: KeptSamples | None, processes: PartialState) -> tuple[list[Sample], float]:
    """What the main process has kept, on every process: their file systems may differ."""
    found = [kept.read() if kept is not None and processes.is_main_process else ([], 0.0)]
    return broadcast_object_list(found)[0]


@dataclass
class _Batch:
    """Completions that are being scored."""

    rows: Sequence[Row]
    written: list[tuple[str, int]]
    counts: list[dict[str, int]]
    pending: Pending
    seconds: float

    def finish(self, task: Task, judges: Mapping[str, FrozenJudge], kept: KeptSamples | None) -> list[Sample]:
        """The samples of this round, of all processes, in the order of the rows."""
        own = scored_samples(task, judges, self.rows, self.written, self.pending.result(), self.counts)
        samples = gather_object(own)
        if kept is not None and PartialState().is_main_process:
            kept.add(samples, self.seconds)
        return samples


def _make_editor(name: str, task: Task, rows: Sequence[Row], tokenizer: Any, writer: Writer) -> Editor:
    if writer.no_editor_reason is not None:
        raise EditorError(
            f"--editor {name} deletes generated tokens, which only the fast rollout supports, and "
            f"{writer.no_editor_reason}; leave --editor out"
        )
    return task.editor(name, rows, tokenizer)
