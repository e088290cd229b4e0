"""Texts for the infill task: passages of a file, a Hub data set, or the corpus that comes with the package."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ...files import check_local_path
from ...task import MASK_TOKEN

BUILT_IN = Path(__file__).parent / "corpus" / "persuasion.txt"
GAP = "_"  # marks one missing character in prompts and in user input
SHORTEST = 16  # minimum length of a passage in characters


def read_passages(source: str | None, column: str) -> list[str]:
    """Return the passages of a text file (separated by blank lines), a Hub data set's column, or the built-in corpus.

    Whitespace is reduced to single spaces. Raises ValueError if there is no text.
    """
    if source is not None:
        check_local_path(source, "--corpus")
    path = BUILT_IN if source is None else Path(source).expanduser()
    if path.is_file():
        try:
            texts = re.split(r"\n\s*\n", path.read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ValueError(f"--corpus {source} is not UTF-8 text: {error}") from error
    elif source is not None and re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", source) and not path.parent.is_dir():
        texts = _read_hub(source, column)
    else:
        raise ValueError(f"--corpus {source!r} is neither a text file nor a Hub data set (owner/name)")
    passages = list(dict.fromkeys(text for text in map(clean, texts) if len(text) >= SHORTEST))
    if not passages:
        raise ValueError(f"--corpus {source}: it contains no passage of at least {SHORTEST} characters")
    return passages


def clean(text: str) -> str:
    """Reduce whitespace to single spaces and remove gap markers."""
    return " ".join(text.replace(MASK_TOKEN, "").replace(GAP, " ").split())


def _read_hub(source: str, column: str) -> list[str]:
    from datasets import load_dataset

    name, _, configuration = source.partition(":")
    try:
        rows = load_dataset(name, configuration or None, split="train")
    except (OSError, ValueError) as error:
        raise ValueError(f"--corpus {source} cannot be loaded: {str(error).splitlines()[0]}") from error
    if column not in rows.column_names:
        raise ValueError(f"--corpus {source} has no column {column!r}; columns are: {', '.join(rows.column_names)}")
    return [str(text) for text in rows[column]]


def cut(passages: Sequence[str], test_fraction: float) -> dict[str, list[str]]:
    """Split passages into training and test by a hash of their text, with at least one in each."""
    ranked = sorted(passages, key=lambda text: hashlib.sha256(text.encode(errors="replace")).digest())
    if len(ranked) < 2:
        raise ValueError(
            "the corpus is a single passage; separate passages by blank lines, so that some can be held out"
        )
    tested = set(ranked[: min(len(ranked) - 1, max(1, round(test_fraction * len(ranked))))])
    return {
        "train": [text for text in passages if text not in tested],
        "test": [text for text in passages if text in tested],
    }


def window(passages: Sequence[str], weights: Sequence[int], length: int, rng: random.Random) -> str:
    """Return whole words of up to `length` characters from a passage drawn in proportion to its length."""
    passage = rng.choices(passages, cum_weights=weights)[0]
    if len(passage) <= length:
        return passage
    start = rng.randrange(len(passage) - length + 1)
    begin = passage.rfind(" ", 0, start + 1) + 1  # move back to the beginning of a word
    text = passage[begin : begin + length]
    if begin + length < len(passage) and passage[begin + length] != " " and " " in text:
        text = text[: text.rfind(" ")]
    return text.strip() or passage[:length]


def alphabet(passages: Sequence[str], most: int = 400) -> list[str]:
    """Return the characters of the passages, without the rarest if there are more than `most`."""
    counts = Counter(character for text in passages for character in text)
    return sorted(character for character, _ in counts.most_common(most))
