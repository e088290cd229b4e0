"""The rewards of the prompts task: small pure functions (row, completion) -> Verdict, in one table.

Rewards read the completion and never the prompt: a number in the question is not an answer to it.
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from ...rewards.time_limit import time_limit
from .verdict import LONGEST_TEXT, CannotJudgeError, Verdict, fenced, is_encodable
from .xml_reward import xml

logger = logging.getLogger(__name__)

# Limits that keep rewards fast whatever a model writes; longer texts are cut or rejected.
TAIL_FOR_NUMBERS = 4_000
LONGEST_FOR_REGEX = 10_000
REGEX_SECONDS = 2.0
SCHEMA_SECONDS = 2.0


class Reward(NamedTuple):
    """An entry of the table: the function, the columns that a row needs for it, and its role.

    Role "checks": success needs its full value. "rules": it decides success only if no reward of the row checks.
    `full_marks` describes an answer with full value.
    """

    judge: Callable[[Mapping[str, Any], str], Verdict] | None
    columns: tuple[str, ...]
    role: str
    full_marks: str


# ---- numbers and exact answers

EXPECTED = "; expected "  # before the right number in a reason


_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z_)\]}])[-+]|(?<![0-9A-Za-z_]))"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?(?: ?/ ?[0-9]+)?"
)
_MARKER = re.compile(r"####|\\boxed\s?\{|(?<![\w/])answer(?:\s{1,3}is\b)?[\s:=>]", re.IGNORECASE)
_LEAD = re.compile(r"[\s:=>$*_({\\]*")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,40})\}\{([^{}]{1,40})\}")


def parse_number(text: str) -> Fraction | None:
    """Return the exact value of a written number (42, -1,234.5, 3/4, 6e3), or None."""
    text = text.replace(",", "").replace(" ", "")
    mantissa, _, denominator = text.partition("/")
    exponent = re.search(r"[eE]([-+]?[0-9]+)$", mantissa)
    # Fraction("1e999999999") would compute that power of ten.
    if len(text) > 60 or (exponent and abs(int(exponent[1])) > 300):
        return None
    try:
        return Fraction(mantissa) / Fraction(denominator or 1)
    except (ValueError, ZeroDivisionError):
        return None


def read_number(text: str) -> Fraction | None:
    """Return the final number of a text.

    This is the number after the last `####`, `\\boxed{` or `answer:` (for `x = 42`, after the `=`), else the last one.
    """
    text = _FRACTION.sub(r"\1/\2", _plain(text[-TAIL_FOR_NUMBERS:]))
    for after in _marked(text):
        after = after.rsplit("=", 1)[-1]
        lead = _LEAD.match(after)
        if lead and (found := _NUMBER.match(after, lead.end())):
            return parse_number(found[0])
    written = _NUMBER.findall(text)
    return parse_number(written[-1]) if written else None


def numeric(row: Mapping[str, Any], completion: str) -> Verdict:
    """Check that the final number equals `answer`: exactly for integers, else to six digits or within `tolerance`."""
    expected = read_number(str(row["answer"]))
    if expected is None:
        raise CannotJudgeError(f"the row's answer {row['answer']!r} contains no number")
    given = read_number(completion)
    if given is None:
        return Verdict(0.0, "there is no number in the answer", readable=False)
    tolerance = row.get("tolerance")
    if tolerance is None:
        size: Fraction = max(Fraction(1), abs(expected))
        tolerance = 0 if expected.denominator == 1 else size / 10**6
    if abs(given - expected) <= tolerance:
        return Verdict(1.0)
    return Verdict(0.0, f"the final number is {_short(given)}{EXPECTED}{_short(expected)}")


def exact(row: Mapping[str, Any], completion: str) -> Verdict:
    """Check that the completion, or the text after its last answer marker, equals `answer` up to whitespace."""
    expected = " ".join(str(row["answer"]).split())
    text = _plain(completion[-TAIL_FOR_NUMBERS:])
    if len(completion) <= TAIL_FOR_NUMBERS and " ".join(text.split()) == expected:
        return Verdict(1.0)
    if marked := _marked(text):
        after = " ".join(_LEAD.sub("", marked[0], count=1).split("</")[0].split())
        if expected in (after, after.rstrip("*_$. ")):
            return Verdict(1.0)
    return Verdict(0.0, "the answer differs from the expected text", readable=bool(completion.strip()))


def _plain(text: str) -> str:
    return text.replace("\u2212", "-").replace("\u00a0", " ").replace("\u202f", " ").replace("{,}", ",")


def _marked(text: str) -> list[str]:
    """Return the rest of the line after each answer marker, the last marker first."""
    rests = []
    for marker in reversed(list(_MARKER.finditer(text))):
        rest = text[marker.end() :].lstrip().split("\n", 1)[0][:200]
        if "boxed" in marker[0]:
            rest = rest.split("}", 1)[0]
        rests.append(rest)
    return rests


def without_expected(reason: str) -> str:
    """Return a reason without the right number, as a model may be told it."""
    return re.sub(f"{EXPECTED}[^;]*", "", reason)


def _short(number: Fraction) -> str:
    text = str(number)
    if len(text) < 25:
        return text
    try:
        return f"{float(number):g}"
    except OverflowError:
        return f"{text[:12]}... ({len(text)} characters)"


# ---- code


def read_code(completion: str) -> str:
    """Return the program in a completion: its fenced block, or all of it."""
    block = fenced(completion, ("python", "py", "python3"))
    return completion if block is None else block


def tests(
    row: Mapping[str, Any],
    completion: str,
    timeout: float = 10.0,
    memory_mb: int = 512,
    require_sandbox: bool = False,
) -> Verdict:
    """Return the fraction of the row's `tests` (Python statements that raise on failure) that pass in the sandbox."""
    code = read_code(completion)
    if not code.strip() or len(code) > LONGEST_TEXT or not is_encodable(code):
        return Verdict(0.0, "there is no program in the answer", readable=False)
    from ...rewards.sandbox import SandboxError, missing_layers, run_tests

    try:
        if require_sandbox and (missing := missing_layers()):
            raise CannotJudgeError(f"--require_sandbox: this machine lacks layers of the sandbox: {missing}")
        outcome = run_tests(code, list(row["tests"]), timeout=timeout, memory_mb=memory_mb)
    except SandboxError as error:
        raise CannotJudgeError(f"the sandbox failed: {error}") from error
    if outcome.passed == outcome.total:
        return Verdict(1.0)
    first = str(outcome.failures[0])[:200] if outcome.failures else ""
    return Verdict(outcome.passed / outcome.total, f"{outcome.passed} of {outcome.total} tests pass; {first}")


# ---- JSON


def read_json(completion: str) -> tuple[Any, str]:
    """Return (value, ""), (value, "embedded") for JSON among other text, or (None, why there is no JSON)."""
    if len(completion) > LONGEST_TEXT:
        return None, f"longer than {LONGEST_TEXT} characters"
    block = fenced(completion, ("json",))
    text = (completion if block is None else block).strip()
    decoder = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
    try:
        return decoder.decode(text), ""
    except (ValueError, RecursionError) as error:
        problem = str(error) or "nested too deeply"
    for found in itertools.islice(re.finditer(r"[\[{]", text), 5):
        with suppress(ValueError, RecursionError):
            return decoder.raw_decode(text, found.start())[0], "embedded"
    return None, problem


def json_text(row: Mapping[str, Any], completion: str) -> Verdict:
    """Check that the completion is JSON, bare or fenced; half credit if there is other text around it."""
    return _json_verdict(completion, lambda value: (1.0, ""))


def schema(row: Mapping[str, Any], completion: str) -> Verdict:
    """Check that the completion is JSON that matches the row's `schema`; half credit with other text around it."""
    return _json_verdict(completion, lambda value: _conforms(str(row["schema"]), value))


def fields(row: Mapping[str, Any], completion: str) -> Verdict:
    """Return the fraction of the row's `fields` that the JSON object in the completion has with equal values."""
    expected = json.loads(row["fields"])

    def compare(value: Any) -> tuple[float, str]:
        if not isinstance(value, dict):
            return 0.0, "the JSON is not an object"
        wrong = [key for key, wanted in expected.items() if key not in value or not same_json(value[key], wanted)]
        return 1 - len(wrong) / len(expected), f"fields wrong or missing: {', '.join(wrong)}"[:200] if wrong else ""

    return _json_verdict(completion, compare)


def same_json(left: Any, right: Any) -> bool:
    """Compare two values as JSON: 1 equals 1.0 but not true."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    return left == right


@lru_cache(maxsize=1024)
def validator(schema_text: str) -> Any:
    """Return a JSON Schema validator that never fetches anything: external references are errors."""
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing.jsonschema import EMPTY_REGISTRY

    contents = json.loads(schema_text)
    kind = validator_for(contents, default=Draft202012Validator)
    kind.check_schema(contents)
    return kind(contents, registry=EMPTY_REGISTRY)


def _conforms(schema_text: str, value: Any) -> tuple[float, str]:
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    checker = validator(schema_text)
    try:
        with time_limit(SCHEMA_SECONDS):
            error = best_match(checker.iter_errors(value))
    except TimeoutError as timeout:
        raise CannotJudgeError(f"the check against the row's schema {timeout}") from timeout
    except Unresolvable as unresolvable:
        raise CannotJudgeError(f"the row's schema has an unresolvable reference: {unresolvable}") from unresolvable
    except (RecursionError, OverflowError):
        return 0.0, "the JSON is nested too deeply or too large to check"
    return (1.0, "") if error is None else (0.0, f"{error.json_path}: {error.message}"[:200])


def _json_verdict(completion: str, mark: Callable[[Any], tuple[float, str]]) -> Verdict:
    value, problem = read_json(completion)
    if problem not in ("", "embedded"):
        return Verdict(0.0, f"the answer is not JSON: {problem}"[:200], readable=False)
    share, reason = mark(value)
    if problem == "embedded":
        return Verdict(share / 2, reason or "there is other text around the JSON")
    return Verdict(share, reason)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is too large")
    return number


# ---- form


def tags(row: Mapping[str, Any], completion: str) -> Verdict:
    """Check that each of the row's `tags` occurs once, in order, with text inside and nothing outside.

    The value is half the fraction of well-formed tags; 0.5 if they are out of order or there is text around them.
    """
    spans = []
    for tag in row["tags"]:
        opening, closing = f"<{tag}>", f"</{tag}>"
        start, end = completion.find(opening), completion.find(closing)
        once = completion.count(opening) == 1 and completion.count(closing) == 1
        if once and completion[start + len(opening) : end].strip():
            spans.append((start, end + len(closing)))
    share = len(spans) / len(row["tags"])
    if share < 1:
        return Verdict(share / 2, "a tag is missing, empty or written twice", readable=bool(spans))
    edges = [0, *(edge for span in spans for edge in span), len(completion)]
    between = "".join(completion[left:right] for left, right in zip(edges[::2], edges[1::2], strict=True))
    if edges != sorted(edges) or between.strip():
        return Verdict(0.5, "the tags are out of order, or there is text outside them")
    return Verdict(1.0)


def pattern(row: Mapping[str, Any], completion: str) -> Verdict:
    """Check that the whole completion, with or without its outer whitespace, matches the row's `pattern`."""
    import regex  # unlike re, it can be given a time limit

    texts = [text for text in dict.fromkeys((completion, completion.strip())) if len(text) <= LONGEST_FOR_REGEX]
    if not texts:
        return Verdict(0.0, f"the answer is longer than {LONGEST_FOR_REGEX} characters", readable=False)
    try:
        matches = any(regex.fullmatch(row["pattern"], text, timeout=REGEX_SECONDS) for text in texts)
    except TimeoutError as error:
        raise CannotJudgeError(f"pattern {row['pattern']!r} took longer than {REGEX_SECONDS:g} s") from error
    return Verdict(1.0) if matches else Verdict(0.0, "the answer does not match the pattern", readable=False)


def length(row: Mapping[str, Any], completion: str) -> Verdict:
    """Compare the number of words with `target_length`: full credit within 10%, falling to 0 at 0% and 200%."""
    words, target = len(completion.split()), row["target_length"]
    distance = abs(words - target) / target
    if distance <= 0.1:
        return Verdict(1.0)
    return Verdict(max(0.0, 1 - distance), f"the answer has {words} words; the target is {target}")


def keywords(row: Mapping[str, Any], completion: str) -> Verdict:
    """Return the fraction of rules kept: each of `keywords` occurs as a word, none of `forbidden` does (caseless)."""
    text = completion[:LONGEST_TEXT].casefold()
    rules = [(word, True) for word in row["keywords"]] + [(word, False) for word in row.get("forbidden") or ()]
    broken = [
        word
        for word, wanted in rules
        if (re.search(rf"(?<!\w){re.escape(word.casefold())}(?!\w)", text) is not None) != wanted
    ]
    reason = f"missing or forbidden words: {', '.join(broken)}"[:200] if broken else ""
    return Verdict(1 - len(broken) / len(rules), reason)


def novelty(completions: Sequence[str]) -> list[float]:
    """Return, for each completion of a group, 1 minus its largest Jaccard similarity (4-grams) to another one.

    >>> novelty(["the cat sat", "the cat sat", "a dog ran off"])
    [0.0, 0.0, 1.0]
    """
    texts = [" ".join(completion[:5_000].split()) for completion in completions]
    runs = [{text[i : i + 4] for i in range(max(1, len(text) - 3))} for text in texts]

    def likeness(left: int, right: int) -> float:
        return len(runs[left] & runs[right]) / len(runs[left] | runs[right])

    numbers = range(len(runs))
    nearest = [max((likeness(i, j) for j in numbers if j != i), default=0.0) for i in numbers]
    return [1 - near if text else 0.0 for near, text in zip(nearest, texts, strict=True)]


REWARDS: dict[str, Reward] = {
    "numeric": Reward(numeric, ("answer",), "checks", "the final number equals the answer"),
    "exact": Reward(exact, ("answer",), "checks", "the text, or the part after its last marker, equals the answer"),
    "tests": Reward(tests, ("tests",), "checks", "every test passes in the sandbox"),
    "json": Reward(json_text, (), "checks", "JSON and nothing else, bare or fenced"),
    "schema": Reward(schema, ("schema",), "checks", "JSON that matches the schema, and nothing else"),
    "fields": Reward(fields, ("fields",), "checks", "a JSON object with every expected value"),
    "xml": Reward(xml, (), "checks", "well-formed XML and nothing else, bare or fenced"),
    "regex": Reward(pattern, ("pattern",), "checks", "the whole text matches the pattern"),
    "tags": Reward(tags, ("tags",), "checks", "each tag once, in order, filled, nothing outside"),
    "length": Reward(length, ("target_length",), "rules", "a number of words within 10% of the target"),
    "keywords": Reward(keywords, ("keywords",), "rules", "every keyword, no forbidden word"),
    "novelty": Reward(None, (), "group", "unlike every other completion of the same prompt"),
    "reward_model": Reward(None, (), "judge", "the model's score"),
    "judge": Reward(None, (), "judge", "the best grade in every criterion of the rubric"),
}


def call_user_reward(judge: Callable[..., Any], name: str, row: Mapping[str, Any], completion: str) -> Verdict:
    """Return the verdict of a user-defined reward, which may return a number or (number, reason)."""
    returned = judge(row, completion)
    value, reason = returned if isinstance(returned, tuple) else (returned, "")
    if value is None:
        raise CannotJudgeError(f"{name} returned None")
    if not math.isfinite(value):
        raise CannotJudgeError(f"{name} returned {value!r}, which is not a finite number")
    return Verdict(float(value), str(reason))


def reads_tokens(function: Callable[..., Any]) -> bool:
    """Whether a user-defined reward is computed from token ids."""
    return "completion_ids" in inspect.signature(function).parameters


def over_tokens(function: Callable[..., Any], name: str) -> Callable[..., list[float | None]]:
    """Return the reward function of TRL for a user-defined reward that is computed from token ids.

    The user's function is called once per rollout, with those of its parameters that TRL passes: `completion_ids`,
    `completions`, `prompts`, and `row`, the rows. It returns a number per completion. Rows that do not choose it get
    None. If it raises, or returns None, completions are not scored: an infinite reward leaves them out.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters}

    def reward(row: Sequence[str], **given: Any) -> list[float | None]:
        rows = [json.loads(text) for text in row]
        passed = {key: value for key, value in {**given, "row": rows}.items() if takes_all or key in named}
        try:
            values = [math.inf if value is None else float(value) for value in function(**passed)]
        except Exception as error:  # noqa: BLE001 - user code: any failure is a reason, never a crash
            logger.warning("reward %s failed, so completions are left out: %s: %s", name, type(error).__name__, error)
            values = [math.inf] * len(rows)
        if len(values) != len(rows):
            raise ValueError(f"reward {name!r} returned {len(values)} numbers for {len(rows)} completions")
        weights = [one["rewards"].get(name) for one in rows]
        scored = [value if math.isfinite(value) else math.inf for value in values]
        return [None if w is None else w * value if w else 0.0 for w, value in zip(weights, scored, strict=True)]

    reward.__name__ = name
    return reward
