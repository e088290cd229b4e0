"""What the grammar of a JSON schema does not enforce, and what it would enforce wrongly.

A grammar that is wider than its schema costs samples, so its keywords are reported. A grammar that excludes answers
that the schema accepts makes success impossible, so such schemas are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .patterns import pattern_to_ebnf

# xgrammar (up to 0.2.8) ignores these.
_IGNORED = {
    "not", "if", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired", "dependentSchemas",
    "dependencies", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
# xgrammar reads the first of these that a schema has, and ignores the other keywords of that schema.
_READ_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_ANNOTATIONS = {
    "$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly", "nullable",
}  # fmt: skip
_NEED_A_TYPE = {
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "pattern", "minLength", "maxLength",
    "format",
}  # fmt: skip


def unenforced_keywords(schema: Any) -> dict[str, str]:
    """Return the keywords that a grammar of `schema` does not enforce, with the first place of each.

    ValueError, with a way out, if the grammar would exclude right answers.

    >>> unenforced_keywords({"properties": {"a": {"type": "array", "uniqueItems": True}}})
    {'uniqueItems': '$.properties.a'}
    """
    found: dict[str, str] = {}
    seen: set[int] = set()
    left = [("$", schema)]
    for place, part in left:
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            _check(part, place)
            for keyword in _unenforced_here(part):
                found.setdefault(keyword, place)
            left += _parts(schema, part, place)
    return found


def _check(schema: dict[str, Any], place: str) -> None:
    """Raise ValueError if the grammar would exclude answers that the schema accepts."""
    if any(keyword in schema for keyword in _READ_ALONE):
        return  # the keywords below are ignored then
    way_out = "or do without the constraint (--constrain false)"
    patterns = [schema["pattern"]] if "pattern" in schema and "string" in _types(schema) else []
    for pattern in [*patterns, *schema.get("patternProperties", ())]:
        if not _is_anchored(pattern):
            raise ValueError(
                f"the constraint would require all of a text to match the pattern {pattern!r} of the schema at "
                f"{place}, but a schema only searches for it; write ^(...)$, with .* where other text may stand, "
                f"{way_out}"
            )
        pattern_to_ebnf(pattern)  # xgrammar ignores what it cannot express
        if special := re.search(r"\(\?(?!:)[^)]?|\\[pPAZzN]", pattern):
            raise ValueError(
                f"the constraint cannot enforce {special[0]!r} in the pattern {pattern!r} of the schema at {place}; "
                f"rewrite the pattern without it, {way_out}"
            )
    missing = [name for name in schema.get("required", ()) if name not in schema.get("properties", ())]
    is_open = schema.get("additionalProperties") not in (None, False) or "patternProperties" in schema
    if missing and not is_open and ("object" in _types(schema) or "properties" in schema):
        raise ValueError(
            f"the schema at {place} requires {missing[0]!r}, which is not among its properties, so that the "
            f"constraint excludes it; add it to the properties, {way_out}"
        )


def _types(schema: dict[str, Any]) -> list[str]:
    kind = schema.get("type", [])
    return [kind] if isinstance(kind, str) else kind


def _is_anchored(pattern: str) -> bool:
    """Whether a search for the pattern matches whole texts only: one alternative from ^ to $."""
    inside = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)
    while (shorter := re.sub(r"\([^()]*\)", "x", inside)) != inside:
        inside = shorter
    return inside.startswith("^") and inside.endswith("$") and "|" not in inside


def _unenforced_here(schema: dict[str, Any]) -> Iterator[str]:
    yield from (keyword for keyword in schema if keyword in _IGNORED and schema[keyword] is not False)
    read = next((keyword for keyword in _READ_ALONE if keyword in schema), None)
    beside = {keyword: schema[keyword] for keyword in schema if keyword not in _ANNOTATIONS | _IGNORED | {read}}
    if read is not None:
        values = {"const": [schema.get("const")], "enum": schema.get("enum", [])}.get(read)
        if values is None or not _all_match(values, beside):
            yield from (f"{keyword} beside {read}" for keyword in beside)
        if read == "allOf" and len(schema["allOf"]) > 1:
            yield "allOf"
        if read == "oneOf" and not _are_disjoint(schema["oneOf"]):
            yield "oneOf"
        return
    if "type" not in schema:
        yield from (f"{keyword} without type" for keyword in schema if keyword in _NEED_A_TYPE)
    if "number" in _types(schema) and "multipleOf" in schema:
        yield "multipleOf of numbers"
    for text in ("format", "pattern"):
        others = ("pattern", "minLength", "maxLength") if text == "format" else ("minLength", "maxLength")
        yield from (f"{other} beside {text}" for other in others if text in schema and other in schema)
    if "propertyNames" in schema and ("properties" in schema or "patternProperties" in schema):
        yield "propertyNames beside properties"
    patterns = schema.get("patternProperties", {})
    if len(patterns) > 1 or any(
        re.search(pattern, name) for pattern in patterns for name in schema.get("properties", ())
    ):
        yield "patternProperties that overlap"
    yield from ("required" for name in schema.get("required", ()) if name not in schema.get("properties", ()))


def _all_match(values: list[Any], schema: dict[str, Any]) -> bool:
    from jsonschema import Draft202012Validator
    from referencing.exceptions import Unresolvable

    try:
        return all(map(Draft202012Validator(schema).is_valid, values))
    except Unresolvable:
        return False


def _are_disjoint(branches: list[Any]) -> bool:
    """Whether no value matches two branches, as far as their constants, types and constant properties tell."""
    if not all(isinstance(branch, dict) for branch in branches):
        return False
    signs = [branch.get("properties", {}) for branch in branches]
    for name in signs[0]:
        tags = [sign.get(name) for sign in signs]
        is_tag = all(isinstance(tag, dict) and "const" in tag for tag in tags)
        if is_tag and all(name in branch.get("required", ()) for branch in branches):
            return len({repr(tag["const"]) for tag in tags}) == len(tags)
    if all("const" in branch for branch in branches):
        return len({repr(branch["const"]) for branch in branches}) == len(branches)
    kinds = ["number" if branch.get("type") == "integer" else branch.get("type") for branch in branches]
    return all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds)


def _parts(whole: Any, schema: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """Return the schemas that apply to a value of `schema` or to its parts, with their places."""
    for keyword in ("properties", "patternProperties"):
        yield from ((f"{place}.{keyword}.{name}", part) for name, part in schema.get(keyword, {}).items())
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        yield from ((f"{place}.{keyword}[{index}]", part) for index, part in enumerate(schema.get(keyword, ())))
    for keyword in ("items", "additionalProperties"):
        yield f"{place}.{keyword}", schema.get(keyword)
    if isinstance(schema.get("propertyNames"), dict):
        yield f"{place}.propertyNames", {"type": "string", **schema["propertyNames"]}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        part = whole
        for name in filter(None, reference[1:].split("/")):
            name = name.replace("~1", "/").replace("~0", "~")
            part = part.get(name) if isinstance(part, dict) else None
        yield reference, part
