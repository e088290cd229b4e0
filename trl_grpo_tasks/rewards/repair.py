"""Multi-turn repair (`--repair_turns`): a failed answer is followed by the verifier's reason and another attempt.

`RepairTask` wraps any task. Its constraint forces the feedback between the turns (`constraints/turns.py`), and its
score is that of the last turn.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..constraints.base import Asked, Constraint
from ..constraints.turns import TurnsConstraint, TurnsForm, split_turns
from ..redact import redacted
from ..task import Row, Score, Task, TinySpec
from .environment import EnvironmentTask, TurnsTask
from .executor import RewardExecutor
from .worker import TaskRecipe

MOST_TURNS = 4
LONGEST_REASON = 200  # characters
BEFORE, AFTER = "This answer is not accepted: ", "\nAnswer again, in the same form."  # around the reason in a chat
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
    if args.repair_turns > 1:
        check_turns(args, f"repair_turns={args.repair_turns}")


def check_turns(args: Any, asked: str) -> None:
    """Raise ValueError for options of a TaskGRPOConfig that do not work with several turns."""
    if getattr(args, "relabel", False):
        raise ValueError(f"{asked} does not work with relabel: what the model is told belongs to one row; set "
                         "relabel=False")  # fmt: skip


def with_repair(task: Task, args: Any) -> Task:
    """Return the task as the options of a TaskGRPOConfig say: with several turns, or without. ValueError if it has
    none. Environments need the option `constrain`, which holds their turns."""
    task = task.inner if isinstance(task, RepairTask) else task
    if isinstance(task, EnvironmentTask) and task.turns > 1:
        check_turns(args, f"task {task.name!r}, which has an environment,")
        args.constrain = True
    if args.repair_turns == 1:
        return task
    return RepairTask(task, args.repair_turns, args.repair_discount, args.constrain)


def refuse_editor(editor: str | None, turns: int) -> None:
    """Raise ValueError if an editor is to delete text of one of several turns."""
    if editor is not None and turns > 1:
        raise ValueError(
            f"--editor {editor} edits a single answer, but there are up to {turns} turns; leave --editor out"
        )


def with_repair_of(task: Task, settings: Mapping[str, Any]) -> Task:
    """Return the task with the turns of a run, which are in the settings of its folder."""
    training = settings.get("training") or {}
    turns = int(training.get("repair_turns", 1))
    return task if turns == 1 else RepairTask(task, turns, float(training.get("repair_discount", 0.9)), None)


def without_answer(reason: str, gold: str) -> str:
    """Return a reason without the gold answer: the model would fail on purpose to copy it."""
    answer = gold.strip()
    return re.sub(rf"(?<!\w){re.escape(answer)}(?!\w)", "...", reason) if answer else reason


def shown_reason(reason: str) -> str:
    """Return a reason as feedback shows it: one line, short, without secrets, control characters and folders."""
    line = "".join(c if c.isprintable() else " " for c in redacted(reason))
    line = " ".join(_PATH.sub("", line).split())
    return (line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3].rstrip() + "...") or NO_REASON


class RepairTask(TurnsTask):
    """A task with up to `turns` attempts per completion.

    A completion is a conversation as `join_turns` writes it. Its score is that of the last turn, with components that
    are not penalties multiplied by `discount` for every turn before it. The facts `turns` and `repaired` are added.
    `constrain` is whether turns are under the task's own constraint; None: if it has one.
    """

    shown = TurnsForm(before=BEFORE, after=AFTER, is_prompt_repeated=True)
    learns_last_turn_only = True

    def __init__(self, inner: Task, turns: int, discount: float, constrain: bool | None):
        if not 2 <= turns <= MOST_TURNS or not 0 < discount <= 1:  # they may come from the files of a run
            raise ValueError(
                f"a repair of {turns} turns with discount {discount} is not possible; turns are from 2 to "
                f"{MOST_TURNS}, and the discount is above 0 and at most 1"
            )
        if isinstance(inner, TurnsTask) and inner.turns > 1:
            raise ValueError(f"repair_turns={turns} does not work with task {inner.name!r}, which has turns of its "
                             "own; leave it at 1")  # fmt: skip
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

    def turn_constraint(self, tokenizer: Any) -> Constraint | None:
        return self.inner.constraint(tokenizer)

    def constraint(self, tokenizer: Any) -> TurnsConstraint | None:
        inner = None if self._constrain is False else self.turn_constraint(tokenizer)
        return None if inner is None and self._constrain else self.turns_under(tokenizer, inner)

    def observation(self, row: Row, score: Score) -> str | None:
        """Return why the last turn fails, as the model is told; None if it succeeds."""
        if score.success:
            return None
        return shown_reason(without_answer(self.inner.feedback(row, score), self._gold_of(row)))

    def reply(self, row: Row, conversation: str) -> str | None:
        return super().reply(row, _last(conversation))  # it depends on the last turn only, whose score may be cached

    def ask(self, executor: RewardExecutor, row: Row, conversation: str) -> Asked:
        return super().ask(executor, row, _last(conversation))

    def _gold_of(self, row: Row) -> str:
        try:
            return self.inner.gold(row)
        except (ValueError, LookupError):  # the row has no known answer
            return ""

    def demonstrations(self, row: Row, tokenizer: Any) -> list[tuple[Any, str]]:
        """Return a prompt and the gold answer for the cold start. For some rows the prompt goes on with a failed turn
        and its feedback, so that the model learns to use feedback without imitating the failure."""
        prompt, gold = row["prompt"], self.inner.gold(row)
        if random.Random(json.dumps(row, sort_keys=True)).random() < REPAIRED_SHARE:
            bad = self.inner.bad(row)
            reason = self.reply(row, bad) or NO_REASON
            prompt = self.continued(row, prompt, bad, reason, self.turns_under(tokenizer, None))
        return [(prompt, gold)]

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

    def render_turn(self, row: Row, turns: Sequence[str]) -> str | bytes:
        return self.inner.render(row, turns[-1])

    def exports(self, row: Row, completion: str) -> dict[str, str | bytes]:
        return self.inner.exports(row, _last(completion))

    def tiny(self) -> TinySpec | None:
        spec = self.inner.tiny()
        return None if spec is None else replace(spec, context=self.turns * spec.context)


def _last(completion: str) -> str:
    return split_turns(completion)[0][-1]


def _rebuilt(recipe: TaskRecipe, turns: int, discount: float, constrain: bool | None) -> RepairTask:
    return RepairTask(recipe.build(), turns, discount, constrain)
