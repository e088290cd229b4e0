"""Sphinx extension: links to pages of benchmarks/results, which are not part of the site, become downloads."""

import re
from typing import Any

LINK = re.compile(r"\[([^\]`]+)\]\(((?:\.\./)+benchmarks/results/[^)#]+)(?:#[^)]*)?\)")


def to_downloads(app: Any, page: str, source: list[str]) -> None:
    source[0] = LINK.sub(r"{download}`\1 <\2>`", source[0])


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", to_downloads)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
