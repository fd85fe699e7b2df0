"""Honest things to pickle: what scans must not raise an alarm at."""
import argparse
import array
import collections
import datetime
import decimal
import fractions
import pathlib
import types
import uuid


def plain_values():
    """Of the standard library: (title, value)."""
    shared = [1, 2]
    yield "numbers", {"a": 1, "b": -2.5, "c": 2**80, "d": True, "e": None, "f": 1 + 2j}
    yield "text", ["", "a", "\u00e9\u4e2d", "a\nb", b"", b"\0\xff", bytearray(b"ab")]
    yield "containers", {"t": (1, (2,)), "s": {1, 2}, "f": frozenset({3}), "l": [[], {}], 5: [shared, shared]}
    yield "ordered", collections.OrderedDict(a=1)
    yield "default", collections.defaultdict(list, a=[1])
    yield "counter", collections.Counter("abca")
    yield "deque", collections.deque([1, 2], maxlen=3)
    yield "dates", [datetime.datetime(2026, 1, 2), datetime.date(2026, 1, 2), datetime.timedelta(3), datetime.time(1),
                    datetime.timezone.utc]
    yield "decimals", [decimal.Decimal("1.5"), fractions.Fraction(1, 3)]
    yield "paths", [pathlib.PurePosixPath("a/b"), pathlib.PosixPath("c")]
    yield "identities", uuid.UUID(int=5)
    yield "types", [int, str, list, type(None), ..., range(3), slice(1, 2)]
    yield "arguments", argparse.Namespace(lr=1.0, name="x")
    yield "simple", types.SimpleNamespace(a=1)
    yield "arrays", array.array("d", [1.0, 2.0])
