"""`ready_model`: tokenizer, configuration and constraint of a model, checked before its weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..constraints.budget import within
from ..task import Row, Task
from .loading import check_policy, load_tokenizer, prepare_model, set_template_variables
from .masked_policy import MaskedPolicy


@dataclass
class ReadyModel:
    """A model that fits the task: its folder or Hub id, configuration, tokenizer and constraint."""

    path: str
    config: Any
    tokenizer: Any
    constraint: Any


def ready_model(
    name: str | None,
    task: Task,
    rows: Sequence[Row],
    folder: str | Path,
    *,
    seed: int,
    constrain: bool | None = False,
    most_tokens: int | None = None,
    revision: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> ReadyModel:
    """Find the model, or make it in `folder`. `constrain` None: under the task's constraint, if it has one. Its
    completions have at most `most_tokens` tokens. `chat_template_kwargs` are variables of the chat template, beside
    those that the tokenizer was saved with.

    ValueError if the model is of another kind than the task needs, cannot read the prompts of `rows`, or is to be
    constrained and the task has no constraint, or no answer has so few tokens.
    """
    path = prepare_model(name, task, folder, seed, revision)
    tokenizer = load_tokenizer(path, revision)
    set_template_variables(tokenizer, chat_template_kwargs)
    config = check_policy(path, task.policy, revision)
    if task.policy == "masked":
        policy = MaskedPolicy(tokenizer, config)
        policy.prompt_ids([row["prompt"] for row in rows])
        policy.check_answers([row["prompt"] for row in rows[:1]], [task.gold(row) for row in rows[:1]])
    constraint = task.constraint(tokenizer) if constrain in (True, None) else None
    if constrain and constraint is None:
        raise ValueError(f"task {task.name!r} has no constraint with these options; give --constrain false")
    if constraint is not None and most_tokens is not None:
        constraint = within(constraint, most_tokens, rows)
    return ReadyModel(path, config, tokenizer, constraint)
