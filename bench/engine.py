"""The engine of saves and loads: its plan, its work beside the disk's, and tiny tensors."""
import json

from timing import PEERS, PYTHON, fresh, rate, run, table


def outputs(commands, rounds, out=None):
    """name -> the JSON lines that a command printed, in turns, without the first round; `out` is removed before each."""
    found = {name: [] for name in commands}
    for round_ in range(rounds + 1):
        for name, command in commands.items():
            if out is not None:
                fresh(out)
            _, _, output = run(command)
            if round_ > 0:
                found[name].append(json.loads(output.strip().splitlines()[-1]))
    return found


def rows_of(found, *keys):
    """What table() takes: seconds are the sum of the values of `keys`."""
    return {
        name: ([sum(line[key] for key in keys) for line in lines], max(line["peak_mib"] for line in lines))
        for name, lines in found.items()
    }


def plan(bench):
    """Plan and proof, `.metadata` encoded and decoded, beside PyTorch's planner and pickle; then 64 times the ranks alone."""
    ranks, tensors = ("16", "10") if bench.small else ("1024", "500")
    program = [bench.build / "bench/bench_plan", "--out", bench.work / "metadata"]
    found = outputs({
        "placed": [*program, "--ranks", ranks, "--tensors", tensors],
        "told": [*program, "--ranks", ranks, "--tensors", tensors, "--irregular"],
        "torch": [PYTHON, PEERS / "plan.py", ranks, tensors],
    }, bench.rounds)
    for what, keys in (("plan and proof", ("plan_s", "validate_s")), ("encoding", ("encode_s",)), ("decoding", ("decode_s",))):
        rate(f"{what}, {ranks} ranks x {tensors} tensors, seconds", rows_of(found, *keys), "torch")
    many = "64" if bench.small else "65536"
    found = outputs({
        "placed": [*program, "--ranks", many, "--tensors", "100"],
        "told": [*program, "--ranks", many, "--tensors", "100", "--irregular"],
    }, bench.rounds)
    for what, keys in (("plan, proof and encoding", ("plan_s", "validate_s", "encode_s")), ("decoding", ("decode_s",))):
        table(f"{what}, {many} ranks x 100 tensors, seconds", rows_of(found, *keys), "placed")
    for name, lines in found.items():
        line = lines[-1]
        print(f"{name}: opened by one rank in {line['open_s']:.2f} s, with a peak of {line['open_peak_mib']} MiB; a catalog of "
              f"{line['catalog_bytes'] / 1e6:.1f} MB; another rank finds its slices in {line['rank_s']:.3f} s and "
              f"{line['rank_bytes'] / 1e6:.1f} MB", flush=True)


def saveload(bench):
    """A save and a load of 2.2 GB beside raw files of as many bytes."""
    size = 20_000_000 if bench.small else 2_200_000_000
    for ranks in (2, 3):
        work = bench.work / "saveload"
        fresh(work)
        _, _, output = run([bench.build / "bench/bench_saveload", "--bytes", size, "--ranks", ranks, "--dir", work,
                            "--rounds", bench.rounds])
        line = json.loads(output)
        print(f"\n{line['bytes'] / 1e9:.2f} GB by {ranks} ranks, medians in seconds: save {line['save_s']:.2f}, raw write and fsync "
              f"{line['raw_write_s']:.2f}, ratio {line['save_s'] / line['raw_write_s']:.2f}; load {line['load_s']:.2f}, raw read "
              f"{line['raw_read_s']:.2f}, ratio {line['load_s'] / line['raw_read_s']:.2f}; peak {line['peak_mib']} MiB", flush=True)
        fresh(work)


def tiny(bench):
    """100,000 tensors of 16 bytes: saved and loaded by one process, converted, resharded."""
    count = 1000 if bench.small else 100_000
    ours, theirs = bench.work / "ours", bench.work / "theirs"
    found = outputs({
        "tessera": [bench.build / "bench/bench_saveload", "--bytes", count * 16, "--tensor-bytes", "16", "--ranks", "1",
                    "--dir", ours, "--rounds", "0"],
        "torch dcp": [PYTHON, PEERS / "tiny.py", theirs, count],
    }, bench.rounds, theirs)
    for what in ("save", "load"):
        rate(f"{what} of {count} tensors of 16 bytes by one process, seconds", rows_of(found, f"{what}_s"), "torch dcp")
    source, out = ours / "checkpoint", bench.work / "out"
    pt, st = bench.work / "out.pt", bench.work / "out.safetensors"
    jobs = {
        "convert to .pt": (["convert", source, pt], pt), "convert to .safetensors": (["convert", source, st], st),
        "convert to dcp": (["convert", source, out, "--to", "dcp"], out), "reshard to 5": (["reshard", source, out, "--ranks", "5"], out),
    }
    rows = {name: ([], []) for name in jobs}
    for round_ in range(bench.rounds + 1):
        for name, (job, made) in jobs.items():
            fresh(made)
            seconds, peak, _ = run([bench.command, *job, "--quiet"])
            if round_ > 0:
                rows[name][0].append(seconds)
                rows[name][1].append(peak)
    table(f"the command on {count} tensors of 16 bytes, seconds", {name: (s, max(p)) for name, (s, p) in rows.items()},
          "convert to dcp")
