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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ..constraints.turns import split_turns
from ..rewards.environment import TurnsTask
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
    `say` receives one line for each property: "ok" where it holds, "-" where it does not apply.
    """
    for line in _Check(task, seed, size, tokenizer).lines():
        if say is not None:
            say(line if line.startswith("-") else f"ok  {line}")


class _Check:
    """The checks of one task. Each yields a line for what holds, one that begins with "-" for what does not apply, and
    raises AssertionError for what is wrong."""

    def __init__(self, task: Task, seed: int, size: int, tokenizer: Any):
        self._task, self._seed, self._size, self._tokenizer = task, seed, size, tokenizer
        self._rows: list[LabelledRow] = []  # of both splits, as a reward worker receives them

    def lines(self) -> Iterator[str]:
        for check in (self._metadata, self._data, self._levels, self._golds, self._bads, self._garbage, self._requests,
                      self._group, self._tiny, self._constraint):  # fmt: skip
            yield from check()

    def _metadata(self) -> Iterator[str]:
        task = self._task
        for name in ("name", "version", "description"):
            value = getattr(task, name, None)
            is_text = isinstance(value, str) and bool(value.strip())
            _require(is_text, f"the task needs a {name}, a text; it is {value!r}")
        _require("\n" not in task.description, f"the description must be one line; it is {task.description!r}")
        weights = getattr(task, "weights", None)
        _require(isinstance(weights, Mapping) and bool(weights), f"weights must name components; it is {weights!r}")
        for name, weight in task.weights.items():
            _require(_is_number(weight), f"the weight of component {name!r} must be a finite number; it is {weight!r}")
        _require(dataclasses.is_dataclass(task.Options), f"Options must be a dataclass; it is {task.Options!r}")
        for name in ("defaults", "tiny_defaults"):
            value = getattr(task, name)
            _require(isinstance(value, Mapping), f"{name} must map training options to values; it is {value!r}")
        levels = task.levels
        _require(all(isinstance(level, str) for level in levels), f"levels must be texts; they are {levels!r}")
        _require(len(set(levels)) == len(levels), f"levels must differ; they are {levels!r}")
        unknown = set(task.judges()) - set(task.weights)
        _require(not unknown, f"judges {sorted(unknown)} are not among the weights: {', '.join(task.weights)}")
        yield f"name, version {task.version}, description, {len(task.weights)} weights"

    def _data(self) -> Iterator[str]:
        for split in ("train", "test"):
            self._rows += self._rows_of(split)
        yield f"rows have prompts, survive JSON and are the same when made again ({len(self._rows)} rows)"
        task = self._task
        train, test = (task.dataset(split, COMPARED, self._seed) for split in ("train", "test"))
        tested = {task.request(row): row for row in test}
        for row in train:
            if (other := tested.get(task.request(row))) is not None:
                raise AssertionError(
                    "train and test share a request, which is the prompt unless the task defines request(row): "
                    f"{_text_of(row)[:200]} and {_text_of(other)[:200]}"
                )
        rows, requests = len(train) + len(test), len(one_per_request(task, train)) + len(tested)
        different = f", {requests} different requests" if requests != rows else ""
        yield f"train and test share no request ({rows} rows{different})"

    def _rows_of(self, split: str) -> Iterator[LabelledRow]:
        call = f"dataset({split!r}, {self._size}, {self._seed})"
        rows = self._task.dataset(split, self._size, self._seed)
        _require(isinstance(rows, list), f"{call} must return a list of rows; it returned {type(rows).__name__}")
        _require(
            0 < len(rows) <= self._size, f"{call} must return 1 to {self._size} rows; it returned {len(rows)} rows"
        )
        again = self._task.dataset(split, self._size, self._seed)
        for number, row in enumerate(rows):
            label = f"{split} row {number}"
            try:
                text = _text_of(row)
            except (TypeError, ValueError) as error:
                raise AssertionError(f"{label} holds a value that JSON cannot hold: {error}") from error
            sent = json.loads(text)
            _require(sent == row, f"{label} changes when it is written as JSON and read again: {text[:200]}")
            _check_prompt(row.get("prompt"), label)
            _require(
                again[number : number + 1] == [row],
                f"{call} returned other rows when it was called again; the first difference is in row {number}: "
                f"{str([row])[:100]} and then {str(again[number : number + 1])[:100]}",
            )
            yield label, sent
        _require(len(again) == len(rows), f"{call} returned {len(rows)} rows, and then {len(again)}")

    def _levels(self) -> Iterator[str]:
        levels, enough = self._task.levels, 8 * len(self._task.levels)
        if not levels:
            yield "-   levels: the task has none"
            return
        for label, row in self._rows:
            level = row.get("level")
            _require(level in levels, f"{label}: its level is {level!r}, which is not one of {levels}")
        missing = set(levels) - {row.get("level") for row in self._task.dataset("train", enough, self._seed)}
        _require(not missing, f"there is no row of level {', '.join(sorted(missing))} among {enough} training rows")
        yield f"every row has a level, and every level has rows: {', '.join(levels)} ({enough} rows)"

    def _golds(self) -> Iterator[str]:
        checked = 0
        for label, row in self._rows:
            for gold in self._gold(row):
                told = f"{label}: the gold answer {gold[:200]!r}"
                score = self._scored(label, row, gold)
                if score is None:
                    raise AssertionError(f"{told} could not be scored: score returned None")
                _require(score.valid, f"{told} is not valid: {score.reason}")
                _require(score.success, f"{told} does not succeed: {score.reason}")
                checked += 1
        if checked:
            yield f"gold answers are valid and succeed ({self._part(checked)})"
        else:
            yield "-   gold answers: no row has one, so it is not checked that a success is possible"

    def _bads(self) -> Iterator[str]:
        checked = 0
        for label, row in self._rows:
            with suppress(NoAnswerError):
                bad = self._task.bad(row)
                score = self._scored(label, row, bad)
                _require(score is None or not score.success, f"{label}: the bad answer {bad[:200]!r} succeeds")
                checked += 1
        if checked:
            yield f"bad answers do not succeed ({self._part(checked)})"
        else:
            yield "-   bad answers: none is known, so it is not checked that an answer can fail"

    def _garbage(self) -> Iterator[str]:
        tried = self._rows[:GARBAGE_ROWS]
        for label, row in tried:
            for text in GARBAGE:
                self._scored(label, row, text)
        yield f"any text gets the same finite score each time ({len(GARBAGE)} texts, {len(tried)} rows)"
        for label, row in tried:
            for text in (*self._gold(row), GARBAGE[0], GARBAGE[8]):
                picture = self._task.render(row, text)
                _require(
                    isinstance(picture, str | bytes),
                    f"render must return HTML as text or PNG as bytes; it returned {type(picture).__name__} ({label})",
                )
            for text in (*self._gold(row), *GARBAGE):
                where = f"({label}, completion {text[:80]!a})"
                form = self._task.canonical(row, text)
                _require(isinstance(form, str), f"canonical must return text; it returned {form!r} {where}")
                new = self._task.relabel(row, text)
                asked, answer = new if isinstance(new, tuple) and len(new) == 2 else (new, text)
                _require(
                    asked is None
                    or (
                        isinstance(asked, dict) and isinstance(answer, str) and "prompt" in json.loads(_text_of(asked))
                    ),
                    f"relabel must return None, a row, or a row and an answer; it returned {new!r:.80} {where}",
                )
        yield f"any text can be rendered and compared ({len(tried)} rows)"

    def _requests(self) -> Iterator[str]:
        if not self._task.defines("row_of"):
            yield "-   rows from a user's text: the task makes none, so solve and play take rows only"
            return
        understood = 0
        for label, row in self._rows[:GARBAGE_ROWS]:
            prompt = row["prompt"]
            own = {value for value in row.values() if isinstance(value, str)}
            own |= set() if isinstance(prompt, str) else {prompt[-1]["content"]}
            for text in (*sorted(own), *(text for text in GARBAGE if len(text) < LONGEST_REQUEST)):
                where = f"({label}, text {text[:80]!a})"
                try:
                    made = self._called("row_of", where, text, allowed=ValueError)
                except ValueError:
                    continue
                _require(isinstance(made, Mapping), f"row_of must return a row; it returned {made!r:.80} {where}")
                _check_prompt(made.get("prompt"), f"what row_of returned {where}")
                if text in own:
                    for answer in (*self._gold(row), GARBAGE[0]):
                        self._scored(f"a row of row_of {where}", json.loads(_text_of(made)), answer)
                    understood += 1
        if understood:
            yield f"rows that are made from a user's text can be scored ({understood} texts)"
        else:
            yield "-   rows from a user's text: no text of a row was understood, so that none was tried"

    def _group(self) -> Iterator[str]:
        if not self._task.defines("group_components"):
            yield "-   components of a group: the task has none"
            return
        label, row = self._rows[0]
        texts = [*2 * self._gold(row), "", "something else"]
        scores = [self._task.score(row, text) for text in texts]
        for name, values in self._task.group_components([row] * len(texts), texts, scores).items():
            _require(name in self._task.weights, f"group component {name!r} is not among the weights ({label})")
            _require(
                len(values) == len(texts),
                f"group component {name!r} has {len(values)} values for {len(texts)} completions ({label})",
            )
        yield "components of a group have one value per completion (1 row)"

    def _tiny(self) -> Iterator[str]:
        if (spec := self._task.tiny()) is None:
            yield "-   tiny model: the task has none with these options"
            return
        _require(bool(spec.tokens) and all(spec.tokens), "the tokens of tiny() must be texts, none of them empty")
        _require(len(set(spec.tokens)) == len(spec.tokens), "the tokens of tiny() must differ")
        tokens = sorted({"\n", *spec.tokens}, key=len, reverse=True)  # every tiny model has line breaks
        longest_first = re.compile("|".join(map(re.escape, tokens)))
        has_gold = False
        for label, row in self._rows:
            prompt, golds = row["prompt"], self._gold(row)
            has_gold |= bool(golds)
            parts = [part for gold in golds for said in split_turns(gold) for part in said]
            for text in [*([prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]), *parts]:
                rest = longest_first.sub("", text.replace(MASK_TOKEN, "") if spec.policy == "masked" else text)
                _require(not rest, f"{label}: the tokens of tiny() cannot spell {rest[:20]!r} in {text[:200]!r}")
        yield f"the tiny model can spell prompts{' and gold answers' * has_gold} ({len(self._rows)} rows)"

    def _constraint(self) -> Iterator[str]:
        spec, tokenizer = self._task.tiny(), self._tokenizer
        if not self._task.defines("constraint"):
            yield "-   constraint: the task has none"
            return
        if tokenizer is None and spec is None:
            yield "-   constraint: the task has no tiny model, so there is no tokenizer to check it with"
            return
        if tokenizer is None:
            from ..models.tiny import make_tokenizer

            assert spec is not None
            tokenizer = make_tokenizer(spec.tokens, spec.context, fills=spec.policy == "masked")
        if (constraint := self._task.constraint(tokenizer)) is None:
            yield "-   constraint: the task has none with these options"
            return
        checked = 0
        for label, row in self._rows:
            state, golds = constraint.start(row), self._gold(row)
            if state is None or not golds:
                continue
            told = f"the gold answer {golds[0][:200]!r}"
            place = 0  # in the whole conversation
            turns, _ = split_turns(golds[0])
            if isinstance(self._task, TurnsTask):
                turns, _ = self._task.gold_turns(row, tokenizer)
            for turn in turns:
                ids = [*getattr(state, "told", ()), *tokenizer.encode(turn, add_special_tokens=False)]
                for token in (*ids, tokenizer.eos_token_id):
                    try:
                        state.accept(token)
                    except ValueError as error:
                        refusal = f"{label}: the constraint refuses {told} at token {place}: {error}"
                        raise AssertionError(refusal) from error
                    place += 1
            _require(state.finished, f"{label}: the constraint is not finished after {told}")
            checked += 1
        if checked:
            yield f"the constraint allows gold answers ({checked} rows)"
        else:
            yield "-   constraint: no row has one, or none with a gold answer"

    def _part(self, checked: int) -> str:
        many = f"{len(self._rows)} rows"
        return many if checked == len(self._rows) else f"{checked} of {many} have one"

    def _gold(self, row: Row) -> list[str]:
        """The gold answer of a row, if it has one."""
        try:
            return [self._task.gold(row)]
        except NoAnswerError:
            return []

    def _called(self, method: str, where: str, *given: Any, allowed: type[Exception] = ImportError) -> Any:
        """What a method of the task returns. An ImportError is no mistake of the task: a package is missing."""
        try:
            return getattr(self._task, method)(*given)
        except allowed:
            raise
        except Exception as error:
            described = describe_error(error, inspect.getsourcefile(type(self._task)) or "")
            instead = "" if allowed is ImportError else f", not {allowed.__name__}"
            raise AssertionError(f"{method} raised {described}{instead} {where}") from error

    def _scored(self, label: str, row: Row, completion: str) -> Score | None:
        before, where = _text_of(row), f"({label}, completion {completion[:80]!a})"
        score, again = (self._called("score", where, row, completion) for _ in range(2))
        _require(_text_of(row) == before, f"score changed the row {where}")
        _require(score == again, f"score returned {score} and then {again} {where}")
        if score is None:
            return None
        kind = type(score).__name__
        _require(isinstance(score, Score), f"score must return a Score or None; it returned {kind} {where}")
        weights = self._task.weights
        unknown = set(score.components) - set(weights)
        _require(not unknown, f"components {sorted(unknown)} are not among the weights {where}")
        for name, value in score.components.items():
            _require(
                _is_number(value) and abs(value) <= LARGEST_COMPONENT,
                f"component {name!r} must be a finite number within -1e9 and 1e9; it is {value!r} {where}",
            )
        total = math.fsum(weights[name] * value for name, value in score.components.items())
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


def _check_prompt(prompt: Any, label: str) -> None:
    is_chat = isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
    )
    _require(
        isinstance(prompt, str) or (bool(prompt) and is_chat),
        f"{label} needs a prompt: text, or messages with 'role' and 'content'; it is {str(prompt)[:100]!r}",
    )


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)


def _text_of(row: Row) -> str:
    return json.dumps(row, sort_keys=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
