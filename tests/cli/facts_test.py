#!/usr/bin/env python3
"""What a command prints and what it answers with --json are the same facts, for every golden checkpoint.

    facts_test.py TESSERA GOLDEN_DIRECTORY
"""
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest

from made import Case, tessera, write_safetensors
from values_test import ARRAYS, write_value


PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/formats/json.md"


def schema():
    """Command -> path of a field -> its types, as the page has them."""
    found, command = {}, None
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            command = found.setdefault(line[3:], {})
        elif row := re.match(r"\| `([^`]+)` \| ([^|]+) \|", line):
            command[row[1]] = (set(row[2].strip().removesuffix("?").split(" or ")), row[2].strip().endswith("?"))
    return found


def fields(value, rules, path=""):
    """Each field with its type, as the page names them."""
    rule = rules.get(path)
    if rule and "any" in rule[0]:
        yield path, "any"
    elif isinstance(value, dict):
        for key, item in value.items():
            named = f"{path}.{key}" if path else key
            starred = f"{path}.*" if path else "*"
            yield from fields(item, rules, starred if starred in rules else named)
    elif isinstance(value, list):
        for item in value:
            yield from fields(item, rules, path + "[]")
    else:
        yield path, "null" if value is None else type(value).__name__


def printed(name):
    """As the command prints a name; the goldens have no other characters that it escapes."""
    short = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return "".join(short.get(letter) or (f"\\x{ord(letter):02x}" if ord(letter) < 32 or ord(letter) == 127 else letter) for letter in name)


class Facts(unittest.TestCase):
    def setUp(self):
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="tessera-facts-"))
        self.addCleanup(shutil.rmtree, self.work)

    def checkpoints(self):
        """Files and directories that ls opens; there are 30 or more."""
        found = []
        for path in sorted([*Case.golden.glob("*.pt"), *Case.golden.glob("*.safetensors"), *(Case.golden / "checkpoints").iterdir()]):
            if tessera("ls", path).returncode == 0:
                found.append(path)
        self.assertGreaterEqual(len(found), 30)
        return [*found, write_value(self.work / "values.pt", ARRAYS)]

    def both(self, *arguments):
        """The lines of text, and the document."""
        text, document = tessera(*arguments), tessera(*arguments, "--json")
        self.assertEqual((text.returncode, text.stderr), (document.returncode, document.stderr))
        return text.stdout.splitlines(), json.loads(document.stdout)

    def test_ls(self):
        for path in self.checkpoints():
            (head, *lines), rows = self.both("ls", path)
            self.assertEqual(head.split(), ["name", "dtype", "shape", "bytes", "pieces", "files"])
            self.assertEqual(len(lines), len(rows), path)
            for line, row in zip(lines, rows):
                self.assertTrue(line.startswith(printed(row["name"])), (line, row))
                rest = line[len(printed(row["name"])):].strip()
                if "shape" in row:
                    rest, *tied = rest.split("  tied to ")
                    self.assertEqual(tied, [printed(row["tied_to"])] if "tied_to" in row else [])
                    dtype, shown = rest.split(None, 1)
                    shape, *numbers = shown.rsplit(None, 3)
                    self.assertEqual([dtype, json.loads(shape), *map(int, numbers)],
                                     [row["dtype"], row["shape"], row["bytes"], row["pieces"], row["files"]])
                elif "array" in row:
                    self.assertTrue(rest.startswith(f"numpy {row['array']['dtype']}"), rest)
                    self.assertIn(str(row["array"]["shape"]), rest)
                else:
                    self.assertIn(row["text"][:40], rest)

    def test_stat(self):
        for path in self.checkpoints():
            lines, facts = self.both("stat", path)
            shown = dict(line.split(None, 1) for line in lines if not line.startswith(("metadata", "world size", "save id")))
            self.assertEqual(shown["kind"], facts["kind"])
            self.assertEqual(int(shown["parameters"]), facts["parameters"])
            self.assertEqual(int(shown["tensors"].split()[0]), facts["tensors"])
            inner = re.search(r"and (\d+) inside of values", shown["tensors"])
            self.assertEqual(int(inner[1]) if inner else 0, facts["inner_tensors"])
            self.assertEqual(int(shown["values"]), facts["values"])
            self.assertEqual(int(shown["files"].split()[0]), facts["files"])
            self.assertEqual(shown["optimizer"] == "yes", facts["optimizer"])
            world = [int(line.split()[-1]) for line in lines if line.startswith(("world size", "writers"))]
            self.assertEqual(world, [facts["writers"]] if facts["writers"] else [])
            self.assertEqual(sum(line.startswith("metadata") for line in lines), len(facts["metadata"]))

    def test_stats(self):
        for path in self.checkpoints():
            (head, *lines), rows = self.both("stats", path)
            self.assertEqual(head.split(), ["name", "dtype", "shape", "nan", "+inf", "-inf", "zeros", "smallest", "largest", "mean", "std", "norm"])
            self.assertEqual(len(lines), len(rows), path)
            for line, row in zip(lines, rows):
                self.assertTrue(line.startswith(printed(row["name"])), (line, row))
                shape, rest = re.match(r"\S+  +(\[.*?\]) +(.*)", line[len(printed(row["name"])):].strip()).groups()
                self.assertEqual(json.loads(shape), row["shape"])
                self.assertEqual(list(map(int, rest.split()[:4])), [row[key] for key in ("nan", "positive_infinity", "negative_infinity", "zeros")])
                numbers = rest.removesuffix(row.get("suspect", "")).split()[4:]
                self.assertEqual(len(numbers), 0 if row["mean"] is None else 5)
                for shown, key in zip(numbers, ("smallest", "largest", "mean", "std", "norm")):
                    self.assertAlmostEqual(float(shown), float(row[key]), delta=1e-5 * abs(float(row[key])))

    def test_verify(self):
        for path in self.checkpoints():
            text, document = tessera("verify", path), tessera("verify", path, "--json")
            self.assertEqual(text.returncode, document.returncode)
            facts = json.loads(document.stdout)
            if facts["ok"]:
                self.assertEqual(int(re.match(r"ok: (\d+) tensors?", text.stdout)[1]), facts["tensors"])
                inner = re.search(r"and (\d+) inside of values", text.stdout)
                self.assertEqual(int(inner[1]) if inner else 0, facts["inner_tensors"])
                listed = json.loads(tessera("stat", path, "--json").stdout)
                self.assertEqual((facts["tensors"], facts["inner_tensors"]), (listed["tensors"], listed["inner_tensors"]), path)
            by = {False: 0, True: 0}
            for row in facts["files"]:
                by[row["checked_by"] == "nothing"] += row["bytes"]
            self.assertEqual((by[False], by[True]), (facts["bytes_checked"], facts["bytes_without_checksum"]))
            if facts["ok"] and facts["bytes_checked"]:
                self.assertRegex(text.stdout, "by (digests of blocks|the CRC-32s in the archive)")
            for finding in facts["findings"]:
                self.assertIn(finding["text"], text.stderr)

    def test_map(self):
        for path in self.checkpoints():
            lines, all_rows = self.both("map", path)
            rows = [row for row in all_rows if "name" in row]
            is_piece = re.compile(r"  [#.]{40}  ").match
            pieces = [line for line in lines if is_piece(line)]
            heads = [line for line in lines[:len(rows) + len(pieces)] if not is_piece(line)]
            self.assertEqual(len(heads), len(rows), path)
            self.assertEqual(len(pieces), sum(len(row["pieces"]) for row in rows))
            for head, row in zip(heads, rows):
                self.assertEqual(head, f"{printed(row['name'])}  {row['dtype']} {row['shape']}")
            files = {}
            for row in rows:
                for piece in row["pieces"]:
                    files.setdefault(piece["file"], []).append(piece["bytes"])
            ends = lines[len(rows) + len(pieces):]
            uses = all_rows[len(rows):]
            self.assertEqual(len(ends), len(uses))
            self.assertEqual({use["file"]: (use["count"], use["bytes"]) for use in uses},
                             {name: (len(sizes), sum(sizes)) for name, sizes in files.items()})
            for line, use in zip(ends, uses):
                count, name = re.search(r"(\d+) pieces?  (.*)$", line).groups()
                self.assertEqual((int(count), name), (use["count"], printed(use["file"])))

    def test_scan(self):
        for path in self.checkpoints():
            lines, facts = self.both("scan", path)
            self.assertEqual(len(lines) - 1, len(facts["names"]))
            self.assertEqual(int(re.search(r"in (\d+) pickles?", lines[-1])[1]), facts["pickles"])
            for line, row in zip(lines, facts["names"]):
                self.assertTrue(line.startswith(row["kind"]) and row["name"] in line, (line, row))

    def as_the_page_says(self, command, *arguments):
        """Every field that the command answers is on the page, with its type; those without "?" are there."""
        document = json.loads(tessera(arguments[0], "--json", *arguments[1:]).stdout)
        rules = schema()["failure" if isinstance(document, dict) and "error" in document else command]
        seen = set()
        for path, kind in fields(document, rules):
            self.assertIn(path, rules, (arguments, "is not on the page"))
            self.assertIn(kind, rules[path][0], (arguments, path))
            seen.add(path)
        if isinstance(document, dict):
            needed = {path for path, (kinds, is_optional) in rules.items() if not is_optional and not set(path) & set("[*") and "any" not in kinds}
            self.assertLessEqual(needed, seen, arguments)
        return seen

    def test_answers_are_as_the_page_says(self):
        work = self.work
        seen = {}
        def ask(command, *arguments):
            seen.setdefault(command, set()).update(self.as_the_page_says(command, *arguments))
        checkpoints = self.checkpoints()
        for number, path in enumerate(checkpoints):
            for verb in ("ls", "map", "stat", "stats", "verify", "scan"):
                ask(verb, verb, path)
            names = [row["name"] for row in json.loads(tessera("ls", path, "--json").stdout)]
            for name in names[:2] + names[-2:]:
                ask("cat", "cat", path, "--", name)
            ask("diff", "diff", path, checkpoints[number - 1])
            ask("convert", "convert", path, work / f"{number}.pt")
            ask("copy", "copy", work / f"{number}.pt", work / f"copied-{number}.pt")
            ask("diff", "diff", path, work / f"{number}.pt")
        ask("convert", "convert", Case.golden / "dtypes.safetensors", work / "noted.safetensors", "--rename", "no such name=>other")
        damaged = work / "damaged.pt"
        whole = (work / "0.pt").read_bytes()
        damaged.write_bytes(whole[:len(whole) // 2] + b"\x55" + whole[len(whole) // 2 + 1:])
        ask("verify", "verify", damaged)
        changed = work / "changed.safetensors"
        changed.write_bytes((Case.golden / "dtypes.safetensors").read_bytes()[:-1] + b"\x55")
        ask("diff", "diff", changed, Case.golden / "dtypes.safetensors")
        rows = [write_safetensors(work / f"{count}.safetensors", {"w": ("U8", [count], bytes(count))}) for count in (2, 3)]
        ask("diff", "diff", *rows)
        ask("stats", "stats", write_safetensors(work / "nan.safetensors", {"w": ("F16", [1], b"\x00\x7e")}))
        ask("seal", "seal", changed)
        (work / "run").mkdir()
        shutil.copytree(Case.golden / "checkpoints/c2", work / "run/step1")
        ask("gc", "gc", work / "run")
        (work / "run/step2").mkdir()
        (work / "run/step2/__0_0.distcp").write_bytes(b"half")
        (work / "run/log.txt").write_text("a line")
        (work / "run/latest").symlink_to("step1")
        ask("copy", "copy", work / "run", work / "copied-run")
        cut = work / "cut.pt"
        cut.write_bytes(whole[:len(whole) // 2])
        ask("scan", "scan", cut)
        lacking = work / "lacking"
        shutil.copytree(Case.golden / "variants/c2_multi", lacking)
        (lacking / "__0_0.distcp").unlink()
        for verb in ("ls", "stat", "verify"):
            ask(verb, verb, lacking)
        ask("failure", "ls", work / "none")
        for command, rules in schema().items():
            self.assertIn(command, seen)
            unseen = {path for path in rules if path not in seen[command]}
            self.assertLessEqual(unseen, {"[].pieces[].offsets[]", "error.key", "error.offset", "names[].how", "problems[]", "warnings[]",
                                          "leftovers[].kind", "leftovers[].path", "leftovers[].bytes", "leftovers[].age",
                                          "leftovers[].removed", "leftovers[].problem", "findings[].path", "findings[].key",
                                          "findings[].offset"}, command)

    def test_diff(self):
        checkpoints = self.checkpoints()
        for a, b in zip(checkpoints, checkpoints[1:]):
            lines, rows = self.both("diff", a, b)
            if not rows:
                self.assertTrue(lines[0].startswith("equal: "))
                continue
            self.assertEqual(len(lines), len(rows))
            for line, row in zip(lines, rows):
                self.assertTrue(line.startswith(row["kind"]), line)
                self.assertIn(printed(row["name"]), line)


if __name__ == "__main__":
    Case.command, Case.golden = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
