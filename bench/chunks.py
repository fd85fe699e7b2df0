"""`tessera ls` of a checkpoint with many chunks beside pickle.load of `.metadata`, the least a Python program does.

The peer's time is that of pickle.load alone.
"""
from timing import PEERS, PYTHON, alternate, rate, run


def measure(bench):
    whole, half = ((2_000, 1_024) if bench.small else (1_000_000, 512_000))
    for chunks in (whole, half):
        run([PYTHON, PEERS / "make_chunks.py", "make", bench.work / str(chunks), chunks])
    jobs = {
        f"tessera ls, {whole} chunks": ([bench.command, "ls", bench.work / str(whole)], None, None),
        f"tessera ls, {half} chunks": ([bench.command, "ls", bench.work / str(half)], None, None),
        f"pickle.load, {half} chunks": ([PYTHON, PEERS / "make_chunks.py", "load", bench.work / str(half)], None, None),
    }
    rate("metadata of many chunks, seconds", alternate(jobs, bench.rounds), f"pickle.load, {half} chunks")
