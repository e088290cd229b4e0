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
from collections import OrderedDict, namedtuple

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

def annotation(): return Point.__annotations__["x"] is int
def hints(): return typing.get_type_hints(Point) == {"x": int, "y": int}
def pickled(): return pickle.loads(pickle.dumps(Point(1, 2))) == Point(1, 2)
def norm_of(vector): return vector.norm()
def module(): return __name__, Point.__module__

class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty("nothing there")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __contains__(self, item): return item in self.items
    def __eq__(self, other): return self.items == other.items
    def __add__(self, other): return Stack(self.items + (other.items if isinstance(other, Stack) else [other]))
    def __rmul__(self, other): return Stack(other * self.items)
    def __repr__(self): return f"Stack({self.items})"
class Empty(ValueError): pass
Pair = namedtuple("Pair", "x y")
LIMIT = 5
def squares(n):
    for i in range(n): yield i * i
def sort_in_place(items, seen): items.sort(); seen.add(len(items))
def twice(function, x): return function(function(x))
def adder(n): return lambda x: x + n
def product(n):
    result = 1
    for i in range(2, n + 1): result *= i
    return result
"""
PROGRAM_TESTS = [
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
    "s = Stack()\ns.push(3).push(4)\nassert s.pop() == 4 and len(s) == 1",
    "s = Stack([3])\nassert 3 in s and s[0] == 3 and list(s) == [3]",
    "assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2]) and Stack([1]) != [1]",
    "assert Stack([1]) + Stack([2]) == Stack([1, 2]) and repr(Stack([1]) + 2) == 'Stack([1, 2])'",
    "assert 2 * Stack([3]) == Stack([3, 3])",
    "assert isinstance(Stack(), Stack) and not isinstance(3, Stack)",
    "s = Stack()\ns.items = [7]\nassert s.items == [7]",
    "try:\n    Stack().pop()\n    assert False\nexcept Empty as error:\n    assert str(error) == 'nothing there'",
    "try:\n    Stack().pop()\nexcept ValueError:\n    pass\nelse:\n    assert False",
    "assert list(squares(4)) == [0, 1, 4, 9] and sum(squares(3)) == 5",
    "i = squares(1); next(i)\ntry: next(i); assert False\nexcept StopIteration: pass",
    "items, seen = [3, 1, 2], set()\nsort_in_place(items, seen)\nassert items == [1, 2, 3] and seen == {3}",
    "assert twice(lambda x: x * 3, 2) == 18 and twice(abs, -2) == 2 and adder(2)(3) == 5",
    "assert product(2000) == math.factorial(2000) and LIMIT == 5",
    "assert Pair(1, 2) == (1, 2) and Pair(1, 2).x == 1",
    "def check(f):\n    for n in range(5):\n        assert f(n) == math.factorial(n)\ncheck(product)",
]


def test_code_works_as_it_does_in_a_file():
    assert run_tests(PROGRAM, PROGRAM_TESTS, setup="import math").failures == []


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
def shown(x): return repr(x)
def wrong(x): return x * 2 if isinstance(x, fractions.Fraction) else x + x
"""
VALUES = """
None; True; -3; 2.5; float('inf'); 1j; 'é\\ud800'; b'ab'; bytearray(b'x'); [1, [2]]; (1, (2, [3])); {1, 2}
frozenset({1}); {(1, 2): {'a': None}}; range(1, 9, 2); 2**70; int
fractions.Fraction(1, 3); decimal.Decimal('1.10'); decimal.Decimal('-0'); datetime.date(2024, 2, 29)
datetime.time(1, 2, 3, 4); datetime.datetime(2024, 2, 29, 1, 2, 3, 4); datetime.timedelta(days=-1, microseconds=5)
datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone.utc)
datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone(datetime.timedelta(hours=2), 'X'))
collections.deque([1, (2, 3)], maxlen=4); collections.Counter('abca'); collections.OrderedDict([('b', 1), ('a', 2)])
collections.defaultdict(list, {1: [2]}); array.array('i', [1, 2]); uuid.UUID(int=7); pathlib.PurePosixPath('a/b')
pathlib.Path('a'); ipaddress.ip_address('10.0.0.1'); ipaddress.ip_network('fd00::/8'); {'a': 1}.keys()
{'a': 1}.items(); [{fractions.Fraction(1, 2): collections.deque()}]
"""


def test_values_are_returned_unchanged():
    setup = "import array, collections, datetime, decimal, fractions, ipaddress, pathlib, uuid"
    check = "v = {}\nw = same(v)\nassert w == v and type(w) is type(v) and repr(w) == repr(v) == shown(v)"
    tests = [check.format(value) for value in VALUES.strip().replace("\n", "; ").split("; ")]
    result = run_tests(LIBRARY, tests, setup=setup)
    assert result.failures == [] and result.passed == 39


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
