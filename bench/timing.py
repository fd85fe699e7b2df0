"""What the jobs of bench/run share: processes with their time and peak memory, and tables."""
import dataclasses
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv/bin/python"
TORCHRUN = ROOT / ".venv/bin/torchrun"
PEERS = ROOT / "bench/peers"


@dataclasses.dataclass
class Bench:
    build: pathlib.Path
    work: pathlib.Path  # scratch, on the disk to measure
    rounds: int
    small: bool  # sizes that only show that everything works

    @property
    def command(self):
        return self.build / "src/cli/tessera"

    @property
    def shape(self):
        """Layers, width and vocabulary of the model: 2.2 GB with its AdamW state."""
        return ["2", "64", "500"] if self.small else ["12", "1024", "32000"]


def run(command, **extra):
    """Runs a command; returns (seconds, peak MB, standard output)."""
    timed = [sys.executable, "-c", WRAPPER, *map(str, command)]
    done = subprocess.run(timed, capture_output=True, text=True, check=False, **extra)
    if done.returncode != 0:
        raise SystemExit(f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    seconds, peak = done.stderr.rstrip().rsplit("\n", 1)[-1].split()
    return float(seconds), int(peak) // 1024, done.stdout


# Runs its arguments and prints "seconds peak_kb": a process of its own, so that the peak is the command's.
WRAPPER = """
import resource, subprocess, sys, time
begin = time.perf_counter()
code = subprocess.run(sys.argv[1:]).returncode
print(time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def fresh(path):
    """Removes what an earlier round made and lets the disk come to rest."""
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
    os.sync()


def size_of(path):
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size


def table(title, rows, baseline):
    """rows: name -> (list of seconds, peak MB); ratios are against `baseline`."""
    base = statistics.median(rows[baseline][0])
    print(f"\n{title}\n{'':34} {'median':>9} {'min':>7} {'max':>7} {'ratio':>7} {'peak MB':>8}")
    for name, (seconds, peak) in rows.items():
        median = statistics.median(seconds)
        print(f"{name:34} {median:9.2f} {min(seconds):7.2f} {max(seconds):7.2f} {median / base:7.2f} {peak:8}")
    sys.stdout.flush()


def torchrun(ranks, *command, python=True):
    flags = [] if python else ["--no-python"]
    return [TORCHRUN, "--nproc-per-node", str(ranks), "--master-port", "29561", *flags, *command]


def alternate(jobs, rounds):
    """name -> (command, output to remove first, most rounds or None). Returns name -> (seconds, peak MB) for table().

    In turns; the first round of each only warms up, unless that is all it may run. A command that prints "seconds N"
    says itself how long it took, without what it imports; others count whole.
    """
    rows = {name: ([], []) for name in jobs}
    for round_ in range(rounds + 1):
        for name, (command, out, most) in jobs.items():
            if most is not None and round_ >= most:
                continue
            if out is not None:
                fresh(out)
            seconds, peak, output = run(command)
            inside = re.search(r"^seconds ([\d.]+)$", output, re.MULTILINE)
            seconds = float(inside[1]) if inside else seconds
            if round_ > 0 or most == 1:
                rows[name][0].append(seconds)
                rows[name][1].append(peak)
    return {name: (seconds, max(peaks)) for name, (seconds, peaks) in rows.items()}


def rate(title, rows, peer):
    table(title, rows, peer)
    base = statistics.median(rows[peer][0])
    for name, (seconds, _) in rows.items():
        if name != peer:
            print(f"{name}: {base / statistics.median(seconds):.1f} times as fast as {peer}")
