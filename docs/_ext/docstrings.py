"""Sphinx extension: docstrings, which are Markdown, as reStructuredText, which autodoc expects."""

import dataclasses
import re
from itertools import pairwise
from typing import Any

FENCE = "```"
INDENT = "    "


def to_rst(lines: list[str]) -> list[str]:
    """Markdown as the docstrings use it: `code`, fenced and indented blocks, lists, sections such as `Args:`."""
    rst: list[str] = []
    state = "text"  # or "fence", "literal", "section": the kind of block that `line` may continue
    for line, following in pairwise([*lines, ""]):
        text, is_indented = line.strip(), line.startswith(INDENT)
        if text.startswith(FENCE):
            rst += ["", f".. code-block:: {text.removeprefix(FENCE) or 'text'}", ""] if state != "fence" else [""]
            state = "text" if state == "fence" else "fence"
        elif state == "fence":
            rst.append(INDENT + line)
        elif state == "literal" and (is_indented or not text):
            rst.append(line)
        elif state == "section" and is_indented:
            item = re.match(r"    (\S[^:`]*): (.*)", line)
            rst.append(f"- ``{item[1]}``: {_inline(item[2])}" if item else f"  {_inline(text)}")
        elif re.fullmatch(r"[A-Z][\w ]*:", line) and following.startswith(INDENT):
            state = "section"
            rst += [line, ""]
        elif is_indented and (not rst or not rst[-1]):
            state = "literal"
            rst += ["::", "", line]
        else:
            starts_list = text.startswith("- ") and rst and rst[-1] and not rst[-1].lstrip().startswith("- ")
            rst += [""] if state != "text" or starts_list else []
            state = "text"
            rst.append(_inline(line))
    return rst


def _inline(line: str) -> str:
    """`code` as ``code``; characters that mean something to reStructuredText alone as themselves."""
    parts = re.split(r"(`+[^`]+`+)", line)
    parts[1::2] = [f"``{code.strip('`')}``" for code in parts[1::2]]
    parts[::2] = [re.sub(r"(?<!^)([*|\\])|(?<=\w)_(?!\w)", r"\\\g<0>", text) for text in parts[::2]]
    return "".join(parts)


def convert(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def shorten_signature(app: Any, kind: str, name: str, thing: Any, options: Any, arguments: Any, returns: Any) -> Any:
    """The fields of a dataclass are listed below its name; a signature would repeat them."""
    return ("", None) if dataclasses.is_dataclass(thing) else None


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", convert)
    app.connect("autodoc-process-signature", shorten_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
