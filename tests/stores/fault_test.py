#!/usr/bin/env python3
"""Each fault of a network or a server at each request of what tessera does with an object store.

    fault_test.py TESSERA TRIES [SEED]

TRIES of all of them by chance; 0: all. with_server.py starts the server and runs this. Every try ends in one of two ways:
what was to be made is there, read back without the faults; or there is one error, which names the URL, and the target is
what it was, or absent, or whole. Afterwards `gc --uploads` leaves no upload. Prints what was tried, and every try that ends
otherwise: then it exits with 1.
"""
import collections
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

import boto3
from botocore.config import Config

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from faulty_proxy import FAULTS, FaultyProxy  # noqa: E402
from made import write_safetensors  # noqa: E402

BUCKET = "tessera"
PATIENCE = 60  # seconds, of one command
STALL = "2"  # seconds, after which an answer that trickles is asked for again
MEBI = 1 << 20


class Wrong(Exception):
    pass


class Places:
    """Trees on the disk, and the same ones in the bucket."""

    def __init__(self, tessera, work):
        self.tessera, self.work = tessera, work
        self.s3 = boto3.client("s3", config=Config(s3={"addressing_style": "path"}, response_checksum_validation="when_required"))
        self.number = 0
        draw = random.Random(3)
        for name in ("old", "new"):
            write_safetensors(work / f"{name}.safetensors", {
                f"model.w{i}": ("F32", [97 + i, 33], draw.randbytes(4 * 33 * (97 + i))) for i in range(5)})
            for kind in ("dcp", "olmo-full"):
                self.do("convert", work / f"{name}.safetensors", work / f"{name}-{kind}", "--to", kind,
                        *(["--config", self.config()] if kind == "olmo-full" else ["--ranks", "2"]))
        write_safetensors(work / "unsealed.safetensors", {
            f"model.w{i}": ("U8", [5 * MEBI + i], draw.randbytes(5 * MEBI + i)) for i in range(4)})
        self.do("convert", work / "unsealed.safetensors", work / "large.safetensors")  # with digests
        self.put(work / "new-dcp", "source/dcp")
        self.put(work / "large.safetensors", "source/large.safetensors")

    def config(self):
        path = self.work / "config.yaml"
        path.write_text("{}\n")
        return path

    def run(self, arguments, env=None):
        return subprocess.run([self.tessera, *map(str, arguments)], capture_output=True, text=True, check=False,
                              timeout=PATIENCE, env=env)

    def do(self, *arguments):
        done = self.run(arguments)
        if done.returncode != 0:
            raise Wrong(f"{arguments}: {done.stderr}")
        return done.stdout

    def put(self, path, key):
        """Markers last, as a save does it: nobody reads before."""
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file():
                below = f"{key}/{file.relative_to(path)}" if path.is_dir() else key
                self.s3.put_object(Bucket=BUCKET, Key=below, Body=file.read_bytes())

    def keys(self, prefix):
        return [item["Key"] for item in self.s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])]

    def uploads(self):
        return [item["Key"] for item in self.s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]

    def abort_all(self):
        for item in self.s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
            self.s3.abort_multipart_upload(Bucket=BUCKET, Key=item["Key"], UploadId=item["UploadId"])

    def is_same(self, a, b):
        return self.run(["diff", a, b]).returncode == 0

    def fresh(self):
        self.number += 1
        return f"try{self.number}"


class Job:
    """What is done. `old`: what the target is at first; `new`: what it has to become; `marker`: what says that it is there."""

    def __init__(self, name, arguments, new, old="", marker=".metadata", kind="dcp"):
        self.name, self.arguments, self.new, self.old, self.marker, self.kind = name, arguments, new, old, marker, kind

    def start(self, places):
        self.prefix = places.fresh()
        if self.old:
            places.put(places.work / self.old, f"{self.prefix}/target")
        return [str(argument).format(work=places.work, source=f"s3://{BUCKET}/source",
                                     target=f"s3://{BUCKET}/{self.prefix}/target", local=places.work / self.prefix)
                for argument in self.arguments]

    def check(self, places, done):
        """Whether it was done. Raises Wrong."""
        there = self.is_there(places)
        is_new = there and self.holds(places, self.new)
        if done.returncode == 0:
            if not is_new:
                raise Wrong("a false success: the target is not what was to be made")
            return True
        lines = [line for line in done.stderr.splitlines() if line.startswith("tessera: ")]
        if done.returncode != 3 or len(lines) != 1 or "s3://" not in lines[0] and "http://" not in lines[0]:
            raise Wrong(f"no error with a URL: exit {done.returncode}: {done.stderr}")
        if there and not is_new and not (self.old and self.holds(places, self.old)):
            raise Wrong("wrong bytes: the target is neither what it was nor what was to be made")
        if self.old and not there and self.kind == "dcp":
            raise Wrong("what was to be replaced has gone")
        return False

    def is_there(self, places):
        return f"{self.prefix}/target/{self.marker}" in places.keys(f"{self.prefix}/target")

    def holds(self, places, tree):
        return places.is_same(places.work / tree, f"s3://{BUCKET}/{self.prefix}/target")

    def clear(self, places):
        for key in places.keys(self.prefix + "/"):
            places.s3.delete_object(Bucket=BUCKET, Key=key)


class FileJob(Job):
    """Of one object."""

    def is_there(self, places):
        return bool(places.keys(f"{self.prefix}/target"))

    def holds(self, places, tree):
        body = places.s3.get_object(Bucket=BUCKET, Key=f"{self.prefix}/target.safetensors")["Body"].read()
        return places.is_same(places.work / tree, f"s3://{BUCKET}/{self.prefix}/target.safetensors") and len(body) > 0


class LoadJob(Job):
    """To the disk."""

    def is_there(self, places):
        return (places.work / f"{self.prefix}.safetensors").exists()

    def holds(self, places, tree):
        return places.is_same(places.work / tree, places.work / f"{self.prefix}.safetensors")

    def clear(self, places):
        (places.work / f"{self.prefix}.safetensors").unlink(missing_ok=True)


JOBS = [
    Job("save", ["convert", "{work}/new.safetensors", "{target}", "--to", "dcp", "--ranks", "2"], "new.safetensors"),
    Job("replace", ["convert", "{work}/new.safetensors", "{target}", "--to", "dcp", "--ranks", "2", "--overwrite"],
        "new.safetensors", old="old-dcp"),
    Job("replace olmo-full", ["convert", "{work}/new.safetensors", "{target}", "--to", "olmo-full", "--overwrite", "--config",
                              "{work}/config.yaml"], "new-olmo-full", old="old-olmo-full", marker="config.yaml", kind="olmo"),
    FileJob("parts", ["convert", "{work}/large.safetensors", "{target}.safetensors"], "large.safetensors"),
    LoadJob("load", ["convert", "{source}/dcp", "{local}.safetensors"], "new.safetensors"),
    LoadJob("load parts", ["convert", "{source}/large.safetensors", "{local}.safetensors"], "large.safetensors"),
    Job("copy", ["copy", "{work}/new-dcp", "{target}"], "new.safetensors"),
    Job("copy inside", ["copy", "{source}/dcp", "{target}"], "new.safetensors"),
]


class Trial:
    def __init__(self, places, proxy):
        self.places, self.proxy = places, proxy
        self.env = {**os.environ, "AWS_ENDPOINT_URL": f"http://{proxy.host}", "TESSERA_HTTP_STALL": STALL,
                    "TESSERA_HTTP_DEADLINE": "20"}
        self.ended = collections.Counter()
        self.lost_uploads = 0

    def requests_of(self, job):
        self.proxy.disarm()
        arguments = job.start(self.places)
        done = self.places.run(arguments, self.env)
        if not job.check(self.places, done):
            raise Wrong(f"{job.name} without a fault: {done.stderr}")
        job.clear(self.places)
        return self.proxy.requests

    def attempt(self, job, fault, at):
        """False: no request of that number is one for this fault."""
        arguments = job.start(self.places)
        self.proxy.arm(fault, at)
        done = self.places.run(arguments, self.env)
        seen = self.proxy.seen
        was_done = self.proxy.was_done
        self.proxy.disarm()
        try:
            is_done = job.check(self.places, done)
            self.require_no_uploads()
        except Wrong as wrong:
            raise Wrong(f"{job.name}, {fault} at request {at}{seen}: {wrong}\n{done.stderr}") from wrong
        job.clear(self.places)
        if was_done:
            self.ended[is_done] += 1
            self.ended[(fault, is_done)] += 1
        return was_done

    def require_no_uploads(self):
        if not self.places.uploads():
            return
        self.places.do("gc", f"s3://{BUCKET}", "--uploads", "--older-than", "0s", "--delete")
        if left := self.places.uploads():
            self.places.abort_all()
            raise Wrong(f"gc does not find the uploads of {left}")


def main():
    tessera, tries, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1
    begin = time.monotonic()
    work = pathlib.Path(tempfile.mkdtemp(prefix="tessera-faults-"))
    upstream = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    try:
        with FaultyProxy(upstream) as proxy:
            trial = Trial(Places(tessera, work), proxy)
            requests = {job.name: trial.requests_of(job) for job in JOBS}
            cases = [(job, fault, at) for job in JOBS for at in range(requests[job.name] + 2) for fault in FAULTS]
            random.Random(seed).shuffle(cases)
            tried = failures = 0
            for job, fault, at in cases:
                try:
                    tried += trial.attempt(job, fault, at)
                except (Wrong, subprocess.TimeoutExpired) as wrong:
                    tried += 1
                    failures += 1
                    print(f"FAILED: {wrong}", flush=True)
                if tries and tried >= tries:
                    break
        print(f"{len(JOBS)} jobs of {sum(requests.values())} requests x {len(FAULTS)} faults: {tried} tried in "
              f"{time.monotonic() - begin:.0f} s, {trial.ended[True]} done, {trial.ended[False]} errors, "
              f"{failures or 'no'} false successes, wrong bytes or uploads lost to gc")
        if os.environ.get("TESSERA_FAULTS_TABLE"):
            for fault in FAULTS:
                print(f"{fault}: {trial.ended[(fault, True)]} done, {trial.ended[(fault, False)]} errors")
        sys.exit(1 if failures else 0)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
