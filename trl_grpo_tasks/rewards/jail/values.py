"""Standard-library classes whose instances are copied between tests and code, as constructor arguments."""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # defined here because importing the typing module is slow
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _text(value: Any) -> tuple[str]:
    return (str(value),)


# Class -> the constructor arguments for an equal object. Only these classes are called with data from the code.
ARGUMENTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "decimal.Decimal": _text,
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.time": lambda value: (value.hour, value.minute, value.second, value.microsecond, value.tzinfo),
    "datetime.datetime": lambda value: (*value.timetuple()[:6], value.microsecond, value.tzinfo),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "datetime.timezone": lambda value: value.__getinitargs__(),
    "zoneinfo.ZoneInfo": lambda value: (value.key,),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (list(value.items()),),
    "collections.defaultdict": lambda value: (value.default_factory, dict(value)),
    "array.array": lambda value: (value.typecode, value.tolist()),
    "uuid.UUID": _text,
    **{f"pathlib.{name}": _text for name in ("PurePosixPath", "PureWindowsPath", "PosixPath")},
    **{f"ipaddress.IPv{v}{kind}": _text for v in (4, 6) for kind in ("Address", "Network", "Interface")},
}
_FULL_NAMES = {name.partition(".")[2]: name for name in ARGUMENTS}


def class_name(cls: type) -> str | None:
    """Return the name of `cls` in the table above, or None."""
    name = _FULL_NAMES.get(cls.__name__)
    if name is None:
        return None
    module, _, attribute = name.partition(".")
    return name if getattr(sys.modules.get(module), attribute, None) is cls else None


def load_class(name: str) -> Any:
    """Return the class of a name in the table above; KeyError for any other name."""
    if name not in ARGUMENTS:
        raise KeyError(name)
    module, _, attribute = name.partition(".")
    return getattr(importlib.import_module(module), attribute)
