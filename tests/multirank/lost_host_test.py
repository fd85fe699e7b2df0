#!/usr/bin/env python3
"""A training on two hosts, one of which is lost with all that it had in memory. Its partner has a copy: the training goes on from
memory, on a new host in its place, though nothing of the run is on a disk any more.

    lost_host_test.py TRAIN_GPT TESSERA

Exits with 77 and says why where hosts cannot be made (hosts.py).
"""
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
import unittest

from hosts import PATIENCE, SKIPPED, Host, Switch, environment, losses, obstacle, run

TRAIN_GPT = TESSERA = None
STEPS = 120
EVERY = 40  # so that a host is lost between two saves
MODEL = "--dim 40 --layers 2 --heads 4 --seq 31 --batch 6 --threads 1".split()
RANKS = 2  # of each host


class LostHosts(unittest.TestCase):
    def setUp(self):
        work = tempfile.TemporaryDirectory(prefix="tessera-lost-host-")
        self.addCleanup(work.cleanup)
        self.work = pathlib.Path(work.name)
        (self.work / "seen").mkdir()
        (self.work / "text.txt").write_text("".join(chr(97 + i * i % 23) for i in range(5000)), encoding="ascii")
        self.number = 0
        self.first = self.made(Switch)

    def made(self, kind):
        disk = self.work / f"disk-{self.number}"
        disk.mkdir()
        host = kind(self.number, str(disk), str(self.work / "seen"))
        self.number += 1
        self.addCleanup(host.end)
        return host

    def joined(self):
        host = self.made(Host)
        self.first.join(host)
        return host

    def environment(self):
        own = {name: value for name, value in os.environ.items() if name != "TESSERA_SAME_HOST"}
        # On the disk that each host has for itself.
        return {**own, "TESSERA_ARENA_DIR": str(self.work / "seen" / "arenas"), "TESSERA_COMMAND": TESSERA}

    def train(self, hosts, *more, metrics):
        command = [TRAIN_GPT, *MODEL, "--steps", str(STEPS), "--data", str(self.work / "text.txt"), "--metrics", str(self.work / metrics),
                   *more]
        return [hosts[rank // RANKS].start(*command, env=environment(hosts, rank, RANKS, self.environment()))
                for rank in range(RANKS * len(hosts))]

    def snapshots(self, host):
        """What is in memory there, by step: of how many ranks."""
        said = run("env", *(f"{name}={value}" for name, value in self.environment().items() if name.startswith("TESS")),
                   *host.inside(TESSERA, "ls", "arena://", "--json"))
        return {int(re.search("step([0-9]+)$", row["checkpoint"])[1]): row["ranks_here"] for row in json.loads(said)}

    def await_copies(self, host, step):
        end = time.monotonic() + PATIENCE
        while self.snapshots(host).get(step) != 2 * RANKS:
            self.assertLess(time.monotonic(), end, "the partner has no copy")
            time.sleep(0.02)

    def test_goes_on_from_its_partners_memory(self):
        saving = ["--save", str(self.work / "run"), "--save-every", str(EVERY), "--async", "process", "--keep-in-memory", "60", "--partner"]
        hosts = [self.first, self.joined()]
        for process in self.train(hosts, metrics="whole.csv"):
            _, errors = process.communicate(timeout=PATIENCE)
            self.assertEqual(process.returncode, 0, errors)
        expected = losses(self.work / "whole.csv")
        started = self.train(hosts, *saving, metrics="lost.csv")
        self.await_copies(hosts[0], EVERY)
        hosts[1].end()
        # Their writer processes are at the save yet, which they cannot end without those of the other host.
        self.assertNotIn(0, [process.wait(PATIENCE) for process in started[:RANKS]])
        for step in (self.work / "run").glob("step*"):
            shutil.rmtree(step)
        hosts[1] = self.joined()
        resumed = self.train(hosts, *saving, "--resume", "latest", metrics="resumed.csv")
        said = [process.communicate(timeout=PATIENCE) for process in resumed]
        self.assertEqual([process.returncode for process in resumed], [0] * len(resumed), said)
        self.assertIn(f"resumed from arena://{self.work}/run/step{EVERY}#", said[0][0])
        self.assertEqual(self.snapshots(hosts[0]), {})
        self.assertEqual(losses(self.work / "resumed.csv"), {step: expected[step] for step in range(EVERY + 1, STEPS + 1)})


if __name__ == "__main__":
    TRAIN_GPT, TESSERA = map(os.path.abspath, sys.argv[1:3])
    if reason := obstacle():
        print(f"skipped: {reason}")
        sys.exit(SKIPPED)
    unittest.main(argv=sys.argv[:1])
