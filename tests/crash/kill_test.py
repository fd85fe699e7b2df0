#!/usr/bin/env python3
"""Kills two ranks that save without end, at random times, and looks at what is left.

    kill_test.py SAVE_LOOP CHECK_SAVED RUNS [SEED]

After every kill: the newest step whose `.metadata` is there is whole and of one save, and so is the
directory that is saved over again and again once it has been committed. Half of the runs kill both ranks at once, a quarter
kills one rank first and the other half a second later, the rest one by one in the other order.
"""
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ports import free_port

RANKS = 2


def start(program, directory):
    port = free_port()
    ranks = []
    for rank in range(RANKS):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank),
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        ranks.append(subprocess.Popen([program, directory], env=env, stdout=subprocess.PIPE,
                                      stderr=subprocess.DEVNULL, text=True))
    return ranks


def kill(ranks, how, rng):
    order = list(ranks)
    if how == "last rank first":
        order.reverse()
    for rank in order:
        rank.send_signal(signal.SIGKILL)
        if how != "together":
            time.sleep(rng.uniform(0, 0.5))
    for rank in ranks:
        rank.wait()


def check(checker, checkpoint):
    done = subprocess.run([checker, checkpoint], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"FAILED: {checkpoint.name} after a kill: {done.stderr.strip()} (exit {done.returncode})")
    return int(float(done.stdout))


def one_run(save_loop, checker, rng):
    directory = pathlib.Path(tempfile.mkdtemp(prefix="tessera-kill-"))
    try:
        ranks = start(save_loop, directory)
        first = ranks[0].stdout.readline()  # the first round is complete
        if not first:
            raise SystemExit("FAILED: the ranks ended before they were killed")
        time.sleep(rng.uniform(0, 0.6))
        how = rng.choice(["together", "together", "first rank first", "last rank first"])
        kill(ranks, how, rng)
        finished = [int(line) for line in [first, *ranks[0].stdout] if line.strip().isdigit()]
        steps = sorted((int(re.sub(r"\D", "", p.name)), p) for p in directory.glob("step*"))
        complete = [(number, path) for number, path in steps if (path / ".metadata").exists()]
        newest, path = complete[-1]
        if newest < finished[-1]:
            raise SystemExit(f"FAILED: step {finished[-1]} was reported as saved, step {newest} is the newest")
        if check(checker, path) != newest:
            raise SystemExit(f"FAILED: {path.name} holds another save")
        same = check(checker, directory / "same")
        if same < finished[-1]:
            raise SystemExit(f"FAILED: the directory saved over went back to save {same}")
        torn = steps[-1][0] > newest or any((directory / "same").glob(".*.tmp-*"))
        return how, torn
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main():
    save_loop, checker, runs = sys.argv[1], sys.argv[2], int(sys.argv[3])
    seed = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    rng = random.Random(seed)
    torn = 0
    for index in range(runs):
        how, was_torn = one_run(save_loop, checker, rng)
        torn += was_torn
        print(f"{index + 1}/{runs}: {how}{', in the middle of a save' if was_torn else ''}", flush=True)
    print(f"{runs} kills (seed {seed}), {torn} of them visibly in the middle of a save: "
          "every newest complete checkpoint was whole")


main()
