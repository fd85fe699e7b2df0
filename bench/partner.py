"""What a copy of each snapshot with a partner costs: its rate by that of the wire, and the steps beside it by those alone.

Two ranks on two hosts, which are namespaces here (needs root). They train over a wire of their own; copies go over one of 1 Gbit/s.
"""
import os
import re
import statistics
import subprocess
import sys
import threading
import time

from restart import SMALL
from timing import ROOT, fresh

sys.path.insert(0, str(ROOT / "tests/multirank"))
import hosts  # noqa: E402

hosts.LIFE = "900"
MODEL = {"dim": 512, "layers": 14, "heads": 8, "seq": 64, "batch": 8}  # 0.27 GB of each rank, with AdamW's state
EVERY, SAVES = 16, 5  # steps between saves; the first one makes the memory, and is not counted
BESIDE = 5  # steps that follow a save: a copy takes about as long
BITS = 1_000_000_000
NETWORK = "10.18.0"  # of the slow wire
SEND = "import socket,sys\ns=socket.create_connection((sys.argv[1],29600))\nb=bytes(1<<20)\nfor _ in range(int(sys.argv[2])): s.sendall(b)\n" \
       "s.shutdown(1)\ns.recv(1)"
RECEIVE = "import socket,time\nl=socket.create_server(('',29600))\nprint('ready',flush=True)\ns,_=l.accept()\nbegin=time.perf_counter()\nn=0\n" \
          "while b:=s.recv(1<<20): n+=len(b)\nprint(n/(time.perf_counter()-begin))"


def join_slowly(pair):
    hosts.join(pair, "slow", NETWORK)
    for host in pair:
        hosts.run(*host.inside("tc", "qdisc", "add", "dev", "slow", "root", "tbf", "rate", f"{BITS}bit", "burst", "256kb", "latency", "50ms"))


def wire_rate(pair, megabytes):
    """Bytes a second, both ways at once, as partners copy: of the slower one."""
    ends = [host.start(sys.executable, "-c", RECEIVE, env=os.environ) for host in pair]
    for receiver in ends:
        assert receiver.stdout.readline() == "ready\n"
    senders = [pair[1 - number].start(sys.executable, "-c", SEND, f"{NETWORK}.{number + 1}", str(megabytes), env=os.environ) for number in (0, 1)]
    rates = [float(receiver.communicate(timeout=300)[0]) for receiver in ends]
    for sender in senders:
        sender.communicate(timeout=60)
    return min(rates)


class Training:
    """Its lines and steps with the time when they came."""

    def __init__(self, bench, pair, work, wire):
        self.metrics, self.copies, self.lines, self.rows = work / "metrics.csv", [], [], []
        text = work / "text"
        text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 2000)
        flags = [word for key, value in (SMALL if bench.small else MODEL).items() for word in (f"--{key}", str(value))]
        command = [bench.build / "examples/train_gpt/train_gpt", "--data", text, "--save", work / "run", "--save-every", EVERY, "--keep", 1,
                   "--steps", EVERY * (SAVES + 1) - 1, "--metrics", self.metrics, "--async", "process", "--keep-in-memory", 600, "--threads", 1,
                   "--sample", 0, *flags, *(["--partner"] if wire else [])]
        own = {**os.environ, "TESSERA_COMMAND": str(bench.command), "TESSERA_ARENA_DIR": str(work / "seen/arenas"), "TESSERA_LOG": "info",
               "TESSERA_ARENA_IFNAME": wire or "wire"}
        own.pop("TESSERA_SAME_HOST", None)
        self.ranks = [pair[rank].start(*map(str, command), env=hosts.environment(pair, rank, 1, own)) for rank in (0, 1)]
        readers = [threading.Thread(target=self.read, args=(pipe,)) for rank in self.ranks for pipe in (rank.stdout, rank.stderr)]
        for reader in readers:
            reader.start()
        self.watch()
        for reader in readers:
            reader.join()
        if any(rank.wait() for rank in self.ranks):
            raise SystemExit("\n".join(self.lines[-40:]))

    def read(self, pipe):
        for line in pipe:
            self.lines.append(line.rstrip())
            found = re.search(r"has a copy of .* of .*: ([\d.]+) MB in ([\d.]+) s", line)
            if found:
                self.copies.append((float(found[2]), 1e6 * float(found[1]) / float(found[2])))

    def watch(self):
        while any(rank.poll() is None for rank in self.ranks):
            count = self.metrics.read_text().count("\n") - 1 if self.metrics.exists() else 0
            if count > len(self.rows):
                self.rows.append(time.monotonic())
            time.sleep(0.002)

    def steps(self, beside):
        """Seconds of those that follow a save, its call included, or of the others."""
        return [end - begin for step, (begin, end) in enumerate(zip(self.rows, self.rows[1:]), 1)
                if step >= 2 * EVERY and (step % EVERY < BESIDE) == beside]


def measure(bench):
    obstacle = hosts.obstacle()
    if obstacle:
        return print(f"partner is left out: {obstacle}")
    rows = {}
    for round_ in range(bench.rounds):
        for name, wire in (("no partner", ""), ("1 Gbit/s apart from the training's", "slow")):
            work = bench.work / "partner"
            fresh(work)
            for part in ("disk-0", "disk-1", "seen"):
                (work / part).mkdir(parents=True)
            with hosts.two_hosts([str(work / "disk-0"), str(work / "disk-1")], str(work / "seen")) as pair:
                join_slowly(pair)
                rate = wire_rate(pair, 8 if bench.small else 400)
                training = Training(bench, pair, work, wire)
            row = rows.setdefault(name, {"wire": [], "copy": [], "seconds": [], "alone": [], "beside": []})
            row["wire"].append(rate)
            row["copy"] += [rate for _, rate in training.copies[2:]]
            row["seconds"] += [seconds for seconds, _ in training.copies[2:]]
            row["alone"] += training.steps(beside=False)
            row["beside"] += training.steps(beside=True)
            fresh(work)
    print(f"\ncopies with a partner, 2 ranks on 2 hosts of this machine, {os.cpu_count()} cores, medians; a step beside: a mean of the "
          f"{BESIDE} behind a save\n{'':36} {'wire MB/s':>10} {'copy MB/s':>10} {'ratio':>6} {'copy s':>7} {'step ms':>8} {'beside ms':>10}")
    for name, row in rows.items():
        wire, copy, seconds, alone = (statistics.median(row[key] or [float("nan")]) for key in ("wire", "copy", "seconds", "alone"))
        print(f"{name:36} {wire / 1e6:10.1f} {copy / 1e6:10.1f} {copy / wire:6.2f} {seconds:7.2f} {1000 * alone:8.0f} "
              f"{1000 * statistics.mean(row['beside']):10.0f}", flush=True)
    beside = [statistics.mean(row["beside"]) for row in rows.values()]
    print(f"steps beside a copy by those beside a save alone: {beside[1] / beside[0]:.2f}")
