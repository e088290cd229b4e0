"""Constraint for rows with a format: their JSON schema, or the pattern of their regex reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...constraints.grammar import Grammar, GrammarConstraint
from ...task import Row


def row_grammar(row: Row) -> Grammar | None:
    """Return the grammar of a row's answer, or None if the row has no format.

    JSON is formatted as by `json.dumps`, with properties in the schema's order, so each value has one text.
    """
    chosen = {name for name, weight in row["rewards"].items() if weight is not None}
    if row.get("schema") and chosen & {"schema", "fields", "json"}:
        return Grammar.json_schema(row["schema"])
    if row.get("pattern") and "regex" in chosen:
        return Grammar.regex(row["pattern"])
    return None


def format_constraint(tokenizer: Any, rows: Sequence[Row]) -> GrammarConstraint:
    """Make the constraint. Grammars are compiled on first use, but those of `rows` are parsed now to report errors."""
    for grammar in {row_grammar(row) for row in rows}:
        if grammar is not None:
            grammar.parse()
    return GrammarConstraint(tokenizer, row_grammar)
