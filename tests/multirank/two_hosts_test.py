#!/usr/bin/env python3
"""Ranks on two hosts save over a network: on one directory that both hosts have, and on two that only look alike.
OLMo's kinds are saved there as well, and restored by each rank from what its host has. A training goes on there.

    two_hosts_test.py SAVE_AND_LOAD TRAIN_GPT

Exits with 77 and says why where hosts cannot be made (hosts.py): without root or iproute2, and in most containers.
"""
import os
import pathlib
import shutil
import sys
import tempfile
import unittest

from hosts import PATIENCE, SKIPPED, environment, losses, obstacle, two_hosts

SAVE_AND_LOAD = TRAIN_GPT = None
RANKS_OF_HOST = 2


def save_on(hosts, *arguments, apart=()):
    """(exit code, output, errors) of each rank. Those that are `apart` take themselves for another host."""
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    ranks = [hosts[rank // RANKS_OF_HOST].start(*(alone if rank in apart else []), SAVE_AND_LOAD, *arguments,
                                                env=environment(hosts, rank, RANKS_OF_HOST))
             for rank in range(RANKS_OF_HOST * len(hosts))]
    said = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said)]


class TwoHosts(unittest.TestCase):
    def setUp(self):
        work = tempfile.TemporaryDirectory(prefix="tessera-two-hosts-")
        self.addCleanup(work.cleanup)
        self.work = pathlib.Path(work.name)
        self.seen = self.directory("seen")

    def directory(self, name):
        (self.work / name).mkdir()
        return str(self.work / name)

    def save(self, *disks, arguments=(), apart=()):
        with two_hosts(disks, self.seen) as hosts:
            ended = save_on(hosts, self.seen, *arguments, apart=apart)
        self.assertEqual(os.listdir(self.seen), [], "a mount of a host is seen outside")
        return ended

    def test_one_directory_of_both_hosts_has_the_checkpoint_of_all_ranks(self):
        shared = self.directory("shared")
        for code, output, errors in self.save(shared, shared):
            self.assertEqual((code, output), (0, "gloo\nwrites\nloaded\n"), errors)
        names = os.listdir(shared)
        self.assertIn(".metadata", names)
        self.assertEqual({name[:4] for name in names if name.endswith(".distcp")}, {"__0_", "__1_", "__2_", "__3_"})

    def test_directories_that_only_look_alike_are_refused_by_all_ranks_before_they_write(self):
        disks = [self.directory("disk-0"), self.directory("disk-1")]
        for code, output, errors in self.save(*disks):
            self.assertEqual((code, output), (3, "gloo\n"), errors)
            # Without names of the network, libtorch logs that they do not resolve.
            error = "\n".join(line for line in errors.splitlines() if not line.startswith("[W"))
            self.assertTrue(error.startswith("incomplete"), error)
            self.assertIn("2 of 4 ranks do not see what rank 0 on host-0 has put there", error)
            self.assertIn("(rank 2 on host-1, rank 3 on host-1)", error)
        self.assertEqual([os.listdir(disk) for disk in disks], [[], []])

    def files(self, disk, kind):
        root = pathlib.Path(disk) / kind
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def test_hosts_with_disks_of_their_own_save_and_restore_olmos_kinds(self):
        disks = [self.directory("disk-0"), self.directory("disk-1")]
        shared = self.directory("shared")
        for code, output, errors in self.save(shared, shared, arguments=["olmo"]):
            self.assertEqual((code, output), (0, "gloo\nolmo-full saved\nolmo-torch-new saved loaded\n"
                                              "olmo-legacy saved loaded\nolmo-local saved loaded\n"), errors)
        # Rank 3 is in a namespace of its own for processes: it and rank 2 both make a directory, and keep one.
        for code, output, errors in self.save(*disks, arguments=["olmo"], apart=[3]):
            self.assertEqual(code, 0, errors)
            backend, full, torch_new, legacy, local = output.splitlines()
            self.assertEqual((full, legacy, local), ("olmo-full saved", "olmo-legacy saved loaded", "olmo-local saved loaded"))
            self.assertIn("incomplete: 2 of 4 ranks do not see what rank 0 on host-0 has put there", torch_new)
            self.assertIn("(rank 2 on host-1, rank 3 on host-1)", torch_new)
        self.assertEqual([sorted(os.listdir(disk)) for disk in disks],
                         [["olmo-full", "olmo-legacy", "olmo-local"], ["olmo-legacy", "olmo-local"]])
        for kind in ("olmo-full", "olmo-legacy", "olmo-local"):
            of_all = self.files(shared, kind)
            del of_all["tessera-state.json"]  # has the save's id
            found = [self.files(disk, kind) for disk in disks if kind in os.listdir(disk)]
            self.assertEqual(len({files.pop("tessera-state.json") for files in found}), 1)
            for number, files in enumerate(found):
                others = [f"rank{rank}.pt" for rank in range(4) if len(found) == 2 and rank // RANKS_OF_HOST != number]
                self.assertEqual(files, {name: data for name, data in of_all.items() if not name.endswith(tuple(others))})

    def train(self, disks, kind, metrics, *more, until=""):
        """One rank on each host, 8 steps; the output of rank 0. With `until` the hosts die when it has said that."""
        data = self.work / "text.txt"
        data.write_text("".join(chr(97 + i * i % 23) for i in range(5000)), encoding="ascii")
        command = [TRAIN_GPT, *"--dim 40 --layers 2 --heads 4 --seq 31 --batch 7 --threads 1 --steps 8".split(),
                   "--data", str(data), "--sharding", "fsdp1", "--checkpointer", kind, "--save", self.seen,
                   "--save-every", "4", "--metrics", str(self.work / metrics), *more]
        with two_hosts(disks, self.seen) as hosts:
            ranks = [host.start(*command, env=environment(hosts, rank, 1)) for rank, host in enumerate(hosts)]
            if until:
                return next(line for line in ranks[0].stdout if until in line)
            said = [rank.communicate(timeout=PATIENCE) for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0, 0], said)
        return said[0][0]

    def test_a_training_goes_on_from_what_each_host_has(self):
        for number, kind in enumerate(("torch_legacy", "local")):
            disks = [self.directory(f"{kind}-{host}") for host in range(2)]
            steps = lambda: [sorted(os.listdir(disk)) for disk in disks]
            if number == 0:  # to the end, and then one host loses the newest checkpoint
                self.train(disks, kind, "whole.csv")
                shutil.rmtree(pathlib.Path(disks[1]) / "step8")
                expected = losses(self.work / "whole.csv")
            else:
                self.train(disks, kind, "killed.csv", until="saved " + self.seen + "/step4")
            said = self.train(disks, kind, kind + ".csv", "--resume", "latest", "--keep", "1")
            self.assertIn("/step4 after step 4", said)
            if number == 0:
                self.assertIn("step8 is damaged and passed over: incomplete: rank 1 on host-1: there is no such", said)
            self.assertEqual(losses(self.work / f"{kind}.csv"), {step: expected[step] for step in range(5, 9)})
            # Retention has removed step 4 on both hosts.
            self.assertEqual(steps(), [["step8"], ["step8"]])


if __name__ == "__main__":
    SAVE_AND_LOAD, TRAIN_GPT = map(os.path.abspath, sys.argv[1:3])
    if reason := obstacle():
        print(f"skipped: {reason}")
        sys.exit(SKIPPED)
    unittest.main(argv=sys.argv[:1])
