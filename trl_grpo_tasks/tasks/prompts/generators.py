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
from string import Template
from typing import Any, NamedTuple

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
    if level == 1:
        text, value = f"{x} + {y}", x + y
    elif level == 2:
        text, value = f"{x} - {y}", x - y
    elif level == 3:
        text, value = rng.choice([(f"{a} + {c}", a + c), (f"{a} - {c}", a - c)])
    elif level == 4:
        text, value = rng.choice([(f"{a} + {b}", a + b), (f"{a} - {b}", a - b), (f"{a} * {c}", a * c)])
    else:
        text, value = rng.choice(
            [(f"({a} + {b}) * {c}", (a + b) * c), (f"{a} - {c} * {d}", a - c * d), (f"{b * d} / {d} + {c}", b + c)]
        )
    question = f"What is {text}? Answer with the number only."
    return Problem(question, question, {"answer": str(value), "gold": str(value)})


# ---- word problems: a and b are up to 99, c and d up to 9; r is the result of the step before

WORD_PROBLEMS: tuple[tuple[int, str, str], ...] = (
    (1, "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", "a + b"),
    (1, "There were {a} {things} on a shelf and {name} took {b} of them. How many are left?", "a - b"),
    (1, "{name} counted {a} {things} in one room and {b} in the next. How many is that in all?", "a + b"),
    (1, "{name} wants {a} {things} and has {b}. How many {things} are still missing?", "a - b"),
    (1, "A box held {a} {things}; {name} lost {c} of them. How many {things} are in the box?", "a - c"),
    (2, "{name} fills {c} bags with {a} {things} each. How many {things} is that?", "c * a"),
    (2, "{name} shares {a} {things} equally among {c} friends. How many does each friend get?", "a / c"),
    (2, "One of the {things} costs {c} coins. What do {a} of them cost, in coins?", "a * c"),
    (2, "{name} packs {a} {things} in boxes of {c}. How many full boxes are there, with none left over?", "a / c"),
    (2, "Each of {c} tables seats {d} people. How many people can sit down?", "c * d"),
    (3, "{name} buys {c} packs of {d} {things} and gives {b} away. How many are left?", "c * d; r - b"),
    (
        3,
        "{name} had {a} {things}, found {b} more and split them equally over {c} days. How many a day?",
        "a + b; r / c",
    ),
    (3, "A train has {c} cars with {a} seats each; {b} seats are taken. How many are free?", "c * a; r - b"),
    (3, "{name} earns {a} coins a day for {c} days and spends {b}. How many coins are left?", "a * c; r - b"),
    (3, "{name} reads {c} pages a day for {d} days; the book has {a} pages. How many are left?", "c * d; a - r"),
    (3, "{a} red and {b} blue {things} are put in {c} equal rows. How many are in a row?", "a + b; r / c"),
)
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
    while True:
        numbers = {name: rng.randint(2, 99 if name in "ab" else 9) for name in "abcd"}
        lines, result = [], 0
        for step in steps.split("; "):
            left, sign, right = step.split()
            x, y = ({**numbers, "r": result}[name] for name in (left, right))
            result = _STEPS[sign](x, y)
            lines.append(f"{x} {sign} {y} = {result}")
            if result < 0:
                break
        if result >= 0:
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
    task: str
    body: str
    parameters: Mapping[str, Sequence[Any]]


def _argument(rng: random.Random, kind: str) -> Any:
    if kind == "n":
        return rng.randint(0, 60)
    if kind == "xs":
        return [rng.randint(-9, 40) for _ in range(rng.randint(0, 12))]
    return " ".join("".join(rng.choices("aabbcdelot", k=rng.randint(1, 8))) for _ in range(rng.randint(1, 5)))


_K = {"k": range(2, 41)}
_SMALL = {"k": range(2, 10)}
EXERCISES: tuple[Exercise, ...] = (
    Exercise(1, "shift", "n", "returns n plus $k", "return n + $k", _K),
    Exercise(1, "scale", "xs", "returns xs with each number multiplied by $k", "return [x * $k for x in xs]", _K),
    Exercise(1, "keep_above", "xs", "keeps the numbers of xs above $k", "return [x for x in xs if x > $k]", _K),
    Exercise(1, "is_multiple", "n", "tells (True or False) whether $k divides n", "return n % $k == 0", _K),
    Exercise(1, "remainder", "n", "returns the remainder of n divided by $k", "return n % $k", _K),
    Exercise(1, "repeat", "text", "returns text written $k times in a row", "return text * $k", _K),
    Exercise(1, "distance", "n", "returns how far n is from $k, never negative", "return abs(n - $k)", _K),
    Exercise(1, "at_least", "n", "returns n, or $k if n is smaller", "return max(n, $k)", _K),
    Exercise(1, "has_length", "text", "tells whether text is longer than $k characters", "return len(text) > $k", _K),
    Exercise(1, "count_above", "xs", "counts the numbers of xs above $k", "return sum(x > $k for x in xs)", _K),
    Exercise(2, "sum_multiples", "n", "adds the multiples of $k from 1 to n", "return sum(range($k, n + 1, $k))", _K),
    Exercise(2, "count_long", "text", "counts the words of text with more than $k letters",
             "return sum(len(word) > $k for word in text.split())", _SMALL),
    Exercise(2, "rotate", "xs", "returns xs with its first $k items moved to the end, one by one",
             "for _ in range($k):\n    xs = xs[1:] + xs[:1]\nreturn xs", _K),
    Exercise(2, "chunks", "xs", "cuts xs into lists of $k items; the last may be shorter",
             "return [xs[i : i + $k] for i in range(0, len(xs), $k)]", {"k": range(2, 7)}),
    Exercise(2, "caesar", "text", "moves each letter of text $k places on in the alphabet, from z back to a, but "
             "no space", 'return "".join(c if c == " " else chr((ord(c) - 97 + $k) % 26 + 97) for c in text)',
             {"k": range(1, 26)}),
    Exercise(2, "in_base", "n", "returns n written in base $k, as text",
             'digits = ""\nwhile n >= $k:\n    digits = str(n % $k) + digits\n    n //= $k\nreturn str(n) + digits',
             _SMALL),
    Exercise(2, "closest", "xs", "returns the number of xs closest to $k (the first such), or None if xs is empty",
             "return min(xs, key=lambda x: abs(x - $k), default=None)", _K),
    Exercise(2, "count_letter", "text", "counts how often the letter '$c' occurs in text",
             "return text.count('$c')", {"c": "abcdelot"}),
    Exercise(2, "fizz", "n", "returns 'fizz' if $k divides n, else 'buzz' if $m divides n, else n as text",
             "return 'fizz' if n % $k == 0 else 'buzz' if n % $m == 0 else str(n)",
             {"k": range(2, 12), "m": range(2, 12)}),
    Exercise(2, "limit", "xs", "returns xs with numbers below $k raised to $k and numbers above $m lowered to $m",
             "return [min(max(x, $k), $m) for x in xs]", {"k": range(0, 12), "m": range(15, 30)}),
    Exercise(2, "nth_smallest", "xs", "returns the number at place $k (from 1) of xs in rising order, or None",
             "return sorted(xs)[$k - 1] if len(xs) >= $k else None", _SMALL),
    Exercise(3, "count_pairs", "xs", "counts the pairs of different places in xs whose numbers add up to $k",
             "return sum(xs[i] + xs[j] == $k for j in range(len(xs)) for i in range(j))", _K),
    Exercise(3, "longest_run", "xs", "returns how long the longest run of neighbouring numbers above $k in xs is",
             "best = run = 0\nfor x in xs:\n    run = run + 1 if x > $k else 0\n    best = max(best, run)\n"
             "return best", _K),
    Exercise(3, "sequence", "n", "returns item n (from 0) of the sequence that starts $k, $m and goes on with the sum "
             "of the last two", "a, b = $k, $m\nfor _ in range(n):\n    a, b = b, a + b\nreturn a",
             {"k": range(0, 10), "m": range(1, 10)}),
    Exercise(3, "best_window", "xs", "returns the largest sum of $k neighbours in xs, or None if xs is shorter",
             "sums = [sum(xs[i : i + $k]) for i in range(len(xs) - $k + 1)]\nreturn max(sums, default=None)", _SMALL),
    Exercise(3, "ways_to_pay", "n", "counts the ways to pay n with any number of coins worth $k and $m (order aside)",
             "return sum((n - i) % $m == 0 for i in range(0, n + 1, $k))", {"k": range(2, 6), "m": range(6, 15)}),
    Exercise(3, "squeeze", "text", "shortens every run of the same character in text to at most $k of them",
             'out = ""\nfor c in text:\n    if not out.endswith(c * $k):\n        out += c\nreturn out',
             {"k": range(1, 5)}),
    Exercise(3, "last_standing", "n", "puts people numbered 1 to n + 1 in a circle, counts round and round from "
             "person 1, takes every $k. one out, and returns the number of the last one left",
             "last = 0\nfor size in range(2, n + 2):\n    last = (last + $k) % size\nreturn last + 1",
             {"k": range(2, 31)}),
)  # fmt: skip
CODE_TESTS = 6


def draw_code(rng: random.Random, level: int) -> Problem:
    exercise = rng.choice([entry for entry in EXERCISES if entry.level == level])
    values = {name: rng.choice(choices) for name, choices in exercise.parameters.items()}
    body = Template(exercise.body).substitute(values).replace("\n", "\n    ")
    source = f"def {exercise.name}({exercise.argument}):\n    {body}\n"
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # trusted source from the table above; its return values are the expected ones
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
