"""Tasks in which the model may call tools before it answers: each turn is a call, or the final answer.

    class Sums(ToolTask):
        name, version, description = "sums", "1", "Add numbers."
        functions = (add,)
        answer_pattern = r" -?[0-9]{1,9}"

        def dataset(self, split, size, seed): ...

        def score_answer(self, row, answer):
            return Step(reward=float(int(answer) == row["sum"]), success=int(answer) == row["sum"])

A tool is a function with type hints and a docstring. Calls fit its JSON schema by construction, and what it returns or
raises is told to the model. Tools run where rewards are computed, with the same limits. They must be pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..constraints.base import Constraint
from ..constraints.grammar import GrammarConstraint
from ..constraints.tools import (
    HERMES,
    Call,
    CallForm,
    call_form,
    call_text,
    in_form,
    parse_call,
    tool_schemas,
    tools_text,
    turn_grammar,
)
from ..constraints.turns import TurnsForm
from ..task import Row, UnfinishedTaskError
from .environment import Environment, EnvironmentTask, Step


class ToolTask(EnvironmentTask):
    """A task whose turns call `functions`, or end the conversation with `marker` and an answer.

    A subclass must define `dataset`, whose prompts `with_tools` completes, and `score_answer`.

    Class attributes:
        functions: The tools, with type hints and Google docstrings.
        marker: The text before a final answer. If it is empty, a turn without a call is the answer.
        answer_pattern: A regular expression for what follows the marker.
        most_thought_tokens: Tokens of free text in a turn, before its call or its answer.
    """

    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    marker: ClassVar[str] = "####"
    answer_pattern: ClassVar[str] = r" [^\n]+"
    most_thought_tokens: ClassVar[int | None] = None
    shown = TurnsForm(role="tool")

    def score_answer(self, row: Row, answer: str) -> Step:
        """Score a final answer, which is any text; `done` is set by the caller."""
        raise UnfinishedTaskError(f"task {self.name!r} must define score_answer(row, answer)")

    def with_tools(self, prompt: str | Sequence[Mapping[str, str]], form: CallForm = HERMES) -> list[dict[str, str]]:
        """Return a chat whose system message describes the tools."""
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(part) for part in prompt]
        has_system = chat[0]["role"] == "system"
        before = [chat[0]["content"]] if has_system else []
        ending = f"End with {self.marker} and the answer." if self.marker else ""
        content = "\n\n".join(filter(None, [*before, tools_text(tool_schemas(self.functions), form), ending]))
        return [{"role": "system", "content": content}, *chat[has_system:]]

    @staticmethod
    def call(name: str, **arguments: Any) -> str:
        """Return the text of a call, for `gold`. The cold start writes it as the model's chat template does."""
        return call_text(Call(name, arguments))

    def gold_turns(self, row: Row, tokenizer: Any) -> tuple[list[str], list[str]]:
        turns, observations = super().gold_turns(row, tokenizer)
        return [in_form(turn, call_form(tokenizer)) for turn in turns], observations

    def turn_constraint(self, tokenizer: Any) -> Constraint:
        schemas, form = tool_schemas(self.functions), call_form(tokenizer)
        grammar = turn_grammar(schemas, form, self.marker, self.answer_pattern, self.most_thought_tokens)
        return GrammarConstraint(tokenizer, grammar)

    def environment(self) -> Environment:
        return _Calls(self)


class _Calls(Environment):
    """Calls the tools of a task as turns say."""

    def __init__(self, task: ToolTask):
        self._task, self._tools = task, {tool.__name__: tool for tool in task.functions}
        self._calls = 0

    def start(self, row: Row) -> str:
        self._row = row
        return ""

    def step(self, action: str) -> Step:
        marker = self._task.marker
        call = parse_call(action)
        info = {"calls": self._calls}
        if call is None:
            _, found, answer = action.rpartition(marker) if marker else ("", "yes", action)
            if not found:
                return Step(done=True, reason=f"neither a call nor {marker} and an answer", info=info)
            return self._task.score_answer(self._row, answer)._replace(done=True, info=info)
        self._calls += 1
        if (tool := self._tools.get(call.name)) is None:
            return Step(_error(f"there is no tool {call.name!r}; tools are: {', '.join(self._tools)}"))
        try:
            result = tool(**call.arguments)
        except (MemoryError, TimeoutError):
            raise  # limits of the completion
        except Exception as error:  # noqa: BLE001 - the model is told
            return Step(_error(f"{type(error).__name__}: {error}"))
        return Step(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str))


def _error(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)
