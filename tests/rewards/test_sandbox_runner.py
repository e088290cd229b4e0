"""Unit tests of model-written code: honest code passes, and attempts to cheat do not."""

from __future__ import annotations

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
    "patches builtins": f"""
import builtins
builtins.AssertionError = ValueError
builtins.exec = builtins.compile = print
{WRONG}""",
    "writes to every descriptor": """
import os
for fd in range(1, 64):
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
    "raises an error without a class": f"{CHANNEL}def add(a, b): channel.send('raise', [], '')",
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
    result = run_tests(CHEATS[cheat], tests, timeout=1)
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
    code = f"""{CHANNEL}
def f(): return {patch!r}
names = channel.encode({{"f": f}})
names["dict"].append(["run", {{"builtin": "eval"}}])
channel.do_names = lambda: ("value", names)
"""
    assert run_tests(code, ["assert run(f()) == 3", "assert f() == 3"]).passed == 0, (
        "nor is `eval` taken from the code"
    )


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


def test_garbage_on_the_verdict_pipe_fails_the_remaining_tests():
    for garbage in (b"\xff\n", b'""\n', b"not JSON\n", b"KEY 3\n", b"KEY [\n", b"KEY " + b"[" * 100_000 + b"\n"):
        written = (b'KEY ""\n' + garbage + b'KEY ""\n').replace(b"KEY", b"a1b2")
        verdicts = sandbox._read_verdicts(written, "a1b2", 3, "not reached")
        assert verdicts == ["", *["invalid output in place of its verdict"] * 2], garbage[:20]
    assert sandbox._read_verdicts(b'a1b2 ""\na1b2 "', "a1b2", 2, "not reached") == ["", "not reached"], "half a line"


def test_the_code_cannot_inspect_objects_of_the_tests():
    """It asks the tests' process for something other than a call."""
    code = f"""{CHANNEL}
def use(function):
    try: return repr(channel.ask("apply", "getattr", 1, ["__globals__"]))
    except ValueError as error: return str(error)
"""
    result = run_tests(code, ["assert use(lambda x: x) == \"'apply' is not allowed here\""])
    assert result.passed == 1, (result.failures, result.result)


def test_a_test_that_never_ends_fails_the_remaining_tests():
    code = "def good(): return 1\ndef forever():\n    while True: pass"
    result = run_tests(code, ["assert good() == 1", "assert forever() == 1", "assert good() == 1"], timeout=1)
    assert result.passed == 1 and result.result.timed_out
    assert all("timed out after 1 s" in failure for failure in result.failures)


# ---- exceptions that end a loop or a test silently


SUITE = """
import unittest
class TestAdd(unittest.TestCase):
    def setUp(self): {setup}
    def test_add(self):
        with self.subTest("sum"):
            self.assertEqual({call}, 3)
result = unittest.TestResult()
unittest.defaultTestLoader.loadTestsFromTestCase(TestAdd).run(result)
assert result.wasSuccessful()
"""
IN_TASKS = """
import asyncio
async def check(): assert ADD(1, 2) == 3
async def main():
    async with asyncio.TaskGroup() as group: group.create_task(check())
asyncio.run(main())
"""
ASYNC_LOOP = """
import asyncio
class Pairs:
    def __aiter__(self): return self
    async def __anext__(self): return ADD(1, 2)
async def main():
    async for value in Pairs(): assert value == 3 and False
asyncio.run(main())
"""
SILENT_TESTS = [
    SUITE.format(setup="pass", call="ADD(1, 2)"),
    SUITE.format(setup="ADD(1, 2)", call="4"),
    "assert all(map(lambda pair: ADD(*pair) == 3, [(1, 2)]))",
    "assert all(map(lambda pair: ADD.sum == 3, [(1, 2)]))",
    IN_TASKS,
    ASYNC_LOOP,
    "assert all(map(lambda text: eval(text) == 3, ['ADD(1, 2)']))",
    "def one():\n    try: yield\n    finally: assert ADD(1, 2) == 3\nof = one()\nnext(of)\nof.close()",
]
RAISES = """
class Add:
    def __call__(self, a, b): {0}
    @property
    def sum(self): {0}
adds.append(Add())
"""
SILENT_ERRORS = [
    "raise type('End', (StopIteration,), {})",
    "raise StopAsyncIteration",
    "raise GeneratorExit",
    "import unittest; raise type('Later', (unittest.SkipTest,), {})",
    "import unittest.case; raise unittest.case._ShouldStop",
    "raise type('SkipTest', (Exception,), {'__module__': 'unittest.case'})",  # claims to be SkipTest
    "raise type('SkipTest', (Exception,), {'__module__': 'unittest.loader'})",  # a name that unittest imports
    "import asyncio; raise asyncio.CancelledError",
    "raise KeyboardInterrupt",
    "raise SystemExit(0)",
]


def test_exceptions_that_end_a_loop_or_a_test_without_an_error_do_not_pass_a_test():
    code = "adds = []\n" + "".join(RAISES.format(error) for error in SILENT_ERRORS)
    tests = [test.replace("ADD", f"adds[{n}]") for test in SILENT_TESTS for n in range(len(SILENT_ERRORS))]
    failures = run_tests(code, tests, timeout=20).failures
    assert [test for test in tests if not any(failure.startswith(f"{test}: ") for failure in failures)] == []
    assert not [failure for failure in failures if "not reached" in failure or "timed out" in failure]


def test_a_class_that_ended_a_loop_is_not_raised_by_a_call():
    code = """
        class End(StopIteration): pass
        class Few:
            def __iter__(self): return self
            def __next__(self): raise End
        def few(): return Few()
        def add(a, b): raise End
    """
    tests = ["assert list(few()) == []", "assert all(map(lambda x: add(x, x) == 3, [1]))"]
    result = run_tests(textwrap.dedent(code), tests)
    assert result.passed == 1 and "End" in result.failures[0]
