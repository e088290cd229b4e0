"""What rows with a format may be answered with: their JSON schema, or the pattern of their regex reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...constraints.grammar import Grammar, GrammarConstraint
from ...task import Row


def row_grammar(row: Row) -> Grammar | None:
    """The grammar of a row's answer; None for a row that asks for no format.

    JSON is laid out as `json.dumps` does it, properties in the schema's order: one text for one value.
    """
    chosen = {name for name, weight in row["rewards"].items() if weight is not None}
    if row.get("schema") and chosen & {"schema", "fields", "json"}:
        return Grammar.json_schema(row["schema"])
    if row.get("pattern") and "regex" in chosen:
        return Grammar.regex(row["pattern"])
    return None


def format_constraint(tokenizer: Any, rows: Sequence[Row]) -> GrammarConstraint:
    """Compiled for `tokenizer` as rows come up; the grammars of `rows` are read now, so that mistakes show early."""
    for grammar in {row_grammar(row) for row in rows}:
        if grammar is not None:
            grammar.parse()
    return GrammarConstraint(tokenizer, row_grammar)
