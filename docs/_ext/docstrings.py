"""Sphinx extension: docstrings and help texts, which are Markdown, as reStructuredText, which autodoc expects."""

import dataclasses
import re
from importlib import import_module
from typing import Any

FENCE = "```"


def to_rst(lines: list[str]) -> list[str]:
    """Markdown as the docstrings use it: `code`, fenced and indented blocks, lists, text with any characters."""
    converted: list[str] = []
    is_fenced = False
    for line in lines:
        text = line.strip()
        if text.startswith(FENCE):
            is_fenced = not is_fenced
            converted += ["", f".. code-block:: {text.removeprefix(FENCE) or 'text'}", ""] if is_fenced else [""]
        elif is_fenced:
            converted.append(f"    {line}")
        elif line.startswith("    ") and converted and not converted[-1].strip():
            converted += ["::", "", line]  # an indented block stays as it is
        elif line.startswith("    ") and converted and converted[-1].startswith("    "):
            converted.append(line)
        else:
            is_item = text.startswith(("- ", "* "))
            if is_item and converted and converted[-1].strip() and not converted[-1].lstrip().startswith("- "):
                converted.append("")
            converted.append(_inline(line))
    return converted


def _inline(line: str) -> str:
    """`code` as ``code``; characters that mean something to reStructuredText alone as themselves."""
    parts = re.split(r"(`+[^`]+`+)", line)
    parts[1::2] = [f"``{code.strip('`')}``" for code in parts[1::2]]
    parts[::2] = [re.sub(r"(?<!^)([*|\\])|(?<=\w)_(?!\w)", r"\\\g<0>", text) for text in parts[::2]]
    return "".join(parts)


def fill_in(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Take the text of a dataclass field from its help."""
    if kind == "attribute" and (text := help_of(name)):
        lines[:] = [text]
    lines[:] = to_rst(lines)


def help_of(name: str) -> str:
    """The help of the dataclass field with a dotted name, or nothing."""
    module, owner, attribute = name.rsplit(".", 2)
    fields = getattr(getattr(import_module(module), owner), "__dataclass_fields__", {})
    found: dataclasses.Field[Any] | None = fields.get(attribute)
    return found.metadata.get("help", "") if found else ""


def shorten_signature(app: Any, kind: str, name: str, thing: Any, options: Any, arguments: Any, returns: Any) -> Any:
    """The fields of a dataclass are listed below its name; a signature would repeat them."""
    return ("", None) if dataclasses.is_dataclass(thing) else None


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", fill_in)
    app.connect("autodoc-process-signature", shorten_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
