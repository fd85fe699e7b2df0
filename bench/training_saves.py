"""What a save costs a training, with its call: ours in every way, beside PyTorch's."""
import os
import re
import statistics

from timing import PEERS, PYTHON, fresh, run, torchrun

SHAPES = {1: "1024,24,128", 2: "1024,32,128"}
OURS = ("none", "save", "thread", "overlap", "process", "process-overlap")
THEIRS = ("none", "save", "async")


def jobs_of(bench, ranks, work):
    shape = "64,4,8" if bench.small else SHAPES[ranks]
    program = bench.build / "bench/bench_training_saves"
    for way in OURS:
        how = [program, "--way", way, "--dir", work, "--shape", shape, "--command", bench.command, "--saves", "3"]
        yield f"tessera {way}", how if ranks == 1 else torchrun(ranks, *how, python=False)
    for way in THEIRS:
        how = [PEERS / "training_saves.py", way, work, shape, "3"]
        yield f"torch {way}", [PYTHON, *how] if ranks == 1 else torchrun(ranks, *how)


def measure(bench):
    for ranks in SHAPES:
        work = bench.work / "training-saves"
        rows = {}
        for round_ in range(bench.rounds):
            for name, how in jobs_of(bench, ranks, work):
                fresh(work)
                work.mkdir()
                _, peak, output = run(how, env=dict(os.environ, OMP_NUM_THREADS="1"))
                found = re.findall(r"call (\S+) cost (\S+) step (\S+) steps \d+ alone (\S+)", output)
                row = rows.setdefault(name, ([], [], [], [], [0]))
                for into, values in zip(row, zip(*found)):
                    into.extend(map(float, values))
                row[4][0] = max(row[4][0], peak)
        fresh(work)
        print(f"\nwhat a save costs a training of {ranks} rank(s) on {os.cpu_count()} cores, medians\n"
              f"{'':26} {'call ms':>9} {'cost ms':>9} {'step beside':>12} {'step ms':>8} {'peak MB':>8}")
        for name, (*columns, peak) in rows.items():
            call, cost, beside, alone = map(statistics.median, columns)
            print(f"{name:26} {call:9.1f} {cost:9.1f} {beside:12.2f} {alone:8.1f} {peak[0]:8}", flush=True)
