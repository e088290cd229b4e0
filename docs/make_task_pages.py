"""Generates the tables and examples of the task pages and the reference from the code, and writes the expected results
of recipes (trl_grpo_tasks/recipes/expected.yaml) wherever they are stated.

    python docs/make_task_pages.py            # rewrites the pages and the comments of the recipes
    python docs/make_task_pages.py --check    # exits with 1 if a file is out of date

A page marks what is generated with two HTML comments: `<!-- generated: NAME -->` for a block of the folder task_pages,
`<!-- expected: RECIPE -->` for a recipe's result in one line, or `<!-- output: RECIPE -->` for the table that it
prints; and `<!-- end -->`. This script replaces what is between them. In a recipe it writes the comment `# Expected:`;
docs/reference/commands.txt is generated as a whole.
tests/test_task_pages.py checks that the files are up to date.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from task_pages import BLOCKS

from trl_grpo_tasks.commands.recipes import expected_result, expected_results

ROOT = Path(__file__).parent.parent
COMMANDS = ROOT / "docs" / "reference" / "commands.txt"
FILES = [ROOT / "README.md", COMMANDS, *sorted([
    *ROOT.glob("docs/tasks/*.md"), *ROOT.glob("docs/start/*.md"), *ROOT.glob("docs/reference/*.md"),
    *ROOT.glob("trl_grpo_tasks/tasks/*/README.md"), *ROOT.glob("trl_grpo_tasks/recipes/*/*.yaml"),
])]  # fmt: skip
_BLOCK = re.compile(r"(<!-- generated: ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_EXPECTED = re.compile(r"(<!-- expected: ([\w/]+) -->).*?(<!-- end -->)", re.DOTALL)
_OUTPUT = re.compile(r"(<!-- output: ([\w/]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_COMMENT = re.compile(r"# Expected: .*\n(?:#   .*\n)*")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    outdated = []
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        new = regenerated(file, text)
        if new != text:
            outdated.append(os.path.relpath(file, ROOT))
            if not check:
                file.write_text(new, encoding="utf-8")
    print(f"{'out of date' if check else 'rewritten'}: {', '.join(outdated) or 'none'}")
    return int(check and bool(outdated))


def regenerated(file: Path, text: str) -> str:
    """What a file that holds `text` should hold."""
    if file == COMMANDS:
        return BLOCKS["reference.command_screens"]()
    return updated(text) if file.suffix == ".md" else updated_recipe(text, f"{file.parent.name}/{file.stem}")


def updated(text: str) -> str:
    """The text of a page with what is generated made again."""
    text = _BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]().strip()}\n\n{match[3]}", text)
    text = _EXPECTED.sub(lambda match: f"{match[1]}{expected_result(match[2])}{match[3]}", text)
    outputs = {name: entry["output"] for name, entry in expected_results().items() if "output" in entry}
    return _OUTPUT.sub(lambda match: f"{match[1]}\n```text\n{outputs[match[2]]}```\n\n{match[3]}", text)


def updated_recipe(text: str, name: str) -> str:
    """The text of a recipe with its expected result in the comment after the first line."""
    first, _, rest = text.partition("\n")
    lines = textwrap.wrap(f"Expected: {expected_result(name)}.", 117, break_on_hyphens=False)
    comment = "# " + "\n#   ".join(lines) + "\n"
    return f"{first}\n{comment}{_COMMENT.sub('', rest)}"


def block_names(text: str) -> list[str]:
    """The names of the generated blocks of a page."""
    return [match[2] for match in _BLOCK.finditer(text)]


if __name__ == "__main__":
    sys.exit(main())
