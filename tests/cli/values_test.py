#!/usr/bin/env python3
"""Values of classes that everybody knows, as the command shows them, and what pickles with their names make it do.

    values_test.py TESSERA GOLDEN_DIRECTORY
"""
import collections
import datetime
import decimal
import fractions
import json
import os
import pathlib
import pickle
import struct
import sys
import types
import unittest
import unittest.mock
import uuid
import zipfile

from made import Case, tessera


def named(dotted):
    """A function that is pickled by this name."""
    def function(*_):
        pass

    function.__module__, function.__qualname__ = dotted.rsplit(".", 1)
    return function


NAMES = {name: named(name) for name in (
    "numpy.dtype", "numpy.ndarray", "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar", "numpy._core.numeric._frombuffer", "torch.Size", "torch.device", "torch.float32")}


class Call:
    """Pickled as a call of the function, with a state."""

    def __init__(self, name, arguments, state=None):
        self.reduced = (NAMES[name], arguments) if state is None else (NAMES[name], arguments, state)

    def __reduce__(self):
        return self.reduced


def dtype(code, order="<"):
    return Call("numpy.dtype", (code, False, True), (3, order, None, None, None, -1, -1, 0))


def array(code, shape, content, order="<", is_fortran=False, module="numpy._core"):
    state = (1, shape, dtype(code, order), is_fortran, content)
    return Call(f"{module}.multiarray._reconstruct", (NAMES["numpy.ndarray"], (0,), b"b"), state)


def scalar(code, content, order="<"):
    return Call("numpy._core.multiarray.scalar", (dtype(code, order), content))


ARRAYS = {
    "rows": array("i8", (2, 3), struct.pack("<6q", *range(6))),
    "columns": array("i2", (2, 3), struct.pack("<6h", 0, 3, 1, 4, 2, 5), is_fortran=True, module="numpy.core"),
    "big": array("f4", (2,), struct.pack(">2f", 0.5, -2), ">"),
    "buffer": Call("numpy._core.numeric._frombuffer", (bytearray(b"\x00\x01"), dtype("b1", "|"), (2,), "C")),
    "none": array("c8", (0, 3), b""),
    "single": array("u1", (), b"\x05", "|"),
    "scalar": scalar("f8", struct.pack(">d", 1.5), ">"),
    "flag": scalar("b1", b"\x01", "|"),
}

# As type(value).__qualname__ and repr(value) say it.
PLAIN = {
    "counter": collections.Counter("abb"), "deque": collections.deque([1, [2]], 3), "ring": collections.deque([]),
    "range": range(0, 9, 2), "slice": slice(1, None), "dots": ..., "date": datetime.date(2024, 1, 2),
    "moment": datetime.datetime(2024, 1, 2, 3, 4, tzinfo=datetime.timezone.utc), "time": datetime.time(1, 2, 3, 4),
    "delta": datetime.timedelta(days=-1, microseconds=7), "zone": datetime.timezone(datetime.timedelta(hours=-3), "x"),
    "decimal": decimal.Decimal("1.50"), "fraction": fractions.Fraction(-1, 3), "uuid": uuid.UUID(int=1 << 127),
    "path": pathlib.PurePosixPath("/a/b"), "windows": pathlib.PureWindowsPath("c:/a"), "bound": (slice(1, 2), [range(0, 1)]),
    "second": datetime.datetime(2024, 1, 2, 3, 4, fold=1, tzinfo=datetime.timezone.utc), "second time": datetime.time(1, fold=1),
    "shares": collections.Counter({"a": 1, "b": 2.5, "c": True, "d": 2, "e": float("inf")}), "mixed": collections.Counter(a=1, b=None, c=2),
    "drive": pathlib.PureWindowsPath("C:x\\y"), "only a drive": pathlib.PureWindowsPath("C:"), "root": pathlib.PureWindowsPath("C:/"),
}


def write_value(path, value):
    """What torch.save makes of it. Returns the path."""
    modules = {}
    for dotted, function in NAMES.items():
        module, name = dotted.rsplit(".", 1)
        setattr(modules.setdefault(module, types.ModuleType(module)), name, function)
    with unittest.mock.patch.dict(sys.modules, modules):
        pickled = pickle.dumps(value, 4)
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("archive/data.pkl", pickled)
        out.writestr("archive/version", "3\n")
    return path


class Values(Case):
    def file(self, value):
        return write_value(self.work / "value.pt", value)

    def test_arrays_of_numpy_are_listed_and_printed_as_numbers(self):
        path = self.file(ARRAYS)
        lines = {line.split()[0]: line.split()[1:] for line in tessera("ls", path).stdout.splitlines()}
        self.assertEqual(lines["rows"], ["numpy", "int64", "[2,", "3]", "48"])
        self.assertEqual(lines["none"], ["numpy", "complex64", "[0,", "3]", "0"])
        self.assertEqual(lines["scalar"], ["numpy", "float64", "np.float64(1.5)"])
        printed = {"rows": "0 1 2\n3 4 5\n", "columns": "0 1 2\n3 4 5\n", "big": "0.5 -2\n", "buffer": "False True\n",
                   "none": "", "single": "5\n", "scalar": "np.float64(1.5)\n", "flag": "np.True_\n", "rows[1,:2]": "3 4\n"}
        for name, text in printed.items():
            self.assertEqual(tessera("cat", path, name).stdout, text, name)
        target = self.work / "columns.npy"
        self.assertEqual(tessera("cat", path, "columns", "--npy", target).returncode, 0)
        self.assertEqual(target.read_bytes()[-12:], struct.pack("<6h", *range(6)))

    def test_arrays_of_numpy_as_documents(self):
        path = self.file(ARRAYS)
        rows = {row["name"]: row for row in json.loads(tessera("ls", path, "--json").stdout)}
        self.assertEqual(rows["rows"], {"name": "rows", "type": "numpy.ndarray", "array": {"dtype": "int64", "shape": [2, 3]},
                                        "value": "array([[0, 1, 2], [3, 4, 5]])", "text": "array([[0, 1, 2], [3, 4, 5]])"})
        self.assertEqual(rows["scalar"], {"name": "scalar", "type": "numpy.float64", "value": 1.5, "text": "np.float64(1.5)"})
        self.assertIs(rows["flag"]["value"], True)
        shown = json.loads(tessera("cat", path, "columns", "--json").stdout)
        self.assertEqual(shown, {"name": "columns", "dtype": "int16", "shape": [2, 3], "values": [0, 1, 2, 3, 4, 5]})

    def test_other_values_look_as_in_python(self):
        path = self.file(PLAIN)
        rows = {row["name"]: row for row in json.loads(tessera("ls", path, "--json").stdout)}
        for name, value in PLAIN.items():
            self.assertEqual(rows[name]["text"], repr(value), name)
            kind = type(value)
            self.assertEqual(rows[name]["type"], kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}")
        path = self.file({"size": Call("torch.Size", ((1, 2),)), "device": Call("torch.device", ("cuda", 1)), "dtype": NAMES["torch.float32"]})
        texts = [row["text"] for row in json.loads(tessera("ls", path, "--json").stdout)]
        self.assertEqual(sorted(texts), ["device(type='cuda', index=1)", "torch.Size([1, 2])", "torch.float32"])

    def test_arrays_that_mean_the_same_do_not_differ(self):
        little, big = struct.pack("<4f", 1, 2, 3, 4), struct.pack(">4f", 1, 3, 2, 4)
        one = array("f4", (2, 2), little)
        other = array("f4", (2, 2), big, ">", is_fortran=True, module="numpy.core")
        a = write_value(self.work / "a.pt", {"array": one, "queue": collections.deque([(one,)])})
        b = write_value(self.work / "b.pt", {"array": other, "queue": collections.deque([(other,)])})
        self.assertEqual(tessera("diff", a, b).stdout, "equal: 2 leaves, bit for bit\n")
        changed = array("f4", (2, 2), little[:-4] + struct.pack("<f", 5))
        c = write_value(self.work / "c.pt", {"array": changed, "queue": collections.deque([(changed,)])})
        text = "1 of 4 elements differ, first at [1, 1], largest difference 1\n"
        self.assertEqual(tessera("diff", b, c).stdout, f"value    array  {text}value    queue  a tensor or array in it: {text}")
        (row, _) = json.loads(tessera("diff", "--json", b, c).stdout)
        self.assertEqual((row["different"], row["elements"], row["first"], row["largest_difference"]), (1, 4, [1, 1], 1))

    def test_what_does_not_fit_is_shown_as_the_call_that_it_is(self):
        huge = 1 << 62
        for value in (array("f4", (2,), b"1234"), array("f4", (huge, huge), b""), array("f4", (huge, huge, 0), b""),
                      array("O8", (1,), [1], "|"), array("V8", (1,), b"12345678", "|"), array("f4", (1,), b"1234", "|"),
                      array("f4", (-1,), b"1234"), array("f4", "1", b"1234"), array("f4", (1,) * 65, b"1234"), scalar("f8", b"1"),
                      scalar("O8", b"12345678", "|"), Call("torch.device", ("cpu", 1, 2)), Call("torch.Size", (1,))):
            path = self.file({"a": value})
            (row,) = json.loads(tessera("ls", path, "--json").stdout)
            self.assertTrue(row["text"].startswith(("numpy.", "torch.")), row)
            self.assertNotIn("array", row)
            for arguments in (("ls",), ("cat", "a"), ("stat",)):
                self.assertEqual(tessera(arguments[0], path, *arguments[1:]).returncode, 0)
            self.refused("invalid_argument", "cat", path, "a[0]", exit_code=2)


if __name__ == "__main__":
    Case.command, Case.golden = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
