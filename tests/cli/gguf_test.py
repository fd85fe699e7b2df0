#!/usr/bin/env python3
"""Files of llama.cpp, as the tessera command takes them.

    gguf_test.py TESSERA GOLDEN_DIRECTORY
"""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

TESSERA = GOLDEN = None


def tessera(*arguments):
    return subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True, check=False)


class Gguf(unittest.TestCase):
    def setUp(self):
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="tessera-gguf-"))

    def tearDown(self):
        shutil.rmtree(self.work)

    def refused(self, code, *arguments):
        done = tessera(*arguments)
        self.assertEqual(done.returncode, 3, (done.stdout, done.stderr))
        self.assertIn(f"{code}: ", done.stderr)

    def test_files_of_llama_cpp(self):
        source = GOLDEN / "gguf/every.gguf"
        rows = {row["name"]: row for row in json.loads(tessera("ls", source, "--json").stdout)}
        self.assertEqual((rows["blk.0.weight"]["dtype"], rows["blk.0.weight"]["shape"]), ("uint8", [2, 3, 102]))
        self.assertEqual((rows["plain.float16"]["dtype"], rows["plain.float16"]["shape"]), ("float16", [3, 5]))
        listed = tessera("ls", source).stdout
        for line in ("gguf.general.architecture *a string *'llama'", "gguf_types.k.weight *a string *'Q4_K'",
                     "gguf.test.int64 *an integer *-9223372036854775808"):
            self.assertRegex(listed, line)
        facts = json.loads(tessera("stat", source, "--json").stdout)
        self.assertEqual((facts["kind"], facts["tensors"], facts["complete"]), ("gguf", 15, True))
        self.assertEqual(tessera("verify", source).returncode, 0)
        for target, *how in (("a.safetensors",), ("a.pt",), ("dcp", "--to", "dcp")):
            done = tessera("convert", source, self.work / target, *how)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(tessera("diff", source, self.work / target).returncode, 0, target)
            self.assertEqual(tessera("verify", self.work / target).returncode, 0, target)
        self.refused("unsupported", "convert", source, self.work / "b.safetensors", "--dequantize")
        self.refused("unsupported", "convert", source, self.work / "b.gguf")
        done = tessera("convert", GOLDEN / "gguf/aligned.gguf", self.work / "c.safetensors", "--dequantize", "--dtype", "bf16")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_scan_of_gguf(self):
        source = GOLDEN / "gguf/every.gguf"
        self.assertEqual(tessera("scan", source).returncode, 0)
        self.assertEqual(tessera("scan", source.parent).returncode, 0)
        (self.work / "cut.gguf").write_bytes(source.read_bytes()[:500])
        self.refused("incomplete", "scan", self.work / "cut.gguf")
        # BINFLOAT and eight bytes, and then what Python's unpickler would run.
        (self.work / "both.gguf").write_bytes(b"GGUF\3\0\0\0\0" + b"0cos\nsystem\n(S'true'\ntR.")
        found = tessera("scan", self.work / "both.gguf")
        self.assertEqual(found.returncode, 1, found.stderr)
        self.assertIn("os.system", found.stdout)


if __name__ == "__main__":
    TESSERA, GOLDEN = sys.argv[1], pathlib.Path(sys.argv[2])
    unittest.main(argv=sys.argv[:1])
