"""A training step under every way of sharding, beside PyTorch's: 2 ranks, one thread each."""
import os
import re
import statistics

from timing import PEERS, PYTHON, run, torchrun

MODELS = {"A": "256,8,8,128,4,256", "B": "64,8,4,32,2,256"}
KINDS = ["fsdp2", "fsdp1", "ddp"]


def jobs_of(bench, config):
    dim, layers, heads, seq, batch, _ = config.split(",")
    data = bench.work / "text"
    data.write_bytes(bytes(range(32, 127)) * 4000)
    train = bench.build / "examples/train_gpt/train_gpt"
    flags = ["--data", data, "--dim", dim, "--layers", layers, "--heads", heads, "--seq", seq, "--threads", "1",
             "--bench", "20"]
    alone = [train, *flags, "--batch", batch, "--sharding", "none"]
    # The second shows what it costs that both cores work, without a word between them.
    jobs = {"tessera, 1 rank": alone, "tessera, twice 1 rank": ["sh", "-c", '"$@" & "$@"; wait', "sh", *alone],
            "torch, 1 rank": [PYTHON, PEERS / "train_step.py", "single"]}
    for kind in KINDS:
        ours = torchrun(2, train, *flags, "--batch", 2 * int(batch), "--sharding", kind, python=False)
        jobs[f"tessera {kind}"] = ours
        jobs[f"tessera {kind}, Gloo"] = ["env", "TESSERA_SAME_HOST=0", *ours]
        jobs[f"torch {kind}"] = torchrun(2, PEERS / "train_step.py", kind)
    return jobs


def peer_of(name):
    return "torch, 1 rank" if name.endswith("1 rank") else "torch " + name.split()[1].strip(",")


def show(title, rows):
    print(f"\n{title}\n{'':24} {'median ms':>9} {'min':>8} {'max':>8} {'against torch':>14} {'CPU ms':>8} {'peak MB':>8}")
    for name, (wall, cpu, peak) in rows.items():
        median = statistics.median(wall)
        ratio = median / statistics.median(rows[peer_of(name)][0])
        print(f"{name:24} {median:9.2f} {min(wall):8.2f} {max(wall):8.2f} {ratio:14.2f} {statistics.median(cpu):8.2f} "
              f"{max(peak):8}", flush=True)


def measure(bench):
    for model, config in MODELS.items():
        jobs = jobs_of(bench, config)
        rows = {name: ([], [], []) for name in jobs}
        for round_ in range(bench.rounds + 1):
            for name, how in jobs.items():
                _, peak, output = run(how, env=dict(os.environ, OMP_NUM_THREADS="1", CFG=config))
                if round_ > 0:
                    rows[name][0].append(float(re.search(r"^ms/step ([\d.]+)", output, re.M)[1]))
                    rows[name][1].append(float(re.search(r"^cpu ms/step ([\d.]+)", output, re.M)[1]))
                    rows[name][2].append(peak)
        show(f"one training step of model {model} (dim,layers,heads,seq,batch a rank,vocabulary = {config})", rows)
