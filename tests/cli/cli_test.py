#!/usr/bin/env python3
"""The tessera command as a person meets it: output, exit codes, and one clear line for bad input.

    cli_test.py TESSERA GOLDEN_DIRECTORY
"""
import ast
import collections
import fcntl
import itertools
import json
import math
import os
import pathlib
import pickle
import random
import resource
import shutil
import struct
import subprocess
import sys
import unittest
import unittest.mock
import zipfile

from made import Case, tessera, write_safetensors

TESSERA = GOLDEN = None
SANITIZED = bool(os.environ.get("TESSERA_SANITIZE"))


def write_strided(path, shape, strides, elements):
    """A torch.save file of one float32 tensor with these strides, whose storage counts from 0 to 3999, again and again."""
    import array
    import io
    import types
    import zipfile

    def rebuild(*_):
        pass

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    floats = type("FloatStorage", (), {"__module__": "torch"})
    modules = {"torch": types.ModuleType("torch"), "torch._utils": types.ModuleType("torch._utils")}
    modules["torch"].FloatStorage, modules["torch._utils"]._rebuild_tensor_v2 = floats, rebuild

    class Bare:
        pass

    class Rebuilt:
        def __reduce__(self):
            return rebuild, (Bare(), 0, shape, strides, False, collections.OrderedDict())

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", floats, "0", "cpu", elements) if isinstance(value, Bare) else None

    stream = io.BytesIO()
    with unittest.mock.patch.dict(sys.modules, modules):
        Pickler(stream, protocol=2).dump({"w": Rebuilt()})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", stream.getvalue())
        archive.writestr("a/byteorder", "little")
        archive.writestr("a/data/0", (array.array("f", range(4000)) * (elements // 4000 + 1))[:elements].tobytes())
        archive.writestr("a/version", "3\n")


class CommandLine(Case):
    def test_ls_prints_a_line_a_leaf(self):
        lines = tessera("ls", self.dcp).stdout.splitlines()
        self.assertEqual(len(lines), 1 + 28)
        self.assertEqual(lines[1].split(), ["app.model.net1.weight", "float32", "[16,", "16]", "1024", "2", "2"])
        rows = json.loads(tessera("ls", self.dcp, "--json", "--only", "app.model.*").stdout)
        self.assertEqual([row["shape"] for row in rows], [[16, 16], [16], [8, 16], [8]])

    def test_stat_says_what_it_is(self):
        facts = json.loads(tessera("stat", self.dcp, "--json").stdout)
        self.assertEqual((facts["kind"], facts["world_size"], facts["writers"], facts["parameters"]), ("dcp", None, 2, 408))
        self.assertTrue(facts["optimizer"])

    def test_files_of_one_rank_each(self):
        """L01: every command takes the ranks' files as one checkpoint, or says which one is missing."""
        for name, kind, world in (("fsdp1_uop1_ws4_legacy", "olmo-legacy", 4), ("ranks_fsdp2_ws3", "rank-files", 3),
                                  ("fsdp1_uop0_ws2_old_local", "olmo-local", 5)):
            ranks = self.work / name
            shutil.copytree(GOLDEN / "checkpoints" / name, ranks)
            facts = json.loads(tessera("stat", ranks, "--json").stdout)
            self.assertEqual((facts["kind"], facts["world_size"], facts["writers"]), (kind, world, world))
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
        self.assertEqual(json.loads(tessera("stat", target, "--json").stdout)["warnings"], ["other.safetensors: not part of it, not in the index and passed over"])
        for verb in (["ls"], ["stat"], ["verify"], ["map"], ["verify", "--json"], ["diff", target],
                     ["convert", self.work / "again.pt"]):
            done = tessera(verb[0], target, *verb[1:])
            self.assertEqual(done.stderr.count("tessera: warning: "), 1, (verb, done.stderr))
            self.assertIn("other.safetensors: not part of it, not in the index and passed over\n", done.stderr, verb)
        (target / "other.safetensors").unlink()
        missing = "model-00002-of-00006.safetensors"
        lost = sorted(name for name, file in index["weight_map"].items() if file == missing)
        (target / missing).unlink()
        listed = tessera("ls", target)
        self.assertEqual(sorted(line.split()[0] for line in listed.stdout.splitlines() if line.endswith("missing: " + missing)), lost)
        self.assertIn("a file is missing: " + missing, listed.stderr)
        rows = json.loads(tessera("ls", target, "--json").stdout)
        self.assertEqual(sorted(row["name"] for row in rows if row["missing"] == [missing]), lost)
        stat = json.loads(tessera("stat", target, "--json").stdout)
        self.assertEqual((stat["complete"], [row["file"] for row in stat["directory"] if row["state"] == "missing"]), (False, [missing]))
        self.assertEqual(stat["tensors"] + stat["values"], len(rows) - len(lost))
        for verb in (["cat", target, lost[0]], ["convert", target, self.work / "part.pt"], ["diff", target, self.dcp]):
            failed = tessera(*verb)
            self.assertEqual(failed.returncode, 3, (verb, failed.stderr))
            for text in ("tessera: incomplete: ", missing, "--partial"):
                self.assertIn(text, failed.stderr.splitlines()[-1], verb)
        self.assertEqual(tessera("verify", target).returncode, 1)
        self.assertEqual(tessera("verify", target, "--partial").returncode, 0)
        done = tessera("convert", target, self.work / "part.pt", "--partial")
        self.assertEqual(done.returncode, 0, done.stderr)
        failed = tessera("copy", target, self.work / "copied")
        self.assertIn("; --allow-incomplete copies what is there", failed.stderr)
        self.assertNotIn("--partial", failed.stderr)
        self.assertEqual(tessera("copy", target, self.work / "copied", "--allow-incomplete").returncode, 0)
        (target / "model.safetensors.index.json").unlink()
        self.assertIn("complete    no: files are missing", tessera("stat", target, "--partial").stdout)

    # An error offers only what the command has.
    def test_dequantize(self):
        source = GOLDEN / "quantized"
        done = tessera("convert", source, self.work / "a.safetensors", "--dequantize", "--dtype", "bf16")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = json.loads(tessera("ls", self.work / "a.safetensors", "--json").stdout)
        dtypes = {row["name"]: row["dtype"] for row in rows}
        self.assertEqual((dtypes["a.weight"], dtypes["experts"], dtypes["n"]), ("bfloat16", "bfloat16", "bfloat16"))
        self.assertNotIn("a.weight_scale_inv", dtypes)
        self.refused("limit", "convert", source, self.work / "c.pt", "--header-limit", "100")

    def test_unshard_and_reshard(self):
        done = tessera("convert", self.dcp, self.work / "step1", "--to", "olmo-legacy", "--ranks", 3)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("note: no config.yaml", done.stdout)
        (self.work / "step1/config.yaml").write_text("run_name: x\nsharded_checkpointer: torch_legacy\n")
        self.assertEqual(tessera("reshard", self.work / "step1", self.work / "step1-on-2", "--ranks", 2).returncode, 0)
        self.assertEqual(sorted(p.name for p in (self.work / "step1-on-2").iterdir()),
                         ["config.yaml", "rank0.pt", "rank1.pt", "tessera-digests.json"])
        done = tessera("unshard", self.work / "step1-on-2", self.work / "whole")
        self.assertEqual((done.returncode, done.stdout.count("note:")), (0, 0), done.stderr)
        self.assertEqual(sorted(p.name for p in (self.work / "whole").iterdir()),
                         ["config.yaml", "model.pt", "optim.pt", "tessera-digests.json"])
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
        self.assertEqual(json.loads(tessera("stat", self.work / "dcp-on-3", "--json").stdout)["writers"], 3)
        self.assertEqual(tessera("diff", self.dcp, self.work / "dcp-on-3").returncode, 0)
        self.refused("invalid_argument", "reshard", GOLDEN / "train.pt", self.work / "x", "--ranks", 2, exit_code=2)
        self.assertEqual(tessera("reshard", self.dcp, self.work / "x").returncode, 2)

    def test_convert_selects_renames_and_changes_types(self):
        target = self.work / "a.safetensors"
        done = tessera("convert", self.dcp, target, "--only", "model", "--rename", r"^app\.model\.=>", "--rename", r"net(\d)=>block.$1",
                       "--dtype", "bf16", "--threads", "1", "--memory", "1MiB", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        report = json.loads(done.stdout)
        self.assertEqual((report["tensors"], report["bytes_needed"], report["bytes_unchecked"]), (4, 408 * 4, 0))
        rows = json.loads(tessera("ls", target, "--json").stdout)
        self.assertEqual(sorted((row["name"], row["dtype"]) for row in rows),
                         [(f"block.{n}.{p}", "bfloat16") for n in (1, 2) for p in ("bias", "weight")])
        optim = self.work / "optim.pt"
        self.assertEqual(tessera("convert", self.dcp, optim, "--only", "optim").returncode, 0)
        self.assertEqual(len(json.loads(tessera("ls", optim, "--json").stdout)), 24)
        self.refused("conflict", "convert", self.dcp, self.work / "b.pt", "--rename", ".*weight=>w")
        self.refused("invalid_argument", "convert", self.dcp, self.work / "b.pt", "--rename", "(=>w", exit_code=2)
        self.refused("not_found", "convert", self.dcp, self.work / "b.pt", "--only", "none")
        self.assertFalse((self.work / "b.pt").exists())

    def test_filters_look_at_a_part(self):
        self.assertEqual(len(tessera("ls", self.dcp, "--only", "model", "--only", "*.step").stdout.splitlines()), 1 + 4 + 4)
        self.assertEqual(tessera("diff", self.dcp, self.dcp, "--only", "model").stdout, "equal: 4 leaves, bit for bit\n")
        self.refused("not_found", "ls", self.dcp, "--only", "none")
        self.refused("not_found", "ls", self.dcp, "--only", "model", "--only", "none")  # was passed over
        rows = json.loads(tessera("verify", self.dcp, "--only", "model", "--json").stdout)
        self.assertEqual((rows["ok"], rows["tensors"], rows["bytes_checked"]), (True, 4, 408 * 4))
        # What one of two lacks is a difference.
        model = self.work / "only-model.pt"
        self.assertEqual(tessera("convert", self.dcp, model, "--only", "model").returncode, 0)
        for pair, kind in (((self.dcp, model), "missing"), ((model, self.dcp), "extra")):
            for more in ([], ["--only", "model"]):
                differ = tessera("diff", *pair, "--only", "optim", *more, "--json")
                self.assertEqual(differ.returncode, 1, differ.stderr)
                self.assertEqual([row["kind"] for row in json.loads(differ.stdout)], [kind] * 24)
        self.refused("not_found", "diff", self.dcp, model, "--only", "model", "--only", "none")

    @unittest.skipIf(SANITIZED, "sanitizers take memory of their own")
    def test_convert_stays_below_its_memory(self):
        # 400 MB of zeros, of which the disk has none; the promise is 64 MB and --memory.
        source = self.work / "large.safetensors"
        header = json.dumps({f"w{i}": {"dtype": "F32", "shape": [10**7], "data_offsets": [i * 4 * 10**7, (i + 1) * 4 * 10**7]}
                             for i in range(10)}).encode()
        source.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(source, 8 + len(header) + 4 * 10**8)
        for target in ("out.pt", "out.safetensors"):
            peak = subprocess.run([sys.executable, "-c", "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
                                   "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)", TESSERA, "convert", source,
                                   self.work / target, "--dtype", "bf16", "--memory", "8MiB", "--threads", "4", "--quiet"],
                                  capture_output=True, text=True, check=True).stdout
            self.assertLess(int(peak), 64 + 8)

    @unittest.skipIf(SANITIZED, "sanitizers take memory of their own")
    def test_tensors_at_strides_stay_below_the_memory_too(self):
        rows, columns = 4000, 6000
        layouts = {"transposed": ((columns, rows), (1, columns), rows * columns),
                   "permuted": ((60, rows, 100), (1, 6000, 60), rows * columns),
                   "expanded": ((rows * 4, columns), (0, 1), columns)}
        for name, (shape, strides, elements) in layouts.items():
            source, target = self.work / f"{name}.pt", self.work / f"{name}.safetensors"
            write_strided(source, shape, strides, elements)
            peak = subprocess.run([sys.executable, "-c", "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
                                   "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)", TESSERA, "convert", source,
                                   target, "--memory", "8MiB", "--threads", "4", "--quiet"],
                                  capture_output=True, text=True, check=True).stdout
            self.assertLess(int(peak), 64 + 8, name)
            for index in ([0, 0], [1, 2], [59, 3999]):
                at = index + [1] * (len(shape) - 2)
                found = tessera("cat", target, "w[" + ",".join(map(str, at)) + "]").stdout.split()
                expected = sum(i * stride for i, stride in zip(at, strides))
                self.assertEqual(float(found[-1]), expected % 4000, (name, at))

    def test_resume_goes_on_where_a_run_was_interrupted(self):
        source, target = self.work / "source.safetensors", self.work / "target"
        sizes = [10**5] * 6 + [7 * 10**5]
        ends = list(itertools.accumulate(sizes))
        header = json.dumps({f"w{i}": {"dtype": "U8", "shape": [size], "data_offsets": [end - size, end]}
                             for i, (size, end) in enumerate(zip(sizes, ends))}).encode()
        source.write_bytes(len(header).to_bytes(8, "little") + header + bytes(i * i >> 9 & 255 for i in range(ends[-1])))
        command = ["convert", source, target, "--to", "safetensors", "--max-shard-size", "300000", "--threads", "1", "--resume"]
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (6 * 10**5, 6 * 10**5))  # a longer file is an error
        self.assertEqual(tessera(*command, preexec_fn=limit).returncode, 3)
        left = self.work / ".target.resume"
        self.assertEqual((target.exists(), left.exists()), (False, True))
        with open(left / "lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.refused("conflict", *command)
        report = json.loads(tessera(*command, "--json").stdout)
        self.assertEqual((report["bytes_resumed"] // 10**5, report["bytes_needed"]), (6, 7 * 10**5))
        self.assertFalse(left.exists())
        self.assertEqual(tessera("diff", source, target).returncode, 0)
        self.refused("already_exists", *command)
        self.assertFalse(left.exists())
        done = tessera("unshard", self.dcp, self.work / "whole", "--resume")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("interrupted", done.stdout)

    def test_what_waits_to_be_resumed_in_a_dcp_directory_is_no_checkpoint(self):
        source, target = self.work / "source.safetensors", self.work / "target"
        self.assertEqual(tessera("convert", self.dcp, source).returncode, 0)
        (target / ".resume").mkdir(parents=True)
        (target / ".resume/lock").touch()
        self.refused("incomplete", "ls", target)
        command = ["convert", source, target, "--to", "dcp", "--resume"]
        with open(target / ".resume/lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.refused("conflict", *command)
        self.assertEqual(tessera(*command).returncode, 0)
        self.assertFalse((target / ".resume").exists())
        self.refused("already_exists", *command)
        self.assertFalse((target / ".resume").exists())

    def test_an_existing_target_is_kept(self):
        target = self.work / "a.safetensors"
        target.write_text("mine")
        for verb in ("convert", "copy"):
            self.refused("already_exists", verb, GOLDEN / "train.pt", target)
            self.assertIn("something of this name is there already; --overwrite" if verb == "convert" else "is there already; --overwrite",
                          tessera(verb, GOLDEN / "train.pt", target).stderr)
        self.assertEqual(target.read_text(), "mine")
        self.assertEqual(tessera("convert", self.dcp, target, "--overwrite").returncode, 0)
        self.assertEqual(tessera("verify", target).returncode, 0)

    def test_usage_is_exit_2(self):
        alone = tessera()
        self.assertEqual((alone.returncode, alone.stdout, alone.stderr), (2, tessera("--help").stdout, ""))
        self.assertEqual(tessera("frobnicate").returncode, 2)
        # As all failures look.
        for words, told in ((["convert"], "source is required; tessera convert --help"), (["--json"], "; tessera --help"),
                            (["ls", "a", "b", "--depth", "1"], "unexpected: b --depth 1; tessera ls --help")):
            self.refused("invalid_argument", *words, exit_code=2) if "--json" not in words else None
            self.assertIn(told, tessera(*words).stderr)
            self.assertIn(told, json.loads(tessera(*words, "--json").stdout)["error"]["message"])
        self.assertEqual(tessera("convert", self.dcp).returncode, 2)
        self.refused("invalid_argument", "convert", self.dcp, self.work / "x", exit_code=2)
        self.assertEqual(tessera("--help").returncode, 0)

    def test_urls_of_no_store_are_no_paths(self):
        for arguments in (["ls", "hdfs://host/x"], ["verify", "hdfs://host/x"], ["scan", "hdfs://host/x.pt"],
                          ["convert", self.dcp, "hdfs://host/x", "--to", "dcp"], ["convert", self.dcp, "hdfs://host/x.pt"],
                          ["ls", "az://account/x"]):
            result = tessera(*arguments, cwd=self.work)
            self.assertEqual((result.returncode, list(self.work.glob("*:"))), (3, []), arguments)
            self.assertRegex(result.stderr, "no store is known for hdfs://|Azure has no interface of S3")

    def test_without_a_url_libcurl_is_not_loaded(self):
        result = tessera("ls", self.dcp, env={**os.environ, "LD_DEBUG": "libs"})
        self.assertEqual(result.returncode, 0)
        self.assertIn("libc.so", result.stderr)
        self.assertNotIn("libcurl", result.stderr)
        self.assertNotIn("libcrypto", result.stderr)

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

    def test_missing_data_file_of_olmo(self):
        (self.work / "olmo").mkdir()
        (self.dcp / "__1_0.distcp").unlink()
        inside = self.dcp.rename(self.work / "olmo/model_and_optim")
        self.assertIn("  missing: model_and_optim/__1_0.distcp", tessera("ls", self.work / "olmo").stdout)
        rows = json.loads(tessera("ls", "--json", self.work / "olmo").stdout)
        self.assertIn(["model_and_optim/__1_0.distcp"], [row["missing"] for row in rows])
        found = json.loads(tessera("verify", "--json", self.work / "olmo").stdout)["findings"]
        self.assertEqual([finding["path"] for finding in found], [f"{inside}/__1_0.distcp"])

    def test_missing_data_file(self):
        (self.dcp / "__1_0.distcp").unlink()
        self.assertIn("file        __1_0.distcp: missing, ", tessera("stat", self.dcp).stdout)
        partial = tessera("stat", "--partial", self.dcp)
        self.assertIn("file        __1_0.distcp: missing, ", partial.stdout)
        self.assertNotIn("not understood", partial.stdout)
        self.assertNotIn("after its last item", partial.stderr)
        done = tessera("convert", self.dcp, self.work / "a.pt")
        self.assertEqual(done.returncode, 3)
        self.assertIn("tessera: incomplete: ", done.stderr)
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

    def test_verify_compares_the_digests_that_a_save_left(self):
        whole = self.work / "whole"
        self.assertEqual(tessera("unshard", self.dcp, whole).returncode, 0)
        names = [row["name"] for row in json.loads(tessera("ls", whole, "--json").stdout) if row.get("dtype")]
        digests = {}
        for part in ("model", "optim"):
            with zipfile.ZipFile(whole / f"{part}.pt") as archive:
                data = sorted((int(info.filename.split("/")[-1]), info.CRC) for info in archive.infolist()
                              if "/data/" in info.filename)
            digests |= dict(zip((name for name in names if name.startswith(part + ".")), (crc for _, crc in data)))
        state = whole / "tessera-state.json"
        write = lambda: state.write_text(json.dumps({"version": 1, "save_id": "a", "crc32": digests}))
        write()
        done = tessera("verify", whole)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        digests["model.net1.weight"] ^= 1
        write()
        self.refused("mismatch", "verify", whole, exit_code=1)
        self.assertIn("'model.net1.weight'", tessera("verify", whole).stderr)
        del digests["model.net1.weight"]
        write()
        self.refused("incomplete", "verify", whole, exit_code=1)
        self.assertEqual(tessera("verify", whole, "--only", "model").returncode, 0)

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

    def safetensors(self, name, tensors):
        return write_safetensors(self.work / name, tensors)

    def test_cat_prints_values_and_slices(self):
        source = self.safetensors("a.safetensors", {
            "w": ("F32", [2, 3], struct.pack("<6f", 0.5, -1, 2, 1e-8, math.inf, 0.1)),
            "i[0]": ("I64", [2], struct.pack("<2q", -(2**63), 2**63 - 1)),
            "u": ("U64", [1], struct.pack("<Q", 2**64 - 1)), "s": ("BOOL", [], b"\1"),
            "h": ("BF16", [2], struct.pack("<2H", 0x3f80, 0xc000)), "e": ("F8_E4M3", [2], b"\x38\xff"),
            "none": ("F32", [0, 2], b"")})
        for name, text in {"w": "0.5 -1 2\n1e-08 inf 0.1\n", "w[1]": "1e-08 inf 0.1\n", "w[:,1:]": "-1 2\ninf 0.1\n",
                           "w[-1,-2:-1]": "inf\n", "w[5:]": "", "i[0]": f"{-2**63} {2**63 - 1}\n", "u": f"{2**64 - 1}\n",
                           "s": "True\n", "h": "1 -2\n", "e": "0x38 0xff\n", "none": "", "w[0:2,:2]": "0.5 -1\n1e-08 inf\n"}.items():
            done = tessera("cat", source, name)
            self.assertEqual((done.stdout, done.stderr, done.returncode), (text, "", 0), name)
        row = json.loads(tessera("cat", source, "w[1]", "--json").stdout)
        self.assertEqual((row["shape"], row["values"]), ([1, 3], [1e-08, "inf", 0.1]))
        self.refused("not_found", "cat", source, "x")
        for bad in ("w[2]", "w[0,0,0]", "w[a]", "w[-3]"):
            self.refused("invalid_argument", "cat", source, bad, exit_code=2)
        self.assertEqual(tessera("cat", self.dcp, "app.optim.param_groups.0.betas").stdout, "(0.9, 0.999)\n")
        self.refused("invalid_argument", "cat", self.dcp, "app.optim.param_groups.0.betas[0]", exit_code=2)

    def test_cat_writes_npy(self):
        source = self.safetensors("a.safetensors", {"h": ("BF16", [2, 2], struct.pack("<4H", 0x3f80, 0xc000, 0, 0x3f00))})
        target = self.work / "h.npy"
        self.assertEqual(tessera("cat", source, "h[1:]", "--npy", target).returncode, 0)
        content = target.read_bytes()
        self.assertEqual(content[:8], b"\x93NUMPY\1\0")
        size = int.from_bytes(content[8:10], "little")
        self.assertEqual((10 + size) % 64, 0)
        self.assertEqual(ast.literal_eval(content[10:10 + size].decode()), {"descr": "<f4", "fortran_order": False, "shape": (1, 2)})
        self.assertEqual(content[10 + size:], struct.pack("<2f", 0, 0.5))
        self.refused("already_exists", "cat", source, "h", "--npy", target)

    def test_map_draws_who_holds_what(self):
        lines = tessera("map", self.dcp, "app.model.net1.weight").stdout.splitlines()
        self.assertEqual([line.split()[0] for line in lines[1:]], ["#" * 20 + "." * 20, "." * 20 + "#" * 20])
        self.assertIn("rank 1", lines[2])
        pieces = json.loads(tessera("map", self.dcp, "app.model.net1.weight", "--json").stdout)[0]["pieces"]
        self.assertEqual([(p["rank"], p["offsets"], p["sizes"], p["file"]) for p in pieces],
                         [(0, [0, 0], [8, 16], "__0_0.distcp"), (1, [8, 0], [8, 16], "__1_0.distcp")])
        self.assertIn("12 pieces  __0_0.distcp", tessera("map", self.dcp).stdout)
        self.refused("not_found", "map", self.dcp, "none")

    def test_scan_says_what_pickles_mention(self):
        done = tessera("scan", self.dcp)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("vetted     pathlib.PosixPath  in 1 pickle, first .metadata", done.stdout)
        self.assertIn("16 names in 41 pickles, 0 dangerous, 0 unknown", done.stdout)  # .metadata, 40 items
        self.assertEqual(json.loads(tessera("scan", GOLDEN / "legacy.pt", "--json").stdout)["pickles"], 5)
        self.refused("not_found", "scan", self.work / "none")

    def test_scan_finds_what_would_run(self):
        class Evil:
            def __reduce__(self):
                return os.system, ("true",)

        evil = self.work / "evil.pkl"
        for content in (pickle.dumps(Evil(), 4), pickle.dumps({"a": [1, Evil()]}, 2), pickle.dumps(Evil(), 0),
                        pickle.dumps(Evil())[:-1] + b"\xff"):  # what Python runs before it fails
            evil.write_bytes(content)
            done = tessera("scan", evil)
            self.assertEqual(done.returncode, 1, content)
            self.assertRegex(done.stdout, r"^dangerous  (posix|os)\.system  in 1 pickle, first evil.pkl\n")
        shutil.copy(evil, self.dcp / "extra.pt")
        self.assertEqual(tessera("scan", self.dcp).returncode, 1)
        (self.work / "text.pt").write_text("no pickle")
        self.assertEqual(tessera("scan", self.work / "text.pt").returncode, 3)

    def test_copy_is_byte_for_byte_and_goes_on(self):
        """fault-rows C08"""
        tessera("seal", self.dcp)
        files = lambda directory: {path.name: path.read_bytes() for path in directory.iterdir()}
        target = self.work / "copies" / "a"
        done = tessera("copy", self.dcp, target, "--json")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(files(target), files(self.dcp))
        (target / "__1_0.distcp").unlink()
        again = tessera("copy", self.dcp, target)
        self.assertIn(f"{len(files(self.dcp)) - 1} were there already", again.stdout)
        self.assertEqual(files(target), files(self.dcp))
        draw = random.Random(8)  # whichever bit differs at the target, it is copied again
        for name, content in sorted(files(self.dcp).items()):
            for position in [len(content) - 1, *(draw.randrange(len(content)) for _ in range(4))]:
                damaged = bytearray(content)
                damaged[position] ^= 1 << draw.randrange(8)
                (target / name).write_bytes(damaged)
                self.assertEqual(tessera("copy", self.dcp, target, "--overwrite").returncode, 0)
                self.assertEqual(files(target), files(self.dcp), (name, position))
        self.copies_of_runs()
        (self.dcp / ".metadata").unlink()
        self.refused("incomplete", "copy", self.dcp, self.work / "b")
        self.assertFalse((self.work / "b").exists())
        self.refused("not_found", "copy", self.work / "none", self.work / "b")

    def copies_of_runs(self):
        """What else lies in a run is not copied, and named."""
        run = self.work / "run"
        shutil.copytree(self.dcp, run / "step1")
        shutil.copytree(self.dcp, run / "step2.old-0123456789ab")  # that of step 2, which was being replaced
        (run / "step3").mkdir()
        (run / "step3/__0_0.distcp").write_bytes(b"half")
        (run / "step4-tmp-0123456789ab").mkdir()
        (run / "logs").mkdir()
        (run / "log.txt").write_text("a line")
        (run / "latest").symlink_to("step1")
        rest = {"latest": "it is no step", "log.txt": "it is no step", "logs": "it is no step",
                "step3": "it has no marker: it is not finished", "step4-tmp-0123456789ab": "it is of a save that did not finish"}
        done = tessera("copy", run, self.work / "copied")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout.splitlines()[1:], [f"note: {name} is not copied: {reason}" for name, reason in rest.items()])
        self.assertEqual(sorted(path.name for path in (self.work / "copied").iterdir()), ["step1", "step2"])
        shutil.copytree(self.dcp, run / "step1.old-0123456789ab")  # beside the one that took its place
        rest["step1.old-0123456789ab"] = "it was set aside when step1 was replaced; rename it if it is the one that you want"
        again = json.loads(tessera("copy", run, self.work / "copied", "--json").stdout)
        self.assertEqual({row["name"]: row["reason"] for row in again["passed_over"]}, rest)
        for step in ("step5", "step6"):  # both damaged: all that stays behind is said
            (run / step).mkdir()
            (run / step / ".metadata").write_bytes(b"")
        done = tessera("copy", run, self.work / "copied again")
        self.assertEqual(done.returncode, 3)
        for name in ("step6", *rest):
            self.assertIn(f"{name} is not copied: " if name != "step5" else "step5", done.stderr)

    def test_gc_lists_and_removes_what_kills_left(self):
        """fault-rows C06"""
        left = self.dcp / "__0_7_0123456789ab.distcp"
        left.write_bytes(b"left")
        self.assertEqual(json.loads(tessera("gc", self.dcp, "--json").stdout)["leftovers"], [])
        listed = json.loads(tessera("gc", self.dcp, "--json", "--older-than", "0s").stdout)["leftovers"]
        self.assertEqual([(row["path"], row["bytes"], row["removed"]) for row in listed], [(str(left), 4, False)])
        done = tessera("gc", self.dcp, "--delete", "--older-than", "0min")
        self.assertEqual((done.returncode, done.stderr, left.exists()), (0, "", False))
        self.assertEqual(tessera("verify", self.dcp).returncode, 0)
        self.refused("unsupported", "gc", self.dcp, "--uploads")

    def test_completion_is_a_script_for_bash(self):
        script = tessera("completion").stdout
        ask = "\nCOMP_WORDS=(tessera {}); COMP_CWORD={}; _tessera; echo ${{COMPREPLY[@]}}"
        bash = lambda words, at: subprocess.run(["bash", "-c", script + ask.format(words, at)], capture_output=True, text=True,
                                                check=True).stdout.split()
        self.assertEqual(bash("s", 1), ["stat", "stats", "scan", "seal"])
        self.assertEqual(bash("convert --ov", 2), ["--overwrite"])
        self.assertEqual(bash("gc --o", 2), ["--older-than"])
        self.assertEqual(bash("copy --r", 2), ["--read-back"])

    @unittest.skipIf(SANITIZED, "sanitizers take memory of their own")
    def test_many_small_tensors(self):
        """T15: what a header costs in memory is a multiple of its size, 64 MB apart."""
        count = 400_000
        header = json.dumps({f"layer.{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
                             for i in range(count)}, separators=(",", ":")).encode()
        source = self.work / "many.safetensors"
        source.write_bytes(struct.pack("<Q", len(header)) + header + bytes(count))
        script = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, capture_output=True); "
                  "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
        peak = int(subprocess.run([sys.executable, "-c", script, TESSERA, "stat", source], capture_output=True, text=True,
                                  check=True).stdout) * 1024
        self.assertLess(peak, (64 << 20) + 14 * len(header))


if __name__ == "__main__":
    TESSERA, GOLDEN = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    Case.command, Case.golden = TESSERA, GOLDEN
    unittest.main(argv=sys.argv[:1])
