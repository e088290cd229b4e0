"""check_task: proves without a model that a task keeps the contract of `Task`. Run it on your own task:

from trl_grpo_tasks import get_task
from trl_grpo_tasks.commands.check import check_task

check_task(get_task("my_task.py"))
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..task import MASK_TOKEN, Row, Score, Task, describe_error

# What a model may come up with before it has learned anything.
GARBAGE: tuple[str, ...] = (
    "",
    " \n\t ",
    "\x00\x01\x7f",
    "x" * 200_000,
    "9" * 50_000,
    "[" * 20_000,
    '{"a":' * 5_000 + "1" + "}" * 5_000,
    "(" * 500 + ")" * 400,
    "\ud800 lone \udfff surrogates",
    "\u202e٤٢ ４２ ²⁄₃ 𝟜𝟚 Ⅻ e\u0301 \U0001f9f1",
    "nan inf -inf 1e999999999 1/0 -0",
    "```python\nraise SystemExit\n```\n```json\n{}",
    "</s><s>[INST]<answer></answer>#### \\boxed{}",
    "'; DROP TABLE rewards; -- <script>alert(1)</script> %s {0} ${x}",
)

COMPARED = 64  # rows of each split, among which none may be shared


def check_task(task: Task, seed: int = 0, size: int = 8, tokenizer: Any = None) -> None:
    """AssertionError, in a plain sentence, at the first thing in which `task` does not keep the contract.

    `size` rows of each split are looked at. Without a `tokenizer` constraints are tried with the tokens of `tiny()`.
    """
    _check_metadata(task)
    splits = {split: _check_rows(task, split, seed, size) for split in ("train", "test")}
    train, test = ({_text_of(row) for row in task.dataset(split, COMPARED, seed)} for split in splits)
    shared = train & test
    _require(not shared, f"train and test share a row: {next(iter(shared), '')[:200]}")
    _check_levels(task, seed, splits)
    rows = [json.loads(_text_of(row)) for row in splits["train"] + splits["test"]]  # what a reward worker sees
    for row in rows:
        _check_gold_and_bad(task, row)
    for row in rows[:2]:
        for text in GARBAGE:
            _check_score(task, row, text)
        for text in (task.gold(row), *GARBAGE[:1], GARBAGE[8]):
            _require(
                isinstance(task.render(row, text), str | bytes),
                f"render must give HTML as text or PNG as bytes, got {type(task.render(row, text)).__name__}",
            )
        forms = {type(task.canonical(row, text)) for text in (task.gold(row), *GARBAGE)}
        _require(forms == {str}, f"canonical must give text for any completion, got {forms}")
    _check_group(task, rows[0])
    _check_tiny(task, rows)
    _check_constraint(task, rows, tokenizer)


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)


def _text_of(row: Row) -> str:
    return json.dumps(row, sort_keys=True)


def _check_metadata(task: Task) -> None:
    for name in ("name", "version", "description"):
        value = getattr(task, name, None)
        _require(isinstance(value, str) and bool(value.strip()), f"the task needs a {name}, a text; it is {value!r}")
    _require("\n" not in task.description, "the description must be one line")
    weights = getattr(task, "weights", None)
    _require(isinstance(weights, Mapping) and bool(weights), f"weights must name components, got {weights!r}")
    for name, weight in task.weights.items():
        _require(_is_number(weight), f"the weight of component {name!r} must be a finite number, got {weight!r}")
    _require(dataclasses.is_dataclass(task.Options), "Options must be a dataclass")
    _require(isinstance(task.defaults, Mapping), "defaults must map training options to values")
    _require(all(isinstance(level, str) for level in task.levels), f"levels must be texts, got {task.levels!r}")
    _require(len(set(task.levels)) == len(task.levels), f"levels must differ, got {task.levels!r}")
    unknown = set(task.judges()) - set(task.weights)
    _require(not unknown, f"judges {sorted(unknown)} are not among the weights")


def _check_rows(task: Task, split: str, seed: int, size: int) -> list[dict[str, Any]]:
    rows = task.dataset(split, size, seed)
    _require(isinstance(rows, list), f"dataset must give a list of rows, got {type(rows).__name__}")
    _require(0 < len(rows) <= size, f"dataset({split!r}, {size}, {seed}) gave {len(rows)} rows")
    for row in rows:
        try:
            text = _text_of(row)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"a row of {split!r} holds what JSON cannot hold: {error}") from error
        _require(json.loads(text) == row, f"a row of {split!r} changes on its way through JSON: {text[:200]}")
        _check_prompt(row.get("prompt"), split)
    again = task.dataset(split, size, seed)
    _require(again == rows, f"dataset({split!r}, {size}, {seed}) gave other rows when it was called again")
    return rows


def _check_prompt(prompt: Any, split: str) -> None:
    if isinstance(prompt, str):
        return
    well_made = isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
    )
    _require(
        bool(prompt) and well_made,
        f"a row of {split!r} needs a prompt: text, or messages with 'role' and 'content'; got {str(prompt)[:100]!r}",
    )


def _check_levels(task: Task, seed: int, splits: Mapping[str, list[dict[str, Any]]]) -> None:
    if not task.levels:
        return
    for row in [row for rows in splits.values() for row in rows]:
        _require(row.get("level") in task.levels, f"a row's level is {row.get('level')!r}, not one of {task.levels}")
    enough = 8 * len(task.levels)
    missing = set(task.levels) - {row.get("level") for row in task.dataset("train", enough, seed)}
    _require(not missing, f"no row of level {', '.join(sorted(missing))} among {enough} training rows")


def _check_gold_and_bad(task: Task, row: Row) -> None:
    gold, bad = task.gold(row), task.bad(row)
    good = _check_score(task, row, gold)
    _require(good is not None, f"the gold answer could not be scored (score gave None): {gold[:200]!r}")
    assert good is not None
    _require(good.valid, f"the gold answer {gold[:200]!r} is not valid: {good.reason}")
    _require(good.success, f"the gold answer {gold[:200]!r} does not succeed: {good.reason}")
    poor = _check_score(task, row, bad)
    _require(poor is None or not poor.success, f"the bad answer {bad[:200]!r} succeeds")


def _check_score(task: Task, row: Row, completion: str) -> Score | None:
    before, shown = _text_of(row), ascii(completion[:80])
    try:
        score = task.score(row, completion)
        again = task.score(row, completion)
    except ImportError:
        raise  # a package is missing: no fault of the task
    except Exception as error:
        file = inspect.getsourcefile(type(task)) or ""
        raise AssertionError(f"score raised {describe_error(error, file)}, for {shown}") from error
    _require(_text_of(row) == before, f"score changed the row for {shown}")
    _require(score == again, f"score gave {score} and then {again} for {shown}")
    if score is None:
        return None
    _require(isinstance(score, Score), f"score must give a Score or None, got {type(score).__name__} for {shown}")
    unknown = set(score.components) - set(task.weights)
    _require(not unknown, f"components {sorted(unknown)} are not among the weights, for {shown}")
    for name, value in score.components.items():
        _require(_is_number(value), f"component {name!r} must be a finite number, got {value!r} for {shown}")
    total = math.fsum(task.weights[name] * value for name, value in score.components.items())
    _require(
        math.isclose(score.total, total, rel_tol=1e-9, abs_tol=1e-9),
        f"total is {score.total}, but the weighted sum of the components is {total}, for {shown}",
    )
    _require(
        isinstance(score.valid, bool) and isinstance(score.success, bool),
        f"valid and success must be bools, got {score.valid!r} and {score.success!r} for {shown}",
    )
    _require(pickle.loads(pickle.dumps(score)) == score, f"the score changes on its way through pickle, for {shown}")
    return score


def _check_group(task: Task, row: Row) -> None:
    texts = [task.gold(row), task.gold(row), "", "something else"]
    rows = [row] * len(texts)
    for name, values in task.group_components(rows, texts, list(map(task.score, rows, texts))).items():
        _require(name in task.weights, f"group component {name!r} is not among the weights")
        _require(
            len(values) == len(texts), f"group component {name!r} has {len(values)} values for {len(texts)} texts"
        )


def _check_tiny(task: Task, rows: Sequence[Row]) -> None:
    spec = task.tiny()
    if spec is None:
        return
    _require(bool(spec.tokens) and all(spec.tokens), "the tokens of tiny() must be texts, none of them empty")
    _require(len(set(spec.tokens)) == len(spec.tokens), "the tokens of tiny() must differ")
    longest_first = re.compile("|".join(re.escape(token) for token in sorted(spec.tokens, key=len, reverse=True)))
    for row in rows:
        prompt = row["prompt"]
        questions = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        for text in [*questions, task.gold(row)]:
            rest = longest_first.sub("", text.replace(MASK_TOKEN, "") if spec.policy == "masked" else text)
            _require(not rest, f"the tokens of tiny() cannot spell {rest[:20]!r} in {text[:200]!r}")


def _check_constraint(task: Task, rows: Sequence[Row], tokenizer: Any) -> None:
    spec = task.tiny()
    if type(task).constraint is Task.constraint or (tokenizer is None and spec is None):
        return
    if tokenizer is None:
        from ..models.tiny import make_tokenizer

        assert spec is not None
        tokenizer = make_tokenizer(spec.tokens, spec.context, fills=spec.policy == "masked")
    constraint = task.constraint(tokenizer)
    if constraint is None:
        return
    for row in rows:
        state, gold = constraint.start(row), task.gold(row)
        if state is None:
            continue
        ids = tokenizer.encode(gold, add_special_tokens=False)
        for place, token in enumerate([*ids, tokenizer.eos_token_id]):
            try:
                state.accept(token)
            except ValueError as error:
                raise AssertionError(
                    f"the constraint refuses the gold answer {gold[:200]!r} at token {place}: {error}"
                ) from error
        _require(state.finished, f"the constraint is not finished after the gold answer {gold[:200]!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
