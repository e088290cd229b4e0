"""Correct programs pass their tests: modules and classes work as in a file, and values are passed unchanged."""

from __future__ import annotations

import sys
import textwrap

import pytest

from trl_grpo_tasks.rewards.sandbox import run_tests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

PROGRAM = """
import dataclasses
import enum
import pickle
import typing
from collections import OrderedDict

@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: "int" = 0
    def moved(self, dx: int) -> "Point":
        return dataclasses.replace(self, x=self.x + dx)

class Vector(typing.NamedTuple):
    x: float
    y: float
    def norm(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)

class Color(enum.IntEnum):
    RED = 1
    BLUE = 2

class Unit(str, enum.Enum):
    METRE = "m"

class Cache(OrderedDict):
    def put(self, key, value):
        self[key] = value
        if len(self) > 2:
            self.popitem(last=False)

class Factor:
    def __init__(self, value): self.value = value
    def __rmul__(self, other): return Factor(other * self.value)
    def __eq__(self, other): return self.value == other.value

def annotation(): return Point.__annotations__["x"] is int
def hints(): return typing.get_type_hints(Point) == {"x": int, "y": int}
def pickled(): return pickle.loads(pickle.dumps(Point(1, 2))) == Point(1, 2)
def norm_of(vector): return vector.norm()
def module(): return __name__, Point.__module__
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert Point(1, 2).moved(3) == Point(4, 2) and Point(1).y == 0",
        "assert annotation() and hints()",
        "assert pickled()",
        "assert module() == ('solution', 'solution')",
        "assert len({Point(1, 2), Point(1, 2), Point(2, 2)}) == 2 and {Point(1): 3}[Point(1)] == 3",
        "v = Vector(3, 4)\nx, y = v\nassert v.norm() == 5 and v == (3, 4) and v != (3, 5) and x == v.x == v[0] == 3",
        "assert Vector(1, 2) + Vector(3, 4) == (4, 6) and norm_of(Vector(3, 4)) == 5",
        "assert isinstance(Vector(1, 2), Vector) and repr(Vector(1, 2)) == 'Vector(x=1, y=2)'",
        "assert Color.RED == 1 and Color.RED.name == 'RED' and Color(2) == Color.BLUE and Color.RED + 1 == 2",
        "assert Unit.METRE == 'm' and Unit.METRE.value == 'm'",
        "c = Cache()\nfor i in range(3): c.put(i, i)\nassert c == {1: 1, 2: 2} and len(c) == 2 and 0 not in c",
        "assert 2 * Factor(3) == Factor(6)",
    ],
)
def test_a_program_works_as_it_does_in_a_file(test):
    result = run_tests(PROGRAM, [test])
    assert result.passed == 1, (result.failures, result.result.stderr)


def test_exceptions_of_the_standard_library_keep_their_class():
    code = """
        import dataclasses, decimal, json
        class Lost(json.JSONDecodeError): pass
        @dataclasses.dataclass(frozen=True)
        class Point: x: int = 0
        def parse(text): return json.loads(text)
        def divide(): return decimal.Decimal(1) / 0
        def lose(): raise Lost("gone", "", 0)
    """
    caught = "try:\n    {}\n    assert False\nexcept {} as error:\n    assert '{}' in str(error)"
    raised = [
        ("parse('[')", "json.JSONDecodeError", "line 1"),
        ("divide()", "decimal.DivisionByZero", "DivisionByZero"),
        ("Point().x = 1", "dataclasses.FrozenInstanceError", "cannot assign"),
        ("lose()", "Lost", "gone"),
        ("lose()", "json.JSONDecodeError", "gone"),
    ]
    tests = ["import dataclasses, decimal, json", *(caught.format(*one) for one in raised)]
    assert run_tests(textwrap.dedent(code), tests).failures == []


def test_future_imports_of_the_judge_do_not_apply_to_the_tests():
    tests = ["def f(x: int): pass\nassert f.__annotations__ == {'x': int}"]
    result = run_tests("", tests, setup="def g(x: str): pass\nassert g.__annotations__ == {'x': str}")
    assert result.passed == 1, result.failures


LIBRARY = """
import array, collections, datetime, decimal, fractions, ipaddress, pathlib, uuid, zoneinfo
def same(x): return x
def wrong(x): return x * 2 if isinstance(x, fractions.Fraction) else x + x
def grow(x):
    x.append(9)
    return len(x)
"""
VALUES = """
fractions.Fraction(1, 3); decimal.Decimal('1.10'); decimal.Decimal('-0'); datetime.date(2024, 2, 29)
datetime.time(1, 2, 3, 4); datetime.datetime(2024, 2, 29, 1, 2, 3, 4); datetime.timedelta(days=-1, microseconds=5)
datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone.utc)
datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone(datetime.timedelta(hours=2), 'X'))
collections.deque([1, (2, 3)], maxlen=4); collections.Counter('abca'); collections.OrderedDict([('b', 1), ('a', 2)])
collections.defaultdict(list, {1: [2]}); array.array('i', [1, 2]); uuid.UUID(int=7); pathlib.PurePosixPath('a/b')
pathlib.Path('a'); ipaddress.ip_address('10.0.0.1'); ipaddress.ip_network('fd00::/8'); {'a': 1}.keys()
{'a': 1}.items(); [{fractions.Fraction(1, 2): collections.deque()}]
"""


def test_values_of_the_standard_library_are_returned_unchanged():
    setup = "import array, collections, datetime, decimal, fractions, ipaddress, pathlib, uuid"
    check = "v = {}\nw = same(v)\nassert w == v and type(w) is type(v) and repr(w) == repr(v)"
    tests = [check.format(value) for value in VALUES.strip().replace("\n", "; ").split("; ")]
    result = run_tests(LIBRARY, tests, setup=setup)
    assert result.failures == [] and result.passed == 22


def test_wrong_values_of_the_standard_library_do_not_pass():
    names = "from fractions import Fraction\nfrom datetime import timedelta\nfrom collections import Counter"
    tests = [f"assert wrong({v}) == {v}" for v in ("Fraction(1, 3)", "timedelta(1)", "Counter('a')")]
    result = run_tests(LIBRARY, tests, setup=names)
    assert [failure.rpartition(": ")[2] for failure in result.failures] == ["AssertionError"] * 3


def test_returned_objects_keep_the_methods_of_their_class():
    code = """
        from collections import Counter, defaultdict, deque
        from fractions import Fraction
        def count(text): return Counter(text)
        def group(words):
            groups = defaultdict(list)
            for word in words: groups[len(word)].append(word)
            return groups
        def grow(items): items.append(9)
    """
    tests = [
        "assert count('abca').most_common(1) == [('a', 2)]",
        "assert group(['a', 'bb', 'c']) == {1: ['a', 'c'], 2: ['bb']} and group([])[5] == []",
        "from collections import deque\nd = deque([1], 2)\ngrow(d)\nassert d == deque([1, 9])",
        "assert Fraction(1, 2) + Fraction(1, 3) == Fraction(5, 6) and deque([1]) == deque([1])",  # the code's imports
    ]
    assert run_tests(textwrap.dedent(code), tests).failures == []
