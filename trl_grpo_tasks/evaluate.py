"""Evaluation on held-out rows: sample, score, add up. Works on any causal language model, with or without a
constraint, and on masked ones, and goes on where it was stopped."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from .constraints.base import Constraint
from .constraints.filters import SamplingFilters
from .files import write_whole
from .rewards.executor import Outcome, Pending, RewardExecutor
from .rewards.judge import FrozenJudge, frozen_of
from .rollout import NO_FILTERS, Editor
from .summary import summarise
from .task import DecodingError, Row, Task, check_decoding, is_constrained
from .writer import Writer


@dataclass
class Sample:
    """One completion of a held-out row, and what the task said of it. `counts` of what was done while decoding; `form`
    is the same for completions that the task takes for the same answer. Of a completion that somebody else wrote the
    number of tokens may be unknown."""

    row: dict[str, Any]
    completion: str
    tokens: int | None
    score: dict[str, Any] | None
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    form: str = ""


@dataclass
class Evaluation:
    """`metrics` by name, their 95% `intervals`, and the samples behind them: row after row, as many of each."""

    name: str
    metrics: dict[str, float]
    samples: list[Sample] = field(default_factory=list)
    intervals: dict[str, list[float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Evaluation:
        samples = [Sample(**sample) for sample in values["samples"]]
        return cls(values["name"], values["metrics"], samples, values.get("intervals", {}))


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
    decoding: str | None = None,
    seed: int = 0,
    ks: Sequence[int] | None = None,
    kept: KeptSamples | None = None,
) -> Evaluation:
    """Sample `num_samples` completions of each row and score them. The random state outside is left as it was.

    `decoding` is one of `task.decodings`, which says itself whether there is a constraint. Not given: with the
    constraint, if there is one. What is in `kept` already is not sampled again.
    """
    if decoding is not None:
        constraint = _constraint_of(decoding, task, tokenizer, constraint)
    repeated = [row for row in rows for _ in range(num_samples)]
    samples, seconds, random_state = ([], 0.0, None) if kept is None else kept.read()
    start = time.monotonic() - seconds
    was_training = model.training
    model.eval()
    writer = Writer(model, tokenizer, temperature, max_completion_length, constraint, filters)
    devices = [model.device] if model.device.type == "cuda" else []
    judges = frozen_of(task.judges())
    scoring: _Batch | None = None
    # Only where somebody watches: a file of logs wants no bar.
    bar = tqdm(total=len(repeated), initial=len(samples), desc=name, unit="sample", leave=False, disable=None)
    with torch.random.fork_rng(devices), torch.no_grad(), bar:
        torch.manual_seed(seed)
        if random_state is not None:
            _set_random_state(random_state, devices)
        for first in range(len(samples), len(repeated), batch_size):
            batch = repeated[first : first + batch_size]
            editor = None if decoding is None else _editor(decoding, task, batch, tokenizer, writer)
            written = writer.write(batch, editor)
            counts = [{} if editor is None else editor.counts(i) for i in range(len(batch))]
            pending = executor.submit([json.dumps(row, ensure_ascii=False) for row in batch], [t for t, _ in written])
            if scoring is not None:  # its scores were computed while this batch was written
                samples += scoring.finish(task, judges, kept)
            scoring = _Batch(batch, written, counts, pending, time.monotonic() - start, _random_state(devices))
            bar.update(len(batch))
        if scoring is not None:
            samples += scoring.finish(task, judges, kept)
    model.train(was_training)
    metrics, intervals = summarise(samples, num_samples, max_completion_length, task.facts, ks)
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
    """A .jsonl file of the samples of an evaluation under way, one a line. The last line of a batch also holds how the
    evaluation goes on from there. Samples that were made under other `settings` are not taken."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self._path = path
        self._settings = json.loads(json.dumps(settings))

    def read(self) -> tuple[list[Sample], float, list[str] | None]:
        """Samples of whole batches, the seconds they took, and the random state after them."""
        samples: list[Sample] = []
        whole: tuple[int, float, list[str] | None] = (0, 0.0, None)
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
                whole = (len(samples), after["seconds"], after["random_state"])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, "".join(f"{line}\n" for line in lines[: whole[0]]))
        return samples[: whole[0]], *whole[1:]

    def add(self, samples: Sequence[Sample], seconds: float, random_state: list[str]) -> None:
        entries = [asdict(sample) for sample in samples]
        entries[-1]["after"] = {"settings": self._settings, "seconds": seconds, "random_state": random_state}
        with open(self._path, "a", encoding="utf-8") as file:
            # In ASCII: a completion may hold lone surrogates.
            file.write("".join(f"{json.dumps(entry)}\n" for entry in entries))


@dataclass
class _Batch:
    """Completions that are being scored."""

    rows: Sequence[Row]
    written: list[tuple[str, int]]
    counts: list[dict[str, int]]
    pending: Pending
    seconds: float
    random_state: list[str]

    def finish(self, task: Task, judges: Mapping[str, FrozenJudge], kept: KeptSamples | None) -> list[Sample]:
        samples = scored_samples(task, judges, self.rows, self.written, self.pending.result(), self.counts)
        if kept is not None:
            kept.add(samples, self.seconds, self.random_state)
        return samples


def _random_state(devices: Sequence[Any]) -> list[str]:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return [state.numpy().tobytes().hex() for state in states]


def _set_random_state(states: Sequence[str], devices: Sequence[Any]) -> None:
    cpu, *others = (torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8) for state in states)
    torch.set_rng_state(cpu)
    for device, state in zip(devices, others, strict=True):
        torch.cuda.set_rng_state(state, device)


def _constraint_of(decoding: str, task: Task, tokenizer: Any, made: Constraint | None) -> Constraint | None:
    """What a decoding of the task is constrained by; `made` is the task's constraint where there is one already."""
    check_decoding(task, decoding)
    if not is_constrained(decoding):
        return None
    constraint = task.constraint(tokenizer) if made is None else made
    if constraint is None:
        raise ValueError(f"decoding {decoding!r}: task {task.name!r} has no constraint with these options")
    return constraint


def _editor(decoding: str, task: Task, rows: Sequence[Row], tokenizer: Any, writer: Writer) -> Editor | None:
    editor = task.editor(decoding, rows, tokenizer)
    if editor is not None and writer.why_no_editor is not None:
        raise DecodingError(
            f"decoding {decoding!r} takes back what was written, which only our own rollouts can do, and "
            f"{writer.why_no_editor}; choose one that does not, such as free"
        )
    return editor
