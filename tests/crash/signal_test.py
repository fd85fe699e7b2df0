#!/usr/bin/env python3
"""Interrupts `tessera convert` at random moments and lets conversions race: nothing may be left behind.

    signal_test.py TESSERA RUNS [SEED]

For each kind of target, RUNS times, a run gets SIGINT, SIGTERM, SIGHUP or SIGKILL a random moment after its start. What ends
by a signal leaves the directory as it was (a SIGKILL at most what the next run removes), what was done before has its
target. Then two conversions to one DCP directory at once: one wins, and the directory holds what is the winner's. Then short
runs that get a signal about when they end.
"""
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from resume_test import KINDS as RESUMED_KINDS
from resume_test import fail, make_source

KINDS = RESUMED_KINDS | {
    "full": ["--to", "olmo-full"],
    "torch-new": ["--to", "olmo-torch-new", "--ranks", "2"],
    "local": ["--to", "olmo-local", "--ranks", "2"],
}
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def everything_in(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def start(tessera, source, target, options):
    return subprocess.Popen([tessera, "convert", str(source), str(target), *options, "--threads", "2", "--memory", "1MiB", "--quiet"],
                            stderr=subprocess.PIPE, text=True)


def whole_run(tessera, source, target, options):
    begin = time.monotonic()
    run = start(tessera, source, target, options)
    if run.communicate() and run.returncode != 0:
        fail(f"a run that nobody interrupts ends with {run.returncode}")
    return time.monotonic() - begin


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def require_readable(tessera, name, source, target):
    compared = subprocess.run([tessera, "diff", str(source), str(target), "--quiet"], stdout=subprocess.DEVNULL, check=False)
    if compared.returncode == 3:
        fail(f"{name}: done, but not readable")


def interrupt(tessera, source, base, name, options, rng, number):
    """One run in a directory below `base` that is not there yet. Returns whether the signal came in time."""
    target = base / "new" / "below" / name
    run = start(tessera, source, target, options)
    time.sleep(rng.random() * interrupt.lasts)
    run.send_signal(number)
    _, said = run.communicate()
    left = everything_in(base)
    if run.returncode == 0:
        require_readable(tessera, name, source, target)
        shutil.rmtree(base / "new")
        return False
    if run.returncode != -number:
        fail(f"{name}: signal {number} ended a run with {run.returncode}: {said}")
    # One that comes before the program heeds signals ends it at once.
    if said and f"interrupted by {getattr(number, 'name', '')}: nothing is left behind" not in said:
        fail(f"{name}: signal {number} said {said!r}")
    if number != signal.SIGKILL and left:
        fail(f"{name}: signal {number} left {left}")
    if target.exists() and (options[:2] != ["--to", "dcp"] or (target / ".metadata").exists()):
        # A SIGKILL may come after the step that makes the target visible and before the end.
        if number != signal.SIGKILL:
            fail(f"{name}: there is a target after signal {number}")
        require_readable(tessera, name, source, target)
        shutil.rmtree(base / "new")
        return False
    whole_run(tessera, source, target, options)  # what a SIGKILL left does not outlive the next run
    strays = [path for path in everything_in(base) if "tmp-" in path]
    if strays:
        fail(f"{name}: {strays} are there after a whole run")
    shutil.rmtree(base / "new")
    return True


def interrupt_late(tessera, source, work, rng, runs):
    """Signals about the end of short runs: a run that a signal ended has no target, a run with a target ends with 0."""
    small, target = work / "small.safetensors", work / "late.pt"
    subprocess.run([tessera, "convert", source, small, "--only", "model.blocks.0.weight", "--quiet"], check=True)
    lasts = sorted(whole_run(tessera, small, target, ["--overwrite"]) for _ in range(9))[4]
    for _ in range(runs):
        target.unlink(missing_ok=True)
        run = start(tessera, small, target, [])
        time.sleep(lasts * (0.6 + 0.6 * rng.random()))
        run.send_signal(signal.SIGTERM)
        run.communicate()
        if target.exists() != (run.returncode == 0):
            fail(f"a run that ended with {run.returncode} {'has' if target.exists() else 'has no'} target")


def race(tessera, source, work, rng):
    target = work / "raced"
    runs = []
    for _ in range(2):
        runs.append(start(tessera, source, target, ["--to", "dcp"]))
        time.sleep(rng.random() * interrupt.lasts / 2)
    errors = [run.communicate()[1] for run in runs]
    codes = sorted(run.returncode for run in runs)
    if codes != [0, 3] or not any("conflict" in text or "already_exists" in text for text in errors):
        fail(f"two runs to one directory end with {codes}: {errors}")
    stat = json.loads(subprocess.run([tessera, "stat", str(target), "--json"], capture_output=True, text=True, check=True).stdout)
    sides = list(target.glob("tessera-*.json"))
    if len(everything_in(target)) != stat["files"] + len(sides) or len(sides) != 1:
        fail(f"the loser left something: {everything_in(target)}")
    subprocess.run([tessera, "verify", str(target), "--quiet"], stdout=subprocess.DEVNULL, check=True)
    shutil.rmtree(target)


def main():
    tessera, runs = sys.argv[1], int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    rng = random.Random(seed)
    work = pathlib.Path(tempfile.mkdtemp(prefix="tessera-signals-"))
    in_time = 0
    try:
        source, base = work / "source.safetensors", work / "base"
        make_source(source, rng)
        base.mkdir()
        for name, options in KINDS.items():
            interrupt.lasts = whole_run(tessera, source, work / name, options)
            remove(work / name)
            for i in range(runs):
                number = rng.choice(SIGNALS) if i else signal.SIGKILL
                in_time += interrupt(tessera, source, base, name, options, rng, number)
        for _ in range(runs):
            race(tessera, source, work, rng)
        interrupt_late(tessera, source, work, rng, 50 * runs)
    finally:
        shutil.rmtree(work)
    print(f"{in_time} of {runs * len(KINDS)} came in time")


main()
