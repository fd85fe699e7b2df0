"""Statistics of 2 GB in the page cache, beside reading and checking the same bytes, and beside four numbers of torch."""
from timing import PEERS, PYTHON, alternate, rate, run, table


def measure(bench):
    for dtype in ("float32", "bfloat16"):
        plain, sealed = bench.work / f"{dtype}.safetensors", bench.work / f"{dtype}.sealed.safetensors"
        run([PYTHON, PEERS / "stats.py", "make", plain, 20 if bench.small else 2000, dtype])
        run(["cp", plain, sealed])
        run([bench.command, "seal", sealed, "--quiet"])
        rows = alternate({
            "tessera stats": ([bench.command, "stats", plain, "--quiet"], None, None),
            "tessera verify": ([bench.command, "verify", plain, "--quiet"], None, None),
            "tessera stats, with digests": ([bench.command, "stats", sealed, "--quiet"], None, None),
            "tessera verify, with digests": ([bench.command, "verify", sealed, "--quiet"], None, None),
            "torch: isnan, isinf, aminmax, norm": ([PYTHON, PEERS / "stats.py", "measure", plain], None, None),
        }, bench.rounds)
        title = f"numbers of a .safetensors of {plain.stat().st_size / 1e9:.2f} GB of {dtype}, seconds"
        table(title, rows, "tessera verify, with digests")
        rate(title, rows, "torch: isnan, isinf, aminmax, norm")
        for path in (plain, sealed):
            path.unlink()
