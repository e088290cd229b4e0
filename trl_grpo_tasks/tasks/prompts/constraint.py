"""Constraint for rows with a format: a JSON schema, the pattern of a regex reward, or a number after a thought."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ...constraints.grammar import Grammar, GrammarConstraint
from ...task import Row, printable

logger = logging.getLogger(__name__)


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


def answer_grammar(row: Row) -> Grammar | None:
    """Return the grammar of a row's answer after a thought: as `row_grammar`, and a number for numeric answers."""
    grammar = row_grammar(row)
    if grammar is None and row["rewards"].get("numeric") is not None:
        return Grammar.regex(r" ?-?[0-9]{1,30}(\.[0-9]{1,20})?")
    return grammar


def format_constraint(
    tokenizer: Any, rows: Sequence[Row], grammar_of: Callable[[Row], Grammar | None] = row_grammar
) -> GrammarConstraint:
    """Make the constraint. Grammars are compiled on first use, but those of `rows` are parsed now to report errors."""
    unenforced: dict[str, str] = {}
    for grammar in {grammar_of(row) for row in rows}:
        if grammar is not None:
            grammar.parse()
            unenforced |= grammar.unenforced()
    if unenforced:
        named = ", ".join(f"{keyword} (at {place})" for keyword, place in sorted(unenforced.items()))
        logger.warning(
            "the constraint does not enforce these keywords of schemas, so that samples may break them and only the "
            "reward notices: %s",
            printable(named),
        )
    return GrammarConstraint(tokenizer, grammar_of)
