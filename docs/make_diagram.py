"""Draws docs/images/architecture.svg from docs/architecture.diagram: python docs/make_diagram.py"""

import html
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
SOURCE, IMAGE = HERE / "architecture.diagram", HERE / "images" / "architecture.svg"
COLOURS = {"trainer.py": "#dbeafe", "rewarding.py": "#dcfce7", "scoring.py": "#fef3c7", "generation.py": "#fae8ff"}
WIDTH, BOX, STAGE, GAP, LINE = 860, 540, 50, 18, 17


def stages(source: str) -> list[tuple[str, str, str]]:
    """(file, what happens, fields of the record) of each line of the source."""
    lines = [line for line in source.splitlines() if line and not line.startswith("#")]
    return [tuple(part.strip() for part in line.split("|")) for line in lines]  # type: ignore[misc]


def svg(source: str) -> str:
    """The diagram: one box per stage, arrows between them, and the fields of the record on the right."""
    parts, top = [], 10
    for number, (file, what, fields) in enumerate(stages(source), 1):
        if number > 1:
            parts.append(f'<path d="M 280 {top - GAP} V {top - 2}" stroke="#475569" marker-end="url(#tip)"/>')
        parts.append(f'<rect x="10" y="{top}" width="{BOX}" height="{STAGE}" rx="8" fill="{COLOURS[file]}" '
                     'stroke="#475569"/>')  # fmt: skip
        parts.append(f'<text x="24" y="{top + 21}" font-weight="bold">{number}. {file}</text>')
        parts.append(f'<text x="24" y="{top + 40}">{html.escape(what)}</text>')
        if fields:
            arrow = f"M {BOX + 10} {top + STAGE // 2} H {BOX + 48}"
            parts.append(f'<path d="{arrow}" stroke="#475569" stroke-dasharray="4" marker-end="url(#tip)"/>')
            rows = textwrap.wrap(fields, 30)
            for row, line in enumerate(rows):
                y = top + STAGE // 2 + 5 + LINE * (row - (len(rows) - 1) / 2)
                parts.append(f'<text x="{BOX + 58}" y="{y:g}" font-family="monospace">{html.escape(line)}</text>')
        top += STAGE + GAP
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" '
        'font-family="sans-serif" font-size="14" fill="#0f172a">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M 0 0 L 8 4 L 0 8 z" fill="#475569"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{top}" fill="white"/>',
        *parts,
        "</svg>\n",
    ])  # fmt: skip


if __name__ == "__main__":
    IMAGE.write_text(svg(SOURCE.read_text()))
