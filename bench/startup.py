"""Start-up of every command, beside Python's converter that prints its help."""
from timing import PYTHON, ROOT, run, table

GOLDEN = ROOT / "tests/golden/checkpoints/c2"


def measure(bench):
    lines = [bench.command, "--help"], [bench.command, "--version"], [bench.command, "ls", GOLDEN]
    jobs = {f"tessera {' '.join(map(str, line[1:2]))}": list(line) for line in lines}
    _, _, text = run([bench.command, "--help"])
    for row in text.partition("Subcommands:")[2].partition("Examples:")[0].split("\n"):
        if row.startswith("  ") and row.split():
            jobs[f"tessera {row.split()[0]} --help"] = [bench.command, row.split()[0], "--help"]
    peer = "python -m ...format_utils --help"
    jobs[peer] = [PYTHON, "-W", "ignore", "-m", "torch.distributed.checkpoint.format_utils", "--help"]
    rows = {name: ([], []) for name in jobs}
    for round_ in range(bench.rounds + 1):
        for name, command in jobs.items():
            seconds, peak, _ = run(command)
            if round_ > 0:
                rows[name][0].append(1000 * seconds)
                rows[name][1].append(peak)
    table("start-up, milliseconds", {name: (s, max(p)) for name, (s, p) in rows.items()}, peer)
