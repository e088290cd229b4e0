"""Thoughts in HTML: folded away where an answer is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def folded(thought: str) -> str:
    """Return the HTML of a thought as an element that stays closed until the reader opens it."""
    return f"<details><summary>thought</summary>{thought}</details>"


def fold_thought(completion: str, markers: Sequence[str], escape: Callable[[str], str]) -> tuple[str, str]:
    """Return the thought of a completion as folded HTML, made by `escape`, and the text of its answer.

    A completion without one of the markers has no thought, and is an answer as a whole.
    """
    from ..constraints.think import split_thought  # it loads numpy, which commands that only parse options do not need

    thought, answer = split_thought(completion, markers)
    return ("", thought) if answer is None else (folded(escape(thought)), answer)
