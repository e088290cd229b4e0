"""Exceptions that end a loop or a test without an error do not let model-written code pass its tests."""

from __future__ import annotations

import sys
import textwrap

import pytest

from trl_grpo_tasks.rewards.sandbox import run_tests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

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
async def check(): assert add(1, 2) == 3
async def main():
    async with asyncio.TaskGroup() as group: group.create_task(check())
asyncio.run(main())
"""
SILENT_TESTS = {
    "a unit test": SUITE.format(setup="pass", call="add(1, 2)"),
    "the setUp of a unit test": SUITE.format(setup="add(1, 2)", call="4"),
    "map": "assert all(map(lambda pair: add(*pair) == 3, [(1, 2)]))",
    "map over an attribute": "assert all(map(lambda pair: add.sum == 3, [(1, 2)]))",
    "a task group": IN_TASKS,
    "an async loop": """
import asyncio
class Pairs:
    def __aiter__(self): return self
    async def __anext__(self): return add(1, 2)
async def main():
    async for value in Pairs(): assert value == 3 and False
asyncio.run(main())
""",
    "text that is evaluated": "assert all(map(lambda text: eval(text) == 3, ['add(1, 2)']))",
}
RAISES = """
class Add:
    def __call__(self, a, b): {0}
    @property
    def sum(self): {0}
add = Add()
"""
SILENT_ERRORS = {
    "StopIteration": "raise StopIteration",
    "a subclass of StopIteration": "raise type('End', (StopIteration,), {})",
    "StopAsyncIteration": "raise StopAsyncIteration",
    "GeneratorExit": "raise GeneratorExit",
    "SkipTest": "import unittest; raise unittest.SkipTest('later')",
    "a subclass of SkipTest": "import unittest; raise type('Later', (unittest.SkipTest,), {})",
    "ShouldStop": "import unittest.case; raise unittest.case._ShouldStop",
    "a class that claims to be SkipTest": "raise type('SkipTest', (Exception,), {'__module__': 'unittest.case'})",
    "a name that unittest imports": "raise type('SkipTest', (Exception,), {'__module__': 'unittest.loader'})",
    "CancelledError": "import asyncio; raise asyncio.CancelledError",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "SystemExit": "raise SystemExit(0)",
    "an error without a class": "import sys; sys._getframe(3).f_locals['self'].send('raise', [], '')",
}


@pytest.mark.parametrize("error", SILENT_ERRORS)
def test_exceptions_that_end_loops_and_tests_do_not_pass_a_test(error):
    result = run_tests(RAISES.format(SILENT_ERRORS[error]), list(SILENT_TESTS.values()), timeout=10)
    assert result.passed == 0, result.failures


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
