"""A thousand small reads from an open checkpoint of 100,000 tensors."""
import re

from timing import PEERS, PYTHON, rate, run


def measure(bench):
    program = bench.build / "bench/bench_reads"
    kinds = {"DCP": bench.work / "dcp", ".safetensors": bench.work / "m.safetensors", ".pt": bench.work / "m.pt"}
    for path in kinds.values():
        run([program, "make", path, 1000 if bench.small else 100_000])
    commands = {f"tessera, {kind}": [program, "measure", path] for kind, path in kinds.items()}
    commands["safetensors, .safetensors"] = [PYTHON, PEERS / "reads.py", kinds[".safetensors"]]
    found = {name: [] for name in commands}
    for round_ in range(bench.rounds + 1):
        for name, command in commands.items():
            _, peak, output = run(command)
            if round_ > 0:
                times = {key: 1000 * float(number) for key, number in re.findall(r"(\w+) ([\d.]+)", output)}
                found[name].append((times, peak))
    for what, title in (("open", "opening 100,000 tensors of 8 x 8"), ("first", "the first 1,000 reads"),
                        ("second", "1,000 reads more")):
        rows = {name: ([times[what] for times, _ in each], max(peak for _, peak in each)) for name, each in found.items()}
        rate(f"{title}, ms", rows, "safetensors, .safetensors")
