#!/usr/bin/env python3
"""Kills `tessera convert --resume` at random times, damages what is left, and goes on until it is done.

    resume_test.py TESSERA RUNS [SEED]

For each kind of target, RUNS times: up to three kills, most with damage to the leftovers after them, then a run to the
end. The first time it is one kill when half of the files are finished, which must have been kept then. The result is that of
an uninterrupted conversion: single files and sets byte for byte, other directories by `tessera diff` and `tessera verify`.
"""
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

TENSORS = 24
TENSOR_BYTES = 1 << 20
KINDS = {
    "a.safetensors": [],
    "a.pt": [],
    "set": ["--to", "safetensors", "--max-shard-size", "5MiB"],
    "dcp": ["--to", "dcp"],
    "dcp3": ["--to", "dcp", "--ranks", "3"],
    "legacy": ["--to", "olmo-legacy", "--ranks", "2"],
}
FILES = {"set": 5, "dcp3": 3, "legacy": 2}  # of those that have several


def fail(text):
    raise SystemExit(f"FAILED: {text}")


def make_source(path, rng):
    """A safetensors file of random tensors with OLMo's names."""
    rows, header, at = 64, {}, 0
    for i in range(TENSORS):
        header[f"model.blocks.{i}.weight"] = {"dtype": "F32", "shape": [rows, TENSOR_BYTES // 4 // rows],
                                              "data_offsets": [at, at + TENSOR_BYTES]}
        at += TENSOR_BYTES
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(TENSORS):
            file.write(rng.randbytes(TENSOR_BYTES))


class Job:
    def __init__(self, tessera, source, target, options):
        self.command = [tessera, "convert", str(source), str(target), *options, "--threads", "1", "--resume", "--json"]
        self.target = target
        self.all_files = FILES.get(target.name, 1)
        inside = options[:2] == ["--to", "dcp"]
        self.left = target / ".resume" if inside else target.parent / f".{target.name}.resume"

    def start(self):
        return subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def files(self):
        """How many files are finished. -1: the work has not begun."""
        if not (self.left / "begun").exists():
            return -1
        return sum(not name.startswith(".") for _, _, names in os.walk(self.left / "finished") for name in names)

    def report(self, code, out, err):
        """What a run says that got through, or found that the one before had: killed between its last step and its exit."""
        if code == 3 and err.startswith("tessera: already_exists: "):
            return {"bytes_resumed": 0}
        if code != 0:
            fail(f"{self.target.name} did not go on: {err.strip()}")
        return json.loads(out)

    def is_under_way(self):
        """A run was killed, and not so late that its target may have its name."""
        return (self.left / "begun").exists() and not (self.left / "published").exists()

    def remove(self):
        for path in (self.target, self.left):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def kill_after(self, files, moment):
        """Kills a run when so many files are finished, a moment later. None: the kill came first."""
        run = self.start()
        while run.poll() is None and self.files() < files:
            time.sleep(0.0005)
        time.sleep(moment)
        run.send_signal(signal.SIGKILL)
        out, err = run.communicate()
        return None if run.returncode == -signal.SIGKILL else self.report(run.returncode, out, err)

    def finish(self):
        done = subprocess.run(self.command, capture_output=True, text=True, check=False)
        return self.report(done.returncode, done.stdout, done.stderr)


def damage(job, rng):
    """Changes what was left as a disk or a person might; returns what was done.

    Not the records of a target that may have its name: without them the target is somebody else's, and stays.
    """
    if not job.is_under_way():
        return "published"
    records = [job.left / "begun", *sorted(path for path in (job.left / "finished").rglob("*") if path.is_file())]
    files = sorted(path for path in (job.left / "new").rglob("*") if path.is_file() and path.stat().st_size > 0)
    how = rng.choice(["nothing", "nothing", "flip", "cut", "record cut", "record flip", "record of another"])
    if how in ("flip", "cut") and files:
        path = rng.choice(files)
        if how == "cut":
            os.truncate(path, rng.randrange(path.stat().st_size))
        else:
            with open(path, "r+b") as file:
                for _ in range(20):
                    at = rng.randrange(path.stat().st_size)
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
    elif how.startswith("record"):
        record = rng.choice(records)
        text = bytearray(record.read_bytes())
        if how == "record cut":
            text = text[:rng.randrange(len(text) + 1)]
        elif how == "record flip" and text:
            text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
        else:
            text = rng.choice(records).read_bytes()
        record.write_bytes(text)
    return how


def same(tessera, a, b):
    if a.is_file():
        return a.read_bytes() == b.read_bytes()
    if a.name == "set":
        names = sorted(path.name for path in a.iterdir())
        return names == sorted(path.name for path in b.iterdir()) and all(
            (a / name).read_bytes() == (b / name).read_bytes() for name in names)
    return all(subprocess.run([tessera, *words], capture_output=True, check=False).returncode == 0
               for words in (["diff", a, b], ["verify", a], ["verify", b]))


def interrupted(job, rng):
    """Kills and damages in turns; the report of a run that got through, and what was done to the leftovers."""
    hows = []
    for _ in range(rng.randint(1, 3)):
        done = job.kill_after(rng.randint(-1, job.all_files - 1), rng.choice([0, 0.0005, 0.002, 0.01, 0.03]))
        if done:
            return done, hows
        hows.append(damage(job, rng))
    return None, hows


def kill_late(job):
    """One kill when half is done. A run may be through before the kill gets there: then once more."""
    for _ in range(100):
        done = job.kill_after(job.all_files // 2, 0)
        if not done and job.is_under_way():
            return
        job.remove()
    fail(f"{job.target.name}: every run ended before it was killed")


def one_run(tessera, job, reference, rng, late):
    """`late`: one kill when half of the files are done, and no damage; they must have been kept then."""
    done, hows = None, ["killed late"]
    if late:
        kill_late(job)
    else:
        done, hows = interrupted(job, rng)
    report = done or job.finish()
    if late and report["bytes_resumed"] < job.all_files // 2 * (TENSORS // job.all_files) * TENSOR_BYTES:
        fail(f"{job.target.name}: {report['bytes_resumed']} bytes were kept of a run that was killed late")
    if job.left.exists():
        fail(f"{job.left} is still there")
    if not same(tessera, job.target, reference):
        fail(f"{job.target.name} differs from an uninterrupted conversion after {hows}")
    return hows, report["bytes_resumed"]


def main():
    tessera, runs = sys.argv[1], int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    rng = random.Random(seed)
    work = pathlib.Path(tempfile.mkdtemp(prefix="tessera-resume-"))
    try:
        source = work / "source.safetensors"
        make_source(source, rng)
        kept = 0
        for name, options in KINDS.items():
            reference = work / "reference" / name
            subprocess.run([tessera, "convert", source, reference, *options, "--threads", "1", "--quiet"], check=True)
            for index in range(runs):
                job = Job(tessera, source, work / "target" / name, options)
                hows, resumed = one_run(tessera, job, reference, rng, index == 0)
                kept += resumed > 0
                print(f"{name} {index + 1}/{runs}: {', '.join(hows) or 'done at once'}; {resumed} bytes kept", flush=True)
                shutil.rmtree(work / "target")
            shutil.rmtree(work / "reference")
        if kept == 0:
            fail("no run kept anything")
        print(f"{len(KINDS) * runs} interrupted conversions (seed {seed}): every result was that of one run, {kept} kept bytes")
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
