"""Values of classes that everybody knows: the standard library's, numpy's and torch's.

A pickle says of them which class is to be called with which arguments. This table says what that makes, and the other way
around. Modules are imported by the names in it, never by one that a file gave.
"""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tessera import _arrays
from tessera._errors import UnsupportedError
from tessera._memory import SIZES
from tessera._values import Opaque

# What a class or a check raises for arguments that are none of it.
_MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

# Work on longer ones grows faster than their length.
_MOST_BITS = 1 << 14
_MOST_DIGITS = 1 << 16
_MOST_LETTERS = 1 << 16

_CONSTANTS = {"builtins.Ellipsis": Ellipsis, "builtins.NotImplemented": NotImplemented}
_OTHER_DTYPES = ("bits16", "bits1x8", "bits2x4", "bits4x2", "bits8", "qint32", "qint8", "quint2x4", "quint4x2", "quint8")
_TORCH_DTYPES = frozenset({*SIZES, *_OTHER_DTYPES, *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))})


def global_of(name: str) -> Any:
    """What `_core` makes of the name of a class, function or constant."""
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    torch = sys.modules.get("torch")
    if torch is not None and name.startswith("torch.") and name[6:] in _TORCH_DTYPES:
        found = vars(torch).get(name[6:])
        if isinstance(found, torch.dtype):
            return found
    return Opaque(name)


def opaque_of(
    name: Any,
    arguments: Any,
    keywords: Any,
    state: Any,
    list_items: list[Any],
    dict_items: list[tuple[Any, Any]],
    by_new: bool,
) -> Any:
    """What `_core` makes of an object node: the value of a known class, or else an `Opaque`."""
    value = Opaque(name, arguments, state, keywords or {}, tuple(list_items), tuple(dict_items), by_new)
    make = _MAKERS.get(name) if isinstance(name, str) else None
    try:
        made = None if make is None else make(value)
    except _MISFITS:
        made = None
    return value if made is None else made


def with_elements(value: Opaque, wrap: Callable[[Any], Any], core: Any) -> Opaque:
    """An array that could not be made of numpy, with what `wrap` makes of the `_core.Tensor` of its elements."""
    try:
        return replace(value, elements=wrap(core))
    except (ImportError, UnsupportedError):  # what tensors become is not there either, or has not this dtype
        return value


def _arguments(value: Opaque) -> tuple[Any, ...]:
    """Of a call with nothing else."""
    if value.keywords or value.list_items or value.dict_items or value.by_new or value.state is not None:
        raise TypeError
    return value.arguments or ()


def _integers(items: Any) -> Any:
    if not all(type(item) is int for item in items):
        raise TypeError
    return items


def _range(value: Opaque) -> range:
    start, stop, step = _integers(_arguments(value))
    if max(number.bit_length() for number in (start, stop, step)) > _MOST_BITS:  # its length is a quotient
        raise ValueError
    return range(start, stop, step)


def _slice(value: Opaque) -> slice:
    start, stop, step = _arguments(value)
    return slice(start, stop, step)


def _counter(value: Opaque) -> Any:
    (counts,) = _arguments(value)
    if type(counts) is not dict:
        raise TypeError
    return collections.Counter(counts)


def _deque(value: Opaque) -> Any:
    given = value.arguments or ()
    if value.keywords or value.dict_items or value.by_new or value.state is not None or len(given) > 2:
        raise TypeError
    first, most = (*given, None, None)[:2] if given else ((), None)
    if type(first) not in (list, tuple) or (first and value.list_items) or (most is not None and type(most) is not int):
        raise TypeError
    items = first or value.list_items
    if most is not None and len(items) > most:
        raise ValueError
    return collections.deque(items, most)


def _zone(given: tuple[Any, ...]) -> Any:
    import datetime

    zone = given[1] if len(given) == 2 else None
    if len(given) not in (1, 2) or type(given[0]) is not bytes or (len(given) == 2 and type(zone) is not datetime.timezone):
        raise TypeError
    return zone


def _date(value: Opaque) -> Any:
    import datetime

    (fields,) = _arguments(value)
    if type(fields) is not bytes:
        raise TypeError
    high, low, month, day = fields
    return datetime.date(high * 256 + low, month, day)


# The class itself takes the bytes of a datetime or time unchecked.
def _datetime(value: Opaque) -> Any:
    import datetime

    given = _arguments(value)
    zone = _zone(given)
    high, low, month, day, hour, minute, second, *micro = given[0]
    fields = (high * 256 + low, month & 127, day, hour, minute, second, _micros(micro))
    return datetime.datetime(*fields, tzinfo=zone, fold=month >> 7)


def _time(value: Opaque) -> Any:
    import datetime

    given = _arguments(value)
    zone = _zone(given)
    hour, minute, second, *micro = given[0]
    return datetime.time(hour & 127, minute, second, _micros(micro), tzinfo=zone, fold=hour >> 7)


def _micros(micro: list[int]) -> int:
    high, middle, low = micro
    return (high * 256 + middle) * 256 + low


def _timedelta(value: Opaque) -> Any:
    import datetime

    days, seconds, micros = _integers(_arguments(value))
    if abs(days) > 999_999_999 or not 0 <= seconds < 86_400 or not 0 <= micros < 1_000_000:
        raise ValueError
    return datetime.timedelta(days, seconds, micros)


def _timezone(value: Opaque) -> Any:
    import datetime

    offset, *name = _arguments(value)
    if type(offset) is not datetime.timedelta or len(name) > 1 or any(type(text) is not str for text in name):
        raise TypeError
    return datetime.timezone(offset, *name)


# As str() of one writes it. What a class makes of another text depends on the context of decimal.
_DECIMAL = re.compile(r"-?(Infinity|s?NaN[0-9]*|[0-9]+(\.[0-9]+)?(E[+-][0-9]+)?)")


def _decimal(value: Opaque) -> Any:
    import decimal

    (text,) = _arguments(value)
    if len(text) > _MOST_DIGITS or not _DECIMAL.fullmatch(text):
        raise ValueError
    made = decimal.Decimal(text)
    return made if str(made) == text else None


_FRACTION = re.compile(r"(-?[0-9]{1,4000})(?:/([0-9]{1,4000}))?")


def _fraction(value: Opaque) -> Any:
    import fractions

    given = _arguments(value)
    if len(given) == 1:  # as Python up to 3.10 has it
        found = _FRACTION.fullmatch(given[0])
        given = tuple(int(part or 1) for part in found.groups()) if found else ()
    above, below = _integers(given)
    if max(above.bit_length(), below.bit_length()) > _MOST_BITS:
        raise ValueError
    made = fractions.Fraction(above, below)
    return made if (made.numerator, made.denominator) == (above, below) else None


def _uuid(value: Opaque) -> Any:
    import uuid

    if not value.by_new or value.arguments or value.keywords or value.list_items or value.dict_items:
        raise TypeError
    if type(value.state) is not dict:
        raise TypeError
    if not value.state.keys() <= {"int", "is_safe"}:
        raise TypeError
    (number,) = _integers((value.state["int"],))
    is_safe = value.state.get("is_safe")
    return uuid.UUID(int=number, is_safe=uuid.SafeUUID(is_safe))


def _path(value: Opaque) -> Any:
    import pathlib

    parts = _arguments(value)
    if not all(type(part) is str for part in parts):
        raise TypeError
    if sum(len(part) + 1 for part in parts) > _MOST_LETTERS:  # one text may be many parts
        raise ValueError
    assert isinstance(value.name, str)
    kinds = {
        "PosixPath": pathlib.PosixPath,
        "PurePosixPath": pathlib.PurePosixPath,
        "PureWindowsPath": pathlib.PureWindowsPath,
        "WindowsPath": pathlib.WindowsPath,
    }
    return kinds[value.name.rpartition(".")[2]](*parts)


def _device(value: Opaque) -> Any:
    torch = sys.modules.get("torch")
    kind, *index = _arguments(value)
    if torch is None or type(kind) is not str or not re.fullmatch("[a-z]{1,32}", kind) or len(_integers(index)) > 1:
        raise TypeError
    if any(not 0 <= number < 128 for number in index):  # torch keeps 8 bits of it
        raise ValueError
    return torch.device(kind, *index)


def _size(value: Opaque) -> Any:
    torch = sys.modules.get("torch")
    (sizes,) = _arguments(value)
    if torch is None or type(sizes) is not tuple:
        raise TypeError
    if any(size.bit_length() > 63 for size in _integers(sizes)):
        raise ValueError
    return torch.Size(sizes)


def _numpys(value: Opaque) -> Any:
    return _arrays.array_of(value, texts=False)


_PATHS = ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")

_MAKERS: dict[str, Callable[[Opaque], Any]] = {
    "builtins.range": _range,
    "builtins.slice": _slice,
    "collections.Counter": _counter,
    "collections.deque": _deque,
    "datetime.date": _date,
    "datetime.datetime": _datetime,
    "datetime.time": _time,
    "datetime.timedelta": _timedelta,
    "datetime.timezone": _timezone,
    "decimal.Decimal": _decimal,
    "fractions.Fraction": _fraction,
    "torch.Size": _size,
    "torch.device": _device,
    "uuid.UUID": _uuid,
    **{name: _numpys for name in _arrays.NAMES},
    **{f"{module}.{name}": _path for module in ("pathlib", "pathlib._local") for name in _PATHS},  # the latter in Python 3.13
}


def described(thing: Any) -> tuple[Any, ...] | None:
    """A value of a known class as `_describe` tells it; None: it is of another class, or of one that is derived."""
    for name, constant in _CONSTANTS.items():
        if thing is constant:
            return ("global", *name.split("."))
    kind = type(thing)
    tell = _TELLERS.get((kind.__module__, kind.__qualname__))
    if tell is not None and getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind:
        return ("value", tell(thing))
    opaque = _arrays.opaque_of_numpy(thing)
    return None if opaque is None else ("value", opaque)


def _of_deque(thing: Any) -> Opaque:
    return Opaque("collections.deque", () if thing.maxlen is None else ((), thing.maxlen), list_items=tuple(thing))


def _of_uuid(thing: Any) -> Opaque:
    safe = {} if thing.is_safe.value is None else {"is_safe": thing.is_safe.value}
    return Opaque("uuid.UUID", (), {"int": thing.int, **safe}, by_new=True)


def _of_date(thing: Any) -> Opaque:
    kind, arguments = thing.__reduce_ex__(4)[:2]  # which says of two equal times which one it is
    return Opaque(f"datetime.{kind.__name__}", arguments)


def _of_path(thing: Any) -> Opaque:
    return Opaque(f"pathlib.{type(thing).__name__}", thing.parts)


_TELLERS: dict[tuple[str, str], Callable[[Any], Opaque]] = {
    ("builtins", "range"): lambda thing: Opaque("builtins.range", (thing.start, thing.stop, thing.step)),
    ("builtins", "slice"): lambda thing: Opaque("builtins.slice", (thing.start, thing.stop, thing.step)),
    ("collections", "Counter"): lambda thing: Opaque("collections.Counter", (dict(thing),)),
    ("collections", "deque"): _of_deque,
    **{("datetime", name): _of_date for name in ("date", "datetime", "time", "timedelta", "timezone")},
    ("decimal", "Decimal"): lambda thing: Opaque("decimal.Decimal", (str(thing),)),
    ("fractions", "Fraction"): lambda thing: Opaque("fractions.Fraction", (thing.numerator, thing.denominator)),
    ("torch", "Size"): lambda thing: Opaque("torch.Size", (tuple(thing),)),
    ("torch", "device"): lambda thing: Opaque("torch.device", (thing.type, *([] if thing.index is None else [thing.index]))),
    ("uuid", "UUID"): _of_uuid,
    **{(module, name): _of_path for module in ("pathlib", "pathlib._local") for name in _PATHS},
}
