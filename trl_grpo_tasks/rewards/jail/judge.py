"""Runs inside the sandbox: tests on one side of a pipe, the code under test on the other, in a process of its own.

The code's process is forked before the tests are read, so nothing about them is in its memory. It is asked for values
and answers with JSON; whatever it sends, it is only a value to compare. Verdicts go to descriptor 3, which the code's
process does not have: per line the key of the job, a space, and a JSON text ("" for a pass).
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

TYPE_CHECKING = False  # the typing module takes a while to load
if TYPE_CHECKING:
    from typing import Any


def run_code(incoming: int, outgoing: int) -> None:
    """The other side: run the code, then answer questions about it."""
    channel = Channel(incoming, outgoing, serves=("load", "names", "call", "apply", "evaluate"))
    module = types.ModuleType("solution")
    module.__file__ = "solution.py"
    sys.modules["solution"] = module  # dataclasses, pickle and typing look a class's module up there
    channel.kept[0] = module.__dict__
    with open("solution.py", encoding="utf-8", errors="replace") as file:
        channel.kept[0]["__source__"] = file.read()
    while True:
        channel.serve(*channel.receive())


def main() -> None:
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
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the code may not look in here
    os.close(to_code[0])
    os.close(from_code[1])
    job = json.loads(sys.stdin.read())
    channel = Channel(from_code[0], to_code[1], serves=("call",))
    namespace = {"__name__": "tests", "__builtins__": builtins_of_tests(channel)}
    modules = modules_meant_by([job["setup"], *job["tests"]])
    broken = ""
    try:
        channel.ask("load")
        # Asked on this side too: the code can send whatever names it likes.
        namespace.update({name: value for name, value in channel.ask("names").items() if for_tests(name)})
        namespace.update(modules)
        exec(compile(job["setup"], "setup", "exec", dont_inherit=True), namespace)
    except BaseException as error:  # noqa: BLE001 - the code may end in any way
        broken = f"the code did not run: {describe(error)}"
    for test in job["tests"]:
        verdict = broken or run_test(test, namespace)
        broken = broken or ("not reached: the code ended the interpreter" if channel.ended else "")
        os.write(3, f"{job['key']} {json.dumps(verdict)}\n".encode())
    os._exit(0)


def modules_meant_by(texts: list[str]) -> dict[str, Any]:
    """The modules of the standard library that the tests use as `math.isclose` without importing them, by name. They
    are the real ones: a class `math` of the code's would decide the tests that use it."""
    attributes: dict[str, set[str]] = {}
    for name, attribute in re.findall(r"(?<![\w.])([A-Za-z]\w*)\.(\w+)", "\n".join(texts)):
        if harmless_module(name):
            attributes.setdefault(name, set()).add(attribute)
    meant = {}
    for name, used in attributes.items():
        try:
            module = importlib.import_module(name)
        except ImportError:  # one of another operating system
            continue
        if used <= set(dir(module)):  # `queue.push` means something of the code's: the module has no such name
            meant[name] = module
    return meant


def builtins_of_tests(channel: Channel) -> dict[str, Any]:
    """The builtins, but for `eval` and `exec`: what they run may be text of the code's, so it runs on the code's side,
    and only values come back."""

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
                # The modules, functions and classes of the tests stay: they decide what passes.
                if for_tests(name) and not isinstance(scope.get(name), (types.ModuleType, types.FunctionType, type)):
                    inner[name] = new
            return value

        return run

    def compiled(source: Any, filename: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        code = compile(source, filename, mode, *args, **kwargs)
        return source if isinstance(source, str) and isinstance(code, types.CodeType) else code

    return {**vars(builtins), "eval": runner("eval"), "exec": runner("exec"), "compile": compiled}


def run_test(test: str, namespace: dict[str, Any]) -> str:
    try:
        exec(compile(test, "test", "exec", dont_inherit=True), namespace)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test did not pass
        return describe(error) or "an exception without a name"  # which the code may raise; "" is a pass
    return ""


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500].rstrip(": ")
    except BaseException:  # noqa: BLE001 - a message that asks the other side, which has ended
        return type(error).__name__
