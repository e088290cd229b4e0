"""Evaluation on held-out rows: sample, score, add up. Works on any causal language model, with or without a
constraint, and on masked ones."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .advantages import expected_best_curve
from .constraints.base import Constraint
from .constraints.sampling import ConstraintProcessor
from .constraints.table import MaskTable
from .masked import MaskedPolicy, is_masked_lm
from .rewards.executor import RewardExecutor
from .rewards.judge import FrozenJudge
from .rollout import Decoder, Editor, rollout, why_not
from .rollout.support import without_adapter
from .task import DecodingError, Row, Task, check_decoding


@dataclass
class Sample:
    """One completion of a held-out row, and what the task said of it; `counts` of what was done while decoding."""

    row: dict[str, Any]
    completion: str
    tokens: int
    score: dict[str, Any] | None
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class Evaluation:
    """`metrics` by name, and the samples behind them: row after row, `num_samples` of each."""

    name: str
    metrics: dict[str, float]
    samples: list[Sample] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Evaluation:
        return cls(values["name"], values["metrics"], [Sample(**sample) for sample in values["samples"]])


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
    max_completion_length: int = 256,
    batch_size: int = 64,
    constraint: Constraint | None = None,
    decoding: str | None = None,
    seed: int = 0,
) -> Evaluation:
    """Sample `num_samples` completions of each row and score them. The random state outside is left as it was.

    `decoding` is one of `task.decodings`, which says itself whether there is a constraint. Not given: with the
    constraint, if there is one.
    """
    if decoding is not None:
        constraint = _constraint_of(decoding, task, tokenizer, constraint)
    start = time.monotonic()
    repeated = [row for row in rows for _ in range(num_samples)]
    completions: list[tuple[str, int]] = []
    counts: list[dict[str, int]] = []
    pending = []
    was_training = model.training
    model.eval()
    reason = why_not(without_adapter(model))
    decoder = Decoder(model) if reason is None else None
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        for first in range(0, len(repeated), batch_size):
            batch = repeated[first : first + batch_size]
            editor = task.editor(decoding, batch, tokenizer) if decoding is not None else None
            if editor is not None and decoder is None:
                raise DecodingError(
                    f"decoding {decoding!r} takes back what was written, which only our own rollouts can do, "
                    f"and {reason}; "
                    "choose one that does not, such as free"
                )
            written = _generate(
                model, tokenizer, batch, temperature, max_completion_length, constraint, decoder, editor
            )
            completions += written
            counts += [editor.counts(i) if editor is not None else {} for i in range(len(batch))]
            texts = [text for text, _ in written]
            pending.append(executor.submit([json.dumps(row, ensure_ascii=False) for row in batch], texts))
    model.train(was_training)
    outcomes = [outcome for part in pending for outcome in part.result()]
    judged = {
        component: judge.score(repeated, [text for text, _ in completions])
        for component, judge in task.judges().items()
        if isinstance(judge, FrozenJudge)
    }
    samples = []
    for i, (row, (text, tokens), outcome, done) in enumerate(
        zip(repeated, completions, outcomes, counts, strict=True)
    ):
        score = None if outcome.score is None else outcome.score.as_dict()
        why = outcome.reason if outcome.score is None else outcome.score.reason
        if score is not None:
            for component, values in judged.items():
                score["components"][component] = values[i]
                score["total"] += task.weights[component] * values[i]
        samples.append(Sample(dict(row), text, tokens, score, why, done))
    metrics = summarise(samples, num_samples, max_completion_length, task.facts)
    metrics["seconds"] = round(time.monotonic() - start, 2)
    return Evaluation(name, metrics, samples)


def summarise(
    samples: Sequence[Sample], num_samples: int, max_completion_length: int, facts: Sequence[str] = ()
) -> dict[str, float]:
    """Means over samples (those that could not be scored are left out), and unbiased pass@k over each row's. `facts`
    are keys of their info that are averaged too."""
    scored = [sample.score for sample in samples if sample.score is not None]
    metrics = {
        "success": _mean([float(score["success"]) for score in scored]),
        "valid": _mean([float(score["valid"]) for score in scored]),
    }
    for fact in facts:
        metrics[fact] = _mean([float(s["info"][fact]) for s in scored if s["info"].get(fact) is not None])
    metrics["reward"] = _mean([score["total"] for score in scored])
    for component in sorted({key for score in scored for key in score["components"]}):
        metrics[component] = _mean([s["components"][component] for s in scored if component in s["components"]])
    nan = float("nan")
    success_P_G = torch.tensor([nan if s.score is None else float(s.score["success"]) for s in samples])
    metrics |= {f"pass@{k}": value for k, value in expected_best_curve(success_P_G.view(-1, num_samples)).items()}
    metrics["unscored"] = 1 - len(scored) / len(samples)
    metrics["tokens"] = _mean([sample.tokens for sample in samples])
    metrics["cut_off"] = _mean([float(sample.tokens >= max_completion_length) for sample in samples])
    for name in samples[0].counts:
        values = [sample.counts[name] for sample in samples]
        metrics |= {name: _mean(values), f"{name}_median": float(statistics.median(values))}
    return metrics


def table(evaluations: Sequence[Evaluation], names: Sequence[str] | None = None) -> str:
    """The metrics of several evaluations side by side, as text."""
    if names is None:
        names = [name for name in evaluations[0].metrics if name not in ("seconds", "unscored")]
    width = max(len(name) for name in names)
    columns = [(evaluation, max(9, len(evaluation.name))) for evaluation in evaluations]
    lines = [" " * width + "".join(f"  {e.name:>{w}}" for e, w in columns)]
    for name in names:
        values = "".join(f"  {e.metrics.get(name, float('nan')):>{w}.3f}" for e, w in columns)
        lines.append(f"{name:<{width}}{values}")
    return "\n".join(lines)


def _constraint_of(decoding: str, task: Task, tokenizer: Any, made: Constraint | None) -> Constraint | None:
    """What a decoding of the task is constrained by; `made` is the task's constraint where there is one already."""
    check_decoding(task, decoding)
    if decoding.split("+")[0] != "constrained":
        return None
    constraint = task.constraint(tokenizer) if made is None else made
    if constraint is None:
        raise ValueError(f"decoding {decoding!r}: task {task.name!r} has no constraint with these options")
    return constraint


def _generate(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    temperature: float,
    max_length: int,
    constraint: Constraint | None,
    decoder: Decoder | None,
    editor: Editor | None,
) -> list[tuple[str, int]]:
    """The text and the number of tokens of a completion of each row; by our rollouts where there is a decoder."""
    prompts = [row["prompt"] for row in rows]
    if is_masked_lm(model):
        policy = MaskedPolicy(tokenizer, without_adapter(model).config, temperature)
        fills = policy.fill(model, policy.prompt_ids(prompts)).ids
        return [(policy.text_of(ids), len(ids)) for ids in fills]
    if isinstance(prompts[0], str):
        ids = tokenizer(text=prompts)["input_ids"]
    else:
        tokenized = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)
        ids = tokenized["input_ids"]
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    constrained: dict[str, Any] = {}
    if constraint is not None:
        table = MaskTable(model.get_output_embeddings().weight.shape[0])
        constrained = {"constraint": constraint, "rows": rows, "table": table}
    if decoder is not None:
        written = rollout(
            model,
            ids,
            max_new_tokens=max_length,
            eos_token_ids=sorted(ends - {None}),
            temperature=temperature,
            decoder=decoder,
            editor=editor,
            **constrained,
        ).completion_ids
    else:
        written = _with_transformers(model, tokenizer, ids, temperature, max_length, constrained)
    completions = []
    for tokens in written:
        length = next((t + 1 for t, token in enumerate(tokens) if token in ends), len(tokens))
        completions.append((tokenizer.decode(tokens[:length], skip_special_tokens=True), length))
    return completions


def _with_transformers(
    model: Any, tokenizer: Any, ids: Sequence[list[int]], temperature: float, max_length: int, constrained: Any
) -> list[list[int]]:
    width = max(map(len, ids))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return model.generate(
        input_ids=torch.tensor([[pad] * (width - len(i)) + i for i in ids], device=model.device),
        attention_mask=torch.tensor([[0] * (width - len(i)) + [1] * len(i) for i in ids], device=model.device),
        max_new_tokens=max_length,
        pad_token_id=pad,
        logits_processor=[ConstraintProcessor(**constrained)] if constrained else [],
        **sampling,
    )[:, width:].tolist()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
