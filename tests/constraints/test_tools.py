"""Turns that call tools: a text is allowed exactly where a plain description of turns says so."""

import json
import re

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tokenizer_makes import byte_level
from tests.support.walks import allows
from trl_grpo_tasks.constraints.grammar import GrammarConstraint
from trl_grpo_tasks.constraints.tools import (
    HERMES,
    LLAMA,
    Call,
    call_form,
    parse_call,
    tool_schemas,
    tools_text,
    turn_grammar,
)


def add(a: int, b: int = 0):
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def search(words: str, most: int = 3):
    """Find pages.

    Args:
        words: What they are about.
        most: At most this many.
    """


TOOLS = tool_schemas([add, search])
ANSWER = r" -?[0-9]{1,5}"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


@pytest.fixture(scope="module")
def constraints(tokenizer):
    made = {}
    for form in (HERMES, LLAMA):
        for marker in ("####", ""):
            grammar = turn_grammar(TOOLS, form, marker, ANSWER)
            made[form, marker] = GrammarConstraint(tokenizer, grammar)
    return made


def is_allowed(constraint, tokenizer, text):
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return allows(constraint, {"prompt": "q"}, ids)


def is_turn(text, form, marker):
    """The same rules, written down with json, jsonschema and re."""
    start = form.begin.strip()
    places = [text.find(mark) for mark in (start, marker) if mark and mark in text]
    thought = text[: min(places)] if places else text
    rest = text[len(thought) :]
    if marker and rest.startswith(marker):
        return bool(re.fullmatch(ANSWER, rest[len(marker) :]))
    body = rest if start else text
    if not start and not marker:
        return True
    if start and not rest:
        return not marker
    begin, end = re.escape(form.begin), re.escape(form.end)
    match = re.fullmatch(begin + r'(\{"name": "(\w+)", "' + form.key + r'": (.*)\})' + end, body, re.S)
    schema = next((tool for tool in TOOLS if match and tool["name"] == match[2]), None)
    if schema is None:
        return False
    try:
        arguments = json.loads(match[3])
        jsonschema.validate(arguments, {**schema["parameters"], "additionalProperties": False})
    except (ValueError, jsonschema.ValidationError):
        return False
    order = [name for name in schema["parameters"]["properties"] if name in arguments]
    return match[3] == json.dumps(arguments, ensure_ascii=False) and list(arguments) == order


def call(name, arguments, form=HERMES):
    return f'{form.begin}{{"name": "{name}", "{form.key}": {json.dumps(arguments, ensure_ascii=False)}}}{form.end}'


CALLS = [("add", {"a": 1, "b": 2}), ("add", {"a": 1}), ("add", {"b": 1}), ("add", {"a": "1"}), ("remove", {}),
         ("add", {"b": 1, "a": 2}), ("add", {"a": 1, "c": 2}), ("search", {"words": 'q "é"\n'})]  # fmt: skip
TEXTS = ["", "a thought", "a <tool", "x #### 12", "#### -3", "#### 123456", "####12", "x #### 1 more", "## ## 1",
         *(before + call(*made, form) + after for form in (HERMES, LLAMA) for before in ("", "I add: ")
           for after in ("", " ") for made in CALLS)]  # fmt: skip


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=["hermes", "llama"])
@pytest.mark.parametrize("marker", ["####", ""])
def test_exactly_the_described_turns_are_allowed(constraints, tokenizer, form, marker):
    found = {text: is_allowed(constraints[form, marker], tokenizer, text) for text in TEXTS}
    expected = {text: is_turn(text, form, marker) for text in TEXTS}
    assert found == expected
    assert any(found.values()) and (not all(found.values()) or not (marker or form.begin))


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "\n", '{"name": "add", "arguments": ', '{"a": 1}', "}",
                                 "####", " 7", "x", '"', "{", "é"]), max_size=7).map("".join))  # fmt: skip
def test_any_text_is_parsed_and_allowed_calls_are_found(constraints, tokenizer, text):
    found = parse_call(text)
    assert found is None or isinstance(found, Call)
    if is_allowed(constraints[HERMES, "####"], tokenizer, text):
        assert is_turn(text, HERMES, "####")
        assert (found is None) == ("####" in text.split("<tool_call>")[0])


def test_forms_follow_the_chat_template(tokenizer):
    class Tokenizer:
        chat_template = "{{ '<tool_call>' }}"

    assert call_form(Tokenizer) == HERMES and call_form(object()) == HERMES
    Tokenizer.chat_template = "{{ '\"parameters\": ' }}"
    assert call_form(Tokenizer) == LLAMA
    text = tools_text(TOOLS)
    lines = text.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line)["function"]["name"] for line in lines] == ["add", "search"]


def test_turns_that_cannot_be_told_apart_are_refused():
    with pytest.raises(ValueError, match="needs tools, or a marker"):
        turn_grammar([])
    with pytest.raises(ValueError, match="contain each other"):
        turn_grammar(TOOLS, HERMES, "<tool_call>!", ANSWER)
