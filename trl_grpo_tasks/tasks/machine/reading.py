"""Parser for blocks in any model output: it skips other text and accepts fences and both field names. Never raises."""

from __future__ import annotations

import json
import re
from typing import Any

from .blocks import BLOCKS, Block

LONGEST_TEXT = 200_000  # characters; longer texts are rejected
MOST_BLOCKS = 200  # machines with more blocks are rejected
_STARTS_TRIED = 20  # the last so many places are tried where a list may start in a text without a fence

_FENCE = re.compile(r"```[ \t]*(?:json|JSON)?[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL)
_JSON_FENCE = re.compile(r"```[ \t]*(?:json|JSON)[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL)
_LIST_START = re.compile(r"\[(?=\s*[\[\]{])")

# The names of a block's type, number and face, in the authors' code and in the paper.
_KEYS, _PAPER_KEYS = ("id", "order_id", "bp_id"), ("type", "id", "face_id")


class _DuplicateKeys(dict[str, Any]):
    """A JSON object in which a key occurred twice."""


def read_blocks(text: str) -> tuple[list[Block], list[str]]:
    """Return the blocks of a text and messages for all problems; blocks are returned only if there are no problems."""
    found, problem = _find_list(text)
    if problem:
        return [], [problem]
    if not found:
        return [], ["the list of blocks is empty"]
    if len(found) > MOST_BLOCKS:
        return [], [f"the machine has {len(found)} blocks; at most {MOST_BLOCKS} are accepted"]
    problems: list[str] = []
    blocks = [_read_block(place, item, problems) for place, item in enumerate(found)]
    return [block for block in blocks if block is not None and not problems], problems


def _find_list(text: str) -> tuple[list[Any], str]:
    if len(text) > LONGEST_TEXT:
        return [], f"the text has {len(text)} characters; at most {LONGEST_TEXT} are accepted"
    fenced = _JSON_FENCE.findall(text) or _FENCE.findall(text)
    stripped = fenced[-1].strip() if fenced else text.strip()
    if fenced or stripped[:1] in ("{", '"') or stripped[:1].isdigit():
        value, problem = _decode(stripped, whole=True)
    else:
        value, problem = _last_list(text)
    if not problem and not isinstance(value, list):
        problem = f"the JSON is {_described(value)}, not a list of blocks"
    return ([], problem) if problem else (value, "")


def _last_list(text: str) -> tuple[Any, str]:
    """Return the last list of objects in a text without a fence, or what is wrong with the last attempt at one."""
    value, problem, end = None, "there is no JSON list in the text", 0
    for start in [match.start() for match in _LIST_START.finditer(text)][-_STARTS_TRIED:]:
        if start < end:
            continue
        found, trouble = _decode(text[start:], whole=False)
        if trouble:
            problem = problem if value is not None else trouble
            continue
        decoded, length = found
        end = start + length
        if not decoded or isinstance(decoded[0], dict):
            value, problem = decoded or value or [], ""
    return value, problem


def _decode(text: str, whole: bool) -> tuple[Any, str]:
    """Decode a text, or, unless it is the `whole` text, the JSON that it begins with, which is returned with its
    length."""
    decoder = json.JSONDecoder(object_pairs_hook=_pairs)
    try:
        return (decoder.decode(text) if whole else decoder.raw_decode(text)), ""
    except ValueError as error:  # also raised for numbers with thousands of digits
        return None, f"the JSON cannot be parsed: {str(error)[:200]}"
    except RecursionError:
        return None, "the JSON is nested too deeply"


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    return plain if len(plain) == len(pairs) else _DuplicateKeys(plain)


def _read_block(place: int, item: Any, problems: list[str]) -> Block | None:
    where = f"the block at index {place}"
    if not isinstance(item, dict):
        problems.append(f"{where} is {_described(item)}, not an object")
        return None
    if isinstance(item, _DuplicateKeys):
        problems.append(f"{where} has a duplicate key")
        return None
    kind_key, order_key, face_key = _PAPER_KEYS if "type" in item else _KEYS
    kind = item.get(kind_key)
    kind = str(kind) if _is_integer(kind) else kind
    if not isinstance(kind, str) or kind not in BLOCKS:
        problems.append(f"{where} has the unknown type {_described(kind)}; types are: {', '.join(BLOCKS)}")
        return None
    ends = ("_a", "_b") if BLOCKS[kind].two_ended else ("",)
    wanted = [kind_key, order_key, *(f"{name}{end}" for end in ends for name in ("parent", face_key))]
    before = len(problems)
    for key in wanted:
        if key not in item:
            problems.append(f"{where} ({BLOCKS[kind].name}) has no {key!r}; its keys must be: {', '.join(wanted)}")
        elif key != kind_key and not _is_integer(item[key]):
            problems.append(f"{where} has {key!r} {_described(item[key])}, which is not an integer")
    for key in sorted(set(item) - set(wanted))[:5]:
        problems.append(f"{where} ({BLOCKS[kind].name}) has the extra key {_described(key)}")
    if len(problems) > before:
        return None
    if (order := item[order_key]) != place:
        problems.append(f"{where} has {order_key!r} {_described(order)}; blocks must be numbered 0, 1, 2, ...")
        return None
    numbers = [item[key] for key in wanted[2:]]
    if any(abs(number) > 10 * MOST_BLOCKS for number in numbers):
        problems.append(f"{where} has a parent or face number far out of range")
        return None
    return Block(kind, *numbers)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _described(value: Any) -> str:
    """Describe a value for a message: short and ASCII only."""
    is_huge = _is_integer(value) and value.bit_length() > 200  # Python refuses to print integers with many digits
    shown = ascii(value) if isinstance(value, str | int | float | None) and not is_huge else type(value).__name__
    return shown if len(shown) <= 40 else shown[:37] + "..."
