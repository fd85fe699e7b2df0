#!/usr/bin/env python3
"""What scripts and people rely on around the tessera command: its options, its streams, and whatever else lies beside a target.

    usage_test.py TESSERA GOLDEN_DIRECTORY
"""
import fcntl
import json
import os
import pathlib
import pickle
import pty
import random
import re
import shutil
import struct
import subprocess
import sys
import termios
import unittest
import zipfile

from made import Case, tessera, write_safetensors

TESSERA = GOLDEN = None


class Usage(Case):
    def safetensors(self, name, tensors):
        return write_safetensors(self.work / name, tensors)

    def test_control_characters_stay_out_of_the_terminal(self):
        source = self.work / "evil.safetensors"
        header = json.dumps({"a\u001b[31m\u202eb": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        source.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
        for verb in ("ls", "map", "scan", "stat", "verify"):
            output = tessera(verb, source).stdout
            self.assertNotIn("\x1b", output)
            self.assertNotIn("\u202e", output)

    def test_offers_fit_the_command(self):
        path = self.work / "trail.safetensors"
        self.assertEqual(tessera("convert", self.dcp, path).returncode, 0)
        path.write_bytes(path.read_bytes() + b"x" * 13)
        self.assertIn("; --accept trailing-bytes passes", tessera("ls", path).stderr)
        directory = self.work / "trail"
        directory.mkdir()
        shutil.copy(path, directory / "model.safetensors")
        for verb in (["seal", path], ["seal", directory], ["copy", directory, self.work / "trailed"]):
            failed = tessera(*verb)
            self.assertIn("13 bytes after the last tensor; --accept trailing-bytes passes", failed.stderr, verb)
            self.assertEqual(tessera(*verb, "--accept", "trailing-bytes").returncode, 0, verb)
        # Digests are of all ranks.
        ranks = self.work / "ranks"
        ranks.mkdir()
        write_safetensors(ranks / "model-rank-0-part-0.safetensors", {"a": ("U8", [1], b"x")})
        self.assertIn(": --rank R", tessera("ls", ranks).stderr)
        failed = tessera("seal", ranks)
        self.assertEqual(failed.returncode, 3)
        self.assertNotIn("--rank", failed.stderr)

    def test_one_file_of_several_ranks_is_a_part(self):
        for name, first in (("ranks_fsdp2_ws2", "model_world_size_2_rank_0.pt"), ("fsdp1_uop0_ws2_legacy", "rank0.pt")):
            ranks, lone = GOLDEN / "checkpoints" / name, self.work / f"{name}.pt"
            shutil.copy(ranks / first, lone)
            for verb in (["ls", lone], ["stat", lone], ["map", lone], ["cat", lone, "scale"], ["diff", lone, lone],
                         ["convert", lone, self.work / "o.pt"], ["convert", lone, self.work / "o.safetensors"]):
                self.refused("incomplete", *verb)
                self.assertIn("open the directory with all ranks' files", tessera(*verb).stderr)
            self.refused("incomplete", "verify", lone, exit_code=1)
            self.assertEqual(list(self.work.glob("o.*")), [])
            # What it holds, as rank 0's pieces of the whole tensors.
            self.assertEqual(tessera("verify", lone, "--part").returncode, 0)
            self.assertEqual(tessera("stat", lone, "--part").returncode, 0)
            made = self.work / f"{name}.safetensors"
            done = tessera("convert", lone, made, "--part", "--json")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            whole = {row["name"].removeprefix("model."): row for row in json.loads(tessera("map", ranks, "--json").stdout) if "name" in row}
            parts = [row for row in json.loads(tessera("ls", lone, "--part", "--json").stdout) if "shape" in row]
            self.assertEqual(sorted(row["name"] for row in parts),
                             sorted(row["name"] for row in json.loads(tessera("ls", made, "--json").stdout) if "shape" in row))
            compared = 0
            for row in parts:
                full = whole.get(row["name"].removeprefix("model."))
                mine = [piece for piece in full["pieces"] if piece.get("rank") == 0 and "offsets" in piece] if full else []
                if len(mine) != 1 or full["shape"] == row["shape"]:
                    continue
                (piece,) = mine
                self.assertEqual(row["shape"], piece["sizes"])
                slices = ",".join(f"{at}:{at + size}" for at, size in zip(piece["offsets"], piece["sizes"]))
                expected = tessera("cat", ranks, f"{full['name']}[{slices}]")
                self.assertEqual(expected.returncode, 0, expected.stderr)
                for path, more in ((lone, ["--part"]), (made, [])):
                    self.assertEqual(tessera("cat", path, row["name"], *more).stdout, expected.stdout)
                compared += 1
            self.assertGreater(compared, 2)
            # Of two checkpoints, an option is for the one that has a use for it.
            dcp = self.work / f"{name}.dcp"
            self.assertEqual(tessera("convert", lone, dcp, "--to", "dcp", "--part").returncode, 0)
            for pair in ((lone, dcp), (dcp, lone)):
                self.refused("incomplete", "diff", *pair, exit_code=3)
                self.assertEqual(tessera("diff", *pair, "--part").returncode, 0)
            self.refused("invalid_argument", "diff", dcp, dcp, "--part", exit_code=2)
            self.refused("invalid_argument", "ls", ranks, "--part", exit_code=2)
            self.assertEqual(tessera("seal", lone).returncode, 0)  # of its bytes
        self.refused("invalid_argument", "stat", made, "--part", exit_code=2)
        self.assertEqual(tessera("ls", GOLDEN / "train.pt", "--part").stdout, tessera("ls", GOLDEN / "train.pt").stdout)

    def test_parts_and_files_of_others_are_named(self):
        self.refused("incomplete", "ls", self.dcp / "__0_0.distcp")
        self.assertIn("open the directory that it is in", tessera("ls", self.dcp / "__0_0.distcp").stderr)
        for name, magic, said in (("m.gguf", b"GGUF\1\0\0\0", "version 1"), ("m.h5", b"\x89HDF\r\n\x1a\n", "HDF5"), ("m.npy", b"\x93NUMPY\1\0", "numpy"),
                                  ("m.pt.gz", b"\x1f\x8b\x08\0", "gzip"), ("m.pt", b"\x1f\x8b\x08\0", "gzip")):
            (self.work / name).write_bytes(magic + bytes(100))
            self.refused("unsupported", "ls", self.work / name)
            self.assertIn(said, tessera("ls", self.work / name).stderr)

    def drawn(self, arguments, columns, term="xterm"):
        """What the command writes on a terminal so wide, which is its standard error."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with subprocess.Popen([TESSERA, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=theirs,
                              env={**os.environ, "TERM": term}) as child:
            os.close(theirs)
            text = b""
            while True:
                try:
                    read = os.read(ours, 4096)
                except OSError:
                    break
                if not read:
                    break
                text += read
        os.close(ours)
        self.assertEqual(child.returncode, 0)
        return text.decode()

    def test_the_bar_fits_its_terminal(self):
        source = self.safetensors("large.safetensors", {"w": ("U8", [30 << 20], bytes(30 << 20))})
        for columns in (200, 40, 10):
            text = self.drawn(["convert", source, self.work / f"{columns}.pt"], columns)
            lines = [line for line in text.split("\r\x1b[K") if line]
            self.assertGreater(len(lines), 0)
            self.assertLess(max(map(len, lines)), columns)
            self.assertEqual("[###" in text, columns == 200)
            self.assertNotRegex(text, r"\d{5,} s left")
        self.assertNotIn("\x1b", self.drawn(["verify", source], 80, term="dumb"))

    def test_cat_says_what_it_takes(self):
        self.assertIn("the beginning of", tessera("cat", self.dcp, "app.model").stderr)
        self.refused("invalid_argument", "cat", self.dcp, "app.model", exit_code=2)
        self.refused("not_found", "cat", self.dcp, "modle")
        name = next(row["name"] for row in json.loads(tessera("ls", self.dcp, "--json").stdout) if row.get("shape"))
        for slices, said in (("[::2]", "has a step"), ("[99999999999999999999]", "beyond 64 bits"), ("[]", "is empty"), ("[a]", "begin:end")):
            self.assertIn(said, tessera("cat", self.dcp, name + slices).stderr)
        written = self.work / "w.npy"
        self.assertEqual(tessera("cat", self.dcp, name, "--npy", written).returncode, 0)
        piped = subprocess.run([TESSERA, "cat", self.dcp, name, "--npy", "-"], capture_output=True, check=True)
        self.assertEqual(piped.stdout, written.read_bytes())
        self.assertFalse(pathlib.Path("-").exists())

    def test_what_is_no_file_says_so(self):
        with open(GOLDEN / "train.pt", "rb") as file:
            done = subprocess.run([TESSERA, "ls", "/dev/stdin"], stdin=subprocess.PIPE, input=None, capture_output=True, text=True)
            self.assertIn("not a pipe or a device", done.stderr)
            self.assertEqual(done.returncode, 3)
            self.assertEqual(subprocess.run([TESSERA, "ls", "/dev/stdin"], stdin=file, capture_output=True).returncode, 0)
        self.refused("io", "ls", "/dev/null")

    def test_a_cache_is_for_urls(self):
        self.refused("invalid_argument", "ls", self.dcp, "--local-cache", self.work / "cache", exit_code=2)
        self.assertFalse((self.work / "cache").exists())

    def test_every_command_has_its_own_help(self):
        for verb in ("ls", "stat", "cat", "map", "verify", "scan", "seal", "diff", "convert", "copy", "gc", "unshard", "reshard"):
            text = tessera(verb, "--help").stdout
            examples = re.findall(r"^  (?:until )?tessera (\w+)", text, re.M)
            self.assertEqual(set(examples), {verb})

    def test_a_missing_file_is_missing(self):
        self.assertEqual(tessera("seal", self.dcp).returncode, 0)
        (self.dcp / "__0_0.distcp").unlink()
        self.assertIn("the file is missing", tessera("verify", self.dcp).stderr)

    def test_a_run_names_its_checkpoints(self):
        run = self.work / "run"
        for step in (5, 10):
            shutil.copytree(self.dcp, run / f"step{step}")
        for verb in (["ls", run], ["stat", run], ["cat", run, "x"], ["verify", run]):
            self.refused("not_found", *verb)
            self.assertIn("a run of 2 checkpoints, not a checkpoint; name one of them: step10 (the newest) to step5", tessera(*verb).stderr)
        self.refused("not_found", "ls", self.work)  # no run

    def test_verify_reads_the_trainers_of_all_ranks(self):
        for kind in ("olmo-torch-new", "olmo-local"):
            target = self.work / kind
            done = tessera("convert", GOLDEN / "checkpoints/fsdp1_uop0_ws2_old_local", target, "--to", kind, "--ranks", "3")
            self.assertEqual(done.returncode, 0, done.stderr)
            for side_file in target.glob("tessera-*.json"):  # digests would find it
                side_file.unlink()
            self.assertEqual(tessera("verify", target).returncode, 0)
            for rank in range(3):
                path = target / f"train/rank{rank}.pt"
                whole = path.read_bytes()
                with zipfile.ZipFile(path) as archive:
                    (record,) = [item for item in archive.infolist() if "/data/" in item.filename]
                    content = archive.read(record)
                at = whole.index(content, record.header_offset + 30 + len(record.filename))
                path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
                done = tessera("verify", target)
                self.assertEqual(done.returncode, 1, (kind, rank))
                self.assertIn(f"rank{rank}.pt", done.stderr)
                path.write_bytes(whole)

    def test_verify_reads_every_tensor_of_every_rank(self):
        draw = random.Random(5)
        for name in ("fsdp1_uop0_ws2_legacy", "fsdp1_uop1_ws4_legacy", "ranks_fsdp2_ws2"):
            target = self.work / name
            shutil.copytree(GOLDEN / "checkpoints" / name, target)
            self.assertEqual(tessera("verify", target).returncode, 0)
            for path in sorted(target.rglob("*.pt")):
                whole = path.read_bytes()
                with zipfile.ZipFile(path) as archive:
                    records = [item for item in archive.infolist() if "/data/" in item.filename and item.file_size]
                for record in draw.sample(records, min(4, len(records))) + records[-1:]:
                    name, extra = struct.unpack_from("<2H", whole, record.header_offset + 26)
                    at = record.header_offset + 30 + name + extra
                    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
                    done = tessera("verify", target)
                    self.assertEqual(done.returncode, 1, (path, record.filename, done.stderr))
                path.write_bytes(whole)

    def test_a_model_alone_asks_nothing_of_the_optimizer(self):
        # Numbers where OLMo has names, as PyTorch's own optimizers have them.
        state = {"model": {"w": 3.0}, "optim": {"state": {0: {"step": 1}}, "param_groups": [{"params": [0], "lr": 0.1}]}}
        numbered = self.work / "numbered.pt"
        with zipfile.ZipFile(numbered, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(state, 2))
            archive.writestr("archive/version", "3\n")
        self.refused("mismatch", "unshard", numbered, self.work / "whole")
        alone = tessera("unshard", numbered, self.work / "alone", "--model-only")
        self.assertEqual(alone.returncode, 0, alone.stderr)
        self.assertEqual(sorted(path.name for path in (self.work / "alone").iterdir() if path.suffix == ".pt"), ["model.pt"])

    def test_one_is_not_several(self):
        one = self.safetensors("one.safetensors", {"w": ("U8", [1], b"x")})
        self.assertIn("ok: 1 tensor, ", tessera("verify", one).stdout)
        self.assertIn("1 piece ", tessera("map", one).stdout)
        self.assertIn("equal: 1 leaf,", tessera("diff", one, one).stdout)
        self.assertIn("one.pt: 1 tensor, ", tessera("convert", one, self.work / "one.pt").stdout)

    def test_scan_needs_something_to_scan(self):
        empty = self.work / "empty"
        empty.mkdir()
        self.refused("not_found", "scan", empty)
        (empty / "README.md").write_text("nothing here")
        self.refused("not_found", "scan", empty)
        self.refused("not_found", "verify", empty)
        (empty / "weights").write_bytes(b"cos\nsystem\n(S'true'\ntR.")  # a pickle under a name that nobody knows
        self.assertEqual(tessera("scan", empty).returncode, 1)
        self.assertEqual(tessera("scan", self.dcp).returncode, 0)

    def test_scan_takes_an_index_for_its_set(self):
        torch_set = self.work / "set"
        torch_set.mkdir()
        shutil.copy(GOLDEN / "train.pt", torch_set / "pytorch_model-00001-of-00001.bin")
        index = torch_set / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}))
        link = self.work / "link.bin.index.json"
        for path in (index, torch_set):
            report = json.loads(tessera("scan", path, "--json").stdout)
            self.assertGreater(report["pickles"], 0)
            self.assertEqual(report["problems"], [])
        link.symlink_to(index)
        self.assertNotIn("opcode", tessera("scan", link).stderr)
        safetensors_set = self.work / "model.safetensors.index.json"
        self.safetensors("model-00001-of-00001.safetensors", {"w": ("U8", [1], b"x")})
        safetensors_set.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
        self.assertEqual(tessera("scan", safetensors_set).returncode, 0)

    def test_nothing_is_copied_into_itself(self):
        link = self.work / "link"
        link.symlink_to(self.dcp)
        for target in (self.dcp / "inner", self.dcp / "a/b", link / "inner", self.dcp / "../dcp/inner"):
            self.refused("invalid_argument", "copy", self.dcp, target, exit_code=2)
        self.assertFalse((self.dcp / "inner").exists())
        self.assertEqual(tessera("copy", ".", "backup", cwd=self.dcp).returncode, 2)
        self.assertEqual(tessera("copy", self.dcp, self.work / "dcp-beside").returncode, 0)

    @unittest.skipIf(os.geteuid() != 0, "needs another user to be shut out")
    def test_verify_that_could_not_look_is_no_answer(self):
        self.safetensors("closed.safetensors", {"w": ("U8", [1], b"x")}).chmod(0)
        self.work.chmod(0o755)
        as_nobody = dict(user=65534, group=65534, cwd="/")
        done = tessera("verify", self.work / "closed.safetensors", "--json", **as_nobody)
        self.assertEqual((done.returncode, json.loads(done.stdout)["error"]["code"]), (3, "io"))
        absent = tessera("verify", self.work / "nobody", "--json")
        self.assertEqual((absent.returncode, json.loads(absent.stdout)["error"]["code"]), (3, "not_found"))
        broken = self.work / "broken.safetensors"
        broken.write_bytes((GOLDEN / "dtypes.safetensors").read_bytes()[:-1])
        done = tessera("verify", broken, "--json")
        (finding,) = json.loads(done.stdout)["findings"]
        self.assertEqual((done.returncode, finding["path"]), (1, str(broken)))
        self.assertIn(finding["message"], finding["text"])

    def test_expressions_take_linear_time_and_say_what_they_lack(self):
        source = self.safetensors("names.safetensors", {"a" * 300 + "!": ("U8", [1], b"x"), "net1.w": ("U8", [1], b"y")})
        names = lambda path: sorted(row["name"] for row in json.loads(tessera("ls", path, "--json").stdout))
        for number, (rule, renamed) in enumerate({
                "(a+)+$=>b": "net1.w", r"^net(\d)=>\1.$1.$$.\\": r"1.1.$.\.w", "e(x)?t=>[$&$1]": "n[et]1.w"}.items()):
            target = self.work / f"renamed{number}.safetensors"
            done = tessera("convert", source, target, "--rename", rule, timeout=60)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(names(target), sorted(["a" * 300 + "!", renamed]))
        for option, expression in (("--rename", "(?=a)=>x"), ("--rename", r"(a)\1=>x"), ("--rename", r"a=>\1"), ("--rename", "(a)=>$2"),
                                   ("--rename", "(=>w"), ("--unit", "("), ("--unit", "a(?!b)")):
            arguments = ["convert", self.dcp, self.work / "refused", "--to", "olmo-local", option, expression]
            self.refused("invalid_argument", *arguments, exit_code=2)
        self.assertIn("no looking ahead", tessera(*arguments).stderr)
        self.assertFalse((self.work / "refused").exists())
        self.assertEqual(tessera("convert", self.dcp, self.work / "units", "--to", "olmo-local", "--unit", "(a*)*net1",
                                 timeout=60).returncode, 0)

    def test_an_answer_that_cannot_be_written_is_a_failure(self):
        sealed, other = self.work / "sealed", self.safetensors("one.safetensors", {"w": ("U8", [1], b"x")})
        shutil.copytree(self.dcp, sealed)
        verbs = [["ls", other], ["ls", self.dcp], ["stat", other], ["map", other], ["cat", other, "w"], ["verify", other], ["scan", other],
                 ["diff", other, other], ["diff", other, self.dcp], ["gc", self.dcp], ["seal", sealed], ["copy", other, self.work / "copied"],
                 ["convert", other, self.work / "made.pt"], ["unshard", self.dcp, self.work / "whole"],
                 ["reshard", self.dcp, self.work / "on2", "--ranks", "2"]]
        for verb in [[], ["--help"], ["--version"], ["completion"], *verbs, *([*verb, "--json"] for verb in verbs),
                     ["ls", "--help"], ["ls", self.work / "none", "--json"], ["--frobnicate", "--json"]]:
            for name in ("made.pt", "whole", "on2", "copied"):
                path = self.work / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            for stdout, reason in (("/dev/full", "out_of_space: "), (None, "io: ")):
                with open(stdout or "/dev/null", "w") as out:
                    arguments = [TESSERA, *map(str, verb), *(["--overwrite"] if verb[:1] == ["convert"] or verb[:1] == ["unshard"] or
                                                             verb[:1] == ["reshard"] else [])]
                    done = subprocess.run(arguments if stdout else ["sh", "-c", 'exec "$@" >&-', "sh", *arguments], stdout=out,
                                          stderr=subprocess.PIPE, text=True, check=False)
                self.assertEqual(done.returncode, 3, (verb, stdout, done.stderr))
                line = done.stderr.splitlines()[-1]
                self.assertTrue(line.startswith(f"tessera: {reason}") and "standard output" in line, (verb, done.stderr))
                if verb[-1:] != ["--json"] or verb[0] not in ("--frobnicate", "ls"):
                    self.assertEqual(done.stderr.count("\n"), 1, (verb, done.stderr))

    def test_nobody_has_to_read_standard_error(self):
        for stderr in ("2>&-", "2>/dev/full"):
            target = self.work / "closed.safetensors"
            done = subprocess.run(["sh", "-c", f'exec "$@" {stderr}', "sh", TESSERA, "convert", self.dcp, target, "--overwrite"],
                                  stdout=subprocess.PIPE, text=True, check=False)
            self.assertEqual(done.returncode, 0, stderr)
            self.assertEqual(tessera("verify", target).returncode, 0)
            done = subprocess.run(["sh", "-c", f'exec "$@" {stderr}', "sh", TESSERA, "ls", self.work / "none"], check=False)
            self.assertEqual(done.returncode, 3, stderr)

    def test_what_is_not_the_checkpoints_own_stays(self):
        """Whatever kind replaces whatever kind: notes, results, a tokenizer and other weights are as they were."""
        foreign = {"config.json": "{}", "tokenizer.json": "tok", "notes.txt": "n", "eval/results/a.json": "[]", "eval/model.pt": "other",
                   "adapter.safetensors": "a", "model/notes.md": "m", "train/log.txt": "l", "logs/.hidden": "h", "rankings.pt": "r"}
        kinds = {"dcp": ["--ranks", "2"], "olmo-full": [], "olmo-torch-new": ["--ranks", "2"], "olmo-legacy": ["--ranks", "2"],
                 "olmo-local": ["--ranks", "2"], "safetensors": ["--max-shard-size", "1KB"]}
        drawn = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{12}")
        files = lambda directory: {drawn.sub("ID", str(path.relative_to(directory))) for path in directory.rglob("*") if path.is_file()}
        fresh = {}
        for kind, options in kinds.items():
            self.assertEqual(tessera("convert", self.dcp, self.work / f"a-{kind}", "--to", kind, *options).returncode, 0)
            fresh[kind] = files(self.work / f"a-{kind}")
        for old in kinds:
            for new, options in kinds.items():
                for resume in ([], ["--resume"]):
                    if new == "dcp":  # has a marker, and appears file by file
                        continue
                    target = self.work / "target"
                    shutil.copytree(self.work / f"a-{old}", target)
                    for name, text in foreign.items():
                        (target / name).parent.mkdir(parents=True, exist_ok=True)
                        (target / name).write_text(text)
                    done = tessera("convert", self.dcp, target, "--to", new, *options, "--overwrite", *resume)
                    self.assertEqual(done.returncode, 0, (old, new, done.stderr))
                    self.assertEqual(files(target), fresh[new] | foreign.keys(), (old, new, resume))
                    for name, text in foreign.items():
                        self.assertEqual((target / name).read_text(), text)
                    self.assertEqual(tessera("diff", self.work / f"a-{new}", target).returncode, 0, (old, new))
                    self.assertEqual(tessera("verify", target).returncode, 0, (old, new))
                    shutil.rmtree(target)
        self.assertEqual({path.name for path in self.work.iterdir()}, {"dcp", *(f"a-{kind}" for kind in kinds)})

    @unittest.skipIf(os.geteuid() != 0, "only root becomes another user")
    def test_what_is_closed_and_not_the_checkpoints_is_in_nobodys_way(self):
        """The root of a volume, as a user has it: with a lost+found that is root's."""
        user = 65534
        os.chmod(self.work, 0o755)
        program = shutil.copy(TESSERA, self.work / "tessera")
        volume = self.work / "volume"

        def as_user(*arguments):
            return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False, cwd="/", user=user,
                                  group=user, extra_groups=[])

        for name, options in (("", ["--to", "dcp", "--ranks", "2"]), ("m.safetensors", []), ("m.pt", []),
                              ("", ["--to", "dcp", "--ranks", "3", "--resume"])):
            volume.mkdir()
            os.chown(volume, user, user)
            (volume / "lost+found").mkdir(mode=0o700)
            target = volume / name
            for overwrite in ([], ["--overwrite"]):
                done = as_user("convert", self.dcp, target, *options, *overwrite)
                self.assertEqual((done.returncode, done.stderr), (0, ""), (name, options))
                # m.pt makes no checkpoint of its directory.
                for path in [volume] * (name != "m.pt") + [target] * bool(name):
                    for verb in (["ls", path], ["verify", path], ["diff", self.dcp, path]):
                        done = as_user(*verb)
                        self.assertEqual(done.returncode, 0, (name, verb, done.stderr))
                if name == "":
                    self.assertEqual(as_user("seal", volume).returncode, 0)
                    self.assertEqual(as_user("verify", volume).returncode, 0)
            shutil.rmtree(volume)
        # A set, by its directory and by its index; a file of torch.save that is alone in its directory, and not.
        shutil.copytree(GOLDEN / "c2_hf_cons", self.work / "set")
        for name in ("alone", "beside"):
            (self.work / name).mkdir()
            self.assertEqual(tessera("convert", self.dcp, self.work / name / "model.pt", "--rename", "^app=>model").returncode, 0)
        (self.work / "beside/notes").mkdir()
        (self.work / "beside/notes/a.txt").write_text("a")
        for path in ("set", "set/model.safetensors.index.json", "alone", "beside"):
            before = tessera("ls", self.work / path)
            closed = self.work / path.split("/")[0] / "lost+found"
            closed.mkdir(mode=0o700)
            after = as_user("ls", self.work / path)
            self.assertEqual((after.returncode, after.stdout, after.stderr), (before.returncode, before.stdout, before.stderr), path)
            closed.rmdir()

    @unittest.skipIf(os.geteuid() != 0, "only root becomes another user")
    def test_what_is_closed_and_the_checkpoints_is_an_error(self):
        os.chmod(self.work, 0o755)
        program = shutil.copy(TESSERA, self.work / "tessera")
        for kind, closed in (("olmo-local", "optim"), ("olmo-local", "model"), ("olmo-torch-new", "model_and_optim")):
            target = self.work / f"{kind}-{closed}"
            self.assertEqual(tessera("convert", self.dcp, target, "--to", kind).returncode, 0)
            os.chmod(target / closed, 0)
            done = subprocess.run([program, "ls", target], capture_output=True, text=True, check=False, user=65534, group=65534,
                                  extra_groups=[])
            self.assertEqual(done.returncode, 3, (kind, closed))
            self.assertIn("Permission denied", done.stderr)

    def test_a_file_that_is_replaced_keeps_its_mode_and_its_links(self):
        for kind in ("safetensors", "pt"):
            for verb in (["convert", self.dcp], ["convert", self.dcp, "--resume"], ["copy", self.work / f"source.{kind}"]):
                with self.subTest(kind=kind, verb=verb):
                    place = self.work / f"place-{kind}-{verb[0]}-{len(verb)}"
                    place.mkdir()
                    source, target, link = self.work / f"source.{kind}", place / f"real.{kind}", self.work / f"link.{kind}"
                    self.assertEqual(tessera("convert", self.dcp, source, "--overwrite").returncode, 0)
                    target.write_bytes(b"old")
                    target.chmod(0o600)
                    link.unlink(missing_ok=True)
                    link.symlink_to(f"{place.name}/real.{kind}")
                    for name in (target, link):
                        done = tessera(*verb[:2], name, *verb[2:], "--overwrite")
                        self.assertEqual(done.returncode, 0, done.stderr)
                        self.assertEqual(target.stat().st_mode & 0o7777, 0o600)
                        self.assertTrue(link.is_symlink())
                        self.assertEqual(tessera("diff", self.dcp, target).returncode, 0)
                    self.assertEqual([path.name for path in place.iterdir()], [target.name])
                    if verb[0] == "convert":  # a copy that is there is done
                        self.refused("already_exists", *verb[:2], link, *verb[2:])
                    target.unlink()
                    done = tessera(*verb[:2], link, *verb[2:])  # where it leads there is nothing yet
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.assertTrue(link.is_symlink())
                    self.assertEqual(tessera("diff", self.dcp, target).returncode, 0)

    def test_a_target_that_is_a_file_is_the_one_that_was_named(self):
        def made(file, *arguments):
            done = tessera("convert", self.dcp, *arguments, "--json")
            self.assertEqual((done.returncode, done.stderr), (0, ""), arguments)
            self.assertEqual(os.path.realpath(json.loads(done.stdout)["target"]), os.path.realpath(file), arguments)
            self.assertTrue(file.is_file() and not file.is_symlink(), arguments)
            self.assertEqual(tessera("diff", self.dcp, file).returncode, 0, arguments)

        for kind, inside in (("torch", "model.pt"), ("safetensors", "model.safetensors")):
            for resume in ([], ["--resume"]):
                to = ["--to", kind, *resume]
                with self.subTest(to=to):
                    place = self.work / f"place-{kind}-{len(resume)}"
                    place.mkdir()
                    made(place / "weights", place / "weights", *to)
                    self.refused("already_exists", "convert", self.dcp, place / "weights", *to)
                    made(place / "weights", place / "weights", *to, "--overwrite")
                    self.assertEqual([path.name for path in place.iterdir()], ["weights"])
                    # A directory that is there, whatever it is called, or a name that can only be one's.
                    for name in ("there", "there.pt", "there.ckpt"):
                        (place / name).mkdir()
                        made(place / name / inside, place / name, *to)
                    made(place / "new/sub" / inside, f"{place}/new/sub/", *to)
                    made(place / "dots" / inside, f"{place}/dots/.", *to)
                    # Links stay.
                    (place / "other").mkdir()
                    for link, leads_to in (("link", "weights"), ("nowhere", "fresh"), ("folder", "other"), ("other/" + inside, "../far")):
                        (place / link).symlink_to(leads_to)
                    made(place / "weights", place / "link", *to, "--overwrite")
                    made(place / "fresh", place / "nowhere", *to)
                    made(place / "far", place / "folder", *to)
                    self.assertTrue(all((place / link).is_symlink() for link in ("link", "nowhere", "folder", "other/" + inside)))
        for name in ("a.bin", "a.ckpt", "a.pth"):
            made(self.work / name, self.work / name)
            self.assertTrue((self.work / name).read_bytes().startswith(b"PK"), name)
            self.refused("invalid_argument", "convert", self.dcp, self.work / f"b{name}", "--to", "safetensors", exit_code=2)
            self.refused("invalid_argument", "convert", self.dcp, self.work / f"b{name}", "--to", "dcp", exit_code=2)
        # What a directory is called does not say what is to be in it.
        (self.work / "run.ckpt").mkdir()
        self.refused("invalid_argument", "convert", self.dcp, self.work / "run.ckpt", exit_code=2)
        made_dcp = tessera("convert", self.dcp, self.work / "run.ckpt", "--to", "dcp")
        self.assertEqual(made_dcp.returncode, 0, made_dcp.stderr)

    def test_a_directory_that_is_named_by_a_link_is_made_where_it_leads(self):
        for kind, options in (("dcp", []), ("olmo-full", []), ("olmo-legacy", ["--ranks", "2"]), ("safetensors", ["--max-shard-size", "1KB"])):
            for resume in ([], ["--resume"]):
                with self.subTest(kind=kind, resume=resume):
                    place = self.work / f"{kind}-{len(resume)}"
                    place.mkdir()
                    link = place / "link"
                    link.symlink_to("real")
                    for overwrite in ([], ["--overwrite"]):  # where it leads there is nothing at first
                        done = tessera("convert", self.dcp, link, "--to", kind, *options, *resume, *overwrite)
                        self.assertEqual((done.returncode, done.stderr), (0, ""))
                        self.assertEqual(tessera("verify", place / "real").returncode, 0)
                    self.assertEqual(sorted(path.name for path in place.iterdir()), ["link", "real"])
                    self.assertEqual(os.readlink(link), "real")

    def test_a_file_that_may_not_grow_is_told_as_a_full_disk(self):
        big = self.safetensors("big.safetensors", {"w": ("U8", [3_000_000], bytes(3_000_000))})
        before = sorted(self.work.iterdir())
        for target in (["o.safetensors"], ["o.pt"], ["o", "--to", "dcp"], ["o", "--to", "olmo-full"], ["o", "--to", "safetensors",
                       "--max-shard-size", "2MB"]):
            done = subprocess.run(["bash", "-c", 'ulimit -f 1000; exec "$@"', "bash", TESSERA, "convert", big, self.work / target[0], *target[1:]],
                                  capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 3, (target, done))
            self.assertIn("tessera: out_of_space: ", done.stderr)
            self.assertIn("the limit is 1024000 bytes of a file (ulimit -f)", done.stderr)
            self.assertEqual(sorted(self.work.iterdir()), before, target)
        wide = self.safetensors("wide.safetensors", {f"a-name-of-some-length-{i}": ("U8", [0], b"") for i in range(2000)})
        with open(self.work / "answer", "w") as answer:
            done = subprocess.run(["bash", "-c", 'ulimit -f 10; exec "$@"', "bash", TESSERA, "ls", wide], stdout=answer,
                                  stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (3, 1), done.stderr)
        self.assertTrue(done.stderr.startswith("tessera: out_of_space: "), done.stderr)

    def test_options_without_an_effect_are_refused(self):
        target = self.work / "out"
        source = self.safetensors("a.safetensors", {"w": ("U8", [1], b"x")})
        for values in (("--memory", "0"), ("--memory", "-1"), ("--memory", "0MiB"), ("--memory", "MiB"), ("--max-shard-size", "0"),
                       ("--max-shard-size", "-1GB"), ("--header-limit", "0"), ("--header-limit", "-5"), ("--threads", "0"),
                       ("--ranks", "0"), ("--ranks", "-1"), ("--cache-size", "1GB"),
                       ("--local-cache", "c", "--cache-size", "-5"), ("--local-cache", "c", "--cache-size", "0")):
            done = tessera("convert", self.dcp, target, "--to", "dcp", *values)
            self.assertEqual(done.returncode, 2, (values, done.stderr))
            self.assertIn(values[-2], done.stderr)
        self.assertEqual(tessera("gc", self.dcp, "--older-than", "-5s").returncode, 2)
        uses = {"dcp": {"--ranks"}, "torch": set(), "safetensors": {"--max-shard-size"}, "olmo-full": {"--config"},
                "olmo-torch-new": {"--ranks", "--config"}, "olmo-legacy": {"--ranks", "--config"},
                "olmo-local": {"--ranks", "--config", "--unit", "--orig-params", "--no-orig-params"}}
        config = self.work / "config.yaml"
        config.write_text("run_name: x\n")
        options = {"--ranks": ["3"], "--unit": ["net1"], "--orig-params": [], "--no-orig-params": [], "--config": [config],
                   "--max-shard-size": ["1KB"]}
        for kind, used in uses.items():
            for option, value in options.items():
                done = tessera("convert", self.dcp, target, "--to", kind, option, *value)
                self.assertEqual(done.returncode, 0 if option in used else 2, (kind, option, done.stderr))
                if option not in used:
                    named = option.replace("--no-", "--")
                    self.assertIn(f"the option {named} has no effect on a target of kind {kind}", done.stderr)
                self.assertEqual(target.exists(), option in used)
                shutil.rmtree(target, ignore_errors=True)
        self.refused("invalid_argument", "convert", self.dcp, target, "--to", "torch", "--unit", "(", exit_code=2)
        self.refused("invalid_argument", "convert", self.dcp, self.work / "b.pt", "--header-limit", "1", exit_code=2)
        self.refused("limit", "convert", source, self.work / "b.pt", "--header-limit", "1")
        self.refused("invalid_argument", "reshard", self.dcp, target, "--ranks", "2", "--unit", "a", exit_code=2)
        self.assertFalse(target.exists())


if __name__ == "__main__":
    TESSERA, GOLDEN = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    Case.command, Case.golden = TESSERA, GOLDEN
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
