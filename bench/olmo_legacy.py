"""OLMo's legacy checkpoints into model.pt and optim.pt. ai2-olmo takes a minute for 64 ranks, eight for 256.

The peer's time is that of its unsharding and saving alone, without imports; Tessera's is the whole process.
"""
import os

from timing import PEERS, PYTHON, ROOT, alternate, fresh, rate, run, size_of

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
