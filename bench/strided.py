"""Tensors of 256 MB whose elements are not in row-major order, from .pt to .safetensors."""
from timing import PEERS, PYTHON, fresh, run, table

LAYOUTS = ("contiguous", "transposed", "channels_last", "every_other", "expanded", "permuted")


def measure(build, work, rounds):
    sources = {layout: work / f"{layout}.pt" for layout in LAYOUTS}
    run([PYTHON, PEERS / "strided.py", "make", work])
    command, out, peer = build / "src/cli/tessera", work / "strided.safetensors", work / "strided-peer.safetensors"
    jobs = {}
    for layout, source in sources.items():
        jobs[f"tessera convert, {layout}"] = ([command, "convert", source, out, "--quiet"], out)
        jobs[f"torch.load and save_file, {layout}"] = ([PYTHON, PEERS / "strided.py", "convert", source, peer], peer)
    rows = {name: ([], []) for name in jobs}
    for round_ in range(rounds + 1):
        for name, (how, target) in jobs.items():
            fresh(target)
            seconds, peak, _ = run(how)
            if round_ > 0:
                rows[name][0].append(seconds)
                rows[name][1].append(peak)
    merged = {name: (seconds, max(peaks)) for name, (seconds, peaks) in rows.items()}
    table("seconds to convert one tensor of 256 MB (tessera's result is durable; the peer's time has its imports)", merged,
          "tessera convert, contiguous")
