"""Constraint for causal models: one line of the right length per gap, and nothing else."""

from __future__ import annotations

from typing import Any

from ...constraints.grammar import Grammar, GrammarConstraint
from ...task import Row
from .masking import runs


def fills_constraint(tokenizer: Any) -> GrammarConstraint:
    return GrammarConstraint(tokenizer, fills_grammar)


def fills_grammar(row: Row) -> Grammar:
    """Return the grammar of a row: one line per gap with the exact length in characters."""
    return Grammar.regex(r"\n".join(rf"[^\n]{{{len(run)}}}" for run in runs(row["places"])))
