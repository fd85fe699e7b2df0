#!/usr/bin/env python3
"""What `tessera scan` promises: nothing that runs code in Python ends with exit code 0, and no honest checkpoint ends
with another one.

    scan_test.py TESSERA GOLDEN_DIRECTORY
"""
import json
import pathlib
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

import honest
import shapes

TESSERA = GOLDEN = None
NAMES = [line.split(" ") for line in (pathlib.Path(__file__).parent / "names.txt").read_text().splitlines()
         if not line.startswith("#")]


def scan(path, *arguments):
    done = subprocess.run([TESSERA, "scan", str(path), "--json", *arguments], capture_output=True, text=True, check=False)
    if done.returncode < 0:
        raise AssertionError(f"scan died of signal {-done.returncode}")
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def named(report, *kinds):
    return {name["name"] for name in report["names"] if name["kind"] in kinds}


class Hostile(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.work = pathlib.Path(place.name)

    def test_names_that_got_past_scanners(self):
        self.assertGreaterEqual(len(NAMES), 146)
        for number, (module, name) in enumerate(NAMES):
            with self.subTest(module=module, name=name):
                file = self.work / f"{number}.pkl"
                file.write_bytes(b"\x80\x02" + shapes.call(module, name, "x") + b".")
                code, report, _ = scan(file)
                self.assertEqual(code, 1)
                self.assertTrue(named(report, "unknown", "dangerous"))

    def test_shapes_that_hid_a_call(self):
        for title, shape in shapes.hidden_in("posix", "mkdir", str(self.work / "ran")):
            with self.subTest(title):
                file = self.work / shape.name
                file.write_bytes(shape.data)
                if shape.loads == "pickle":
                    self.falls_for(shape.data)
                # The file alone, and as one of a directory.
                for place in (file, self.work):
                    code, report, _ = scan(place)
                    self.assertIn(code, (1, 3))
                    self.assertFalse(report["clean"])
                    self.assertTrue(report["problems"] or named(report, "unknown", "dangerous"))
                file.unlink()

    def falls_for(self, data):
        """Python runs it."""
        ran = self.work / "ran"
        code = "import pickle, sys\ntry: pickle.loads(sys.stdin.buffer.read())\nexcept Exception: pass"
        subprocess.run([sys.executable, "-c", code], input=data, check=False, capture_output=True)
        self.assertTrue(ran.is_dir(), "Python does not run it: the case proves nothing")
        ran.rmdir()

    def test_a_line_that_crosses_its_frame_may_be_a_number_to_python(self):
        """From a stream, as torch gives it one, it reads the end of the line alone."""
        ran, file = self.work / "ran", self.work / "model.pkl"
        file.write_bytes(b"\x80\x04\x95" + struct.pack("<Q", 4) + b"L](]5\n0" + shapes.call("posix", "mkdir", str(ran)) + b".")
        code = "import io, pickle, sys\ntry: pickle.load(io.BytesIO(open(sys.argv[1], 'rb').read()))\nexcept Exception: pass"
        subprocess.run([sys.executable, "-c", code, file], check=False)
        self.assertTrue(ran.is_dir(), "Python does not run it: the case proves nothing")
        code, report, _ = scan(file)
        self.assertEqual(code, 1)
        self.assertIn("posix.mkdir", named(report, "dangerous"))

    def test_what_python_runs_is_named(self):
        for title, shape in shapes.hidden_in("posix", "mkdir", "x"):
            if shape.loads != "pickle" or title.startswith("a limit"):
                continue
            with self.subTest(title):
                file = self.work / shape.name
                file.write_bytes(shape.data)
                self.assertIn("posix.mkdir", named(scan(file)[1], "dangerous"))
                file.unlink()

    def test_items_of_a_checkpoint_are_read_as_their_readers_do(self):
        place = self.work / "ckpt"
        shutil.copytree(GOLDEN / "checkpoints" / "c1", place)
        self.assertEqual(scan(place)[0], 0)
        files = sorted(place.glob("*.distcp"))
        whole = files[0].read_bytes()
        at = whole.find(b"PK\x03\x04")
        evil = b"\x80\x02" + b"X\x09\0\0\0" + b"a{aaaaaaa0" + shapes.call("posix", "system", "id") + b"."
        files[0].write_bytes(whole[:at] + evil + whole[at + len(evil):])
        code, report, _ = scan(place)
        self.assertEqual(code, 1)
        self.assertIn("posix.system", named(report, "dangerous"))

    def test_checkpoints_in_a_checkpoint_are_read(self):
        evil = b"\x80\x02" + shapes.call("posix", "system", "id") + b"."
        for rank_file in (False, True):  # torch falls back to the ranks' own metadata where .metadata is none
            place = self.work / f"run{rank_file}"
            shutil.copytree(GOLDEN / "checkpoints" / "c1", place / "step")
            if rank_file:
                shutil.copy(place / "step" / ".metadata", place / "step" / "__0.metadata")
            self.assertEqual(scan(place)[0], 0)
            file = sorted((place / "step").glob("*.distcp"))[0]
            file.write_bytes(evil + file.read_bytes()[len(evil):])
            self.assertIn("posix.system", named(scan(place)[1], "dangerous"))

    def test_links_to_directories_are_told(self):
        (self.work / "real").mkdir()
        (self.work / "run").mkdir()
        (self.work / "run" / "link").symlink_to(self.work / "real")
        self.assertEqual(scan(self.work / "run")[0], 3)
        (self.work / "real" / "a.pt").write_bytes(shapes.torch_file(pickle.dumps({}, 2)))
        (self.work / "b.pt").symlink_to(self.work / "real" / "a.pt")
        self.assertEqual(scan(self.work / "b.pt")[0], 0)

    def test_large_pickles_are_read_to_their_end(self):
        """One behind another, whole and cut, below and above what is read at once."""
        file = self.work / "large.pkl"
        evil = shapes.call("posix", "system", "id") + b"."
        for size in (3, 15 << 10, 300 << 10, 5 << 20):
            large = b"\x80\x02" + b"K\x010" * (size // 3)
            for before in (b"", large + b"N."):
                file.write_bytes(before + large + evil)
                code, report, _ = scan(file)
                self.assertEqual((code, report["pickles"]), (1, 2 if before else 1))
                self.assertEqual(report["problems"], [])
                self.assertIn("posix.system", named(report, "dangerous"))
                file.write_bytes(before + large + b"N")
                self.assertEqual(scan(file)[0], 3)
        file.write_bytes(b"\x80\x02" + b"K\x010" * (5 << 20) + b"\xff" + b"K\x010" * (5 << 20))  # no opcode
        self.assertEqual(scan(file)[0], 3)

    def test_bombs_are_scanned_once(self):
        level = b"\x80\x02N."
        for _ in range(7):
            call = b"h\0h\1\x85R0"
            level = b"\x80\x03ctorch.storage\n_load_from_bytes\nq\x000B" + len(level).to_bytes(4, "little") + level + b"q\x010" + (
                call * 8) + b"N."
        file = self.work / "bomb.pkl"
        file.write_bytes(level)
        self.assertIn(scan(file)[0], (1, 3))

    def test_text_is_no_pickle(self):
        for text in ('{"meta":{"a": 1}}', "cat\ndog\nmouse\n", "In the beginning\nwas a word", "I am here\nand there\n", "# a\nb: c\n"):
            (self.work / "run").mkdir(exist_ok=True)
            (self.work / "run" / "notes").write_text(text)
            (self.work / "run" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # else there is no checkpoint
            self.assertEqual(scan(self.work / "run")[0], 0, text)

    def test_extensions_are_names(self):
        for opcodes in (b"\x82\x05", b"\x83\x05\0", b"\x84\x05\0\0\0"):
            file = self.work / "e.pkl"
            file.write_bytes(b"\x80\x02" + opcodes + b")R.")
            code, report, _ = scan(file)
            self.assertEqual((code, named(report, "unknown")), (1, {"copyreg.extension 5"}))


class Allowed(unittest.TestCase):
    def test_allow_takes_names_and_globs(self):
        with tempfile.TemporaryDirectory() as place:
            file = pathlib.Path(place) / "a.pkl"
            file.write_bytes(b"\x80\x02cmine.configs\nConfig\n)\x81}" + shapes.text("a") + b"Nsb.")
            self.assertEqual(scan(file)[0], 1)
            for allow in ("mine.configs.Config", "mine.*"):
                code, report, _ = scan(file, "--allow", allow)
                self.assertEqual((code, named(report, "allowed")), (0, {"mine.configs.Config"}))
            self.assertEqual(scan(file, "--allow", "mine.other")[0], 1)
            said = subprocess.run([TESSERA, "scan", str(file), "--allow", "mine.*"], capture_output=True, text=True,
                                  check=True).stdout
            self.assertIn("1 allowed by --allow", said)

    def test_sarif_has_a_result_for_each(self):
        with tempfile.TemporaryDirectory() as place:
            file = pathlib.Path(place) / "a.pkl"
            file.write_bytes(b"\x80\x02" + shapes.call("os", "system", "id") + shapes.call("mine", "f", "x") + b"0\xff.")
            done = subprocess.run([TESSERA, "scan", str(file), "--sarif"], capture_output=True, text=True, check=False)
            (run,) = json.loads(done.stdout)["runs"]
            self.assertEqual([(row["ruleId"], row["level"]) for row in run["results"]],
                             [("dangerous", "error"), ("unknown", "warning"), ("problem", "warning"), ("problem", "warning")])
            self.assertEqual(run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"], "a.pkl")

    def test_what_is_dangerous_cannot_be_allowed(self):
        with tempfile.TemporaryDirectory() as place:
            file = pathlib.Path(place) / "a.pkl"
            file.write_bytes(b"\x80\x02" + shapes.call("os", "system", "id") + b".")
            self.assertEqual(scan(file, "--allow", "os.system", "--allow", "*")[0], 1)


class Honest(unittest.TestCase):
    # Cases that are there to be refused, or hold what nobody has looked at.
    NOT_CLEAN = {"script.pt", "deflated.pt", "objects", "special.pt"}

    def test_goldens(self):
        seen = 0
        for root in ("checkpoints", "dcp_forms", "sharded_forms", "kinds.pt", "legacy.pt", "torch_variants"):
            place = GOLDEN / root
            for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
                if not file.is_file() or file.name.split(".")[0] + "." in {n.split(".")[0] + "." for n in self.NOT_CLEAN}:
                    continue
                if not file.name.endswith((".pt", ".pth", ".ckpt", ".metadata")):
                    continue
                with self.subTest(str(file.relative_to(GOLDEN))):
                    code, report, said = scan(file)
                    self.assertEqual(named(report, "unknown", "dangerous"), set())
                    seen += 1
        self.assertGreater(seen, 100)

    def test_what_is_built_of_data_is_clean(self):
        with tempfile.TemporaryDirectory() as place:
            for number, (title, value) in enumerate(honest.plain_values()):
                for protocol in range(6):
                    with self.subTest(title, protocol=protocol):
                        file = pathlib.Path(place) / f"{number}.{protocol}.pkl"
                        file.write_bytes(pickle.dumps(value, protocol))
                        code, report, said = scan(file)
                        self.assertEqual((code, named(report, "unknown", "dangerous")), (0, set()), said)


if __name__ == "__main__":
    TESSERA, GOLDEN = sys.argv[1], pathlib.Path(sys.argv[2])
    del sys.argv[1:3]
    unittest.main()
