#!/usr/bin/env python3
"""The tessera command as a person meets it: output, exit codes, and one clear line for bad input.

    cli_test.py TESSERA GOLDEN_DIRECTORY
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

TESSERA = GOLDEN = None


def tessera(*arguments, **extra):
    return subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True, check=False, **extra)


class CommandLine(unittest.TestCase):
    def setUp(self):
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="tessera-cli-"))
        self.dcp = self.work / "dcp"
        shutil.copytree(GOLDEN / "checkpoints/g4_ws2", self.dcp)

    def tearDown(self):
        shutil.rmtree(self.work)

    def refused(self, code, *arguments, exit_code=3):
        """The command fails with one line that begins with the error code."""
        done = tessera(*arguments)
        self.assertEqual(done.returncode, exit_code, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertTrue(done.stderr.startswith(f"tessera: {code}: "), done.stderr)

    def test_ls_prints_a_line_a_leaf(self):
        lines = tessera("ls", self.dcp).stdout.splitlines()
        self.assertEqual(len(lines), 1 + 28)
        self.assertEqual(lines[1].split(), ["app.model.net1.weight", "float32", "[16,", "16]", "1024", "2", "2"])
        rows = json.loads(tessera("ls", self.dcp, "--json", "--only", "app.model.*").stdout)
        self.assertEqual([row["shape"] for row in rows], [[16, 16], [16], [8, 16], [8]])

    def test_stat_says_what_it_is(self):
        facts = json.loads(tessera("stat", self.dcp, "--json").stdout)
        self.assertEqual((facts["kind"], facts["world_size"], facts["parameters"]), ("dcp", 2, 408))
        self.assertTrue(facts["optimizer"])

    def test_files_of_one_rank_each(self):
        """L01: every command takes the ranks' files as one checkpoint, or says which one is missing."""
        for name, kind, world in (("fsdp1_uop1_ws4_legacy", "olmo-legacy", 4), ("ranks_fsdp2_ws3", "rank-files", 3),
                                  ("fsdp1_uop0_ws2_old_local", "olmo-local", 5)):
            ranks = self.work / name
            shutil.copytree(GOLDEN / "checkpoints" / name, ranks)
            facts = json.loads(tessera("stat", ranks, "--json").stdout)
            self.assertEqual((facts["kind"], facts["world_size"]), (kind, world))
            self.assertEqual(tessera("verify", ranks).returncode, 0)
            self.assertEqual(tessera("convert", ranks, self.work / f"{name}.pt").returncode, 0)
            self.assertEqual(tessera("diff", ranks, self.work / f"{name}.pt").returncode, 0)
            next(iter(sorted(ranks.rglob("*rank*1.pt")))).unlink()
            self.refused("incomplete", "ls", ranks)

    def test_convert_there_and_back(self):
        done = tessera("convert", self.dcp, self.work / "a.safetensors")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("12 values that are not tensors", done.stdout)
        self.assertEqual(tessera("convert", self.work / "a.safetensors", self.work / "b.pt").returncode, 0)
        self.assertEqual(tessera("convert", self.work / "b.pt", self.work / "c", "--to", "dcp").returncode, 0)
        for other in ("a.safetensors", "b.pt", "c"):
            done = tessera("diff", self.dcp, self.work / other)
            self.assertEqual((done.returncode, done.stdout), (0, "equal: 28 leaves, bit for bit\n"))

    def test_a_set_of_safetensors(self):
        target = self.work / "set"
        done = tessera("convert", self.dcp, target, "--to", "safetensors", "--max-shard-size", "1KB")
        self.assertEqual(done.returncode, 0, done.stderr)
        index = json.loads((target / "model.safetensors.index.json").read_text())
        self.assertEqual(set(index["weight_map"].values()), {path.name for path in target.glob("*.safetensors")})
        self.assertIn("model-00001-of-00006.safetensors", index["weight_map"].values())
        self.assertEqual(tessera("diff", self.dcp, target).stdout, "equal: 28 leaves, bit for bit\n")
        self.refused("already_exists", "convert", self.dcp, target, "--to", "safetensors", "--max-shard-size", "1KB")
        self.assertEqual(json.loads(tessera("stat", target, "--json").stdout)["warnings"], [])
        shutil.copy(target / "model-00002-of-00006.safetensors", target / "other.safetensors")
        self.assertIn("warning     1 safetensors files are not in the index", tessera("stat", target).stdout)
        (target / "model-00002-of-00006.safetensors").unlink()
        self.refused("incomplete", "ls", target)

    def test_dequantize(self):
        source = GOLDEN / "quantized"
        done = tessera("convert", source, self.work / "a.safetensors", "--dequantize", "--dtype", "bfloat16")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = json.loads(tessera("ls", self.work / "a.safetensors", "--json").stdout)
        dtypes = {row["name"]: row["dtype"] for row in rows}
        self.assertEqual((dtypes["a.weight"], dtypes["experts"], dtypes["n"]), ("bfloat16", "bfloat16", "float32"))
        self.assertNotIn("a.weight_scale_inv", dtypes)
        self.assertEqual(tessera("convert", source, self.work / "b", "--to", "dcp", "--dtype", "float16").returncode, 2)
        self.refused("limit", "convert", source, self.work / "c.pt", "--header-limit", "100")

    def test_unshard_and_reshard(self):
        done = tessera("convert", self.dcp, self.work / "step1", "--to", "olmo-legacy", "--ranks", 3)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("note: no config.yaml", done.stdout)
        (self.work / "step1/config.yaml").write_text("run_name: x\nsharded_checkpointer: torch_legacy\n")
        self.assertEqual(tessera("reshard", self.work / "step1", self.work / "step1-on-2", "--ranks", 2).returncode, 0)
        self.assertEqual(sorted(p.name for p in (self.work / "step1-on-2").iterdir()),
                         ["config.yaml", "rank0.pt", "rank1.pt"])
        done = tessera("unshard", self.work / "step1-on-2", self.work / "whole")
        self.assertEqual((done.returncode, done.stdout.count("note:")), (0, 0), done.stderr)
        self.assertEqual(sorted(p.name for p in (self.work / "whole").iterdir()),
                         ["config.yaml", "model.pt", "optim.pt"])
        for other in ("step1-on-2", "whole"):
            done = tessera("diff", self.work / "step1", self.work / other)
            self.assertEqual((done.returncode, done.stdout), (0, "equal: 28 leaves, bit for bit\n"))
        self.refused("already_exists", "unshard", self.work / "step1", self.work / "whole")
        done = tessera("convert", self.work / "step1", self.work / "whole", "--to", "olmo-local", "--ranks", 2,
                       "--overwrite", "--unit", "net1")
        self.assertIn("note: config.yaml says sharded_checkpointer: torch_legacy, this is local", done.stdout)
        self.assertEqual((self.work / "whole/metadata.yaml").read_text(), "world_size: 2\n")
        done = tessera("reshard", self.work / "whole", self.work / "on-5", "--ranks", 5, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(json.loads(done.stdout)["notes"]), 1)
        tessera("reshard", self.dcp, self.work / "dcp-on-3", "--ranks", 3)
        self.assertEqual(json.loads(tessera("stat", self.work / "dcp-on-3", "--json").stdout)["world_size"], 3)
        self.assertEqual(tessera("diff", self.dcp, self.work / "dcp-on-3").returncode, 0)
        self.refused("invalid_argument", "reshard", GOLDEN / "train.pt", self.work / "x", "--ranks", 2, exit_code=2)
        self.assertEqual(tessera("reshard", self.dcp, self.work / "x").returncode, 2)

    def test_an_existing_target_is_kept(self):
        target = self.work / "a.safetensors"
        target.write_text("mine")
        self.refused("already_exists", "convert", self.dcp, target)
        self.assertEqual(target.read_text(), "mine")
        self.assertEqual(tessera("convert", self.dcp, target, "--overwrite").returncode, 0)
        self.assertEqual(tessera("verify", target).returncode, 0)

    def test_usage_is_exit_2(self):
        self.assertEqual(tessera().returncode, 2)
        self.assertEqual(tessera("frobnicate").returncode, 2)
        self.assertEqual(tessera("convert", self.dcp).returncode, 2)
        self.refused("invalid_argument", "convert", self.dcp, self.work / "x", exit_code=2)
        self.assertEqual(tessera("--help").returncode, 0)

    def test_nothing_there(self):
        (self.work / "empty").mkdir()
        for verb in ("ls", "stat", "verify"):
            self.refused("not_found", verb, self.work / "none")
            self.refused("not_found", verb, self.work / "empty")

    def test_truncated_metadata(self):
        metadata = self.dcp / ".metadata"
        metadata.write_bytes(metadata.read_bytes()[:-100])
        self.refused("incomplete", "ls", self.dcp)
        self.refused("incomplete", "verify", self.dcp, exit_code=1)

    def test_missing_data_file(self):
        (self.dcp / "__1_0.distcp").unlink()
        self.refused("incomplete", "stat", self.dcp)
        self.refused("incomplete", "convert", self.dcp, self.work / "a.pt")
        self.assertFalse((self.work / "a.pt").exists())

    def test_every_flipped_data_byte_is_found(self):
        # net1.weight of rank 0: 512 bytes of the first tensor item.
        rows = json.loads(tessera("verify", self.dcp, "--json").stdout)
        self.assertEqual((rows["ok"], rows["bytes_checked"]), (True, 4912))
        data = self.dcp / "__0_0.distcp"
        whole = data.read_bytes()
        found = 0
        for at in range(0, len(whole), 997):
            data.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1:])
            done = tessera("verify", self.dcp, "--quiet")
            self.assertIn(done.returncode, (0, 1, 3))
            same = tessera("diff", self.dcp, GOLDEN / "checkpoints/g4_ws2", "--quiet")
            if done.returncode == 0:
                self.assertEqual(same.returncode, 0, f"byte {at} changed a value unnoticed")
            found += done.returncode != 0
        self.assertGreater(found, 10)

    def test_seal_and_then_every_read_is_checked(self):
        done = tessera("seal", self.dcp)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertTrue(done.stdout.startswith("sealed: digests of 3 files"), done.stdout)
        self.assertTrue(json.loads(tessera("seal", self.dcp, "--json").stdout)["was_sealed"])
        rows = json.loads(tessera("verify", self.dcp, "--json").stdout)
        self.assertEqual((rows["ok"], rows["bytes_without_checksum"]), (True, 0))
        data = self.dcp / "__1_0.distcp"
        data.write_bytes(data.read_bytes()[:-1] + b"\xff")  # the end of a zip, which no CRC-32 covers
        self.refused("corrupt", "verify", self.dcp, exit_code=1)
        self.refused("corrupt", "convert", self.dcp, self.work / "a.pt")
        self.refused("corrupt", "seal", self.dcp)

    def test_control_characters_stay_out_of_the_terminal(self):
        source = self.work / "evil.safetensors"
        header = json.dumps({"a\u001b[31m\u202eb": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        source.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
        output = tessera("ls", source).stdout
        self.assertNotIn("\x1b", output)
        self.assertNotIn("\u202e", output)


if __name__ == "__main__":
    TESSERA, GOLDEN = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    unittest.main(argv=sys.argv[:1])
