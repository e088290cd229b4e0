"""Runs unit tests inside the sandbox: the tests in one process, the code under test in another, joined by pipes.

The code's process is forked before the tests are read, so its memory contains nothing about them. It answers questions
with JSON; whatever it sends is only a value to compare. Verdicts are written to descriptor 3, which the code's process
does not have. Each line holds the key of the job, a space, and a JSON string: "" for a pass, else the reason.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import json
import os
import re
import sys
import types

from .channel import Channel, for_tests, harmless_module

TYPE_CHECKING = False  # defined here because importing the typing module is slow
if TYPE_CHECKING:
    from typing import Any


def run_code(incoming: int, outgoing: int) -> None:
    """Serve questions in the code's process: load the code, then call its functions and read its objects."""
    channel = Channel(incoming, outgoing, serves=("load", "names", "call", "apply", "evaluate"))
    module = types.ModuleType("solution")
    module.__file__ = "solution.py"
    sys.modules["solution"] = module  # dataclasses, pickle and typing look up the module of a class there
    channel.kept[0] = module.__dict__
    with open("solution.py", encoding="utf-8", errors="replace") as file:
        channel.kept[0]["__source__"] = file.read()
    while True:
        channel.serve(*channel.receive())


def main() -> None:
    """Fork the code's process, read the tests from standard input, run them and write the verdicts."""
    to_code, from_code = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(3)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        for fd in (nothing, to_code[1], from_code[0]):
            os.close(fd)
        try:
            run_code(to_code[0], from_code[1])
        finally:
            os._exit(0)
    libc = ctypes.CDLL(None)
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the code must not inspect this process
    os.close(to_code[0])
    os.close(from_code[1])
    job = json.loads(sys.stdin.read())
    channel = Channel(from_code[0], to_code[1], serves=("call",))
    namespace = {"__name__": "tests", "__builtins__": builtins_of_tests(channel)}
    modules = implied_modules([job["setup"], *job["tests"]])
    broken = ""
    try:
        channel.ask("load")
        # Names are filtered here too, because the code may send any names.
        namespace.update({name: value for name, value in channel.ask("names").items() if for_tests(name)})
        namespace.update(modules)
        exec(compile(job["setup"], "setup", "exec", dont_inherit=True), namespace)
    except BaseException as error:  # noqa: BLE001 - the code may raise anything
        broken = f"the code did not run: {describe(error)}"
    for test in job["tests"]:
        verdict = broken or run_test(test, namespace)
        broken = broken or ("not reached: the code ended the interpreter" if channel.ended else "")
        os.write(3, f"{job['key']} {json.dumps(verdict)}\n".encode())
    os._exit(0)


def implied_modules(texts: list[str]) -> dict[str, Any]:
    """Return the standard-library modules that the tests use, as in `math.isclose`, without importing them.

    They take precedence over the code's names: a class `math` of the code could otherwise decide the tests.
    """
    attributes: dict[str, set[str]] = {}
    for name, attribute in re.findall(r"(?<![\w.])([A-Za-z]\w*)\.(\w+)", "\n".join(texts)):
        if harmless_module(name):
            attributes.setdefault(name, set()).add(attribute)
    implied = {}
    for name, used in attributes.items():
        try:
            module = importlib.import_module(name)
        except ImportError:  # a module of another operating system
            continue
        if used <= set(dir(module)):  # `queue.push` refers to the code, because the module has no such name
            implied[name] = module
    return implied


def builtins_of_tests(channel: Channel) -> dict[str, Any]:
    """Return the builtins with `eval` and `exec` replaced: they run text in the code's process and return values.

    The text may come from the code, so it must not run in the process of the tests.
    """

    def runner(mode: str) -> Any:
        def run(source: Any, globals: Any = None, locals: Any = None, /) -> Any:
            if not isinstance(source, str):
                raise TypeError(f"in a test, {mode} takes text, not {type(source).__name__}")
            caller = sys._getframe(1)
            outer = caller.f_globals if globals is None else globals
            inner = locals if locals is not None else caller.f_locals if globals is None else globals
            words = set(re.findall(r"\w+", source))
            scope = {**outer, **inner}
            known = {name: value for name, value in scope.items() if name in words and for_tests(name)}
            value, changed = channel.ask("evaluate", mode, source.lstrip(" \t"), channel.encode(known))
            for name, new in changed.items():
                # Modules, functions and classes of the tests are not replaced: they decide which tests pass.
                if for_tests(name) and not isinstance(scope.get(name), (types.ModuleType, types.FunctionType, type)):
                    inner[name] = new
            return value

        return run

    def compiled(source: Any, filename: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        code = compile(source, filename, mode, *args, **kwargs)
        return source if isinstance(source, str) and isinstance(code, types.CodeType) else code

    return {**vars(builtins), "eval": runner("eval"), "exec": runner("exec"), "compile": compiled}


def run_test(test: str, namespace: dict[str, Any]) -> str:
    """Run one test; return "" if it passes, else the reason for its failure."""
    try:
        exec(compile(test, "test", "exec", dont_inherit=True), namespace)
    except BaseException as error:  # noqa: BLE001 - any exception fails the test
        return describe(error) or "an exception without a name"  # never "", which means a pass
    return ""


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500].rstrip(": ")
    except BaseException:  # noqa: BLE001 - the message may be computed in the code's process, which has ended
        return type(error).__name__
