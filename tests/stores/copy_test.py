#!/usr/bin/env python3
"""tessera copy between disks, an S3 server and a web server on loopback.

    copy_test.py TESSERA GOLDEN_DIRECTORY

with_server.py starts the S3 server and runs this; its variables say where it is.
"""
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import boto3
from botocore.config import Config

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from made import write_safetensors  # noqa: E402

import urls_test  # noqa: E402

TESSERA = GOLDEN = None
BUCKET = "tessera"
MEBI = 1 << 20
ROUNDS = int(os.environ.get("TESSERA_COPY_ROUNDS", "4"))  # of two kills and an interruption


def client():
    """moto keeps the checksum of the parts for a copy of the whole, so nothing is compared here."""
    return boto3.client("s3", config=Config(s3={"addressing_style": "path"}, response_checksum_validation="when_required"))


def files_of(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}

# What a kill leaves of the look whether the place takes a write. The next copy removes it, but for one whose request the
# server carries out later than that: a busy one does.
PROBE = re.compile(r"tessera-[0-9a-f]{12}\.probe")


def objects_of(prefix, s3):
    return {item["Key"].removeprefix(prefix + "/"): s3.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read()
            for item in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix + "/").get("Contents", [])}


class Copy(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        urls_test.TESSERA = TESSERA
        cls.s3 = client()
        cls.temporary = tempfile.TemporaryDirectory()
        cls.work = pathlib.Path(cls.temporary.name)
        cls.file = cls.work / "large.safetensors"
        draw = random.Random(5)
        write_safetensors(cls.file, {f"w{i}": ("U8", [6 * MEBI + i], draw.randbytes(6 * MEBI + i)) for i in range(6)})
        cls.dcp = cls.work / "dcp"
        cls.done("convert", cls.file, cls.dcp, "--to", "dcp", "--ranks", "3")

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    @classmethod
    def done(cls, *arguments):
        run = urls_test.tessera(*arguments)
        assert run.returncode == 0, run.stderr
        return run.stdout

    def copied(self, *arguments):
        return json.loads(self.done("copy", *arguments, "--json"))

    def fails(self, code, *arguments):
        run = urls_test.tessera(*arguments)
        self.assertEqual(run.returncode, 3, run.stdout)
        self.assertIn(f"tessera: {code}:", run.stderr)

    def is_sealed(self, where):
        report = json.loads(self.done("verify", where, "--json"))
        self.assertEqual((report["ok"], report["bytes_without_checksum"]), (True, 0))

    def test_a_directory_goes_there_and_back_as_it_is_o08(self):
        """checkpoint-rows O-08; fault-rows C08"""
        url, back = f"s3://{BUCKET}/back/step 1", self.work / "back"
        report = self.copied(self.dcp, url, "--read-back")
        files = files_of(self.dcp)
        self.assertEqual((report["files"], report["bytes"]), (len(files), sum(map(len, files.values()))))
        self.assertEqual((report["whole_files"], report["server_bytes"]), (0, 0))
        self.assertEqual(objects_of("back/step 1", self.s3), files)
        self.copied(url, back)
        self.assertEqual(files_of(back), files)
        self.is_sealed(url)
        self.is_sealed(back)
        again = self.copied(self.dcp, url)
        self.assertEqual((again["whole_files"], again["whole_bytes"]), (report["files"], report["bytes"]))

    def test_inside_one_store_the_server_copies(self):
        first, second = f"s3://{BUCKET}/inside/a", f"s3://{BUCKET}/inside/b"
        self.copied(self.dcp, first)
        report = self.copied(first, second, "--read-back")
        data = sum(len(content) for name, content in files_of(self.dcp).items() if name != ".metadata")
        self.assertEqual(report["server_bytes"], data)
        self.assertEqual(objects_of("inside/b", self.s3), files_of(self.dcp))
        again = self.copied(first, second)
        self.assertEqual((again["whole_files"], again["server_bytes"]), (report["files"], 0))
        # Another object of that name is no copy.
        name = next(name for name in objects_of("inside/b", self.s3) if name.endswith(".distcp"))
        self.s3.put_object(Bucket=BUCKET, Key=f"inside/b/{name}", Body=objects_of("inside/b", self.s3)[name][:-1] + b"!")
        self.assertEqual(self.copied(first, second)["whole_files"], report["files"] - 1)
        self.assertEqual(objects_of("inside/b", self.s3), files_of(self.dcp))

    def test_what_is_damaged_at_the_target_is_copied_again(self):
        url = f"s3://{BUCKET}/damaged"
        report = self.copied(self.dcp, url)
        for name, content in files_of(self.dcp).items():
            if not name.endswith(".distcp"):
                continue
            position = random.Random(name).randrange(len(content))
            self.s3.put_object(Bucket=BUCKET, Key=f"damaged/{name}",
                               Body=content[:position] + bytes([content[position] ^ 1]) + content[position + 1:])
            self.assertEqual(self.copied(self.dcp, url)["whole_files"], report["files"] - 1)
            self.assertEqual(objects_of("damaged", self.s3), files_of(self.dcp))

    def test_another_checkpoint_stays_unless_it_is_overwritten_o08(self):
        """checkpoint-rows O-08"""
        url, other = f"s3://{BUCKET}/kept", self.work / "other"
        self.done("convert", GOLDEN / "c2_hf_cons" / "model-00001-of-00002.safetensors", other, "--to", "dcp")
        self.copied(other, url)
        self.fails("already_exists", "copy", self.dcp, url)
        self.assertEqual(objects_of("kept", self.s3), files_of(other))
        self.copied(self.dcp, url, "--overwrite")
        self.assertEqual(objects_of("kept", self.s3), files_of(self.dcp))
        self.fails("already_exists", "copy", other, self.dcp)
        self.assertEqual(urls_test.tessera("copy", url, url + "/").returncode, 2)

    def test_c08_a_checkpoint_that_is_being_written_is_incomplete(self):
        """fault-rows C08"""
        live = self.work / "live"
        live.mkdir()
        for name, content in files_of(self.dcp).items():
            if name != ".metadata":
                (live / name).write_bytes(content)
        self.fails("incomplete", "copy", live, f"s3://{BUCKET}/live")
        self.copied(self.dcp, f"s3://{BUCKET}/live-there")
        self.s3.delete_object(Bucket=BUCKET, Key="live-there/.metadata")
        self.fails("incomplete", "copy", f"s3://{BUCKET}/live-there", self.work / "live-here")
        self.assertEqual(objects_of("live", self.s3), {})
        self.assertFalse((self.work / "live-here").exists())

    def test_a_file_takes_its_side_file_along(self):
        sealed = self.work / "sealed.safetensors"
        sealed.write_bytes(self.file.read_bytes())
        self.done("seal", sealed)
        url = f"s3://{BUCKET}/files/"
        self.assertEqual(self.copied(sealed, url)["files"], 2)
        self.is_sealed(url + sealed.name)
        self.assertEqual(self.copied(sealed, url)["whole_files"], 2)
        report = self.copied(url + sealed.name, url + "twice.bin")
        self.assertEqual(report["server_bytes"], sealed.stat().st_size)
        self.copied(url + "twice.bin", self.work / "here.safetensors")
        self.is_sealed(self.work / "here.safetensors")
        # A file without digests replaces one that has some.
        plain = GOLDEN / "c2_hf_cons" / "model-00001-of-00002.safetensors"
        self.fails("already_exists", "copy", plain, url + sealed.name)
        self.copied(plain, url + sealed.name, "--overwrite")
        self.done("diff", url + sealed.name, plain)
        with urls_test.web_server(plain.parent) as web:
            self.copied(f"{web}/{plain.name}", self.work)
        self.assertEqual((self.work / plain.name).read_bytes(), plain.read_bytes())

    def test_directories_without_a_marker_and_runs(self):
        split, url = self.work / "split", f"s3://{BUCKET}/split"
        self.done("convert", self.file, split, "--to", "safetensors", "--max-shard-size", "8MB")
        self.copied(split, url)
        self.assertEqual(objects_of("split", self.s3), files_of(split))
        self.assertEqual(self.copied(split, url)["whole_files"], len(files_of(split)))
        run = self.work / "run"
        for step in (9, 10):
            self.copied(self.dcp, run / f"step{step}")
        self.assertEqual(self.copied(run, f"s3://{BUCKET}/run")["checkpoints"], 2)
        self.assertEqual(objects_of("run", self.s3), files_of(run))

    @unittest.skipIf(os.environ.get("TESSERA_S3_SERVER") == "moto", "moto keeps objects in memory")
    def test_memory_is_a_few_windows_whatever_the_size(self):
        size = 300 * MEBI
        large, url = self.work / "sparse.safetensors", f"s3://{BUCKET}/memory/"
        header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        with large.open("wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            out.truncate(out.tell() + size)
        for source, target in ((large, url), (url + large.name, self.work / "large" / "sparse.safetensors")):
            # A child's peak begins with that of the process which forks it: this one is large.
            script = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
                      "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
            run = subprocess.run([sys.executable, "-c", script, TESSERA, "copy", source, target, "--quiet"],
                                 capture_output=True, text=True, check=True)
            self.assertLess(int(run.stdout) * 1024, 128 * MEBI)
        subprocess.run(["cmp", large, self.work / "large" / "sparse.safetensors"], check=True)

    def test_o26_kills_leave_no_marker_and_the_next_copy_goes_on(self):
        """fault-rows O26, OQ-08"""
        draw = random.Random(11)
        files, kept = files_of(self.dcp), 0
        for number in range(ROUNDS):
            prefix = f"killed/{number}"
            for attempt in range(3):
                process = subprocess.Popen([TESSERA, "copy", self.dcp, f"s3://{BUCKET}/{prefix}", "--threads", "1", "--quiet"],
                                           stderr=subprocess.PIPE)
                time.sleep(draw.uniform(0.02, 0.4))
                # The second attempt is interrupted as a user does it.
                process.send_signal(signal.SIGINT if attempt == 1 else signal.SIGKILL)
                process.communicate()
                there = objects_of(prefix, self.s3)
                if process.returncode != 0:
                    self.assertIn(process.returncode, (-signal.SIGINT, -signal.SIGKILL))
                for name, content in there.items():
                    if not PROBE.fullmatch(name):
                        self.assertTrue(files.get(name) == content, f"{prefix}/{name}: {len(content)} other bytes")
                if ".metadata" in there:
                    self.assertLessEqual(set(files), set(there))
                kept += len(there)
            self.copied(self.dcp, f"s3://{BUCKET}/{prefix}")
            there = objects_of(prefix, self.s3)
            self.assertEqual(sorted(name for name in there if not PROBE.fullmatch(name)), sorted(files))
            self.assertTrue(all(there[name] == content for name, content in files.items()))
            for path in (self.s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])):
                self.s3.delete_object(Bucket=BUCKET, Key=path["Key"])
        print(f"{3 * ROUNDS} kills: {kept} files found whole by the copies that followed", file=sys.stderr)


class Gc(unittest.TestCase):
    """tessera gc on a store. moto begins all uploads in the year 2010."""

    @classmethod
    def setUpClass(cls):
        Copy.setUpClass()
        cls.dcp, cls.work, cls.s3 = Copy.dcp, Copy.work, client()

    @classmethod
    def tearDownClass(cls):
        Copy.tearDownClass()

    def collect(self, *arguments):
        return json.loads(Copy.done("gc", *arguments, "--json"))

    def uploads(self, prefix):
        return {upload["Key"] for upload in self.s3.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])}

    def foreign_upload(self, key):
        """As another tool leaves it, with a part of the mark's number and size."""
        upload = self.s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
        for number, body in ((1, b"x" * MEBI), (10000, b"x" * 64)):
            self.s3.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=number, Body=body)

    def has_marked_upload(self, key):
        """Whether a killed copy left an upload that says whose it is. One that was killed before says nothing: it is ended."""
        marked = False
        for upload in self.s3.list_multipart_uploads(Bucket=BUCKET, Prefix=key).get("Uploads", []):
            what = {"Bucket": BUCKET, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            try:
                if any(part["PartNumber"] == 10000 for part in self.s3.list_parts(**what).get("Parts", [])):
                    marked = True
                else:
                    self.s3.abort_multipart_upload(**what)
            except self.s3.exceptions.NoSuchUpload:
                pass  # the server did the last request of the killed process meanwhile: it had ended the upload
        return marked

    def kill_copies(self, prefix, wanted):
        """Until so many have left an upload."""
        draw = random.Random(3)
        left = 0
        for number in range(60):
            key = f"{prefix}/{number}.safetensors"
            process = subprocess.Popen([TESSERA, "copy", Copy.file, f"s3://{BUCKET}/{key}", "--threads", "1", "--quiet"],
                                       stderr=subprocess.DEVNULL)
            time.sleep(draw.uniform(0.05, 0.3))
            process.kill()
            process.wait()
            left += self.has_marked_upload(key)
            if left == wanted:
                return
        self.fail(f"only {left} of 60 kills left an upload")

    def test_o26_uploads_of_killed_writers_are_found_and_nobody_elses(self):
        """fault-rows O26, C06"""
        self.kill_copies("uploads", 3)
        self.foreign_upload("uploads/foreign.bin")
        self.foreign_upload("elsewhere/foreign.bin")
        # Killed before the mark: known by a name that only our saves give.
        self.s3.create_multipart_upload(Bucket=BUCKET, Key="uploads/step1/__0_0_0123456789ab.distcp")
        ours = self.uploads("uploads/") - {"uploads/foreign.bin"}
        if os.environ["TESSERA_S3_SERVER"] != "moto":
            young = self.collect(f"s3://{BUCKET}/uploads", "--uploads", "--delete")
            self.assertEqual(young["leftovers"], [])
        listed = self.collect(f"s3://{BUCKET}/uploads", "--uploads", "--older-than", "0s")
        self.assertEqual({row["path"] for row in listed["leftovers"]}, {f"s3://{BUCKET}/{key}" for key in ours})
        self.assertTrue(all(row["kind"] == "upload" and (row["bytes"] > 0 or "__0_0" in row["path"]) and not row["removed"] for row in listed["leftovers"]))
        self.assertEqual(self.uploads("uploads/"), ours | {"uploads/foreign.bin"})
        removed = self.collect(f"s3://{BUCKET}", "--uploads", "--delete", "--older-than", "0s")
        self.assertTrue(all(row["removed"] for row in removed["leftovers"]))
        self.assertEqual(self.uploads("uploads/"), {"uploads/foreign.bin"})
        self.assertEqual(self.uploads("elsewhere/"), {"elsewhere/foreign.bin"})
        self.assertEqual(self.collect(f"s3://{BUCKET}", "--uploads", "--older-than", "0s")["leftovers"], [])

    def test_data_of_attempts_that_nothing_names(self):
        """fault-rows O26"""
        Copy.done("copy", self.dcp, f"s3://{BUCKET}/left/step1")
        self.s3.put_object(Bucket=BUCKET, Key="left/step1/__0_0_0123456789ab.distcp", Body=b"left")
        self.s3.put_object(Bucket=BUCKET, Key="left/step2/__0_0_0123456789ab.distcp", Body=b"left")
        self.s3.put_object(Bucket=BUCKET, Key="left/step2/notes.txt", Body=b"a user's")
        self.assertEqual(self.collect(f"s3://{BUCKET}/left")["leftovers"], [])
        rows = self.collect(f"s3://{BUCKET}/left", "--delete", "--older-than", "0s")["leftovers"]
        self.assertEqual([row["path"] for row in rows],
                         [f"s3://{BUCKET}/left/step{step}/__0_0_0123456789ab.distcp" for step in (1, 2)])
        self.assertEqual(objects_of("left/step1", self.s3), files_of(self.dcp))
        self.assertEqual(objects_of("left/step2", self.s3), {"notes.txt": b"a user's"})

    def test_c06_a_killed_save_on_a_disk_and_usage(self):
        """fault-rows C06"""
        left = self.work / "killed" / "__0_0_0123456789ab.distcp"
        left.parent.mkdir()
        left.write_bytes(b"x" * 100)
        self.assertEqual(self.collect(left.parent)["spared"], 1)
        os.utime(left, (time.time() - 90000,) * 2)
        self.assertEqual(self.collect(left.parent)["bytes"], 100)
        self.assertIn("1 left by killed writers", Copy.done("gc", left.parent, "--delete"))
        self.assertFalse(left.exists())
        self.assertEqual(urls_test.tessera("gc", left.parent, "--uploads").returncode, 3)
        self.assertEqual(urls_test.tessera("gc", left.parent, "--older-than", "12").returncode, 2)


if __name__ == "__main__":
    TESSERA, GOLDEN = (pathlib.Path(argument).resolve() for argument in sys.argv[1:3])
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
