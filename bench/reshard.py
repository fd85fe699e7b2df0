"""A DCP checkpoint of 2 ranks for 3. The peer's time is that of its load and save alone, without starting ranks."""
import json
import os
import re

from timing import PEERS, fresh, rate, run, size_of, torchrun


def measure(bench):
    source, ours, theirs = (bench.work / name for name in ("two", "three", "peer"))
    env = dict(os.environ, OMP_NUM_THREADS="1", BENCH_SHAPE=",".join(bench.shape))
    run(torchrun(2, PEERS / "dcp_save_load.py", source, "1"), env=env)
    rows, read = {"tessera reshard": ([], []), "dcp.load and dcp.save": ([], [])}, 0.0
    for round_ in range(bench.rounds + 1):
        fresh(ours)
        seconds, peak, output = run([bench.command, "reshard", source, ours, "--ranks", "3", "--quiet", "--json"])
        read = json.loads(output)["read_per_needed"]
        fresh(theirs)
        _, _, text = run(torchrun(3, PEERS / "dcp_reshard.py", source, theirs), env=env)
        found = re.findall(r"seconds ([\d.]+) peak_mb (\d+)", text)[-1]
        if round_ > 0:
            for name, (time, memory) in zip(rows, ((seconds, peak), (float(found[0]), int(found[1])))):
                rows[name][0].append(time)
                rows[name][1].append(memory)
    merged = {name: (seconds, max(peaks)) for name, (seconds, peaks) in rows.items()}
    rate(f"DCP of 2 ranks for 3, {size_of(source) / 1e9:.2f} GB, seconds", merged, "dcp.load and dcp.save")
    print(f"tessera read {read:.2f} bytes for each that it needed")
