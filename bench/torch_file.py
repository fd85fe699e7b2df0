"""A .pt written and read, and what checking its CRC-32s costs. Tessera's files are durable, torch.save's are not."""
import re

from timing import PEERS, PYTHON, fresh, rate, run, size_of


def measure(bench):
    source, unchecked, ours, theirs = (bench.work / f"{name}.pt" for name in ("source", "unchecked", "ours", "theirs"))
    make = [PYTHON, PEERS / "torch_file.py", "make"]
    run([*make, source, 20 if bench.small else 2000])
    run([*make, unchecked, 20 if bench.small else 2000, "unchecked"])
    commands = {
        "tessera": [bench.build / "bench/bench_torch_file", source, ours],
        "tessera, no CRC-32s in the file": [bench.build / "bench/bench_torch_file", unchecked, ours],
        "torch": [PYTHON, PEERS / "torch_file.py", "measure", source, theirs],
    }
    found = {name: [] for name in commands}
    for round_ in range(bench.rounds + 1):
        for name, command in commands.items():
            fresh(theirs if name == "torch" else ours)
            _, peak, output = run(command)
            times = {key: float(number) for key, number in re.findall(r"(\w+) ([\d.]+)", output)}
            if round_ > 0:
                found[name].append((times, peak))
    for what in ("read", "write", "write_durable"):
        rows = {name: ([times[what] for times, _ in each], max(peak for _, peak in each))
                for name, each in found.items()}
        rate(f"{what}, a .pt of {size_of(source) / 1e9:.2f} GB, seconds", rows, "torch")
