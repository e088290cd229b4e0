"""Generates the tables and examples of the task pages (docs/tasks/*.md) from the code.

    python docs/make_task_pages.py            # rewrites the pages
    python docs/make_task_pages.py --check    # exits with 1 if a page is out of date

A page marks each generated block with two HTML comments, `<!-- generated: NAME -->` and `<!-- end -->`. This script
replaces what is between them; the rest of the page is written by hand. The folder task_pages makes the blocks.
tests/test_task_pages.py checks that the pages are up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from task_pages import BLOCKS

PAGES = Path(__file__).parent / "tasks"
_BLOCK = re.compile(r"(<!-- generated: ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    outdated = []
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = updated(text)
        if new != text:
            outdated.append(page.name)
            if not check:
                page.write_text(new, encoding="utf-8")
    print(f"{'out of date' if check else 'rewritten'}: {', '.join(outdated) or 'none'}")
    return int(check and bool(outdated))


def updated(text: str) -> str:
    """The text of a page with its generated blocks made again."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]().strip()}\n\n{match[3]}", text)


def block_names(text: str) -> list[str]:
    """The names of the generated blocks of a page."""
    return [match[2] for match in _BLOCK.finditer(text)]


if __name__ == "__main__":
    sys.exit(main())
