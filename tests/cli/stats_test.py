#!/usr/bin/env python3
"""tessera stats: what it shows, what it leaves out, and its exit codes.

    stats_test.py TESSERA GOLDEN_DIRECTORY
"""
import json
import math
import os
import pathlib
import struct
import sys
import unittest

from made import Case, tessera, write_safetensors


def floats(*numbers):
    return ("F32", [len(numbers)], struct.pack(f"<{len(numbers)}f", *numbers))


TENSORS = {
    "b.weight": floats(3, -4, 0),
    "b.zero": floats(0, 0),
    "b.same": floats(2, 2),
    "b.none": ("F32", [0, 3], b""),
    "b.tiny": floats(1e-20, -2e-20),
    "b.huge": floats(1e20, -2e20),
    "c\x1b[2J": ("F64", [2, 2], struct.pack("<4d", 1, 2, math.nan, -math.inf)),
    "d.count": ("U64", [2], struct.pack("<2Q", 2**64 - 1, 1)),
    "d.flag": ("BOOL", [4], b"\x00\x01\x00\x01"),
}


class Stats(Case):
    def setUp(self):
        super().setUp()
        self.file = write_safetensors(self.work / "a.safetensors", TENSORS)

    def rows(self, *options, code=0):
        done = tessera("stats", self.file, "--json", *options)
        self.assertEqual(done.returncode, code, done.stderr)
        return self.by_name(done.stdout)

    @staticmethod
    def by_name(text):
        return {row["name"]: row for row in json.loads(text)}

    def test_numbers(self):
        rows = self.rows()
        self.assertEqual(list(rows), list(TENSORS))
        row = rows["b.weight"]
        self.assertEqual((row["elements"], row["numbers"], row["zeros"], row["smallest"], row["largest"]), (3, 3, 1, -4.0, 3.0))
        self.assertEqual(row["norm"], 5.0)
        self.assertEqual(row["mean"], -1 / 3)
        self.assertAlmostEqual(row["std"], math.sqrt(74 / 9), delta=1e-14)
        self.assertEqual({i: n for i, n in enumerate(row["exponents"]) if n}, {47 + 1: 1, 47 + 2: 1})
        self.assertEqual(rows["d.count"]["largest"], 2**64 - 1)
        self.assertEqual((rows["d.flag"]["zeros"], rows["d.flag"]["mean"]), (2, 0.5))
        odd = rows["c\x1b[2J"]
        self.assertEqual((odd["nan"], odd["positive_infinity"], odd["negative_infinity"]), (1, 0, 1))
        self.assertEqual((odd["first_not_finite"], odd["mean"], odd["largest"]), ([1, 0], 1.5, 2.0))
        empty = rows["b.none"]
        self.assertEqual((empty["elements"], empty["smallest"], empty["mean"], empty["median_exponent"]), (0, None, None, None))

    def test_suspects(self):
        found = {name: row["suspect"] for name, row in self.rows("--suspect").items()}
        self.assertEqual(found, {"b.zero": "zero", "b.same": "constant", "b.none": "empty", "b.tiny": "tiny", "b.huge": "huge",
                                 "c\x1b[2J": "not finite"})
        lines = tessera("stats", self.file, "--suspect").stdout.splitlines()
        self.assertEqual(len(lines), 1 + len(found))
        self.assertTrue(lines[1].startswith("b.zero ") and lines[1].endswith("  zero"), lines)

    def test_finite(self):
        self.assertEqual(list(self.rows("--finite", code=1)), ["c\x1b[2J"])
        self.assertEqual(self.rows("--finite", "--only", "b"), {})
        done = tessera("stats", self.file, "--finite")
        self.assertEqual((done.returncode, done.stdout), (1, "c\\x1b[2J  1 nan, 0 +inf, 1 -inf, first at [1, 0]\n"))
        done = tessera("stats", self.file, "--finite", "--only", "b")
        self.assertEqual((done.returncode, done.stdout), (0, "finite: 6 tensors\n"))
        self.refused("invalid_argument", "stats", self.file, "--finite", "--suspect", exit_code=2)

    def test_threads_and_other_kinds(self):
        text = tessera("stats", self.file, "--json").stdout
        for threads in (1, 3, 8):
            self.assertEqual(tessera("stats", self.file, "--json", "--threads", threads).stdout, text)
        for target, kind in (("a.pt", "torch"), ("as-dcp", "dcp")):
            self.assertEqual(tessera("convert", self.file, self.work / target, "--to", kind, "--quiet").returncode, 0)
            self.assertEqual(self.by_name(tessera("stats", self.work / target, "--json").stdout), self.by_name(text))

    def test_values_are_left_out(self):
        done = tessera("stats", Case.golden / "train.pt", "--json")
        names = [row["name"] for row in json.loads(tessera("ls", Case.golden / "train.pt", "--json").stdout) if "dtype" in row]
        self.assertEqual([row["name"] for row in json.loads(done.stdout)], names)

    def test_damage_and_what_is_missing(self):
        self.refused("not_found", "stats", self.file, "--only", "b.no")
        sealed = tessera("seal", self.file)
        self.assertEqual(sealed.returncode, 0, sealed.stderr)
        content = bytearray(self.file.read_bytes())
        content[-1] ^= 1
        self.file.write_bytes(content)
        self.refused("corrupt", "stats", self.file)


if __name__ == "__main__":
    Case.command, Case.golden = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
