"""What a reward of the prompts task returns, and how it finds a fenced block in a completion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

LONGEST_TEXT = 100_000  # characters; longer answers are cut or rejected, which keeps rewards fast

_FENCE = re.compile(r"```[ \t]{0,9}([A-Za-z0-9_+.-]{0,20})[ \t]{0,9}\r?\n(.*?)(?:```|\Z)", re.DOTALL)


class Verdict(NamedTuple):
    """The result of one reward: a value in [0, 1], why it is below 1, and whether an answer could be parsed."""

    value: float
    reason: str = ""
    readable: bool = True


class CannotJudgeError(Exception):
    """Raised when the reward itself failed, e.g. a sandbox did not start or a pattern ran too long."""


def fenced(text: str, languages: Sequence[str]) -> str | None:
    """Return the last fenced block in one of the languages, else the last fenced block, else None."""
    blocks = _FENCE.findall(text)
    named = [body for language, body in blocks if language.lower() in languages]
    bodies = named or [body for _, body in blocks]
    return bodies[-1] if bodies else None


def is_encodable(text: str) -> bool:
    """Tell whether `text` can be written as UTF-8; lone surrogates cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
