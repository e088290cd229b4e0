"""Turns that call tools: free text, then exactly one call that fits the tool's JSON schema, or a final answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .grammar import Grammar
from .patterns import pattern_to_ebnf


class CallForm(NamedTuple):
    """How a chat template writes a call: a JSON object with the name and, under `key`, the arguments."""

    begin: str
    end: str
    key: str


HERMES = CallForm("<tool_call>\n", "\n</tool_call>", "arguments")  # also that of Qwen 2.5 and 3
LLAMA = CallForm("", "", "parameters")  # 3.1 and 3.2: the call is the whole turn


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


def call_form(tokenizer: Any) -> CallForm:
    """Return the form of calls in the tokenizer's chat template; that of Hermes if it has none that is known."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return LLAMA if "<tool_call>" not in template and '"parameters": ' in template else HERMES


def tool_schemas(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return name, description and parameters of functions with type hints and Google docstrings, as JSON schemas."""
    from transformers.utils import get_json_schema

    return [get_json_schema(tool)["function"] for tool in tools]


def tools_text(schemas: Sequence[Mapping[str, Any]], form: CallForm = HERMES) -> str:
    """Return the paragraph of a system message that tells the model of these tools."""
    listed = "\n".join(json.dumps({"type": "function", "function": schema}) for schema in schemas)
    call = f'{form.begin}{{"name": <function-name>, "{form.key}": <args-json-object>}}{form.end}'
    return (
        f"You may call one of these functions in a turn:\n<tools>\n{listed}\n</tools>\nA call has this form:\n{call}"
    )


def turn_grammar(
    schemas: Sequence[Mapping[str, Any]],
    form: CallForm = HERMES,
    marker: str = "",
    answer: str = "",
    most_thought_tokens: int | None = None,
) -> Grammar:
    """Return the grammar of a turn: free text, then one call of a tool, or `marker` and an answer.

    `answer` is a regular expression for what follows the marker. Without a marker, a turn without a call is free text.
    `most_thought_tokens` bounds the free text.
    """
    if not schemas and not marker:
        raise ValueError("a turn needs tools, or a marker before the answer")
    begin = form.begin.strip()
    if begin and marker and (begin in marker or marker in form.begin):
        raise ValueError(f"marker {marker!r} and the beginning of a call, {begin!r}, contain each other")
    starts = [start for start in (begin if schemas else "", marker) if start]
    thought: dict[str, Any] = {"type": "any_text", "excludes": starts, "max_tokens": most_thought_tokens}
    calls = [_call(schema, form) for schema in schemas]
    ends = (
        [{"type": "tag", "begin": marker, "content": _grammar(pattern_to_ebnf(answer)), "end": ""}] if marker else []
    )
    if not form.begin:  # a call is a turn of its own
        return Grammar.structural_tag(_either([*calls, _sequence(thought, *ends)]))
    if marker:
        return Grammar.structural_tag(_sequence(thought, _either([*calls, *ends])))
    return Grammar.structural_tag(_sequence(thought, {"type": "optional", "content": _either(calls)}))


def call_text(call: Call, form: CallForm = HERMES) -> str:
    """Return the text of a call."""
    written = json.dumps({"name": call.name, form.key: call.arguments}, ensure_ascii=False)
    return f"{form.begin}{written}{form.end}"


def in_form(turn: str, form: CallForm) -> str:
    """Return a turn with its call, if it has one, written in this form."""
    call = parse_call(turn)
    if call is None:
        return turn
    thought = turn.partition(HERMES.begin.strip())[0] if form.begin and _parsed(turn, HERMES) else ""
    return thought + call_text(call, form)


def parse_call(text: str) -> Call | None:
    """Return the call in a turn of any text, in one of the known forms, or None. A call of `turn_grammar` is always
    found.

    >>> parse_call('2 + 3: <tool_call>\\n{"name": "add", "arguments": {"a": 2, "b": 3}}\\n</tool_call>')
    Call(name='add', arguments={'a': 2, 'b': 3})
    """
    return _parsed(text, HERMES) or _parsed(text, LLAMA)


def _parsed(text: str, form: CallForm) -> Call | None:
    inner = text
    if form.begin:
        _, found, inner = text.partition(form.begin.strip())
        if not found:
            return None
        inner = inner.partition(form.end.strip())[0]
    try:
        given = json.loads(inner)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return None
    arguments = given.get(form.key, {})
    return Call(given["name"], arguments) if isinstance(arguments, dict) else None


def _call(schema: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    parameters = {"additionalProperties": False, **schema["parameters"]}
    begin = f'{form.begin}{{"name": {json.dumps(schema["name"])}, "{form.key}": '
    content = _grammar(str(Grammar.json_schema(parameters).parse()))
    return {"type": "tag", "begin": begin, "content": content, "end": f"}}{form.end}"}


def _grammar(ebnf: str) -> dict[str, str]:
    return {"type": "grammar", "grammar": ebnf}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _either(elements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}
