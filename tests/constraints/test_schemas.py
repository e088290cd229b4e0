"""JSON schemas as constraints: what they allow is valid, except for keywords that are reported as not enforced."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from trl_grpo_tasks.constraints.base import unpack
from trl_grpo_tasks.constraints.grammar import Grammar, GrammarConstraint
from trl_grpo_tasks.constraints.vocabulary import Vocabulary

CHARACTERS = [chr(code).encode() for code in range(32, 127)]
VOCABULARY = Vocabulary([*CHARACTERS, None], eos=len(CHARACTERS))
INTEGER, BOOLEAN, STRING = {"type": "integer"}, {"type": "boolean"}, {"type": "string"}
PROPERTIES = {"a": INTEGER, "b": BOOLEAN}


def samples(schema, count):
    """Texts that the constraint allows, as random walks that prefer to close what is open."""
    constraint, rng = GrammarConstraint(VOCABULARY, Grammar.json_schema(schema)), random.Random(0)
    for _ in range(count):
        state, text = constraint.start({}), b""
        while not state.finished and len(text) < 150:
            allowed = np.flatnonzero(unpack(state.mask(), VOCABULARY.size))
            closing = [token for token in allowed if token == VOCABULARY.eos or CHARACTERS[token] in b'"}],']
            token = int(rng.choice(closing if closing and rng.random() < 0.5 else allowed))
            state.accept(token)
            text += CHARACTERS[token] if token != VOCABULARY.eos else b""
        if state.finished:
            yield text.decode()


def objects(**keywords):
    return {"type": "object", **keywords}


NOT_ENFORCED = {
    "not": {"type": "boolean", "not": {"const": True}},
    "uniqueItems": {"type": "array", "items": BOOLEAN, "uniqueItems": True, "minItems": 2, "maxItems": 3},
    "contains": {"type": "array", "items": BOOLEAN, "contains": {"const": True}, "minItems": 1, "maxItems": 2},
    "if": objects(properties=PROPERTIES, **{"if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    "dependentRequired": objects(properties=PROPERTIES, dependentRequired={"a": ["b"]}),
    "dependentSchemas": objects(properties=PROPERTIES, dependentSchemas={"a": {"required": ["b"]}}),
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]},
    "type beside allOf": {"type": "integer", "allOf": [{"minimum": 3}]},
    "oneOf": {"oneOf": [INTEGER, {"type": "number", "minimum": 5}]},
    "properties beside anyOf": objects(properties=PROPERTIES, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
    "minimum beside $ref": {"$ref": "#/$defs/n", "minimum": 300, "$defs": {"n": INTEGER}},
    "minimum beside enum": {"enum": [1, 5], "minimum": 3},
    "type beside const": {"const": 1, "type": "string"},
    "minimum without type": {"minimum": 300},
    "pattern without type": {"pattern": "^a$"},
    "multipleOf of numbers": {"type": "number", "multipleOf": 0.5},
    "minLength beside pattern": {"type": "string", "pattern": "^[a-c]+$", "minLength": 3},
    "maxLength beside format": {"type": "string", "format": "date", "maxLength": 3},
    "pattern beside format": {"type": "string", "format": "date", "pattern": "^x$"},
    "propertyNames beside properties": objects(properties=PROPERTIES, propertyNames={"enum": ["a"]}),
    "patternProperties that overlap": objects(
        properties={"a": BOOLEAN}, patternProperties={"^a$": {"const": True}}, required=["a"]
    ),
    "required": objects(properties={"a": INTEGER}, required=["z"], additionalProperties=INTEGER),
}


@pytest.mark.parametrize("keyword", NOT_ENFORCED)
def test_keywords_that_a_grammar_does_not_enforce_are_reported(keyword):
    schema = NOT_ENFORCED[keyword]
    assert keyword in Grammar.json_schema(schema).unenforced()
    nested = objects(
        properties={"x": {"type": "array", "items": {"$ref": "#/$defs/part"}}}, **{"$defs": {"part": schema}}
    )
    nested["$defs"] |= schema.get("$defs", {})
    assert Grammar.json_schema(nested).unenforced()[keyword] == "#/$defs/part"
    checker = Draft202012Validator(schema)
    assert not all(checker.is_valid(json.loads(text)) for text in samples(schema, 60)), (
        "it is enforced: report it no more"
    )


scalars = st.one_of(
    st.just(INTEGER), st.just(BOOLEAN), st.just({"type": "null"}), st.just({"type": "string", "maxLength": 3}),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, st.integers(-20, 20),
              st.integers(0, 30)),
    st.builds(lambda low, size: {"type": "number", "minimum": low, "exclusiveMaximum": low + size},
              st.sampled_from([-1.5, 0, 2]), st.sampled_from([1, 2.5])),
    st.just({"type": "string", "enum": ["x", "y z"], "description": "one of two"}),
    st.just({"const": [1, {"k": None}]}),
    st.just({"type": "string", "pattern": "^[a-c]{1,2}(x|y)$"}), st.just({"type": ["integer", "null"], "minimum": 2}),
    st.just({"type": "integer", "multipleOf": 3}), st.just({"type": "string", "minLength": 1, "maxLength": 2}),
    st.sampled_from([NOT_ENFORCED["allOf"], NOT_ENFORCED["not"], NOT_ENFORCED["oneOf"]]),
)  # fmt: skip


def extended(inner):
    names = st.lists(st.sampled_from("abc"), max_size=2, unique=True)
    return st.one_of(
        st.builds(lambda parts, needed: objects(properties=parts, required=[n for n in needed if n in parts],
                                                additionalProperties=False),
                  st.dictionaries(st.sampled_from("abc"), inner, max_size=3), names),
        st.builds(lambda part, low: {"type": "array", "items": part, "minItems": low, "maxItems": low + 1}, inner,
                  st.integers(0, 2)),
        st.builds(lambda first, rest: {"type": "array", "prefixItems": [first], "items": rest, "minItems": 1}, inner,
                  st.one_of(st.just(False), inner)),
        st.lists(inner, min_size=2, max_size=2).map(lambda parts: {"anyOf": parts, "title": "either"}),
        st.lists(inner, min_size=2, max_size=2).map(lambda parts: {"oneOf": parts}),
        inner.map(lambda part: {"$ref": "#/$defs/part", "$defs": {"part": part}}),
    )  # fmt: skip


@settings(max_examples=60)
@given(
    st.recursive(scalars, extended, max_leaves=5).filter(lambda schema: json.dumps(schema).count("$defs") in (0, 2))
)
def test_what_a_schema_without_reported_keywords_allows_is_valid(schema):
    definitions = json.dumps(schema).partition('"$defs": ')[2]
    if definitions:  # references are resolved from the top
        schema = {**schema, "$defs": json.JSONDecoder().raw_decode(definitions)[0]}
    if Grammar.json_schema(schema).unenforced():
        return
    checker = Draft202012Validator(schema)
    for text in samples(schema, 8):
        assert checker.is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"type": "string", "pattern": "@"},
            r"all of a text to match the pattern '@' .* at \$, but .*--constrain false",
        ),
        (objects(properties={"a": {"type": "string", "pattern": "^[A-Z]"}}), r"at \$.properties.a"),
        ({"type": "string", "pattern": "^a|b$"}, "searches for it"),
        (objects(patternProperties={"^x": INTEGER}), r"write \^\(\.\.\.\)\$"),
        ({"type": "string", "pattern": "^(?!a).$"}, "cannot enforce a lookahead"),
        ({"type": "string", "pattern": r"^a\bb$"}, "cannot enforce a word boundary"),
        ({"type": "string", "pattern": "^(?i:a)$"}, r"cannot enforce '\(\?i'"),
        (objects(properties=PROPERTIES, required=["z"]), "requires 'z', which is not among its properties"),
        (objects(required=["z"], additionalProperties=False), "add it to the properties, or do without"),
    ],
)
def test_schemas_whose_grammar_excludes_right_answers_are_refused(schema, reason):
    with pytest.raises(ValueError, match=reason):
        Grammar.json_schema(schema).parse()


def test_a_recursive_schema_is_walked_once():
    node = objects(properties={"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node, "unused": NOT_ENFORCED["not"]}}
    assert Grammar.json_schema(schema).unenforced() == {}
