"""Answers that a scorer of reasoning-gym would run as Python: which of them are data, and the refusal of all others.

Some scorers call `eval` or sympy's `parse_expr`, which calls it, on what the model wrote. `refuse_code` replaces the
first by a parser of literals; `unsafe_reason` finds what must not reach the second.
"""

from __future__ import annotations

import ast
import importlib
import re

# Data sets whose scorers call eval(answer), and those whose scorers call parse_expr(answer).
EVALUATED = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
PARSED = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
LONGEST = 1_000  # characters of an expression
EXPRESSION = re.compile(r"[\w\s+\-*/^(),.=|]*", re.ASCII)
FUNCTIONS = {
    "Abs", "abs", "acos", "acosh", "acot", "acsc", "asec", "asin", "asinh", "atan", "atanh", "cbrt", "cos", "cosh",
    "cot", "coth", "csc", "csch", "erf", "exp", "ln", "log", "pi", "sec", "sech", "sign", "sin", "sinh", "sqrt", "tan",
    "tanh",
}  # fmt: skip


def refuse_code() -> None:
    """Let the scorers that call `eval` read literals only; scores of answers that are literals stay the same."""
    for module in EVALUATED:
        vars(importlib.import_module(f"reasoning_gym.{module}"))["eval"] = ast.literal_eval


def unsafe_reason(data_set: str, answer: str) -> str:
    """Why this answer must not be parsed as an expression; "" if it may be, or if its data set parses none."""
    if data_set not in PARSED:
        return ""
    if len(answer) > LONGEST or not EXPRESSION.fullmatch(answer):
        return "the answer is not an arithmetic expression"
    # Without quotes and attributes, an expression runs no code but that of the functions it names.
    if re.search(r"\.\s*[A-Za-z_]", answer):
        return "the answer names an attribute, which no arithmetic expression does"
    unknown = sorted({name for name in re.findall(r"[A-Za-z_]\w*", answer) if len(name) > 1} - FUNCTIONS)
    return f"the answer names {unknown[0]!r}, which is neither a variable nor a known function" if unknown else ""
