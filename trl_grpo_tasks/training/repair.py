"""Multi-turn repair (`--repair_turns`): a failed answer is followed by the verifier's reason and another attempt.

`RepairTask` wraps any task. Its constraint forces the feedback between the turns (`constraints/turns.py`), and its
score is that of the last turn.
"""

from __future__ import annotations

import base64
import html
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ..constraints.base import Constraint
from ..constraints.turns import AFTER, BEFORE, TurnsConstraint, split_turns
from ..redact import redacted
from ..rewards.executor import RewardExecutor
from ..rewards.time_limit import time_limit
from ..rewards.worker import TaskRecipe, score_one
from ..task import Row, Score, Task, TinySpec

MOST_TURNS = 4
LONGEST_REASON = 200  # characters
SECONDS_PER_TURN = 30.0  # a turn that takes longer to score ends its conversation; with workers: --reward_timeout
REPAIRED_SHARE = 0.25  # of the rows of a cold start: they show a failed turn before the gold answer
NO_REASON = "it does not solve the task"
# What a task with several turns takes over as it is.
FROM_INNER = ("name", "version", "description", "weights", "levels", "watched", "tiny_defaults", "tools", "Options",
              "options", "fixed_options", "defines", "dataset", "request", "gold", "bad", "row_of", "row_from",
              "unverifiable", "prepare", "make_score")  # fmt: skip
_PATH = re.compile(r"(?<![\w/])/(?:[\w.+-]+/)+")  # the folders of an absolute path


def check_repair(args: Any) -> None:
    """Raise ValueError for options of a TaskGRPOConfig with which answers cannot be repaired."""
    if not 1 <= args.repair_turns <= MOST_TURNS:
        raise ValueError(f"repair_turns={args.repair_turns} must be from 1 (off) to {MOST_TURNS}")
    if args.repair_turns == 1:
        return
    asked = f"repair_turns={args.repair_turns}"
    if args.use_vllm:
        raise ValueError(f"{asked} does not work with use_vllm, which ends a completion with its first turn; set one "
                         "of them to 1 or False")  # fmt: skip
    if args.rollout == "trl":
        raise ValueError(f"{asked} needs our rollouts, because TRL's generation ends a completion with its first "
                         "turn; set rollout='fast'")  # fmt: skip
    if getattr(args, "relabel", False):
        raise ValueError(f"{asked} does not work with relabel: feedback belongs to one row; set relabel=False")


def with_repair(task: Task, args: Any) -> Task:
    """Return the task as the options of a TaskGRPOConfig say: with several turns, or without. ValueError if it has
    none."""
    task = task.inner if isinstance(task, RepairTask) else task
    if args.repair_turns == 1:
        return task
    return RepairTask(task, args.repair_turns, args.repair_discount, args.constrain)


def refuse_editor(editor: str | None, turns: int) -> None:
    """Raise ValueError if an editor is to delete text of one of several turns."""
    if editor is not None and turns > 1:
        raise ValueError(
            f"--editor {editor} edits a single answer, and --repair_turns {turns} makes several; leave one of them out"
        )


def refuse_turns(turns: int, reason: str | None) -> None:
    """Raise ValueError if completions have several turns, which TRL's generation would end with the first, and our
    rollouts are not possible for a reason."""
    if turns > 1 and reason is not None:
        raise ValueError(f"repair_turns={turns} needs our rollouts, but {reason}; set it to 1")


def with_repair_of(task: Task, settings: Mapping[str, Any]) -> Task:
    """Return the task with the turns of a run, which are in the settings of its folder."""
    training = settings.get("training") or {}
    turns = int(training.get("repair_turns", 1))
    return task if turns == 1 else RepairTask(task, turns, float(training.get("repair_discount", 0.9)), None)


@contextmanager
def scoring_turns_with(executor: RewardExecutor, constraint: Constraint | None) -> Iterator[None]:
    """Within this context, workers of the executor score together the turns that end in the same pass of a rollout.

    If the executor has no workers, turns are scored in this process, one after the other.
    """
    if not (isinstance(constraint, TurnsConstraint) and isinstance(executor.task, RepairTask) and executor.workers):
        yield
        return
    constraint.reasons = partial(executor.task.reasons, executor)
    try:
        yield
    finally:
        constraint.reasons = None


def check_length(constraint: TurnsConstraint, rows: Sequence[Row], max_completion_length: int) -> None:
    """Raise ValueError if no completion has room for all turns."""
    forms = [constraint.form(row) for row in rows]
    feedback = max(len(form.head_ids) + len(form.tail_ids) for form in forms)
    least = (constraint.turns - 1) * (feedback + 2) + 2  # a turn has a token and its end
    if max_completion_length < least:
        raise ValueError(
            f"max_completion_length={max_completion_length} is too short for {constraint.turns} turns, which it "
            f"counts together: feedback alone takes up to {feedback} tokens and the reason; set it to the length of "
            f"an answer times {constraint.turns}, and at least to {least}"
        )


def without_answer(reason: str, gold: str) -> str:
    """Return a reason without the gold answer: the model would fail on purpose to copy it."""
    answer = gold.strip()
    return re.sub(rf"(?<!\w){re.escape(answer)}(?!\w)", "...", reason) if answer else reason


def shown_reason(reason: str) -> str:
    """Return a reason as feedback shows it: one line, short, without secrets, control characters and folders."""
    line = "".join(c if c.isprintable() else " " for c in redacted(reason))
    line = " ".join(_PATH.sub("", line).split())
    return (line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3].rstrip() + "...") or NO_REASON


class RepairTask(Task):
    """A task with up to `turns` attempts per completion.

    A completion is a conversation as `join_turns` writes it. Its score is that of the last turn, with components that
    are not penalties multiplied by `discount` for every turn before it. The facts `turns` and `repaired` are added.
    `constrain` is whether turns are under the task's own constraint; None: if it has one.
    """

    def __init__(self, inner: Task, turns: int, discount: float, constrain: bool | None):
        if not 2 <= turns <= MOST_TURNS or not 0 < discount <= 1:  # they may come from the files of a run
            raise ValueError(
                f"a repair of {turns} turns with discount {discount} is not possible; turns are from 2 to "
                f"{MOST_TURNS}, and the discount is above 0 and at most 1"
            )
        if inner.policy == "masked":
            raise ValueError(
                f"repair_turns={turns} does not work with task {inner.name!r}: a masked language model fills all gaps "
                "at once, so that there is no second turn; leave it at 1"
            )
        if inner.judges() or inner.llm_judge() is not None:
            raise ValueError(
                f"repair_turns={turns} does not work with task {inner.name!r}: its judges would rate the text of "
                "several turns; leave it at 1"
            )
        self.inner, self.turns, self.discount, self._constrain = inner, turns, discount, constrain
        for name in FROM_INNER:
            setattr(self, name, getattr(inner, name))
        lengths = {name: turns * n for name, n in inner.defaults.items() if name == "max_completion_length"}
        self.defaults = {**inner.defaults, **lengths}  # type: ignore[misc]
        self.facts = (*inner.facts, "turns", "repaired")

    def __reduce__(self) -> Any:  # the class of a task in a file can only be imported by its recipe
        return _rebuilt, (TaskRecipe.of(self.inner), self.turns, self.discount, self._constrain)

    # ---- turns

    def constraint(self, tokenizer: Any) -> TurnsConstraint | None:
        inner = None if self._constrain is False else self.inner.constraint(tokenizer)
        return None if inner is None and self._constrain else self.turns_under(tokenizer, inner)

    def turns_under(self, tokenizer: Any, constraint: Constraint | None) -> TurnsConstraint:
        """Return the constraint of a conversation whose turns are under `constraint`; None: free text."""
        return TurnsConstraint(tokenizer, constraint, self.reason, self.turns)

    def reason(self, row: Row, turn: str) -> str | None:
        """Return why a turn fails, as feedback shows it; None if it succeeds or cannot be scored."""
        try:
            with time_limit(SECONDS_PER_TURN):
                score = score_one(self.inner, json.dumps(row), turn).score
        except TimeoutError:  # between the end of scoring and that of the limit
            return None
        return self._reason_of(row, score)

    def reasons(self, executor: RewardExecutor, rows: Sequence[Row], turns: Sequence[str]) -> list[str | None]:
        """Return the `reason` of each turn. The executor, which is one of this task, scores all of them together."""
        outcomes = executor.submit([json.dumps(row, ensure_ascii=False) for row in rows], turns).result()
        return [self._reason_of(row, outcome.score) for row, outcome in zip(rows, outcomes, strict=True)]

    def _reason_of(self, row: Row, score: Score | None) -> str | None:
        if score is None or score.success:
            return None
        return shown_reason(without_answer(self.inner.feedback(row, score), self._gold_of(row)))

    def _gold_of(self, row: Row) -> str:
        try:
            return self.inner.gold(row)
        except (ValueError, LookupError):  # the row has no known answer
            return ""

    def demonstration(self, row: Row, tokenizer: Any) -> tuple[Any, str]:
        """Return a prompt and the gold answer for the cold start. For some rows the prompt goes on with a failed turn
        and its feedback, so that the model learns to use feedback without imitating the failure."""
        prompt, gold = row["prompt"], self.inner.gold(row)
        if random.Random(json.dumps(row, sort_keys=True)).random() >= REPAIRED_SHARE:
            return prompt, gold
        bad = self.inner.bad(row)
        turns = self.turns_under(tokenizer, None)
        form = turns.form(row)
        reason = tokenizer.decode(turns.spelled_reason(self.reason(row, bad) or NO_REASON))
        if isinstance(prompt, str):
            return f"{prompt}{bad}{tokenizer.eos_token}{form.head}{reason}{form.tail}", gold
        message = f"{BEFORE}{reason}{AFTER}" if BEFORE in form.head else reason
        return [*prompt, {"role": "assistant", "content": bad}, {"role": "user", "content": message}], gold

    # ---- scores, of the last turn

    def score(self, row: Row, completion: str) -> Score | None:
        turns, _ = split_turns(completion)
        score = self.inner.score(row, turns[-1])
        if score is None:
            return None
        components = {name: value * self._factor(name, value, len(turns)) for name, value in score.components.items()}
        info = {**score.info, "turns": len(turns), "repaired": score.success and len(turns) > 1}
        return self.inner.make_score(components, score.valid, score.success, score.reason, info)

    def _factor(self, name: str, value: float, turns: int) -> float:
        """Return the discount of a component. A penalty is not discounted: failing later would be worth more."""
        is_penalty = value * (self.weights[name] or 1) < 0
        return 1.0 if is_penalty else self.discount ** (turns - 1)

    def group_components(
        self, rows: Sequence[Row], completions: Sequence[str], scores: Sequence[Score | None]
    ) -> dict[str, list[float | None]]:
        return self.inner.group_components(rows, [_last(text) for text in completions], scores)

    def canonical(self, row: Row, completion: str) -> str:
        return self.inner.canonical(row, _last(completion))

    # ---- pictures and files

    def render(self, row: Row, completion: str) -> str | bytes:
        """Draw the last turn, below the text of earlier turns and their feedback."""
        turns, reasons = split_turns(completion)
        picture = self.inner.render(row, turns[-1])
        if not reasons:
            return picture
        if isinstance(picture, bytes):
            picture = f"<img alt='turn {len(turns)}' src='data:image/png;base64,{base64.b64encode(picture).decode()}'>"
        earlier = "".join(
            f"<li><pre>{html.escape(turn)}</pre><p class=note>{html.escape(reason)}</p></li>"
            for turn, reason in zip(turns, reasons, strict=False)
        )
        return f"<ol class=turns>{earlier}<li>{picture}</li></ol>"

    def exports(self, row: Row, completion: str) -> dict[str, str | bytes]:
        return self.inner.exports(row, _last(completion))

    def tiny(self) -> TinySpec | None:
        spec = self.inner.tiny()
        return None if spec is None else replace(spec, context=self.turns * spec.context)


def _last(completion: str) -> str:
    return split_turns(completion)[0][-1]


def _rebuilt(recipe: TaskRecipe, turns: int, discount: float, constrain: bool | None) -> RepairTask:
    return RepairTask(recipe.build(), turns, discount, constrain)
