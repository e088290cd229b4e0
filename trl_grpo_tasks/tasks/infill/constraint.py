"""What a causal model may write: for each gap a line of the right length, and nothing else."""

from __future__ import annotations

from typing import Any

from ...constraints.grammar import Grammar, GrammarConstraint
from ...task import Row
from .fills import lengths


def fills_constraint(tokenizer: Any) -> GrammarConstraint:
    return GrammarConstraint(tokenizer, fills_grammar)


def fills_grammar(row: Row) -> Grammar:
    """A line a gap; its length in characters is exact, or within the row's slack."""
    return Grammar.regex(r"\n".join(rf"[^\n]{{{least},{most}}}" for least, most in lengths(row)))
