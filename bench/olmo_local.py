"""OLMo's local checkpoints (flat parameters) into model.pt and optim.pt."""
from olmo_legacy import jobs_for
from timing import PEERS, PYTHON, alternate, rate, run, size_of


def measure(bench):
    ranks = 4 if bench.small else 64
    source = bench.work / "local"
    run([PYTHON, PEERS / "make_local.py", ranks, source, *bench.shape])
    rows = alternate(jobs_for(bench, "local", source, None), bench.rounds)
    rate(f"OLMo local, {ranks} ranks, {size_of(source) / 1e9:.2f} GB, to full, seconds", rows,
         "ai2-olmo unshard and save")
