"""Tasks of several turns: the model acts in an environment, which answers, until the environment or the number of
turns ends the conversation.

    class Guess(Environment):
        def start(self, row):
            self.number = row["number"]
            return ""

        def step(self, action):
            if action.strip() == str(self.number):
                return Step(reward=1.0, done=True, success=True)
            return Step("higher" if int(action) < self.number else "lower")

A completion is the text of a conversation (see constraints/turns.py), and its score is found by playing the model's
turns again. So scores stay pure functions, which workers compute, limit and cache, and a resumed run needs no state of
an environment. An environment must therefore answer the same to the same row and actions.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, NamedTuple

from ..constraints.base import Asked, Constraint
from ..constraints.turns import TurnsConstraint, TurnsForm, join_turns, split_turns
from ..task import Row, Score, Task, UnfinishedTaskError
from .executor import RewardExecutor
from .time_limit import time_limit
from .worker import score_one

SECONDS_PER_TURN = 30.0  # of a turn that is answered in this process; with workers: --reward_timeout


class Step(NamedTuple):
    """What an environment answers to an action."""

    observation: str = ""  # what the model is told before its next turn
    reward: float = 0.0
    done: bool = False
    success: bool = False  # the conversation solves the row
    reason: str = ""  # why it is no success, for people to read
    info: Mapping[str, Any] = {}
    valid: bool = True  # the environment understood the action


class Environment:
    """One conversation with a world. Random numbers must come from the row."""

    def start(self, row: Row) -> str:
        """Begin with this row. Return what the model is told first; "" if the prompt of the row says everything."""
        return ""

    def step(self, action: str) -> Step:
        """Answer a turn of the model. The action may be any text."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the environment holds."""


class TurnsTask(Task):
    """A task whose completions are conversations of up to `turns` turns, as `join_turns` writes them.

    `observation` gives what the model is told after a conversation that goes on, from its score.
    """

    turns: int
    shown: ClassVar[TurnsForm] = TurnsForm()
    learns_last_turn_only: ClassVar[bool] = False  # from its own successes, where earlier turns are mistakes

    def observation(self, row: Row, score: Score) -> str | None:
        """Return what the model is told after a conversation with this score; None if it has ended."""
        raise NotImplementedError

    def turn_constraint(self, tokenizer: Any) -> Constraint | None:
        """Return the constraint on a turn, or None for free text. If it has a method `start_turn(row, turns)`, that is
        called with the texts of the earlier turns instead of `start(row)`."""
        return None

    def constraint(self, tokenizer: Any) -> Constraint | None:
        inner = self.turn_constraint(tokenizer)
        return inner if self.turns == 1 else self.turns_under(tokenizer, inner)

    def turns_under(self, tokenizer: Any, inner: Constraint | None) -> TurnsConstraint:
        """Return the constraint of conversations whose turns are under `inner`; None: free text."""
        return TurnsConstraint(tokenizer, inner, self.reply, self.turns, self.shown)

    def reply(self, row: Row, conversation: str) -> str | None:
        """Return what follows a conversation; None if it has ended or cannot be scored."""
        try:
            with time_limit(SECONDS_PER_TURN):
                score = score_one(self, json.dumps(row), conversation).score
        except TimeoutError:  # between the end of scoring and that of the limit
            return None
        return None if score is None else self.observation(row, score)

    def ask(self, executor: RewardExecutor, row: Row, conversation: str) -> Asked:
        """Return the `reply` to a conversation, which is scored by the executor, one of this task."""
        pending = executor.submit([json.dumps(row, ensure_ascii=False)], [conversation])

        def answer() -> str | None:
            score = pending.result()[0].score
            return None if score is None else self.observation(row, score)

        return Asked(pending.is_done, answer)

    def gold_turns(self, row: Row, tokenizer: Any) -> tuple[list[str], list[str]]:
        """Return the turns and the observations of the gold conversation, in the form of this model."""
        return split_turns(self.gold(row))

    def demonstrations(self, row: Row, tokenizer: Any) -> list[tuple[Any, str]]:
        """Return prompts and answers for the cold start: each turn of the gold conversation, after those before it."""
        turns, observations = self.gold_turns(row, tokenizer)
        constraint = self.turns_under(tokenizer, None)
        found, prompt = [], row["prompt"]
        for place, turn in enumerate(turns):
            found.append((prompt, turn))
            if place < len(observations):
                prompt = self.continued(row, prompt, turn, observations[place], constraint)
        return found

    def continued(self, row: Row, prompt: Any, turn: str, observation: str, constraint: TurnsConstraint) -> Any:
        """Return a prompt that goes on with a turn and an observation, as a rollout writes them."""
        form = constraint.form(row)
        observation = constraint.observed_text(constraint.spelled(row, observation))
        if isinstance(prompt, str):
            return f"{prompt}{turn}{constraint.tokenizer.eos_token}{form.head}{observation}{form.tail}"
        has_words = self.shown.before in form.head  # the tokenizer can spell them
        before, after = (self.shown.before, self.shown.after) if has_words else ("", "")
        said = {"role": self.shown.role, "content": f"{before}{observation}{after}"}
        return [*prompt, {"role": "assistant", "content": turn}, said]

    def render(self, row: Row, completion: str) -> str | bytes:
        """Draw the last turn with `render_turn`, below the text of earlier turns and their observations."""
        turns, observations = split_turns(completion)
        picture = self.render_turn(row, turns)
        if not observations:
            return picture
        if isinstance(picture, bytes):
            picture = f"<img alt='turn {len(turns)}' src='data:image/png;base64,{base64.b64encode(picture).decode()}'>"
        earlier = "".join(
            f"<li><pre>{html.escape(turn)}</pre><p class=note>{html.escape(observation)}</p></li>"
            for turn, observation in zip(turns, observations, strict=False)
        )
        return f"<ol class=turns>{earlier}<li>{picture}</li></ol>"

    def render_turn(self, row: Row, turns: Sequence[str]) -> str | bytes:
        """Draw the last of these turns."""
        return f"<pre>{html.escape(turns[-1])}</pre>"


class EnvironmentTask(TurnsTask):
    """A task whose completions are played in an environment. A subclass must define `dataset` and `environment`.

    The reward is the sum of the rewards of the steps; `Score.info` has those of each turn, and the `info` of the last
    step.

    Class attributes:
        turns: The most turns of the model.
        longest_observation: Characters, after which an observation is cut.
        most_kept: Environments that a process keeps, because their conversations may go on. Others are played again.
        shown: How observations stand in a chat; a role "tool" is that of the chat template.
    """

    weights: Mapping[str, float] = {"reward": 1.0}
    turns: int = 4
    longest_observation: ClassVar[int] = 1000
    most_kept: ClassVar[int] = 256
    facts: Sequence[str] = ("turns",)

    def __init__(self, options: Any = None):
        super().__init__(options)
        self._open: dict[tuple[str, ...], tuple[Environment, list[Step]]] = {}  # by row and actions, oldest first

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def environment(self) -> Environment:
        """Return a new environment, which is not started."""
        raise UnfinishedTaskError(f"task {self.name!r} must define environment()")

    def opened(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row whose prompt ends with what a new environment says first, for `dataset`."""
        environment = self.environment()
        try:
            said = environment.start(row)
        finally:
            _close(environment)
        prompt = row["prompt"]
        if not said:
            return row
        if isinstance(prompt, str):
            return {**row, "prompt": f"{prompt}{said}\n"}
        last = {**prompt[-1], "content": "\n\n".join(filter(None, (prompt[-1]["content"], said)))}
        return {**row, "prompt": [*prompt[:-1], last]}

    def conversation(self, row: Row, actions: Sequence[str]) -> str:
        """Return the completion in which the model acts so, for `gold` and `bad`, up to its end."""
        steps = self.play(row, actions)
        return join_turns(actions[: len(steps)], [self._shown_text(step.observation) for step in steps[:-1]])

    def play(self, row: Row, actions: Sequence[str]) -> list[Step]:
        """Return what a new environment answers to these actions, up to the one that ends the conversation."""
        key = json.dumps(row, sort_keys=True)
        environment, steps = self._open.pop((key, *actions[:-1]), (None, []))
        try:
            if environment is None:
                environment = self.environment()
                environment.start(row)
            for action in actions[len(steps) :]:
                step = environment.step(action)
                if not isinstance(step, Step):
                    raise TypeError(f"step must return a Step, got {type(step).__name__}")
                steps.append(step)
                if step.done:
                    break
        except BaseException:
            _close(environment)
            raise
        if steps[-1].done or len(steps) >= self.turns:
            _close(environment)
        else:
            self._keep((key, *actions), environment, list(steps))
        return steps

    def _keep(self, key: tuple[str, ...], environment: Environment, steps: list[Step]) -> None:
        _close(self._open.pop(key, (None, []))[0])
        self._open[key] = (environment, steps)
        if len(self._open) > self.most_kept:
            _close(self._open.pop(next(iter(self._open)))[0])

    def score(self, row: Row, completion: str) -> Score | None:
        steps = self.play(row, split_turns(completion)[0][: self.turns])
        last, rewards = steps[-1], [float(step.reward) for step in steps]
        reason = "" if last.success else last.reason or ("" if last.done else "the conversation did not end")
        info = {**last.info, "turns": len(steps), "turn_rewards": rewards}
        if not last.done:
            info["observation"] = self._shown_text(last.observation)
        valid = all(step.valid for step in steps)
        return self.make_score({"reward": sum(rewards)}, valid, last.success, reason, info)

    def observation(self, row: Row, score: Score) -> str | None:
        return score.info.get("observation")

    def _shown_text(self, observation: str) -> str:
        text, most = str(observation), self.longest_observation
        text = text if len(text) <= most else text[: most - 3] + "..."
        return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def _close(environment: Environment | None) -> None:
    with suppress(Exception):  # what it answered is known
        if environment is not None:
            environment.close()


@contextmanager
def answering_with(executor: RewardExecutor, constraint: Constraint | None) -> Iterator[None]:
    """Within this context, workers of the executor answer turns, those of many rows at the same time.

    If the executor has no workers, turns are answered in this process, one after the other.
    """
    if not (isinstance(constraint, TurnsConstraint) and isinstance(executor.task, TurnsTask) and executor.workers):
        yield
        return
    constraint.asks = partial(executor.task.ask, executor)
    try:
        yield
    finally:
        constraint.asks = None


def check_length(constraint: TurnsConstraint, rows: Sequence[Row], max_completion_length: int) -> None:
    """Raise ValueError if no completion has room for all turns."""
    forms = [constraint.form(row) for row in rows]
    between = max(len(form.head_ids) + len(form.tail_ids) for form in forms)
    least = (constraint.turns - 1) * (between + 2) + 2  # a turn has a token and its end
    if max_completion_length < least:
        raise ValueError(
            f"max_completion_length={max_completion_length} is too short for {constraint.turns} turns, which it "
            f"counts together: between two turns are up to {between} tokens and what the model is told; set it to the "
            f"length of a turn times {constraint.turns}, and at least to {least}"
        )
