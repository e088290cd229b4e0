"""Rendering of the files in the folder `templates`. Values are escaped in HTML; Markdown has filters for them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from .run_folder import duration, is_number


def render(template: str, /, **values: Any) -> str:
    """Return a template, filled with the values."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["number"] = is_number
    environment.filters |= {
        "duration": duration, "fenced": fenced, "code": code, "in_table": in_table, "literal": literal,
        "keywords": keywords, "quoted": shlex.quote,
    }  # fmt: skip
    return environment


def fenced(text: str, language: str = "text") -> str:
    """Format text as a code block whose fence is longer than any run of tildes in `text`, which thus cannot end it."""
    fence = "~" * max([4, *(len(tildes) + 1 for tildes in re.findall("~+", text))])
    return f"{fence}{language}\n{text}\n{fence}"


def code(text: str) -> str:
    """Format text as a code span in one line; Markdown and HTML in it have no effect, and it cannot end the span."""
    text = " ".join(text.split())
    ticks = "`" * max([1, *(len(backticks) + 1 for backticks in re.findall("`+", text))])
    space = " " if "`" in text else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def in_table(text: str) -> str:
    """Format text as a code span for a cell of a table."""
    return code(text).replace("|", "\\|")


def literal(value: Any) -> str:
    """Text, or a list of messages, as a Python literal in one line."""
    return json.dumps(value, ensure_ascii=False)


def keywords(values: Mapping[str, Any]) -> str:
    """Format values as the keyword arguments of a call in Python."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
