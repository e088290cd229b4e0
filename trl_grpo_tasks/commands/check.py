"""check_task: check without a model that a task keeps the contract of `Task`. For a task of your own:

from trl_grpo_tasks import get_task
from trl_grpo_tasks.commands.check import check_task

check_task(get_task("my_task.py"), say=print)
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..rewards.worker import LARGEST_COMPONENT
from ..task import MASK_TOKEN, NoAnswerError, Row, Score, Task, describe_error, one_per_request

# Texts that an untrained model may write.
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
LONGEST_REQUEST = 1000  # characters of a text that `row_of` is tried with
GARBAGE_ROWS = 2  # rows that are tried with every text of GARBAGE

LabelledRow = tuple[str, dict[str, Any]]  # "train row 3", and the row


def check_task(
    task: Task, seed: int = 0, size: int = 8, tokenizer: Any = None, say: Callable[[str], Any] | None = None
) -> None:
    """Raise AssertionError with a readable message at the first property that `task` does not have.

    `size` rows of each split are used. Without a `tokenizer`, constraints are checked with the tokens of `tiny()`.
    `say` receives one line for each property that holds or does not apply.
    """
    for state, line in _properties(task, seed, size, tokenizer):
        if say is not None:
            say(f"{state:<4}{line}")


def _properties(task: Task, seed: int, size: int, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """("ok", property) or ("-", what does not apply), one after the other."""
    _check_metadata(task)
    yield "ok", f"name, version {task.version}, description, {len(task.weights)} weights"
    labelled: list[LabelledRow] = []
    for split in ("train", "test"):
        rows = _check_rows(task, split, seed, size)
        # The row as a reward worker receives it.
        labelled += [(f"{split} row {n}", json.loads(_text_of(row))) for n, row in enumerate(rows)]
    many = f"({len(labelled)} rows)"
    yield "ok", f"rows have prompts, survive JSON and are the same when made again {many}"
    compared = _check_splits(task, seed)
    yield "ok", f"train and test share no request ({compared})"
    if task.levels:
        seen = _check_levels(task, seed, labelled)
        yield "ok", f"every row has a level, and every level has rows: {', '.join(task.levels)} ({seen} rows)"
    else:
        yield "-", "levels: the task has none"
    golds = sum(_check_gold(task, label, row) for label, row in labelled)
    if golds:
        yield "ok", f"gold answers are valid and succeed ({_part(golds, labelled)})"
    else:
        yield "-", "gold answers: no row has one, so it is not checked that a success is possible"
    bads = sum(_check_bad(task, label, row) for label, row in labelled)
    if bads:
        yield "ok", f"bad answers do not succeed ({_part(bads, labelled)})"
    else:
        yield "-", "bad answers: none is known, so it is not checked that an answer can fail"
    tried = labelled[:GARBAGE_ROWS]
    for label, row in tried:
        for text in GARBAGE:
            _check_score(task, label, row, text)
    yield "ok", f"any text gets the same finite score each time ({len(GARBAGE)} texts, {len(tried)} rows)"
    for label, row in tried:
        _check_render(task, label, row)
    yield "ok", f"any text can be rendered and compared ({len(tried)} rows)"
    if not task.defines("row_of"):
        yield "-", "rows from a user's text: the task makes none, so solve and play take rows only"
    elif understood := sum(_check_row_of(task, label, row) for label, row in tried):
        yield "ok", f"rows that are made from a user's text can be scored ({understood} texts)"
    else:
        yield "-", "rows from a user's text: no text of a row was understood, so that none was tried"
    if not task.defines("group_components"):
        yield "-", "components of a group: the task has none"
    else:
        _check_group(task, *labelled[0])
        yield "ok", "components of a group have one value per completion (1 row)"
    if task.tiny() is None:
        yield "-", "tiny model: the task has none with these options"
    else:
        _check_tiny(task, labelled)
        yield "ok", f"the tiny model can spell prompts{' and gold answers' if golds else ''} {many}"
    constrained = _check_constraint(task, labelled, tokenizer)
    if isinstance(constrained, str):
        yield "-", f"constraint: {constrained}"
    else:
        yield "ok", f"the constraint allows gold answers ({constrained} rows)"


def _part(checked: int, rows: Sequence[LabelledRow]) -> str:
    return f"{len(rows)} rows" if checked == len(rows) else f"{checked} of {len(rows)} rows have one"


def _golds(task: Task, row: Row) -> list[str]:
    """The gold answer of a row, if it has one."""
    try:
        return [task.gold(row)]
    except NoAnswerError:
        return []


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)


def _text_of(row: Row) -> str:
    return json.dumps(row, sort_keys=True)


def _check_metadata(task: Task) -> None:
    for name in ("name", "version", "description"):
        value = getattr(task, name, None)
        _require(isinstance(value, str) and bool(value.strip()), f"the task needs a {name}, a text; it is {value!r}")
    _require("\n" not in task.description, f"the description must be one line; it is {task.description!r}")
    weights = getattr(task, "weights", None)
    _require(isinstance(weights, Mapping) and bool(weights), f"weights must name components; it is {weights!r}")
    for name, weight in task.weights.items():
        _require(_is_number(weight), f"the weight of component {name!r} must be a finite number; it is {weight!r}")
    _require(dataclasses.is_dataclass(task.Options), f"Options must be a dataclass; it is {task.Options!r}")
    for name in ("defaults", "tiny_defaults"):
        value = getattr(task, name)
        _require(isinstance(value, Mapping), f"{name} must map training options to values; it is {value!r}")
    _require(all(isinstance(level, str) for level in task.levels), f"levels must be texts; they are {task.levels!r}")
    _require(len(set(task.levels)) == len(task.levels), f"levels must differ; they are {task.levels!r}")
    unknown = set(task.judges()) - set(task.weights)
    _require(not unknown, f"judges {sorted(unknown)} are not among the weights: {', '.join(task.weights)}")


def _check_rows(task: Task, split: str, seed: int, size: int) -> list[dict[str, Any]]:
    call = f"dataset({split!r}, {size}, {seed})"
    rows = task.dataset(split, size, seed)
    _require(isinstance(rows, list), f"{call} must return a list of rows; it returned {type(rows).__name__}")
    _require(0 < len(rows) <= size, f"{call} must return 1 to {size} rows; it returned {len(rows)} rows")
    for number, row in enumerate(rows):
        label = f"{split} row {number}"
        try:
            text = _text_of(row)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{label} holds a value that JSON cannot hold: {error}") from error
        _require(json.loads(text) == row, f"{label} changes when it is written as JSON and read again: {text[:200]}")
        _check_prompt(row.get("prompt"), label)
    again = task.dataset(split, size, seed)
    differs = next((n for n, (row, other) in enumerate(zip(rows, again, strict=False)) if row != other), len(again))
    _require(
        again == rows,
        f"{call} returned other rows when it was called again; the first difference is in row {differs}: "
        + " and then ".join(str(some[differs : differs + 1])[:100] for some in (rows, again)),
    )
    return rows


def _check_prompt(prompt: Any, label: str) -> None:
    if isinstance(prompt, str):
        return
    is_chat = isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
    )
    _require(
        bool(prompt) and is_chat,
        f"{label} needs a prompt: text, or messages with 'role' and 'content'; it is {str(prompt)[:100]!r}",
    )


def _check_splits(task: Task, seed: int) -> str:
    """Compare the requests of both splits, and return how many there are."""
    train, test = (task.dataset(split, COMPARED, seed) for split in ("train", "test"))
    tested = {task.request(row): row for row in test}
    shared = [(row, tested[task.request(row)]) for row in train if task.request(row) in tested]
    _require(
        not shared,
        "train and test share a request, which is the prompt unless the task defines request(row): "
        + " and ".join(_text_of(row)[:200] for row in (shared[0] if shared else ())),
    )
    rows, requests = len(train) + len(test), len(one_per_request(task, train)) + len(tested)
    return f"{rows} rows" + (f", {requests} different requests" if requests != rows else "")


def _check_levels(task: Task, seed: int, rows: Sequence[LabelledRow]) -> int:
    for label, row in rows:
        level = row.get("level")
        _require(level in task.levels, f"{label}: its level is {level!r}, which is not one of {task.levels}")
    enough = 8 * len(task.levels)
    missing = set(task.levels) - {row.get("level") for row in task.dataset("train", enough, seed)}
    _require(not missing, f"there is no row of level {', '.join(sorted(missing))} among {enough} training rows")
    return enough


def _check_gold(task: Task, label: str, row: Row) -> bool:
    """Whether the row has a gold answer, which was then checked."""
    if not (golds := _golds(task, row)):
        return False
    gold = golds[0]
    score = _check_score(task, label, row, gold)
    _require(score is not None, f"{label}: the gold answer {gold[:200]!r} could not be scored: score returned None")
    assert score is not None
    _require(score.valid, f"{label}: the gold answer {gold[:200]!r} is not valid: {score.reason}")
    _require(score.success, f"{label}: the gold answer {gold[:200]!r} does not succeed: {score.reason}")
    return True


def _check_bad(task: Task, label: str, row: Row) -> bool:
    """Whether the row has a bad answer, which was then checked."""
    try:
        bad = task.bad(row)
    except NoAnswerError:
        return False
    score = _check_score(task, label, row, bad)
    _require(score is None or not score.success, f"{label}: the bad answer {bad[:200]!r} succeeds")
    return True


def _check_score(task: Task, label: str, row: Row, completion: str) -> Score | None:
    before, where = _text_of(row), f"({label}, completion {completion[:80]!a})"
    try:
        score = task.score(row, completion)
        again = task.score(row, completion)
    except ImportError:
        raise  # a package is missing, which is not an error in the task
    except Exception as error:
        file = inspect.getsourcefile(type(task)) or ""
        raise AssertionError(f"score raised {describe_error(error, file)} {where}") from error
    _require(_text_of(row) == before, f"score changed the row {where}")
    _require(score == again, f"score returned {score} and then {again} {where}")
    if score is None:
        return None
    _require(
        isinstance(score, Score), f"score must return a Score or None; it returned {type(score).__name__} {where}"
    )
    unknown = set(score.components) - set(task.weights)
    _require(not unknown, f"components {sorted(unknown)} are not among the weights {where}")
    for name, value in score.components.items():
        is_usable = _is_number(value) and abs(value) <= LARGEST_COMPONENT
        _require(is_usable, f"component {name!r} must be a finite number within -1e9 and 1e9; it is {value!r} {where}")
    total = math.fsum(task.weights[name] * value for name, value in score.components.items())
    _require(
        math.isclose(score.total, total, rel_tol=1e-9, abs_tol=1e-9),
        f"total is {score.total}, but the weighted sum of the components is {total} {where}",
    )
    _require(
        isinstance(score.valid, bool) and isinstance(score.success, bool),
        f"valid and success must be bools; they are {score.valid!r} and {score.success!r} {where}",
    )
    _require(pickle.loads(pickle.dumps(score)) == score, f"the score changes when it is pickled {where}")
    return score


def _check_row_of(task: Task, label: str, row: Row) -> int:
    """How many texts of the row `row_of` understands, whose rows can be scored. Others must be a ValueError."""
    prompt = row["prompt"]
    own = {value for value in row.values() if isinstance(value, str)}
    own |= set() if isinstance(prompt, str) else {prompt[-1]["content"]}
    understood = 0
    for text in (*sorted(own), *(text for text in GARBAGE if len(text) < LONGEST_REQUEST)):
        where = f"({label}, text {text[:80]!a})"
        try:
            made = task.row_of(text)
        except ValueError:
            continue
        except Exception as error:
            file = inspect.getsourcefile(type(task)) or ""
            raise AssertionError(f"row_of raised {describe_error(error, file)}, not ValueError {where}") from error
        _require(isinstance(made, Mapping), f"row_of must return a row; it returned {made!r:.80} {where}")
        _check_prompt(made.get("prompt"), f"what row_of returned {where}")
        if text in own:
            for answer in (*_golds(task, row), *GARBAGE[:1]):
                _check_score(task, f"a row of row_of {where}", json.loads(_text_of(made)), answer)
            understood += 1
    return understood


def _check_render(task: Task, label: str, row: Row) -> None:
    for text in (*_golds(task, row), *GARBAGE[:1], GARBAGE[8]):
        picture = task.render(row, text)
        _require(
            isinstance(picture, str | bytes),
            f"render must return HTML as text or PNG as bytes; it returned {type(picture).__name__} ({label})",
        )
    for text in (*_golds(task, row), *GARBAGE):
        form = task.canonical(row, text)
        _require(
            isinstance(form, str),
            f"canonical must return text; it returned {form!r} ({label}, completion {text[:80]!a})",
        )
        new = task.relabel(row, text)
        asked, answer = new if isinstance(new, tuple) and len(new) == 2 else (new, text)
        _require(
            asked is None
            or (isinstance(asked, dict) and isinstance(answer, str) and "prompt" in json.loads(json.dumps(asked))),
            f"relabel must return None, a row, or a row and an answer; it returned {new!r:.80} ({label}, completion "
            f"{text[:80]!a})",
        )


def _check_group(task: Task, label: str, row: Row) -> None:
    texts = [*2 * _golds(task, row), "", "something else"]
    parts = task.group_components([row] * len(texts), texts, [task.score(row, text) for text in texts])
    for name, values in parts.items():
        _require(name in task.weights, f"group component {name!r} is not among the weights ({label})")
        _require(
            len(values) == len(texts),
            f"group component {name!r} has {len(values)} values for {len(texts)} completions ({label})",
        )


def _check_tiny(task: Task, rows: Iterable[LabelledRow]) -> None:
    spec = task.tiny()
    assert spec is not None
    _require(bool(spec.tokens) and all(spec.tokens), "the tokens of tiny() must be texts, none of them empty")
    _require(len(set(spec.tokens)) == len(spec.tokens), "the tokens of tiny() must differ")
    longest_first = re.compile("|".join(re.escape(token) for token in sorted(spec.tokens, key=len, reverse=True)))
    for label, row in rows:
        prompt = row["prompt"]
        questions = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        for text in [*questions, *_golds(task, row)]:
            rest = longest_first.sub("", text.replace(MASK_TOKEN, "") if spec.policy == "masked" else text)
            _require(not rest, f"{label}: the tokens of tiny() cannot spell {rest[:20]!r} in {text[:200]!r}")


def _check_constraint(task: Task, rows: Sequence[LabelledRow], tokenizer: Any) -> int | str:
    """The number of rows that were checked, or the reason why none was."""
    spec = task.tiny()
    if not task.defines("constraint"):
        return "the task has none"
    if tokenizer is None and spec is None:
        return "the task has no tiny model, so there is no tokenizer to check it with"
    if tokenizer is None:
        from ..models.tiny import make_tokenizer

        assert spec is not None
        tokenizer = make_tokenizer(spec.tokens, spec.context, fills=spec.policy == "masked")
    constraint = task.constraint(tokenizer)
    if constraint is None:
        return "the task has none with these options"
    checked = 0
    for label, row in rows:
        state, golds = constraint.start(row), _golds(task, row)
        if state is None or not golds:
            continue
        gold = golds[0]
        ids = tokenizer.encode(gold, add_special_tokens=False)
        for place, token in enumerate([*ids, tokenizer.eos_token_id]):
            try:
                state.accept(token)
            except ValueError as error:
                raise AssertionError(
                    f"{label}: the constraint refuses the gold answer {gold[:200]!r} at token {place}: {error}"
                ) from error
        _require(state.finished, f"{label}: the constraint is not finished after the gold answer {gold[:200]!r}")
        checked += 1
    return checked or "no row has one, or none with a gold answer"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
