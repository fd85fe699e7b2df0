#!/usr/bin/env python3
"""A training on two hosts that share nothing but an object store, a third host: one of them dies, a new one takes its
place, and the training goes on from the store.

    hosts_and_store_test.py TRAIN_GPT TESSERA

`torchrun` starts the ranks of DCP's training. Exits with 77 and says why where hosts cannot be made (hosts.py) or no server is installed.
"""
import os
import pathlib
import re
import sys
import tempfile
import time
import unittest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "tests" / "stores"))
from hosts import PATIENCE, SKIPPED, Host, Switch, environment, losses, obstacle, run  # noqa: E402
from with_server import KEY_ID, PROGRAM, PROGRAMS, REGION, SECRET  # noqa: E402

TRAIN_GPT = TESSERA = None
STEPS = 40
MODEL = "--dim 40 --layers 2 --heads 4 --seq 31 --batch 6 --threads 1 --sharding fsdp1".split()


class HostsAndAStore(unittest.TestCase):
    def setUp(self):
        work = tempfile.TemporaryDirectory(prefix="tessera-hosts-and-store-")
        self.addCleanup(work.cleanup)
        self.work = pathlib.Path(work.name)
        self.seen = self.directory("seen")
        self.hosts = 0
        self.store = Switch(9, self.directory("store"), self.seen)
        self.addCleanup(self.store.end)
        server = self.store.start(
            sys.executable, str(CHECKOUT / "tests" / "stores" / "with_server.py"), "--address", self.store.address, "--",
            "sh", "-c", "echo $AWS_ENDPOINT_URL; sleep 1000", env={**os.environ, "TMPDIR": self.seen})
        self.endpoint = server.stdout.readline().strip()
        self.assertTrue(self.endpoint.startswith("http://"), "the server did not come up")

    def directory(self, name):
        (self.work / name).mkdir()
        return str(self.work / name)

    def host(self):
        """A new one, with a disk of its own that has the text to learn."""
        disk = pathlib.Path(self.directory(f"disk-{self.hosts}"))
        (disk / "text.txt").write_text("".join(chr(97 + i * i % 23) for i in range(5000)), encoding="ascii")
        made = Host(self.hosts, str(disk), self.seen)
        self.hosts += 1
        self.addCleanup(made.end)
        self.store.join(made)
        return made

    def environment(self):
        own = {name: value for name, value in os.environ.items()
               if name != "TESSERA_SAME_HOST" and not name.startswith("AWS_")}
        return {**own, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire", "TMPDIR": self.seen, "TESSERA_ALLOW_HTTP": "1",
                "AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_REGION": REGION, "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}

    def train(self, hosts, run_url, kind, *more, losses="losses.csv"):
        """Starts one rank on each host."""
        command = [TRAIN_GPT, *MODEL, "--steps", str(STEPS), "--data", self.seen + "/text.txt", "--save", run_url,
                   "--save-every", "4", "--checkpointer", kind, "--metrics", f"{self.seen}/{losses}", *more]
        if kind != "dcp":  # torchrun takes seconds to start
            return [host.start(*command, env={**self.environment(), **environment(hosts, rank, 1, {})})
                    for rank, host in enumerate(hosts)]
        return [host.start(str(PROGRAMS / "torchrun"), "--no-python", "--nnodes", str(len(hosts)), "--node-rank", str(rank),
                           "--nproc-per-node", "1", "--master-addr", hosts[0].address, "--master-port", "29500", *command,
                           env=self.environment())
                for rank, host in enumerate(hosts)]

    def ended(self, started):
        """What each said, when all have ended well."""
        said = [process.communicate(timeout=PATIENCE) for process in started]
        self.assertEqual([process.returncode for process in started], [0] * len(started), said)
        return [output for output, _ in said]

    def tessera(self, host, *arguments):
        return run("env", *(f"{name}={value}" for name, value in self.environment().items() if name.startswith(("AWS", "TESS"))),
                   *host.inside(TESSERA, *arguments))

    def losses_of(self, host, name="losses.csv"):
        return losses(self.work / f"disk-{host.name.removeprefix('host-')}" / name)

    def goes_on_after_a_host_died(self, kind):
        hosts = [self.host(), self.host()]
        self.ended(self.train(hosts, f"s3://tessera/whole-{kind}", kind, "--save-every", "0"))
        expected = self.losses_of(hosts[0])
        url = f"s3://tessera/run-{kind}"
        first, _ = self.train(hosts, url, kind, losses="killed.csv")
        self.assertTrue(any(f"saved {url}/step8" in line for line in first.stdout))
        hosts[1].end()
        began = time.monotonic()
        _, errors = first.communicate(timeout=PATIENCE)
        self.assertNotEqual(first.returncode, 0)
        print(f"{kind}: the first host gave up {time.monotonic() - began:.1f} s after the other one had died", flush=True)
        self.assertIn("train_gpt: rank 0: ", errors)
        hosts[1] = self.host()
        said, _ = self.ended(self.train(hosts, url, kind, "--resume", "latest", losses="resumed.csv"))
        found = re.search(f"resumed from {url}/step([0-9]+) after step ([0-9]+)", said)
        self.assertTrue(found and found[1] == found[2], said)
        step = int(found[1])
        self.assertIn(step, range(8, STEPS))
        self.assertEqual(self.losses_of(hosts[0], "resumed.csv"), {at: expected[at] for at in range(step + 1, STEPS + 1)})
        self.tessera(hosts[1], "verify", f"{url}/step{STEPS}")
        self.tessera(hosts[1], "gc", url, "--uploads", "--older-than", "0s", "--delete")
        self.assertIn("0 left", self.tessera(hosts[1], "gc", url, "--uploads", "--older-than", "0s"))

    def test_dcp(self):
        self.goes_on_after_a_host_died("dcp")

    def test_olmos_local_checkpointer(self):
        self.goes_on_after_a_host_died("local")


if __name__ == "__main__":
    TRAIN_GPT, TESSERA = map(os.path.abspath, sys.argv[1:3])
    if reason := obstacle():
        print(f"skipped: {reason}")
        sys.exit(SKIPPED)
    if not (PROGRAMS / PROGRAM["seaweedfs"]).exists():
        print("skipped: no S3 server is installed")
        sys.exit(SKIPPED)
    unittest.main(argv=sys.argv[:1])
