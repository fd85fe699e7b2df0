"""OLMo's four checkpointers on a live model: ours beside ai2-olmo's own, and the disk itself.

2 ranks, one thread each, a model of 24 M parameters in 13 units of FSDP1, 288 MB with AdamW. Ours is durable, OLMo's is not.
The program of ours takes the same arguments as the peer, and prints the same.
"""
import concurrent.futures
import json
import os
import statistics
import time

from timing import PEERS, PYTHON, ROOT, fresh, run, size_of, torchrun

PARITY = ROOT / "tests/parity"
KINDS = ["torch_new", "torch_legacy", "local", "full"]
RANKS = 2
BLOCK = 1 << 20
# The names that programs print of a process, and titles.
COLUMNS = {"save_s": "save, s", "restore_s": "restore, s", "save_above_mb": "save, MB above rest",
           "restore_above_mb": "restore, MB above rest"}
MAKE_CONFIG = """
import sys
sys.path.insert(0, sys.argv[1])
import olmo_fsdp
layers, width, vocabulary = map(int, sys.argv[3:])
olmo_fsdp.write_config(sys.argv[2], width=width, layers=layers, vocabulary=vocabulary)
"""


def write_raw(path, size):
    """The bytes in blocks, then fsync."""
    block = bytes(BLOCK)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for at in range(0, size, BLOCK):
        os.write(file, block[:size - at])
    os.fsync(file)
    os.close(file)


def raw_seconds(directory, size):
    """As many bytes by as many writers, each into a file of its own."""
    fresh(directory)
    directory.mkdir()
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(lambda rank: write_raw(directory / str(rank), size // RANKS), range(RANKS)))
    return time.perf_counter() - begin


def measure(bench):
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(PARITY / "olmo_stubs"), PYTHONWARNINGS="ignore")
    config = bench.work / "config.yaml"
    shape = ["2", "64", "500"] if bench.small else ["12", "384", "8192"]
    run([PYTHON, "-c", MAKE_CONFIG, PARITY, config, *shape], env=env)
    programs = {"tessera": (bench.build / "bench/bench_checkpointers", False), "ai2-olmo": (PEERS / "checkpointers.py", True)}
    for kind in KINDS:
        rows, raw = {name: [] for name in programs}, []
        for round_ in range(bench.rounds + 1):
            for name, (program, python) in programs.items():
                out = bench.work / name
                fresh(out)
                words = ["--kind", kind, "--config", config, "--save", out, "--restore", out]
                words += [] if python else ["--proofs", "5"]
                _, _, output = run(torchrun(RANKS, program, *words, python=python), env=env)
                if round_ > 0:
                    rows[name].append(json.loads(output.strip().rsplit("\n", 1)[-1]))
            size = size_of(bench.work / "tessera")
            seconds = raw_seconds(bench.work / "raw", size)
            if round_ > 0:
                raw.append(seconds)
        show(kind, size, rows, raw)


def show(kind, size, rows, raw):
    print(f"\n{kind}, {size / 1e6:.0f} MB, {RANKS} ranks\n{'':24} {'tessera':>9} {'ai2-olmo':>9} {'ratio':>7}")
    for key, title in COLUMNS.items():
        is_time = key.endswith("_s")
        # The most counts of memory, the median of times.
        ours, theirs = ((statistics.median if is_time else max)(row[key] for row in rows[name]) for name in ("tessera", "ai2-olmo"))
        print(f"{title:24} {ours:9.2f} {theirs:9.2f}" + (f" {theirs / ours:6.1f}x" if is_time else ""))
    save, disk = statistics.median(row["save_s"] for row in rows["tessera"]), statistics.median(raw)
    proof = statistics.median(row["proof_share"] for row in rows["tessera"])
    print(f"{'digests in a restore, %':24} {100 * proof:9.1f}")
    print(f"{'raw writes and fsync, s':24} {disk:9.2f}\nours saves in {save / disk:.2f} times a raw write", flush=True)
