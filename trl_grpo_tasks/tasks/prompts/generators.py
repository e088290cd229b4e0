"""Generated problems with answers that are correct by construction: arithmetic, word problems, code and JSON.

Row i is drawn with Random(f"{seed}-{split}-{i}"). The split of a problem depends on a hash of the problem itself, so
the splits have no problem in common, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import json
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from ...files import read_table

_TABLES: dict[str, list[Any]] = read_table(Path(__file__).with_suffix(".yaml"))
ATTEMPTS = 300  # draws without a new problem after which a level counts as exhausted
ROWS = {"train": 2000, "test": 200}  # default number of rows


class Problem(NamedTuple):
    """A question, the columns that its rewards read, and a key that identifies the problem."""

    key: str
    question: str
    columns: dict[str, Any]


class Generator(NamedTuple):
    """One kind of problems: the number of levels, the rewards, and a function that draws a problem."""

    levels: int
    rewards: dict[str, float]
    draw: Callable[[random.Random, int], Problem]


def generate(
    kind: str, levels: Sequence[str], split: str, size: int | None, seed: int, test_fraction: float
) -> Iterator[dict[str, Any]]:
    """Generate rows of `kind`, alternating between levels.

    When a level is exhausted, its training rows are repeated, so that levels stay balanced. Test rows are not
    repeated, so there may be fewer than `size`.
    """
    kinds = list(GENERATORS) if kind == "mixed" else [kind]
    cells = [(name, level) for level in levels for name in kinds if int(level) <= GENERATORS[name].levels]
    rows_of: dict[tuple[str, str], dict[str, dict[str, Any]]] = {cell: {} for cell in cells}
    used_up: set[tuple[str, str]] = set()
    given = index = 0
    while cells and given < (ROWS[split] if size is None else size):
        cell = name, level = cells[index % len(cells)]
        rows = rows_of[cell]
        rng = random.Random(f"{seed}-{split}-{index}")
        index += 1
        for _ in range(0 if cell in used_up else ATTEMPTS):
            problem = GENERATORS[name].draw(rng, int(level))
            if problem.key not in rows and in_test(problem.key, test_fraction) == (split == "test"):
                chosen = {"kind": name, "level": level, "rewards": dict(GENERATORS[name].rewards)}
                row = rows[problem.key] = {"prompt": problem.question, **chosen, **problem.columns}
                break
        else:
            used_up.add(cell)
            if split == "test" or not rows:
                cells.remove(cell)
                continue
            row = rng.choice(list(rows.values()))
        given += 1
        yield row


def levels_of(kind: str) -> tuple[str, ...]:
    """Return the levels of a generator, from easy to hard."""
    deepest = max(g.levels for name, g in GENERATORS.items() if kind in (name, "mixed"))
    return tuple(str(level) for level in range(1, deepest + 1))


def in_test(key: str, test_fraction: float) -> bool:
    """Return whether a problem belongs to the test split, which depends only on the problem."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < test_fraction * 2**64


# ---- arithmetic

# The embedded model has these pieces as single tokens, which keeps its sequences short.
ARITHMETIC_TOKENS = ("What is ", "? Answer with the number only.", " + ", " - ", " * ", " / ", *"0123456789-()")


def draw_arithmetic(rng: random.Random, level: int) -> Problem:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    c, d = rng.randint(2, 9), rng.randint(2, 12)
    x, y = rng.randint(0, 9), rng.randint(0, 9)
    kinds = {
        1: [(f"{x} + {y}", x + y)],
        2: [(f"{x} - {y}", x - y)],
        3: [(f"{a} + {c}", a + c), (f"{a} - {c}", a - c)],
        4: [(f"{a} + {b}", a + b), (f"{a} - {b}", a - b), (f"{a} * {c}", a * c)],
        5: [(f"({a} + {b}) * {c}", (a + b) * c), (f"{a} - {c} * {d}", a - c * d), (f"{b * d} / {d} + {c}", b + c)],
    }
    text, value = rng.choice(kinds[level]) if level > 2 else kinds[level][0]
    question = f"What is {text}? Answer with the number only."
    return Problem(question, question, {"answer": str(value), "gold": str(value)})


# ---- word problems

WORD_PROBLEMS: list[tuple[int, str, str]] = _TABLES["word_problems"]
NAMES = ("Ada", "Ben", "Chen", "Dara", "Eli", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kemi", "Luz")
THINGS = ("apples", "marbles", "books", "coins", "pencils", "shells", "stamps", "tickets", "buttons", "cards")
_STEPS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda x, y: x // y if x % y == 0 else -1,  # a negative result is drawn again
}


def draw_word_problem(rng: random.Random, level: int) -> Problem:
    _, template, steps = rng.choice([entry for entry in WORD_PROBLEMS if entry[0] == level])
    result = -1
    while result < 0:
        numbers = {name: rng.randint(2, 99 if name in "ab" else 9) for name in "abcd"}
        lines, result = [], 0
        for step in steps.split("; "):
            left, sign, right = step.split()
            x, y = ({**numbers, "r": result}[name] for name in (left, right))
            result = _STEPS[sign](x, y)
            lines.append(f"{x} {sign} {y} = {result}")
            if result < 0:
                break
    story = template.format(name=rng.choice(NAMES), things=rng.choice(THINGS), **numbers)
    gold = "\n".join([*lines, f"#### {result}"])
    question = f"{story} Write down the steps, then the final number after ####."
    return Problem(question, question, {"answer": str(result), "gold": gold})


# ---- small programs


class Exercise(NamedTuple):
    """A function to write. `$k` and similar names are parameters, drawn for each problem."""

    level: int
    name: str
    argument: str
    parameters: Mapping[str, Any]  # the least and the greatest number, or letters
    task: str
    body: str


EXERCISES = [Exercise(**entry) for entry in _TABLES["exercises"]]
CODE_TESTS = 6


def _argument(rng: random.Random, kind: str) -> Any:
    if kind == "n":
        return rng.randint(0, 60)
    if kind == "xs":
        return [rng.randint(-9, 40) for _ in range(rng.randint(0, 12))]
    return " ".join("".join(rng.choices("aabbcdelot", k=rng.randint(1, 8))) for _ in range(rng.randint(1, 5)))


def draw_code(rng: random.Random, level: int) -> Problem:
    exercise = rng.choice([entry for entry in EXERCISES if entry.level == level])
    values: dict[str, Any] = {
        name: rng.choice(drawn if isinstance(drawn, str) else range(drawn[0], drawn[1] + 1))
        for name, drawn in exercise.parameters.items()
    }
    body = Template(exercise.body).substitute(values).replace("\n", "\n    ")
    source = f"def {exercise.name}({exercise.argument}):\n    {body}\n"
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # trusted source from our own table; its return values are the expected ones
    cases = _discriminating_cases(rng, namespace[exercise.name], exercise.argument, values.get("k"))
    if cases is None:
        return draw_code(rng, level)
    call, expected = cases[0]
    question = (
        f"Write a Python function {exercise.name}({exercise.argument}) that "
        f"{Template(exercise.task).substitute(values)}. For example, {exercise.name}({call}) returns {expected}. "
        "Answer with the code only, in a ```python block."
    )
    tests = [f"assert {exercise.name}({argument}) == {expected}" for argument, expected in cases]
    return Problem(f"code {exercise.name} {values}", question, {"tests": tests, "gold": f"```python\n{source}```"})


def _discriminating_cases(
    rng: random.Random, function: Callable[[Any], Any], kind: str, k: int | None
) -> list[tuple[str, str]] | None:
    """Return test cases that neither a constant nor the identity would pass, or None if there are none."""
    arguments = [_argument(rng, kind) for _ in range(30)]
    if kind == "n" and k is not None:
        arguments += [max(0, k + step) for step in (-2, -1, 0, 1, 2)]
    rng.shuffle(arguments)
    pairs = {repr(argument): repr(function(argument)) for argument in arguments}
    first_of_result = {result: argument for argument, result in pairs.items()}
    changed = [(argument, result) for argument, result in pairs.items() if argument != result]
    cases = [(argument, result) for result, argument in first_of_result.items()][: CODE_TESTS - 1]
    if len(cases) < 2 or not changed:
        return None
    cases.append(changed[0])
    cases += [pair for pair in pairs.items() if pair not in cases]
    return list(dict.fromkeys(cases))[:CODE_TESTS]


# ---- answers in a JSON schema


class Field(NamedTuple):
    """One property: its schema, how to draw a value, and how to express it in words."""

    schema: dict[str, Any]
    draw: Callable[[random.Random], Any]
    say: Callable[[Any], Any] = str


def _one_of(*values: str) -> Field:
    return Field({"type": "string", "enum": list(values)}, lambda rng: rng.choice(values))


def _text(*values: str) -> Field:
    return Field({"type": "string"}, lambda rng: rng.choice(values))


def _whole(low: int, high: int) -> Field:
    return Field({"type": "integer", "minimum": low, "maximum": high}, lambda rng: rng.randint(low, high))


def _flag(yes: str, no: str) -> Field:
    return Field({"type": "boolean"}, lambda rng: rng.random() < 0.5, lambda value: yes if value else no)


def _object(**parts: Field) -> Field:
    shape = {
        "type": "object",
        "properties": {name: part.schema for name, part in parts.items()},
        "required": list(parts),
        "additionalProperties": False,
    }
    return Field(
        shape,
        lambda rng: {name: part.draw(rng) for name, part in parts.items()},
        lambda value: {name: part.say(value[name]) for name, part in parts.items()},
    )


def _several(item: Field, say: Callable[[Any], str] = str) -> Field:
    def draw(rng: random.Random) -> list[Any]:
        drawn = [item.draw(rng) for _ in range(rng.randint(1, 3))]
        return [value for place, value in enumerate(drawn) if value not in drawn[:place]]

    shape = {"type": "array", "items": item.schema, "minItems": 1}
    return Field(shape, draw, lambda values: " and ".join(say(value) for value in values))


_NAME = _text(*NAMES)
_CITY = _text("Lagos", "Lima", "Oslo", "Osaka", "Quito", "Riga", "Tunis", "Turin", "Perth", "Porto")
_DATE = Field(
    {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
    lambda rng: f"{rng.randint(2020, 2029)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
)
_CENTS = Field({"type": "number", "minimum": 0}, lambda rng: rng.randint(100, 9999) / 100)
FAMILIES: tuple[tuple[int, str, Field], ...] = (
    (1, "{name} is {age} years old and lives in {city}.", _object(name=_NAME, age=_whole(18, 90), city=_CITY)),
    (1, "The {item} costs {price} and there are {stock} in stock.",
     _object(item=_text("lamp", "chair", "kettle", "rug", "clock", "vase"), price=_CENTS, stock=_whole(0, 500))),
    (1, "On {date} it was {degrees} degrees in {city}.", _object(date=_DATE, degrees=_whole(-30, 45), city=_CITY)),
    (2, "{owner} has a {animal} called {name}, which {vaccinated}.",
     _object(owner=_NAME, animal=_one_of("cat", "dog", "parrot", "rabbit"),
             name=_text("Momo", "Pixel", "Rex", "Tofu", "Zazu"),
             vaccinated=_flag("has been vaccinated", "has not been vaccinated"))),
    (2, "Ticket {number}, of {priority} priority, is about {labels} and {open}.",
     _object(number=_whole(1000, 9999), priority=_one_of("low", "normal", "high"),
             labels=_several(_one_of("billing", "login", "printing", "network")),
             open=_flag("is still open", "is closed"))),
    (2, "{guests} meet in {city} on {date}.", _object(guests=_several(_NAME), city=_CITY, date=_DATE)),
    (3, "{customer[name]} of {customer[city]} ordered {items}; the order is {status}.",
     _object(customer=_object(name=_NAME, city=_CITY),
             items=_several(_object(item=_one_of(*THINGS), quantity=_whole(2, 20)),
                            lambda value: f"{value['quantity']} {value['item']}"),
             status=_one_of("paid", "sent", "cancelled"))),
    (3, "Flight {code} goes from {departure[city]} on {departure[date]} to {arrival[city]} on {arrival[date]} with "
     "{seats} seats free.",
     _object(code=Field({"type": "string"}, lambda rng: f"{rng.choice('ABKLT')}{rng.randint(100, 999)}"),
             departure=_object(city=_CITY, date=_DATE), arrival=_object(city=_CITY, date=_DATE),
             seats=_whole(0, 200))),
    (3, "Sensor {sensor} in {place[city]}, room {place[room]}, measured {readings}; it {ok}.",
     _object(sensor=_whole(1, 99), place=_object(city=_CITY, room=_whole(100, 499)),
             readings=_several(_whole(0, 1000)), ok=_flag("works", "is broken"))),
)  # fmt: skip


def draw_schema(rng: random.Random, level: int) -> Problem:
    _, sentence, shape = rng.choice([entry for entry in FAMILIES if entry[0] == level])
    facts = shape.draw(rng)
    story = sentence.format(**shape.say(facts))
    schema, gold = json.dumps(shape.schema), json.dumps(facts)
    question = (
        f"{story} Answer with one JSON object that follows this JSON schema, and nothing else. "
        f"Values are written as in the sentence. {schema}"
    )
    return Problem(question, question, {"schema": schema, "fields": gold, "gold": gold})


GENERATORS: dict[str, Generator] = {
    "arithmetic": Generator(5, {"numeric": 1.0}, draw_arithmetic),
    "word_problems": Generator(3, {"numeric": 1.0}, draw_word_problem),
    "code": Generator(3, {"tests": 1.0}, draw_code),
    "schema": Generator(3, {"schema": 0.5, "fields": 0.5}, draw_schema),
}
