"""OLMo's legacy checkpoints into model.pt and optim.pt. ai2-olmo takes a minute for 64 ranks, eight for 256.

The peer's time is that of its unsharding and saving alone, without imports; Tessera's is the whole process.
"""
import json
import os
import statistics

from timing import PEERS, PYTHON, ROOT, alternate, fresh, rate, run, size_of, torchrun

STUBS = ROOT / "tests/parity/olmo_stubs"


def jobs_for(bench, kind, source, most):
    ours, theirs = bench.work / "ours", bench.work / "theirs"
    os.environ["PYTHONPATH"] = str(STUBS)  # ai2-olmo without what its checkpoint code does not need
    return {
        "tessera unshard": ([bench.command, "unshard", source, ours, "--quiet"], ours, None),
        "ai2-olmo unshard and save": ([PYTHON, PEERS / "unshard_olmo.py", kind, source, theirs], theirs, most),
    }


def measure(bench, ranks, most):
    """`most`: rounds of the peer."""
    if bench.small:
        ranks //= 16
    source = bench.work / f"legacy-{ranks}"
    run([PYTHON, PEERS / "make_legacy.py", ranks, source, *bench.shape])
    rows = alternate(jobs_for(bench, "legacy", source, most), bench.rounds)
    title = f"OLMo legacy, {ranks} ranks, {size_of(source) / 1e9:.2f} GB, to full, seconds"
    rate(f"{title} (peer: at most {most} rounds)", rows, "ai2-olmo unshard and save")
    fresh(source)


def live(bench, ranks):
    """Restored by 2 ranks into a model, and unsharded through the API: beside `tessera unshard`. Seconds, in turns."""
    if bench.small:
        ranks //= 16
    source, out, program = bench.work / f"legacy-{ranks}", bench.work / "ours", bench.build / "bench/bench_legacy"
    run([PYTHON, PEERS / "make_legacy.py", ranks, source, *bench.shape])
    env = dict(os.environ, OMP_NUM_THREADS="1")
    jobs = {
        "tessera unshard": [bench.command, "unshard", source, out, "--quiet"],
        "unshard_checkpoint": [program, "unshard", source, out],
        "restored by 2 ranks": torchrun(2, program, "restore", source, python=False),
    }
    rows = {name: [] for name in jobs}
    for round_ in range(bench.rounds + 1):
        for name, command in jobs.items():
            fresh(out)
            seconds, _, output = run(command, env=env)
            if round_ > 0:
                # What a program of libtorch takes to start is not of interest.
                rows[name].append(json.loads(output)["seconds"] if output else seconds)
    base = statistics.median(rows["tessera unshard"])
    print(f"\nOLMo legacy, {ranks} ranks, {size_of(source) / 1e9:.2f} GB: median s, min, max, ratio")
    for name, seconds in rows.items():
        median = statistics.median(seconds)
        print(f"{name:24} {median:6.2f} {min(seconds):6.2f} {max(seconds):6.2f} {median / base:6.2f}", flush=True)
    fresh(source)
