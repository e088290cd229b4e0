"""The connection between the process of the tests and the process of the code, which exchange lines of JSON.

Plain values are copied; other objects stay in their process and are referred to by number.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import json
import os
import sys

from . import values
from .remote import FUNCTIONS, MUTABLE, Copy, Remote, copy_of, extended_base

TYPE_CHECKING = False  # defined here because importing the typing module is slow
if TYPE_CHECKING:
    from typing import Any


class Channel:
    """One end of the connection. It sends questions, and answers the kinds of question named in `serves`."""

    def __init__(self, incoming: int, outgoing: int, serves: tuple[str, ...]):
        self.serves = serves  # the process of the tests only serves "call", so that the code can call its functions
        self.ended = False
        self.incoming = os.fdopen(incoming, "r", encoding="utf-8", errors="replace")
        self.outgoing = os.fdopen(outgoing, "w", encoding="utf-8")
        self.kept: dict[int, Any] = {}  # number -> object of this process, to which the other one may refer
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
        """Send a question and return the answer, while serving questions of the other process (calls of functions)."""
        self.send(*question)
        while True:
            kind, *rest = self.receive()
            if kind == "value":
                return self.decode(rest[0])
            if kind == "changed":  # the arguments, which may have been modified in place, and the value
                return rest
            if kind == "raise":
                raise exception_class(rest[0], ends_loop=question[:2] == ("apply", "next"))(rest[1])
            self.serve(kind, *rest)

    def serve(self, kind: str, *rest: Any) -> None:
        """Answer a question of the other process."""
        try:
            if kind not in self.serves:
                raise ValueError(f"{kind!r} is not allowed here")
            answer = getattr(self, f"do_{kind}")(*rest)
        except BaseException as error:  # noqa: BLE001 - any exception, even SystemExit, is sent as the answer
            self.send("raise", class_names(type(error)), str(error)[:1000])
        else:
            self.send(*answer)

    def do_call(self, number: int, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        given = [self.decode(arg) for arg in args]
        named = {name: self.decode(value) for name, value in kwargs.items()}
        result = self.kept[number](*given, **named)
        return "changed", [self.encode(value) for value in given], self.encode(result)

    def do_apply(self, function: str, number: int, args: list[Any]) -> tuple[Any, ...]:
        """Apply a function of the table FUNCTIONS to an object of this process."""
        return "value", self.encode(FUNCTIONS[function](self.kept[number], *(self.decode(arg) for arg in args)))

    def do_load(self) -> tuple[Any, ...]:
        # `dont_inherit`: the `from __future__` import of this file must not apply to the code.
        exec(compile(self.kept[0].pop("__source__"), "solution.py", "exec", dont_inherit=True), self.kept[0])
        return "value", None

    def do_evaluate(self, mode: str, source: str, names: Any) -> tuple[Any, ...]:
        """Run `eval` or `exec` on a text with the given names of the tests; return [value, names that it set]."""
        scope = {**self.kept[0], **self.decode(names)}
        before = dict(scope)
        value = eval(compile(source, "<string>", mode, dont_inherit=True), scope)
        changed = {name: new for name, new in scope.items() if name not in before or before[name] is not new}
        return "value", self.encode([value, {name: new for name, new in changed.items() if for_tests(name)}])

    def do_names(self) -> tuple[Any, ...]:
        return "value", self.encode({name: value for name, value in self.kept[0].items() if for_tests(name)})

    def keep(self, value: Any) -> int:
        number = self.numbers.setdefault(id(value), len(self.numbers) + 1)
        self.kept[number] = value
        return number

    def encode(self, value: Any) -> Any:
        if isinstance(value, Copy):
            return {"yours": value.number}
        base = extended_base(value)
        if base is None:
            return self.encode_plain(value)
        if base in MUTABLE:
            return {"mine": self.keep(value)}
        return {"copy": [self.keep(value), self.encode_plain(value)]}

    def encode_plain(self, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, int):
            whole = int.__int__(value)
            return whole if abs(whole) < 2**53 else {"int": hex(whole)}  # Python limits decimal digits, not hex
        if (library := values.class_name(type(value))) is not None:
            return {"library": [library, [self.encode(part) for part in values.ARGUMENTS[library](value)]]}
        if isinstance(value, list):
            return [self.encode(item) for item in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"named": [type(value).__name__, list(value._fields), [self.encode(item) for item in value]]}
        for kind in (tuple, set, frozenset):
            if isinstance(value, kind):
                return {kind.__name__: [self.encode(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        for view in ("keys", "items"):
            if type(value) is type(getattr({}, view)()):
                return {view: [self.encode(item) for item in value]}
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
            return {"error": class_names(value)}
        if isinstance(value, type) and (library := values.class_name(value)) is not None:
            return {"class": library}
        return {"mine": self.keep(value)}

    def decode(self, data: Any) -> Any:
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        ((kind, body),) = data.items()
        if kind in ("tuple", "set", "frozenset"):
            return getattr(builtins, kind)(self.decode(item) for item in body)
        if kind in ("bytes", "bytearray"):
            return getattr(builtins, kind).fromhex(body)
        if kind in ("complex", "range"):
            return getattr(builtins, kind)(*body)
        return DECODERS[kind](self, body)

    def remote(self, number: int) -> Remote:
        return self.remotes.setdefault(number, Remote(self, number))

    def builtin(self, name: str) -> Any:
        """The tests accept only types from the code: it must not be able to pass them `eval`."""
        value = getattr(builtins, name)
        return value if isinstance(value, type) or "load" in self.serves else None


DECODERS: dict[str, Any] = {  # the kind of a value that is no plain JSON -> the value, from a channel and its body
    "int": lambda channel, body: int(body, 16),
    "dict": lambda channel, body: {channel.decode(key): channel.decode(item) for key, item in body},
    "keys": lambda channel, body: dict.fromkeys(channel.decode(item) for item in body).keys(),
    "items": lambda channel, body: dict(channel.decode(item) for item in body).items(),
    "named": lambda channel, body: collections.namedtuple(body[0], body[1])(*channel.decode(body[2])),
    "library": lambda channel, body: values.load_class(body[0])(*channel.decode(body[1])),
    "class": lambda channel, body: values.load_class(body),
    "module": lambda channel, body: importlib.import_module(body) if harmless_module(body) else None,
    "builtin": Channel.builtin,
    "error": lambda channel, body: exception_class(body),
    "copy": lambda channel, body: copy_of(channel.remote(body[0]), channel.decode(body[1])),
    "yours": lambda channel, body: channel.kept[body],
    "mine": Channel.remote,
}


def for_tests(name: str) -> bool:
    """Tell whether the tests may see a name that the code defines; it must not replace a builtin."""
    return not name.startswith("__") and not hasattr(builtins, name)


def harmless_module(name: str) -> bool:
    """Tell whether importing a module is safe: it is in the standard library and does not run files on import.

    `unittest.__main__`, for example, runs files of the current folder, which the code can write.
    """
    top, *below = name.split(".")
    return top in sys.stdlib_module_names and top != "idlelib" and "__main__" not in below


def class_names(cls: type) -> list[tuple[str, str]]:
    """Return the module and name of a class and of its base classes."""
    return [(one.__module__, one.__name__) for one in cls.__mro__]


def exception_class(names: list[tuple[str, str]], ends_loop: bool = False) -> Any:
    """Return a class to raise or catch here for an exception class of the other process.

    This is the builtin class itself, or a class of the same name derived from the nearest standard-library class. An
    exception that makes Python, asyncio or unittest stop without an error becomes a RuntimeError, because it would let
    a test pass. Only a StopIteration that answers `next` (`ends_loop`) is kept.
    """
    found = (library_exception(module, name) for module, name in names)
    base = next((one for one in found if one is not None), RuntimeError)  # the code may send names of no class
    if ends_loop and base is StopIteration:
        return base
    if stops_silently(base):
        base = RuntimeError
    if [base.__module__, base.__name__] == ["builtins", names[0][1]]:
        return base
    # Some classes of the standard library require more arguments than a message.
    made = {"__init__": lambda self, *args: Exception.__init__(self, *args)} if issubclass(base, Exception) else {}
    return KNOWN_ERRORS.setdefault(tuple(names[0]), type(names[0][1], (base,), made))


def library_exception(module: str, name: str) -> Any:
    if not harmless_module(module):
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    # Accept exceptions only: the code sends the names, and `exec` would be called with the text it sends.
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def stops_silently(error: type) -> bool:
    return any(name in SILENT or name[0].partition(".")[0] == "unittest" for name in class_names(error))


SILENT = {
    ("builtins", "StopIteration"),  # ends `all(map(f, values))`
    ("builtins", "StopAsyncIteration"),
    ("builtins", "GeneratorExit"),
    ("asyncio.exceptions", "CancelledError"),  # a TaskGroup ignores tasks that were cancelled
}
KNOWN_ERRORS: dict[tuple[str, ...], Any] = {}
