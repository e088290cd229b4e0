"""Unit tests of model-written code: honest code passes, and attempts to cheat do not."""

from __future__ import annotations

import json
import os
import resource
import sys
import textwrap

import pytest

from trl_grpo_tasks.rewards import sandbox
from trl_grpo_tasks.rewards.sandbox import run_tests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add('a', 'b') == 'ab'", "assert add(2, 2) == 5"]


def test_tests_are_counted():
    result = run_tests(ADD, ADD_TESTS)
    assert (result.passed, result.total) == (3, 4)
    assert result.failures == ["assert add(2, 2) == 5: AssertionError"]
    assert run_tests("def add(a, b)", ADD_TESTS).passed == 0
    assert "SyntaxError" in run_tests("def add(a, b)", ADD_TESTS).failures[0]
    assert run_tests("", ADD_TESTS).failures[0].endswith("NameError: name 'add' is not defined")


EVERYTHING_IS_EQUAL = """
class Yes:
    def __eq__(self, other): return True
    __ne__ = lambda self, other: False
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    def __abs__(self): return 0.0
    def __hash__(self): return 3
class Int(int):
    __eq__ = Yes.__eq__
    __hash__ = int.__hash__
def add(a, b): return Yes()
def add_int(a, b): return Int(17)
"""

WRONG = "\ndef add(a, b): return None"
CHEATS = {
    "prints results": "import os\nprint('passed 4/4')\nos.write(2, b'\"\"\\n' * 9)" + WRONG,
    "exits": "import sys; sys.exit(0)",
    "exits hard": "import os; os._exit(0)",
    "exits in the function": "import os\ndef add(a, b): os._exit(0)",
    "raises SystemExit in the function": "import sys\ndef add(a, b): sys.exit(0)",
    "equals everything": EVERYTHING_IS_EQUAL,
    "patches builtins": """
import builtins
builtins.AssertionError = ValueError
builtins.exec = builtins.compile = print
"""
    + WRONG,
    "writes to every descriptor": """
import os
for fd in range(3, 64):
    for text in (b'""\\n' * 9, b'["value", true]\\n'):
        try: os.write(fd, text)
        except OSError: pass
"""
    + WRONG,
    "answers in advance": """
import os
def add(a, b):
    for fd in range(3, 64):
        try: os.write(fd, b'["value", null]\\n' * 9)
        except OSError: pass
""",
    "kills its judge": "import os\nos.kill(os.getppid(), 9)\ndef add(a, b): return a + b",
    "stops its judge": "import os\nos.kill(os.getppid(), 19)\ndef add(a, b): return a + b",
    "walks the stack": """
import sys
frame = sys._getframe()
while frame:
    for scope in (frame.f_locals, frame.f_globals):
        scope.update(run_test=lambda *a: "", describe=lambda *a: "")
    frame = frame.f_back
"""
    + WRONG,
    "replaces the messages": "import json\njson.dumps = lambda *a, **k: '[\"value\", true]'" + WRONG,
}


# The code's process contains one end of the channel, so the code can send arbitrary messages.
CHANNEL = """
import sys
frame = sys._getframe()
while "channel" not in frame.f_locals: frame = frame.f_back
channel = frame.f_locals["channel"]
"""
TAKES_OVER = "import os; os.write(3, b'\"\"\\n' * 9); os._exit(0)"
CHEATS |= {
    "raises an exception without a name": """
class Nothing(Exception): pass
Nothing.__name__ = ""
def add(a, b): raise Nothing
""",
    "raises exec": f"{CHANNEL}channel.send('raise', [['builtins', 'exec']], {TAKES_OVER!r})",
    "has a file of its own imported": f"""{CHANNEL}
open("test_it.py", "w").write({TAKES_OVER!r})
channel.do_names = lambda: ("value", {{"dict": [["add", {{"module": "unittest.__main__"}}]]}})
""",
    "sends names of builtins": f"""{CHANNEL}
class Number:
    def __sub__(self, other): return self
names = {{"add": lambda a, b: Number(), "abs": lambda x: 0.0, "__builtins__": {{"abs": lambda x: 0.0}}}}
channel.do_names = lambda: ("value", channel.encode(names))
""",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_does_not_score(cheat):
    tests = [*ADD_TESTS, "assert abs(add(1, 2) - 3) < 1e-6", "assert add(1, 2) in (3,)", "assert 3 <= add(1, 2) <= 3"]
    result = run_tests(CHEATS[cheat], tests, timeout=2)
    assert result.passed == 0, (result.failures, result.result)
    assert len(result.failures) == len(tests)


OWN_MATH = "class math:\n    @staticmethod\n    def isclose(*args): return True\n    pi = 1\ndef f(): return 9.0\n"
MATH_TESTS = ["assert math.isclose(f(), 3)", "assert math.isclose(f(), 9)", "assert math.pi == 1"]
QUIET = "class Quiet:\n    def __enter__(self): return 3\n    def __exit__(self, *error): return True"
PROGRAM = "def check(x): pass\nclass math:\n    isclose = lambda *a: True\nx = 5"
VERDICTS = {  # the code, its tests, how many of them pass, their setup
    "a subclass that equals everything is only its value": (
        EVERYTHING_IS_EQUAL, ["assert add_int(1, 2) == 3", "assert add_int(1, 2) == 17"], 1, ""),
    "a context manager of the code cannot suppress an assertion": (
        QUIET, [f"with Quiet() as value:\n    assert value == {n}" for n in (3, 4)], 1, ""),
    "a module that the tests do not import is the real one": (OWN_MATH, MATH_TESTS, 1, ""),
    "also if the code has not imported it": ("def f(): return 9.0", MATH_TESTS, 1, ""),
    "a name shared with a module is the code's if the module lacks the attribute": (
        "class queue:\n    def push(x): return x\ndef statistics(xs): return sum(xs)\n",
        ["assert queue.push(3) == 3", "assert statistics([1, 2]) == 3"], 2, ""),
    "text that a test executes cannot replace functions and modules of the tests": (
        f"def f(): return {PROGRAM!r}\ndef g(): return 9",
        ["x = 3\nexec(f())\nassert x == 5", "check(g())", "assert math.isclose(g(), 3)"], 1,
        "import math\ndef check(x): assert x == 3"),
    "redefined builtins do not reach the tests": (
        "def abs(x): return 0\ndef f(x): return 10.0", ["assert abs(f(2) - 3.14) < 1e-6"], 0, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_names_and_values_of_the_code_do_not_replace_those_of_the_tests(case):
    code, tests, passed, setup = VERDICTS[case]
    result = run_tests(code, tests, setup=setup)
    assert result.passed == passed and len(result.failures) == len(tests) - passed, result.failures


def test_the_verdicts_are_out_of_reach_in_a_host_with_many_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 5000:
        pytest.skip(f"no more than {hard} open files here")
    code = """
        import os
        for fd in range(100, 5000):
            try: os.write(fd, b'""\\n')
            except OSError: pass
        os._exit(0)
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (5000, hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(4200)]
    try:
        assert run_tests(textwrap.dedent(code), ["assert add(1, 2) == 3"]).passed == 0
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_text_that_a_test_evaluates_runs_in_the_codes_process():
    forge = "__import__('os').write(3, b'\"\"\\n' * 9) or __import__('os')._exit(0)"
    patch = "__import__('sys').modules['jail.runner'].__dict__.update(run_test=lambda *a: '')"
    for text in (forge, patch):
        code = f"def f(): return {text!r}"
        for call in ("eval(f())", "exec(f())", "exec(compile(f(), 'f', 'exec'))"):
            result = run_tests(code, [f"assert {call} == 3", "assert f() == 3", "assert 1 == 2"])
            assert result.passed == 0, (text, call, result.failures)


def test_eval_and_exec_work_in_tests():
    code = """
        def expression(): return " x * 2 + double(1)"
        def program(): return "def triple(n): return 3 * n\\nlimit = triple(2)"
        def double(n): return 2 * n
        def broken(): return "def"
    """
    tests = [
        "x = 20\nassert eval(expression()) == 42",
        "def check():\n    x = 1\n    return eval(expression())\nassert check() == 4",
        "assert eval(expression(), {'x': 2, 'double': double}) == 6 and eval('[y for y in (1, 2)]') == [1, 2]",
        "exec(program())\nassert triple(5) == 15 and limit == 6",
        "space = {}\nexec(compile(program(), 'generated', 'exec'), space)\nassert space['triple'](2) == 6",
        "try:\n    compile(broken(), 'generated', 'exec')\n    assert False\nexcept SyntaxError:\n    pass",
    ]
    assert run_tests(textwrap.dedent(code), tests).failures == []


@pytest.mark.parametrize(
    "garbage", [b"\xff\n", b'""\n', b"not JSON\n", b"KEY 3\n", b"KEY [\n", b"KEY " + b"[" * 100_000 + b"\n"]
)
def test_garbage_on_the_verdict_pipe_fails_the_remaining_tests(monkeypatch, garbage):
    real = sandbox.run_launcher

    def meddled(order, layers, job, *args, **kwargs):
        result, verdicts = real(order, layers, job, *args, **kwargs)
        first, rest = verdicts.split(b"\n", 1)
        return result, first + b"\n" + garbage.replace(b"KEY", json.loads(job)["key"].encode()) + rest

    monkeypatch.setattr(sandbox, "run_launcher", meddled)
    result = run_tests(ADD, ADD_TESTS[:3])
    assert result.passed == 1 and len(result.failures) == 2
    assert all("invalid output in place of its verdict" in failure for failure in result.failures)


def test_the_code_cannot_inspect_objects_of_the_tests():
    code = """
        import os, sys
        def use(function):
            # Use the channel's end in this process to ask the tests' process for something other than a call.
            frame = sys._getframe()
            while "channel" not in frame.f_locals:
                frame = frame.f_back
            channel = frame.f_locals["channel"]
            try:
                return repr(channel.ask("apply", "getattr", 1, ["__globals__"]))
            except ValueError as error:
                return str(error)
    """
    result = run_tests(textwrap.dedent(code), ["assert use(lambda x: x) == \"'apply' is not allowed here\""])
    assert result.passed == 1, (result.failures, result.result)


def test_a_test_that_never_ends_fails_the_remaining_tests():
    code = "def good(): return 1\ndef forever():\n    while True: pass"
    result = run_tests(code, ["assert good() == 1", "assert forever() == 1", "assert good() == 1"], timeout=1)
    assert result.passed == 1 and result.result.timed_out
    assert all("timed out after 1 s" in failure for failure in result.failures)


LIBRARY = """
from collections import namedtuple
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
    def __repr__(self): return f"Stack({self.items})"
class Empty(ValueError): pass
Point = namedtuple("Point", "x y")
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
def same(x): return x
"""


@pytest.mark.parametrize(
    "test",
    [
        "s = Stack()\ns.push(3).push(4)\nassert s.pop() == 4 and len(s) == 1",
        "s = Stack([3])\nassert 3 in s and s[0] == 3 and list(s) == [3]",
        "assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2]) and Stack([1]) != [1]",
        "assert Stack([1]) + Stack([2]) == Stack([1, 2]) and repr(Stack([1]) + 2) == 'Stack([1, 2])'",
        "assert isinstance(Stack(), Stack) and not isinstance(3, Stack)",
        "s = Stack()\ns.items = [7]\nassert s.items == [7]",
        "try:\n    Stack().pop()\n    assert False\nexcept Empty as error:\n    assert str(error) == 'nothing there'",
        "try:\n    Stack().pop()\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "assert list(squares(4)) == [0, 1, 4, 9] and sum(squares(3)) == 5",
        "i = squares(1); next(i)\ntry: next(i); assert False\nexcept StopIteration: pass",
        "items, seen = [3, 1, 2], set()\nsort_in_place(items, seen)\nassert items == [1, 2, 3] and seen == {3}",
        "assert twice(lambda x: x * 3, 2) == 18 and twice(abs, -2) == 2 and adder(2)(3) == 5",
        "assert product(2000) == math.factorial(2000) and LIMIT == 5",
        "assert Point(1, 2) == (1, 2) and Point(1, 2).x == 1",
        "def check(f):\n    for n in range(5):\n        assert f(n) == math.factorial(n)\ncheck(product)",
        *(
            f"assert same({value}) == {value} and type(same({value})) is type({value})"
            for value in (
                "None", "True", "-3", "2.5", "float('inf')", "1j", "'é\\ud800'", "b'ab'", "bytearray(b'x')",
                "[1, [2]]",
                "(1, (2, [3]))", "{1, 2}", "frozenset({1})", "{(1, 2): {'a': None}}", "range(1, 9, 2)", "2**70", "int",
            )
        ),
    ],
)  # fmt: skip
def test_language_features_that_work_in_tests(test):
    result = run_tests(LIBRARY, [test], setup="import math")
    assert result.passed == 1, (result.failures, result.result.stderr)
