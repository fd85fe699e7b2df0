"""Checkpoints in an object store: SeaweedFS on loopback, which shares the machine's cores with its clients. So CPU seconds of
the client stand beside the time.

The peers are rclone, pyarrow and OLMo's own writer and reader (boto3). rclone and pyarrow copy files that are on the disk
already; Tessera saves from the memory of ranks and loads into it, and so does OLMo.
The CPU seconds of OLMo count what torchrun and its imports take; its time does not.
"""
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time

from timing import PEERS, ROOT, fresh, size_of, torchrun

sys.path.insert(0, str(ROOT / "tests/stores"))
from with_server import BUCKET, KEY_ID, REGION, SECRET, Server  # noqa: E402

VENV = ROOT / "build/bench-venv"
# Runs its arguments and prints "seconds cpu_seconds peak_kb".
WRAPPER = """
import resource, subprocess, sys, time
begin = time.perf_counter()
code = subprocess.run(sys.argv[1:]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def bench_python():
    if not (VENV / "bin/rclone").exists():
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        subprocess.run([VENV / "bin/pip", "install", "-q", "-r", ROOT / "bench/requirements.txt"], check=True)
    return VENV / "bin/python"


class Job:
    """Commands one behind the other, whose times are added; a program may say itself how long it took, by "seconds N" or as
    JSON. `before`: what makes the start of each round the same."""

    def __init__(self, *commands, before=lambda: None):
        self.commands, self.before = commands, before
        self.seconds, self.cpu, self.peak, self.read = [], [], 0, 0.0

    def round(self, env, counts):
        self.before()
        seconds = cpu = 0.0
        for command in self.commands:
            done = subprocess.run([sys.executable, "-c", WRAPPER, *map(str, command)], env=env, capture_output=True, text=True,
                                  check=False)
            if done.returncode != 0:
                raise SystemExit(f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
            took, used, peak = map(float, done.stderr.rstrip().rsplit("\n", 1)[-1].split())
            if inside := re.search(r"^seconds ([\d.]+)$", done.stdout, re.MULTILINE):
                took = float(inside[1])
            elif done.stdout.startswith("{"):
                told = json.loads(done.stdout)
                took, used = told["seconds"], told["cpu_s"]
                self.read = max(self.read, told["read_per_needed"])
            seconds, cpu = seconds + took, cpu + used
            self.peak = max(self.peak, int(peak) // 1024)
        if counts:
            self.seconds.append(seconds)
            self.cpu.append(cpu)


def alternate(jobs, rounds, env):
    for round_ in range(rounds + 1):  # the first one warms up
        for job in jobs.values():
            job.round(env, round_ > 0)


def table(title, jobs, baseline):
    base = statistics.median(jobs[baseline].seconds)
    base_cpu = statistics.median(jobs[baseline].cpu)
    print(f"\n{title}\n{'':34} {'median':>8} {'min':>7} {'max':>7} {'ratio':>6} {'CPU s':>7} {'ratio':>6} {'peak MB':>8}")
    for name, job in jobs.items():
        median, cpu = statistics.median(job.seconds), statistics.median(job.cpu)
        read = f"  bytes read for one needed: {job.read:.3f}" if job.read else ""
        print(f"{name:34} {median:8.2f} {min(job.seconds):7.2f} {max(job.seconds):7.2f} {median / base:6.2f} {cpu:7.2f} "
              f"{cpu / base_cpu:6.2f} {job.peak:8}{read}")
    sys.stdout.flush()


@contextlib.contextmanager
def server():
    """Its variables. A new one for each table: it gives room back late."""
    with Server() as running:
        env = {**running.environment(), "OMP_NUM_THREADS": "1", "RCLONE_CONFIG_S3_TYPE": "s3", "RCLONE_CONFIG_S3_PROVIDER": "Other",
               "RCLONE_CONFIG_S3_ENDPOINT": f"http://{running.host}", "RCLONE_CONFIG_S3_ACCESS_KEY_ID": KEY_ID,
               "RCLONE_CONFIG_S3_SECRET_ACCESS_KEY": SECRET, "RCLONE_CONFIG_S3_REGION": REGION,
               "PYTHONPATH": str(ROOT / "tests/parity/olmo_stubs"), "TESSERA_REAL_PACKAGES": "boto3,botocore,requests"}
        yield running, env


class Measure:
    def __init__(self, bench):
        self.bench, self.python = bench, bench_python()
        self.size = (64 << 20) * (2 if bench.small else 16)
        self.rclone = VENV / "bin/rclone"
        self.files = bench.work / "files"  # what two ranks save
        self.program = bench.build / "bench/bench_stores"

    def ours(self, what, url, ranks):
        return [self.program, what, url, str(self.size), str(ranks)]

    def olmo(self, what, url):
        return torchrun(2, PEERS / "olmo_store.py", what, self.bench.work / "olmo", url, str(self.size))

    def gone(self, env, prefix):
        return lambda: subprocess.run([self.rclone, "purge", f"s3:{BUCKET}/{prefix}"], env=env, check=False, capture_output=True)

    def saves(self):
        with server() as (_, env):
            jobs = {
                "tessera, from memory": Job(self.ours("save", f"s3://{BUCKET}/ours", 2), before=self.gone(env, "ours")),
                "rclone copy of files": Job([self.rclone, "copy", self.files, f"s3:{BUCKET}/rclone"], before=self.gone(env, "rclone")),
                "pyarrow copy_files": Job([self.python, PEERS / "arrow_store.py", "put", self.files, f"{BUCKET}/arrow"],
                                          before=self.gone(env, "arrow")),
                "OLMo's writer": Job(self.olmo("save", f"s3://{BUCKET}/olmo"), before=self.gone(env, "olmo")),
            }
            alternate(jobs, self.bench.rounds, env)
            table(f"save {self.size / 1e9:.2f} GB from 2 ranks, seconds", jobs, "rclone copy of files")

    def loads(self):
        with server() as (_, env):
            self.fill(env)
            copy = self.bench.work / "copy"
            jobs = {}
            for ranks in (2, 3):
                jobs[f"tessera, {ranks} ranks"] = Job(self.ours("load", f"s3://{BUCKET}/ours", ranks))
                jobs[f"rclone copy, and load, {ranks} ranks"] = Job(
                    [self.rclone, "copy", f"s3:{BUCKET}/ours", copy], self.ours("load", copy, ranks), before=lambda: fresh(copy))
            jobs["pyarrow copy_files alone"] = Job([self.python, PEERS / "arrow_store.py", "get", copy, f"{BUCKET}/ours"],
                                                   before=lambda: fresh(copy))
            jobs["OLMo's reader, 2 ranks"] = Job(self.olmo("load", f"s3://{BUCKET}/olmo"))
            alternate(jobs, self.bench.rounds, env)
            for ranks in (2, 3):
                table(f"load it, seconds (against rclone on {ranks} ranks)", jobs, f"rclone copy, and load, {ranks} ranks")

    def fill(self, env):
        for command in (self.ours("save", f"s3://{BUCKET}/ours", 2), self.olmo("save", f"s3://{BUCKET}/olmo")):
            subprocess.run(list(map(str, command)), env=env, check=True, capture_output=True)

    def far(self):
        """The same with 20 ms more for each request."""
        with server() as (running, env), self.proxy(running, 20) as (host, _):
            self.fill(env)
            far = {**env, "AWS_ENDPOINT_URL": f"http://{host}"}
            near_job = {name: Job(self.ours(what, f"s3://{BUCKET}/{place}", ranks), before=before) for name, what, place, ranks, before in (
                ("save", "save", "near", 2, self.gone(env, "near")), ("load, 2 ranks", "load", "ours", 2, lambda: None),
                ("load, 3 ranks", "load", "ours", 3, lambda: None))}
            far_job = {name: Job(*job.commands, before=job.before) for name, job in near_job.items()}
            none = self.proxy(running, 0)
            with none as (host, _):
                passed = {**env, "AWS_ENDPOINT_URL": f"http://{host}"}
                for round_ in range(self.bench.rounds + 1):
                    for name in near_job:
                        near_job[name].round(passed, round_ > 0)
                        far_job[name].round(far, round_ > 0)
            for name in near_job:
                table(f"{name}, with 20 ms more for each request", {"through a proxy": near_job[name], "20 ms more": far_job[name]},
                      "through a proxy")

    @contextlib.contextmanager
    def proxy(self, running, milliseconds):
        """Its address, and the file that has a line for each request."""
        said = self.bench.work / f"proxy-{milliseconds}"
        with said.open("w") as output:
            process = subprocess.Popen([sys.executable, ROOT / "tests/stores/slow_proxy.py", running.host, str(milliseconds)],
                                       stdout=output)
        try:
            while "\n" not in said.read_text():
                time.sleep(0.02)
            yield said.read_text().splitlines()[0], said
        finally:
            process.kill()
            process.wait()

    def requests(self):
        """Of `cat` of one tensor."""
        with server() as (running, env), self.proxy(running, 0) as (host, said):
            self.fill(env)
            url = f"s3://{BUCKET}/ours"
            subprocess.run([self.bench.command, "cat", url, "tensor1"], check=True, capture_output=True,
                           env={**env, "AWS_ENDPOINT_URL": f"http://{host}"})
            lines = said.read_text().splitlines()[1:]
            data = [line for line in lines if ".distcp" in line]
            print(f"\ncat of one tensor of 64 MiB: {len(lines) - len(data)} requests beside {len(data)} for its ranges")

    def convert(self):
        with server() as (_, env):
            self.fill(env)
            copy, out = self.bench.work / "copy", self.bench.work / "out.safetensors"

            def before():
                fresh(copy)
                fresh(out)

            jobs = {
                "tessera convert s3://": Job([self.bench.command, "convert", f"s3://{BUCKET}/ours", out, "--quiet"], before=before),
                "rclone copy, and convert": Job([self.rclone, "copy", f"s3:{BUCKET}/ours", copy],
                                                [self.bench.command, "convert", copy, out, "--quiet"], before=before),
            }
            alternate(jobs, self.bench.rounds, env)
            table(f"{self.size / 1e9:.2f} GB in the store to one file on disk, seconds", jobs, "rclone copy, and convert")


def measure(bench):
    job = Measure(bench)
    subprocess.run(list(map(str, job.ours("save", job.files, 2))), check=True, capture_output=True,
                   env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(f"\n{len(list(job.files.rglob('*')))} files, {size_of(job.files) / 1e9:.2f} GB")
    job.saves()
    job.loads()
    job.far()
    job.requests()
    job.convert()
    shutil.rmtree(job.files)
