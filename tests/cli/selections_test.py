#!/usr/bin/env python3
"""What --only, --rename and names on the command line select.

    selections_test.py TESSERA GOLDEN_DIRECTORY
"""
import fnmatch
import hashlib
import json
import math
import os
import pathlib
import random
import struct
import sys
import unittest

from made import Case, tessera, write_safetensors

# Names that look like lists, globs and escapes.
ODD = ["a", "ab", "x0", "[ab]", "[a,x0]", "['a']['b']", "w[0]", "é.x", "ü", "q'\"", "a\nb", "a\\nb", "tab\there", "\x1b[31m", "*",
       "a?", "a-b", "\u0085", "-x", " space "]


class Selections(Case):
    def file_of(self, names, name="names.safetensors"):
        return write_safetensors(self.work / name, {key: ("U8", [1], b"x") for key in names})

    def listed(self, path, *arguments):
        done = tessera("ls", path, "--json", *arguments)
        self.assertEqual(done.returncode, 0, (arguments, done.stderr))
        return sorted(row["name"] for row in json.loads(done.stdout))

    def test_a_value_in_brackets_is_no_list(self):
        source = self.file_of(["a", "ab", "x0", "b"])
        self.assertEqual(self.listed(source, "--only", "[ab]"), ["a", "b"])
        self.assertEqual(self.listed(source, "--only", "[a,x]*"), ["a", "ab", "x0"])
        target = self.work / "renamed.safetensors"
        done = tessera("convert", source, target, "--rename", "[0-9]=>[n]", "--rename", "[b]=>c")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.listed(target), ["a", "ac", "c", "x[n]"])

    def test_an_option_takes_one_value(self):
        source = self.file_of(["a", "b", "c"])
        before = tessera("ls", "--only", "a", source, "--json")
        self.assertEqual((before.returncode, before.stderr), (0, ""))
        self.assertEqual([row["name"] for row in json.loads(before.stdout)], ["a"])
        self.assertEqual(self.listed(source, "--only", "a", "--only", "c"), ["a", "c"])
        target = self.work / "t.safetensors"
        done = tessera("convert", "--rename", "a=>d", "--only", "a", source, target)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.listed(target), ["d"])
        for verb in (["diff", "--only", "a", source, source], ["verify", "--only", "a", source]):
            self.assertEqual(tessera(*verb).returncode, 0)

    def test_characters_are_not_bytes(self):
        source = self.file_of(["é.x", "ab.x", "ö"])
        self.assertEqual(self.listed(source, "--only", "?.x"), ["é.x"])
        self.assertEqual(self.listed(source, "--only", "[à-ü]"), ["ö"])

    def test_slices_take_rows(self):
        padded = write_safetensors(self.work / "padded.safetensors", {
            "embed": ("F32", [4, 2], struct.pack("<8f", 1, 2, 3, 4, 0, 0, 0, 0)), "other": ("U8", [3], b"abc")})
        target = self.work / "part.safetensors"
        done = tessera("convert", padded, target, "--slice", "embed[0:2]", "--slice", "other[-1:]", "--rename", "embed=>wte")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = {row["name"]: row["shape"] for row in json.loads(tessera("ls", target, "--json").stdout)}
        self.assertEqual(rows, {"wte": [2, 2], "other": [1]})
        self.assertEqual(tessera("cat", target, "wte").stdout, "1 2\n3 4\n")
        back = self.work / "back.safetensors"
        tessera("convert", target, back, "--rename", "wte=>embed")
        done = tessera("diff", back, padded)
        self.assertEqual(done.stdout, "shape    embed  [2, 2] / [4, 2]: the first 2 rows are equal, the rest is zero\n"
                                      "shape    other  [1] / [3]: of the first 1 row 1 of 1 elements differ, first at [0], "
                                      "largest difference 2, the rest is not zero\n")
        rows = json.loads(tessera("diff", back, padded, "--json").stdout)
        self.assertEqual([(row["common_rows"], row["different"], row["rest_is_zero"]) for row in rows], [(2, 0, True), (1, 1, False)])
        for rule, told in {"embed[0:5]": "the slice [0:5] has a range outside of [4, 2]", "embd[0:2]": "did you mean 'embed'",
                           "embed": "is not NAME[BEGIN:END]", "embed[2:2]": "has no elements"}.items():
            done = tessera("convert", padded, self.work / "none.pt", "--slice", rule)
            self.assertIn(told, done.stderr)
            self.assertFalse((self.work / "none.pt").exists())

    def test_tied_tensors_say_so(self):
        tied = write_safetensors(self.work / "tied.safetensors", {"embed.weight": ("F32", [2], bytes(8)), "w": ("F32", [2], bytes(8))},
                                 {"format": "pt", "lm_head.weight": "embed.weight", "title": "w"})
        done = tessera("ls", tied)
        self.assertRegex(done.stdout, r"\nlm_head.weight  float32  \[2\] +8 +1 +1  tied to embed.weight\n")
        self.assertIn("the metadata 'title' is the name of the tensor 'w'", done.stderr)
        rows = json.loads(tessera("ls", tied, "--json").stdout)
        self.assertEqual({row["name"]: row.get("tied_to") for row in rows}, {"embed.weight": None, "w": None, "lm_head.weight": "embed.weight"})
        for name in ("a.pt", "a.safetensors", "as-dcp"):
            done = tessera("convert", tied, self.work / name, *(["--to", "dcp"] if name == "as-dcp" else []))
            self.assertEqual(done.returncode, 0, done.stderr)
            rows = json.loads(tessera("ls", self.work / name, "--json").stdout)
            self.assertEqual({row["name"]: row.get("tied_to") for row in rows},
                             {"embed.weight": None, "w": None, "lm_head.weight": None if name == "as-dcp" else "embed.weight"}, name)
        shared = self.work / "as-dcp"
        self.assertEqual(tessera("diff", tied, shared).returncode, 0)

    def test_a_blob_of_a_hub_cache_is_checked_by_its_name(self):
        file = write_safetensors(self.work / "model.safetensors", {"w": ("F32", [2], bytes(8))})
        content = file.read_bytes()
        snapshot, blobs = self.work / "models--o--m/snapshots/c0ffee", self.work / "models--o--m/blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        name = hashlib.sha256(content).hexdigest()
        (blobs / name).write_bytes(content)
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/{name}")
        done = tessera("verify", snapshot)
        self.assertEqual((done.returncode, done.stdout),
                         (0, f"ok: 1 tensor, {len(content)} B checked by the SHA-256 that the Hub names the file by\n"))
        self.assertEqual(json.loads(tessera("verify", snapshot, "--json").stdout)["files"],
                         [{"file": f"{snapshot}/model.safetensors", "checked_by": "sha256", "bytes": len(content)}])
        self.assertEqual(tessera("verify", file).stdout, "ok: 1 tensor, 0 B checked, 8 B without a checksum in the file\n")
        (blobs / name).write_bytes(content[:-1] + b"\x01")
        done = tessera("verify", snapshot)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, rf"^tessera: corrupt: the file's SHA-256 is [0-9a-f]+, expected {name} by .*/blobs/{name} ")

    def test_what_is_printed_may_stand_in_a_glob(self):
        source = self.file_of(["a\nb.w", "a\nb.v", "a b.w"])
        self.assertEqual(self.listed(source, "--only", "a\\nb.*"), ["a\nb.v", "a\nb.w"])
        self.assertEqual(self.listed(source, "--only", "*\\n*.w"), ["a\nb.w"])

    def printed(self, source):
        """Name -> what ls prints of it."""
        head, *lines = tessera("ls", source).stdout.splitlines()
        width = head.index("dtype") - 2
        names = [row["name"] for row in json.loads(tessera("ls", source, "--json").stdout)]
        # Columns are padded by spaces, which end one name too.
        return {name: line[:width].rstrip() + " " * (name.endswith(" ")) for name, line in zip(names, lines, strict=True)}

    def test_what_ls_prints_selects_in_every_verb(self):
        source = self.file_of(ODD)
        texts = self.printed(source)
        self.assertEqual(sorted(texts), sorted(ODD))
        self.assertEqual(len(set(texts.values())), len(ODD))
        other = self.work / "other.safetensors"
        for number, (name, text) in enumerate(texts.items()):
            with self.subTest(name=name, text=text):
                self.assertEqual(self.listed(source, f"--only={text}"), [name])
                self.assertEqual(json.loads(tessera("cat", "--json", source, "--", text).stdout)["name"], name)
                (row,) = json.loads(tessera("map", "--json", source, "--", text).stdout)
                self.assertEqual(row["name"], name)
                self.assertEqual(json.loads(tessera("verify", source, f"--only={text}", "--json").stdout)["tensors"], 1)
                self.assertEqual(tessera("convert", source, other, "--overwrite", f"--only={text}").returncode, 0)
                self.assertEqual(self.listed(other), [name])
                self.assertEqual(tessera("diff", source, other, f"--only={text}").returncode, 0)

    def test_map_takes_a_glob(self):
        source = self.file_of(["h.0.w", "h.0.b", "h.1.w"])
        self.assertEqual([row["name"] for row in json.loads(tessera("map", source, "h.*.w", "--json").stdout)], ["h.0.w", "h.1.w"])
        self.refused("not_found", "map", source, "g.*")

    def test_model_of_a_file_without_parts(self):
        source = self.file_of(["model.w", "model.b", "lm_head"])
        done = tessera("ls", source, "--only", "model", "--json")
        self.assertEqual(len(json.loads(done.stdout)), 3)
        self.assertIn("note: no part of the checkpoint is called model", done.stderr)
        self.assertIn("1 name that does not begin with 'model.'", done.stderr)
        converted = json.loads(tessera("convert", source, self.work / "m.safetensors", "--only", "model", "--json").stdout)
        self.assertEqual(len(converted["notes"]), 1)
        self.assertEqual(self.listed(source, "--only", "model.*"), ["model.b", "model.w"])
        self.assertEqual(tessera("ls", self.dcp, "--only", "model").stderr, "")

    def test_a_rule_that_may_mean_something_else_is_told(self):
        source = self.file_of(["a", "b"])
        done = tessera("convert", source, self.work / "t.safetensors", "--rename", "x=>y", "--rename", "a=>b=>c", "--json")
        notes = json.loads(done.stdout)["notes"]
        self.assertEqual(len(notes), 2, notes)
        self.assertIn("'x=>y' changes no name", notes[0])
        self.assertIn("'a=>b=>c' has a second '=>'", notes[1])
        self.assertEqual(self.listed(self.work / "t.safetensors"), ["b", "b=>c"])

    def test_numbers_that_a_dtype_cannot_hold_are_told(self):
        floats = lambda *values: ("F32", [len(values)], struct.pack(f"<{len(values)}f", *values))
        source = write_safetensors(self.work / "f.safetensors", {"large": floats(1.0, 70000.0), "step": floats(1001.0), "w": floats(0.1, 3.0),
                                                                 "inf": floats(math.inf, math.nan), "third": floats(1000.3)})
        notes_of = lambda dtype: json.loads(tessera("convert", source, self.work / f"{dtype}.pt", "--dtype", dtype, "--json").stdout)["notes"]
        self.assertEqual(notes_of("fp16"), ["as float16 some finite numbers are infinite: 'large'"])
        self.assertEqual(notes_of("bf16"), ["as bfloat16 some whole numbers are others: 'large' and 1 more"])
        self.assertEqual(notes_of("fp32"), [])

    def test_a_shard_that_is_larger_than_asked_for_is_told(self):
        source = write_safetensors(self.work / "s.safetensors", {"a": ("U8", [5000], bytes(5000)), "b": ("U8", [10], bytes(10))})
        done = tessera("convert", source, self.work / "set", "--to", "safetensors", "--max-shard-size", "1KB", "--json")
        notes = json.loads(done.stdout)["notes"]
        self.assertEqual(len(notes), 1, notes)
        self.assertIn("more than the 1000 of --max-shard-size: its only tensor is not cut", notes[0])

    def test_generated_globs_select_what_fnmatch_selects(self):
        """By characters, as Python's does: sets of characters without '^' and '\\', which mean more in a shell."""
        chance = random.Random(50)
        pieces = ["a", "b", "c", "é", "ü", "0", "[", "]", "!", "-", "'", '"', "\n", ".", "_"]
        names = sorted({"".join(chance.choices(pieces, k=chance.randint(1, 5))) for _ in range(300)})
        source = self.file_of(names)
        of_globs = [*pieces, "*", "?", "*", "?", "[ab]", "[!a]", "[a-c]", "[à-ü]", "[]a]", "[!]]", "['\"]", "[\n.]", "[c-a]"]
        selected = 0
        for _ in range(500):
            glob = "".join(chance.choices(of_globs, k=chance.randint(1, 4)))
            expected = [name for name in names if name == glob or name.startswith(glob + ".")]
            if not expected and set(glob) & set("*?["):
                expected = [name for name in names if fnmatch.fnmatchcase(name, glob)]
            done = tessera("ls", source, "--json", f"--only={glob}")
            found = sorted(row["name"] for row in json.loads(done.stdout)) if done.returncode == 0 else []
            self.assertEqual(found, expected, (glob, done.stderr))
            self.assertEqual(done.returncode, 0 if expected else 3)
            selected += len(expected)
        self.assertGreater(selected, 1000)


if __name__ == "__main__":
    Case.command, Case.golden = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
