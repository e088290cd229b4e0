"""Rows from a user's file or a Hub data set: reading and validation.

Every problem with a row is reported here, with its file and line, before any model is loaded.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...adapters.row_files import SUFFIXES, PlacedRow, read_file
from ...files import check_local_path
from ...registry import add_current_folder_to_path
from ...rewards.rubric import Rubric
from ...task import nearest, printable
from .reward import REWARDS, read_number, reads_tokens, validator

logger = logging.getLogger(__name__)


EXAMPLE = Path(__file__).with_name("example_prompts.json")


def read_source(source: str, prompt_column: str) -> dict[str, list[PlacedRow]]:
    """Read the rows of a file as "all", or those of a Hub data set as "train" and "test" if it has both.

    `example_prompts.json` is the file of the package, unless there is one of this name in the current folder.
    """
    if source == EXAMPLE.name and not Path(source).exists():
        source = str(EXAMPLE)
    check_local_path(source, "--prompts_file")
    path = Path(source).expanduser()
    if path.suffix.lower() in SUFFIXES and path.is_file():
        parts = {"all": read_file(path, prompt_column)}
    elif path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", source):
        raise ValueError(
            f"prompts file {source!r} is neither a file that ends in {', '.join(SUFFIXES)} nor a Hub data set "
            "(owner/name, or owner/name:configuration)"
        )
    else:
        parts = _read_hub(source)
    if not any(parts.values()):
        raise ValueError(f"{source} contains no prompt")
    return parts


def _read_hub(source: str) -> dict[str, list[PlacedRow]]:
    from datasets import load_dataset

    name, _, configuration = source.partition(":")
    try:
        splits = load_dataset(name, configuration or None)
    except (OSError, ValueError) as error:
        raise ValueError(f"the Hub data set {source!r} cannot be loaded: {error}") from error
    wanted = [key for key in ("train", "test") if key in splits]
    if not wanted:
        raise ValueError(f"the Hub data set {source!r} has no split 'train' or 'test', only: {', '.join(splits)}")
    parts = {key: [(f"{source} {key}, row {i}", dict(row)) for i, row in enumerate(splits[key], 1)] for key in wanted}
    return parts if len(parts) == 2 else {"all": parts[wanted[0]]}


# ---- one row


def clean_row(
    row: Mapping[str, Any], place: str, prompt_column: str, answer_column: str, fallback: Mapping[str, Any]
) -> dict[str, Any]:
    """Validate a row and rename its columns to the standard names; `fallback` provides missing columns."""
    if row.get(prompt_column) in (None, "", []):
        raise ValueError(f"{place}: column {prompt_column!r} is missing or empty; columns are: {', '.join(row)}")
    given = {k: v for k, v in row.items() if k not in ("prompt", prompt_column, answer_column, "reward")}
    given |= {"answer": row.get(answer_column), "rewards": row.get("rewards") or row.get("reward")}
    cleaned: dict[str, Any] = {"prompt": row[prompt_column]}
    # A missing value is None, or NaN in tables written by pandas.
    for key, value in {**fallback, **{k: v for k, v in given.items() if v is not None and v == v}}.items():
        try:
            cleaned[key] = COLUMNS[key](value) if key in COLUMNS else json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            if key in COLUMNS:
                raise ValueError(f"{place}: column {key!r} {error}") from error
            _warn_once(f"{place.split(',')[0]}: column {key!r} is ignored, because it is not JSON-compatible: {error}")
    return cleaned


@functools.lru_cache(maxsize=100)
def _warn_once(message: str) -> None:
    logger.warning(message)


def check_row(row: Mapping[str, Any], place: str, functions: Collection[str]) -> None:
    """Raise ValueError if a reward of the row lacks a column, or a column is unsuitable.

    Also raised for a reward that is not built in and not among the user's `functions`: code must not run because data
    names it.
    """
    for name in row["rewards"]:
        if name not in REWARDS and name not in functions:
            raise ValueError(
                f"{place}: reward {name!r} refers to code, which is not imported because data asks for it; if you "
                f"trust it, pass --rewards {shlex.quote(printable(name))}"
            )
        for column in REWARDS[name].columns if name in REWARDS else ():
            if row.get(column) in (None, "", []):
                has = ", ".join(key for key in row if key != "rewards")
                raise ValueError(f"{place}: reward {name!r} needs a column {column!r}; the row has: {has}")
        if name == "numeric" and read_number(row["answer"]) is None:
            raise ValueError(f"{place}: reward 'numeric' needs a number in 'answer', got {row['answer']!r:.60}")


def messages(prompt: Any, system_prompt: str | None, place: str) -> list[dict[str, str]]:
    """Convert a prompt to chat messages, the last of which is the user's."""
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    well_made = isinstance(chat, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in chat
    )
    if not well_made or not chat or chat[-1]["role"] != "user":
        raise ValueError(
            f"{place}: a prompt must be text, or chat messages with 'role' and 'content' that end with a user "
            f"message; got {prompt!r:.80}"
        )
    chat = [{"role": m["role"], "content": m["content"]} for m in chat]
    if system_prompt and chat[0]["role"] != "system":
        chat.insert(0, {"role": "system", "content": system_prompt})
    return chat


def parse_rewards(chosen: Any) -> dict[str, float]:
    """Parse rewards to {name: weight} from a mapping, a list ["numeric", "length=0.2"], or "numeric length=0.2"."""
    if isinstance(chosen, str):
        chosen = _parsed(chosen) if chosen.lstrip().startswith(("{", "[")) else chosen.split()
    if isinstance(chosen, Mapping):
        pairs: list[tuple[Any, Any]] = [(name, weight) for name, weight in chosen.items() if weight is not None]
    elif isinstance(chosen, Sequence) and all(isinstance(entry, str) for entry in chosen):
        pairs = [(name, weight or "1") for name, _, weight in (entry.partition("=") for entry in chosen)]
    else:
        raise ValueError(f"must be names, or names with weights, got {chosen!r:.60}")
    weights = {}
    for name, weight in pairs:
        check_reward_name(name)
        try:
            weights[name] = float(weight)
        except (TypeError, ValueError) as error:
            raise ValueError(f"gives reward {name!r} the weight {weight!r}, which is not a number") from error
        if not math.isfinite(weights[name]) or isinstance(weight, bool):
            raise ValueError(f"gives reward {name!r} the weight {weight!r}, which is not a finite number")
    return weights


def check_reward_name(name: str) -> None:
    if name not in REWARDS and not re.search(r"\w[.:]\w", name):
        raise ValueError(
            f"names an unknown reward {name!r}{nearest(name, REWARDS)}; rewards are: {', '.join(REWARDS)}; "
            "or pass your own as my_module:my_function"
        )


def user_reward(name: str) -> Callable[..., Any]:
    """Import the function behind `my_module:my_function` or `my_module.my_function`: of a row and a completion, or, if
    it has a parameter `completion_ids`, of the token ids of completions."""
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    add_current_folder_to_path()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"reward {name!r}: module {module_name!r} cannot be imported ({error}); is its folder on PYTHONPATH?"
        ) from error
    judge = getattr(module, attribute, None)
    if not callable(judge):
        found = "nothing" if judge is None else repr(judge)
        raise ValueError(f"reward {name!r}: {module_name} must define a function {attribute!r}, found {found}")
    try:
        if not reads_tokens(judge):
            inspect.signature(judge).bind({}, "")
    except TypeError as error:
        raise ValueError(
            f"reward {name!r} must be callable as f(row, completion), or as f(completion_ids, **columns): {error}"
        ) from error
    return judge


# ---- columns: each function converts a value to the form that rewards read, or raises ValueError


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be text, got {value!r:.60}")
    return value


def _answer(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be text or a number, got {value!r:.60}")
    return _text(str(value))


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        value = _parsed(value) if value.lstrip().startswith("[") else [value]
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        raise ValueError(f"must be a list of texts, got {value!r:.60}")
    return value


def _tags(value: Any) -> list[str]:
    names = _texts(value)
    if len(set(names)) < len(names) or not all(re.fullmatch(r"[A-Za-z_][\w.-]*", name) for name in names):
        raise ValueError(f"must be different tag names such as ['think', 'answer'], got {value!r:.60}")
    return names


def _json_object(value: Any) -> str:
    parsed = _parsed(value) if isinstance(value, str) else value
    if not isinstance(parsed, dict) or not parsed:
        raise ValueError(f"must be a JSON object, or the text of one, got {value!r:.60}")
    return json.dumps(parsed)


def _schema(value: Any) -> str:
    from jsonschema.exceptions import SchemaError

    text = _json_object(value)
    try:
        validator(text)
    except SchemaError as error:
        raise ValueError(f"is not a JSON schema: {error.message}") from error
    return text


def _rubric(value: Any) -> str:
    return Rubric.parse(value).as_json()


def _pattern(value: Any) -> str:
    import regex

    try:
        regex.compile(_text(value))
    except (regex.error, RecursionError) as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    return value


def _number(value: Any, whole: bool) -> float | int:
    wanted = "a whole number above 0" if whole else "a number, 0 or more"
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"must be {wanted}, got {value!r:.60}") from error
    least = 1 if whole else 0
    if isinstance(value, bool) or not least <= number < math.inf or (whole and number != int(number)):
        raise ValueError(f"must be {wanted}, got {value!r:.60}")
    return int(number) if whole else number


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error


COLUMNS: dict[str, Callable[[Any], Any]] = {
    "answer": _answer,
    "tolerance": lambda value: _number(value, whole=False),
    "tests": _texts,
    "schema": _schema,
    "fields": _json_object,
    "pattern": _pattern,
    "tags": _tags,
    "target_length": lambda value: _number(value, whole=True),
    "keywords": _texts,
    "forbidden": _texts,
    "rubric": _rubric,
    "rewards": parse_rewards,
    "gold": _text,
    "level": str,
}
