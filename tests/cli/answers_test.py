#!/usr/bin/env python3
"""What the tessera command prints for programs and people: JSON, values, scan, seal, help, completion.

    answers_test.py TESSERA GOLDEN_DIRECTORY
"""
import io
import json
import math
import os
import pathlib
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import zipfile

from made import write_safetensors

TESSERA = GOLDEN = None
SANITIZED = bool(os.environ.get("TESSERA_SANITIZE"))


def tessera(*arguments, **extra):
    return subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True, check=False, **extra)


def answer(*arguments):
    return json.loads(tessera(*arguments, "--json").stdout)


class Answers(unittest.TestCase):
    def setUp(self):
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="tessera-cli-"))

    def tearDown(self):
        shutil.rmtree(self.work)

    def refused(self, code, *arguments, exit_code=3):
        done = tessera(*arguments)
        self.assertEqual(done.returncode, exit_code, done.stderr)
        self.assertTrue(done.stderr.startswith(f"tessera: {code}: "), done.stderr)
        return done.stderr

    def safetensors(self, name, tensors, metadata=None):
        return write_safetensors(self.work / name, tensors, metadata)

    def archive(self, pickled):
        """What torch.save writes around a pickle."""
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as out:
            out.writestr("archive/data.pkl", pickled)
            out.writestr("archive/version", "3\n")
        return file.getvalue()

    def torch_file(self, value, name="value.pt"):
        path = self.work / name
        path.write_bytes(self.archive(pickle.dumps(value, 2)))
        return path

    def tree(self, value):
        """A safetensors file whose tree entry has this tagged value."""
        entry = {"version": 1, "leaves": [{"path": ["v"], "value": value}]}
        return self.safetensors("tree.safetensors", {}, {"tessera.tree": json.dumps(entry)})

    def test_messages_are_ours_and_whole(self):
        for entry, told in (('{"version": 1', "no JSON from byte 14 on"), ('{"version": 1}', "the entry 'leaves' is missing"),
                            ('{"version": "x"}', "a value of another type than belongs there"), ("[]", "a value of another type")):
            path = self.safetensors("t.safetensors", {}, {"tessera.tree": entry})
            done = tessera("ls", path)
            self.assertEqual(done.returncode, 3, entry)
            self.assertIn(told, done.stderr)
            self.assertNotIn("json.exception", done.stderr)
        # A NUL ended the message, and what comes behind the name was lost.
        path = self.safetensors("n.safetensors", {"a\0b": ("U8", [2], b"xx")})
        path.write_bytes(path.read_bytes().replace(b'"U8"', b'"U9"'))
        done = tessera("ls", path)
        self.assertEqual(done.returncode, 3)
        self.assertRegex(done.stderr, r"n\.safetensors, key 'a\\x00b', offset")

    # Values ----------------------------------------------------------------------------------------

    def test_json_tells_types_as_the_text_does(self):
        value = {"tuple": (1, [2]), "list": [1, 2], "bytes": b"ab", "text": "ab", "int": 7, "real": 7.0, "none": None, "flag": True, "set": {1}}
        path = self.torch_file(value)
        rows = {row["name"]: row for row in answer("ls", path)}
        leaves = {name: value for name, value in value.items() if name not in ("list",)}
        for name, item in leaves.items():
            self.assertEqual((rows[name]["type"], rows[name]["text"]), (type(item).__name__, repr(item)), name)
            shown = answer("cat", path, name)
            self.assertEqual((shown["type"], shown["text"]), (type(item).__name__, repr(item)), name)
        self.assertEqual(tessera("cat", path, "tuple").stdout, "(1, [2])\n")

    def test_a_file_tells_its_own_metadata(self):
        path = self.safetensors("m.safetensors", {"w": ("U8", [1], b"x")}, {"format": "pt", "license": "mit"})
        self.assertEqual(answer("stat", path)["metadata"]["license"], "mit")
        self.assertIn("license: mit", tessera("stat", path).stdout)

    def test_map_tells_dtypes_and_bytes(self):
        path = self.safetensors("m.safetensors", {"w": ("F32", [2, 3], bytes(24))})
        row, file = answer("map", path)
        self.assertEqual((row["dtype"], row["pieces"][0]["bytes"]), ("float32", 24))
        self.assertEqual(file, {"file": "m.safetensors", "count": 1, "bytes": 24})
        self.assertEqual(answer("map", path, "w"), [row])

    def test_diff_prints_numbers_as_they_are(self):
        for dtype, code, x, y, text, largest in (
                ("F64", "d", 1.0, 1.0 + 1e-9, "largest difference 1e-09", (1.0 + 1e-9) - 1.0),
                ("F64", "d", 0.0, -0.0, "equal as numbers: 0.0 and -0.0", 0.0),
                ("F64", "d", 1e30, 2e30, "largest difference 1e+30", 1e30),
                ("F32", "f", float("nan"), 1.0, "largest difference nan", "nan"),
                ("I64", "q", 2**62, 2**62 + 1, "largest difference 1", 1),
                ("I64", "q", -2**63, 2**63 - 1, "largest difference 18446744073709551615", 2**64 - 1),
                ("I8", "b", -128, 127, "largest difference 255", 255),
                ("U64", "Q", 0, 2**64 - 1, "largest difference 18446744073709551615", 2**64 - 1)):
            a, b = (self.safetensors(f"{name}.safetensors", {"w": (dtype, [2, 3], struct.pack(f"<6{code}", 0, 0, 0, 0, 0, last))})
                    for name, last in (("a", x), ("b", y)))
            done = tessera("diff", a, b)
            self.assertEqual((done.returncode, done.stdout), (1, f"value    w  1 of 6 elements differ, first at [1, 2], {text}\n"))
            (row,) = answer("diff", a, b)
            self.assertEqual((row["different"], row["elements"], row["first"], row["largest_difference"]), (1, 6, [1, 2], largest))
        # NaN stays the largest, whatever follows it.
        a, b = (self.safetensors(f"{name}.safetensors", {"w": ("F32", [2], struct.pack("<2f", *values))})
                for name, values in (("a", (float("nan"), 0.0)), ("b", (1.0, -0.0))))
        self.assertIn("2 of 2 elements differ, first at [0], largest difference nan\n", tessera("diff", a, b).stdout)
        a, b = (self.safetensors(f"{name}.safetensors", {"w": ("F32", [], struct.pack("<f", value))}) for name, value in (("a", 1), ("b", 2)))
        self.assertIn("first at [], largest difference 1\n", tessera("diff", a, b).stdout)

    def test_complex_numbers_as_python_writes_them(self):
        source = self.safetensors("c.safetensors", {"c": ("C64", [4], struct.pack(
            "<8f", 1, 2, -0.0, -1.5, math.nan, math.inf, 0.1, -0.0))})
        self.assertEqual(tessera("cat", source, "c").stdout, "1+2j -0-1.5j nan+infj 0.1-0j\n")
        self.assertEqual(answer("cat", source, "c")["values"], ["1+2j", "-0-1.5j", "nan+infj", "0.1-0j"])

    def test_elements_have_the_types_of_json(self):
        source = self.safetensors("a.safetensors", {
            "f": ("F32", [6], struct.pack("<6f", 0.1, -0.0, 2, -math.inf, math.nan, 3e38)),
            "d": ("F64", [3], struct.pack("<3d", -0.0, 1e300, 0.1)), "b": ("BOOL", [2], b"\0\1"),
            "u": ("U64", [1], struct.pack("<Q", 2**64 - 1)), "i": ("I8", [2], b"\xff\x05"), "e": ("F8_E4M3", [1], b"\x38")})
        done = tessera("cat", source, "f", "--json").stdout
        self.assertIn("[0.1,-0.0,2.0,\"-inf\",\"nan\",", done)
        self.assertEqual(json.loads(done)["values"][5], 3e38)
        doubles = answer("cat", source, "d")["values"]
        self.assertEqual((doubles, math.copysign(1, doubles[0])), ([-0.0, 1e300, 0.1], -1.0))
        for name, values in {"b": [False, True], "u": [2**64 - 1], "i": [-1, 5], "e": ["0x38"]}.items():
            found = answer("cat", source, name)["values"]
            self.assertEqual((found, list(map(type, found))), (values, list(map(type, values))))

    def test_values_have_the_types_of_json(self):
        values = {"flag": True, "none": None, "zero": -0.0, "text": "1", "n": 7, "big": 2**70, "inf": math.inf,
                  "pair": (1, [2.5, "x"], {}), "z": 1 + 2j, "raw": b"ab", "keys": ({1: "a", "1": "b"}, {"k": (False,)})}
        source = self.torch_file(values)
        found = {row["name"]: row["value"] for row in answer("ls", source)}
        self.assertIs(found["flag"], True)
        self.assertIsNone(found["none"])
        self.assertEqual((found["zero"], math.copysign(1, found["zero"])), (0, -1))
        self.assertEqual((found["text"], found["n"], found["big"], found["inf"]), ("1", 7, str(2**70), "inf"))
        self.assertEqual((found["z"], found["raw"]), ("(1+2j)", "b'ab'"))
        self.assertEqual(found["pair"], [1, [2.5, "x"], {}])
        self.assertEqual(found["keys"], [[[1, "a"], ["1", "b"]], {"k": [False]}])
        for name in found:
            self.assertEqual(answer("cat", source, name)["value"], found[name], name)

    # Errors ----------------------------------------------------------------------------------------

    def test_an_error_is_a_document_too(self):
        done = tessera("ls", self.work / "none", "--json")
        error = json.loads(done.stdout)["error"]
        self.assertEqual((done.returncode, error["code"], error["path"]), (3, "not_found", str(self.work / "none")))
        self.assertTrue(done.stderr.startswith("tessera: not_found: " + error["message"]))
        broken = self.work / "broken.safetensors"
        broken.write_bytes(struct.pack("<Q", 50) + b"{" + b" " * 20)
        for command in (("ls", broken), ("stat", broken), ("cat", broken, "w"), ("map", broken), ("seal", broken),
                        ("diff", broken, broken), ("convert", broken, self.work / "x.pt")):
            self.assertEqual(json.loads(tessera(*command, "--json").stdout)["error"]["code"], "incomplete", command)
        source = self.safetensors("a.safetensors", {"w": ("U8", [1], b"x")})
        self.assertEqual(answer("cat", source, "v")["error"]["key"], "v")
        for usage in (("cat", source), ("ls", source, "--frobnicate"), ("convrt", source)):
            done = tessera(*usage, "--json")
            self.assertEqual((done.returncode, json.loads(done.stdout)["error"]["code"]), (2, "invalid_argument"))
        self.assertEqual(tessera("ls", self.work / "none").stdout, "")

    def test_an_unknown_command_names_the_one_that_was_meant(self):
        for typed, meant in (("convrt", "convert"), ("sacn", "scan"), ("veriffy", "verify"), ("rehsard", "reshard")):
            text = self.refused("invalid_argument", typed, "a", "b", exit_code=2)
            self.assertIn(f"unknown command '{typed}', did you mean {meant}?", text)
        self.assertIn("unknown command 'frobnicate', tessera --help lists all commands",
                      self.refused("invalid_argument", "frobnicate", exit_code=2))

    def test_kinds_that_are_not_read_are_named(self):
        cases = {"lite.ptl": ({"m/bytecode.pkl": b"\x80\2N.", "m/constants.pkl": b"\x80\2).", "m/version": b"3\n"}, "TorchScript"),
                 "script_1_0.pt": ({"m/version": b"1\n", "m/model.json": b"{}"}, "TorchScript archive, as torch wrote before 1.4"),
                 "package.pt": ({"p/.data/extern_modules": b"", "p/m/model.pkl": b"\x80\2N."}, "torch.package"),
                 "export.pt2": ({"e/archive_format": b"pt2", "e/archive_version": b"0", "e/.data/version": b"6\n"}, "torch.export without a model")}
        for name, (records, text) in cases.items():
            with zipfile.ZipFile(self.work / name, "w") as out:
                for record, content in records.items():
                    out.writestr(record, content)
            self.assertIn(text, self.refused("unsupported", "ls", self.work / name))
        self.assertEqual((answer("ls", GOLDEN / "script.pt"), answer("stat", GOLDEN / "script.pt")["kind"]), ([], "torchscript"))
        for protocol in (0, 1):
            for name in ("old.pt", "old.bin"):
                (self.work / name).write_bytes(b"".join(pickle.dumps(part, protocol) for part in (
                    0x1950a86a20f9469cfc6c, 1001, {"little_endian": True}, {"n": 3}, [])))
                self.assertIn("a stream of torch.save by pickle protocol 0 or 1", self.refused("unsupported", "ls", self.work / name))
        (self.work / "object.pt").write_bytes(self.archive(pickle.dumps(Plain(), 1)))
        self.assertIn("an object of pickle protocol 0 or 1", self.refused("unsupported", "ls", self.work / "object.pt"))

    def test_damaged_tags_of_the_tree_are_corrupt(self):
        whole = self.archive(pickle.dumps({1, 2}, 2)).hex()
        self.assertEqual(answer("cat", self.tree({"torch": whole}), "v")["value"], [1, 2])
        for value in ({"float": "infinity"}, {"float": 1}, {"float": ""}, {"tuple": 5}, {"tuple": {"a": 1}}, {"tuple": None},
                      {"dict": 5}, {"dict": {"a": [1, 2]}}, {"dict": [[1, 2, 3]]}, {"dict": [[1]]}, {"dict": [["a", 1], ["a", 2]]},
                      {"dict": [[[1], 2]]}, {"bytes": "0"}, {"bytes": "0g"}, {"bytes": 5}, {"torch": whole[:-2]}, {"torch": whole[:90]},
                      {"torch": ""}, {"torch": "00" * 40}, {"torch": [1]}, {"other": 1}, {}, {"tuple": [], "bytes": ""}, {"torch": "zz"}):
            self.refused("corrupt", "ls", self.tree(value))
        for entry in ('{"version": 1}', "5", '{"version": 1, "leaves": 5}', '{"version": 1, "leaves": [{"path": 5, "value": 1}]}',
                      '{"version": 1, "leaves": [{"path": [true], "value": 1}]}', '{"version": 1, "leaves": [{"path": [1.5], "value": 1}]}',
                      '{"version": 1, "leaves": {"a": {"path": ["v"], "value": 1}}}', '{"version": "1", "leaves": []}', "{"):
            self.refused("corrupt", "ls", self.safetensors("entry.safetensors", {}, {"tessera.tree": entry}))

    # Values in many places ---------------------------------------------------------------------------

    def peak(self, *arguments):
        """Runs the command and returns what it did and the most memory it had, in MiB."""
        script = ("import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL); "
                  "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024); sys.exit(done.returncode)")
        done = subprocess.run([sys.executable, "-c", script, TESSERA, *map(str, arguments)], capture_output=True, text=True, check=False)
        return done, int(done.stdout)

    def test_what_unfolds_to_far_more_than_the_file_is_refused_before_it_is_built(self):
        doubled = deep = {"t": 1}
        for _ in range(20):
            doubled = {"l": doubled, "r": doubled}
        wide = {f"v{i}": i for i in range(300)}
        for _ in range(300):
            wide = {"k" * 3000: wide}
        lists = list(range(1000))
        thousand = {f"a{i}": i for i in range(1000)}
        bombs = {"doubled": pickle.dumps(doubled, 2), "keys": pickle.dumps({f"k{i}": thousand for i in range(10000)}, 2),
                 "text": pickle.dumps({f"k{i}": text for text in ["x" * 10**7] for i in range(500)}, 2),
                 "bytes": pickle.dumps({f"k{i}": text for text in [b"x" * 10**6] for i in range(500)}, 4),
                 "lists": pickle.dumps([[lists] * 100] * 100, 2), "deep": pickle.dumps(wide, 2),
                 "tuples": pickle.dumps((lambda t: [t := (t, t) for _ in range(24)][-1])((1,)), 2),
                 # What a call makes of one value, again and again: sets of a list, bytes of a text.
                 "sets": b"\x80\x02](" + b"N" * 10**5 + b"eq\x000c__builtin__\nset\nq\x010(" + b"h\x01h\0\x85R" * 2000 + b"t.",
                 "encoded": b"\x80\x02X" + struct.pack("<I", 10**5) + b"x" * 10**5 + b"q\x000c_codecs\nencode\nq\x010X\6\0\0\0latin1q\x020(" +
                 b"h\x01h\0h\x02\x86R" * 2000 + b"t."}
        for name, pickled in bombs.items():
            bomb = self.work / f"{name}.pt"
            bomb.write_bytes(self.archive(pickled))
            for verb in (["ls", bomb], ["ls", bomb, "--json"], ["stat", bomb], ["map", bomb], ["cat", bomb, "k1"],
                         ["diff", bomb, bomb], ["convert", bomb, self.work / "o.safetensors"], ["convert", bomb, self.work / "o.pt"],
                         ["convert", bomb, self.work / "o", "--to", "dcp"]):
                done, peak = self.peak(*verb)
                self.assertEqual(done.returncode, 3, (name, verb, done.stderr))
                self.assertRegex(done.stderr, "^tessera: limit: .*(many places unfold to|calls copy)", (name, verb))
                if not SANITIZED:
                    self.assertLess(peak, 64 + len(pickled) // 2**20, (name, verb))
        self.assertEqual([path.name for path in self.work.iterdir() if path.name.startswith("o")], [])

    def test_values_that_no_header_takes_are_refused_before_they_are_text(self):
        """As much as may be shared, and too much for the metadata of a safetensors file: it is hexadecimal there."""
        number = (1 << 8 * 10**6) - 1
        for name, values in {"shared": [number] * 55, "small": [(1 << 8000) - i for i in range(60_000)], "one": (1 << 8 * 55 * 10**6) - 1,
                             "keyed": {i: {"n": number} for i in range(55)}}.items():
            source = self.torch_file({"v": values}, f"{name}.pt")
            read = self.peak("ls", source)[1]
            done, peak = self.peak("convert", source, self.work / "o.safetensors")
            self.assertEqual(done.returncode, 3, (name, done.stderr))
            self.assertRegex(done.stderr, "^tessera: limit: .*in a safetensors header", name)
            if not SANITIZED:
                self.assertLess(peak, read + 32, name)
        self.assertFalse((self.work / "o.safetensors").exists())

    def test_honest_sharing_is_opened_and_stays_where_the_target_can_have_it(self):
        small, text = {"a": 1, "b": (2, "x"), "c": [3.5]}, "t" * 100_000
        source = self.torch_file({"many": {f"key{i}": small for i in range(100_000)}, "list": [small] * 1000,
                                  "texts": {f"t{i}": text for i in range(100)}})
        size = source.stat().st_size
        self.assertEqual(answer("stat", source)["values"], 3 * 101_000 + 100)
        self.assertEqual(answer("cat", source, "list.999.b")["value"], [2, "x"])
        copied = self.work / "copied.pt"
        done, peak = self.peak("convert", source, copied)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLess(copied.stat().st_size, 2 * size)
        self.assertEqual(tessera("diff", source, copied).returncode, 0)
        with zipfile.ZipFile(copied) as archive:
            made = pickle.loads(archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl"))))
        self.assertEqual(made["many"]["key7"], small)
        self.assertIs(made["many"]["key7"], made["list"][3])

    def test_ls_and_map_print_row_by_row(self):
        """The documents are those that a printer of whole documents makes, and no row waits for the others."""
        tensors = {f"layer{i}.w": ("F32", [1], bytes(4)) for i in range(3)}
        source = self.safetensors("three.safetensors", tensors)
        for verb in ("ls", "map"):
            text = tessera(verb, source, "--json").stdout
            self.assertEqual(text, json.dumps(json.loads(text), indent=1) + "\n")
        empty = self.safetensors("none.safetensors", {})
        self.assertEqual(tessera("ls", empty, "--json").stdout, "[]\n")
        many = self.torch_file({f"k{i}": "x" * 5000 for i in range(20_000)})
        done, peak = self.peak("ls", many, "--json")
        if not SANITIZED:
            self.assertLess(peak, 64 + 3 * many.stat().st_size // 2**20)

    # Scan ------------------------------------------------------------------------------------------

    def test_scan_reads_items_of_every_form(self):
        for name, pickles in (("c_zstd", 4), ("c2_st", 1), ("c2_st_obj", 2), ("c2_multi", 9), ("c2_nocoll", 7)):
            done = tessera("scan", GOLDEN / "variants" / name, "--json")
            report = json.loads(done.stdout)
            self.assertEqual((done.returncode, report["problems"]), (0, []), name)
            self.assertGreaterEqual(report["pickles"], pickles, name)

    def test_scan_reads_the_pickles_in_the_tree_entry(self):
        evil = self.archive(b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.").hex()
        for value in ({"torch": evil}, {"tuple": [1, {"dict": [["a", {"torch": evil}]]}]}, [{"other": {"torch": evil}}]):
            done = tessera("scan", self.tree(value))
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("dangerous  os.system  in 1 pickle, first tree.safetensors:tessera.tree", done.stdout)
        self.assertEqual(tessera("scan", self.tree({"torch": self.archive(pickle.dumps({1}, 2)).hex()})).returncode, 0)
        self.assertEqual(tessera("scan", self.tree({"torch": "00"})).returncode, 3)

    def test_scan_takes_the_getattr_of_enums_for_what_it_is(self):
        for name in ("torch-3.11.2-p4", "torch-3.11.2-p2", "torch-3.11.2-old-p4", "hand-dotted-p4"):
            directory = self.work / name
            directory.mkdir()
            shutil.copy(GOLDEN / "dcp_forms" / f"{name}.metadata", directory / ".metadata")
            names = {row["name"]: row["kind"] for row in answer("scan", directory)["names"]}
            self.assertNotIn("dangerous", names.values(), name)
            self.assertIn("vetted", [kind for found, kind in names.items() if found.endswith("TORCH_CHANNELS_LAST")])
        for legacy in ("fsdp1_uop1_ws4_legacy", "fsdp1_uop0_ws2_legacy"):
            self.assertIn(" 0 dangerous, 0 unknown\n", tessera("scan", GOLDEN / "checkpoints" / legacy).stdout)
        self.assertIn(" 0 dangerous, 0 unknown\n", tessera("scan", GOLDEN / "sharded_forms/rank0.pt").stdout)
        hostile = self.work / "hostile.pkl"
        for owner, name in (("torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING", "__class__"),
                            ("torch.distributed.checkpoint.metadata\nMetadata", "TORCH_CHANNELS_LAST"),
                            ("torch.distributed._shard.sharded_tensor.api\nShardedTensor", "__init__"), ("a\nB", "C")):
            hostile.write_bytes(f"\x80\x02c__builtin__\ngetattr\nc{owner}\nV{name}\n".encode("latin1") + b"\x86R.")
            done = tessera("scan", hostile)
            self.assertEqual((done.returncode, done.stdout.split()[:2]), (1, ["dangerous", "builtins.getattr"]), done.stdout)

    # Seal, convert, help -----------------------------------------------------------------------------

    def test_seal_takes_a_save_without_collectives(self):
        directory = self.work / "nocoll"
        shutil.copytree(GOLDEN / "variants/c2_nocoll", directory)
        done = tessera("seal", directory)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("tessera-digests.json", done.stdout)
        self.assertTrue(answer("seal", directory)["was_sealed"])
        self.assertEqual(answer("verify", directory)["bytes_without_checksum"], 0)
        for name in ("__0.metadata", "__1_0.distcp"):
            path = directory / name
            before = path.read_bytes()
            path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
            self.assertNotEqual(tessera("verify", directory).returncode, 0, name)
            path.write_bytes(before)
        self.assertEqual(tessera("verify", directory).returncode, 0)

    def test_convert_names_the_file_that_it_writes(self):
        source = self.safetensors("a.safetensors", {"w": ("U8", [1], b"x")})
        for kind, extension in (("torch", ".pt"), ("safetensors", ".safetensors")):
            for target, written in ((self.work / kind, self.work / kind), (f"{self.work}/out/", self.work / "out" / f"model{extension}")):
                done = tessera("convert", source, target, "--to", kind)
                self.assertTrue(done.stdout.startswith(f"{written}: 1 tensor,"), done.stdout)
                self.assertTrue(written.is_file())
        self.assertEqual(answer("convert", source, self.work / "b.pt")["target"], str(self.work / "b.pt"))
        self.assertEqual(answer("convert", source, self.work / "d", "--to", "dcp")["target"], str(self.work / "d"))

    def test_help_reads_like_prose(self):
        text = " ".join(tessera("convert", "--help").stdout.split())
        self.assertIn("--dtype bf16|fp16|fp32", text)
        self.assertIn("--to dcp|torch|safetensors|olmo-full|olmo-torch-new|olmo-legacy|olmo-local", text)
        self.assertIn("float8 and smaller stay as they are", text)
        commands = [line.split()[0] for line in tessera("--help").stdout.split("Subcommands:")[-1].splitlines() if line.strip()]
        for command in ("ls", "cat", "convert", "unshard", "reshard", "completion"):
            self.assertIn(command, commands)
            self.assertNotIn("->", tessera(command, "--help").stdout.split("Examples:")[0].replace("=>", ""))

    def test_help_of_a_command_by_either_name(self):
        self.assertEqual(tessera("help").stdout, tessera("--help").stdout)
        listed = tessera("--help").stdout.split("Subcommands:\n")[1].split("\n\n")[0]
        commands = [line.split()[0] for line in listed.splitlines()]
        self.assertTrue({"convert", "ls", "completion", "help"} <= set(commands), commands)
        for command in commands:
            shown = tessera("help", command)
            self.assertEqual((shown.returncode, shown.stdout), (0, tessera(command, "--help").stdout), command)
        self.assertIn("unknown command 'convrt', did you mean convert?",
                      self.refused("invalid_argument", "help", "convrt", exit_code=2))
        self.assertEqual(tessera("help", "ls", "x").returncode, 2)

    def test_completion_for_zsh_and_fish(self):
        zsh, fish = tessera("completion", "zsh").stdout, tessera("completion", "fish").stdout
        self.assertTrue(zsh.startswith("#compdef tessera\n"))
        for command in ("ls", "convert", "completion"):
            self.assertIn(f"    '{command}:", zsh)
            self.assertIn(f"complete -c tessera -n __fish_use_subcommand -f -a {command} -d '", fish)
        self.assertIn("complete -c tessera -n '__fish_seen_subcommand_from convert' -l overwrite\n", fish)
        self.assertRegex(zsh, r"\n    convert\) offered=\(.*--overwrite.*\) ;;")
        if shutil.which("zsh"):
            stand_ins = ("compdef() { :; }; _describe() { print $commands; }; compadd() { shift; print -- $@; }; "
                         "_files() { print files; }\n")
            offered = lambda words, at: subprocess.run(
                ["zsh", "-c", f"{stand_ins}{zsh}\nwords=(tessera {words}); CURRENT={at}; _tessera"],
                capture_output=True, text=True, check=True).stdout
            self.assertIn("ls:", offered("''", 2))
            self.assertIn("--overwrite", offered("convert --o", 3))
            self.assertEqual(offered("convert a", 3), "files\n")
        if shutil.which("fish"):
            script = fish + "\ncomplete -C 'tessera convert --over'"
            done = subprocess.run(["fish", "-c", script], capture_output=True, text=True, check=True)
            self.assertIn("--overwrite", done.stdout)
        self.assertEqual(tessera("completion").stdout, tessera("completion", "bash").stdout)
        self.assertEqual(tessera("completion", "csh").returncode, 2)


class Plain:
    """An object for pickle protocol 1."""


if __name__ == "__main__":
    TESSERA, GOLDEN = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    unittest.main(argv=sys.argv[:1])
