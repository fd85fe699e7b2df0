"""FSDP1's functions on optimizer state beside PyTorch's: 2 ranks, one thread each."""
import os
import re
import statistics

from timing import PEERS, run, torchrun

MODELS = {"wide": "10 units of 1,000,000 elements", "small": "100 units of 100 parameters of 64 elements"}
LINE = re.compile(r"full_save ([\d.]+) full_load ([\d.]+) sharded_save ([\d.]+) sharded_load ([\d.]+) "
                  r"above_mb (\d+) peak_mb (\d+)")
CALLS = ["full, save", "full, load", "sharded, save", "sharded, load"]


def measure(bench):
    env = dict(os.environ, OMP_NUM_THREADS="1")
    for model, title in MODELS.items():
        for kind in ("flat", "original"):
            # PyTorch takes half a minute for a round of the small one.
            inner = "1" if model == "small" else "3"
            jobs = {"tessera": torchrun(2, bench.build / "bench/bench_optim_state", model, kind, inner, python=False),
                    "torch": torchrun(2, PEERS / "optim_state.py", model, kind, inner)}
            rows = {name: [] for name in jobs}
            for round_ in range(bench.rounds + 1):
                for name, how in jobs.items():
                    _, _, output = run(how, env=env)
                    # A process touches its memory for the first time before its rounds, which it does not print, and in the first.
                    if round_ > 0:
                        rows[name].append([float(x) for x in LINE.findall(output)[-1]])
            show(f"optimizer state of {title}, {kind} parameters, 2 ranks", rows)


def show(title, rows):
    print(f"\n{title}\n{'':16} {'tessera ms':>10} {'torch ms':>10} {'ratio':>7}")
    for i, call in enumerate(CALLS):
        ours, theirs = (1000 * statistics.median(row[i] for row in rows[name]) for name in ("tessera", "torch"))
        print(f"{call:16} {ours:10.1f} {theirs:10.1f} {ours / theirs:7.3f}")
    for i, what in ((4, "above rest, MB"), (5, "peak, MB")):
        print(f"{what:16} {max(row[i] for row in rows['tessera']):10.0f} {max(row[i] for row in rows['torch']):10.0f}",
              flush=True)
