"""Runs inside the sandbox: tests on one side of a pipe, the code under test on the other, in a process of its own.

The code's process is forked before the tests are read, so nothing about them is in its memory. It is asked for values
and answers with JSON; whatever it sends, it is only a value to compare. Verdicts go to descriptor 3, one JSON text per
line ("" for a pass), which the code's process does not have.
"""

from __future__ import annotations

import builtins
import collections
import ctypes
import importlib
import json
import os
import sys

TYPE_CHECKING = False  # the typing module takes a while to load
if TYPE_CHECKING:
    from typing import Any

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
ORDER = ("lt", "le", "gt", "ge")


class Channel:
    """Messages as lines of JSON. What is not plain data stays where it was made and is referred to by a number."""

    def __init__(self, incoming: int, outgoing: int, serves: tuple[str, ...]):
        self.serves = serves  # the questions answered on this side; the tests' side only lets its functions be called
        self.ended = False
        self.incoming = os.fdopen(incoming, "r", encoding="utf-8", errors="replace")
        self.outgoing = os.fdopen(outgoing, "w", encoding="utf-8")
        self.kept: dict[int, Any] = {}  # number -> our object, which the other side may refer to
        self.numbers: dict[int, int] = {}
        self.remotes: dict[int, Remote] = {}

    def send(self, *message: Any) -> None:
        self.outgoing.write(json.dumps(message) + "\n")
        self.outgoing.flush()

    def receive(self) -> list[Any]:
        line = self.incoming.readline()
        if not line.endswith("\n"):
            self.ended = True
            raise EOFError("the code ended the interpreter")
        return json.loads(line)

    def ask(self, *question: Any) -> Any:
        """The answer to a question, serving the other side's own questions (calls of our functions) meanwhile."""
        self.send(*question)
        while True:
            kind, *rest = self.receive()
            if kind == "value":
                return self.decode(rest[0])
            if kind == "changed":  # arguments that were modified in place, ahead of the value
                return rest
            if kind == "raise":
                raise exception_class(rest[0])(rest[1])
            self.serve(kind, *rest)

    def serve(self, kind: str, *rest: Any) -> None:
        try:
            if kind not in self.serves:
                raise ValueError(f"{kind!r} is not answered here")
            answer = getattr(self, f"do_{kind}")(*rest)
        except BaseException as error:  # noqa: BLE001 - also SystemExit: it is an answer like any other
            self.send("raise", [cls.__name__ for cls in type(error).__mro__], str(error)[:1000])
        else:
            self.send(*answer)

    def do_call(self, number: int, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        values = [self.decode(arg) for arg in args]
        named = {name: self.decode(value) for name, value in kwargs.items()}
        result = self.kept[number](*values, **named)
        return "changed", [self.encode(value) for value in values], self.encode(result)

    def do_apply(self, function: str, number: int, args: list[Any]) -> tuple[Any, ...]:
        """A function of the table below, on an object that is kept here."""
        return "value", self.encode(FUNCTIONS[function](self.kept[number], *(self.decode(arg) for arg in args)))

    def do_load(self) -> tuple[Any, ...]:
        exec(compile(self.kept[0].pop("__source__"), "solution.py", "exec"), self.kept[0])
        return "value", None

    def do_names(self) -> tuple[Any, ...]:
        return "value", self.encode({name: value for name, value in self.kept[0].items() if for_tests(name)})

    def keep(self, value: Any) -> int:
        number = self.numbers.setdefault(id(value), len(self.numbers) + 1)
        self.kept[number] = value
        return number

    def encode(self, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, int):
            return int(value) if abs(value) < 2**53 else {"int": hex(value)}  # hex: no limit on digits
        if isinstance(value, list):
            return [self.encode(item) for item in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"named": [type(value).__name__, list(value._fields), [self.encode(item) for item in value]]}
        for kind in (tuple, set, frozenset):
            if isinstance(value, kind):
                return {kind.__name__: [self.encode(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if isinstance(value, (bytes, bytearray)):
            return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_number")}
        if isinstance(value, type(os)):
            return {"module": value.__name__}
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return {"builtin": name}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": [cls.__name__ for cls in value.__mro__]}
        return {"mine": self.keep(value)}

    def decode(self, data: Any) -> Any:
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        ((kind, body),) = data.items()
        if kind in ("tuple", "set", "frozenset"):
            return getattr(builtins, kind)(self.decode(item) for item in body)
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in body}
        if kind == "named":
            name, fields, items = body
            return collections.namedtuple(name, fields)(*(self.decode(item) for item in items))
        if kind == "int":
            return int(body, 16)
        if kind in ("bytes", "bytearray"):
            return getattr(builtins, kind).fromhex(body)
        if kind in ("complex", "range"):
            return getattr(builtins, kind)(*body)
        if kind == "yours":
            return self.kept[body]
        if kind == "module":
            return importlib.import_module(body) if harmless_module(body) else None
        if kind == "builtin":
            # From the code only types: it must not be able to hand `eval` to the tests.
            value = getattr(builtins, body)
            return value if isinstance(value, type) or "load" in self.serves else None
        if kind == "error":
            return exception_class(body)
        return self.remotes.setdefault(body, Remote(self, body))


class Remote:
    """An object of the other side. It never equals a plain value, whatever its own `__eq__` says."""

    def __init__(self, channel: Channel, number: int):
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        channel = object.__getattribute__(self, "_channel")
        named = {name: channel.encode(value) for name, value in kwargs.items()}
        number = object.__getattribute__(self, "_number")
        changed, result = channel.ask("call", number, [channel.encode(arg) for arg in args], named)
        for argument, now in zip(args, changed, strict=False):
            update(argument, channel.decode(now))
        return channel.decode(result)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "__class__") if name == "__class__" else apply(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        apply(self, "setattr", name, value)

    def __exit__(self, *_: object) -> None:
        apply(self, "exit")  # its result is dropped: a true one would swallow what was asserted in the `with`

    def __eq__(self, other: object) -> Any:
        return apply(self, "eq", other) if isinstance(other, Remote) else NotImplemented

    def __hash__(self) -> int:
        return id(self)


def apply(remote: Remote, function: str, *args: Any) -> Any:
    channel = object.__getattribute__(remote, "_channel")
    number = object.__getattribute__(remote, "_number")
    return channel.ask("apply", function, number, [channel.encode(arg) for arg in args])


def update(argument: Any, now: Any) -> None:
    """Make `argument` what the other side made of its copy."""
    if type(argument) is not type(now) or argument == now:
        return
    if isinstance(argument, (list, bytearray)):
        argument[:] = now
    elif isinstance(argument, (dict, set)):
        argument.clear()
        argument.update(now)


def for_tests(name: str) -> bool:
    """Whether a name that the code defines is one for the tests, whose builtins stay the real ones."""
    return not name.startswith("__") and not hasattr(builtins, name)


def harmless_module(name: str) -> bool:
    """A module of the standard library, but none that runs or finds files of the current folder, the code's, when it
    is imported, as `unittest.__main__` does."""
    top, *below = name.split(".")
    return top in sys.stdlib_module_names and top != "idlelib" and "__main__" not in below


def exception_class(names: list[str]) -> Any:
    """A class to raise or catch here, for one of the other side: the builtin itself, or one of the same name."""
    known = (getattr(builtins, name, None) for name in names)
    # Exceptions only: the names are the code's, and `exec` is a builtin that would be called with its text.
    builtin = next(one for one in known if isinstance(one, type) and issubclass(one, BaseException))
    if builtin.__name__ == names[0]:
        return builtin
    return KNOWN_ERRORS.setdefault(names[0], type(names[0], (builtin,), {}))


KNOWN_ERRORS: dict[str, Any] = {}
FUNCTIONS: dict[str, Any] = {
    "getattr": getattr,
    "setattr": setattr,
    "instancecheck": lambda cls, value: isinstance(value, cls),
    "contains": lambda box, item: item in box,
    "eq": lambda a, b: a == b,
    "bool": bool,
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "getitem": lambda box, key: box[key],
    "setitem": lambda box, key, value: box.__setitem__(key, value),
    "delitem": lambda box, key: box.__delitem__(key),
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager: manager.__exit__(None, None, None),
}
for _name in ("instancecheck", "contains", "bool", "len", "iter", "next", "str", "repr", "getitem", "setitem"):
    setattr(Remote, f"__{_name}__", lambda self, *args, _name=_name: apply(self, _name, *args))
for _name in ("delitem", "enter"):
    setattr(Remote, f"__{_name}__", lambda self, *args, _name=_name: apply(self, _name, *args))


def operator(name: str, ordering: bool) -> Any:
    """With another object of the code's: whatever it says. With a plain value: only to make another such object, so
    that `abs(answer - 3.14) < 1e-6` cannot be talked into being true."""

    def method(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return apply(self, name, other)
        result = NotImplemented if ordering else apply(self, name, other)
        return result if isinstance(result, Remote) else NotImplemented

    return method


for _name in (*BINARY, *ORDER):
    setattr(Remote, f"__{_name}__", operator(_name, _name in ORDER))
    FUNCTIONS[_name] = lambda a, b, _name=_name: getattr(a, f"__{_name}__")(b)


def run_code(incoming: int, outgoing: int) -> None:
    """The other side: run the code, then answer questions about it."""
    channel = Channel(incoming, outgoing, serves=("load", "names", "call", "apply"))
    with open("solution.py", encoding="utf-8", errors="replace") as file:
        channel.kept[0] = {"__name__": "solution", "__source__": file.read()}
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
    namespace: dict[str, Any] = {"__name__": "tests"}
    broken = ""
    try:
        channel.ask("load")
        # Asked on this side too: the code can send whatever names it likes.
        namespace.update({name: value for name, value in channel.ask("names").items() if for_tests(name)})
        exec(compile(job["setup"], "setup", "exec"), namespace)
    except BaseException as error:  # noqa: BLE001 - the code may end in any way
        broken = f"the code did not run: {describe(error)}"
    for test in job["tests"]:
        verdict = broken or run_test(test, namespace)
        broken = broken or ("not reached: the code ended the interpreter" if channel.ended else "")
        os.write(3, json.dumps(verdict).encode() + b"\n")
    os._exit(0)


def run_test(test: str, namespace: dict[str, Any]) -> str:
    try:
        exec(compile(test, "test", "exec"), namespace)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test did not pass
        return describe(error) or "an exception without a name"  # which the code may raise; "" is a pass
    return ""


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500].rstrip(": ")
    except BaseException:  # noqa: BLE001 - a message that asks the other side, which has ended
        return type(error).__name__


if __name__ == "__main__":
    main()
