"""Makes tests/golden/known: values of classes that everybody knows, by protocols 2 and 5, and what repr says of them.

    python known.py OUT_DIR

`values.p?` is a list; line n of `values.txt` is the repr of its item n. `arrays.p?` is a list of numpy's things, with their
numbers row by row in `arrays.txt`.
"""
import collections
import datetime
import decimal
import fractions
import pathlib
import pickle
import sys
import uuid

import numpy
import torch

HOURS = datetime.timedelta(hours=-3)
VALUES = [
    range(3), range(9, 0, -2), slice(1, None), slice(None, "a", 2), ..., NotImplemented,
    collections.Counter("abbccc"), collections.Counter(), collections.deque([1, [2]], 3), collections.deque(),
    datetime.date(2024, 2, 29), datetime.datetime(1, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59, 999999),
    datetime.datetime(2024, 1, 2, 3, 4, tzinfo=datetime.timezone.utc), datetime.time(1, 2, 3), datetime.time(0, 0, 0, 7),
    datetime.time(1, tzinfo=datetime.timezone(HOURS)), datetime.timezone(HOURS, "x"), datetime.timezone.utc,
    datetime.timedelta(), datetime.timedelta(-1, 7, 9), datetime.timedelta.max,
    decimal.Decimal("1.50"), decimal.Decimal("-1E+30"), decimal.Decimal("-Infinity"), decimal.Decimal("sNaN12"),
    fractions.Fraction(-1, 3), fractions.Fraction(2**40), uuid.UUID(int=0), uuid.UUID(int=2**127 + 255),
    pathlib.PosixPath("/a/b"), pathlib.PosixPath(), pathlib.PurePosixPath("//a"),
    pathlib.PureWindowsPath("c:/a/b"), pathlib.PureWindowsPath("c:/"), pathlib.PureWindowsPath("a/b"),
    torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3]), torch.Size([]), torch.float32, torch.bool,
    numpy.dtype("f4"), numpy.dtype(">i4"), numpy.dtype("?"), numpy.float64(0.1), numpy.float32(0.1), numpy.float16(0.1),
    numpy.float32("inf"), numpy.float64(1e16), numpy.float32(1e-5), numpy.bool_(True),
    numpy.int8(-128), numpy.uint64(2**64 - 1), numpy.complex64(1 - 2j), numpy.complex128(0.1j), numpy.array(5),
    numpy.array([], "f4"), numpy.ones((0, 3)),
]  # fmt: skip
ARRAYS = [
    numpy.arange(6).reshape(2, 3), numpy.arange(6, dtype="f4").reshape(2, 3, order="F"), numpy.arange(3, dtype=">i2"),
    numpy.array([[True, False]]), numpy.array([2j], ">c16"), numpy.arange(8, dtype="u1").reshape(2, 2, 2),
    numpy.arange(3, dtype=">f8"), numpy.array(["text"]), numpy.array([1, "a"], object), numpy.zeros(1, "M8[s]"),
    numpy.zeros(2, "i4,f8"),
]  # fmt: skip


def main():
    out = pathlib.Path(sys.argv[1])
    for protocol in (2, 5):
        (out / f"values.p{protocol}").write_bytes(pickle.dumps(VALUES, protocol))
        (out / f"arrays.p{protocol}").write_bytes(pickle.dumps(ARRAYS, protocol))
    (out / "values.txt").write_text("".join(f"{value!r}\n" for value in VALUES))
    numbers = [array.ravel().tolist() if array.dtype.kind in "biufc" else None for array in ARRAYS]
    (out / "arrays.txt").write_text("".join(f"{row}\n" for row in numbers))


main()
