"""HTML and PNG pictures of filled texts, with fills coloured from red to green by the judge's score."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

Part = tuple[str, float | None]  # a piece of text and the score of a fill; None for original text
UNJUDGED = -1.0  # the score of a fill if there is no judge
STOPS = ((0.0, (205, 55, 45)), (0.5, (214, 160, 30)), (1.0, (40, 140, 75)))
GREY, INK = (110, 110, 110), (45, 50, 58)
COLUMNS = 72  # characters per line of the picture


def colour(score: float) -> tuple[int, int, int]:
    """Return red for 0, yellow for 0.5, green for 1, and grey if there is no judge."""
    if score == UNJUDGED:
        return GREY
    for (low, first), (high, second) in pairwise(STOPS):
        if score <= high:
            share = max(0.0, (score - low) / (high - low))
            red, green, blue = (round(a + share * (b - a)) for a, b in zip(first, second, strict=True))
            return red, green, blue
    return STOPS[-1][1]


def to_html(lines: Sequence[tuple[str, Sequence[Part]]]) -> str:
    """Return titled texts, one below the other, as HTML with everything escaped."""
    shown = []
    for title, parts in lines:
        text = "".join(_span(part, score) for part, score in parts)
        shown.append(
            f"<p style='margin:2px 0;color:#6e7781;font-size:85%'>{_escaped(title)}</p><p style='margin:0 0 8px;"
            f"white-space:pre-wrap;font-family:monospace'>{text}</p>"
        )
    return f"<div>{''.join(shown)}</div>"


def picture(lines: Sequence[tuple[str, Sequence[Part]]]) -> bytes:
    """Return titled texts, one below the other, as PNG."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ImportError("pictures of filled texts need pillow: pip install 'trl_grpo_tasks[infill]'") from error
    font: Any = ImageFont.load_default(18)
    small: Any = ImageFont.load_default(14)
    width, height = 11, 24  # of a character cell, in pixels
    rows: list[tuple[str, list[tuple[str, float | None]]]] = []
    for title, parts in lines:
        letters = [(letter, score) for part, score in parts for letter in part]
        cut = [letters[at : at + COLUMNS] for at in range(0, max(1, len(letters)), COLUMNS)]
        rows += [(title if number == 0 else "", line) for number, line in enumerate(cut)]
    titles = [title for title, _ in rows if title]
    columns = max([len(letters) for _, letters in rows] + [len(title) * 2 // 3 for title in titles])
    image = Image.new("RGB", (columns * width + 24, (len(rows) + len(titles)) * height + 16), "white")
    draw, y = ImageDraw.Draw(image), 8
    for title, letters in rows:
        if title:
            draw.text((12, y + 4), title.encode("ascii", "replace").decode(), fill=GREY, font=small)
            y += height
        for column, (letter, score) in enumerate(letters):
            x = 12 + column * width
            if score is not None:
                draw.rectangle((x, y, x + width - 1, y + height - 3), fill=_pale(colour(score)))
            ink = INK if score is None else colour(score)
            draw.text((x + width / 2, y + 18), letter, fill=ink, font=font, anchor="ms")
        y += height
    target = io.BytesIO()
    image.save(target, format="PNG")
    return target.getvalue()


def _span(part: str, score: float | None) -> str:
    if score is None:
        return _escaped(part)
    red, green, blue = colour(score)
    back = ",".join(map(str, _pale((red, green, blue))))
    said = "" if score == UNJUDGED else f" title='judge {score:.2f}'"
    return f"<b{said} style='color:rgb({red},{green},{blue});background:rgb({back})'>{_escaped(part)}</b>"


def _pale(rgb: tuple[int, int, int]) -> tuple[int, int, int]:
    red, green, blue = (255 - (255 - value) // 6 for value in rgb)
    return red, green, blue


def _escaped(text: str) -> str:
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"), quote=True)
