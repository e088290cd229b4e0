"""References to objects in the other process: `Remote` is a reference, `Copy` is a plain value plus a reference."""

from __future__ import annotations

import collections

from . import values

TYPE_CHECKING = False  # defined here because importing the typing module is slow
if TYPE_CHECKING:
    from typing import Any

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
ORDER = ("lt", "le", "gt", "ge")
COPY_CLASSES: dict[type, Any] = {}
IMMUTABLE = (str, float, int, tuple, bytes, frozenset, complex)
MUTABLE: tuple[Any, ...] = (list, dict, set, bytearray, collections.deque)
PLAIN = frozenset((type(None), bool, *IMMUTABLE, *MUTABLE))


class Remote:
    """A reference to an object in the other process.

    It never equals a plain value, whatever its own `__eq__` returns, except that an instance of a subclass of list,
    dict or the like is compared by its contents.
    """

    def __init__(self, channel: Any, number: int):  # `channel` is a Channel, whose module imports this one
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
        apply(self, "exit")  # its result is dropped: True would suppress a failed assertion inside the `with`

    def __eq__(self, other: object) -> Any:
        if isinstance(other, (Remote, Copy)):
            return apply(self, "eq", other)
        if isinstance(other, MUTABLE):  # the contents of a subclass of list, dict, ... are a plain value
            return apply(self, "contents") == other
        return NotImplemented


class Copy:
    """A mixin for copies of plain values whose class in the other process has additional methods or members."""

    remote: Remote
    number: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.remote, name)

    def __str__(self) -> str:
        return str(self.remote)

    def __repr__(self) -> str:
        return repr(self.remote)


def copy_of(remote: Remote, plain: Any) -> Any:
    """Make a value that behaves like `plain`; attributes that `plain` lacks are looked up on the remote object."""
    cls = type(plain)
    if not issubclass(cls, IMMUTABLE):  # the other process may send anything
        return plain
    made = COPY_CLASSES.setdefault(cls, type(cls.__name__, (Copy, cls), {}))
    copy = made(*plain) if hasattr(cls, "_fields") else made(plain)
    copy.remote, copy.number = remote, object.__getattribute__(remote, "_number")
    return copy


def extended_base(value: Any) -> Any:
    """Return the plain type that the class of `value` extends with public names; None if it extends none."""
    cls = type(value)
    if cls in PLAIN or values.class_name(cls) is not None:
        return None
    base = next((one for one in (*IMMUTABLE, *MUTABLE) if issubclass(cls, one)), None)
    if base is None:
        return None
    more = {name for name in dir(cls) if not name.startswith("_")} - {*dir(base), *getattr(cls, "_fields", ())}
    return base if more else None


def apply(remote: Remote, function: str, *args: Any) -> Any:
    """Apply a function of the table FUNCTIONS to a remote object, in its process."""
    channel = object.__getattribute__(remote, "_channel")
    number = object.__getattribute__(remote, "_number")
    return channel.ask("apply", function, number, [channel.encode(arg) for arg in args])


def update(argument: Any, now: Any) -> None:
    """Update a mutable argument in place to the state of its copy after the call."""
    if type(argument) is not type(now) or argument == now:
        return
    if isinstance(argument, (list, bytearray)):
        argument[:] = now
    elif isinstance(argument, (dict, set)):
        argument.clear()
        argument.update(now)
    elif isinstance(argument, collections.deque):
        argument.clear()
        argument.extend(now)


FUNCTIONS: dict[str, Any] = {
    "getattr": getattr,
    "setattr": setattr,
    "instancecheck": lambda cls, value: isinstance(value, cls),
    "contains": lambda box, item: item in box,
    "eq": lambda a, b: a == b,
    "contents": lambda box: next((base(box) for base in MUTABLE if isinstance(box, base)), None),
    "hash": hash,
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
for _name in FUNCTIONS.keys() - {"getattr", "setattr", "eq", "contents", "exit"}:
    setattr(Remote, f"__{_name}__", lambda self, *args, _name=_name: apply(self, _name, *args))


def operator(name: str, ordering: bool) -> Any:
    """Make an operator method of Remote.

    With another object of the code, the code decides the result. With a plain value, the result must be another object
    of the code; otherwise the code could make `abs(answer - 3.14) < 1e-6` true.
    """

    def method(self: Remote, other: Any) -> Any:
        if isinstance(other, (Remote, Copy)):
            return apply(self, name, other)
        result = NotImplemented if ordering else apply(self, name, other)
        return result if isinstance(result, Remote) else NotImplemented

    return method


for _name in (*BINARY, *(f"r{_name}" for _name in BINARY), *ORDER):
    setattr(Remote, f"__{_name}__", operator(_name, _name in ORDER))
    FUNCTIONS[_name] = lambda a, b, _name=_name: getattr(a, f"__{_name}__")(b)


def tuple_operator(name: str) -> Any:
    """Make an operator method of Copy: the code's for two tuples of its own classes (vectors), else the plain one."""

    def method(self: Copy, other: Any) -> Any:
        if isinstance(self, tuple) and isinstance(other, (Remote, Copy)):
            return apply(self.remote, name, other)
        plain = getattr(super(Copy, self), f"__{name}__", None)
        return NotImplemented if plain is None else plain(other)

    return method


for _name in BINARY:
    setattr(Copy, f"__{_name}__", tuple_operator(_name))
