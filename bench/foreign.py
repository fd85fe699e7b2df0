"""Checkpoints of other trainers into files that every tool reads, beside the trainers' own tools.

TESSERA_DEEPSPEED names a directory with deepspeed 0.19.8:
    DS_BUILD_OPS=0 .venv/bin/pip install --no-deps --no-build-isolation -t DIRECTORY deepspeed==0.19.8     and what it imports
"""
import os

from timing import PEERS, PYTHON, fresh, run, size_of, table, torchrun


def measure(bench):
    package = os.environ.get("TESSERA_DEEPSPEED")
    if package is None:
        return print("foreign is left out: TESSERA_DEEPSPEED names no directory with deepspeed")
    env = {**os.environ, "PYTHONPATH": package, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for stage in (2, 3):
        source, ours, dcp, theirs = (bench.work / name for name in (f"zero{stage}", "ours.safetensors", "ours-dcp", "theirs"))
        run(torchrun(2, PEERS / "make_deepspeed.py", source, stage, *bench.shape), env=env)
        jobs = {
            "zero_to_fp32.py": ([PYTHON, "-W", "ignore", source / "zero_to_fp32.py", "--safe_serialization", source, theirs], theirs),
            "tessera convert, the model": ([bench.command, "convert", source, ours, "--only", "model", "--quiet"], ours),
            "tessera convert, all to DCP": ([bench.command, "convert", source, dcp, "--to", "dcp", "--quiet"], dcp),
            "cp -r and sync -f": (["sh", "-c", f"cp -r {source} {theirs} && sync -f {theirs}"], theirs),
        }
        rows = {name: ([], []) for name in jobs}
        for round_ in range(bench.rounds + 1):
            for name, (how, out) in jobs.items():
                fresh(out)
                seconds, peak, _ = run(how, env=env)
                fresh(out)
                if round_ > 0:
                    rows[name][0].append(seconds)
                    rows[name][1].append(peak)
        merged = {name: (seconds, max(peaks)) for name, (seconds, peaks) in rows.items()}
        table(f"ZeRO-{stage} of 2 ranks, {size_of(source) / 1e9:.2f} GB, seconds (tessera's results are durable)", merged, "zero_to_fp32.py")
        fresh(source)
